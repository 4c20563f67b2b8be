"""Softmax + top-k on a GPU by Argueta & Chiang's Algorithm 4, for comparison: every element is sent down the k best.

The k best of a row lie in its block's shared memory, value and index packed into a word of 64 bits. A thread takes an
element along all k places: an atomicMax leaves the larger word there and gives the smaller one to take on to the next.
No word is lost and none of a place's ever gets smaller, so that all threads may do this at once, and in the end place n
has the n-th largest. That is k atomic operations an element, all of a warp's on one address.

As published but for what keys and results ask for: a word has the value's bits made to order as unsigned integers (the
paper's pack orders non-negative ones), above the complement of the index, so that ties go to the lower one and NaN
comes first; the maximum is an atomicMax of the same bits, as there is none of floats; the sum is reduced by shuffles,
not by atomics, so that it is the same in every run; and exponentials are taken of differences from the maximum, as the
paper's line 20 means.

`skip`: pass over an element that is below the last place, which is read without an atomic. As places only grow, this
loses nothing; the paper does not have it.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, powers

THREADS = powers(256, 1024)
# The paper goes to 400.
MAX_K = 1024


def space(problem: Problem, machine: Machine) -> Table:
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: every element is compared with k others")
    return {"threads": THREADS, "skip": (0, 1)}


def default(problem: Problem, machine: Machine) -> Decisions:
    """The paper's."""
    return {"threads": 256, "skip": 0}


def build(problem: Problem, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device.arithmetic import LOG2_E
    from ..device.selection import MINUS_INFINITY, bits_value, key_bits, key_index, key_value, make_key
    from .elements import element, write_given, write_value
    from .interface import gpu_program

    vocab, k, n = problem.vocab, problem.k, problem.ids
    threads, skip = decisions["threads"], bool(decisions["skip"])

    # fmt: off
    @T.inline
    def body(io):
        T.device_entry()
        block = T.cta_id([io.batch])
        t = T.thread_id([threads])
        places = T.alloc_shared([k], "uint64")
        peak = T.alloc_shared([1], "uint32")
        group = T.alloc_shared([32], "float32")
        key = T.alloc_local([1], "uint64")
        other = T.alloc_local([1], "uint64")
        m = T.alloc_local([1], "float32")
        d = T.alloc_local([1], "float32")
        factor = T.alloc_local([1], "float32")
        # Offsets into the logits pass 2^31.
        row: T.int64 = T.Cast("int64", block)
        factor[0] = io.scale * T.float32(LOG2_E)
        for i in T.serial((k - t + (threads - 1)) // threads):
            places[i * threads + t] = T.Cast("uint64", T.uint32(MINUS_INFINITY)) << T.uint64(32)
        if t == 0:
            peak[0] = T.uint32(0)
        T.cuda.cta_sync()

        for i in T.serial((vocab - t + (threads - 1)) // threads):
            key[0] = make_key(element(io, row, i * threads + t), i * threads + t)
            T.evaluate(T.call_extern("uint32", "atomicMax", peak.ptr_to([0]), key_bits(key[0])))
            if skip:
                T.ptx.ld.volatile.shared.u64(other[0], places.ptr_to([k - 1]))
            if not skip or key[0] > other[0]:
                for place in T.serial(k):
                    T.ptx.atom.shared.max.u64(other[0], places.ptr_to([place]), key[0])
                    if other[0] < key[0]:
                        key[0] = other[0]
        T.cuda.cta_sync()

        m[0] = bits_value(peak[0])
        d[0] = T.float32(0)
        for i in T.serial((vocab - t + (threads - 1)) // threads):
            d[0] = d[0] + T.exp2((element(io, row, i * threads + t) - m[0]) * factor[0])
        d[0] = T.cuda.cta_sum(d[0], threads // 32, group.data)

        for i in T.serial((k - t + (threads - 1)) // threads):
            key[0] = places[i * threads + t]
            io.indices[row, i * threads + t] = T.Cast("int64", key_index(key[0]))
            write_value(io.values, row, i * threads + t, (key_value(key[0]) - m[0]) * io.scale,
                        T.float32(1) / d[0], T.log(d[0]), io.log)
        if n > 0:
            for i in T.serial((n - t + (threads - 1)) // threads):
                write_given(
                    io.given, row, i * threads + t, io.ids[row, i * threads + t], vocab,
                    (element(io, row, io.ids[row, i * threads + t]) - m[0]) * io.scale,
                    T.float32(1) / d[0], T.log(d[0]), io.log)
    # fmt: on
    return gpu_program(problem, body)


packed_insertion = Template(
    name="packed_insertion",
    version=1,
    operator="softmax_topk",
    kind="cuda",
    summary="for comparison: every element down the k best by atomicMax of packed words in shared memory",
    space=space,
    default=default,
    program=build,
    explicit_threads=True,
    comparison=True,
)
