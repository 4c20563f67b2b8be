"""A bound for a staged row while its last vectors are on their way: the k-th best of the tops of what has come so far.

At least k elements of the row reach it, as of any part of it. So once the last vector is there its keys can be found,
of all thread blocks no more than are ranked at once: nobody waits for tops of the whole row, nor for a bound of all
keys. Of a row in ascending order too many elements come behind; such a row gets its bound anew (`find.find_keys`).

All threads offer their largest elements after most of the row's steps (`paced.take_steps`). A warp that has no vectors
of its own sends the tops of the block to the others of the cluster, awaits theirs, and finds the k-th best, while all
other warps go on. They tell each other by mbarriers: a barrier would wait for the slowest warp.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ...device.cluster import place_there
from ...device.mbarriers import arrive_expecting, await_arrivals, send_word
from ...device.selection import FULL_WARP, order
from ...device.tops import offer
from .bound import find_top
from .space import Layout
from .state import BOUNDED, EXCHANGED, OFFERED
from .words import LEAST

# Bytes of a top.
TOP = 4


# fmt: off
def begin_early(layout: Layout) -> Callable[..., Any]:
    """The mbarriers, and no tops yet. The phase is (s), of one warp.

    Writes: `early_barriers`, `early_tops` of this block.
    Barriers: none; one of the cluster has to come before anything is offered.
    """
    groups = layout.early_groups

    @T.inline
    def phase(s):
        if s.t % 32 == 0:
            T.ptx.mbarrier.init.shared__cta.b64(s.early_barriers.ptr_to([OFFERED]), T.uint32(layout.warps))
            T.ptx.mbarrier.init.shared__cta.b64(s.early_barriers.ptr_to([EXCHANGED]), T.uint32(1))
            T.ptx.mbarrier.init.shared__cta.b64(s.early_barriers.ptr_to([BOUNDED]), T.uint32(1))
            T.ptx.fence.mbarrier_init.release.cluster()
            arrive_expecting(s.early_barriers.ptr_to([EXCHANGED]), T.uint32((layout.cluster - 1) * groups * TOP))
        for j in T.unroll(groups // 32):
            s.early_tops[s.part * groups + j * 32 + s.t % 32] = T.uint32(0)

    return phase


@T.inline
def tell(s, which):
    """This warp has done its part: one arrival at an mbarrier of `early_barriers`."""
    T.cuda.warp_sync()
    if s.t % 32 == 0:
        arrive_expecting(s.early_barriers.ptr_to([which]), T.uint32(0))


def offer_early(layout: Layout) -> Callable[..., Any]:
    """The thread's largest element so far. The phase is (s).

    Reads: `pair`.
    Writes: `early_tops`; scratch is `top`, `plain`, `bits`.
    Barriers: arrives at OFFERED.
    """
    groups = layout.early_groups

    @T.inline
    def phase(s):
        find_top(layout, s)
        order(s.top[0], s.plain, s.bits)
        offer(s, s.early_tops, s.part * groups + s.t % groups, s.bits[0])
        tell(s, OFFERED)

    return phase


def send_early(layout: Layout) -> Callable[..., Any]:
    """The tops of this block to all others of the cluster. The phase is (s), of one warp.

    Reads: `early_tops` of this block.
    Writes: those of the others, asynchronously.
    Barriers: none.
    """
    groups, cluster = layout.early_groups, layout.cluster

    @T.inline
    def phase(s):
        pair = T.alloc_local([1], "uint64")
        peer = T.alloc_local([1], "uint32")
        barrier = T.alloc_local([1], "uint32")
        there = T.alloc_local([1], "uint32")
        for j in T.unroll(groups // 64):
            at = T.meta_var(s.part * groups + j * 64 + s.t % 32 * 2)
            pair[0] = T.Cast("uint64", s.early_tops[at]) | (
                T.Cast("uint64", s.early_tops[at + 1]) << T.uint64(32))
            for other in T.unroll(cluster - 1):
                peer[0] = T.Cast("uint32", (s.part + 1 + other) % cluster)
                place_there(barrier, s.early_barriers.ptr_to([EXCHANGED]), peer[0])
                place_there(there, s.early_tops.ptr_to([at]), peer[0])
                send_word(there[0], pair[0], barrier[0])

    return phase


def find_early(layout: Layout) -> Callable[..., Any]:
    """The k-th best of the tops of all blocks. The phase is (s), of one warp.

    It is the least of those which fewer than k exceed.

    Reads: `early_tops`.
    Writes: those of this block, with the best of all; `kth`, `equals`; scratch is `own`, `bits`, `need`.
    Barriers: none.
    """
    groups, cluster, each = layout.early_groups, layout.cluster, layout.early_groups // 32

    @T.inline
    def phase(s):
        better = T.alloc_local([each], "int32")
        tops = T.meta_var(s.part * groups)
        for j in T.unroll(each):
            s.own[j] = s.early_tops[j * 32 + s.t % 32]
            for part in T.unroll(cluster - 1):
                s.own[j] = T.max(s.own[j], s.early_tops[(1 + part) * groups + j * 32 + s.t % 32])
            better[j] = 0
        T.cuda.warp_sync()
        for j in T.unroll(each):
            s.early_tops[tops + j * 32 + s.t % 32] = s.own[j]
        T.cuda.warp_sync()
        for group in T.unroll(groups):
            s.bits[0] = s.early_tops[tops + group]
            for j in T.unroll(each):
                if s.bits[0] > s.own[j]:
                    better[j] = better[j] + 1
        s.bits[0] = T.uint32(0xFFFFFFFF)
        for j in T.unroll(each):
            if better[j] < layout.k:
                s.bits[0] = T.min(s.bits[0], s.own[j])
        s.bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), s.bits[0])
        s.need[0] = 0
        for j in T.unroll(each):
            s.need[0] = s.need[0] + T.Cast("int32", T.popcount(T.cuda.ballot_sync(
                T.uint32(FULL_WARP), s.own[j] == s.bits[0])))
        if s.t % 32 == 0:
            s.kth[0] = s.bits[0]
            s.equals[0] = s.need[0]

    return phase


def agree(layout: Layout) -> Callable[..., Any]:
    """The early bound, by the warp that has no vectors. The phase is (s).

    Reads, writes: as `send_early` and `find_early`.
    Barriers: awaits OFFERED and EXCHANGED, arrives at BOUNDED.
    """
    send, find = send_early(layout), find_early(layout)

    @T.inline
    def phase(s):
        await_arrivals(s.early_barriers.ptr_to([OFFERED]))
        if layout.cluster > 1:
            send(s)
            await_arrivals(s.early_barriers.ptr_to([EXCHANGED]))
        find(s)
        tell(s, BOUNDED)

    return phase


@T.inline
def take_early(layout, s):
    """`bound`, the same in all threads, and `top` of all that the thread has.

    Reads: `pair`, `kth`.
    Barriers: awaits BOUNDED.
    """
    find_top(layout, s)
    await_arrivals(s.early_barriers.ptr_to([BOUNDED]))
    s.bound[0] = T.max(s.kth[0], T.uint32(LEAST[layout.dtype]))
# fmt: on
