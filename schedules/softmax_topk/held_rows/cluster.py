"""What the blocks of a cluster send the first one: their keys, and then their sums.

Both go by asynchronous stores, which tell an mbarrier of the first block how many bytes have come. It waits for
these mbarriers alone. A cluster barrier after plain stores would do as well, but is compiled with a fence of the whole
GPU; and who needs the keys would wait for the sums.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ...device.cluster import TURN, Deal, place_there
from ...device.loops import rolled
from ...device.mbarriers import arrive_expecting, arrive_expecting_there, await_arrivals, send_word
from ...device.selection import FULL_WARP, below, counter_address, join_key, key_bits, key_index, lanes_sum, take_places
from ...rows.best import offer
from .bound import bound_equals, find_bound, offer_first
from .keys import clear_behind
from .space import Layout
from .state import KEYS, SUMS
from .sums import FIRST, LOWEST_BITS, add_threads, add_up, place_sum, sum_of_warp, sum_word

# The number of the barrier of the threads that rank.
RANK = 2
# Bytes of a key, of a number of keys, or of a sum.
WORD = 8


# fmt: off
@phase
def prepare_exchange(layout, /, s):
    """The first block's mbarriers.

    Writes: `barriers` and `sums` of the first block.
    Barriers: none; one of the cluster has to come before anything is sent.
    """
    if s.part == 0 and s.t % layout.preparers == 0:
        T.ptx.mbarrier.init.shared__cta.b64(s.barriers.ptr_to([KEYS]), T.uint32(layout.cluster))
        T.ptx.mbarrier.init.shared__cta.b64(s.barriers.ptr_to([SUMS]), T.uint32(1))
        T.ptx.fence.mbarrier_init.release.cluster()
        if layout.senders > 0:
            arrive_expecting(s.barriers.ptr_to([SUMS]), T.uint32(WORD * layout.entries))
        else:
            arrive_expecting(s.barriers.ptr_to([SUMS]), T.uint32(WORD * (layout.cluster - 1)))
            # The first block does not send its own sum: it adds up the sums of its warps.
            s.sums[0] = T.uint64(LOWEST_BITS) << T.uint64(32)


@phase
def send_keys(layout, /, s):
    """Send the block's keys to the first block.

    Reads: `found_keys`, `size`. Writes: `united` and `united_sizes` of the first block, asynchronously. Barriers: none.
    """
    threads = T.meta_var(layout.block_threads)
    barrier = T.alloc_local([1], "uint32")
    there = T.alloc_local([1], "uint32")
    place_there(barrier, s.barriers.ptr_to([KEYS]), FIRST)
    # By the last warp, which seldom has a key.
    if s.t == threads - 32:
        arrive_expecting_there(barrier[0], T.Cast("uint32", (s.size[0] + 1) * WORD))
        place_there(there, s.united_sizes.ptr_to([s.part]), FIRST)
        send_word(there[0], T.Cast("uint64", s.size[0]), barrier[0])
    place_there(there, s.united.ptr_to([s.part * layout.room]), FIRST)
    for i in rolled((s.size[0] - s.t + (threads - 1)) // threads):
        send_word(
            there[0] + T.Cast("uint32", (i * threads + s.t) * WORD), s.found_keys[i * threads + s.t], barrier[0])


@phase
def send_block_sum(layout, /, s):
    """Send the sum of a block other than the first.

    Reads: `sums` of its warps. Writes: `sums` of the first block, asynchronously. Barriers: one, at the start.
    """
    barrier = T.alloc_local([1], "uint32")
    there = T.alloc_local([1], "uint32")
    T.cuda.cta_sync()
    if s.t // 32 == layout.block_warps - 1:
        place_sum(s, there, barrier, s.part)
        add_up(layout.cluster, layout.block_warps)(s)
        if s.t == layout.block_threads - 32:
            send_word(there[0], sum_word(s.sum[0], s.reference[0]), barrier[0])


def group_of(layout: Layout, s: Any, at: Any, r: Any) -> Any:
    """The group of a key, by the key's place; it need not be that of its block's bound."""
    return (at + Deal(layout.cluster, layout.warps).part(s.t, r) * TURN) % layout.groups


@phase
def place(layout, /, s, at, r):
    """Where a thread begins in the part of a round."""
    deal = T.meta_var(Deal(layout.cluster, layout.warps))
    at[0] = deal.part(s.t, r) * layout.room + deal.turn(s.t) * 32 + s.t % 32


@phase
def offer_keys(layout, /, s, own, ends, at):
    """Offer the largest keys to their groups."""
    deal = T.meta_var(Deal(layout.cluster, layout.warps))
    step = T.meta_var(deal.groups * 32)
    chunks = T.meta_var(ceildiv(3 * layout.groups // 2, step))
    for r in T.unroll(deal.rounds):
        place(layout)(s, at, r)
        ends[r] = 0
        if deal.has(s.t, deal.part(s.t, r)):
            ends[r] = deal.part(s.t, r) * layout.room + T.Cast("int32", s.united_sizes[deal.part(s.t, r)])
        for c in T.unroll(chunks):
            own[r * chunks + c] = T.uint64(0)
            if at[0] < ends[r]:
                own[r * chunks + c] = s.united[at[0]]
                offer(s, s.united_tops, group_of(layout, s, at[0], r), key_bits(own[r * chunks + c]))
            at[0] = at[0] + step
        while at[0] < ends[r]:
            offer(s, s.united_tops, group_of(layout, s, at[0], r), key_bits(s.united[at[0]]))
            at[0] = at[0] + step


@phase
def offer_firsts(layout, /, s, ends, at):
    """Offer the first columns of the groups' largest keys, as `find_firsts` does for elements."""
    deal = T.meta_var(Deal(layout.cluster, layout.warps))
    step = T.meta_var(deal.groups * 32)
    for r in T.unroll(deal.rounds):
        place(layout)(s, at, r)
        while at[0] < ends[r]:
            if key_bits(s.united[at[0]]) == s.united_tops[group_of(layout, s, at[0], r)]:
                offer_first(
                    s, s.united_firsts, group_of(layout, s, at[0], r), T.Cast("int32", key_index(s.united[at[0]])))
            at[0] = at[0] + step


