"""Stream compaction without sorting: the words of a bitmap in ascending order, by population counts and scans.

All thread blocks of a list read the whole bitmap, a few kilobytes, and so know how many words come before their share
without asking each other. Figure 5 of Shi, Xu & Knight has one thread of a warp scan 32 counts; here a lane has some
bits, and a scan over the warp gives their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv
from tvm_sparse.formats.bitmap import BITS

from ..device.selection import lanes_sum, scan_lanes
from .extents import WARP

Phase = Callable[..., Any]


# fmt: off
@phase
def read_bitmap(e, load, /, s, io, row, share, t):
    """The bitmap into shared memory, and how many words it has. `load(s, io, row, word, u)` loads one of its int32 into
    the `u`-th of `held`, without bits that stand for no word; the loads of a thread are in flight together.

    Reads: the bitmap. Writes: `bitmap`; `before`, words of the shares before `share`, and `total`, all words, in every
    thread; as scratch `held`, `mine`, `totals`.
    Barriers: one.
    """
    s.before = 0
    s.total = 0
    for n in T.serial(ceildiv(e.bitmap, e.loads * e.threads)):
        for u in T.unroll(e.loads):
            if (n * e.loads + u) * e.threads + t < e.bitmap:
                load(s, io, row, (n * e.loads + u) * e.threads + t, u)
        for u in T.unroll(e.loads):
            word: T.let = (n * e.loads + u) * e.threads + t
            if word < e.bitmap:
                s.bitmap[word] = s.held[u]
                s.total = s.total + T.Cast("int32", T.popcount(s.held[u]))
                if word < share * e.share:
                    s.before = s.before + T.Cast("int32", T.popcount(s.held[u]))
    s.mine[0] = lanes_sum(s.before)
    s.mine[1] = lanes_sum(s.total)
    if t % WARP == 0:
        s.totals[t // WARP] = s.mine[0]
        s.totals[WARP + t // WARP] = s.mine[1]
    T.cuda.cta_sync()
    s.before = lanes_sum(T.if_then_else(t % WARP < e.warps, s.totals[t % WARP], 0))
    s.total = lanes_sum(T.if_then_else(t % WARP < e.warps, s.totals[WARP + t % WARP], 0))


@phase
def write_share(e, /, s, io, row, share, t):
    """The words of a share to their places.

    Reads: `bitmap`, `before`. Writes: candidates; `before`; as scratch `bits`, `mine`, `counts`, `at`.
    Barriers: one each round.
    """
    per_word = T.meta_var(BITS // e.item)
    for n in T.serial(ceildiv(e.items, e.threads)):
        item: T.let = n * e.threads + t
        word: T.let = share * e.share + item // per_word
        s.bits[0] = T.uint32(0)
        if item < e.items and word < e.bitmap:
            s.bits[0] = (s.bitmap[word] >> T.Cast("uint32", item % per_word * e.item)) & T.uint32((1 << e.item) - 1)
        s.mine[0] = T.Cast("int32", T.popcount(s.bits[0]))
        scan_lanes(t, s.mine, s.other)
        # Two sets of sums in turn: a warp that is ahead by a round does not overwrite what others still read.
        if t % WARP == WARP - 1:
            s.counts[n % 2 * WARP + t // WARP] = s.mine[0]
        T.cuda.cta_sync()
        s.other[0] = T.if_then_else(t % WARP < e.warps, s.counts[n % 2 * WARP + t % WARP], 0)
        s.at = s.before + s.mine[0] - T.Cast("int32", T.popcount(s.bits[0])) + lanes_sum(
            T.if_then_else(t % WARP < t // WARP, s.other[0], 0))
        s.before = s.before + lanes_sum(s.other[0])
        while s.bits[0] != T.uint32(0):
            if s.at < io.capacity:
                io.candidates[row, s.at] = (
                    word * BITS + item % per_word * e.item + T.Cast("int32", T.cuda.ffs_u32(s.bits[0])) - 1)
            s.at = s.at + 1
            s.bits[0] = s.bits[0] & (s.bits[0] - T.uint32(1))


@phase
def fill_rest(e, /, s, io, row, share, t):
    """Write -1 after the words, and how many words there are.

    Reads: `total`. Writes: candidates, counts; as scratch `at`. Barriers: none.
    """
    s.at = s.total + share * e.threads + t
    while s.at < io.capacity:
        io.candidates[row, s.at] = -1
        s.at = s.at + e.shares * e.threads
    if share == 0 and t == 0:
        io.counts[row] = s.total
# fmt: on
