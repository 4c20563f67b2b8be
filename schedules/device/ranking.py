"""Device code that puts a block's keys in order: by counting, in bins, or by a bitonic sort (see `selection` for keys).

Which one is quickest depends on how many keys there are. Counting compares every key with every other: for a few. Bins
that are linear in the value leave only the keys of one bin to be compared: for many, unless ties or an outlier crowd a
bin. For this, keys are moved into the order of their bins; linked lists would take one dependent load after another.
Where there are ties, bins are divided once more, by the index. A bitonic sort takes longest and never fails.

A phase is made for static extents and called with a state: any object that has the buffers which its head names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from .loops import Loop
from .selection import FULL_WARP, MINUS_INFINITY, key_bits, key_index, key_value, scan_lanes

# A 32-bit word has two numbers of a key or a bin; this many bits for the lower one.
LOW_BITS = 16
LOW = (1 << LOW_BITS) - 1
# Keys with which one key is compared at once: as many loads are in flight together.
COMPARED = 4
# Bins of a lane, a vector in shared memory, and bins that a warp scans at once.
LANE_BINS = 4
WARP_BINS = 32 * LANE_BINS


# fmt: off
@phase
def rank_key(threads, rankers, /, s, t, i):
    """In step i, `rankers` threads (a power of two) count how many keys are above one: its place in the order.

    Every thread of the block must come here, for i = 0, 1, ... until i * threads is at least size * rankers.

    Reads: keys[0:size].
    Writes: `need`, the key's position in the buffer; `pivot`, the key; `slot`, its rank, in all of its threads.
        Positions from `size` on repeat the last key.
    Barriers: none.
    """
    s.need[0] = (i * threads + t) // rankers
    s.pivot[0] = s.keys[T.min(s.need[0], s.size[0] - 1)]
    s.slot[0] = 0
    for j in T.serial((s.size[0] - t % rankers + (rankers - 1)) // rankers):
        if s.keys[j * rankers + t % rankers] > s.pivot[0]:
            s.slot[0] = s.slot[0] + 1
    for b in T.unroll(rankers.bit_length() - 1):
        s.slot[0] = s.slot[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.slot[0], 1 << b, 32, 32)


@phase
def rank_at_once(extent, rankers, /, s, t, keys):
    """As `rank_key`, of keys that are few enough for one step, followed by zeros up to `extent`. `rankers` times
    `extent` threads are there at least.

    Reads: `keys`, all of them.
    Writes: `need`, `pivot`, `slot`, as `rank_key` does. Positions from `extent` on repeat the last key.
    Barriers: none, but all lanes take part.
    """
    s.need[0] = t // rankers
    s.pivot[0] = keys[T.min(s.need[0], extent - 1)]
    s.slot[0] = 0
    for j in T.unroll(extent // rankers):
        if keys[j * rankers + t % rankers] > s.pivot[0]:
            s.slot[0] = s.slot[0] + 1
    for b in T.unroll(rankers.bit_length() - 1):
        s.slot[0] = s.slot[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.slot[0], 1 << b, 32, 32)


@phase
def bin_of_key(bins, /, s, key, slope, bin):
    """The bin of a key, linear in the value from `largest` down.

    Where all values are equal it is linear in the index. If the range is infinite, all keys share a bin.
    """
    if s.largest[0] == s.threshold[0]:
        bin[0] = T.Cast("int32", T.min(T.Cast("float32", key_index(key)) * slope[0], T.float32(bins - 1)))
        if key_bits(key) <= T.uint32(MINUS_INFINITY):
            bin[0] = bins - 1
        if key_bits(key) == T.uint32(0xFFFFFFFF):
            bin[0] = 0
    else:
        # A NaN on the way, as from a difference of infinities or an element that is NaN, becomes 0 here: a GPU's
        # maximum of a NaN and a number is the number.
        bin[0] = T.Cast("int32", T.min(
            T.max((s.largest[0] - key_value(key)) * slope[0], T.float32(0)), T.float32(bins - 1)))


@phase
def sum_before(chunks, /, s, t, above, own, other):
    """`above`: how many keys are in the chunks before a lane's own.

    Every warp scans `bin_totals` for itself. `own` and `other` are overwritten.
    """
    above[0] = 0
    if t % 32 < chunks:
        above[0] = s.bin_totals[t % 32]
    own[0] = above[0]
    for b in T.unroll((chunks - 1).bit_length()):
        other[0] = T.tvm_warp_shuffle_up(T.uint32(FULL_WARP), above[0], 1 << b, 32, 32)
        if t % 32 >= (1 << b):
            above[0] = above[0] + other[0]
    above[0] = above[0] - own[0]


@phase
def scan(crowd, /, s, t, chunk):
    """A warp scans a chunk's bins: each bin's count becomes the number of keys in the bins before it."""
    held = T.alloc_local([LANE_BINS], "int32")
    above = T.alloc_local([1], "int32")
    own = T.alloc_local([1], "int32")
    other = T.alloc_local([1], "int32")
    for e in T.vectorized(LANE_BINS):
        held[e] = s.counts[chunk * WARP_BINS + t % 32 * LANE_BINS + e]
    own[0] = 0
    other[0] = 0
    for e in T.unroll(LANE_BINS):
        own[0] = own[0] + held[e]
        other[0] = T.max(other[0], held[e])
    if other[0] > crowd:
        s.flag[0] = 1
    above[0] = own[0]
    scan_lanes(t, above, other)
    if t % 32 == 31:
        s.bin_totals[chunk] = above[0]
    above[0] = above[0] - own[0]
    for e in T.unroll(LANE_BINS):
        other[0] = held[e]
        held[e] = other[0] << LOW_BITS | above[0]
        above[0] = above[0] + other[0]
    for e in T.vectorized(LANE_BINS):
        s.counts[chunk * WARP_BINS + t % 32 * LANE_BINS + e] = held[e]


@phase
def scan_bins(threads, bins, crowd, /, s, t):
    """Replace the number of keys of each bin by how many are in the bins before it, within its chunk.

    A chunk is WARP_BINS bins, which a warp scans.

    Reads: `counts`.
    Writes: `counts`, the keys before a bin and above LOW_BITS its own; `bin_totals`, those of a chunk; flag[0] as 1 if
        a bin has more than `crowd`.
    Barriers: none.
    """
    chunks, warps = T.meta_var(bins // WARP_BINS), T.meta_var(threads // 32)
    for c in T.unroll(ceildiv(chunks, warps)):
        if (c + 1) * warps <= chunks:
            scan(crowd)(s, t, c * warps + t // 32)
        else:
            if c * warps + t // 32 < chunks:
                scan(crowd)(s, t, c * warps + t // 32)


def rank_in_bins(
    threads: int,
    k: int,
    bins: int,
    crowd: int,
    columns: int,
    place: Callable[..., Any],
    *,
    each: int = 1,
    finer: bool = False,
    loop: Loop = T.serial,
) -> Phase:
    """Call place(s, rank, key) for the k best of keys[0:size], size >= k, unless a bin is crowded. The phase is (s, t).

    Bins are linear in the value between `threshold` and `largest`; or in the index, if these are equal: it is one of so
    many `columns`, up to `equals_until`. The keys of each bin are counted, which gives each a number in its bin, and a
    scan over the bins tells how many keys are above each; so every key has a place in `kept`, in the order of the bins.
    There it is compared with the others of its bin. Neighbouring threads have neighbouring places, and ranks that are
    nearly so. Bins of more than `crowd` keys (ties, an outlier that stretches the range) would take too long.

    With `finer`, bins are those of `refine_bins`. A thread works on `each` keys at once. `loop` makes the loops over
    keys (see `loops`), as in the phases below.

    Reads: `keys`, `size`, `threshold`, `equals_until`, `largest`; if `finer`, `numbers`. Scratch in shared memory:
        `counts`, an integer a bin, and `flag`, which come as 0; `numbers`, one a key; `homes`, one a place of `kept`;
        `bin_totals`; found[0].
    Writes: `slot`, not 0 if some bin is crowded and nothing was placed; else `kept`, k + crowd + COMPARED keys at most.
    Barriers: several; one must lie between what wrote `keys`, `counts` and `flag` and this.
    """
    bin_of, scan, before = bin_of_key(bins), scan_bins(threads, bins, crowd), sum_before(bins // WARP_BINS)

    @T.inline
    def number_keys(s, t, i, slope):
        """Compute, for a thread's keys from the (i * each)-th on, the bin, and the key's number within its bin."""
        bin = T.alloc_local([1], "int32")
        held = T.alloc_local([each], "uint64")
        number = T.alloc_local([each], "int32")
        taken = T.alloc_local([each], "int32")
        for e in T.unroll(each):
            if finer:
                number[e] = 0
                if (i * each + e) * threads + t < s.size[0]:
                    number[e] = s.numbers[(i * each + e) * threads + t] >> LOW_BITS
            else:
                held[e] = s.keys[T.min((i * each + e) * threads + t, s.size[0] - 1)]
        for e in T.unroll(each):
            if not finer:
                bin_of(s, held[e], slope, bin)
                number[e] = bin[0]
        for e in T.unroll(each):
            if (i * each + e) * threads + t < s.size[0]:
                taken[e] = T.cuda.atomic_add(s.counts.ptr_to([number[e]]), T.int32(1))
        for e in T.unroll(each):
            if (i * each + e) * threads + t < s.size[0]:
                s.numbers[(i * each + e) * threads + t] = number[e] << LOW_BITS | taken[e]

    @T.inline
    def move_keys(s, t, i, above):
        """Move these keys to their places, with what is known of their bin, if one of the bin's keys may be among the k
        best.
        """
        number = T.alloc_local([each], "int32")
        home = T.alloc_local([each], "int32")
        for e in T.unroll(each):
            number[e] = s.numbers[T.min((i * each + e) * threads + t, s.size[0] - 1)]
        for e in T.unroll(each):
            home[e] = s.counts[number[e] >> LOW_BITS] + T.tvm_warp_shuffle(
                T.uint32(FULL_WARP), above[0], number[e] // (WARP_BINS << LOW_BITS), 32, 32)
        for e in T.unroll(each):
            if (i * each + e) * threads + t < s.size[0] and home[e] & LOW < k:
                s.kept[(home[e] & LOW) + (number[e] & LOW)] = s.keys[(i * each + e) * threads + t]
                s.homes[(home[e] & LOW) + (number[e] & LOW)] = home[e]
                # The last of these bins says how many keys there are, and makes the entries after them void.
                if number[e] & LOW == 0 and (home[e] & LOW) + (home[e] >> LOW_BITS) >= k:
                    s.found[0] = (home[e] & LOW) + (home[e] >> LOW_BITS)
                    for v in T.unroll(COMPARED - 1):
                        s.kept[(home[e] & LOW) + (home[e] >> LOW_BITS) + v] = T.uint64(0)

    @T.inline
    def phase(s, t):
        own = T.alloc_local([1], "int32")
        above = T.alloc_local([1], "int32")
        other = T.alloc_local([1], "int32")
        rank = T.alloc_local([1], "int32")
        slope = T.alloc_local([1], "float32")
        if not finer:
            slope[0] = s.largest[0] - s.threshold[0]
            if s.largest[0] == s.threshold[0]:
                slope[0] = T.Cast("float32", T.max(T.min(s.equals_until[0], columns - 1) + 1, 1))
            slope[0] = T.float32(bins) / slope[0]
        for i in loop((s.size[0] + (threads * each - 1)) // (threads * each)):
            number_keys(s, t, i, slope)
        T.cuda.cta_sync()
        scan(s, t)
        T.cuda.cta_sync()
        s.slot[0] = s.flag[0]
        if s.slot[0] == 0:
            before(s, t, above, own, other)
            for i in loop((s.size[0] + (threads * each - 1)) // (threads * each)):
                move_keys(s, t, i, above)
            T.cuda.cta_sync()
            for i in loop((s.found[0] - t + (threads - 1)) // threads):
                s.pivot[0] = s.kept[i * threads + t]
                own[0] = s.homes[i * threads + t]
                rank[0] = own[0] & LOW
                other[0] = rank[0]
                own[0] = rank[0] + (own[0] >> LOW_BITS)
                # The loop is not unrolled further. Behind the bin there are only smaller keys.
                while other[0] < own[0]:
                    for v in T.unroll(COMPARED):
                        if s.kept[other[0] + v] > s.pivot[0]:
                            rank[0] = rank[0] + 1
                    other[0] = other[0] + COMPARED
                if rank[0] < k:
                    place(s, rank[0], s.pivot[0])

    return phase


@phase
def spread_equals(bins, crowd, columns, /, s, own, bin):
    """A key's finer bin where many keys are equal, from bins that are linear in the value.

    A bin of one value alone is divided by the index: it takes as many of the finer bins as it has of the keys, and its
    keys lie among these as their indices lie among the columns that may have them: those up to `equals_until` for
    the threshold, all for others. Keys of another bin stay together.

    Reads: keys[own], `size`, `threshold`, `equals_until`; bin[0], the key's bin, where that begins in the order, in
        bin[1], and how many keys it has, in bin[2]; `homes`, one of the keys of each bin.
    Writes: numbers[own], with the finer bin; flag[1], not 0 if the key's bin is crowded by keys of several values.
    Barriers: none.
    """
    place = T.alloc_local([1], "float32")
    place[0] = T.float32(0)
    if bin[2] > crowd:
        s.pivot[0] = s.keys[s.homes[bin[0]]]
        if key_bits(s.keys[own]) != key_bits(s.pivot[0]):
            s.flag[1] = 1
        place[0] = T.Cast("float32", columns)
        if key_value(s.pivot[0]) == s.threshold[0]:
            place[0] = T.Cast("float32", T.min(s.equals_until[0], columns - 1) + 1)
        # Rounding does not change the order: every step keeps it.
        place[0] = T.Cast("float32", bin[2] - 1) * T.min(
            T.Cast("float32", key_index(s.keys[own])) / place[0], T.float32(1))
    s.numbers[own] = T.min(bins - 1, T.Cast(
        "int32", (T.Cast("float32", bin[1]) + place[0]) * (T.float32(bins) / T.Cast("float32", s.size[0]))
    )) << LOW_BITS


@phase
def refine_bins(threads, bins, crowd, columns, loop, /, s, t):
    """Finer bins for what `rank_in_bins` could not rank, if it is ties that crowd a bin.

    They may join a few bins of which none was crowded: more keys make a crowd of theirs. Keys belong to a row of
    `columns` columns.

    Reads: what `rank_in_bins` has left in `counts`, `numbers`, `bin_totals`; `keys`, `size`, which is below 2^15,
        `threshold`, `equals_until`; flag[1], which comes as 0.
    Writes: `slot`, 0 if bins are fine now; `numbers` with a key's bin; `counts` and flag[0] as 0; as scratch `homes`,
        one a bin, and `pivot`.
    Barriers: several; ends with one.
    """
    bin = T.alloc_local([3], "int32")
    own = T.alloc_local([1], "int32")
    above = T.alloc_local([1], "int32")
    other = T.alloc_local([1], "int32")
    sum_before(bins // WARP_BINS)(s, t, above, own, other)
    for i in loop((s.size[0] - t + (threads - 1)) // threads):
        if s.numbers[i * threads + t] & LOW == 0:
            s.homes[s.numbers[i * threads + t] >> LOW_BITS] = i * threads + t
    T.cuda.cta_sync()
    for i in loop((s.size[0] + (threads - 1)) // threads):
        bin[0] = 0
        if i * threads + t < s.size[0]:
            bin[0] = s.numbers[i * threads + t] >> LOW_BITS
        bin[1] = (s.counts[bin[0]] & LOW) + T.tvm_warp_shuffle(
            T.uint32(FULL_WARP), above[0], bin[0] // WARP_BINS, 32, 32)
        bin[2] = s.counts[bin[0]] >> LOW_BITS
        if i * threads + t < s.size[0]:
            spread_equals(bins, crowd, columns)(s, i * threads + t, bin)
    T.cuda.cta_sync()
    s.slot[0] = s.flag[1]
    for i in loop((bins - 1 - t + threads) // threads):
        s.counts[i * threads + t] = 0
    if t == 0:
        s.flag[0] = 0
    T.cuda.cta_sync()


@phase
def keep_ordered(threads, /, t, e, p, distance, own, other):
    """One comparator: of a pair `distance` apart, step p wants the larger below if bit p + 1 of the place is 0."""
    if (((e * threads + t) >> (p + 1)) & 1 == 0) == ((e * threads + t) & distance == 0):
        own[e] = T.max(own[e], other[0])
    else:
        own[e] = T.min(own[e], other[0])


@phase
def sort_descending(threads, extent, loop, /, s, t):
    """A bitonic sort of keys[0:extent], the largest first; `extent` is a power of two, 32 or more.

    A thread holds keys t, t + threads, ... Step p compares elements 2^p, ..., 2, 1 apart. Within a warp the exchange is
    a shuffle, beyond it goes through shared memory.

    Reads and writes: `keys`. Barriers: several; begins and ends with one.
    """
    each = T.meta_var(ceildiv(extent, threads))
    own = T.alloc_local([each], "uint64")
    other = T.alloc_local([1], "uint64")
    T.cuda.cta_sync()
    for e in T.unroll(each):
        own[e] = s.keys[T.min(e * threads + t, extent - 1)]
    for p in loop(extent.bit_length() - 1):
        for q in loop(T.max(p - 4, 0)):
            T.cuda.cta_sync()
            for e in T.unroll(each):
                if e * threads + t < extent:
                    s.keys[e * threads + t] = own[e]
            T.cuda.cta_sync()
            for e in T.unroll(each):
                other[0] = s.keys[T.min((e * threads + t) ^ (1 << (p - q)), extent - 1)]
                keep_ordered(threads)(t, e, p, 1 << (p - q), own, other)
        for q in loop(T.min(p, 4) + 1):
            for e in T.unroll(each):
                other[0] = T.tvm_warp_shuffle_xor(
                    T.uint32(FULL_WARP), own[e], 1 << (T.min(p, 4) - q), 32, 32)
                keep_ordered(threads)(t, e, p, 1 << (T.min(p, 4) - q), own, other)
    T.cuda.cta_sync()
    for e in T.unroll(each):
        if e * threads + t < extent:
            s.keys[e * threads + t] = own[e]
    T.cuda.cta_sync()
# fmt: on
