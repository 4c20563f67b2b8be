"""A token of each row by sums of slices: one read of the row without filters, two with min_p.

Each warp of the thread blocks that have a row owns a slice of its columns (`rows.cut`). Then

1. every warp finds the pair (m, d) of its slice (`rows.sum`), and the pairs are joined (`rows.join`): every warp knows
   the row's maximum and the sum of its exponentials, and those of every slice;
2. without filters the slice in which the uniform number's share of the sum is reached is known, too: the warps of its
   thread block read it again, and one finds the word. For min_p alone, slices are summed anew, of the words that are
   left; for top_p, or a top_k of more than one word, the row is searched before that (`search`);
3. the warp in whose slice the maximum is finds its column, by the tiles that have raised its lanes' own.

With `staged` the row stays in the shared memory of its thread blocks; else it is read again, as a rule from L2.

With `tickets` that is the last resort: rows without a top-k are drawn by kernels whose thread blocks do not wait for
each other (`tickets`, `cuts`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program, ceildiv
from tvm_sparse.operators.softmax_sample.definition import clamped, limit_of
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ..device.arithmetic import LOG2_E
from ..device.cluster import cluster_arrive, cluster_barrier
from ..device.overlap import wait_then_start_consumer
from ..device.region import device_region
from ..device.selection import lanes_max, lanes_min, order_bits
from ..rows import hold, join
from ..rows import sum as sums
from ..rows.state import RowState, Views
from ..softmax_topk.elements import written_element
from ..softmax_topk.ending import own_on_gpu
from . import cuts, tickets
from .interface import gpu_program
from .search.blocks import (
    NONE,
    Blocks,
    begin_search,
    bound_least,
    choose_slice,
    column_of,
    crew_of,
    search_state,
    sum_slices,
    take_word,
)
from .search.crew import draw_by_search, leave_all
from .space import RESIDENT, blocks_of, ticketed
from .words import Drawing, read_filters, read_uniform


def build(problem: SoftmaxSample, decisions: Decisions) -> Program:
    blocks = blocks_of(problem, decisions)
    if not decisions["tickets"]:
        return gpu_program(problem, alone(blocks))
    singles = ticketed(problem, decisions)
    overlap = bool(decisions["overlap"])
    body = beside_tickets(blocks, singles, overlap)
    return gpu_program(problem, body, tickets.workspaces(singles), overlapped=overlap)


# fmt: off
@phase
def alone(blocks, /, io):
    """The body of a program of one kernel, for all rows."""
    T.device_entry()
    main(blocks)(io)


def beside_tickets(blocks: Blocks, singles: Blocks, overlap: bool) -> Phase:
    """The body of a program of several kernels: a row with a top-k is searched, and others only as a last resort.

    Where filters are numbers for all rows, kernels that they do not need are not launched.
    """
    words = blocks.problem.words
    of_others = main(blocks, last=True, overlap=overlap)
    singles = dataclasses.replace(singles, overlap=overlap)
    draw = cuts.draw_left(singles.listing)

    def of_all(blocks: Blocks) -> Phase:
        crew = crew_of(blocks)
        count = cuts.count_slice(blocks, crew, absorb_adjusted(crew))
        return tickets.kernel(
            blocks, tickets.of_row(blocks, sum_of_slice(blocks, crew), count, write_first_word(blocks)))

    of_uncut, of_counted = of_all(singles), of_all(singles.counting)

    def is_free(io: Any) -> Any:
        return tickets.is_free(limit_of(io.temperature, io.top_k, words), words)

    def is_cut(io: Any) -> Any:
        return T.Not(tickets.is_uncut(limit_of(io.temperature, io.top_k, words), io.top_p, io.min_p, words))

    @T.inline
    def body(io):
        if io.per_row:
            with device_region():
                of_counted(io)
            with device_region():
                draw(io)
            with device_region():
                of_others(io)
        else:
            if is_free(io):
                if T.And(is_cut(io), io.top_p < T.float32(1)):
                    with device_region():
                        of_counted(io)
                else:
                    with device_region():
                        of_uncut(io)
                if is_cut(io):
                    with device_region():
                        draw(io)
            if T.Or(T.Not(is_free(io)), T.And(is_cut(io), io.top_p < T.float32(1))):
                with device_region():
                    of_others(io)

    return body


@phase
def sum_of_slice(blocks, crew, /, io, row, t, s):
    """The pair (m, d) of a lane's elements.

    Reads: the row.
    Writes: `r.m`, `r.d`, `r.top_tile`, where the slice lies (`hold.locate`), and `stage` if the row is kept there.
    Barriers: none.
    """
    ext = T.meta_var(blocks.ext)
    hold.locate(ext)(s.r, io.logits)
    if blocks.adjusted:
        sum_adjusted(blocks, crew)(io, row, t, s)
    else:
        sums.begin_pair(ext)(s.r)
        sums.accumulate(ext)(s.r, s.words, s, 0)
        sums.add_edge(ext)(s.r)


def main(blocks: Blocks, last: bool = False, overlap: bool = False) -> Phase:
    """The body of a kernel: its threads, the state, and the row's phases.

    `last`: for rows that have a top-k, and those in the stage `SEARCH`. `overlap`: it may start while the kernel
    before it runs.
    """
    ext, cluster, threads, words = blocks.ext, blocks.cluster, blocks.threads, blocks.problem.words
    crew = crew_of(blocks)
    sum_slice = sum_of_slice(blocks, crew)
    join_warp, join_block, join_cluster = join.join_warp, join.join_block(ext), join.join_cluster(ext)
    write_best, write_first = write_best_word(blocks, crew), write_first_word(blocks)
    begin, search = begin_search(blocks), draw_by_search(crew, blocks.problem)
    summed, choose, take = sum_slices(blocks, crew), choose_slice(blocks), take_word(blocks, crew)

    @T.inline
    def of_row(given, row, part, t):
        io = T.meta_var(own_on_gpu(given, row))
        d = T.meta_var(Drawing.alloc(1))
        pool = T.alloc_buffer([blocks.bytes // 8], "uint64", scope="shared.dyn")
        views = Views(ext, io)
        r = RowState(ext, row, part * ext.slices + t // 32, t % 32)
        s = T.meta_var(search_state(blocks, pool.data, r=r, words=views.words))
        read_filters(io, row, d)
        read_uniform(io, row, d)
        d.top_k[0] = limit_of(d.temperature[0], d.top_k[0], words)
        s.factor[0] = io.scale * T.float32(LOG2_E)
        r.factor = s.factor[0]

        sum_slice(io, row, t, s)
        own = T.alloc_local([1], "float32")
        own[0] = r.m
        join_warp(r)
        if cluster > 1:
            join_cluster(r, s)
        else:
            join_block(r, s)

        s.top[0] = r.top
        s.best[0] = -T.log(r.d)
        s.total[0] = r.d
        s.summed[0] = 0
        # False for NaN, and for a row of nothing above minus infinity.
        if r.d > T.float32(0) and r.d < T.infinity("float32"):
            if d.top_k[0] > 1:
                if d.top_k[0] < words or d.top_p[0] < T.float32(1):
                    begin(t, s, part)
                    search(io, row, t, s, d.top_k[0], d.top_p[0], d.min_p[0], clamped(d.uniform[0]))
                    if cluster > 1 and d.top_k[0] < words:
                        # No thread block may end while others read what it has found.
                        cluster_barrier()
                else:
                    leave_all(s)
                    s.least[0] = d.min_p[0]
                if d.top_k[0] == words:
                    bound_least(s)
                    if d.top_p[0] < T.float32(1) or d.min_p[0] > T.float32(0):
                        summed(io, row, t, s)
                    choose(t, s, clamped(d.uniform[0]))
                    take(io, row, t, s)
            write_best(io, row, t, s, own[0], d.top_k[0])
        else:
            write_first(io, row, t, s)

    @T.inline
    def of_cluster(io, group, part, thread):
        if cluster > 1:
            # Every block has to have begun before another one writes to it (`join_cluster` waits).
            cluster_arrive()
        of_row(io, T.Cast("int64", group), part, thread)

    @T.inline
    def body(io):
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": RESIDENT // threads})
        if cluster > 1:
            group = T.cluster_id([io.batch])
            part = T.cta_id_in_cluster([cluster])
        else:
            group = T.cta_id([io.batch])
            part = 0
        thread = T.thread_id([threads])
        if last:
            filters = T.meta_var(Drawing.alloc(1))
            stage = T.alloc_local([1], "uint32")
            if overlap:
                wait_then_start_consumer()
            read_filters(io, T.Cast("int64", group), filters)
            wanted: T.int32 = 1
            if tickets.is_free(limit_of(filters.temperature[0], filters.top_k[0], words), words):
                cuts.load_stage(io, T.Cast("int64", group), stage)
                if stage[0] != T.uint32(cuts.SEARCH):
                    wanted = 0
            if wanted != 0:
                of_cluster(io, group, part, thread)
        else:
            of_cluster(io, group, part, thread)

    return body


@phase
def absorb_adjusted(crew, /, io, s, x):
    """Reads: the elements in hand, `r.tile`. Writes: `x`, `r.m`, `r.d`, `r.top`, `r.top_tile`; scratch. Barriers: none.

    After: (m, d) covers them, as by `rows.sum.absorb`; they are in `x`.
    """
    s.r.top = s.r.m
    for e in T.unroll(crew.elements):
        crew.take(io, s, e)
        x[e] = s.x[0]
        s.r.top = T.max(s.r.top, x[e])
    s.r.top = T.min(s.r.top, sums.HIGHEST)
    if s.r.top > s.r.m:
        s.r.d = s.r.d * T.exp2(sums.scaled(s.r, s.r.m - s.r.top))
        s.r.m = s.r.top
        s.r.top_tile = s.r.tile
    for e in T.unroll(crew.elements):
        T.ptx.ex2.approx.ftz.f32(s.r.power, sums.scaled(s.r, x[e] - s.r.m))
        s.r.d = s.r.d + s.r.power


@phase
def sum_adjusted(blocks, crew, /, io, row, t, s):
    """The pair (m, d) of a thread's elements, with bias and bitmap, as `rows.sum` finds it of logits; (io, row, t, s).

    Reads: the row, the bias, the bitmap.
    Writes: `r.m`, `r.d`, `r.top`, `r.tile`, `r.top_tile`, and `stage` if the row is kept there; scratch.
    Barriers: none.
    """
    x = T.alloc_local([crew.elements], "float32")
    if blocks.ext.keep == "shared":
        hold.copy_part(blocks.ext)(s.r, s.words, s.stage)
    s.r.m = sums.LOWEST
    s.r.d = T.float32(0)
    s.r.top_tile = blocks.steps
    for i in T.serial(crew.steps, unroll=False):
        # The ragged elements first: a lane that has the row's maximum there looks through all of its steps for it.
        s.r.tile = T.Select(i == 0, blocks.steps, i - 1) if blocks.ext.ragged else i
        crew.load(io, row, t, s, s.r.tile)
        absorb_adjusted(crew)(io, s, x)


@phase
def write_best_word(blocks, crew, /, io, row, t, s, own, top_k):
    """The best word, the first of equals, by the warp that owns it.

    `own` is the lane's own maximum. Each lane looks for the row's in the tile that last raised its own. Only if that of
    any lane was no tile's, the warp looks through all of its slice.

    Reads: the pairs of all slices, `top`, `best`, `r.top_tile`; the slice.
    Writes: the row's value and index, and its token if top_k is 1; `chosen`, and scratch.
    Barriers: shuffles.
    """
    each = T.meta_var(ceildiv(blocks.ext.parts, 32))
    found = T.alloc_local([1], "int32")
    rest = T.alloc_local([1], "int32")
    s.chosen[0] = NONE
    for i in T.unroll(each):
        if t % 32 * each + i < blocks.ext.parts:
            # A slice of nothing above minus infinity has the lowest maximum, and no sum.
            if s.pair_m[t % 32 * each + i] == s.top[0] and s.pair_d[t % 32 * each + i] > T.float32(0):
                s.chosen[0] = T.min(s.chosen[0], t % 32 * each + i)
    s.chosen[0] = lanes_min(s.chosen[0])
    if s.chosen[0] == s.r.part:
        found[0] = NONE
        # One lookup, or one of each step.
        rest[0] = lanes_max(T.Select(own == s.top[0] and s.r.top_tile == blocks.steps, crew.steps, 1))
        for j in T.serial(rest[0], unroll=False):
            crew.load(io, row, t, s, T.Select(rest[0] == 1, T.min(s.r.top_tile, crew.steps - 1), j))
            for e in T.unroll(crew.elements):
                crew.take(io, s, e)
                if s.x[0] == s.top[0]:
                    found[0] = T.min(found[0], column_of(blocks)(s, e))
        found[0] = lanes_min(found[0])
        if t % 32 == 0:
            io.values[row, 0] = s.best[0]
            io.indices[row, 0] = T.Cast("int64", found[0])
            if top_k == 1:
                io.tokens[row] = found[0]
                io.logprobs[row] = s.best[0]


def is_first(blocks: Blocks, t: Any, s: Any) -> Any:
    return t < 32 if blocks.ticketed else s.r.part == 0


@phase
def write_first_word(blocks, /, io, row, t, s):
    """The first word in the order, of a row without a distribution, by one warp.

    Reads: the row. Writes: token, value and index; the log-probability, which is NaN. Barriers: shuffles.
    """
    if is_first(blocks, t, s):
        largest = T.alloc_local([1], "uint32")
        bits = T.alloc_local([1], "uint32")
        column = T.alloc_local([1], "int32")
        largest[0] = T.uint32(0)
        column[0] = NONE
        for i in T.serial(ceildiv(blocks.problem.vocab, 32), unroll=False):
            if i * 32 + t < blocks.problem.vocab:
                bits[0] = order_bits(written_element(io, row, i * 32 + t))
                if bits[0] > largest[0]:
                    largest[0] = bits[0]
                    column[0] = i * 32 + t
        bits[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(0xFFFFFFFF), largest[0])
        column[0] = lanes_min(T.Select(bits[0] == largest[0], column[0], NONE))
        if t == 0:
            io.tokens[row] = column[0]
            io.logprobs[row] = T.float32("nan")
            io.values[row, 0] = T.float32("nan")
            io.indices[row, 0] = T.Cast("int64", column[0])
# fmt: on
