"""A token of a row that no filter cuts, by thread blocks that do not wait for each other.

Each thread block sums its part of the row, warp by warp (`rows.sum`), writes the pairs (m, d) of its slices to global
memory, and takes a ticket of the row. The one with the last ticket finds all pairs there, and draws: it reads the slice
in which the uniform number's share of the sum is reached, and the one in which the maximum is, again from L2.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Workspace, ceildiv
from tvm_sparse.operators.softmax_sample.definition import clamped, limit_of

from ..device.arithmetic import LOG2_E
from ..device.overlap import wait_then_start_consumer
from ..device.selection import lanes_min
from ..rows import join
from ..rows.hold import locate
from ..rows.state import RowState
from ..softmax_topk.ending import argument_on_gpu, own_on_gpu
from . import cuts
from .blocks import Blocks
from .search.blocks import NONE, choose_slice, column_of, crew_of, take_word
from .search.crew import leave_all
from .space import RESIDENT_TICKETS
from .words import Drawing, read_filters, read_uniform


def workspaces(blocks: Blocks) -> tuple[Workspace, ...]:
    """Pairs of all slices of each row, and how many tickets of each row have been taken."""
    return (
        Workspace("pairs", ("batch", 2 * blocks.ext.parts), "float32", None),
        Workspace("taken", ("batch",), "int32"),
        *cuts.workspaces(blocks.cluster),
    )


def is_uncut(limit: Any, top_p: Any, min_p: Any, words: int) -> Any:
    """Whether a row's token is its best word, or drawn from all of its words."""
    return T.Or(limit == 1, T.And(T.And(limit == words, top_p >= T.float32(1)), T.Not(min_p > T.float32(0))))


def is_free(limit: Any, words: int) -> Any:
    """Whether a row is greedy, or has no top-k."""
    return T.Or(limit == 1, limit == words)


# fmt: off
@phase
def draw(blocks, write_first, /, io, row, t, s, r):
    """Draw a row's token from the sums of its slices, by the thread block with the last ticket."""
    crew, joined = T.meta_var(crew_of(blocks)), T.meta_var(join.join_pairs(blocks.ext))
    take = T.meta_var(take_word(blocks, crew))
    write_best = T.meta_var(write_best_word(blocks, crew))
    d = T.meta_var(Drawing.alloc(1))
    read_filters(io, row, d)
    read_uniform(io, row, d)
    d.top_k[0] = limit_of(d.temperature[0], d.top_k[0], blocks.problem.words)
    load_pairs(blocks)(io, row, t, s)
    joined(r, s)
    s.top[0] = r.top
    s.best[0] = -T.log(r.d)
    s.summed[0] = 0
    if r.d > T.float32(0) and r.d < T.infinity("float32"):
        if is_uncut(d.top_k[0], d.top_p[0], d.min_p[0], blocks.problem.words):
            cuts.show_row(io, row, t, cuts.DONE, r.top, r.d)
            if d.top_k[0] > 1:
                leave_all(s)
                choose_slice(blocks)(t, s, clamped(d.uniform[0]))
                take(io, row, t, s)
        else:
            # Nothing is listed.
            s.reached[0] = T.infinity("float32")
            s.reached[1] = -T.infinity("float32")
            if blocks.bins > 0:
                if d.top_p[0] < T.float32(1):
                    cuts.bracket(blocks)(io, row, t, s, d.top_p[0])
            cuts.show_row(io, row, t, cuts.SUM, r.top, r.d)
            cuts.show_bracket(io, row, t, s)
        write_best(io, row, t, s, d.top_k[0])
    else:
        cuts.show_row(io, row, t, cuts.DONE, r.top, r.d)
        write_first(io, row, t, s)


