"""A pass over a block's share of the row, tile after tile: the sum of exponentials, and the threshold's survivors."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.overlap import wait_then_start_consumer
from ...device.selection import FULL_WARP, order
from . import deferred
from .cluster import announce_block, await_blocks
from .rank import clear_bins
from .sample import lower_threshold, offer_sample, take_threshold
from .state import EQUALS, LOWER_AGAIN, LOWEST, SETTLED, SUM_AGAIN, WRITTEN, not_below
from .survivors import compact, mark_survivors, push_survivors
from .tiles import find_top, prefetch_tile, rows_beside, start_tile, take_tile

# What `State.sampling` says of the tile in hand, if not 0: it is the sample, or that comes again. Then its exponentials
# stay in the sum: added anew they would be rounded otherwise, as they were of a warp's own reference.
SAMPLE, REPEATED = 1, 2


# fmt: off
@phase
def await_producer(layout, /, s):
    """Do what does not depend on the producer kernel, and then wait until what that wrote is visible.

    Reads: `address`, `start`, `end`. Writes: `ahead`; `counts`, `flag` as 0 if bins will be needed. Barriers: none.
    """
    if layout.tiling.cluster > 1:
        announce_block(s)
    if not layout.counted:
        clear_bins(layout)(s)
    if layout.prefetch:
        # Only a hint: rows may still be written.
        if s.block < rows_beside(layout):
            prefetch_tile(layout.tiling)(s, s.address)
    if layout.overlap:
        wait_then_start_consumer()


@phase
def begin_pass(layout, /, s, attempt):
    """Start the first tiles, and set everything to how it is before any element was read.

    Reads: `address`, `start`, `end`, `settled`; `warp_ranked`, for a lower threshold.
    Writes: `ring`, asynchronously; `count`, `full`, `found`, `marks`, `verdict`, `united_count`;
        `sum`, `threshold`, `equals_until`, `sampling`.
    Barriers: one, at the end; of a cluster one before.
    After: everything above minus infinity passes, unless `settled` says that a threshold stays or is lowered; only the
        first attempt takes a sample.
    """
    for i in T.unroll(layout.tiling.stages):
        start_tile(layout.tiling)(s, i)
    if layout.tiling.cluster > 1 and attempt == 0:
        # While the first tiles are being copied.
        await_blocks(s)
    if s.t == 0:
        s.count[0] = 0
        s.full[0] = T.uint32(0)
        s.found[EQUALS] = 0
        if layout.deferred:
            s.marks[0] = 0
            s.found[WRITTEN] = 0
        if layout.tiling.cluster > 1:
            s.verdict[0] = SETTLED
            s.united_count[0] = 0
    s.sum[0] = T.float32(0)
    if s.settled[0] != SUM_AGAIN:
        s.threshold[0] = LOWEST
        s.equals_until[0] = layout.vocab
    if layout.lowers:
        if s.settled[0] == LOWER_AGAIN:
            lower_threshold(layout)(s)
    s.sampling[0] = T.Select(attempt == 0, SAMPLE, 0)
    T.cuda.cta_sync()


@phase
def add_exponentials(layout, /, s):
    """Add the tile's exponentials to the thread's sum.

    Reads: `x`, `factor`, `reference`. Writes: `sum`, `sum_before`; scratch is `power`. Barriers: none.
    """
    s.sum_before[0] = s.sum[0]
    for e in T.unroll(layout.tiling.held):
        # One rounding, so that the reference cancels in the quotient; and without the steps that exp2
        # takes for subnormal results, which add nothing to a sum of about 1 or more.
        T.ptx.fma.rn.f32(s.power[0], s.x[e], s.factor[0], T.float32(0) - s.reference[0])
        T.ptx.ex2.approx.ftz.f32(s.power[0], s.power[0])
        s.sum[0] = s.sum[0] + s.power[0]


@phase
def push_marked(layout, /, s):
    """Push the tile's survivors, and call for a compaction where some find no room."""
    if s.bits[0] != T.uint32(0):
        push_survivors(layout)(s, s.i[0])
    if layout.compacts:
        s.called[0] = T.Cast("uint32", T.cuda.any_sync(T.uint32(FULL_WARP), s.bits[0] != T.uint32(0)))
        if s.called[0] != T.uint32(0):
            if s.i[0] == 0:
                s.sampling[0] = REPEATED
            else:
                s.sum[0] = s.sum_before[0]


