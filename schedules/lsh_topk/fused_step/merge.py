"""The third kernel of `fused_step`: a thread block a row finds the best of its keys; others clear bitmaps.

    ask_keys        the row's keys, if they are not too many
    find_blocks     of the blocks' best keys the n-th best is a bound: the blocks whose best ones reach it
    join_sums       the blocks' sums of powers
    take_asked      the keys that reach the bound; or, where these are too many to ask for,
    take_keys       those of the blocks whose best ones do
    rank            these, by counting; or one best key after another where they are too many
    clear           bitmaps

Blocks and sums are looked at side by side, by a warp each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.arithmetic import LOG2_E
from ...device.overlap import wait_then_start_consumer
from ...device.powers import LOWEST, change_unit, over_largest, unit_of_bits
from ...device.region import device_region
from ...device.selection import FULL_WARP, below, bits_value, key_bits, key_index, key_value
from ...device.state import Buffers, local, shared
from ...output_layer.best.kernel import write_value
from ...rows.best import kth_of_lanes
from .product import each_block, frequent_each, frequent_first, turn_of
from .space import QUAD, SEARCHERS, SURVIVORS, WARP, Extents

Phase = Callable[..., Any]
AT_ONCE = 2  # keys of a block that a lane loads together
load_key = T.ptx.ld.global_.u64
load_sum = T.ptx.ld.global_.f64


@dataclass
class State(Buffers):
    """What the phases share."""

    # The row's index among those of all lists, the list, the row in the list's beam, and the thread.
    flat: Any
    index: Any
    row: Any
    t: Any
    # Words of a block that are frequent ones, and words of it that reached the threshold; ``words``: how many reached
    # it in the whole list.
    each: Any = local("int32")

    words: Any = local("int32")
    # As `each`.
    reached: Any = local("int32")
    # Ordered bits of the blocks' best keys, and the blocks' sums of powers.
    heads: Any = local("uint32", lambda e: e.heads_each * e.maxima)
    parts: Any = local("float64", lambda e: e.heads_each * e.maxima)
    # The largest of `heads` in each group of blocks, and their ranks.
    maxima: Any = local("uint32", lambda e: e.maxima)
    ranks: Any = local("int32", lambda e: e.maxima)
    # How many blocks reach the bound; a ballot of them.
    found: Any = local("int32")
    chosen: Any = local("uint32")
    # Keys of the row that were loaded before the bound was known.
    asked: Any = local("uint64", lambda e: e.keys + e.other_keys)
    # Keys of a block, the key being ranked, one it is compared with, and the last one that was written.
    own: Any = local("uint64", AT_ONCE)
    key: Any = local("uint64")
    other: Any = local("uint64")
    last: Any = local("uint64")
    # The largest score, and the sum of all exponentials divided by that score's exponential.
    top: Any = local("float32")
    d: Any = local("float32")
    # A sum of powers, and a logarithm.
    sum: Any = local("float64")
    value: Any = local("float32")
    # Registers for what is compared.
    bits: Any = local("uint32")
    rank: Any = local("int32")
    place: Any = local("int32")
    # Shared: the least ordered bits that count.
    bound: Any = shared("uint32", 1)
    # Shared: the blocks that reach it; how many stands in `counts[1]`.
    blocks: Any = shared("int32", lambda e: e.group_blocks)
    # Shared: how many keys reach it (`counts[0]`), and they themselves.
    counts: Any = shared("int32", 2)
    keys: Any = shared("uint64", SURVIVORS)
    # Shared: ordered bits of the row's largest score, and the sum of powers.
    largest: Any = shared("uint32", 1)
    sums: Any = shared("float64", 1)
    # Shared: each warp's best key.
    bests: Any = shared("uint64", lambda e: e.searchers)


# fmt: off
@phase
def load_heads(e, /, io, s):
    """Load the blocks' best keys and sums of powers. Writes: `heads` and `parts`, 0 beyond the last block. Barriers:
    none.
    """
    for i in T.unroll(e.heads_each * e.maxima):
        s.heads[i] = T.uint32(0)
        s.parts[i] = T.float64(0)
        if i * WARP + s.t % WARP < e.group_blocks:
            T.ptx.ld.global_.u32(s.heads[i], io.heads.ptr_to([s.flat, i * WARP + s.t % WARP]))
            load_sum(s.parts[i], io.sums.ptr_to([s.flat, i * WARP + s.t % WARP]))


@phase
def find_blocks(e, /, s):
    """The first warp finds the bound: the n-th largest of the groups' largest keys. At least n keys reach it.

    Reads: `heads`. Writes: `bound`, 0 if there are fewer than n groups with a key; `blocks`. Barriers: of the warp.
    """
    for q in T.unroll(e.maxima):
        s.maxima[q] = s.heads[q]
        for i in T.unroll(e.heads_each - 1):
            s.maxima[q] = T.max(s.maxima[q], s.heads[q + (i + 1) * e.maxima])
    kth_of_lanes(e.maxima, e.n)(s.maxima, s.ranks, s.bits)
    s.found[0] = 0
    for i in T.unroll(e.heads_each * e.maxima):
        s.chosen[0] = T.cuda.ballot_sync(
            T.uint32(FULL_WARP), tirx.all(s.heads[i] != T.uint32(0), s.heads[i] >= s.bits[0]))
        if (s.chosen[0] >> T.Cast("uint32", s.t % WARP)) & T.uint32(1) != T.uint32(0):
            s.blocks[s.found[0] + below(s.t % WARP, s.chosen[0])] = i * WARP + s.t % WARP
        s.found[0] = s.found[0] + T.Cast("int32", T.popcount(s.chosen[0]))
    if s.t % WARP == 0:
        s.bound[0] = s.bits[0]
        s.counts[1] = s.found[0]


@phase
def join_sums(e, /, s, factor):
    """Add up the blocks' sums of powers, by the second warp.

    Reads: `heads`, `parts`. Writes: `largest`, `sums`. Barriers: of the warp.
    """
    s.bits[0] = T.uint32(0)
    for i in T.unroll(e.heads_each * e.maxima):
        s.bits[0] = T.max(s.bits[0], s.heads[i])
    s.bits[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0])
    s.sum[0] = T.float64(0)
    for i in T.unroll(e.heads_each * e.maxima):
        s.sum[0] = s.sum[0] + change_unit(
            s.parts[i], unit_of_bits(s.heads[i], factor), unit_of_bits(s.bits[0], factor))
    for b in T.unroll(5):
        s.sum[0] = s.sum[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.sum[0], 1 << b, 32, 32)
    if s.t % WARP == 0:
        s.largest[0] = s.bits[0]
        s.sums[0] = s.sum[0]


@T.inline
def keep_key(s):
    """Append `other` to the list of keys that reach the bound, if it does."""
    if s.other[0] != T.uint64(0) and key_bits(s.other[0]) >= s.bound[0]:
        s.rank[0] = T.cuda.atomic_add(s.counts.ptr_to([0]), T.int32(1))
        if s.rank[0] < SURVIVORS:
            s.keys[s.rank[0]] = s.other[0]


@T.inline
def total(s, factor):
    """The row's largest score and its sum of exponentials, computed by each warp for itself. Reads: `largest`, `sums`.
    Writes: `top` and `d`.
    """
    s.top[0] = T.max(bits_value(s.largest[0]), LOWEST)
    s.sum[0] = s.sums[0]
    over_largest(s.d, s.value, s.sum, s.top[0], factor)


def other_block(e: Extents, i: Any) -> Any:
    """The thread block that has the `i`-th of the row's keys of words that reach the threshold. First come some keys of
    each thread block, which lie together, then the further ones of each.
    """
    return i // QUAD % e.group_blocks


def other_slot(e: Extents, i: Any) -> Any:
    """The place of the `i`-th such key among those of its thread block."""
    return i // QUAD // e.group_blocks * QUAD + i % QUAD


def other_at(e: Extents, i: Any) -> Any:
    """The place of the `i`-th such key among those of the row."""
    return other_block(e, i) * e.reached_each + other_slot(e, i)


def is_reached(e: Extents, s: Any, block: Any, slot: Any) -> Any:
    """Whether the row's list has a word for this place of the thread block, so that a key is there."""
    return turn_of(e, block, s.index % e.group_lists) + slot * e.group_blocks < s.words[0]