@phase
def keep_from(layout, /, s, ends, at, first):
    """Keep the keys of each part that are no less than `pivot`, from its thread's `first` key on."""
    deal = T.meta_var(Deal(layout.cluster, layout.warps))
    step = T.meta_var(deal.groups * 32)
    for r in T.unroll(deal.rounds):
        place(layout)(s, at, r)
        at[0] = at[0] + first * step
        while at[0] < ends[r]:
            s.key[0] = s.united[at[0]]
            if s.key[0] >= s.pivot[0]:
                s.slot[0] = take_places(s.counter[0], T.int32(1))
                s.keys[s.slot[0]] = s.key[0]
            at[0] = at[0] + step


@phase
def keep_first_equals(layout, /, s, ends, at):
    """Keep only the first of the keys that equal the bound, as blocks do where such keys take too much room."""
    T.cuda.cta_sync()
    if s.t == 0:
        s.united_count[0] = 0
        s.last[0] = layout.vocab
    offer_firsts(layout)(s, ends, at)
    T.cuda.cta_sync()
    bound_equals(layout)(s, s.united_tops, s.united_firsts)
    s.pivot[0] = join_key(s.bound[0], s.until[0])
    keep_from(layout)(s, ends, at, 0)
    T.cuda.cta_sync()
    s.size[0] = s.united_count[0]
    clear_behind(layout, s)


