"""The first threshold of a row, from a sample of it: the first tile, which is spread over the whole row.

`FirstThreshold.rank` tells which value of the sample is taken, so that little more than k elements of the row reach it:
the `rank.warp`-th largest of the warps' `rank.lane`-th largest, where a lane offers its tile's maximum.

If a row is in order, a lane's maximum tells little about its other elements, and the threshold would be far below the
k-th largest. But then a warp sees its vectors ascend or descend, and offers a *floor*: a value that `floor.lanes`
neighbouring lanes reach with all elements of a vector.

The sample's maximum is also the reference of the exponentials, in the place of the running maximum of Algorithm 3 of
Milakov & Gimelshein: the sum is never rescaled again.
"""

from __future__ import annotations

from math import gcd
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.references import sampled_reference
from ...device.selection import (
    FULL_WARP,
    MINUS_INFINITY,
    PLUS_INFINITY,
    bits_value,
    maxima_of_warp,
    order,
    remove_largest,
)
from .layout import MORE_EQUALS, SPARE_EQUALS, Layout
from .state import EQUALS, folded

# A tile has at most 1024 threads of 32 elements, not all of them above the threshold: the number of these fits in so
# many bits.
COUNT_BITS = 16
# How many standard deviations a count in the sample may exceed that of the rest of the row by.
DEVIATIONS = 3


# fmt: off
@phase
def offer_sample(layout, /, s):
    """Offer a warp's part of the sample; it has its own reference until the block's is known.

    Reads: `x`, `top`.
    Writes: `ranked`, `sample_top` and `floor` of the warp; `largest`, `reference`; in shared memory `warp_ranked`,
        `warp_tops`, `warp_floors`.
    Barriers: none. After a barrier `take_threshold` may read them.
    """
    if layout.first.floors > 0:
        floor_of_warp(layout)(s)
    order(s.top[0], s.plain, s.bits)
    maxima_of_warp(layout.first.rank)(s.t, s.bits, s.sample_top, s.ranked)
    if layout.tiling.warps > 1:
        if s.t % 32 == 0:
            s.warp_ranked[s.t // 32] = s.ranked[0]
            s.warp_tops[s.t // 32] = s.sample_top[0]
            if layout.first.floors > 0:
                s.warp_floors[s.t // 32] = s.floor[0]
    refer_to_sample(s)


@phase
def take_threshold(layout, /, s):
    """Take over the first threshold and the reference; the sum so far becomes relative to that.

    Reads: what `offer_sample` wrote, `sum`.
    Writes: `threshold`, `equals_until`, `largest`, `reference`, `sum`.
    Barriers: one, and another if elements that equal the threshold are limited.
    After: these are the same in all threads, but for `sum`.
    """
    crowds = T.meta_var(layout.pool.overflows or layout.tiling.cluster > 1)
    combine_samples(layout)(s)
    s.power[0] = s.reference[0]
    refer_to_sample(s)
    if s.sum[0] > T.float32(0):
        T.ptx.ex2.approx.ftz.f32(s.power[0], s.power[0] - s.reference[0])
        s.sum[0] = s.sum[0] * s.power[0]
    if layout.first.gated and s.ranked[0] > T.uint32(MINUS_INFINITY):
        s.threshold[0] = bits_value(T.min(s.ranked[0], T.uint32(PLUS_INFINITY)))
        if (layout.ties_limited and s.need[0] != 0) or (crowds and s.ranked[0] == s.sample_top[0]):
            (limit_equals if layout.ties_limited else limit_maxima)(layout)(s)


@phase
def lower_threshold(layout, /, s):
    """Take the least of the warps' candidates for a threshold that fewer than k elements reached.

    Reads: `warp_ranked`.
    Writes: `threshold`, if that is above minus infinity; scratch is `ranked`.
    Barriers: none, but all lanes take part.
    """
    s.ranked[0] = T.call_extern(
        "uint32", "__reduce_min_sync", T.uint32(FULL_WARP), s.warp_ranked[s.t % layout.tiling.warps])
    if s.ranked[0] > T.uint32(MINUS_INFINITY):
        s.threshold[0] = bits_value(T.min(s.ranked[0], T.uint32(PLUS_INFINITY)))


@T.inline
def refer_to_sample(s):
    """Make the largest element of a sample, if it is finite and not far below 0, the reference of the exponentials.

    Reads: `sample_top`, `factor`. Writes: `largest`, `reference`. Barriers: none.
    """
    s.largest[0] = T.Select(s.sample_top[0] < T.uint32(PLUS_INFINITY), bits_value(s.sample_top[0]), T.float32(0))
    s.reference[0] = sampled_reference(s.largest[0] * s.factor[0])


def combine_samples(layout: Layout) -> Phase:
    """Combine the warps' parts of the sample. The phase is (s).

    Reads: `warp_ranked`, `warp_tops`, `warp_floors`; of a block of one warp its own `ranked`, `sample_top`, `floor`,
        `top`.
    Writes: `ranked`, the order of the threshold, and `sample_top`, of the largest; `need`, not 0 if many of the sample
        are equal to the threshold; `floor` is overwritten.
    Barriers: one, unless the block has one warp.
    After: all are the same in all threads.
    """
    # If all values differ, each place of the order has one value. If half of the values beyond a place share it, many
    # are equal.
    rank, sampled = layout.first.rank, min(layout.tiling.warps, layout.tiling.slots)
    place, most = (rank.warp, sampled) if layout.tiling.warps > 1 else (rank.lane, 32)
    many = 1 + (most - place) // 2
    warps, floors, rank_of_warp = layout.tiling.warps, layout.first.floors, layout.first.rank.warp
    together = gcd(warps, 4)  # warps' values that are read at once

    @T.inline
    def phase(s):
        largest = T.alloc_local([1], "uint32")
        lanes = T.alloc_local([1], "uint32")
        rank = T.alloc_local([1], "int32")
        others = T.alloc_local([together], "uint32")
        if warps == 1:
            if layout.ties_limited:
                order(s.top[0], s.plain, largest)
                lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), largest[0] == s.ranked[0])
                s.need[0] = T.Select(T.Cast("int32", T.popcount(lanes[0])) > many, 1, 0)
            if floors > 0:
                s.ranked[0] = T.max(s.ranked[0], s.floor[0])
        else:
            T.cuda.cta_sync()
            s.sample_top[0] = T.call_extern(
                "uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.warp_tops[s.t % warps])
            # The smallest value that fewer than `rank_of_warp` others exceed.
            rank[0] = 0
            largest[0] = s.warp_ranked[s.t % warps]
            for w in T.unroll(warps // together):
                for v in T.vectorized(together):
                    others[v] = s.warp_ranked[w * together + v]
                for v in T.unroll(together):
                    if others[v] > largest[0]:
                        rank[0] = rank[0] + 1
            if rank[0] >= rank_of_warp:
                largest[0] = T.uint32(0xFFFFFFFF)
            s.ranked[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), largest[0])
            if layout.ties_limited:
                lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), largest[0] == s.ranked[0])
                s.need[0] = T.Select(
                    T.Cast("int32", T.popcount(lanes[0] & T.uint32((1 << warps) - 1))) > many, 1, 0)
            if floors > 0:
                # The floors-th largest of the warps' floors, if that is higher. Without order no warp has one.
                s.floor[0] = s.warp_floors[s.t % warps]
                largest[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.floor[0])
                if floors > 1:
                    if largest[0] > s.ranked[0]:
                        if s.t % 32 >= warps:
                            s.floor[0] = T.uint32(0)
                        for _ in T.serial(floors - 1):
                            remove_largest(s.t, s.floor, largest, lanes)
                s.ranked[0] = T.max(s.ranked[0], largest[0])

    return phase


