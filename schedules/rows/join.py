"""The row's pair (m, d), joined of those of its threads: over a warp, a thread block, or a cluster of thread blocks.

Equation 4 of Milakov & Gimelshein joins two pairs of disjoint sets of elements: the larger maximum, and the sum of both
sums after each was rescaled to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ..device.cluster import cluster_barrier, cluster_wait, peer_store
from .sum import LOWEST, scaled

Phase = Callable[..., Any]


# fmt: off
@T.inline
def join_warp(s):
    """Reads: (m, d) of the warp's threads. Writes: `top`, `d`. Barriers: shuffles of the whole warp.

    After: (top, d) is the warp's pair, in all of its threads: the maximum first, then every sum rescaled to it.
    """
    s.top = T.cuda.warp_max(s.m)
    s.d = T.cuda.warp_sum(s.d * T.exp2(scaled(s, s.m - s.top)))


@phase
def join_block(ext, /, s, block):
    """Reads: (top, d) of the block's warps. Writes: `top`, `d`, `pair_m`, `pair_d`. Barriers: one of the block.

    After: (top, d) is the row's pair, in all threads of the block.
    """
    if s.t % 32 == 0:
        block.pair_m[s.part * ext.warps + s.t // 32] = s.top
        block.pair_d[s.part * ext.warps + s.t // 32] = s.d
    T.cuda.cta_sync()
    join_pairs(ext)(s, block)


@phase
def join_cluster(ext, /, s, block):
    """Reads: (top, d) of the cluster's warps. Writes: `top`, `d`; `pair_m`, `pair_d` of every block of the cluster.

    Barriers: two of the cluster. The first one's arrival is at the kernel's start (`kernel.main`): a block has to have
    begun before another may write to its shared memory. After: (top, d) is the row's pair, in all of its threads.
    """
    put = T.meta_var(peer_store("put_float", "float"))
    cluster_wait()
    # A warp's lanes write its pair to one block each.
    if s.t % 32 < ext.cluster:
        put(block.pair_m.ptr_to([s.part * ext.warps + s.t // 32]), s.t % 32, s.top)
        put(block.pair_d.ptr_to([s.part * ext.warps + s.t // 32]), s.t % 32, s.d)
    cluster_barrier()
    join_pairs(ext)(s, block)


@phase
def join_pairs(ext, /, s, block):
    """Reads: `pair_m`, `pair_d`. Writes: `top`, `d`. Barriers: shuffles. Every warp joins all pairs for itself.

    Where the elements stay in registers, `m` is kept; elsewhere nobody reads it again, and its register is used.
    """
    pairs = T.meta_var(ext.pairs)
    own: T.float32 = s.m
    s.m = LOWEST
    for i in T.unroll(ceildiv(pairs, 32)):
        if i * 32 + s.t % 32 < pairs:
            s.m = T.max(s.m, block.pair_m[i * 32 + s.t % 32])
    s.top = T.cuda.warp_max(s.m)
    if ext.in_place:
        s.m = own
    s.d = T.float32(0)
    for i in T.unroll(ceildiv(pairs, 32)):
        if i * 32 + s.t % 32 < pairs:
            s.d = s.d + block.pair_d[i * 32 + s.t % 32] * T.exp2(
                scaled(s, block.pair_m[i * 32 + s.t % 32] - s.top))
    s.d = T.cuda.warp_sum(s.d)
# fmt: on