def is_other(e: Extents, s: Any, i: Any) -> Any:
    """Whether the row has an `i`-th such key."""
    return is_reached(e, s, other_block(e, i), other_slot(e, i))


def other_end(e: Extents, s: Any) -> Any:
    """How many such keys the row has places for."""
    return (s.reached[0] + (QUAD - 1)) // QUAD * (QUAD * e.group_blocks)


@phase
def go_through(e, keys, others, take, /, io, s):
    """The row's keys one after another: frequent words' from the `keys`-th on, and the others from the `others`-th.
    `take(s)` handles the key in `other`.

    Reads: keys, `words`, `reached`. Writes: `other`, and what `take` does. Barriers: none.
    """
    for i in T.serial((frequent_first(e, io) - keys - s.t + (SEARCHERS - 1)) // SEARCHERS):
        load_key(s.other[0], io.keys.ptr_to([s.flat, keys + i * SEARCHERS + s.t]))
        take(s)
    for i in T.serial((other_end(e, s) - others - s.t + (SEARCHERS - 1)) // SEARCHERS):
        if is_other(e, s, others + i * SEARCHERS + s.t):
            load_key(s.other[0], io.others.ptr_to([s.flat, other_at(e, others + i * SEARCHERS + s.t)]))
            take(s)


@phase
def ask_keys(e, /, io, s):
    """Load keys of the row before the bound is known: waiting for memory a second time takes longer than loading all of
    them. Fewer words may reach the threshold than keys are loaded for.

    Reads: keys. Writes: `asked`. Barriers: none.
    """
    for i in T.unroll(e.keys):
        s.asked[i] = T.uint64(0)
        if i * SEARCHERS + s.t < frequent_first(e, io):
            load_key(s.asked[i], io.keys.ptr_to([s.flat, i * SEARCHERS + s.t]))
    for i in T.unroll(e.other_keys):
        s.asked[e.keys + i] = T.uint64(0)
        if i * SEARCHERS + s.t < e.reached_most:
            load_key(s.asked[e.keys + i], io.others.ptr_to([s.flat, other_at(e, i * SEARCHERS + s.t)]))


@phase
def take_asked(e, /, io, s, factor):
    """Keep those loaded keys that reach the bound. Reads: `asked`, and the keys for which there was no room. Writes:
    `keys`; `top` and `d`. Barriers: of the warp; one has to come before, and one after.
    """
    total(s, factor)
    # Every key has a bit that is set; 0 is no key.
    bound: T.uint32 = T.max(s.bound[0], T.uint32(1))
    s.rank[0] = 0
    for i in T.unroll(e.other_keys):
        if not is_other(e, s, i * SEARCHERS + s.t):
            s.asked[e.keys + i] = T.uint64(0)
    for i in T.unroll(e.keys + e.other_keys):
        s.rank[0] = s.rank[0] + T.Cast("int32", key_bits(s.asked[i]) >= bound)
    if s.rank[0] > 0:
        s.place[0] = T.cuda.atomic_add(s.counts.ptr_to([0]), s.rank[0])
        for i in T.unroll(e.keys + e.other_keys):
            if tirx.all(key_bits(s.asked[i]) >= bound, s.place[0] < SURVIVORS):
                s.keys[s.place[0]] = s.asked[i]
                s.place[0] = s.place[0] + 1
    go_through(e, e.keys * SEARCHERS, e.other_keys * SEARCHERS, keep_key)(io, s)


@phase
def load(e, /, io, s, block, at, j):
    """Load the `at`-th key of a block: first those of frequent words, then those of words that
    reach the threshold.
    """
    slot = T.meta_var(at - s.each[0])
    s.own[j] = T.uint64(0)
    if at < s.each[0]:
        if block * s.each[0] + at < frequent_first(e, io):
            load_key(s.own[j], io.keys.ptr_to([s.flat, block * s.each[0] + at]))
    elif at < s.each[0] + s.reached[0]:
        if is_reached(e, s, block, slot):
            load_key(s.own[j], io.others.ptr_to([s.flat, block * e.reached_each + slot]))


@phase
def load_some(e, /, io, s, i, first):
    """Load a lane's next AT_ONCE keys of the i-th block in hand."""
    if i * e.searchers + s.t // WARP < s.counts[1]:
        s.place[0] = s.blocks[i * e.searchers + s.t // WARP]
        for j in T.unroll(AT_ONCE):
            load(e)(io, s, s.place[0], (first + j) * WARP + s.t % WARP, j)


@T.inline
def keep_some(s):
    """Keep those of the loaded keys that reach the bound."""
    for j in T.unroll(AT_ONCE):
        s.other[0] = s.own[j]
        keep_key(s)


@phase
def take_keys(e, /, io, s, factor):
    """Keep the keys that reach the bound. Reads: keys of the blocks that reach the bound, a warp a block. Writes:
    `keys`; `top` and `d`, of the row. Barriers: of the warp; one has to come before, and one after.
    """
    # The keys of the first block are being loaded meanwhile.
    load_some(e)(io, s, 0, 0)
    total(s, factor)
    for i in T.serial((s.counts[1] - s.t // WARP + (e.searchers - 1)) // e.searchers):
        if i > 0:
            load_some(e)(io, s, i, 0)
        keep_some(s)
        for j in T.serial((s.each[0] + s.reached[0] - 1) // (WARP * AT_ONCE)):
            load_some(e)(io, s, i, (j + 1) * AT_ONCE)
            keep_some(s)


@phase
def write_best(e, /, io, s, rank, factor):
    """Write one of the n best, `key` being its key, 0 for none."""
    if s.key[0] != T.uint64(0):
        io.indices[s.index, s.row, rank] = T.Cast("int64", key_index(s.key[0]))
        write_value(io, s, io.values, [s.index, s.row, rank], key_value(s.key[0]), factor)
    else:
        io.indices[s.index, s.row, rank] = T.int64(-1)
        io.values[s.index, s.row, rank] = T.Select(io.log != 0, T.float32("-inf"), T.float32(0))


@phase
def by_counting(e, /, io, s, factor):
    """One warp per key: its lanes compare the key with all others. Places for which there is no key come last."""
    for i in T.serial((T.max(s.counts[0], e.n) - s.t // WARP + (e.searchers - 1)) // e.searchers):
        s.rank[0] = i * e.searchers + s.t // WARP
        s.key[0] = T.uint64(0)
        if s.rank[0] < s.counts[0]:
            s.key[0] = s.keys[s.rank[0]]
            s.rank[0] = 0
            for j in T.serial((s.counts[0] + (WARP - 1)) // WARP):
                s.other[0] = s.keys[T.min(j * WARP + s.t % WARP, s.counts[0] - 1)]
                s.bits[0] = T.cuda.ballot_sync(
                    T.uint32(FULL_WARP), tirx.all(j * WARP + s.t % WARP < s.counts[0], s.other[0] > s.key[0]))
                s.rank[0] = s.rank[0] + T.Cast("int32", T.popcount(s.bits[0]))
        if s.t % WARP == 0 and s.rank[0] < e.n:
            write_best(e)(io, s, s.rank[0], factor)


@T.inline
def best_below(s):
    """Raise `key` to `other` if that is below the last key found."""
    if s.other[0] < s.last[0]:
        s.key[0] = T.max(s.key[0], s.other[0])


@phase
def one_by_one(e, /, io, s, factor):
    """Find the n best one after another, each by a pass over all keys. Barriers: two a key."""
    s.last[0] = ~T.uint64(0)
    for r in T.serial(e.n):
        s.key[0] = T.uint64(0)
        go_through(e, 0, 0, best_below)(io, s)
        for b in T.unroll(5):
            s.key[0] = T.max(s.key[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.key[0], 1 << b, 32, 32))
        if s.t % WARP == 0:
            s.bests[s.t // WARP] = s.key[0]
        T.cuda.cta_sync()
        s.key[0] = T.uint64(0)
        for w in T.serial(e.searchers):
            s.key[0] = T.max(s.key[0], s.bests[w])
        s.last[0] = s.key[0]
        if s.t == 0:
            write_best(e)(io, s, r, factor)
        T.cuda.cta_sync()


@phase
def rank(e, /, io, s, factor):
    """Rank the keys, and write the n best. Reads: `keys`, or all keys of the row. Writes: values and indices. Barriers:
    where there are too many survivors.
    """
    if s.counts[0] <= SURVIVORS:
        by_counting(e)(io, s, factor)
    else:
        one_by_one(e)(io, s, factor)


@phase
def finish_list(e, /, io, s):
    """Write the results of the row that are no key. Reads: `words`. Writes: the normaliser, and by the list's first row
    `counts`; the list's counters to 0, by the last of its thread blocks, when all of them have read them. Barriers:
    none; one has to come before.
    """
    # By the last warp, which has the fewest keys to rank.
    if s.t == SEARCHERS - WARP:
        io.normaliser[s.index, s.row] = s.top[0] * io.scale + T.log(s.d[0])
        if s.row == 0:
            io.counts[s.index] = frequent_first(e, io) + s.words[0]
        if T.cuda.atomic_add(io.found.ptr_to([s.index, 1]), T.int32(1)) == e.beam - 1:
            for i in T.unroll(2):
                io.found[s.index, i] = 0


@phase
def clear(e, /, io, block, t):
    """Set bitmaps to 0, for `blocks` thread blocks."""
    stride = T.meta_var(e.blocks * SEARCHERS * 4)
    at = T.meta_var(block * SEARCHERS + t)
    words = T.decl_buffer((io.lists * e.bitmap,), "uint32", data=io.bitmap.data)
    for i in T.serial((io.lists * e.bitmap - at * 4 + (stride - 1)) // stride):
        T.ptx.st.global_.v4.u32(
            words.ptr_to([i * stride + at * 4]),
            T.uint32(0), T.uint32(0), T.uint32(0), T.uint32(0))


@phase
def search(e, /, io, s):
    """Find a row's n best and its sum, and write both. Barriers: several."""
    take = T.meta_var(take_asked(e) if e.keys > 0 else take_keys(e))
    factor: T.float32 = io.scale * T.float32(LOG2_E)
    T.ptx.ld.global_.s32(s.words[0], io.found.ptr_to([s.index, 0]))
    if e.late_words > 0:
        s.words[0] = s.words[0] + (io.frequent - frequent_first(e, io))
    s.each[0] = frequent_each(e, io)
    s.reached[0] = each_block(e, s.words[0])
    if s.t < 2 * WARP:
        load_heads(e)(io, s)
    if e.keys > 0:
        # The loads that the bound depends on come first.
        T.cuda.cta_sync()
        ask_keys(e)(io, s)
    if s.t < WARP:
        find_blocks(e)(s)
    elif s.t < 2 * WARP:
        join_sums(e)(s, factor)
    T.cuda.cta_sync()
    take(io, s, factor)
    T.cuda.cta_sync()
    finish_list(e)(io, s)
    rank(e)(io, s, factor)


@phase
def merge(e, /, io):
    """The kernel."""
    with device_region():
        flat = T.cta_id([io.lists * e.beam + e.blocks])
        t = T.thread_id([SEARCHERS])
        s = T.meta_var(State.alloc(
            e, e.merge_bytes, flat=flat, index=flat // e.beam, row=flat % e.beam, t=t))
        if t == 0:
            s.counts[0] = 0
        T.cuda.cta_sync()
        if e.overlap > 0:
            wait_then_start_consumer()
        if flat < io.lists * e.beam:
            search(e)(io, s)
        else:
            clear(e)(io, flat - io.lists * e.beam, t)
# fmt: on
