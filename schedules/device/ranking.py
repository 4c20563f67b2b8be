"""Device code that puts a block's keys in order: by counting, in bins, or by a bitonic sort (see `selection` for keys).

Which one is quickest depends on how many keys there are. Counting compares every key with every other: for a few. Bins
that are linear in the value leave only the keys of one bin to be compared: for many, unless ties or an outlier crowd a
bin. Of ties the bins are divided once more, by the index. A bitonic sort takes longest and never fails.

A phase is made for static extents and called with a state: any object that has the buffers which its head names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from .selection import FULL_WARP, MINUS_INFINITY, key_bits, key_index, key_value, scan_lanes

# Keys of one bin that are still ranked by counting, every one against every other.
CROWD = 32
# Bits of the number of a key, from 1 on; what is above them in `nexts` is the key's bin.
NEXT_BITS = 16


def spread(bin: tirx.PrimExpr) -> tirx.PrimExpr:
    """Where a bin lies: one word in 33 is left out, so that threads with 32 bins each meet no bank conflict."""
    return bin + bin // 32


# fmt: off
def rank_key(threads: int, rankers: int) -> Callable[..., Any]:
    """In step i, `rankers` threads (a power of two) count how many keys are above one: its place in the order.

    The phase is (s, t, i). Every thread of the block must come here, for i = 0, 1, ... until i * threads is at least
    size * rankers.

    Reads: keys[0:size].
    Writes: `need`, the key's position in the buffer; `pivot`, the key; `slot`, its rank, in all of its threads.
        Positions from `size` on repeat the last key.
    Barriers: none.
    """

    @T.inline
    def phase(s, t, i):
        s.need[0] = (i * threads + t) // rankers
        s.pivot[0] = s.keys[T.min(s.need[0], s.size[0] - 1)]
        s.slot[0] = 0
        for j in T.serial((s.size[0] - t % rankers + (rankers - 1)) // rankers):
            if s.keys[j * rankers + t % rankers] > s.pivot[0]:
                s.slot[0] = s.slot[0] + 1
        for b in T.unroll(rankers.bit_length() - 1):
            s.slot[0] = s.slot[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.slot[0], 1 << b, 32, 32)

    return phase


def bin_of_key(bins: int) -> Callable[..., Any]:
    """The bin of a key, linear in the value from `largest` down. The phase is (s, key, per_value, bin).

    Where all values are equal, which makes `per_value` infinite, it is linear in the index, with `bins_per_index`. An
    infinite range makes neither sense: keys share a bin.
    """

    @T.inline
    def phase(s, key, per_value, bin):
        bin[0] = 0
        if per_value[0] == T.infinity("float32"):
            bin[0] = T.Cast("int32", T.min(
                T.Cast("float32", key_index(key)) * s.bins_per_index[0], T.float32(bins - 1)))
        else:
            if per_value[0] > T.float32(0):
                bin[0] = T.Cast("int32", T.min(
                    (s.largest[0] - key_value(key)) * per_value[0], T.float32(bins - 1)))
        if key_bits(key) <= T.uint32(MINUS_INFINITY):
            bin[0] = bins - 1
        if key_bits(key) == T.uint32(0xFFFFFFFF):
            bin[0] = 0

    return phase


def bins_of_thread(threads: int, bins: int) -> int:
    """Bins that a thread scans, a power of two."""
    return 1 << (ceildiv(bins, threads) - 1).bit_length()


@T.inline
def sum_before(s, t, scanning, above, own, other):
    """`above`: how many keys the warps before a lane's have in their bins, of the first `scanning` warps.

    Every warp scans `bin_totals` for itself. `own` and `other` are lost.
    """
    above[0] = 0
    if t % 32 < scanning:
        above[0] = s.bin_totals[t % 32]
    own[0] = above[0]
    scan_lanes(t, above, other)
    above[0] = above[0] - own[0]


def rank_in_bins(
    threads: int, k: int, bins: int, place: Callable[..., Any], *, finer: bool = False
) -> Callable[..., Any]:
    """Call place(s, rank, key) for the k best of keys[0:size], size >= k, unless a bin is crowded. The phase is (s, t).

    The keys of each bin, linear in the value between `threshold` and `largest` (or in the index, if these are equal),
    are counted and linked; a scan over the bins tells how many keys are above each; in its bin a key is ranked by
    counting. Bins of more than CROWD keys (ties, an outlier that stretches the range) would take too long.

    With `finer`, bins are those of `refine_bins`, which may have joined a few that were not crowded.

    Reads: `keys`, `size`, `threshold`, `largest`, `bins_per_index`; if `finer`, `nexts`. Scratch in shared memory:
        `counts` and `heads`, an integer a bin (see `spread`), and `flag`, all of which come as 0; `nexts`, one a key;
        `bin_totals`, one a warp.
    Writes: `slot`, not 0 if some bin is crowded and nothing was placed.
    Barriers: several; begins with one.
    """
    # Bins that a thread scans, and warps that do.
    each_bins = bins_of_thread(threads, bins)
    scanning = bins // each_bins // 32
    crowd = 2 * CROWD if finer else CROWD
    bin_of = bin_of_key(bins)

    @T.inline
    def find(s, own, per_value, bin):
        """The bin of a key."""
        if finer:
            bin[0] = s.nexts[own] >> NEXT_BITS
        else:
            bin_of(s, s.keys[own], per_value, bin)

    def link(s: Any, own: Any, bin: Any) -> tirx.PrimExpr:
        """What a key's `nexts` is: the key that was the first of its bin, which it is from now on."""
        first = T.call_extern("int32", "atomicExch", s.heads.ptr_to([spread(bin[0])]), own + 1)
        return bin[0] << NEXT_BITS | first if finer else first

    @T.inline
    def phase(s, t):
        bin = T.alloc_local([1], "int32")
        own = T.alloc_local([1], "int32")
        above = T.alloc_local([1], "int32")
        other = T.alloc_local([1], "int32")
        rank = T.alloc_local([1], "int32")
        per_value = T.alloc_local([1], "float32")
        per_value[0] = T.float32(bins) / (s.largest[0] - s.threshold[0])
        T.cuda.cta_sync()
        for i in T.serial((s.size[0] - t + (threads - 1)) // threads):
            find(s, i * threads + t, per_value, bin)
            T.evaluate(T.cuda.atomic_add(s.counts.ptr_to([spread(bin[0])]), T.int32(1)))
            s.nexts[i * threads + t] = link(s, i * threads + t, bin)
        T.cuda.cta_sync()
        # A thread's bins in order, then the threads of a warp: how many keys are above each bin and in this warp's.
        if t * each_bins < bins:
            above[0] = 0
            for b in T.unroll(each_bins):
                own[0] = s.counts[spread(t * each_bins + b)]
                if own[0] > crowd:
                    s.flag[0] = 1
                above[0] = above[0] + own[0]
            rank[0] = above[0]
            scan_lanes(t, above, other)
            if t % 32 == 31:
                s.bin_totals[t // 32] = above[0]
            above[0] = above[0] - rank[0]
            for b in T.unroll(each_bins):
                own[0] = s.counts[spread(t * each_bins + b)]
                s.counts[spread(t * each_bins + b)] = above[0]
                above[0] = above[0] + own[0]
        T.cuda.cta_sync()
        s.slot[0] = s.flag[0]
        if s.slot[0] == 0:
            # The warps' totals, scanned by every warp for itself.
            sum_before(s, t, scanning, above, own, other)
            for i in T.serial((s.size[0] + (threads - 1)) // threads):
                own[0] = T.min(i * threads + t, s.size[0] - 1)
                find(s, own[0], per_value, bin)
                rank[0] = s.counts[spread(bin[0])] + T.tvm_warp_shuffle(
                    T.uint32(FULL_WARP), above[0], bin[0] // (each_bins * 32), 32, 32)
                if i * threads + t < s.size[0] and rank[0] < k:
                    other[0] = s.heads[spread(bin[0])]
                    while other[0] != 0:
                        if s.keys[other[0] - 1] > s.keys[own[0]]:
                            rank[0] = rank[0] + 1
                        other[0] = s.nexts[other[0] - 1]
                        if finer:
                            other[0] = other[0] & ((1 << NEXT_BITS) - 1)
                    if rank[0] < k:
                        place(s, rank[0], s.keys[own[0]])

    return phase


def spread_equals(bins: int, columns: int) -> Callable[..., Any]:
    """A key's finer bin where many keys are equal, from bins that are linear in the value. The phase is (s, own, bin).

    A bin of one value alone is divided by the index: it takes as many of the finer bins as it has of the keys, and its
    keys lie among these as their indices lie among the columns that may have them: those up to `equals_until` for
    the threshold, all for others. Keys of another bin stay together.

    Reads: keys[own], `size`, `threshold`, `equals_until`, `heads`; bin[0], the key's bin, and where that begins and
        ends in the order, bin[1] and bin[2].
    Writes: nexts[own], with the finer bin; flag[1], not 0 if the key's bin is crowded by keys of several values.
    Barriers: none.
    """

    @T.inline
    def phase(s, own, bin):
        place = T.alloc_local([1], "float32")
        place[0] = T.float32(0)
        if bin[2] - bin[1] > CROWD:
            s.pivot[0] = s.keys[s.heads[spread(bin[0])] - 1]
            if key_bits(s.keys[own]) != key_bits(s.pivot[0]):
                s.flag[1] = 1
            place[0] = T.Cast("float32", columns)
            if key_value(s.pivot[0]) == s.threshold[0]:
                place[0] = T.Cast("float32", T.min(s.equals_until[0], columns - 1) + 1)
            # Rounding does not change the order: every step keeps it.
            place[0] = T.Cast("float32", bin[2] - bin[1] - 1) * T.min(
                T.Cast("float32", key_index(s.keys[own])) / place[0], T.float32(1))
        s.nexts[own] = T.min(bins - 1, T.Cast(
            "int32", (T.Cast("float32", bin[1]) + place[0]) * (T.float32(bins) / T.Cast("float32", s.size[0]))
        )) << NEXT_BITS

    return phase


def refine_bins(threads: int, bins: int, columns: int) -> Callable[..., Any]:
    """Finer bins for what `rank_in_bins` could not rank, if it is ties that crowd a bin. The phase is (s, t).

    Keys are of a row of so many `columns`.

    Reads: what `rank_in_bins` has left in `counts`, `heads`, `bin_totals`; `keys`, `size`, which is below 2^16,
        `threshold`, `equals_until`, `largest`, `bins_per_index`; flag[1], which comes as 0.
    Writes: `slot`, 0 if bins are fine now; `nexts` with a key's bin; `counts`, `heads` and flag[0] as 0; `pivot` as
        scratch.
    Barriers: one, in its midst.
    """
    each_bins = bins_of_thread(threads, bins)
    scanning = bins // each_bins // 32
    bin_of, refine = bin_of_key(bins), spread_equals(bins, columns)

    @T.inline
    def phase(s, t):
        bin = T.alloc_local([3], "int32")
        own = T.alloc_local([1], "int32")
        above = T.alloc_local([1], "int32")
        other = T.alloc_local([1], "int32")
        per_value = T.alloc_local([1], "float32")
        per_value[0] = T.float32(bins) / (s.largest[0] - s.threshold[0])
        sum_before(s, t, scanning, above, own, other)
        for i in T.serial((s.size[0] + (threads - 1)) // threads):
            bin_of(s, s.keys[T.min(i * threads + t, s.size[0] - 1)], per_value, bin)
            bin[1] = s.counts[spread(bin[0])] + T.tvm_warp_shuffle(
                T.uint32(FULL_WARP), above[0], bin[0] // (each_bins * 32), 32, 32)
            own[0] = T.min(bin[0] + 1, bins - 1)
            bin[2] = s.counts[spread(own[0])] + T.tvm_warp_shuffle(
                T.uint32(FULL_WARP), above[0], own[0] // (each_bins * 32), 32, 32)
            if bin[0] == bins - 1:
                bin[2] = s.size[0]
            if i * threads + t < s.size[0]:
                refine(s, i * threads + t, bin)
        T.cuda.cta_sync()
        s.slot[0] = s.flag[1]
        for i in T.serial((spread(bins) - 1 - t + threads) // threads):
            s.counts[i * threads + t] = 0
            s.heads[i * threads + t] = 0
        if t == 0:
            s.flag[0] = 0

    return phase


def sort_descending(threads: int, extent: int) -> Callable[..., Any]:
    """A bitonic sort of keys[0:extent], the largest first; `extent` is a power of two, 32 or more. The phase is (s, t).

    A thread holds keys t, t + threads, ... Step p compares elements 2^p, ..., 2, 1 apart. Within a warp the exchange is
    a shuffle, beyond it goes through shared memory.

    Reads and writes: `keys`.
    Barriers: several; begins and ends with one.
    """
    each = ceildiv(extent, threads)

    @T.inline
    def keep_ordered(t, e, p, distance, own, other):
        """One comparator: of a pair `distance` apart, step p wants the larger below if bit p + 1 of the place is 0."""
        if (((e * threads + t) >> (p + 1)) & 1 == 0) == ((e * threads + t) & distance == 0):
            own[e] = T.max(own[e], other[0])
        else:
            own[e] = T.min(own[e], other[0])

    @T.inline
    def phase(s, t):
        own = T.alloc_local([each], "uint64")
        other = T.alloc_local([1], "uint64")
        T.cuda.cta_sync()
        for e in T.unroll(each):
            own[e] = s.keys[T.min(e * threads + t, extent - 1)]
        for p in T.serial(extent.bit_length() - 1):
            for q in T.serial(T.max(p - 4, 0)):
                T.cuda.cta_sync()
                for e in T.unroll(each):
                    if e * threads + t < extent:
                        s.keys[e * threads + t] = own[e]
                T.cuda.cta_sync()
                for e in T.unroll(each):
                    other[0] = s.keys[T.min((e * threads + t) ^ (1 << (p - q)), extent - 1)]
                    keep_ordered(t, e, p, 1 << (p - q), own, other)
            for q in T.serial(T.min(p, 4) + 1):
                for e in T.unroll(each):
                    other[0] = T.tvm_warp_shuffle_xor(
                        T.uint32(FULL_WARP), own[e], 1 << (T.min(p, 4) - q), 32, 32)
                    keep_ordered(t, e, p, 1 << (T.min(p, 4) - q), own, other)
        T.cuda.cta_sync()
        for e in T.unroll(each):
            if e * threads + t < extent:
                s.keys[e * threads + t] = own[e]
        T.cuda.cta_sync()

    return phase
# fmt: on
