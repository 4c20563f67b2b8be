"""Device code that the CUDA top-k templates share: keys that sort, and the selection of the k largest by radix passes.

A key is a uint64: the value's bits, made to order as unsigned integers (NaN above everything, -0.0 as 0.0), above
the complement of its index. Keys of a row are unique, so a selection has one right answer, and larger is better.

Phases of a block (`radix_selection`, `keep_selected`) are made for static extents and called with a state: any object
that has the buffers which the head of the phase names. How keys are put in order is in `ranking`.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from .arithmetic import is_nan

# The mask of a warp collective in which all lanes take part.
FULL_WARP = 0xFFFFFFFF
# Bits of the keys that a radix pass looks at, and bins in which it counts them.
RADIX_BITS = 8
RADIX_BINS = 1 << RADIX_BITS
# The `order_bits` of minus and plus infinity. NaN has larger ones.
MINUS_INFINITY, PLUS_INFINITY = 0x007FFFFF, 0xFF800000
# Up to its fifth largest value a warp finds a value by removing the larger ones; for lower ones its lanes are sorted.
REMOVALS = 5


def order_bits(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """A uint32 that orders as the float32 does."""
    bits = T.reinterpret("uint32", x)
    ordered = T.Select(bits >> T.uint32(31) != T.uint32(0), ~bits, bits | T.uint32(0x80000000))
    ordered = T.Select(x == T.float32(0), T.uint32(0x80000000), ordered)
    return T.Select(is_nan(x), T.uint32(0xFFFFFFFF), ordered)


@T.inline
def order(x, plain, bits):
    """`bits` = order_bits(x), in few instructions and no branch.

    The addition of 0 on a GPU turns -0.0 into 0.0 and any NaN into 0x7FFFFFFF; `plain` receives the result.
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


def below(lane: tirx.PrimExpr, lanes: tirx.PrimExpr) -> tirx.PrimExpr:
    """How many of `lanes`, a ballot, come before this one."""
    return T.Cast("int32", T.popcount(lanes & ((T.uint32(1) << T.Cast("uint32", lane)) - T.uint32(1))))


def lanes_sum(number: tirx.PrimExpr) -> tirx.PrimExpr:
    """The sum of an int32 over the lanes of a warp, in all of them."""
    return T.call_extern("int32", "__reduce_add_sync", T.uint32(FULL_WARP), number)


def lanes_min(number: tirx.PrimExpr) -> tirx.PrimExpr:
    """The least of an int32 over the lanes of a warp, in all of them."""
    return T.call_extern("int32", "__reduce_min_sync", T.uint32(FULL_WARP), number)


def lanes_max(number: tirx.PrimExpr) -> tirx.PrimExpr:
    """The largest of an int32 over the lanes of a warp, in all of them."""
    return T.call_extern("int32", "__reduce_max_sync", T.uint32(FULL_WARP), number)


@T.inline
def scan_lanes(t, value, other):
    """The inclusive sum of `value` over the lanes of a warp up to one's own; `other` is overwritten."""
    for s in T.unroll(5):
        other[0] = T.tvm_warp_shuffle_up(T.uint32(FULL_WARP), value[0], 1 << s, 32, 32)
        if t % 32 >= (1 << s):
            value[0] = value[0] + other[0]


