"""Sums of exponentials of a row: from what the first kernel's thread blocks have summed, or from all scores."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ...device.powers import change_base, over_largest, power_unit
from ...device.selection import FULL_WARP, bits_value, key_value
from ..words import at_row
from .sizes import TileSearchSizes
from .state import LOWEST, add_pair, sum_lanes

load_pair = T.ptx.ld.global_.v2.f32
load_whole_pair = T.ptx.ld.global_.v2.f64


def pair_warps(e: TileSearchSizes) -> int:
    """Warps that have a pair of the first kernel's blocks."""
    return ceildiv(min(e.blocks, e.threads), 32)


def rescaled(pairs: Any, at: int, unit: Any) -> Any:
    """The sum of a base and its sum, a pair of `whole_sums`, in another unit."""
    return change_base(pairs[at + 1], T.Cast("float32", pairs[at]), unit)


def pair_at(io: Any, s: Any, block: Any) -> Any:
    """Where the pair of a thread block of the first kernel is."""
    return io.sums.ptr_to(at_row(io, s.index, s.row, block, 0))


# fmt: off
@phase
def load_pairs(e, /, io, s, factor):
    """Load the pairs of the first kernel's blocks, as far as a thread has them.

    Reads: `sums` of the row.
    Writes: `m` and `d`, or `whole`, of warps that have a pair. With a pair a thread nobody waits for it here.
    Barriers: none.
    """
    if s.t < pair_warps(e) * 32:
        if e.whole_sums:
            s.whole[0] = T.Cast("float64", LOWEST)
            s.whole[1] = T.float64(0)
        else:
            s.m[0] = LOWEST
            s.d[0] = T.float32(0)
        if e.blocks <= e.threads:
            if s.t < e.blocks:
                if e.whole_sums:
                    load_whole_pair(s.whole[0], s.whole[1], pair_at(io, s, s.t))
                else:
                    load_pair(s.m[0], s.d[0], pair_at(io, s, s.t))
        else:
            for i in T.serial((e.blocks - s.t + (e.threads - 1)) // e.threads):
                if e.whole_sums:
                    load_whole_pair(s.whole[2], s.whole[3], pair_at(io, s, i * e.threads + s.t))
                    s.top[0] = T.Cast("float32", T.max(s.whole[0], s.whole[2]))
                    s.whole[1] = rescaled(s.whole, 0, s.top[0]) + rescaled(s.whole, 2, s.top[0])
                    s.whole[0] = T.Cast("float64", s.top[0])
                else:
                    load_pair(s.pair[0], s.pair[1], pair_at(io, s, i * e.threads + s.t))
                    add_pair(s.m, 0, s.d, 0, s.pair[0], s.pair[1], s.top, factor)


@phase
def find_top(e, /, s):
    """The row's largest score, which the search for tiles has told.

    Reads: `own`; or `largest`. Writes: `top`. Barriers: none, but all lanes take part.
    """
    if e.by_bits:
        s.peak[0] = s.own[0]
        for j in T.unroll(e.tile_groups // 32 - 1):
            s.peak[0] = T.max(s.peak[0], s.own[j + 1])
        s.top[0] = T.max(
            bits_value(T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.peak[0])), LOWEST)
    else:
        s.top[0] = T.max(bits_value(s.largest[0]), LOWEST)


def pairwise(terms: Sequence[Any]) -> Any:
    """Their sum, by pairs: in few steps that wait for each other."""
    while len(terms) > 1:
        terms = [functools.reduce(operator.add, terms[i : i + 2]) for i in range(0, len(terms), 2)]
    return terms[0]


@phase
def join_lanes(e, /, s, factor):
    """The sum of a warp's pairs; and its maximum, unless the row's is known.

    Reads: `m` and `d`, or `whole`; what `find_top` reads.
    Writes: `pairs`, the warp's; `top`, of the row if that is known.
    Barriers: none. The next one makes them visible.
    """
    if e.whole_sums or e.by_bits:
        find_top(e)(s)
    if s.t < pair_warps(e) * 32:
        if e.whole_sums:
            s.whole[1] = rescaled(s.whole, 0, power_unit(s.top[0], factor))
            sum_lanes(s.whole, 1)
            if s.t % 32 == 0:
                s.pairs[s.t // 32] = s.whole[1]
        else:
            if not e.by_bits:
                s.top[0] = s.m[0]
                for b in T.unroll(5):
                    s.top[0] = T.max(s.top[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.top[0], 1 << b, 32, 32))
            s.d[0] = s.d[0] * T.exp2((s.m[0] - s.top[0]) * factor)
            sum_lanes(s.d, 0)
            if s.t % 32 == 0:
                if e.by_bits:
                    s.pairs[s.t // 32] = s.d[0]
                else:
                    s.pairs[s.t // 32 * 2] = s.top[0]
                    s.pairs[s.t // 32 * 2 + 1] = s.d[0]


@phase
def join_pairs(e, /, io, s, factor):
    """The row's sum of exponentials, and its maximum.

    Reads: `pairs`; `top`, if it is known. Writes: `d` and `top`, in every thread; the normaliser. Barriers: none.
    """
    if e.whole_sums:
        s.whole[0] = pairwise([s.pairs[w] for w in range(pair_warps(e))])
        over_largest(s.d, s.rest, s.whole, s.top[0], factor)
    elif e.by_bits:
        s.d[0] = s.pairs[0]
        for w in T.unroll(pair_warps(e) - 1):
            s.d[0] = s.d[0] + s.pairs[w + 1]
    else:
        s.top[0] = LOWEST
        for w in T.unroll(pair_warps(e)):
            s.top[0] = T.max(s.top[0], s.pairs[w * 2])
        s.d[0] = T.float32(0)
        for w in T.unroll(pair_warps(e)):
            s.d[0] = s.d[0] + s.pairs[w * 2 + 1] * T.exp2((s.pairs[w * 2] - s.top[0]) * factor)
    if s.t == 0:
        T.buffer_store(io.normaliser, s.top[0] * io.scale + T.log(s.d[0]), at_row(io, s.index, s.row))


@phase
def best_of_lanes(lanes, /, s):
    """`best` = the best of `lanes` neighbouring lanes, at most of a warp. Barriers: none, but all lanes take part."""
    for b in T.unroll(min(lanes, 32).bit_length() - 1):
        s.best[0] = T.max(s.best[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.best[0], 1 << b, 32, 32))


@phase
def exponentials(e, /, s, size, factor):
    """What a warp's scores add to the row's sum of exponentials.

    Reads: `maxima`, `held`.
    Writes: `top`, of the row; `pairs`, the warp's sum; `best` is lost.
    Barriers: none. The next one makes the sum visible.
    """
    lanes = T.meta_var(e.threads // e.groups)
    s.best[0] = T.uint64(0)
    for j in T.serial(e.groups // lanes):
        s.best[0] = T.max(s.best[0], s.maxima[j * lanes + s.t % lanes])
    best_of_lanes(lanes)(s)
    # Not below the lowest number: the difference of two infinities would be NaN.
    s.top[0] = T.Select(s.best[0] == T.uint64(0), LOWEST, T.max(key_value(s.best[0]), LOWEST))
    s.d[0] = T.float32(0)
    for i in T.serial((size - s.t + (e.threads - 1)) // e.threads):
        s.d[0] = s.d[0] + T.exp2((bits_value(s.held[i * e.threads + s.t]) - s.top[0]) * factor)
    sum_lanes(s.d, 0)
    if s.t % 32 == 0:
        s.pairs[s.t // 32] = s.d[0]


@phase
def add_up(e, /, io, s):
    """Add up the sums of exponentials of all warps, by the first warp.

    Reads: `pairs`, one sum of each warp; `top`.
    Writes: `d` of the first warp and `pairs[32]`, the row's sum; the normaliser.
    Barriers: none; the caller's next one makes `pairs[32]` visible to other warps.
    """
    if s.t < 32:
        s.d[0] = T.Select(s.t < e.threads // 32, s.pairs[s.t], T.float32(0))
        sum_lanes(s.d, 0)
        if s.t == 0:
            s.pairs[32] = s.d[0]
            T.buffer_store(io.normaliser, s.top[0] * io.scale + T.log(s.d[0]), at_row(io, s.index, s.row))
# fmt: on