@phase
def limit_maxima(layout, /, s):
    """As `limit_equals` where the threshold is the sample's maximum, so that none is larger.

    Reads: `x`, `threshold`, `start`, `end`; found[EQUALS], which comes as 0. Writes: `equals_until`. Barriers: one.
    """
    tiling = T.meta_var(layout.tiling)
    equal = T.alloc_local([1], "int32")
    equal[0] = 0
    for e in T.unroll(tiling.held):
        if s.x[e] == s.threshold[0]:
            equal[0] = equal[0] + 1
    equal[0] = T.cuda.warp_sum(equal[0])
    if s.t % 32 == 0:
        T.evaluate(T.cuda.atomic_add(s.found.ptr_to([EQUALS]), equal[0]))
    T.cuda.cta_sync()
    s.equals_until[0] = T.Cast("int32", T.min(
        T.Cast("float32", s.start[0])
        + T.Cast("float32", T.min(s.end[0], tiling.vocab) - s.start[0])
        * T.float32(layout.first.equals / tiling.tiles)
        / T.Cast("float32", T.max(s.found[EQUALS], 1)), T.float32(tiling.vocab)))


@phase
def limit_equals(layout, /, s):
    """Find the column up to which elements that equal the threshold pass.

    Only the row's first are wanted, beside the larger ones as many as complete the k, and some more
    (`FirstThreshold.equals`). How many of either the block's share has is known from the sample, which is one of its
    tiles; for the other tiles it assumes as many as all but one of a thousand rows in random order have.

    Reads: `x`, `threshold`, `start`, `end`; found[EQUALS], which comes as 0. Writes: `equals_until`. Barriers: one.
    """
    tiling, larger = T.meta_var(layout.tiling), T.meta_var(1 << COUNT_BITS)
    counted = T.alloc_local([1], "int32")
    share = T.alloc_local([2], "float32")
    root = T.alloc_local([1], "float32")
    counted[0] = 0
    for e in T.unroll(tiling.held):
        counted[0] = counted[0] + T.Select(
            s.x[e] == s.threshold[0], 1, T.Select(s.x[e] > s.threshold[0], larger, 0))
    counted[0] = T.cuda.warp_sum(counted[0])
    if s.t % 32 == 0:
        T.evaluate(T.cuda.atomic_add(s.found.ptr_to([EQUALS]), counted[0]))
    T.cuda.cta_sync()
    share[0] = T.Cast("float32", s.found[EQUALS] & (larger - 1))
    share[1] = T.Cast("float32", s.found[EQUALS] >> COUNT_BITS)
    if tiling.tiles > 1:
        # An approximate root: an exact one takes registers that the tile in hand needs.
        for i in T.unroll(2):
            T.ptx.sqrt.approx.ftz.f32(root[0], share[i])
            share[i] = (share[i] - T.float32(DEVIATIONS) * root[0]) * T.float32(tiling.tiles)
    # How many equals are wanted, as a number of columns, given how many equals a column has.
    share[1] = T.max(T.float32(layout.k) - T.max(share[1], T.float32(0)), T.float32(0))
    share[1] = share[1] * T.float32(1 + MORE_EQUALS) + T.float32(SPARE_EQUALS)
    s.equals_until[0] = T.Cast("int32", T.min(
        T.Cast("float32", s.start[0])
        + T.Cast("float32", T.min(s.end[0], tiling.vocab) - s.start[0])
        * share[1] / T.max(share[0], T.float32(1)), T.float32(tiling.vocab)))


