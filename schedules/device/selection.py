"""Device code that the CUDA top-k templates share: keys that sort, thresholds, selection and sorting in shared memory.

A key is a uint64: the value's bits, made to order as unsigned integers (NaN above everything, -0.0 as 0.0), above
the complement of its index. Keys of a row are unique, so a selection has one right answer, and larger is better.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from .arithmetic import is_nan
from .thresholds import FIRST, Rank

FULL_WARP = 0xFFFFFFFF
RADIX_BITS = 8
RADIX_BINS = 1 << RADIX_BITS
MINUS_INFINITY, PLUS_INFINITY = 0x007FFFFF, 0xFF800000  # order_bits of these
RANKERS = 8  # threads at most that share the ranking of one key
REMOVALS = 5  # of a warp's maxima, one after another; to find what lies deeper the lanes are sorted
CROWD = 32  # keys of one bin that are still ranked by counting


def order_bits(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """A uint32 that orders as the float32 does."""
    bits = T.reinterpret("uint32", x)
    ordered = T.Select(bits >> T.uint32(31) != T.uint32(0), ~bits, bits | T.uint32(0x80000000))
    ordered = T.Select(x == T.float32(0), T.uint32(0x80000000), ordered)
    return T.Select(is_nan(x), T.uint32(0xFFFFFFFF), ordered)


@T.inline
def order(x, plain, bits):
    """`bits` = order_bits(x), in few instructions and no branch.

    A sum of a GPU makes -0.0 to 0.0 and any NaN to 0x7FFFFFFF; `plain` is where it is left.
    """
    T.ptx.add.rn.f32(plain[0], x, T.float32(0))
    bits[0] = T.reinterpret("uint32", plain[0]) ^ (
        T.Cast("uint32", T.reinterpret("int32", plain[0]) >> 31) | T.uint32(0x80000000)
    )


def bits_value(ordered: tirx.PrimExpr) -> tirx.PrimExpr:
    """The float32 of `order_bits`."""
    bits = T.Select(ordered >> T.uint32(31) != T.uint32(0), ordered & T.uint32(0x7FFFFFFF), ~ordered)
    return T.reinterpret("float32", bits)


def make_key(x: tirx.PrimExpr, index: tirx.PrimExpr) -> tirx.PrimExpr:
    return join_key(order_bits(x), index)


def join_key(ordered: tirx.PrimExpr, index: tirx.PrimExpr) -> tirx.PrimExpr:
    low = T.uint32(0xFFFFFFFF) - T.Cast("uint32", index)
    return (T.Cast("uint64", ordered) << T.uint64(32)) | T.Cast("uint64", low)


def key_bits(key: tirx.PrimExpr) -> tirx.PrimExpr:
    return T.Cast("uint32", key >> T.uint64(32))


def key_value(key: tirx.PrimExpr) -> tirx.PrimExpr:
    return bits_value(key_bits(key))


def key_index(key: tirx.PrimExpr) -> tirx.PrimExpr:
    return T.uint32(0xFFFFFFFF) - T.Cast("uint32", key & T.uint64(0xFFFFFFFF))


def spread(bin: tirx.PrimExpr) -> tirx.PrimExpr:
    """Where a bin lies: one word in 33 is left out, so that threads with 32 bins each meet no bank conflict."""
    return bin + bin // 32


def below(lane: tirx.PrimExpr, lanes: tirx.PrimExpr) -> tirx.PrimExpr:
    """How many of `lanes`, a ballot, come before this one."""
    return T.Cast("int32", T.popcount(lanes & ((T.uint32(1) << T.Cast("uint32", lane)) - T.uint32(1))))


@T.inline
def scan_lanes(t, value, other):
    """The inclusive sum of `value` over the lanes of a warp up to one's own; `other` is lost."""
    for s in T.unroll(5):
        other[0] = T.tvm_warp_shuffle_up(T.uint32(FULL_WARP), value[0], 1 << s, 32, 32)
        if t % 32 >= (1 << s):
            value[0] = value[0] + other[0]


