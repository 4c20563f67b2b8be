"""Softmax + top-k on a GPU for every k: a block a row, the k-th key found by radix passes over the row itself.

The fallback. Nothing is kept but a histogram, so neither vocab nor k is bounded by shared memory: the row is read
once for the sum, once a digit (from L2, and rarely more than five times, because the search ends when a digit takes
all of its bin) and once to collect. The keys of the k are collected in the indices' own output and sorted there by
Batcher's merge exchange (Knuth, The Art of Computer Programming 3, 5.2.2, Algorithm M), whose comparators all point
one way, so that k need not be a power of two.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, Program, Table, Template

THREADS = (256, 512, 1024)


def space(problem: Problem, machine: Machine) -> Table:
    return {"threads": THREADS}


def default(problem: Problem, machine: Machine) -> Decisions:
    return {"threads": 512}


def build(problem: Problem, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device.arithmetic import LOG2_E
    from ..device.selection import RADIX_BINS, device_functions, key_index, key_value, make_key
    from .elements import element, write_given, write_value
    from .interface import gpu_program

    vocab, k, n = problem.vocab, problem.k, problem.ids
    threads = decisions["threads"]
    lowest = T.min_value("float32")
    select_pivot = device_functions(threads, k).select_pivot

    def key_of(io, _, row, i):
        return make_key(element(io, row, i), i)

    # Merge exchange: half of k rounded up to a power of two.
    half = 1 << max((k - 1).bit_length() - 1, 0)

    # fmt: off
    @T.inline
    def body(io):
        T.device_entry()
        block = T.cta_id([io.batch])
        t = T.thread_id([threads])
        histogram = T.alloc_shared([RADIX_BINS], "int32")
        found = T.alloc_shared([4], "int32")
        count = T.alloc_shared([1], "int32")
        group = T.alloc_shared([32], "float32")
        group_sum = T.alloc_shared([32], "float32")
        x = T.alloc_local([1], "float32")
        m = T.alloc_local([1], "float32")
        d = T.alloc_local([1], "float32")
        top = T.alloc_local([1], "float32")
        factor = T.alloc_local([1], "float32")
        key = T.alloc_local([1], "uint64")
        other = T.alloc_local([1], "uint64")
        pivot = T.alloc_local([1], "uint64")
        mask = T.alloc_local([1], "uint64")
        need = T.alloc_local([1], "int32")
        slot = T.alloc_local([1], "int32")
        # Offsets into the logits pass 2^31.
        row: T.int64 = T.Cast("int64", block)

        factor[0] = io.scale * T.float32(LOG2_E)

        # the maximum and the sum
        m[0] = lowest
        d[0] = T.float32(0)
        for i in T.serial((vocab - t + (threads - 1)) // threads):
            x[0] = element(io, row, i * threads + t)
            if x[0] > m[0]:
                d[0] = d[0] * T.exp2((m[0] - x[0]) * factor[0])
                m[0] = x[0]
            d[0] = d[0] + T.exp2((x[0] - m[0]) * factor[0])
        top[0] = T.cuda.cta_max(m[0], threads // 32, group.data)
        d[0] = T.cuda.cta_sum(d[0] * T.exp2((m[0] - top[0]) * factor[0]), threads // 32, group_sum.data)

        select_pivot(t, key_of, io, None, row, vocab, histogram, found, pivot, mask, need)
        if t == 0:
            count[0] = 0
        T.cuda.cta_sync()

        # the keys of the k, in no order
        for i in T.serial((vocab - t + (threads - 1)) // threads):
            key[0] = key_of(io, None, row, i * threads + t)
            if key[0] >= pivot[0]:
                slot[0] = T.cuda.atomic_add(count.ptr_to([0]), T.int32(1))
                io.indices[row, slot[0]] = T.Cast("int64", key[0])
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
                            key[0] = T.Cast("uint64", io.indices[row, i * threads + t])
                            other[0] = T.Cast("uint64", io.indices[row, i * threads + t + distance])
                            if key[0] < other[0]:
                                io.indices[row, i * threads + t] = T.Cast("int64", other[0])
                                io.indices[row, i * threads + t + distance] = T.Cast("int64", key[0])
                T.cuda.cta_sync()
                distance = q - p
                q = q >> 1
                remainder = p
            p = p >> 1

        for i in T.serial((k - t + (threads - 1)) // threads):
            key[0] = T.Cast("uint64", io.indices[row, i * threads + t])
            io.indices[row, i * threads + t] = T.Cast("int64", key_index(key[0]))
            write_value(io.values, row, i * threads + t, (key_value(key[0]) - top[0]) * io.scale,
                        T.float32(1) / d[0], T.log(d[0]), io.log)
        if n > 0:
            for i in T.serial((n - t + (threads - 1)) // threads):
                write_given(
                    io.given, row, i * threads + t, io.ids[row, i * threads + t], vocab,
                    (element(io, row, io.ids[row, i * threads + t]) - top[0]) * io.scale,
                    T.float32(1) / d[0], T.log(d[0]), io.log)
    # fmt: on
    return gpu_program(problem, body)


radix_select = Template(
    name="radix_select",
    version=2,
    operator="softmax_topk",
    kind="cuda",
    summary="a block a row, radix passes over the row, any k",
    space=space,
    default=default,
    program=build,
    explicit_threads=True,
)
