"""The k-th best of the tops of groups: a bound that at least k elements reach, and in most cases few others.

Elements are divided into groups, and the largest of a group is its top. At least k elements reach the k-th best of all
tops, because k tops do. Where elements are in no order and there are n groups, about n ln(n / (n - k)) elements do.

Tops are ordered bits (`selection.order_bits`), 0 for none. They are found in four ways, by who works:

| phase | who works | tops are in | result |
| --- | --- | --- | --- |
| `find_kth` | all warps of a thread block, each for some of the tops | shared memory | exact |
| `kth_of_shared` | one warp, for all | shared memory | exact |
| `kth_of_lanes` | one warp, by shuffles | registers | exact |
| `kth_by_bits` | one warp, bit by bit from the highest | registers | the upper bits of the k-th best |

Users: `softmax_topk/held_rows`, `output_layer/best`, `output_layer/warpgroups` and `lsh_topk/fused_step`.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ..device.selection import FULL_WARP

load_shared = T.ptx.ld.shared.v4.u32
NONE = 0xFFFFFFFF


# fmt: off
@T.inline
def offer(s, tops, group, ordered):
    """Raise a group's top to an order (`selection.order_bits`)."""
    T.evaluate(T.call_extern("uint32", "atomicMax", tops.ptr_to([group]), ordered))


@phase
def find_kth(groups, warps, k, tell, /, s, tops):
    """Find the k-th best of `groups` tops.

    `tell`: (s, top), called in the lane that has the k-th best; there, `slot` tops are no less and `need` are better.
        Several lanes call it if several tops are equal.

    Reads: `tops`. Writes: `own`, the tops by lanes; scratch is `need`, `slot`. Barriers: none; one has to come before
    other threads read what `tell` has written.
    """
    other = T.alloc_local([1], "uint32")
    for j in T.unroll(groups // 32):
        s.own[j] = tops[j * 32 + s.t % 32]
    # Each warp looks at some tops: is the top the k-th best, or one of equals among which that is?
    for i in T.unroll(ceildiv(groups, warps)):
        other[0] = tops[(i * warps + s.t // 32) % groups]
        s.need[0] = 0
        s.slot[0] = 0
        for j in T.unroll(groups // 32):
            s.need[0] = s.need[0] + T.Cast(
                "int32", T.popcount(T.cuda.ballot_sync(T.uint32(FULL_WARP), s.own[j] > other[0])))
            s.slot[0] = s.slot[0] + T.Cast(
                "int32", T.popcount(T.cuda.ballot_sync(T.uint32(FULL_WARP), s.own[j] >= other[0])))
        if s.t % 32 == 0 and s.need[0] < k and s.slot[0] >= k:
            tell(s, other[0])


@phase
def kth_of_shared(groups, k, /, tops, first, own, bits):
    """Find the k-th best of `groups` tops, a multiple of 32: the least top that fewer than k tops exceed.

    One warp executes it.

    Reads: `tops[first:first + groups]`, with `first` a multiple of four; `own`, those of them that are this lane's.
    Writes: `bits[0]`, the k-th best, in all lanes. Barriers: none, but all lanes take part.
    """
    each = T.meta_var(groups // 32)
    better = T.alloc_local([each], "int32")
    others = T.alloc_local([4], "uint32")
    for j in T.unroll(each):
        better[j] = 0
    for four in T.unroll(groups // 4):
        load_shared(others[0], others[1], others[2], others[3], tops.ptr_to([first + four * 4]))
        for i in T.unroll(4):
            for j in T.unroll(each):
                if others[i] > own[j]:
                    better[j] = better[j] + 1
    bits[0] = T.uint32(NONE)
    for j in T.unroll(each):
        if better[j] < k:
            bits[0] = T.min(bits[0], own[j])
    bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), bits[0])


@phase
def kth_of_lanes(each, k, /, own, better, bits):
    """Find the k-th best of the tops of a warp's lanes, `each` a lane; the largest number of fewer than k.

    Reads: `own`. Writes: `better`, how many tops exceed each of them; `bits[0]`, in all lanes. Barriers: none, but all
    lanes take part.
    """
    for q in T.unroll(each):
        better[q] = 0
    for lane in T.unroll(32):
        for q in T.unroll(each):
            bits[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), own[q], lane, 32, 32)
            for r in T.unroll(each):
                if bits[0] > own[r]:
                    better[r] = better[r] + 1
    # Equal tops are exceeded by as many. A selection and an `if` are different machine code.
    bits[0] = T.uint32(NONE)
    for q in T.unroll(each):
        bits[0] = T.min(bits[0], T.Select(better[q] < k, own[q], T.uint32(NONE)))
    bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), bits[0])


@phase
def kth_by_bits(each, k, digits, /, own, reached, bits):
    """Find the upper `digits` bits of the k-th best of the tops of a warp's lanes, `each` a lane.

    Reads: `own`. Writes: `bits[0]`, the largest number that k tops reach and whose other bits are 0;
    scratch is `reached`. Barriers: none, but all lanes take part.
    """
    bits[0] = T.uint32(0)
    for i in T.serial(digits):
        bit: T.uint32 = T.uint32(1 << 31) >> T.Cast("uint32", i)
        reached[0] = T.uint32(0)
        for j in T.unroll(each):
            if own[j] >= (bits[0] | bit):
                reached[0] = reached[0] + T.uint32(1)
        reached[0] = T.call_extern("uint32", "__reduce_add_sync", T.uint32(FULL_WARP), reached[0])
        if reached[0] >= T.uint32(k):
            bits[0] = bits[0] | bit
# fmt: on
