"""The kernel of `packed_insertion`, in phases.

A phase is called with (io, row, t, s): the kernel's arguments, the thread block's row, the thread and its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.arithmetic import LOG2_E
from ...device.selection import MINUS_INFINITY, bits_value, key_bits, key_index, key_value, make_key
from ...device.state import Buffers, local, shared
from ...softmax_topk.elements import element, write_value, write_wanted
from ...softmax_topk.interface import gpu_program


@dataclass
class State(Buffers):
    """What a thread block has in shared memory, and a thread in registers."""

    places: Any = shared("uint64", lambda k: k)  # shared: the k best, as keys in descending order
    peak: Any = shared("uint32")  # shared: bits of the row's maximum
    group: Any = shared("float32", 32)  # shared: room for a reduction over the thread block
    key: Any = local("uint64")  # the element that a thread takes along the places
    other: Any = local("uint64")  # the one that was there
    top: Any = local("float32")  # the row's maximum
    d: Any = local("float32")  # the sum of exponentials
    factor: Any = local("float32")  # scale * log2(e)


@phase
def kernel(problem, threads, skip, /, io):
    """The kernel's body, over the operator's arguments (see `interface.gpu_program`)."""
    # fmt: off
    T.device_entry()
    block = T.cta_id([io.batch])
    t = T.thread_id([threads])
    s = T.meta_var(State.alloc(problem.k))
    # Offsets into the logits pass 2^31.
    row: T.int64 = T.Cast("int64", block)
    s.factor[0] = io.scale * T.float32(LOG2_E)
    clear_places(problem.k, threads)(io, row, t, s)
    insert_all(problem.vocab, problem.k, threads, skip)(io, row, t, s)
    sum_exponentials(problem.vocab, threads)(io, row, t, s)
    write_places(problem.k, threads)(io, row, t, s)
    if problem.ids > 0:
        write_wanted(problem.vocab, problem.ids, threads)(io, row, t, s)


# fmt: off
@phase
def clear_places(k, threads, /, io, row, t, s):
    """Places for any elements.

    Writes: `places`, `peak`. Barriers: one, at the end. After: all places hold minus infinity.
    """
    for i in T.serial((k - t + (threads - 1)) // threads):
        s.places[i * threads + t] = T.Cast("uint64", T.uint32(MINUS_INFINITY)) << T.uint64(32)
    if t == 0:
        s.peak[0] = T.uint32(0)
    T.cuda.cta_sync()


@phase
def insert_all(vocab, k, threads, skip, /, io, row, t, s):
    """Every element down the places.

    Reads: the row. Writes: `places`, `peak`. Barriers: one, at the end. After: `places` has the k best in order.
    """
    for i in T.serial((vocab - t + (threads - 1)) // threads):
        s.key[0] = make_key(element(io, row, i * threads + t), i * threads + t)
        T.evaluate(T.call_extern("uint32", "atomicMax", s.peak.ptr_to([0]), key_bits(s.key[0])))
        if skip:
            T.ptx.ld.volatile.shared.u64(s.other[0], s.places.ptr_to([k - 1]))
        if not skip or s.key[0] > s.other[0]:
            for place in T.serial(k):
                T.ptx.atom.shared.max.u64(s.other[0], s.places.ptr_to([place]), s.key[0])
                if s.other[0] < s.key[0]:
                    s.key[0] = s.other[0]
    T.cuda.cta_sync()


@phase
def sum_exponentials(vocab, threads, /, io, row, t, s):
    """The sum of exponentials.

    Reads: the row, `peak`.
    Writes: `top`, `d`.
    Barriers: those of a reduction.
    After: `d` is the sum of exp(scale * (element - top)) over the row, in all threads.
    """
    s.top[0] = bits_value(s.peak[0])
    s.d[0] = T.float32(0)
    for i in T.serial((vocab - t + (threads - 1)) // threads):
        s.d[0] = s.d[0] + T.exp2((element(io, row, i * threads + t) - s.top[0]) * s.factor[0])
    s.d[0] = T.cuda.cta_sum(s.d[0], threads // 32, s.group.data)


@phase
def write_places(k, threads, /, io, row, t, s):
    """Places to values and indices.

    Reads: `places`, `top`, `d`. Writes: values and indices. Barriers: none.
    """
    for i in T.serial((k - t + (threads - 1)) // threads):
        s.key[0] = s.places[i * threads + t]
        io.indices[row, i * threads + t] = T.Cast("int64", key_index(s.key[0]))
        write_value(
            io.values, row, i * threads + t, (key_value(s.key[0]) - s.top[0]) * io.scale,
            T.float32(1) / s.d[0], T.log(s.d[0]), io.log)
# fmt: on


def program(problem: SoftmaxTopk, decisions: Decisions) -> Program:
    """The program of a point."""
    return gpu_program(problem, kernel(problem, decisions["threads"], bool(decisions["skip"])))