@phase
def take_survivors(layout, /, s, attempt):
    """Push what passes the threshold of the tile in hand, or mark the tile.

    Reads: the tile, `threshold`, `equals_until`, `i`. Writes: `keys`, `count`, or the list of marked tiles; `largest`;
    `called`, not 0 if the buffer is full: then the tile is taken again; its exponentials are removed from the sum, or
    `sampling` says that the sum already has them. Barriers: none.
    """
    mark = T.meta_var(mark_survivors(layout))
    # A row with a NaN is always read twice: only then may elements pass where the largest does not.
    if layout.deferred:
        deferred.mark_tile(layout)(s, s.i[0], attempt)
    elif layout.dense:
        mark(s, attempt)
        push_marked(layout)(s)
    elif T.cuda.any_sync(T.uint32(FULL_WARP), not_below(s.top[0], s.threshold[0], attempt)) != 0:
        s.largest[0] = T.max(s.largest[0], s.top[0])
        mark(s, attempt)
        push_marked(layout)(s)


@phase
def stream_tiles(layout, /, s, attempt):
    """Take tile after tile, until the share has been read or a compaction is called for.

    Reads: `ring`, and `i`, where it continues.
    Writes: what its parts write; `i`, `called`.
    Barriers: those of the sample.
    """
    tiling = T.meta_var(layout.tiling)
    start = T.meta_var(start_tile(tiling))
    while s.i[0] < tiling.tiles and s.called[0] == T.uint32(0):
        take_tile(layout)(s, s.i[0])
        if layout.deferred:
            # Nothing reads the ring any more.
            start(s, s.i[0] + tiling.stages)
        if s.sampling[0] != 0:
            if not layout.compacts or s.sampling[0] == SAMPLE:
                if layout.dense:
                    find_top(s, tiling.held)
                offer_sample(layout)(s)
        add_exponentials(layout)(s)
        if s.sampling[0] != 0:
            if not layout.compacts or s.sampling[0] == SAMPLE:
                s.sampling[0] = 0
                take_threshold(layout)(s)
            else:
                s.sampling[0] = 0
                s.sum[0] = s.sum_before[0]
        take_survivors(layout)(s, attempt)
        if s.called[0] == T.uint32(0):
            if not layout.deferred:
                start(s, s.i[0] + tiling.stages)
            s.i[0] = s.i[0] + 1
            s.pending[0] = 1


@phase
def stream_row(layout, /, s, attempt):
    """Take all tiles of the share, with a compaction whenever a warp calls for one.

    Reads: `ring`.
    Writes: what `stream_tiles` and `compact` write; `warp_sums`, `warp_largest`.
    Barriers: one at the end, and those of the sample and of compactions.
    After: all that passes the threshold is in the buffer or on the list.
    """
    row_bytes = T.meta_var(layout.vocab * layout.tiling.itemsize)
    s.i[0] = 0
    s.pending[0] = 1
    s.called[0] = T.uint32(0)
    s.reading[0] = 1
    while s.reading[0] != 0:
        stream_tiles(layout)(s, attempt)
        if layout.prefetch:
            if attempt == 0 and s.block + rows_beside(layout) < s.io.batch:
                s.next_address[0] = s.address[0] + T.Cast("uint64", rows_beside(layout)) * T.uint64(row_bytes)
                prefetch_tile(layout.tiling)(s, s.next_address)
        share_of_warp(s)
        T.cuda.cta_sync()
        s.reading[0] = 0
        if layout.compacts:
            # Warps that have read their part of the row wait here for calls until all have.
            T.ptx.ld.volatile.shared.u32(s.called[0], s.full.ptr_to([0]))
            if s.called[0] != T.uint32(0):
                compact(layout)(s)
                s.called[0] = T.uint32(0)
                s.reading[0] = 1


@T.inline
def share_of_warp(s):
    """A warp's sum and its largest element, for the block.

    Reads: `sum`, `largest`. Writes: `warp_sums`, `warp_largest`. Barriers: none, but all lanes take part.
    """
    s.plain[0] = T.cuda.warp_sum(s.sum[0])
    order(s.largest[0], s.power, s.ordered)
    s.ordered[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.ordered[0])
    if s.t % 32 == 0:
        s.warp_sums[s.t // 32] = s.plain[0]
        s.warp_largest[s.t // 32] = s.ordered[0]


@phase
def add_up(layout, /, s):
    """The block's sum of exponentials.

    Reads: `warp_sums`. Writes: `sum`. Barriers: none.
    """
    s.sum[0] = T.float32(0)
    if s.t % 32 < layout.tiling.warps:
        s.sum[0] = s.warp_sums[s.t % 32]
    s.sum[0] = T.cuda.warp_sum(s.sum[0])
# fmt: on
