"""A bound of the row, on which the blocks of a cluster agree: the k-th best of tops that are joined over all blocks.

At least k elements of its own share reach a block's own bound, so that about k for each block are ranked. Few more than
k elements of the whole row reach this one: blocks have little to search and to send, and the first block ranks what
arrives as it is.

All threads offer their largest elements. A warp without vectors of its own sends the tops of the block to the others of
the cluster, awaits theirs, and finds the k-th best, while all other warps proceed. Warps signal each other by
mbarriers, because a barrier would wait for the slowest warp.

A share in registers is complete at this point (`held.take_held`), and exponentials are computed meanwhile. For a staged
share the tops are those of the vectors that have come after most of the steps (`paced.take_steps`). At least k elements
reach their k-th best, as with any part of the row, so that keys can be found as soon as the last vector has come. In a
row in ascending order too many later elements reach it; then blocks use bounds of their own (`find.find_keys`).
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ...device.cluster import place_there
from ...device.mbarriers import arrive_expecting, await_arrivals, send_word
from ...device.selection import FULL_WARP, order
from ...rows.best import kth_of_shared, offer
from .bound import find_top
from .state import BOUNDED, EXCHANGED, OFFERED, WEIGHED
from .words import LEAST

# Bytes of the largest element of a group.
TOP = 4


# fmt: off
@phase
def begin_agreement(layout, /, s):
    """Initialise the mbarriers, and set the tops to 0. One warp executes it.

    Writes: `row_barriers`, `row_tops` of this block. Barriers: none; one of the cluster has to come before anything is
    offered.
    """
    if s.t % 32 == 0:
        T.ptx.mbarrier.init.shared__cta.b64(s.row_barriers.ptr_to([OFFERED]), T.uint32(layout.warps))
        T.ptx.mbarrier.init.shared__cta.b64(s.row_barriers.ptr_to([EXCHANGED]), T.uint32(1))
        T.ptx.mbarrier.init.shared__cta.b64(s.row_barriers.ptr_to([BOUNDED]), T.uint32(1))
        T.ptx.mbarrier.init.shared__cta.b64(s.row_barriers.ptr_to([WEIGHED]), T.uint32(layout.warps))
        T.ptx.fence.mbarrier_init.release.cluster()
        arrive_expecting(s.row_barriers.ptr_to([EXCHANGED]), T.uint32((layout.cluster - 1) * layout.row_groups * TOP))
    for j in T.unroll(layout.row_groups // 32):
        s.row_tops[s.part * layout.row_groups + j * 32 + s.t % 32] = T.uint32(0)


@T.inline
def tell(s, which):
    """Arrive at an mbarrier of `row_barriers` for this warp: it has done its part."""
    T.cuda.warp_sync()
    if s.t % 32 == 0:
        arrive_expecting(s.row_barriers.ptr_to([which]), T.uint32(0))


@phase
def offer_top(layout, /, s):
    """Offer the thread's largest element so far to its group's top.

    Reads: `pair`. Writes: `row_tops`; scratch is `top`, `plain`, `bits`. Barriers: arrives at OFFERED.
    """
    find_top(layout, s)
    order(s.top[0], s.plain, s.bits)
    offer(s, s.row_tops, s.part * layout.row_groups + s.t % layout.row_groups, s.bits[0])
    tell(s, OFFERED)


@phase
def send_tops(layout, /, s):
    """The tops of this block to all others of the cluster: two a lane, to as many blocks at a time as a warp has lanes
    for. One warp executes it.

    Reads: `row_tops` of this block. Writes: those of the others, asynchronously. Barriers: none.
    """
    cluster = T.meta_var(layout.cluster)
    lanes = T.meta_var(layout.row_groups // 2)
    together = T.meta_var(32 // lanes)
    pair = T.alloc_local([1], "uint64")
    peer = T.alloc_local([1], "int32")
    barrier = T.alloc_local([1], "uint32")
    there = T.alloc_local([1], "uint32")
    at = T.meta_var(s.part * layout.row_groups + s.t % lanes * 2)
    pair[0] = T.Cast("uint64", s.row_tops[at]) | (T.Cast("uint64", s.row_tops[at + 1]) << T.uint64(32))
    for turn in T.unroll(ceildiv(cluster - 1, together)):
        peer[0] = s.part + 1 + turn * together + s.t % 32 // lanes
        peer[0] = T.Select(peer[0] >= cluster, peer[0] - cluster, peer[0])
        place_there(barrier, s.row_barriers.ptr_to([EXCHANGED]), T.Cast("uint32", peer[0]))
        place_there(there, s.row_tops.ptr_to([at]), T.Cast("uint32", peer[0]))
        if turn * together + s.t % 32 // lanes < cluster - 1:
            send_word(there[0], pair[0], barrier[0])


@phase
def find_agreed(layout, /, s):
    """The k-th best of the tops of all blocks. One warp executes it.

    Reads: `row_tops`.
    Writes: those of this block, with the best of all; `kth`, `equals`; scratch is `own`, `bits`, `need`.
    Barriers: none.
    """
    each = T.meta_var(layout.row_groups // 32)
    tops = T.meta_var(s.part * layout.row_groups)
    for j in T.unroll(each):
        s.own[j] = s.row_tops[j * 32 + s.t % 32]
        for part in T.unroll(layout.cluster - 1):
            s.own[j] = T.max(s.own[j], s.row_tops[(1 + part) * layout.row_groups + j * 32 + s.t % 32])
    T.cuda.warp_sync()
    for j in T.unroll(each):
        s.row_tops[tops + j * 32 + s.t % 32] = s.own[j]
    T.cuda.warp_sync()
    kth_of_shared(layout.row_groups, layout.k)(s.row_tops, tops, s.own, s.bits)
    s.need[0] = 0
    for j in T.unroll(each):
        s.need[0] = s.need[0] + T.Cast("int32", T.popcount(T.cuda.ballot_sync(
            T.uint32(FULL_WARP), s.own[j] == s.bits[0])))
    if s.t % 32 == 0:
        s.kth[0] = s.bits[0]
        s.equals[0] = s.need[0]


@phase
def agree(layout, /, s):
    """The bound, by the warp that has no vectors.

    Reads, writes: as `send_tops` and `find_agreed`. Barriers: awaits OFFERED and EXCHANGED, arrives at BOUNDED.
    """
    await_arrivals(s.row_barriers.ptr_to([OFFERED]))
    if layout.cluster > 1:
        send_tops(layout)(s)
        await_arrivals(s.row_barriers.ptr_to([EXCHANGED]))
    find_agreed(layout)(s)
    tell(s, BOUNDED)


@T.inline
def take_agreed(layout, s):
    """Take over `bound`, the same in all threads, and `top`, the thread's largest element.

    Reads: `pair`, `kth`. Barriers: awaits BOUNDED.
    """
    if layout.early:
        find_top(layout, s)
    await_arrivals(s.row_barriers.ptr_to([BOUNDED]))
    s.bound[0] = T.max(s.kth[0], T.uint32(LEAST[layout.dtype]))
# fmt: on
