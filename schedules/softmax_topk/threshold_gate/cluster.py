"""A row that a cluster of blocks shares: the blocks push what they found into the first one, which unites it.

Pushing is writing to another block's shared memory (distributed shared memory). So there is one launch and no
workspace. A block must not be written to before it has begun, nor end while others may write to it.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.cluster import (
    Deal,
    cluster_arrive,
    cluster_arrive_relaxed,
    cluster_barrier,
    cluster_wait,
    peer_store,
)
from ...device.loops import loop_of
from ...device.selection import FULL_WARP, below, join_key, key_index, key_value, order_bits
from .layout import Layout
from .state import SETTLED
from .survivors import keep_best, take_pivot

put_float, put_int = peer_store("put_float", "float"), peer_store("put_int", "int")
put_key = peer_store("put_key", "unsigned long long")


# fmt: off
def push_part(layout: Layout) -> Phase:
    """Write what this block found to its place in the first block. The phase is (s).

    Reads: `keys`, `size`, which is at most `Pool.room`, `largest`, `reference`, `sum`, `threshold`, `equals_until`.
    Writes: `united` and `united_...` of the first block.
    Barriers: none.
    """
    threads, room, loop = layout.tiling.threads, layout.pool.room, loop_of(layout.unroll)
    # Warps that seldom have a key write the rest, at the same time.
    writers = [max(threads - 32 * (i + 1), 0) for i in range(5)]

    @T.inline
    def phase(s):
        for i in loop((s.size[0] - s.t + (threads - 1)) // threads):
            T.evaluate(put_key(s.united.ptr_to([s.part * room + i * threads + s.t]), 0, s.keys[i * threads + s.t]))
        if s.t == writers[0]:
            T.evaluate(put_int(s.united_size.ptr_to([s.part]), 0, s.size[0]))
        if s.t == writers[1]:
            T.evaluate(put_float(s.united_largest.ptr_to([s.part]), 0, s.largest[0]))
        if s.t == writers[2]:
            T.evaluate(put_float(s.united_reference.ptr_to([s.part]), 0, s.reference[0]))
        if s.t == writers[3]:
            T.evaluate(put_float(s.united_sum.ptr_to([s.part]), 0, s.sum[0]))
        if s.t == writers[4]:
            T.evaluate(put_key(
                s.united_threshold.ptr_to([s.part]), 0, join_key(order_bits(s.threshold[0]), s.equals_until[0])))

    return phase


@phase
def unite_parts(layout, /, s):
    """Unite what the blocks have pushed: the row's sum and reference, the highest threshold, and the keys that
    reach it.

    What a block did not push is below its own threshold, so that no key that reaches the highest is missing. A lane
    reads what one block has pushed.

    Reads: `united` and `united_...`; `united_count`, which comes as 0.
    Writes: `keys`, `size`, `sum`, `largest`, `reference`, `threshold`, `equals_until`, `pivot`; scratch is `slot`.
    Barriers: one, at the end.
    After: these are the row's, in all threads.
    """
    cluster = T.meta_var(layout.tiling.cluster)
    deal = T.meta_var(Deal(cluster, layout.tiling.warps))
    key = T.alloc_local([1], "uint64")
    lanes = T.alloc_local([1], "uint32")
    part = T.alloc_local([1], "int32")
    chunks = T.alloc_local([1], "int32")
    at = T.alloc_local([1], "int32")
    s.pivot[0] = s.united_threshold[T.min(s.t % 32, cluster - 1)]
    s.largest[0] = s.united_largest[T.min(s.t % 32, cluster - 1)]
    s.reference[0] = s.united_reference[T.min(s.t % 32, cluster - 1)]
    s.sum[0] = T.Select(s.t % 32 < cluster, s.united_sum[T.min(s.t % 32, cluster - 1)], T.float32(0))
    s.threshold[0] = s.reference[0]
    for b in T.unroll((cluster - 1).bit_length()):
        s.pivot[0] = T.max(s.pivot[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.pivot[0], 1 << b, 32, 32))
        s.largest[0] = T.max(
            s.largest[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.largest[0], 1 << b, 32, 32))
        s.threshold[0] = T.max(
            s.threshold[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.threshold[0], 1 << b, 32, 32))
    # Up to here `threshold` holds the largest of the references.
    s.sum[0] = T.cuda.warp_sum(s.sum[0] * T.exp2(s.reference[0] - s.threshold[0]))
    # Lanes beyond the last block repeat it, so that each group of lanes has the maxima of all blocks.
    s.reference[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.threshold[0], 0, 32, 32)
    s.pivot[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.pivot[0], 0, 32, 32)
    s.largest[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.largest[0], 0, 32, 32)
    s.threshold[0] = key_value(s.pivot[0])
    s.equals_until[0] = T.Cast("int32", key_index(s.pivot[0]))
    for r in T.serial(deal.rounds):
        part[0] = deal.part(s.t, r)
        # Each chunk of 32 keys of a part goes to one of the warps.
        chunks[0] = 0
        if deal.has(s.t, part[0]):
            chunks[0] = (s.united_size[part[0]] + 31) // 32
        for i in loop_of(layout.unroll)((chunks[0] - deal.turn(s.t) + (deal.groups - 1)) // deal.groups):
            at[0] = (i * deal.groups + deal.turn(s.t)) * 32 + s.t % 32
            key[0] = T.uint64(0)
            if at[0] < s.united_size[part[0]]:
                key[0] = s.united[part[0] * layout.pool.room + at[0]]
            # The keys of a warp get their places together: one after another they would wait for each other's
            # atomics.
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), key[0] >= s.pivot[0])
            s.slot[0] = 0
            if s.t % 32 == 0:
                s.slot[0] = T.cuda.atomic_add(s.united_count.ptr_to([0]), T.Cast("int32", T.popcount(lanes[0])))
            s.slot[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.slot[0], 0, 32, 32) + below(s.t % 32, lanes[0])
            if key[0] >= s.pivot[0]:
                s.keys[s.slot[0]] = key[0]
    T.cuda.cta_sync()
    s.size[0] = s.united_count[0]


@phase
def share_parts(layout, /, s):
    """Unite the blocks' survivors and sums to those of the row, in the first block.

    All blocks have begun (`await_blocks`).

    Reads and writes: as `push_part` in every block and `unite_parts` in the first one. If a block has more survivors
        than it may push, it pushes the best k.
    Barriers: one of the cluster, and those of these phases.
    """
    if s.size[0] > layout.pool.room:
        keep_best(layout)(s)
        take_pivot(s, layout.vocab)
        s.size[0] = layout.k
    push_part(layout)(s)
    cluster_barrier()
    if s.part == 0:
        unite_parts(layout)(s)


@T.inline
def announce_block(s):
    """Tell the others of the cluster that this block has begun, and may be written to."""
    cluster_arrive_relaxed()


@T.inline
def await_blocks(s):
    """Wait until the other blocks have begun, before the first write to them."""
    cluster_wait()


@phase
def agree(layout, /, s):
    """Agree whether all parts have to be read again: the first block knows, and tells the others only if so.

    It tells the row's largest element, too. That of a block's own share may be so far below that it is no reference: a
    float32 of 1e10 and more is rounded by hundreds.

    Reads: `settled` and `largest` of the first block; `verdict`, which comes as SETTLED.
    Writes: `verdict` and `row_largest`, and by these `settled` and `largest` of the others.
    Barriers: one of the cluster; the first block waits for it only if the row is read again, else `await_others` does.
    """
    if s.part == 0 and s.settled[0] != SETTLED:
        if s.t < layout.tiling.cluster:
            T.evaluate(put_int(s.verdict.ptr_to([0]), s.t, s.settled[0]))
            T.evaluate(put_float(s.row_largest.ptr_to([0]), s.t, s.largest[0]))
        cluster_arrive()
    else:
        cluster_arrive_relaxed()
    if s.part != 0 or s.settled[0] != SETTLED:
        cluster_wait()
        s.settled[0] = s.verdict[0]
        if s.settled[0] != SETTLED:
            s.largest[0] = s.row_largest[0]


@T.inline
def await_others(s):
    """Keep the first block until all others have arrived."""
    cluster_wait()


@phase
def call_others(layout, /, s, needed):
    """Let the first block tell the others of the cluster whether they are needed once more.

    Reads: `needed` of the first block, in all its threads.
    Writes: `needed` of the others, which was 0 before the barrier of `share_parts`: 1 if they are needed.
    Barriers: one of the cluster; the first block waits for it only if the others are needed.
    """
    if s.part == 0 and needed[0] != 0:
        if s.t > 0 and s.t < layout.tiling.cluster:
            T.evaluate(put_int(needed.ptr_to([0]), s.t, 1))
        cluster_arrive()
    else:
        cluster_arrive_relaxed()
    if s.part != 0 or needed[0] != 0:
        cluster_wait()
# fmt: on