@phase
def unite_parts(layout, /, s):
    """From the blocks' keys and sums to the row's, in the first block.

    Reads: `united`, `united_sizes`, `sums`; `united_tops` and `united_count`, which come as 0, and `united_firsts`, as
        the number of columns.
    Writes: `keys`, `size`, `bound`, `until`, `sum`, `reference`, `counter`, and scratch as `find_bound` and `add_up`.
    Barriers: three, the last at the end; and three for many equals.
    After: these are the same in all threads. All that can be among the k best is in `keys`, followed by zeros.
    """
    deal = T.meta_var(Deal(layout.cluster, layout.warps))
    step = T.meta_var(deal.groups * 32)
    chunks = T.meta_var(ceildiv(3 * layout.groups // 2, step))
    held = T.meta_var(chunks * deal.rounds)
    at = T.alloc_local([1], "int32")
    ends = T.alloc_local([deal.rounds], "int32")
    own = T.alloc_local([held], "uint64")
    lanes = T.alloc_local([held], "uint32")
    s.counter[0] = counter_address(s.united_count.ptr_to([0]))
    offer_keys(layout)(s, own, ends, at)
    T.cuda.cta_sync()
    find_bound(layout)(s, s.united_tops)
    s.pivot[0] = T.Cast("uint64", s.bound[0]) << T.uint64(32)
    s.need[0] = 0
    for c in T.unroll(held):
        lanes[c] = T.cuda.ballot_sync(T.uint32(FULL_WARP), own[c] >= s.pivot[0])
        s.need[0] = s.need[0] + T.Cast("int32", T.popcount(lanes[c]))
    s.slot[0] = 0
    if s.t % 32 == 0 and s.need[0] > 0:
        s.slot[0] = take_places(s.counter[0], s.need[0])
    # The sums arrive meanwhile.
    await_arrivals(s.barriers.ptr_to([SUMS]))
    add_up(0, layout.entries)(s)
    s.slot[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.slot[0], 0, 32, 32)
    for c in T.unroll(held):
        if own[c] >= s.pivot[0]:
            s.keys[s.slot[0] + below(s.t % 32, lanes[c])] = own[c]
        s.slot[0] = s.slot[0] + T.Cast("int32", T.popcount(lanes[c]))
    keep_from(layout)(s, ends, at, chunks)
    T.cuda.cta_sync()
    s.size[0] = s.united_count[0]
    if s.size[0] > layout.at_once:
        keep_first_equals(layout)(s, ends, at)


@phase
def count_parts(layout, /, s):
    """How many keys the blocks have sent.

    Reads: `united_sizes`. Writes: `size`, the number of all keys; `need`, in each lane the number of a part's keys, or
    0. Barriers: none, but all lanes take part.
    """
    s.need[0] = 0
    if s.t % 32 < layout.cluster:
        s.need[0] = T.Cast("int32", s.united_sizes[s.t % 32])
    s.size[0] = lanes_sum(s.need[0])


@phase
def gather_parts(layout, /, s):
    """Concatenate the blocks' keys, which are few enough to be ranked at once. Threads that have vectors execute it.

    Reads: `united`; `need` of `count_parts`. Writes: `keys`. Barriers: one of these threads, at the end.
    """
    deal = T.meta_var(Deal(layout.cluster, layout.warps))
    step = T.meta_var(deal.groups * 32)
    first = T.alloc_local([1], "int32")
    own = T.alloc_local([1], "int32")
    for r in T.unroll(deal.rounds):
        part = T.meta_var(deal.part(s.t, r))
        first[0] = lanes_sum(T.Select(s.t % 32 < part, s.need[0], 0))
        own[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.need[0], part % 32, 32, 32)
        if deal.has(s.t, part):
            for i in rolled((own[0] - deal.turn(s.t) * 32 - s.t % 32 + (step - 1)) // step):
                at = T.meta_var(i * step + deal.turn(s.t) * 32 + s.t % 32)
                s.keys[first[0] + at] = s.united[part * layout.room + at]
    T.ptx.bar.sync(T.uint32(RANK), T.uint32(layout.threads))


@phase
def filter_parts(layout, /, s):
    """Write the blocks' keys to `keys`, without those that are worse than k keys of the first block. It needs k keys of
    the first block, and the same bound in all blocks.

    Equals of the bound in the other blocks have later columns than the first block's.

    Reads: `united`, `bound`, `until`; `need` of `count_parts`; `united_count`, which comes as 0.
    Writes: `keys`, `size`; scratch is `pivot`, `counter`, `key`, `slot`.
    Barriers: one, before the end.
    """
    deal = T.meta_var(Deal(layout.cluster, layout.block_warps))
    step = T.meta_var(deal.groups * 32)
    own = T.alloc_local([1], "int32")
    s.counter[0] = counter_address(s.united_count.ptr_to([0]))
    s.pivot[0] = join_key(s.bound[0], T.min(s.until[0], layout.share * layout.width))
    for r in T.unroll(deal.rounds):
        part = T.meta_var(deal.part(s.t, r))
        own[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.need[0], part % 32, 32, 32)
        if deal.has(s.t, part):
            for i in rolled((own[0] - deal.turn(s.t) * 32 - s.t % 32 + (step - 1)) // step):
                s.key[0] = s.united[part * layout.room + i * step + deal.turn(s.t) * 32 + s.t % 32]
                if s.key[0] >= s.pivot[0]:
                    s.slot[0] = take_places(s.counter[0], T.int32(1))
                    s.keys[s.slot[0]] = s.key[0]
    T.cuda.cta_sync()
    s.size[0] = s.united_count[0]


@phase
def add(layout, /, s):
    """Add up the block's sum while its keys are being sent."""
    if layout.late:
        if s.t >= layout.threads:
            add_threads(layout)(s)
    else:
        # The additional warp has no sum.
        if s.t < layout.threads:
            sum_of_warp(layout)(s)


@phase
def share_parts(layout, /, s):
    """The block's keys and its sum to the first block, which then has the keys of all; others end here.

    Reads, writes: as `send_keys`, `add_threads`, `sum_of_warp` and `send_block_sum`.
    Barriers: that of `send_block_sum`; awaits the keys.
    """
    send_keys(layout)(s)
    add(layout)(s)
    if s.part != 0:
        if layout.senders == 0:
            send_block_sum(layout)(s)
        T.thread_return()
    await_arrivals(s.barriers.ptr_to([KEYS]))
# fmt: on