# fmt: off
@T.inline
def find_digit(s, t):
    """Find the bin of a histogram that has the need-th largest key.

    Reads: `histogram`, `need`.
    Writes: `found`.
    Barriers: none; one warp works.
    After: found[0] is the bin that holds the need-th largest, counted from the top; found[1] the rank that is left
        within it; found[2] how many keys it holds.
    """
    if t < 32:
        own = T.alloc_local([1], "int32")
        above = T.alloc_local([1], "int32")
        other = T.alloc_local([1], "int32")
        own[0] = 0
        for b in T.unroll(RADIX_BINS // 32):
            own[0] = own[0] + s.histogram[RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
        # An inclusive scan over the lanes, the highest bins on lane 0.
        above[0] = own[0]
        scan_lanes(t, above, other)
        above[0] = above[0] - own[0]
        for b in T.unroll(RADIX_BINS // 32):
            own[0] = s.histogram[RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
            if above[0] < s.need[0] and s.need[0] <= above[0] + own[0]:
                s.found[0] = RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)
                s.found[1] = s.need[0] - above[0]
                s.found[2] = own[0]
            above[0] = above[0] + own[0]


# A few lines of CUDA: TVM's `atomicAdd` takes no address that has been computed. The number added to the address is 0
# in every lane, which the compiler does not know.
COUNTER = """
__device__ __forceinline__ unsigned int counter_address(unsigned int counter) {
  unsigned int lanes_before;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lanes_before));
  return counter + (lanes_before >> 31);
}
"""
TAKE = """
__device__ __forceinline__ int take_places(unsigned int counter, int extent) {
  int first;
  asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(first) : "r"(counter), "r"(extent) : "memory");
  return first;
}
"""


def counter_address(counter: tirx.PrimExpr) -> tirx.PrimExpr:
    """The address of a counter in shared memory, given a pointer to it, in the form that `take_places` expects.

    The compiler cannot see that all lanes have the same address. If it could, it would first add up what the lanes
    take, which takes longer than the atomic where more than one lane seldom takes something.
    """
    place = T.cuda.cvta_generic_to_shared(counter)
    return T.cuda.func_call("counter_address", place, source_code=COUNTER, return_type="uint32")


def take_places(address: tirx.PrimExpr, extent: tirx.PrimExpr) -> tirx.PrimExpr:
    """Add `extent` to a counter of places; returns the first place that this takes. For few lanes of a warp."""
    return T.cuda.func_call("take_places", address, extent, source_code=TAKE, return_type="int32")


# The same for a counter in global memory.
TICKET = """
__device__ __forceinline__ int next_ticket(void* counter) {
  unsigned int lanes_before;
  int ticket;
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(lanes_before));
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], 1;"
               : "=r"(ticket) : "l"((unsigned long long)counter + (lanes_before >> 31)) : "memory");
  return ticket;
}
"""


def next_ticket(counter: tirx.PrimExpr) -> tirx.PrimExpr:
    """Add 1 to a counter in global memory, given a pointer to it; returns its number before.

    As with `counter_address`, the compiler cannot see that all lanes have the same address. Otherwise it would wait for
    the number at once, to distribute it among lanes, even where it is needed much later.
    """
    return T.cuda.func_call("next_ticket", counter, source_code=TICKET, return_type="int32")


@phase
def radix_selection(threads, k, key_at, loop, /, s, t, source, size):
    """The k-th largest of a block's keys, digit by digit from the top: a histogram of a digit tells which one it has.
    The i-th of `size` >= k unique keys is key_at(source, i). `loop` makes its loops (see `loops`), as in the phases
    below.

    Reads: the keys.
    Writes: `pivot`, and as scratch `histogram` (RADIX_BINS), `found` (3 or more), `mask`, `need`.
    Barriers: several; begins and ends with one.
    After: exactly k keys are >= `pivot`, in every thread.
    """
    s.pivot[0] = T.uint64(0)
    s.mask[0] = T.uint64(0)
    s.need[0] = k
    T.cuda.cta_sync()
    for digit in loop(64 // RADIX_BITS):
        for i in loop((RADIX_BINS - 1 - t + threads) // threads):
            s.histogram[i * threads + t] = 0
        T.cuda.cta_sync()
        for i in loop((size - t + (threads - 1)) // threads):
            if (key_at(source, i * threads + t) ^ s.pivot[0]) & s.mask[0] == T.uint64(0):
                T.evaluate(T.cuda.atomic_add(
                    s.histogram.ptr_to([T.Cast("int32",
                        (key_at(source, i * threads + t)
                         >> T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
                        & T.uint64(RADIX_BINS - 1))]),
                    T.int32(1)))
        T.cuda.cta_sync()
        find_digit(s, t)
        T.cuda.cta_sync()
        s.pivot[0] = s.pivot[0] | (
            T.Cast("uint64", s.found[0]) << T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
        s.mask[0] = s.mask[0] | (
            T.uint64(RADIX_BINS - 1) << T.Cast("uint64", 64 - RADIX_BITS - digit * RADIX_BITS))
        s.need[0] = s.found[1]
        # All keys of the bin are wanted: no lower digit decides.
        if s.found[1] == s.found[2]:
            break


@phase
def keep_selected(threads, k, loop, /, s, t, size):
    """Move the k keys that are >= `pivot` to the front of the buffer, through another one.

    Reads: `keys`, `pivot`.
    Writes: `keys`, and as scratch `kept` (k or more) and `count`.
    Barriers: several; begins and ends with one.
    After: keys[0:k] are those, in no order.
    """
    T.cuda.cta_sync()
    if t == 0:
        s.count[0] = 0
    T.cuda.cta_sync()
    for i in loop((size - t + (threads - 1)) // threads):
        if s.keys[i * threads + t] >= s.pivot[0]:
            s.kept[T.cuda.atomic_add(s.count.ptr_to([0]), T.int32(1))] = s.keys[i * threads + t]
    T.cuda.cta_sync()
    for i in loop((k - 1 - t + threads) // threads):
        s.keys[i * threads + t] = s.kept[i * threads + t]
    T.cuda.cta_sync()


@T.inline
def remove_largest(t, value, largest, lanes):
    """Set the largest of a warp's values to 0, in one lane alone if several have it; then find the next one."""
    lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), value[0] == largest[0])
    if T.Cast("int32", T.cuda.ffs_u32(lanes[0])) - 1 == t % 32:
        value[0] = T.uint32(0)
    largest[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), value[0])


@phase
def sort_lanes(lanes, /, t, bits):
    """Sort one value of each lane, the largest first, in every group of `lanes` neighbouring lanes: a bitonic sort.

    Reads and writes: `bits`. Barriers: none, but all lanes of the warp take part.
    """
    other = T.alloc_local([1], "uint32")
    for p in T.unroll(lanes.bit_length() - 1):
        for q in T.unroll(lanes.bit_length() - 1):
            if q <= p:
                other[0] = T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), bits[0], 1 << T.max(p - q, 0), 32, 32)
                bits[0] = T.Select(
                    (t % lanes >> (p + 1)) & 1 == (t >> T.max(p - q, 0)) & 1,
                    T.max(bits[0], other[0]), T.min(bits[0], other[0]))


@phase
def maxima_of_lanes(lanes, rank, /, t, bits, top, ranked):
    """The largest and the `rank`-th largest of the values of each group of `lanes` neighbouring lanes.

    Reads: `bits`, one value per lane, which are overwritten. Writes: `top` and `ranked`. Barriers: none, but all lanes
    of the warp take part.
    """
    sort_lanes(lanes)(t, bits)
    top[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), bits[0], 0, lanes, 32)
    ranked[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), bits[0], rank - 1, lanes, 32)


@phase
def maxima_of_warp(rank, /, t, bits, top, ranked):
    """The largest and the `rank.lane`-th largest of the values of a warp's lanes.

    Reads: `bits`, one value per lane, which are overwritten. Writes: `top` and `ranked`. Barriers: none, but all lanes
    take part.
    """
    if rank.lane > REMOVALS:
        maxima_of_lanes(32, rank.lane)(t, bits, top, ranked)
    else:
        lanes = T.alloc_local([1], "uint32")
        top[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), bits[0])
        ranked[0] = top[0]
        for _ in T.serial(rank.lane - 1):
            remove_largest(t, bits, ranked, lanes)
# fmt: on
