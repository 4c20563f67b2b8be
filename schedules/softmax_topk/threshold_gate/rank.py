"""The survivors in order, and the outputs: by counting, in bins, or sorted where bins fail (see `device.ranking`)."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device import references
from ...device.loops import loop_of
from ...device.ranking import rank_in_bins, rank_key, refine_bins, sort_descending
from ...device.selection import (
    FULL_WARP,
    bits_value,
    key_bits,
    key_index,
    key_value,
)
from ..elements import write_value
from .layout import CROWD, Layout
from .state import LOWEST
from .survivors import keep_best


def exponent(s: Any, value: Any) -> tirx.PrimExpr:
    """(value - m) * scale, m being the element of the reference, in powers of e."""
    return references.exponent(value, s.factor[0], s.reference[0]) * s.unit[0]


# fmt: off
@phase
def clear_bins(layout, /, s):
    """Set to 0 what `rank_in_bins` expects as 0.

    Writes: `counts`, `flag`. Barriers: none.
    """
    for i in T.unroll(ceildiv(layout.pool.bins, 4 * layout.tiling.threads)):
        if (i * layout.tiling.threads + s.t) * 4 < layout.pool.bins:
            for v in T.vectorized(4):
                s.counts[(i * layout.tiling.threads + s.t) * 4 + v] = 0
    if s.t < 2:
        s.flag[s.t] = 0


@phase
def least_value(layout, /, s):
    """For a row without a threshold: the smallest value of the keys that is not minus infinity.

    Reads: `keys`, `size`. Writes: `threshold`; scratch is `warp_ranked`, `bits`. Barriers: one.
    """
    warps = T.meta_var(layout.tiling.warps)
    s.bits[0] = T.uint32(0xFFFFFFFF)
    for i in loop_of(layout.unroll)((s.size[0] - s.t + (layout.tiling.threads - 1)) // layout.tiling.threads):
        s.bits[0] = T.min(s.bits[0], key_bits(s.keys[i * layout.tiling.threads + s.t]))
    s.bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), s.bits[0])
    if s.t % 32 == 0:
        s.warp_ranked[s.t // 32] = s.bits[0]
    T.cuda.cta_sync()
    s.bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), s.warp_ranked[s.t % warps])
    s.threshold[0] = T.max(bits_value(s.bits[0]), LOWEST)


@T.inline
def place_in_output(s, rank, key):
    """Write one value and its index.

    Reads: `factor`, `reference`, `unit`, `inverse`, `logarithm`.
    """
    s.io.indices[s.row[0], rank] = T.Cast("int64", key_index(key))
    write_value(
        s.io.values, s.row[0], rank, exponent(s, key_value(key)), s.inverse[0], s.logarithm[0], s.io.log)


@T.inline
def place_in_kept(s, rank, key):
    """Put a ranked key into `kept`."""
    s.kept[rank] = key


@phase
def rank_by_counting(layout, place, rankers, /, s):
    """Call place(s, rank, key) for the k best keys, every one counted against every other.

    `rankers` threads share the ranking of a key.

    Reads: keys[0:size]. Writes: what `place` does; scratch is `need`, `pivot`, `slot`. Barriers: none.
    """
    for i in loop_of(layout.unroll)((s.size[0] * rankers + (layout.tiling.threads - 1)) // layout.tiling.threads):
        rank_key(layout.tiling.threads, rankers)(s, s.t, i)
        if s.t % rankers == 0 and s.need[0] < s.size[0] and s.slot[0] < layout.k:
            place(s, s.slot[0], s.pivot[0])


@phase
def sort_best(layout, /, s):
    """Sort the k best keys, whatever they are, into `kept`. After a barrier.

    Reads: keys[0:size]. Writes: `keys`, `kept`, and scratch as `keep_best`. Barriers: several.
    """
    threads, k = T.meta_var(layout.tiling.threads), T.meta_var(layout.k)
    loop = T.meta_var(loop_of(layout.unroll))
    if s.size[0] > k:
        keep_best(layout)(s)
    for i in loop((layout.pool.rounded - k - s.t + (threads - 1)) // threads):
        s.keys[k + i * threads + s.t] = T.uint64(0)
    sort_descending(threads, layout.pool.rounded, loop)(s, s.t)
    for i in loop((k - 1 - s.t + threads) // threads):
        s.kept[i * threads + s.t] = s.keys[i * threads + s.t]


def rank_survivors(layout: Layout) -> Phase:
    """Rank the k best survivors, and write them to the outputs. The phase is (s); `size` is k or more, after a barrier.

    A few are ranked by counting; others in bins, or in finer ones where ties crowd a bin; what crowds even these, by
    counting again, if they are few enough, or by selection and a bitonic sort.

    Reads: `keys`, `size`, `threshold`, `equals_until`, `largest`, what `place_in_output` reads, and bins that are 0.
    Writes: the outputs.
    Barriers: several, none if they are ranked by counting at once.
    """
    threads, k, vocab = layout.tiling.threads, layout.k, layout.vocab
    counted, countable, crowded_countable = layout.counted, layout.countable, layout.crowded_countable
    bins, each, loop = layout.pool.bins, layout.binned_at_once, loop_of(layout.unroll)
    clear, least, sort = clear_bins(layout), least_value(layout), sort_best(layout)
    count_to_output = rank_by_counting(layout, place_in_output, layout.rankers)
    count_by_half = rank_by_counting(layout, place_in_output, max(layout.rankers // 2, 1))
    count_to_kept = rank_by_counting(layout, place_in_kept, layout.rankers)
    by_half = layout.countable_by_half
    in_bins = rank_in_bins(threads, k, bins, CROWD, vocab, place_in_output, each=each, loop=loop)
    refine = refine_bins(threads, bins, CROWD, vocab, loop)
    in_finer_bins = rank_in_bins(threads, k, bins, 2 * CROWD, vocab, place_in_output, finer=True, loop=loop)

    @T.inline
    def phase(s):
        if countable > 0 and s.size[0] <= countable:
            count_to_output(s)
        elif by_half > 0 and s.size[0] <= by_half:
            count_by_half(s)
        else:
            if counted:
                clear(s)
                T.cuda.cta_sync()
            if s.threshold[0] == LOWEST:
                T.cuda.cta_sync()
                least(s)
            in_bins(s, s.t)
            if s.slot[0] != 0:
                refine(s, s.t)
                if s.slot[0] == 0:
                    in_finer_bins(s, s.t)
            if s.slot[0] != 0:
                T.cuda.cta_sync()
                if s.size[0] <= crowded_countable:
                    count_to_kept(s)
                else:
                    sort(s)
                T.cuda.cta_sync()
                for i in loop((k - 1 - s.t + threads) // threads):
                    place_in_output(s, i * threads + s.t, s.kept[i * threads + s.t])

    return phase
# fmt: on