@phase
def of_row(blocks, sum_slice, count_slice, write_first, /, given, row, part, t):
    """Sum a slice of a row, and draw its token where it is the last to be summed.

    `sum_slice`: the phase that finds the pair of a lane's elements; `count_slice`: the one that also counts them, for
    rows that top-p cuts, with `blocks.bins`; `write_first`: see `slices`.
    """
    io = T.meta_var(own_on_gpu(given, row))
    r = RowState(blocks.ext, row, part * blocks.ext.slices + t // 32, t % 32)
    s = T.meta_var(cuts.state_of(blocks, io, r))
    s.factor[0] = io.scale * T.float32(LOG2_E)
    r.factor = s.factor[0]
    if blocks.bins == 0:
        sum_slice(io, row, t, s)
    elif not io.per_row:
        count_slice(io, row, t, s)
    else:
        if argument_on_gpu(io, "top_p", row) < T.float32(1):
            count_slice(io, row, t, s)
        else:
            sum_slice(io, row, t, s)
    join.join_warp(r)
    take_ticket(blocks)(io, row, t, s)
    if s.ties[0] == blocks.cluster - 1:
        draw(blocks, write_first)(io, row, t, s, r)


@phase
def kernel(blocks, of_row, /, io):
    """The kernel's body, over the arguments: `of_row` of each row that is greedy or has no top-k."""
    tickets = T.meta_var(blocks.cluster)
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": RESIDENT_TICKETS // blocks.threads})
    block = T.cta_id([io.batch * tickets])
    t = T.thread_id([blocks.threads])
    if blocks.overlap:
        wait_then_start_consumer()
    if io.per_row:
        filters = T.meta_var(Drawing.alloc(1))
        read_filters(io, T.Cast("int64", block // tickets), filters)
        if is_free(limit_of(filters.temperature[0], filters.top_k[0], blocks.problem.words), blocks.problem.words):
            of_row(io, T.Cast("int64", block // tickets), block % tickets, t)
        elif block % tickets == 0 and t == 0:
            io.stages[block // tickets, cuts.STAGE] = T.uint32(cuts.DONE)
    else:
        of_row(io, T.Cast("int64", block // tickets), block % tickets, t)


@phase
def take_ticket(blocks, /, io, row, t, s):
    """Show the pairs of the thread block's slices, and take a ticket of the row.

    Reads: (top, d) of the warps.
    Writes: their pairs, to global memory; `ties[0]`: how many tickets had been taken before, in every thread.
    Barriers: two.
    """
    if t % 32 == 0:
        io.pairs[row, s.r.part * 2] = s.r.top
        io.pairs[row, s.r.part * 2 + 1] = s.r.d
        # Before the ticket, for the thread block that takes the last one.
        T.cuda.thread_fence()
    T.cuda.cta_sync()
    if t == 0:
        s.ties[0] = T.cuda.atomic_add(io.taken.ptr_to([row]), T.int32(1))
    T.cuda.cta_sync()


@phase
def load_pairs(blocks, /, io, row, t, s):
    """Load the pairs of the row's slices, once all are written.

    Writes: `pair_m`, `pair_d`; the row's tickets, for the next call: none is taken. Barriers: one.
    """
    threads = T.meta_var(blocks.threads)
    T.cuda.thread_fence()
    for i in T.serial(ceildiv(blocks.ext.parts, threads)):
        if i * threads + t < blocks.ext.parts:
            # Not from the L1 cache, which may hold the line of a row before.
            T.ptx.ld.relaxed.gpu.global_.f32(
                s.pair_m[i * threads + t], io.pairs.ptr_to([row, (i * threads + t) * 2]))
            T.ptx.ld.relaxed.gpu.global_.f32(
                s.pair_d[i * threads + t], io.pairs.ptr_to([row, (i * threads + t) * 2 + 1]))
    if t == 0:
        io.taken[row] = 0
    T.cuda.cta_sync()


@phase
def write_best_word(blocks, crew, /, io, row, t, s, top_k):
    """The best word, the first of equals. All warps look through its slice.

    Reads: the pairs of all slices, `top`, `best`; the slice.
    Writes: the row's value and index, and its token if top_k is 1; `chosen`, `ties`, and scratch.
    Barriers: two; shuffles.
    """
    ext = T.meta_var(blocks.ext)
    slices = T.meta_var(ext.slices)
    each = T.meta_var(ceildiv(ext.parts, 32))
    found = T.alloc_local([1], "int32")
    s.chosen[0] = NONE
    for i in T.unroll(each):
        if t % 32 * each + i < ext.parts:
            # A slice of nothing above minus infinity has the lowest maximum, and no sum.
            if s.pair_m[t % 32 * each + i] == s.top[0] and s.pair_d[t % 32 * each + i] > T.float32(0):
                s.chosen[0] = T.min(s.chosen[0], t % 32 * each + i)
    s.chosen[0] = lanes_min(s.chosen[0])
    slice_ = RowState(ext, row, s.chosen[0], t % 32)
    locate(ext)(slice_, io.logits)
    q = T.meta_var(dataclasses.replace(s, r=slice_))
    found[0] = NONE
    for i in T.serial(ceildiv(crew.steps, slices), unroll=False):
        if i * slices + t // 32 < crew.steps:
            crew.load(io, row, t, q, i * slices + t // 32)
            for e in T.unroll(crew.elements):
                crew.take(io, q, e)
                if q.x[0] == s.top[0]:
                    found[0] = T.min(found[0], column_of(blocks)(q, e))
    found[0] = lanes_min(found[0])
    T.cuda.cta_sync()
    if t % 32 == 0:
        s.ties[t // 32] = found[0]
    T.cuda.cta_sync()
    if t < 32:
        found[0] = NONE
        if t < slices:
            found[0] = s.ties[t]
        found[0] = lanes_min(found[0])
        if t == 0:
            io.values[row, 0] = s.best[0]
            io.indices[row, 0] = T.Cast("int64", found[0])
            if top_k == 1:
                io.tokens[row] = found[0]
                io.logprobs[row] = s.best[0]
# fmt: on