def in_order(layout: Layout, x: Any, small: int, large: int) -> tirx.PrimExpr:
    """Whether a vector may belong to a run of the row that is in order, by its first and last element: x[small] is the
    one that would be the smaller. False for a vector outside of the row.
    """
    tiling = layout.tiling
    whole = tiling.whole
    ordered = x[small] <= x[large]
    return ordered if whole else T.And(ordered, x[large] > -T.infinity("float32"))


def is_run(layout: Layout, rising: Any, falling: Any) -> tirx.PrimExpr:
    """Whether all of a warp's last vectors ascend, up to the row's end, or all of its first ones descend."""
    tiling, first = layout.tiling, layout.first
    whole, lead, run = tiling.whole, tiling.lead, first.floor.lanes if first.floor else 0
    descends = (falling | T.uint32(lead)) == T.uint32(FULL_WARP)
    if whole:
        return T.Or(rising == T.uint32(FULL_WARP), descends)
    ascends = T.And(rising & (rising + T.uint32(1)) == T.uint32(0), rising >= T.uint32((1 << run) - 1))
    return T.Or(ascends, descends)


@phase
def raise_floor(layout, /, s, low, taken):
    """Raise the floor to what the lanes that are `taken` all reach with the vector from x[low] on."""
    order(folded(T.min, s.x, low, layout.tiling.width), s.plain, s.bits)
    if not taken:
        s.bits[0] = T.uint32(FULL_WARP)
    s.bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), s.bits[0])
    s.floor[0] = T.max(s.floor[0], s.bits[0])


@phase
def floor_of_warp(layout, /, s):
    """Find what neighbouring lanes reach with all of a vector, if the row is in order here.

    A warp's vectors of one slot are a run of the row. The last run of an ascending row ends in its largest elements and
    the first one of a descending row begins with them. The ends of the vectors only tell whether it is worth looking;
    what is found holds for any row. A NaN is left out of a minimum, which it counts as larger than.

    Reads: `x`. Writes: `floor`, an order; 0 if the row is not in order. Barriers: none, but all lanes take part.
    """
    last, width = T.meta_var(layout.first.last_vector), T.meta_var(layout.tiling.width)
    run = T.meta_var(layout.first.floor.lanes if layout.first.floor is not None else 0)
    rising = T.alloc_local([1], "uint32")
    falling = T.alloc_local([1], "uint32")
    rising[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), in_order(layout, s.x, last * width, last * width + width - 1))
    falling[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), in_order(layout, s.x, width - 1, 0))
    s.floor[0] = T.uint32(0)
    if is_run(layout, rising[0], falling[0]):
        # Places are in a circle, so that there are always as many lanes; where the run is shorter, some have
        # nothing.
        raise_floor(layout)(
            s, last * width, (s.t - T.Cast("int32", T.popcount(rising[0]))) & 31 >= 32 - run)
        raise_floor(layout)(s, 0, (s.t - layout.tiling.lead) & 31 < run)
# fmt: on
