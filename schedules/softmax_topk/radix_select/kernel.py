"""The kernel of `radix_select`, in phases.

A phase is called with (io, row, t, s): the kernel's arguments, the thread block's row, the thread and its state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.arithmetic import LOG2_E
from ...device.selection import RADIX_BINS, key_index, key_value, make_key, radix_selection
from ...device.state import Buffers, local, shared
from ..elements import element, write_value, write_wanted
from ..ending import Ending, end_of_block, own_of
from ..interface import gpu_program


@dataclass
class State(Buffers):
    """What a thread block has in shared memory, and a thread in registers."""

    histogram: Any = shared("int32", RADIX_BINS)  # shared: elements by one digit of their keys
    found: Any = shared("int32", 4)  # shared: scratch of the selection
    count: Any = shared("int32")  # shared: keys collected
    group: Any = shared("float32", 32)  # shared: room for a reduction over the thread block
    group_sum: Any = shared("float32", 32)  # shared: for another one
    x: Any = local("float32")  # an element
    m: Any = local("float32")  # the largest of the thread's elements
    d: Any = local("float32")  # the sum of exponentials: the thread's part, then the row's
    top: Any = local("float32")  # the row's maximum
    factor: Any = local("float32")  # scale * log2(e)
    key: Any = local("uint64")  # a key
    other: Any = local("uint64")  # another one
    pivot: Any = local("uint64")  # the k-th largest key, or a smaller number that no other key reaches
    mask: Any = local("uint64")  # scratch of the selection
    need: Any = local("int32")  # scratch of the selection
    slot: Any = local("int32")  # a place for a key


def kernel(problem: SoftmaxTopk, threads: int, ending: Ending | None) -> Phase:
    """The kernel's body, over the operator's arguments (see `interface.gpu_program`)."""
    own = own_of(problem, ending) or (lambda io, row: io)
    vocab, k = problem.vocab, problem.k
    sum_up, select, collect = sum_row(vocab, threads), select_pivot(vocab, k, threads), collect_keys(vocab, threads)
    sort, write = merge_exchange(k, threads), write_keys(k, threads)
    write_given = write_wanted(vocab, problem.ids, threads)
    finish = end_of_block(ending) if ending else None
    searched = ending is not None and ending.search is not None

    # fmt: off
    @T.inline
    def body(io):
        T.device_entry()
        block = T.cta_id([io.batch])
        t = T.thread_id([threads])
        s = T.meta_var(State.alloc())
        if searched:
            pool = T.alloc_buffer([ending.pool_bytes // 8], "uint64", scope="shared.dyn")
        # Offsets into the logits pass 2^31.
        row: T.int64 = T.Cast("int64", block)
        of_row = T.meta_var(own(io, row))
        sum_up(of_row, row, t, s)
        select(of_row, row, t, s)
        collect(of_row, row, t, s)
        sort(of_row, row, t, s)
        write(of_row, row, t, s)
        if ending is not None:
            finish(of_row, row, t, pool.data if searched else None)
        if problem.ids > 0:
            write_given(of_row, row, t, s)
    # fmt: on

    return body


# fmt: off
@phase
def sum_row(vocab, threads, /, io, row, t, s):
    """A pass over the row for the maximum and the sum, which is corrected when the maximum rises.

    Reads: the row.
    Writes: `factor`, `x`, `m`, `top`, `d`.
    Barriers: those of two reductions.
    After: `top` is the row's maximum and `d` the sum of exp(scale * (element - top)) over it, in all threads.
    """
    s.factor[0] = io.scale * T.float32(LOG2_E)
    s.m[0] = T.min_value("float32")
    s.d[0] = T.float32(0)
    for i in T.serial((vocab - t + (threads - 1)) // threads):
        s.x[0] = element(io, row, i * threads + t)
        if s.x[0] > s.m[0]:
            s.d[0] = s.d[0] * T.exp2((s.m[0] - s.x[0]) * s.factor[0])
            s.m[0] = s.x[0]
        s.d[0] = s.d[0] + T.exp2((s.x[0] - s.m[0]) * s.factor[0])
    s.top[0] = T.cuda.cta_max(s.m[0], threads // 32, s.group.data)
    s.d[0] = T.cuda.cta_sum(s.d[0] * T.exp2((s.m[0] - s.top[0]) * s.factor[0]), threads // 32, s.group_sum.data)


def key_of(place: tuple[Any, Any], i: Any) -> tirx.PrimExpr:
    """The key of the element in column i; `place` is (the arguments, a row)."""
    return make_key(element(*place, i), i)


@phase
def select_pivot(vocab, k, threads, /, io, row, t, s):
    """The k-th largest key.

    Reads: the row.
    Writes: `pivot`, `histogram`, `found`, `mask`, `need`.
    Barriers: some each digit.
    After: k keys are no less than `pivot`.
    """
    radix_selection(threads, k, key_of, T.serial)(s, t, (io, row), vocab)


@phase
def collect_keys(vocab, threads, /, io, row, t, s):
    """The k largest keys, where the indices will be.

    Reads: the row, `pivot`.
    Writes: `indices`, `count`, `key`, `slot`.
    Barriers: one at the start, one at the end.
    After: the row of `indices` holds the k largest keys, in no order.
    """
    if t == 0:
        s.count[0] = 0
    T.cuda.cta_sync()
    for i in T.serial((vocab - t + (threads - 1)) // threads):
        s.key[0] = key_of((io, row), i * threads + t)
        if s.key[0] >= s.pivot[0]:
            s.slot[0] = T.cuda.atomic_add(s.count.ptr_to([0]), T.int32(1))
            io.indices[row, s.slot[0]] = T.Cast("int64", s.key[0])
    T.cuda.cta_sync()


@phase
def merge_exchange(k, threads, /, io, row, t, s):
    """Sort these keys, by Batcher's merge exchange.

    The comparators (i, i + distance) of one step touch no key twice.

    Reads, writes: `indices`; `key`, `other`. Barriers: one each step. After: the row's keys are in descending order.
    """
    half = T.meta_var(1 << max((k - 1).bit_length() - 1, 0))
    p: T.int32 = half
    while p > 0:
        q: T.int32 = half
        remainder: T.int32 = 0
        distance: T.int32 = p
        while distance > 0:
            for i in T.serial((k - t + (threads - 1)) // threads):
                if i * threads + t + distance < k:
                    if ((i * threads + t) & p) == remainder:
                        s.key[0] = T.Cast("uint64", io.indices[row, i * threads + t])
                        s.other[0] = T.Cast("uint64", io.indices[row, i * threads + t + distance])
                        if s.key[0] < s.other[0]:
                            io.indices[row, i * threads + t] = T.Cast("int64", s.other[0])
                            io.indices[row, i * threads + t + distance] = T.Cast("int64", s.key[0])
            T.cuda.cta_sync()
            distance = q - p
            q = q >> 1
            remainder = p
        p = p >> 1


@phase
def write_keys(k, threads, /, io, row, t, s):
    """Replace the keys by values and indices.

    Reads: keys in `indices`, `top`, `d`. Writes: `indices`, in the place of the keys; values. Barriers: none.
    """
    for i in T.serial((k - t + (threads - 1)) // threads):
        s.key[0] = T.Cast("uint64", io.indices[row, i * threads + t])
        io.indices[row, i * threads + t] = T.Cast("int64", key_index(s.key[0]))
        write_value(
            io.values, row, i * threads + t, (key_value(s.key[0]) - s.top[0]) * io.scale,
            T.float32(1) / s.d[0], T.log(s.d[0]), io.log)
# fmt: on


def program(problem: SoftmaxTopk, decisions: Decisions) -> Program:
    """The program of a point."""
    return gpu_program(problem, kernel(problem, decisions["threads"], None))
