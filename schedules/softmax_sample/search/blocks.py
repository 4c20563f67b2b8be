"""A GPU's thread block or cluster as the crew of a search; each warp has a slice of the row's columns."""

from __future__ import annotations

import dataclasses
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device.arithmetic import LOG2_E
from ...device.cluster import cluster_barrier, peer_load, peer_store
from ...device.selection import (
    FULL_WARP,
    RADIX_BINS,
    bits_value,
    lanes_max,
    lanes_min,
    lanes_sum,
    order_bits,
    scan_lanes,
)
from ...device.words import load_element, load_words
from ...rows.hold import load_tile, locate, minus_infinity, take_tile, value
from ...rows.state import RowState, Views
from ...softmax_topk.elements import bits_from, cap_elements, chosen, written_element
from ..blocks import BEFORE, BIN, BINS, COPIES, COUNT, COUNT_BEFORE, MASS, Blocks
from .bracket import guess, raise_to_power
from .crew import (
    ALIKE,
    LOADS,
    SLICES,
    Crew,
    State,
    agrees,
    draw_by_search,
    is_heavy,
    pass_over_row,
    reaches,
    write_word,
)

# No column or slice: above all.
NONE = 2**31 - 1

put_sum = peer_store("put_sum", "float")
put_ties = peer_store("put_ties", "int")
mass_of = peer_load("mass_of", "unsigned long long", "uint64")
count_of = peer_load("count_of", "int", "int32")


