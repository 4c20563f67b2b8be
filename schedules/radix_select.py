"""Softmax + top-k on a GPU for every k: a block a row, the k-th key found by radix passes over the row itself.

The fallback. Nothing is kept but a histogram, so neither vocab nor k is bounded by shared memory: the row is read
once for the sum, once a digit (from L2, and rarely more than five times, because the search ends when a digit takes
all of its bin) and once to collect. The keys of the k are collected in the indices' own output and sorted there by
Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, Algorithm M), whose comparators all point
one way, so that k need not be a power of two.
"""

from __future__ import annotations

from tvm_sparse.machine import Machine
from tvm_sparse.operators.problem import Problem

from .template import Decisions, Program, Table, Template

THREADS = (256, 512, 1024)


def space(problem: Problem, machine: Machine) -> Table:
    return {"threads": THREADS}


def default(problem: Problem, machine: Machine) -> Decisions:
    return {"threads": 512}


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from .arithmetic import LOG2_E
    from .selection import BINS, RADIX_BITS, bits_value, device_functions, key_bits, key_index, make_key

    vocab, k, dtype = problem.vocab, problem.k, problem.dtype
    threads = decisions["threads"]
    lowest = T.min_value("float32")
    block_merge, find_digit, *_ = device_functions(threads, k)
    # Merge exchange: half of k rounded up to a power of two.
    half = 1 << max((k - 1).bit_length() - 1, 0)

    # fmt: off
    @T.prim_func
    def main(logits_h: T.handle, log: T.int32, values_h: T.handle, indices_h: T.handle):
        batch = T.int32()
        X = T.match_buffer(logits_h, (batch, vocab), dtype)
        V = T.match_buffer(values_h, (batch, k), "float32")
        Z = T.match_buffer(indices_h, (batch, k), "int64")
        T.device_entry()
        block = T.cta_id([batch])
        t = T.thread_id([threads])
        histogram = T.alloc_shared([BINS], "int32")
        found = T.alloc_shared([4], "int32")
        count = T.alloc_shared([1], "int32")
        group = T.alloc_shared([32], "float32")
        group_sum = T.alloc_shared([32], "float32")
        x = T.alloc_local([1], "float32")
        m = T.alloc_local([1], "float32")
        d = T.alloc_local([1], "float32")
        top = T.alloc_local([1], "float32")
        key = T.alloc_local([1], "uint64")
        other = T.alloc_local([1], "uint64")
        pivot = T.alloc_local([1], "uint64")
        mask = T.alloc_local([1], "uint64")
        need = T.alloc_local([1], "int32")
        slot = T.alloc_local([1], "int32")
        # Offsets into the logits pass 2^31.
        row: T.int64 = T.Cast("int64", block)

        # the maximum and the sum
        m[0] = lowest
        d[0] = T.float32(0)
        for i in T.serial((vocab - t + (threads - 1)) // threads):
            x[0] = T.Cast("float32", X[row, i * threads + t])
            if x[0] > m[0]:
                d[0] = d[0] * T.exp2((m[0] - x[0]) * T.float32(LOG2_E))
                m[0] = x[0]
            d[0] = d[0] + T.exp2((x[0] - m[0]) * T.float32(LOG2_E))
        block_merge(t, m, d, top, group, group_sum)

        # the k-th key, digit by digit
        pivot[0] = T.uint64(0)
        mask[0] = T.uint64(0)
        need[0] = k
        if t == 0:
            count[0] = 0
        for digit in T.serial(64 // RADIX_BITS):
            for i in T.serial((BINS - 1 - t + threads) // threads):
                histogram[i * threads + t] = 0
            T.cuda.cta_sync()
            for i in T.serial((vocab - t + (threads - 1)) // threads):
                key[0] = make_key(T.Cast("float32", X[row, i * threads + t]), i * threads + t)
                if (key[0] ^ pivot[0]) & mask[0] == T.uint64(0):
                    T.evaluate(T.cuda.atomic_add(
                        histogram.ptr_to([T.Cast("int32",
                            (key[0] >> T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS)) & T.uint64(BINS - 1))]),
                        T.int32(1)))
            T.cuda.cta_sync()
            find_digit(t, histogram, found, need)
            T.cuda.cta_sync()
            pivot[0] = pivot[0] | (
                T.Cast("uint64", found[0]) << T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
            mask[0] = mask[0] | (T.uint64(BINS - 1) << T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
            need[0] = found[1]
            if found[1] == found[2]:
                break

        # the keys of the k, in no order
        for i in T.serial((vocab - t + (threads - 1)) // threads):
            key[0] = make_key(T.Cast("float32", X[row, i * threads + t]), i * threads + t)
            if key[0] >= pivot[0]:
                slot[0] = T.cuda.atomic_add(count.ptr_to([0]), T.int32(1))
                Z[row, slot[0]] = T.Cast("int64", key[0])
        T.cuda.cta_sync()

        # merge exchange: comparators (i, i + distance) of one step touch no element twice
        p: T.int32 = half
        while p > 0:
            q: T.int32 = half
            remainder: T.int32 = 0
            distance: T.int32 = p
            while distance > 0:
                for i in T.serial((k - t + (threads - 1)) // threads):
                    if i * threads + t + distance < k:
                        if ((i * threads + t) & p) == remainder:
                            key[0] = T.Cast("uint64", Z[row, i * threads + t])
                            other[0] = T.Cast("uint64", Z[row, i * threads + t + distance])
                            if key[0] < other[0]:
                                Z[row, i * threads + t] = T.Cast("int64", other[0])
                                Z[row, i * threads + t + distance] = T.Cast("int64", key[0])
                T.cuda.cta_sync()
                distance = q - p
                q = q >> 1
                remainder = p
            p = p >> 1

        for i in T.serial((k - t + (threads - 1)) // threads):
            key[0] = T.Cast("uint64", Z[row, i * threads + t])
            Z[row, i * threads + t] = T.Cast("int64", key_index(key[0]))
            x[0] = bits_value(key_bits(key[0])) - top[0]
            if log != 0:
                V[row, i * threads + t] = x[0] - T.log(d[0])
            else:
                V[row, i * threads + t] = T.exp(x[0]) / d[0]
    # fmt: on
    return Program(tvm.IRModule({"main": main.with_attr("global_symbol", "main")}), pipeline="tirx")


radix_select = Template(
    name="radix_select",
    version=1,
    operator="softmax_topk",
    kind="cuda",
    summary="a block a row, radix passes over the row, any k",
    space=space,
    default=default,
    build=build,
    explicit_threads=True,
)
