"""Device code that the CUDA top-k templates share: keys that sort, radix selection, and sorting in shared memory.

A key is a uint64: the value's bits, made to order as unsigned integers (NaN above everything, -0.0 as 0.0), above
the complement of its index. Keys of a row are unique, so a selection has one right answer, and larger is better.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from .arithmetic import LOG2_E, is_nan

FULL_WARP = 0xFFFFFFFF
RADIX_BITS = 8
BINS = 1 << RADIX_BITS
MINUS_INFINITY = 0x007FFFFF  # order_bits(-inf)
RANKERS = 8  # threads that share the ranking of one key


def order_bits(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """A uint32 that orders as the float32 does."""
    bits = T.reinterpret("uint32", x)
    ordered = T.Select(bits >> T.uint32(31) != T.uint32(0), ~bits, bits | T.uint32(0x80000000))
    ordered = T.Select(x == T.float32(0), T.uint32(0x80000000), ordered)
    return T.Select(is_nan(x), T.uint32(0xFFFFFFFF), ordered)


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


def key_index(key: tirx.PrimExpr) -> tirx.PrimExpr:
    return T.uint32(0xFFFFFFFF) - T.Cast("uint32", key & T.uint64(0xFFFFFFFF))


class DeviceFunctions(NamedTuple):
    """What `device_functions` makes, to be called in a kernel."""

    block_merge: Any
    find_digit: Any
    select_pivot: Any
    keep_selected: Any
    kth_of_maxima: Any
    rank_key: Any
    sort_descending: Any


def device_functions(threads: int, k: int) -> DeviceFunctions:
    """The functions below for blocks of `threads` and a selection of `k`, for use in a TVMScript kernel."""
    warps = threads // 32
    lowest = T.min_value("float32")
    lanes_bins = BINS // 32
    digits = 64 // RADIX_BITS
    # kth_of_maxima: the fewest rounds in a warp that leave at least one value of each warp to spare.
    seed_lane = next((j for j in range(1, 33) if j * warps >= k), 32)
    seed_warp = -(-k // seed_lane)
    # sort_descending: keys, a power of two, and how many of them a thread holds.
    rounded = 1 << (k - 1).bit_length()
    each = max(1, rounded // threads)

    # fmt: off
    @T.inline
    def block_merge(t, m, d, top, group, group_sum):
        """The operator of Milakov & Gimelshein's equation 4 over the block: top = its maximum, d = its sum.

        The maximum first, then every thread's sum rescaled to it: two plain reductions, and one exponential a
        thread. `group` and `group_sum` are shared and hold a value a warp. Begins with a barrier.
        """
        T.cuda.cta_sync()
        top[0] = T.cuda.warp_max(m[0])
        if t % 32 == 0:
            group[t // 32] = top[0]
        T.cuda.cta_sync()
        top[0] = lowest
        if t % 32 < warps:
            top[0] = group[t % 32]
        top[0] = T.cuda.warp_max(top[0])
        d[0] = T.cuda.warp_sum(d[0] * T.exp2((m[0] - top[0]) * T.float32(LOG2_E)))
        if t % 32 == 0:
            group_sum[t // 32] = d[0]
        T.cuda.cta_sync()
        d[0] = T.float32(0)
        if t % 32 < warps:
            d[0] = group_sum[t % 32]
        d[0] = T.cuda.warp_sum(d[0])

    @T.inline
    def find_digit(t, histogram, found, need):
        """The bin that holds the need-th largest, counted from the top: found = bin, rank within it, its size."""
        if t < 32:
            own = T.alloc_local([1], "int32")
            above = T.alloc_local([1], "int32")
            other = T.alloc_local([1], "int32")
            own[0] = 0
            for b in T.unroll(lanes_bins):
                own[0] = own[0] + histogram[BINS - 1 - (t * lanes_bins + b)]
            # inclusive scan over the lanes, the highest bins on lane 0
            above[0] = own[0]
            for s in T.unroll(5):
                other[0] = T.tvm_warp_shuffle_up(T.uint32(FULL_WARP), above[0], 1 << s, 32, 32)
                if t >= (1 << s):
                    above[0] = above[0] + other[0]
            above[0] = above[0] - own[0]
            for b in T.unroll(lanes_bins):
                own[0] = histogram[BINS - 1 - (t * lanes_bins + b)]
                if above[0] < need[0] and need[0] <= above[0] + own[0]:
                    found[0] = BINS - 1 - (t * lanes_bins + b)
                    found[1] = need[0] - above[0]
                    found[2] = own[0]
                above[0] = above[0] + own[0]

    @T.inline
    def select_pivot(t, keys, size, histogram, found, pivot, mask, need):
        """`pivot`: of keys[0:size], unique, exactly k are >= pivot. Ends and begins with a barrier."""
        pivot[0] = T.uint64(0)
        mask[0] = T.uint64(0)
        need[0] = k
        T.cuda.cta_sync()
        for digit in T.serial(digits):
            for i in T.serial((BINS - 1 - t + threads) // threads):
                histogram[i * threads + t] = 0
            T.cuda.cta_sync()
            for i in T.serial((size - t + (threads - 1)) // threads):
                if (keys[i * threads + t] ^ pivot[0]) & mask[0] == T.uint64(0):
                    T.evaluate(T.cuda.atomic_add(
                        histogram.ptr_to([T.Cast("int32",
                            (keys[i * threads + t] >> T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
                            & T.uint64(BINS - 1))]),
                        T.int32(1)))
            T.cuda.cta_sync()
            find_digit(t, histogram, found, need)
            T.cuda.cta_sync()
            pivot[0] = pivot[0] | (
                T.Cast("uint64", found[0]) << T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
            mask[0] = mask[0] | (T.uint64(BINS - 1) << T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
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
    def kth_of_maxima(t, bits, group, reached):
        """`reached`: a lower bound of the k-th largest element, from the largest of each thread (`bits`, ordered).

        Each warp finds the j-th largest of its lanes' values, the block the q-th largest of those: j * q >= k elements
        are at least as large. Begins and ends in any order of warps; one barrier.
        """
        largest = T.alloc_local([1], "uint32")
        lanes = T.alloc_local([1], "uint32")
        rank = T.alloc_local([1], "int32")
        for r in T.serial(seed_lane):
            largest[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), bits[0])
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), bits[0] == largest[0])
            if r < seed_lane - 1:
                # only one of equals is taken out
                if T.Cast("int32", T.cuda.ffs_u32(lanes[0])) - 1 == t % 32:
                    bits[0] = T.uint32(0)
        if t % 32 == 0:
            group[t // 32] = largest[0]
        T.cuda.cta_sync()
        rank[0] = 0
        largest[0] = group[t % warps]
        for w in T.unroll(warps):
            if group[w] > largest[0]:
                rank[0] = rank[0] + 1
            if group[w] == largest[0]:
                if w < t % warps:
                    rank[0] = rank[0] + 1
        lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), rank[0] == seed_warp - 1)
        reached[0] = T.tvm_warp_shuffle(
            T.uint32(FULL_WARP), largest[0], T.Cast("int32", T.cuda.ffs_u32(lanes[0])) - 1, 32, 32)

    @T.inline
    def rank_key(t, i, keys, size, at, key, rank):
        """In step i, RANKERS threads count how many of keys[0:size] are above one key: its place in the order.

        `at` is the key's position, and `rank` is right in all of them. Every thread of the block must come here.
        """
        at[0] = (i * threads + t) // RANKERS
        key[0] = keys[T.min(at[0], size - 1)]
        rank[0] = 0
        for j in T.serial((size - t % RANKERS + (RANKERS - 1)) // RANKERS):
            if keys[j * RANKERS + t % RANKERS] > key[0]:
                rank[0] = rank[0] + 1
        for s in T.unroll(RANKERS.bit_length() - 1):
            rank[0] = rank[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), rank[0], 1 << s, 32, 32)

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
        block_merge, find_digit, select_pivot, keep_selected, kth_of_maxima, rank_key, sort_descending
    )