# fmt: off
def search_state(blocks: Blocks, pool: Any, **more: Any) -> State:
    """The state of a search, whose shared buffers are in `pool`, which nothing else needs any more; `more` of it."""
    taken = [0]

    def shared(shape: tuple[int, ...], dtype: str) -> tirx.Buffer:
        size = int(dtype[-2:]) // 8
        buffer = T.decl_buffer(shape, dtype, data=pool, elem_offset=taken[0] // size, scope="shared.dyn")
        taken[0] += ceildiv(shape[0] * size, 8) * 8
        return buffer

    if blocks.staged:
        more["stage"] = shared((blocks.staged // 4,), "uint32")
    if blocks.joined:
        more |= {name: shared((blocks.ext.parts,), "float32") for name in ("pair_m", "pair_d")}
        if blocks.searches:
            more["list"] = shared((blocks.listed * blocks.threads,), "float32")
        more |= {"listed": T.alloc_local((1,), "int32"), "total": T.alloc_local((1,), "float32")}
    if blocks.searches:
        more |= {name: shared((COPIES * BINS,), "uint32") for name in ("lows", "highs", "tallies")}
    elif blocks.bins:
        more |= {"lows": shared((blocks.bins,), "uint32"), "scanned": shared((8,), "uint32")}
        if blocks.entries:
            more["list"] = shared((blocks.entries,), "uint32")
    more |= {
        "sums": shared((blocks.ext.parts,), "float32"),
        "ties": shared((blocks.ext.parts,), "int32"),
        "round_sums": shared((blocks.rounds,), "float32"),
        "round_ties": shared((blocks.rounds,), "int32"),
    }
    if blocks.cluster > 1 and blocks.searches:
        more |= {"shown": shared((2 * BINS,), "uint64"), "shown_counts": shared((2 * BINS,), "int32")}
    if blocks.has_bits:
        more["bits"] = T.alloc_local((blocks.ext.vectors,), "uint32")
    registers = {"small": "uint16", "added": "uint32"}
    registers |= dict.fromkeys(("column", "own", "turn", "number", "summed", "round"), "int32")
    more |= {name: T.alloc_local((1,), dtype) for name, dtype in registers.items()}
    return State.alloc(shared, T.alloc_local, **more)


@phase
def begin_search(blocks, /, t, s, part):
    """Before the first pass, `part` being the number of the block in its cluster.

    Writes: `own`, `turn`; empty bins. Barriers: one, at the end.
    """
    threads = T.meta_var(blocks.threads)
    s.own[0] = part * threads + t
    s.turn[0] = 0
    for i in T.serial(((COPIES * BINS) - 1 - t + threads) // threads):
        s.lows[i * threads + t] = T.uint32(0)
        s.highs[i * threads + t] = T.uint32(0)
        s.tallies[i * threads + t] = T.uint32(0)
    T.cuda.cta_sync()


@phase
def load_step(blocks, /, io, row, t, s, j):
    """A thread's vectors of its j-th tile, or, after the last, its ragged element.

    Reads: the row, or what of it is staged; the bitmap. Writes: `r.raw`, `column`, `bits`; scratch is `small`.
    """
    ext, per_word = T.meta_var(blocks.ext), T.meta_var(blocks.ext.width // 4)
    if ext.ragged and j == blocks.steps:
        for w in T.unroll(ext.vectors * 4):
            s.r.raw[w] = minus_infinity(ext)
        s.column[0] = T.max(s.r.edge_at, 0)
        if s.r.edge_at >= 0:
            load_words(4 // per_word, s.r.raw, 0, s.small, io.logits.ptr_to([row, s.column[0]]))
            if per_word > 1:
                s.r.raw[0] = s.r.raw[0] | (minus_infinity(ext) & T.uint32(0xFFFF0000))
    else:
        s.column[0] = T.Cast("int32", s.r.first * ext.width - row * T.int64(ext.vocab)) + (
            j * ext.tile + s.r.t) * ext.width
        if ext.keep == "shared":
            take_tile(ext)(s.r, s.stage, j * ext.tile)
        else:
            load_tile(ext)(s.r, s.words, j * ext.tile, 0)
        if blocks.has_bits:
            for u in T.unroll(ext.vectors):
                s.bits[u] = bits_from(io, row, first_column_of(blocks)(s, u * ext.width))


def column_of(blocks: Blocks) -> Phase:
    """(s, e) -> the column of a step's e-th element."""
    ext = blocks.ext
    return lambda s, e: s.column[0] + e // ext.width * (ext.threads * ext.width) + e % ext.width


def first_column_of(blocks: Blocks) -> Phase:
    """(s, e) -> the first column of the vector of a step's e-th element; of one beyond the row, of its last vector."""
    width, column = blocks.ext.width, column_of(blocks)
    return lambda s, e: T.min(column(s, e // width * width), blocks.ext.vocab - width)


def inside(blocks: Blocks, s: Any, e: Any) -> tirx.PrimExpr:
    ext, first = blocks.ext, first_column_of(blocks)
    # Bias and bitmap of one column, also for elements beyond the row.
    return first(s, e) + e % ext.width if blocks.has_bits else T.min(column_of(blocks)(s, e), ext.vocab - 1)


@phase
def take_of_step(blocks, /, io, s, e):
    """The e-th element of a step.

    Reads: `r.raw`, `column`, `bits`; the bias; the bitmap. Writes: `x`.
    """
    s.x[0] = value(blocks.ext, s.r.raw, e)
    if bool(blocks.problem.capped):
        cap_elements(1)(io, s.x)
    if bool(blocks.problem.bias):
        s.x[0] = s.x[0] + load_element("float32", io.bias.ptr_to([inside(blocks, s, e)]))
    if blocks.has_bits:
        s.x[0] = chosen(s.bits[e // blocks.ext.width], e % blocks.ext.width, s.x[0])
    elif bool(blocks.problem.allowed):
        s.x[0] = chosen(bits_from(io, s.r.row, inside(blocks, s, e)), 0, s.x[0])


@T.inline
def add_atomically(s, t, start, at, mass):
    """Add a mass to a bin, in two words: shared memory has no atomic addition of 64 bits, only a loop that does it."""
    s.added[0] = T.cuda.atomic_add(s.lows.ptr_to([at * COPIES + t % COPIES]), T.Cast("uint32", mass[0]))
    # The high word, and the carry.
    s.added[0] = T.Cast("uint32", (mass[0] >> T.uint64(32)) + (
        (T.Cast("uint64", s.added[0]) + (mass[0] & T.uint64(0xFFFFFFFF))) >> T.uint64(32)))
    if s.added[0] != T.uint32(0):
        T.evaluate(T.cuda.atomic_add(s.highs.ptr_to([at * COPIES + t % COPIES]), s.added[0]))


@T.inline
def count_atomically(s, t, at):
    """Count an element of a bin. Barriers: none."""
    T.evaluate(T.cuda.atomic_add(s.tallies.ptr_to([at * COPIES + t % COPIES]), T.uint32(1)))


@T.inline
def add_part_of_warp(s, t, i):
    """Add the i-th part of a warp's threads to its total. Barriers: none."""
    s.mass[0] = s.part[i]
    for h in T.unroll(5):
        s.mass[0] = s.mass[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.mass[0], 1 << h, 32, 32)
    if t % 32 == 0:
        add_atomically(s, t, SLICES, RADIX_BINS + i, s.mass)


@phase
def unite_blocks(blocks, /, s, t, start):
    """Add up what the threads of all blocks have added.

    Reads: `lows`, `highs`, `tallies`, which are empty afterwards; `turn`.
    Writes: `masses` from `start` on, `counts`; `turn`; `shown` and `shown_counts`, which the others read until they
        come to the next barrier of the cluster: so there are two of each.
    Barriers: two, and one of the cluster.
    """
    threads = T.meta_var(blocks.threads)
    T.cuda.cta_sync()
    for i in T.serial((BINS - 1 - t + threads) // threads):
        s.mass[0] = T.uint64(0)
        s.number[0] = 0
        for c in T.unroll(COPIES):
            s.mass[0] = s.mass[0] + T.Cast("uint64", s.lows[(i * threads + t) * COPIES + c]) + (
                T.Cast("uint64", s.highs[(i * threads + t) * COPIES + c]) << T.uint64(32))
            s.number[0] = s.number[0] + T.Cast("int32", s.tallies[(i * threads + t) * COPIES + c])
        for c in T.unroll(COPIES):
            s.lows[(i * threads + t) * COPIES + c] = T.uint32(0)
            s.highs[(i * threads + t) * COPIES + c] = T.uint32(0)
            s.tallies[(i * threads + t) * COPIES + c] = T.uint32(0)
        if blocks.cluster > 1:
            s.shown[s.turn[0] * BINS + i * threads + t] = s.mass[0]
            s.shown_counts[s.turn[0] * BINS + i * threads + t] = s.number[0]
        else:
            s.masses[start + i * threads + t] = s.mass[0]
            s.counts[i * threads + t] = s.number[0]
    if blocks.cluster > 1:
        cluster_barrier()
        for i in T.serial((BINS - 1 - t + threads) // threads):
            s.mass[0] = T.uint64(0)
            s.number[0] = 0
            for r in T.unroll(blocks.cluster):
                s.mass[0] = s.mass[0] + mass_of(s.shown.ptr_to([s.turn[0] * BINS + i * threads + t]), r)
                s.number[0] = s.number[0] + count_of(
                    s.shown_counts.ptr_to([s.turn[0] * BINS + i * threads + t]), r)
            s.masses[start + i * threads + t] = s.mass[0]
            s.counts[i * threads + t] = s.number[0]
        s.turn[0] = 1 - s.turn[0]
    T.cuda.cta_sync()


@T.inline
def find_by_warp(s, t, start):
    """Find the bin in which the goal is reached, by the first warp."""
    if t < 32:
        s.part[0] = T.uint64(0)
        s.part[1] = T.uint64(0)
        for b in T.unroll(RADIX_BINS // 32):
            s.part[0] = s.part[0] + s.masses[start + RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
            s.part[1] = s.part[1] + T.Cast("uint64", s.counts[RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)])
        # Inclusive scans over the lanes; the first lane has the last bins.
        s.mass[0] = s.part[0]
        scan_lanes(t, s.mass, s.other)
        s.part[0] = s.above[0] + s.mass[0] - s.part[0]
        s.mass[0] = s.part[1]
        scan_lanes(t, s.mass, s.other)
        s.part[1] = T.Cast("uint64", s.passed[0]) + s.mass[0] - s.part[1]
        for b in T.unroll(RADIX_BINS // 32):
            s.mass[0] = s.masses[start + RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
            s.other[0] = T.Cast("uint64", s.counts[RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)])
            if reaches(s, s.part[0], s.part[1], s.mass[0], s.other[0]):
                s.found[BIN] = T.Cast("uint64", t * (RADIX_BINS // 32) + b)
                s.found[BEFORE] = s.part[0]
                s.found[MASS] = s.mass[0]
                s.found[COUNT] = s.other[0]
                s.found[COUNT_BEFORE] = s.part[1]
            s.part[0] = s.part[0] + s.mass[0]
            s.part[1] = s.part[1] + s.other[0]


@phase
def pick_by_warp(blocks, /, io, row, t, s, first, last):
    """Find the word by the first warp of the first block: each lane counts the group's elements among some neighbouring
    columns, and the lane that has the right one looks for it.
    """
    piece = T.meta_var(ceildiv(ceildiv(blocks.problem.vocab, RADIX_BINS), 32))
    if s.own[0] < 32:
        wanted = T.alloc_local([1], "int32")
        before = T.alloc_local([1], "int32")
        wanted[0] = -1
        for turn in T.serial(2, unroll=False):
            s.number[0] = 0
            for i in T.serial(ceildiv(piece, LOADS)):
                for u in T.unroll(LOADS):
                    s.x[1 + u] = -T.infinity("float32")
                    if i * LOADS + u < piece and first + t * piece + i * LOADS + u < last:
                        s.x[1 + u] = written_element(io, row, first + t * piece + i * LOADS + u)
                for u in T.unroll(LOADS):
                    if agrees(s, s.x[1 + u]):
                        if is_heavy(exponential_on_gpu(s, s.x[1 + u]), blocks.problem.vocab):
                            if s.number[0] == wanted[0]:
                                write_word(io, row, s, first + t * piece + i * LOADS + u, s.x[1 + u])
                            s.number[0] = s.number[0] + 1
            if turn == 0:
                before[0] = s.number[0]
                scan_lanes(t, before, wanted)
                # If another lane has the element, this rank is below 0, or not less than the lane's count.
                wanted[0] = T.Cast("int32", s.rank[0]) - (before[0] - s.number[0])


def exponential_on_gpu(s: State, x: Any) -> tirx.PrimExpr:
    return T.exp2((x - s.top[0]) * s.factor[0])


def below(x: Any) -> tirx.PrimExpr:
    """The largest float32 that compares as less; below 0 that is not -0."""
    return bits_value(order_bits(x) - T.Select(x == T.float32(0), T.uint32(2), T.uint32(1)))


@T.inline
def bound_least(s):
    """Only words whose exponential is at least `least` are left: afterwards the group's bounds alone tell which.

    Reads: `least`, `top`, `factor`, and the group.
    Writes: `lowest`, `highest`; scratch is `x`, `power`, `goal`.
    After: left are the words above `highest`, and the first `rank` of those from `lowest` to `highest`.
    """
    if s.least[0] > T.float32(0):
        # An exponential within 2^-25 of `least` is rounded to it.
        s.goal[0] = T.max(T.min(
            s.top[0] + (T.log2(s.least[0]) - T.float32(2.0**-25 * LOG2_E)) / s.factor[0], s.top[0]),
            T.min_value("float32"))
        # Rounding of large logits may come to a neighbour: first down, then up.
        for i in T.serial(4, unroll=False):
            s.x[0] = T.Select(i < 2, below(s.goal[0]), s.goal[0])
            raise_to_power(s)
            if i < 2:
                if s.power[0] >= s.least[0]:
                    s.goal[0] = s.x[0]
            elif s.power[0] < s.least[0] and s.goal[0] < s.top[0]:
                s.goal[0] = bits_value(order_bits(s.goal[0]) + T.uint32(1))
        if s.goal[0] > s.highest[0]:
            s.lowest[0] = T.infinity("float32")
            s.highest[0] = below(s.goal[0])
        else:
            s.lowest[0] = T.max(s.lowest[0], s.goal[0])


@T.inline
def see(io, row, t, s, j, e):
    """Add an element to the sum above the bracket, or to the number of those within."""
    raise_to_power(s)
    # Without branches, which take longer.
    s.sum[0] = s.sum[0] + T.Select(s.x[0] > s.highest[0], s.power[0], T.float32(0))
    s.number[0] = s.number[0] + T.Select(s.x[0] > s.highest[0], 0, T.Select(s.x[0] >= s.lowest[0], 1, 0))


@phase
def sum_slices(blocks, crew, /, io, row, t, s):
    """The sum of the words of each slice that are left.

    Reads: the row, `top`, `factor`, and the bounds of the group at which the words that are left end (`bound_least`).
    Writes: `sums`, `ties` of all slices, in every block; `summed`; scratch.
    Barriers: one of the block, or of the cluster.
    After: `sums` has the sum of the exponentials of a slice's words before the group, and `ties` how many it has of it.
    """
    s.sum[0] = T.float32(0)
    s.number[0] = 0
    s.summed[0] = 1
    pass_over_row(crew, see)(io, row, t, s)
    for h in T.unroll(5):
        s.sum[0] = s.sum[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.sum[0], 1 << h, 32, 32)
    s.number[0] = lanes_sum(s.number[0])
    if blocks.cluster > 1:
        if t % 32 < blocks.cluster:
            put_sum(s.sums.ptr_to([s.r.part]), t % 32, s.sum[0])
            put_ties(s.ties.ptr_to([s.r.part]), t % 32, s.number[0])
        cluster_barrier()
    else:
        if t % 32 == 0:
            s.sums[s.r.part] = s.sum[0]
            s.ties[s.r.part] = s.number[0]
        T.cuda.cta_sync()


@phase
def choose(count, begun, sum_of, aim, /, t, s, to):
    """In which of `count` pieces, in the order of columns, a share of what is left is reached.

    Every warp chooses for itself, alike. A piece of which nothing is left is never chosen, however sums are rounded.

    `begun`: (s) -> how many words of the group come before the first piece. `sum_of`: a phase (s, i, own, ties) that
    reads the sum of the i-th piece's words before the group, and how many it has of it. `aim`: (s, total) -> how much
    is to be passed.

    Reads: `rank`: how many of the group are left; `tie`: the exponential of each.
    Writes: the piece, to `to`; `goal`: how much of it is to be passed, and `number`: how many of the group come before.
    Barriers: shuffles.
    """
    each = T.meta_var(ceildiv(count, 32))
    before = T.alloc_local([1], "int32")
    scratch = T.alloc_local([1], "int32")
    own = T.alloc_local([each], "float32")
    ties = T.alloc_local([each], "int32")
    reached = T.alloc_local([1], "float32")
    other = T.alloc_local([1], "float32")
    last = T.alloc_local([1], "int32")
    for i in T.unroll(each):
        ties[i] = 0
        own[i] = T.float32(0)
        if t % 32 * each + i < count:
            sum_of(s, t % 32 * each + i, own, ties, i)
    before[0] = ties[0]
    for i in T.unroll(each - 1):
        before[0] = before[0] + ties[1 + i]
    scratch[0] = before[0]
    if s.rank[0] > T.uint64(0):
        scan_lanes(t, before, s.scratch)
    before[0] = before[0] - scratch[0] + begun(s)
    reached[0] = T.float32(0)
    for i in T.unroll(each):
        own[i] = own[i] + s.tie[0] * T.Cast(
            "float32", T.min(T.max(T.Cast("int32", s.rank[0]) - before[0], 0), ties[i]))
        scratch[0] = ties[i]
        ties[i] = before[0]
        before[0] = before[0] + scratch[0]
        reached[0] = reached[0] + own[i]
    scan_lanes(t, reached, other)
    other[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), reached[0], 31, 32, 32)
    s.goal[0] = aim(s, other[0])
    # The pieces before this lane's.
    other[0] = T.tvm_warp_shuffle_up(T.uint32(FULL_WARP), reached[0], 1, 32, 32)
    reached[0] = T.Select(t % 32 == 0, T.float32(0), other[0])
    to[0] = NONE
    last[0] = -1
    s.sum[0] = T.float32(0)
    s.number[0] = 0
    for i in T.unroll(each):
        if own[i] > T.float32(0):
            last[0] = t % 32 * each + i
            if to[0] == NONE and reached[0] + own[i] > s.goal[0]:
                to[0] = t % 32 * each + i
                s.sum[0] = s.goal[0] - reached[0]
                s.number[0] = ties[i]
        reached[0] = reached[0] + own[i]
    to[0] = lanes_min(to[0])
    s.goal[0] = s.sum[0]
    if to[0] == NONE:
        # By rounding none reaches it: the last word that is left, then.
        to[0] = lanes_max(last[0])
        s.goal[0] = T.infinity("float32")
        for i in T.unroll(each):
            if t % 32 * each + i == to[0]:
                s.number[0] = ties[i]
    s.goal[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.goal[0], to[0] // each, 32, 32)
    s.number[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.number[0], to[0] // each, 32, 32)


def choose_slice(blocks: Blocks) -> Phase:
    """The slice in which the uniform number's share of all that is left is reached; the phase is (t, s, uniform).

    Reads: `sums`, `ties`; or the pairs of all slices, if not `summed`; `rank`, `tie`.
    Writes: `chosen`, `goal`, `number`.
    Barriers: shuffles.
    """
    joined = blocks.joined

    @T.inline
    def sum_of(s, i, own, ties, at):
        if joined and s.summed[0] == 0:
            own[at] = s.pair_d[i] * T.exp2((s.pair_m[i] - s.top[0]) * s.factor[0])
        else:
            own[at] = s.sums[i]
            ties[at] = s.ties[i]

    chosen = choose(blocks.ext.parts, lambda s: 0, sum_of, lambda s, total: s.goal[0] * total)

    @T.inline
    def phase(t, s, uniform):
        s.goal[0] = uniform
        chosen(t, s, s.chosen)

    return phase


def take_word(blocks: Blocks, crew: Crew) -> Phase:
    """The word with which `goal` is passed, by the thread block of the chosen slice, or by the one that draws alone.

    The phase is (io, row, t, s). Its warps share the slice's rounds. Then one of them goes through the round in which
    the word is.

    Reads: the slice, `chosen`, `goal`, `number`, `rank`, the group's bounds.
    Writes: the row's token and its log-probability; `round_sums`, `round_ties`; scratch.
    Barriers: one of that thread block; shuffles.
    After: the word is one that is left: the first that passes `goal`, or the last one if rounding leaves it unpassed.
    """
    ext, steps, rounds, column = blocks.ext, blocks.steps, blocks.rounds, column_of(blocks)
    width, slices, located = ext.width, ext.slices, locate(ext)

    @T.inline
    def load_round(io, row, t, q, i):
        if ext.ragged:
            # The elements before the first whole vector, the vectors, and the elements after the last.
            crew.load(io, row, t, q, T.Select(i == 0 or i > steps, steps, i - 1))
        else:
            crew.load(io, row, t, q, i)

    def is_of_round(q, i):
        return T.Or(T.And(i > 0, i <= steps), (i == 0) == (q.r.t < width)) if ext.ragged else True

    @T.inline
    def sum_round(io, t, q, i):
        q.sum[0] = T.float32(0)
        q.scratch[0] = 0
        for e in T.unroll(crew.elements):
            crew.take(io, q, e)
            raise_to_power(q)
            if is_of_round(q, i):
                if q.x[0] > q.highest[0]:
                    q.sum[0] = q.sum[0] + q.power[0]
                elif q.x[0] >= q.lowest[0]:
                    q.scratch[0] = q.scratch[0] + 1
        for h in T.unroll(5):
            q.sum[0] = q.sum[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), q.sum[0], 1 << h, 32, 32)
        q.scratch[0] = lanes_sum(q.scratch[0])
        if t % 32 == 0:
            q.round_sums[i] = q.sum[0]
            q.round_ties[i] = q.scratch[0]

    @T.inline
    def scan_round(io, t, q, i, power, ties, scan, found, last):
        q.reached[0] = T.float32(0)
        for u in T.unroll(ext.vectors):
            ties[0] = 0
            q.sum[0] = T.float32(0)
            for v in T.unroll(width):
                crew.take(io, q, u * width + v)
                raise_to_power(q)
                power[v] = T.Select(q.x[0] > q.highest[0] and is_of_round(q, i), q.power[0], T.float32(0))
                # A word of the group is known by its sign until its number is.
                if q.x[0] >= q.lowest[0] and q.x[0] <= q.highest[0] and is_of_round(q, i):
                    power[v] = -q.power[0]
                    ties[0] = ties[0] + 1
            if q.rank[0] > T.uint64(0):
                scan[0] = ties[0]
                scan_lanes(t, scan, q.scratch)
                ties[0] = q.number[0] + scan[0] - ties[0]
                q.number[0] = q.number[0] + T.tvm_warp_shuffle(T.uint32(FULL_WARP), scan[0], 31, 32, 32)
            for v in T.unroll(width):
                if power[v] < T.float32(0):
                    power[v] = T.Select(T.Cast("uint64", ties[0]) < q.rank[0], -power[v], T.float32(0))
                    ties[0] = ties[0] + 1
                q.sum[0] = q.sum[0] + power[v]
            q.reached[1] = q.sum[0]
            scan_lanes(t, q.sum, q.lane)
            q.reached[2] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), q.sum[0], 31, 32, 32)
            q.reached[1] = q.reached[0] + (q.sum[0] - q.reached[1])
            for v in T.unroll(width):
                if power[v] > T.float32(0):
                    q.reached[1] = q.reached[1] + power[v]
                    last[0] = column(q, u * width + v)
                    if found[0] == NONE and q.reached[1] > q.goal[0]:
                        found[0] = last[0]
            q.reached[0] = q.reached[0] + q.reached[2]

    @T.inline
    def sum_of(s, i, own, ties, at):
        own[at] = s.round_sums[i]
        ties[at] = s.round_ties[i]

    # The words of the group before the slice are in `number`, which is read before it is written.
    chosen = choose(rounds, lambda s: s.number[0], sum_of, lambda s, total: s.goal[0])

    @T.inline
    def phase(io, row, t, s):
        if blocks.ticketed or s.chosen[0] // slices == s.r.part // slices:
            power = T.alloc_local([width], "float32")
            ties = T.alloc_local([1], "int32")
            scan = T.alloc_local([1], "int32")
            found = T.alloc_local([1], "int32")
            last = T.alloc_local([1], "int32")
            slice_ = RowState(ext, row, s.chosen[0], t % 32)
            located(slice_, io.logits)
            q = T.meta_var(dataclasses.replace(s, r=slice_))
            for i in T.serial(ceildiv(rounds, slices), unroll=False):
                if i * slices + t // 32 < rounds:
                    load_round(io, row, t, q, i * slices + t // 32)
                    sum_round(io, t, q, i * slices + t // 32)
            T.cuda.cta_sync()
            chosen(t, q, q.round)
            if q.round[0] % slices == t // 32:
                found[0] = NONE
                last[0] = -1
                if rounds > slices:
                    load_round(io, row, t, q, q.round[0])
                scan_round(io, t, q, q.round[0], power, ties, scan, found, last)
                found[0] = lanes_min(found[0])
                last[0] = lanes_max(last[0])
                found[0] = T.Select(found[0] == NONE, last[0], found[0])
                if t % 32 == 0:
                    write_word(io, row, s, found[0], written_element(io, row, found[0]))

    return phase


@phase
def draw_in_columns(blocks, crew, /, io, row, t, s, uniform):
    """A word of those that are left, by the inverse of their distribution function in the order of columns."""
    bound_least(s)
    sum_slices(blocks, crew)(io, row, t, s)
    choose_slice(blocks)(t, s, uniform)
    take_word(blocks, crew)(io, row, t, s)


def crew_of(blocks: Blocks) -> Crew:
    """The threads of a block or a cluster of a CUDA kernel."""
    column = column_of(blocks)
    crew = Crew(
        elements=blocks.ext.vectors * blocks.ext.width,
        steps=blocks.steps + (1 if blocks.ext.ragged else 0),
        element=written_element,
        load=load_step(blocks),
        take=take_of_step(blocks),
        column=lambda s, t, j, e: column(s, e),
        exponential=exponential_on_gpu,
        meet=T.cuda.cta_sync,
        clear=lambda s, t: None,
        add=add_atomically,
        count=count_atomically,
        add_part=add_part_of_warp,
        unite=unite_blocks(blocks),
        find=find_by_warp,
        pick=pick_by_warp(blocks),
        draws=not blocks.joined,
        guesses=blocks.joined,
    )
    alike = 0 if blocks.problem.bias or blocks.problem.capped else ALIKE[blocks.problem.dtype]
    return dataclasses.replace(
        crew,
        draw=draw_in_columns(blocks, crew),
        guess=guess(blocks, crew, alike) if crew.guesses else None,
    )


@phase
def search_by_blocks(blocks, /, io, row, t, part, pool, first, best, top_k, top_p, min_p, uniform):
    """The search of all threads of a row.

    Barriers: several; the last one is the cluster's, as no block may end while others read what it has found.
    """
    r = RowState(blocks.ext, row, part * blocks.ext.slices + t // 32, t % 32)
    locate(blocks.ext)(r, io.logits)
    views = Views(blocks.ext, io)
    s = T.meta_var(search_state(blocks, pool, r=r, words=views.words))
    s.top[0] = written_element(io, row, first)
    s.best[0] = best
    begin_search(blocks)(t, s, part)
    draw_by_search(crew_of(blocks), blocks.problem)(io, row, t, s, top_k, top_p, min_p, uniform)
    if blocks.cluster > 1:
        cluster_barrier()
# fmt: on