class DeviceFunctions(NamedTuple):
    """What `device_functions` makes, to be called in a kernel."""

    select_pivot: Any
    keep_selected: Any
    maxima_of_warp: Any
    offer_maxima: Any
    place_of_maxima: Any
    rank_key: Any
    rank_in_bins: Any
    sort_descending: Any


def device_functions(
    threads: int, k: int, bins: int = 256, place: Rank = FIRST, floors: int = 0, rankers: int = RANKERS
) -> DeviceFunctions:
    """The functions below for blocks of `threads` and a selection of `k`, for use in a TVMScript kernel.

    `floors`: of how many warps `place_of_maxima` takes the floors (see `thresholds.Floor`); 0 for none. `rankers`: how
    many threads share the ranking of one key, a power of two.
    """
    warps = threads // 32
    lanes_bins = RADIX_BINS // 32
    digits = 64 // RADIX_BITS
    # sort_descending: keys, a power of two of at least a warp, and how many of them a thread holds.
    rounded = max(1 << (k - 1).bit_length(), 32)
    each = ceildiv(rounded, threads)
    # rank_in_bins: bins that a thread scans, a power of two, and warps that do.
    each_bins = 1 << (ceildiv(bins, threads) - 1).bit_length()
    scanning = bins // each_bins // 32
    # place_of_maxima: warps' values that are read at once.
    together = math.gcd(warps, 4)

    # fmt: off
    @T.inline
    def find_digit(t, histogram, found, need):
        """The bin that holds the need-th largest, counted from the top: found = bin, rank within it, its size."""
        if t < 32:
            own = T.alloc_local([1], "int32")
            above = T.alloc_local([1], "int32")
            other = T.alloc_local([1], "int32")
            own[0] = 0
            for b in T.unroll(lanes_bins):
                own[0] = own[0] + histogram[RADIX_BINS - 1 - (t * lanes_bins + b)]
            # inclusive scan over the lanes, the highest bins on lane 0
            above[0] = own[0]
            scan_lanes(t, above, other)
            above[0] = above[0] - own[0]
            for b in T.unroll(lanes_bins):
                own[0] = histogram[RADIX_BINS - 1 - (t * lanes_bins + b)]
                if above[0] < need[0] and need[0] <= above[0] + own[0]:
                    found[0] = RADIX_BINS - 1 - (t * lanes_bins + b)
                    found[1] = need[0] - above[0]
                    found[2] = own[0]
                above[0] = above[0] + own[0]

    @T.inline
    def select_pivot(t, key_at, source, extra, row, size, histogram, found, pivot, mask, need):
        """`pivot`: of the `size` unique keys exactly k are >= pivot. Ends and begins with a barrier.

        The i-th key is key_at(source, extra, row, i): one of a buffer, or made of an element of a row.
        """
        pivot[0] = T.uint64(0)
        mask[0] = T.uint64(0)
        need[0] = k
        T.cuda.cta_sync()
        for digit in T.serial(digits):
            for i in T.serial((RADIX_BINS - 1 - t + threads) // threads):
                histogram[i * threads + t] = 0
            T.cuda.cta_sync()
            for i in T.serial((size - t + (threads - 1)) // threads):
                if (key_at(source, extra, row, i * threads + t) ^ pivot[0]) & mask[0] == T.uint64(0):
                    T.evaluate(T.cuda.atomic_add(
                        histogram.ptr_to([T.Cast("int32",
                            (key_at(source, extra, row, i * threads + t)
                             >> T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
                            & T.uint64(RADIX_BINS - 1))]),
                        T.int32(1)))
            T.cuda.cta_sync()
            find_digit(t, histogram, found, need)
            T.cuda.cta_sync()
            pivot[0] = pivot[0] | (
                T.Cast("uint64", found[0]) << T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
            mask[0] = mask[0] | (T.uint64(RADIX_BINS - 1) << T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
            need[0] = found[1]
            # All of the bin is wanted: no lower digit decides.
            if found[1] == found[2]:
                break

    @T.inline
    def keep_selected(t, keys, size, kept, count, pivot):
        """Move the k keys that are >= pivot to the front of `keys`, through `kept`."""
        T.cuda.cta_sync()
        if t == 0:
            count[0] = 0
        T.cuda.cta_sync()
        for i in T.serial((size - t + (threads - 1)) // threads):
            if keys[i * threads + t] >= pivot[0]:
                kept[T.cuda.atomic_add(count.ptr_to([0]), T.int32(1))] = keys[i * threads + t]
        T.cuda.cta_sync()
        for i in T.serial((k - 1 - t + threads) // threads):
            keys[i * threads + t] = kept[i * threads + t]
        T.cuda.cta_sync()

    @T.inline
    def remove_largest(t, value, largest, lanes):
        """Set the largest of a warp's values to 0, in one lane alone if several have it; then find the next one."""
        lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), value[0] == largest[0])
        if T.Cast("int32", T.cuda.ffs_u32(lanes[0])) - 1 == t % 32:
            value[0] = T.uint32(0)
        largest[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), value[0])

    @T.inline
    def maxima_of_warp(t, bits, top, largest):
        """`top`, `largest`: the largest and the `place.lane`-th of the values that a warp's threads have in `bits`.

        They are lost.
        """
        lanes = T.alloc_local([1], "uint32")
        if place.lane > REMOVALS:
            # a bitonic sort of the lanes, the largest first
            for p in T.unroll(5):
                for q in T.unroll(5):
                    if q <= p:
                        lanes[0] = T.tvm_warp_shuffle_xor(
                            T.uint32(FULL_WARP), bits[0], 1 << T.max(p - q, 0), 32, 32)
                        bits[0] = T.Select(
                            (t % 32 >> (p + 1)) & 1 == (t >> T.max(p - q, 0)) & 1,
                            T.max(bits[0], lanes[0]), T.min(bits[0], lanes[0]))
            top[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), bits[0], 0, 32, 32)
            largest[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), bits[0], place.lane - 1, 32, 32)
        else:
            top[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), bits[0])
            largest[0] = top[0]
            for _ in T.serial(place.lane - 1):
                remove_largest(t, bits, largest, lanes)

    @T.inline
    def offer_maxima(t, floor, top, largest, group, group_top, group_floor):
        """Leave a warp's values in shared memory, for `place_of_maxima`."""
        if warps > 1:
            if t % 32 == 0:
                group[t // 32] = largest[0]
                group_top[t // 32] = top[0]
                if floors > 0:
                    group_floor[t // 32] = floor[0]

    @T.inline
    def place_of_maxima(t, floor, top, group, group_top, group_floor, reached):
        """`reached`: the value at `place` among the threads of the block; `top`: the largest. One barrier.

        Or, if that is higher, the `floors`-th largest of the warps' `floor`, which is lost, and 0 if a warp has none.
        Before, `reached` and `top` are those of the warp.
        """
        largest = T.alloc_local([1], "uint32")
        lanes = T.alloc_local([1], "uint32")
        rank = T.alloc_local([1], "int32")
        others = T.alloc_local([together], "uint32")
        if warps == 1:
            if floors > 0:
                reached[0] = T.max(reached[0], floor[0])
        else:
            T.cuda.cta_sync()
            top[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), group_top[t % warps])
            # The least value that fewer than `place.warp` others exceed.
            rank[0] = 0
            largest[0] = group[t % warps]
            for w in T.unroll(warps // together):
                for v in T.vectorized(together):
                    others[v] = group[w * together + v]
                for v in T.unroll(together):
                    if others[v] > largest[0]:
                        rank[0] = rank[0] + 1
            if rank[0] >= place.warp:
                largest[0] = T.uint32(0xFFFFFFFF)
            reached[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), largest[0])
            if floors > 0:
                floor[0] = group_floor[t % warps]
                largest[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), floor[0])
                # Of a row that is not in order no warp has a floor.
                if floors > 1:
                    if largest[0] > reached[0]:
                        if t % 32 >= warps:
                            floor[0] = T.uint32(0)
                        for _ in T.serial(floors - 1):
                            remove_largest(t, floor, largest, lanes)
                reached[0] = T.max(reached[0], largest[0])

    @T.inline
    def rank_key(t, i, keys, size, at, key, rank):
        """In step i, `rankers` threads count how many of keys[0:size] are above one key: its place in the order.

        `at` is the key's position, and `rank` is right in all of them. Every thread of the block must come here.
        """
        at[0] = (i * threads + t) // rankers
        key[0] = keys[T.min(at[0], size - 1)]
        rank[0] = 0
        for j in T.serial((size - t % rankers + (rankers - 1)) // rankers):
            if keys[j * rankers + t % rankers] > key[0]:
                rank[0] = rank[0] + 1
        for s in T.unroll(rankers.bit_length() - 1):
            rank[0] = rank[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), rank[0], 1 << s, 32, 32)

    @T.inline
    def bin_of(key, high, fine, finer, bin):
        """The bin of a key, linear in the value from `high` down, or in the index where all values are equal.

        An infinite range makes neither sense: keys share a bin.
        """
        bin[0] = 0
        if fine[0] == T.infinity("float32"):
            bin[0] = T.Cast("int32", T.min(
                T.Cast("float32", key_index(key)) * finer[0], T.float32(bins - 1)))
        else:
            if fine[0] > T.float32(0):
                bin[0] = T.Cast("int32", T.min((high[0] - key_value(key)) * fine[0], T.float32(bins - 1)))
        if key_bits(key) <= T.uint32(MINUS_INFINITY):
            bin[0] = bins - 1
        if key_bits(key) == T.uint32(0xFFFFFFFF):
            bin[0] = 0

    @T.inline
    def rank_in_bins(t, keys, size, counts, heads, nexts, totals, flag, low, high, finer, place_key, extra, crowded):
        """Call place_key(extra, rank, key) for the k best of keys[0:size], size >= k, or set `crowded`.

        The keys of each bin, linear in the value between `low` and `high` (or `finer[0]` bins an index, if these are
        equal), are counted and linked; a scan over the bins tells how many keys are above each; in its bin a key is
        ranked by counting. Bins of more than CROWD keys (ties, an outlier that stretches the range) would take too
        long. All arrays are shared: `counts` and `heads` hold an integer a bin (see `spread`), `nexts` one a key,
        `totals` one a warp, `flag` one. Counts, heads and flag come as 0. Begins with a barrier.
        """
        bin = T.alloc_local([1], "int32")
        own = T.alloc_local([1], "int32")
        above = T.alloc_local([1], "int32")
        other = T.alloc_local([1], "int32")
        rank = T.alloc_local([1], "int32")
        fine = T.alloc_local([1], "float32")
        fine[0] = T.float32(bins) / (high[0] - low[0])
        T.cuda.cta_sync()
        for i in T.serial((size - t + (threads - 1)) // threads):
            bin_of(keys[i * threads + t], high, fine, finer, bin)
            T.evaluate(T.cuda.atomic_add(counts.ptr_to([spread(bin[0])]), T.int32(1)))
            nexts[i * threads + t] = T.call_extern(
                "int32", "atomicExch", heads.ptr_to([spread(bin[0])]), i * threads + t + 1)
        T.cuda.cta_sync()
        # A thread's bins in order, then the threads of a warp: how many keys are above each bin and in this warp's.
        if t * each_bins < bins:
            above[0] = 0
            for b in T.unroll(each_bins):
                own[0] = counts[spread(t * each_bins + b)]
                if own[0] > CROWD:
                    flag[0] = 1
                above[0] = above[0] + own[0]
            rank[0] = above[0]
            scan_lanes(t, above, other)
            if t % 32 == 31:
                totals[t // 32] = above[0]
            above[0] = above[0] - rank[0]
            for b in T.unroll(each_bins):
                own[0] = counts[spread(t * each_bins + b)]
                counts[spread(t * each_bins + b)] = above[0]
                above[0] = above[0] + own[0]
        T.cuda.cta_sync()
        crowded[0] = flag[0]
        if crowded[0] == 0:
            # The warps' totals, scanned by every warp for itself.
            above[0] = 0
            if t % 32 < scanning:
                above[0] = totals[t % 32]
            own[0] = above[0]
            scan_lanes(t, above, other)
            above[0] = above[0] - own[0]
            for i in T.serial((size + (threads - 1)) // threads):
                own[0] = T.min(i * threads + t, size - 1)
                bin_of(keys[own[0]], high, fine, finer, bin)
                rank[0] = counts[spread(bin[0])] + T.tvm_warp_shuffle(
                    T.uint32(FULL_WARP), above[0], bin[0] // (each_bins * 32), 32, 32)
                if i * threads + t < size and rank[0] < k:
                    other[0] = heads[spread(bin[0])]
                    while other[0] != 0:
                        if keys[other[0] - 1] > keys[own[0]]:
                            rank[0] = rank[0] + 1
                        other[0] = nexts[other[0] - 1]
                    if rank[0] < k:
                        place_key(extra, rank[0], keys[own[0]])

    @T.inline
    def keep_ordered(t, e, p, distance, own, other):
        """One comparator: of a pair `distance` apart, phase p wants the larger below if bit p + 1 of the place is 0."""
        if (((e * threads + t) >> (p + 1)) & 1 == 0) == ((e * threads + t) & distance == 0):
            own[e] = T.max(own[e], other[0])
        else:
            own[e] = T.min(own[e], other[0])

    @T.inline
    def sort_descending(t, keys):
        """Bitonic sort of `rounded` keys, 32 or more; a thread holds keys t, t + threads, ...

        Phase p compares elements 2^p, ..., 2, 1 apart. Within a warp the exchange is a shuffle, beyond it goes through
        shared memory.
        """
        own = T.alloc_local([each], "uint64")
        other = T.alloc_local([1], "uint64")
        T.cuda.cta_sync()
        for e in T.unroll(each):
            own[e] = keys[T.min(e * threads + t, rounded - 1)]
        for p in T.serial(rounded.bit_length() - 1):
            for q in T.serial(T.max(p - 4, 0)):
                T.cuda.cta_sync()
                for e in T.unroll(each):
                    if e * threads + t < rounded:
                        keys[e * threads + t] = own[e]
                T.cuda.cta_sync()
                for e in T.unroll(each):
                    other[0] = keys[T.min((e * threads + t) ^ (1 << (p - q)), rounded - 1)]
                    keep_ordered(t, e, p, 1 << (p - q), own, other)
            for q in T.serial(T.min(p, 4) + 1):
                for e in T.unroll(each):
                    other[0] = T.tvm_warp_shuffle_xor(
                        T.uint32(FULL_WARP), own[e], 1 << (T.min(p, 4) - q), 32, 32)
                    keep_ordered(t, e, p, 1 << (T.min(p, 4) - q), own, other)
        T.cuda.cta_sync()
        for e in T.unroll(each):
            if e * threads + t < rounded:
                keys[e * threads + t] = own[e]
        T.cuda.cta_sync()
    # fmt: on
    return DeviceFunctions(
        select_pivot=select_pivot,
        keep_selected=keep_selected,
        maxima_of_warp=maxima_of_warp,
        offer_maxima=offer_maxima,
        place_of_maxima=place_of_maxima,
        rank_key=rank_key,
        rank_in_bins=rank_in_bins,
        sort_descending=sort_descending,
    )
