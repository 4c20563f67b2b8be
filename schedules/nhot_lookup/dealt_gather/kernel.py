"""The kernel of `dealt_gather`, in phases. What they do together, and why, is told in the package's docstring.

A slot is the place of a vector among those of its thread block; a group has a thread for each slot, and a share of the
entries of each slot's row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Program, ceildiv
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

from ...device.overlap import start_consumer, wait_for_producer, wait_then_start_consumer
from ...device.state import Buffers, local, scalar, shared
from ...device.words import PTX_INDEX, load_element, load_words, value_at
from ...interface import gpu_program
from .space import Extents

Phase = Callable[..., Any]


@dataclass
class Place(Buffers):
    """Which vector of the output a thread works for, and with which share of its row's entries: registers."""

    first: Any = scalar("int64")  # the first vector of the output that the thread block has
    have: Any = scalar()  # how many vectors the thread block has
    slot: Any = scalar()
    group: Any = scalar()
    row: Any = scalar("int64")
    column: Any = scalar()  # of the vector's first element


@dataclass
class State(Buffers):
    """What the phases share: registers of a thread, and in shared memory what the groups have of each sum."""

    parts: Any = shared("float32", lambda e: e.partial_sums)  # (groups, quads, pitch, wide), shared
    # One element per load.
    id: Any = local(lambda e: e.index, lambda e: e.loads)
    weight: Any = local("float32", lambda e: e.loads)
    raw: Any = local("uint32", lambda e: e.loads * e.words)  # table rows, as words
    # values that were loaded several at a time, as words
    raw_values: Any = local("uint32", lambda e: e.loads // e.ids_together * e.value_words)
    small: Any = local("uint16")  # a load of 2 bytes
    # The row's entries are those from `ends[0]` to before `ends[1]`; `next` is the first that the thread adds next.
    ends: Any = local(lambda e: e.index, 2)
    next: Any = scalar(lambda e: e.index)
    count: Any = scalar()  # entries of these loads
    done: Any = scalar()  # shares of `loads` entries that are added already
    term: Any = scalar("float32")
    acc: Any = local("float32", lambda e: e.vec)  # the thread's sums
    total: Any = local("float32", lambda e: e.summed_together)  # sums over the groups
    result: Any = local(lambda e: e.dtype, lambda e: e.summed_together)  # what is stored, in the output's dtype


# fmt: off
@phase
def kernel_body(e, /, io):
    """The kernel, as the body of `interface.gpu_program`."""
    # Computed on the host. `each`: entries of a row if all have as many. The grid grows with the rows, so that a
    # thread block gets no more units (`share`, or one more) than at the number of rows that the point was chosen
    # for.
    each: T.let = T.Cast("int32", io.nnz // io.rows)
    grid: T.let = T.Cast("int32", (io.rows * e.blocks + (e.rows - 1)) // e.rows)
    share: T.let = T.Cast("int32", io.rows * e.row_units // T.Cast("int64", grid))
    more: T.let = T.Cast("int32", io.rows * e.row_units % T.Cast("int64", grid))
    T.device_entry()
    if e.overlap == 2:
        start_consumer()
    block = T.cta_id([grid])
    t = T.thread_id([e.threads])
    s = T.meta_var(State.alloc(e))
    at = T.meta_var(Place.alloc())
    deal_out(e)(at, block, share, more, t)
    for v in T.unroll(e.vec):
        s.acc[v] = T.float32(0)

    if e.overlap == 1:
        wait_then_start_consumer()
    if e.overlap == 2:
        wait_for_producer()
    if at.slot < at.have and (not e.spare_threads or at.group < e.groups):
        s.done = 0
        if each == e.nonzeros:
            gather_where_guessed(e)(s, io, at)
        else:
            load_row_ends(e)(s, io, at)
        gather_entries(e)(s, io, at)
    leave_partial_sums(e)(s, at)
    T.cuda.cta_sync()
    sum_groups_and_store(e)(s, io, at, t)


# ---- parts of phases -------------------------------------------------------------------------------


@phase
def load_guessed_entries(e, /, s, io, begin, group):
    """Ids and values of the thread's share of a row that has `nonzeros` entries from `begin` on, several with a load.

    Where shares are uneven, the last group loads its last id again instead of ids beyond the row.
    """
    together, kind = T.meta_var(e.ids_together), T.meta_var(PTX_INDEX[e.index])
    size = T.meta_var(numpy_dtype(e.value).itemsize)
    read = T.meta_var(getattr(T.ptx.ld.global_ if together == 1 else getattr(T.ptx.ld.global_, f"v{together}"), kind))
    for u in T.unroll(e.loads // together):
        place = group * e.loads + u * together
        at = begin + T.Cast(e.index, place if e.even_loads else T.min(place, e.nonzeros - together))
        read(*[s.id[u * together + v] for v in range(together)], io.indices.ptr_to([at]))
        if e.weighted:
            load_words(together * size, s.raw_values, u * e.value_words, s.small, io.values.ptr_to([at]))


@phase
def load_rows(e, /, s, io, column):
    """Begin the loads of the table rows of all ids."""
    for u in T.unroll(e.loads):
        load_words(
            e.vec * e.itemsize, s.raw, u * e.words, s.small, io.table.ptr_to([T.Cast("int64", s.id[u]), column]))


@phase
def add_rows(e, /, s, every):
    """Add the loaded rows, weighted, to `acc`: all of them, or the first `count`."""
    for u in T.unroll(e.loads):
        if every or u < s.count:
            for v in T.unroll(e.vec):
                s.term = value_at(e.dtype, s.raw, u * e.words, v)
                if e.weighted:
                    s.term = s.weight[u] * s.term
                s.acc[v] = s.acc[v] + s.term


# ---- phases ----------------------------------------------------------------------------------------


@phase
def deal_out(e, /, at, block, share, more, t):
    """The vectors of a thread block, and the one of this thread.

    Each thread block has `share` units, and the first `more` of them one unit more.

    Reads: nothing. Writes: all of `Place`. Barriers: none.
    After: slots from `have` on, and groups from `groups` on, have no vector; their `row` may be none of the output's.
    """
    at.first = (T.Cast("int64", block) * T.Cast("int64", share) + T.Cast("int64", T.min(block, more))) * e.unit
    at.have = (share + T.Cast("int32", block < more)) * e.unit
    at.slot = t % e.slots
    at.group = t // e.slots
    local: T.int32 = T.Cast("int32", at.first % e.row_vectors) + at.slot  # vectors from where the first row begins
    at.row = at.first // e.row_vectors + T.Cast("int64", local // e.row_vectors)
    at.column = local % e.row_vectors * e.vec


@phase
def load_row_ends(e, /, s, io, at):
    """Where the row's entries begin and end.

    Reads: `indptr`. Writes: `ends`. Barriers: none.
    """
    read = T.meta_var(getattr(T.ptx.ld.global_, PTX_INDEX[e.index]))
    read(s.ends[0], io.indptr.ptr_to([at.row]))
    read(s.ends[1], io.indptr.ptr_to([at.row + 1]))


@phase
def gather_where_guessed(e, /, s, io, at):
    """Add the thread's share of a row that begins where it does if all rows have `nonzeros` entries.

    The table rows are loaded before the row's ends have come, which tell whether the ids are the row's own.

    Reads: `indices` and `values` where the row is guessed to be, `indptr`, the table.
    Writes: `ends`; if the guess was right `acc` and `done`. Barriers: none.
    After: `done` is 1 and the thread's first share is in `acc`, or `done` and `acc` are as they were.
    """
    begin: T.let = T.Cast(e.index, at.row * e.nonzeros)
    load_guessed_entries(e)(s, io, begin, at.group)
    load_row_ends(e)(s, io, at)
    load_rows(e)(s, io, at.column)
    if (s.ends[0] ^ begin) | (s.ends[1] ^ (begin + T.Cast(e.index, e.nonzeros))) == T.Cast(e.index, 0):
        if e.weighted:
            for u in T.unroll(e.loads):
                s.weight[u] = value_at(
                    e.value, s.raw_values, u // e.ids_together * e.value_words, u % e.ids_together)
        s.count = e.nonzeros - at.group * e.loads
        add_rows(e)(s, e.even_loads)
        s.done = 1


@phase
def load_entry(e, /, s, io, u, entry):
    """Load the id and the weight of an entry, the u-th in hand."""
    getattr(T.ptx.ld.global_, PTX_INDEX[e.index])(s.id[u], io.indices.ptr_to([entry]))
    if e.weighted:
        s.weight[u] = load_element(e.value, io.values.ptr_to([entry]))


@phase
def gather_entries(e, /, s, io, at):
    """Add the thread's shares of the row that are not added yet, entry by entry of the row as it is.

    The groups take shares of `loads` entries in turn.

    Reads: `ends`, `done`, `indices`, `values`, the table. Writes: `acc`. Barriers: none.
    After: `acc` has the vector's sums over the entries of the thread's group.
    """
    s.next = s.ends[0] + T.Cast(e.index, (s.done * e.groups + at.group) * e.loads)
    while s.next < s.ends[1]:
        for u in T.unroll(e.loads):
            # Where there are fewer, the last one is loaded again: a branch would delay the loads.
            load_entry(e)(s, io, u, T.min(s.next + T.Cast(e.index, u), s.ends[1] - T.Cast(e.index, 1)))
        load_rows(e)(s, io, at.column)
        s.count = T.Cast("int32", T.min(s.ends[1] - s.next, T.Cast(e.index, e.loads)))
        add_rows(e)(s, False)
        s.next = s.next + T.Cast(e.index, e.groups * e.loads)


@phase
def leave_partial_sums(e, /, s, at):
    """Put the thread's sums where all threads find them.

    Reads: `acc`. Writes: `parts`. Barriers: none; one of the thread block has to follow.
    """
    if not e.spare_threads or at.group < e.groups:
        for q in T.unroll(e.quads):
            for v in T.vectorized(e.wide):
                s.parts[((at.group * e.quads + q) * e.pitch + at.slot) * e.wide + v] = s.acc[q * e.wide + v]


@phase
def sum_groups_and_store(e, /, s, io, at, t):
    """Add what the groups have, in their order, and store it: the thread block's elements divided among all threads.

    Reads: `parts`. Writes: the output, `total`, `result`. Barriers: none.
    After: the thread block's `have` vectors are stored. All sums are the same in every run.
    """
    together = T.meta_var(e.summed_together)
    flat = T.decl_buffer((io.rows * e.width,), e.dtype, data=io.out.data)
    for i in T.unroll(ceildiv(e.slots * e.vec // together, e.threads)):
        item: T.let = (i * e.threads + t) * together  # the first of these elements of the thread block
        if item < at.have * e.vec:
            for v in T.unroll(together):
                s.total[v] = T.float32(0)
            for g in T.unroll(e.groups):
                for v in T.unroll(together):
                    s.total[v] = s.total[v] + s.parts[
                        ((g * e.quads + item % e.vec // e.wide) * e.pitch + item // e.vec) * e.wide
                        + item % e.wide + v]
            for v in T.unroll(together):
                s.result[v] = T.Cast(e.dtype, s.total[v])
            for v in T.vectorized(together):
                flat[at.first * e.vec + T.Cast("int64", item) + v] = s.result[v]
# fmt: on


def program(problem: NhotLookup, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)
    return gpu_program(problem, kernel_body(e), overlapped=e.overlap > 0, index="int64")
