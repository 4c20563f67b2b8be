"""The second kernel of `fused_step`: a thread block a row finds the best of its keys; others clear counts and bitmaps.

    find_blocks     of the blocks' best keys the n-th best is a bound: the blocks whose best ones reach it
    join_sums       the blocks' sums of powers
    sum_beyond      those of keys for which blocks had no places of their own: nobody has looked at them yet
    take_keys       the keys that reach the bound, of those blocks and of those beyond
    rank            these, by counting; or one best key after another where they are too many
    clear           counts and bitmaps

The first three are done side by side: the first two by a warp each, the third by all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ...device.arithmetic import LOG2_E
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.selection import FULL_WARP, below, bits_value, key_bits, key_index, key_value
from ...device.state import Buffers, local, shared
from ...output_layer.tiles.best import write_value
from .powers import LOWEST, add_power, change_unit, over_largest, two_to, unit_of_bits
from .space import SEARCHERS, SURVIVORS, WARP, Extents

Phase = Callable[..., Any]
AT_ONCE = 2  # keys of a block that a lane loads together
load_key = T.ptx.ld.global_.u64
load_sum = T.ptx.ld.global_.f64


@dataclass
class State(Buffers):
    """What the phases share.

    Attributes
    ----------
    flat, index, row, t
        The row of all lists', the list, the row of its beam, and the thread.
    each
        Frequent words of a block.
    words, beyond
        Candidates of the list beside the frequent ones, and those of them for which blocks had no places of their own.
    heads, parts
        Ordered bits of the blocks' best keys, and the blocks' sums of powers.
    maxima, ranks
        Of groups of blocks the largest of `heads`, and their ranks.
    found, chosen
        How many blocks reach the bound; a ballot of them.
    own, key, other, late
        Keys of a block, a key in hand, another one, and one of those beyond.
    top, d
        The largest score, and the sum of all exponentials over its own.
    sum, value
        A sum of powers, and a logarithm.
    bits, rank, place
        Registers for what is compared.
    bound
        Shared: the least ordered bits that count.
    blocks
        Shared: the blocks that reach it; how many stands in `counts[1]`.
    counts, keys
        Shared: how many keys reach it (`counts[0]`), and they themselves.
    largest, sums
        Shared: ordered bits of largest scores, and their sums of powers: of all blocks, and behind that of other warps'
        keys beyond.
    bests
        Shared: each warp's best key.
    """

    flat: Any
    index: Any
    row: Any
    t: Any
    each: Any = local("int32")
    words: Any = local("int32")
    beyond: Any = local("int32")
    heads: Any = local("uint32", lambda e: e.heads_each * e.maxima)
    parts: Any = local("float64", lambda e: e.heads_each * e.maxima)
    maxima: Any = local("uint32", lambda e: e.maxima)
    ranks: Any = local("int32", lambda e: e.maxima)
    found: Any = local("int32")
    chosen: Any = local("uint32")
    own: Any = local("uint64", AT_ONCE)
    key: Any = local("uint64")
    other: Any = local("uint64")
    late: Any = local("uint64")
    top: Any = local("float32")
    d: Any = local("float32")
    sum: Any = local("float64")
    value: Any = local("float32")
    bits: Any = local("uint32")
    rank: Any = local("int32")
    place: Any = local("int32")
    bound: Any = shared("uint32", 1)
    blocks: Any = shared("int32", lambda e: e.blocks)
    counts: Any = shared("int32", 2)
    keys: Any = shared("uint64", SURVIVORS)
    largest: Any = shared("uint32", lambda e: e.searchers - 1)
    sums: Any = shared("float64", lambda e: e.searchers - 1)
    bests: Any = shared("uint64", lambda e: e.searchers)


# fmt: off
def load_heads(e: Extents) -> Phase:
    """Reads: the blocks' best keys and sums of powers. Writes: `heads` and `parts`, 0 for blocks that there are
    not. Barriers: none."""

    @T.inline
    def phase(io, s):
        for i in T.unroll(e.heads_each * e.maxima):
            s.heads[i] = T.uint32(0)
            s.parts[i] = T.float64(0)
            if i * WARP + s.t % WARP < e.blocks:
                T.ptx.ld.global_.u32(s.heads[i], io.heads.ptr_to([s.flat, i * WARP + s.t % WARP]))
                load_sum(s.parts[i], io.sums.ptr_to([s.flat, i * WARP + s.t % WARP]))

    return phase


@T.inline
def add_up(s, factor, slot):
    """Put all lanes' `sum`, whose largest scores `bits` are, together to the warp's part of `sums`."""
    largest: T.uint32 = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0])
    change_unit(s.sum, unit_of_bits(s.bits[0], factor), unit_of_bits(largest, factor))
    for b in T.unroll(5):
        s.sum[0] = s.sum[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.sum[0], 1 << b, 32, 32)
    if s.t % WARP == 0:
        s.largest[slot] = largest
        s.sums[slot] = s.sum[0]


def find_blocks(e: Extents) -> Phase:
    """The first warp's: of the largest keys of groups of blocks the n-th. n keys at least reach it.

    Reads: `heads`. Writes: `bound`, 0 if there are fewer than n groups with a key; `blocks`. Barriers: of the warp.
    """

    @T.inline
    def phase(s):
        for q in T.unroll(e.maxima):
            s.maxima[q] = s.heads[q]
            for i in T.unroll(e.heads_each - 1):
                s.maxima[q] = T.max(s.maxima[q], s.heads[q + (i + 1) * e.maxima])
            s.ranks[q] = 0
        for j in T.unroll(WARP):
            for q in T.unroll(e.maxima):
                s.bits[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.maxima[q], j, 32, 32)
                for r in T.unroll(e.maxima):
                    if s.bits[0] > s.maxima[r]:
                        s.ranks[r] = s.ranks[r] + 1
        # Of equal ones all have the first one's rank, and the least of those that rank among the n first is the n-th.
        s.bits[0] = T.uint32(0xFFFFFFFF)
        for q in T.unroll(e.maxima):
            s.bits[0] = T.min(s.bits[0], T.Select(s.ranks[q] < e.n, s.maxima[q], T.uint32(0xFFFFFFFF)))
        s.bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), s.bits[0])
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

    return phase


def join_sums(e: Extents) -> Phase:
    """The second warp's; the phase is (s, factor).

    Reads: `heads`, `parts`. Writes: the first of `sums`. Barriers: of the warp.
    """

    @T.inline
    def phase(s, factor):
        s.bits[0] = T.uint32(0)
        for i in T.unroll(e.heads_each * e.maxima):
            s.bits[0] = T.max(s.bits[0], s.heads[i])
        s.sum[0] = T.float64(0)
        for i in T.unroll(e.heads_each * e.maxima):
            s.sum[0] = s.sum[0] + s.parts[i] * T.Cast(
                "float64", two_to(unit_of_bits(s.heads[i], factor) - unit_of_bits(s.bits[0], factor)))
        add_up(s, factor, 0)

    return phase


def sum_beyond(e: Extents) -> Phase:
    """The other warps'; the phase is (io, s, factor).

    Reads: `late`, further keys beyond. Writes: the warp's `sums`. Barriers: of the warp.
    """
    threads = SEARCHERS - 2 * WARP

    @T.inline
    def phase(io, s, factor):
        s.bits[0] = T.uint32(0)
        s.sum[0] = T.float64(0)
        for i in T.serial((s.beyond[0] - (s.t - 2 * WARP) + (threads - 1)) // threads):
            s.other[0] = s.late[0]
            if i > 0:
                load_key(s.other[0], io.others.ptr_to([s.flat, e.slots + i * threads + s.t - 2 * WARP]))
            if key_bits(s.other[0]) > s.bits[0]:
                change_unit(s.sum, unit_of_bits(s.bits[0], factor), unit_of_bits(key_bits(s.other[0]), factor))
                s.bits[0] = key_bits(s.other[0])
            add_power(s.sum, s.value, key_value(s.other[0]), factor, unit_of_bits(s.bits[0], factor))
        T.cuda.warp_sync()
        add_up(s, factor, s.t // WARP - 1)

    return phase


@T.inline
def keep_key(s):
    """`other` on the list of those that reach the bound, if it does."""
    if s.other[0] != T.uint64(0) and key_bits(s.other[0]) >= s.bound[0]:
        s.rank[0] = T.cuda.atomic_add(s.counts.ptr_to([0]), T.int32(1))
        if s.rank[0] < SURVIVORS:
            s.keys[s.rank[0]] = s.other[0]


def take_keys(e: Extents) -> Phase:
    """Reads: keys of the blocks that reach the bound, a warp a block; keys beyond. Writes: `keys`; `top` and `d`, of
    the row. Barriers: of the warp; one has to come before, and one after. The phase is (io, s, factor).
    """
    threads = SEARCHERS - 2 * WARP

    @T.inline
    def load_either(io, s, block, at, j):
        """A key of a block, its `at`-th: frequent words', and then those at its own places."""
        s.own[j] = T.uint64(0)
        if at < s.each[0]:
            if block * s.each[0] + at < io.frequent:
                load_key(s.own[j], io.keys.ptr_to([s.flat, block * s.each[0] + at]))
        elif at < s.each[0] + e.own_slots:
            load_key(s.own[j], io.others.ptr_to([s.flat, block * e.own_slots + at - s.each[0]]))

    @T.inline
    def load_one_kind(io, s, block, at, j):
        """Of a block of a row those at its own places, of others frequent words'."""
        s.own[j] = T.uint64(0)
        if block < e.counters:
            if at < e.own_slots:
                load_key(s.own[j], io.others.ptr_to([s.flat, block * e.own_slots + at]))
        elif at < s.each[0] and (block - e.counters) * s.each[0] + at < io.frequent:
            load_key(s.own[j], io.keys.ptr_to([s.flat, (block - e.counters) * s.each[0] + at]))

    load = load_one_kind if e.row_blocks else load_either

    def most_keys(s: State) -> Any:
        """Of a block."""
        return T.max(s.each[0], e.own_slots) if e.row_blocks else s.each[0] + e.own_slots

    @T.inline
    def load_some(io, s, i, first):
        if i * e.searchers + s.t // WARP < s.counts[1]:
            s.place[0] = s.blocks[i * e.searchers + s.t // WARP]
            for j in T.unroll(AT_ONCE):
                load(io, s, s.place[0], (first + j) * WARP + s.t % WARP, j)

    @T.inline
    def keep_some(s):
        for j in T.unroll(AT_ONCE):
            s.other[0] = s.own[j]
            keep_key(s)

    @T.inline
    def total(s, factor):
        """Of the parts in `sums`, by each warp for itself."""
        lane: T.int32 = T.min(s.t % WARP, e.searchers - 2)
        s.bits[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.largest[lane])
        s.sum[0] = T.if_then_else(s.t % WARP < e.searchers - 1, s.sums[lane], T.float64(0))
        change_unit(s.sum, unit_of_bits(s.largest[lane], factor), unit_of_bits(s.bits[0], factor))
        for b in T.unroll(5):
            s.sum[0] = s.sum[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.sum[0], 1 << b, 32, 32)
        s.top[0] = T.max(bits_value(s.bits[0]), LOWEST)
        over_largest(s.d, s.value, s.sum, s.top[0], factor)

    @T.inline
    def phase(io, s, factor):
        # Those of the first block are on their way while sums are joined.
        load_some(io, s, 0, 0)
        total(s, factor)
        for i in T.serial((s.counts[1] - s.t // WARP + (e.searchers - 1)) // e.searchers):
            if i > 0:
                load_some(io, s, i, 0)
            keep_some(s)
            for j in T.serial((most_keys(s) - 1) // (WARP * AT_ONCE)):
                load_some(io, s, i, (j + 1) * AT_ONCE)
                keep_some(s)
        if s.t >= 2 * WARP:
            for i in T.serial((s.beyond[0] - (s.t - 2 * WARP) + (threads - 1)) // threads):
                s.other[0] = s.late[0]
                if i > 0:
                    load_key(s.other[0], io.others.ptr_to([s.flat, e.slots + i * threads + s.t - 2 * WARP]))
                keep_key(s)

    return phase


def write_best(e: Extents) -> Phase:
    """One of the n best; the phase is (io, s, rank, factor), `key` being its key, 0 for none."""

    @T.inline
    def phase(io, s, rank, factor):
        if s.key[0] != T.uint64(0):
            io.indices[s.index, s.row, rank] = T.Cast("int64", key_index(s.key[0]))
            write_value(io, s, io.values, [s.index, s.row, rank], key_value(s.key[0]), factor)
        else:
            io.indices[s.index, s.row, rank] = T.int64(-1)
            io.values[s.index, s.row, rank] = T.Select(io.log != 0, T.float32("-inf"), T.float32(0))

    return phase


def rank(e: Extents) -> Phase:
    """Reads: `keys`, or all of them. Writes: values and indices. Barriers: where there are too many survivors.

    The phase is (io, s, factor).
    """
    write = write_best(e)

    @T.inline
    def by_counting(io, s, factor):
        """A warp a key: its lanes compare it with all of them."""
        for i in T.serial((s.counts[0] - s.t // WARP + (e.searchers - 1)) // e.searchers):
            s.key[0] = s.keys[i * e.searchers + s.t // WARP]
            s.rank[0] = 0
            for j in T.serial((s.counts[0] + (WARP - 1)) // WARP):
                s.other[0] = s.keys[T.min(j * WARP + s.t % WARP, s.counts[0] - 1)]
                s.bits[0] = T.cuda.ballot_sync(
                    T.uint32(FULL_WARP), tirx.all(j * WARP + s.t % WARP < s.counts[0], s.other[0] > s.key[0]))
                s.rank[0] = s.rank[0] + T.Cast("int32", T.popcount(s.bits[0]))
            if s.t % WARP == 0 and s.rank[0] < e.n:
                write(io, s, s.rank[0], factor)
        s.key[0] = T.uint64(0)
        for i in T.serial((e.n - s.t + (SEARCHERS - 1)) // SEARCHERS):
            if i * SEARCHERS + s.t >= s.counts[0]:
                write(io, s, i * SEARCHERS + s.t, factor)

    @T.inline
    def best_of(s, keys, size, last):
        for i in T.serial((size - s.t + (SEARCHERS - 1)) // SEARCHERS):
            load_key(s.other[0], keys.ptr_to([s.flat, i * SEARCHERS + s.t]))
            if s.other[0] < last:
                s.key[0] = T.max(s.key[0], s.other[0])

    @T.inline
    def one_by_one(io, s, factor):
        s.late[0] = ~T.uint64(0)
        for r in T.serial(e.n):
            s.key[0] = T.uint64(0)
            best_of(s, io.keys, io.frequent, s.late[0])
            best_of(s, io.others, e.slots + s.beyond[0], s.late[0])
            for b in T.unroll(5):
                s.key[0] = T.max(s.key[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.key[0], 1 << b, 32, 32))
            if s.t % WARP == 0:
                s.bests[s.t // WARP] = s.key[0]
            T.cuda.cta_sync()
            s.key[0] = T.uint64(0)
            for w in T.serial(e.searchers):
                s.key[0] = T.max(s.key[0], s.bests[w])
            s.late[0] = s.key[0]
            if s.t == 0:
                write(io, s, r, factor)
            T.cuda.cta_sync()

    @T.inline
    def phase(io, s, factor):
        if s.counts[0] <= SURVIVORS:
            by_counting(io, s, factor)
        else:
            one_by_one(io, s, factor)

    return phase


def finish_list(e: Extents) -> Phase:
    """Reads: `words`. Writes: the normaliser, and by the list's first row `counts`; the list's counters to 0, by the
    last of its thread blocks, which all have read them. Barriers: none; one has to come before."""

    @T.inline
    def phase(io, s):
        # Of the last warp, which has the fewest keys to rank.
        if s.t == SEARCHERS - WARP:
            io.normaliser[s.index, s.row] = s.top[0] * io.scale + T.log(s.d[0])
            if s.row == 0:
                io.counts[s.index] = io.frequent + s.words[0]
            if T.cuda.atomic_add(io.found.ptr_to([s.index, 2]), T.int32(1)) == e.beam - 1:
                for i in T.unroll(3):
                    io.found[s.index, i] = 0

    return phase


def clear(e: Extents) -> Phase:
    """Counts and bitmaps to 0; the phase is (io, block, t), for `blocks` thread blocks."""

    @T.inline
    def zero(buffer, size, at):
        words = T.decl_buffer((size,), "uint32", data=buffer.data)
        for i in T.serial((size - at * 4 + (e.blocks * SEARCHERS * 4 - 1)) // (e.blocks * SEARCHERS * 4)):
            T.ptx.st.global_.v4.u32(
                words.ptr_to([(i * (e.blocks * SEARCHERS) + at) * 4]),
                T.uint32(0), T.uint32(0), T.uint32(0), T.uint32(0))

    @T.inline
    def phase(io, block, t):
        if e.row_blocks == 0:
            zero(io.hits, io.lists * (e.beam * e.cells), block * SEARCHERS + t)
        zero(io.bitmap, io.lists * e.bitmap, block * SEARCHERS + t)

    return phase


def merge(e: Extents) -> Phase:
    """The kernel, called with (io)."""
    do = SimpleNamespace(
        load=load_heads(e), find=find_blocks(e), join=join_sums(e), sum_beyond=sum_beyond(e), take=take_keys(e),
        rank=rank(e), finish=finish_list(e), clear=clear(e))

    @T.inline
    def search(io, s):
        factor: T.float32 = io.scale * T.float32(LOG2_E)
        s.each[0] = (io.frequent + (e.multipliers - 1)) // e.multipliers
        T.ptx.ld.global_.s32(s.beyond[0], io.found.ptr_to([s.index, 0]))
        T.ptx.ld.global_.s32(s.words[0], io.found.ptr_to([s.index, 1]))
        s.late[0] = T.uint64(0)
        if s.t < 2 * WARP:
            do.load(io, s)
            if s.t < WARP:
                do.find(s)
            else:
                do.join(s, factor)
        else:
            # Perhaps nobody's: before it is known how many there are.
            if s.t - 2 * WARP < e.vocab:
                load_key(s.late[0], io.others.ptr_to([s.flat, e.slots + s.t - 2 * WARP]))
            do.sum_beyond(io, s, factor)
        T.cuda.cta_sync()
        do.take(io, s, factor)
        T.cuda.cta_sync()
        do.finish(io, s)
        do.rank(io, s, factor)

    @T.inline
    def kernel(io):
        with device_region():
            flat = T.cta_id([io.lists * e.beam + e.blocks])
            t = T.thread_id([SEARCHERS])
            s = T.meta_var(State.alloc(e, flat=flat, index=flat // e.beam, row=flat % e.beam, t=t))
            if t == 0:
                s.counts[0] = 0
            T.cuda.cta_sync()
            if e.overlap > 0:
                wait_then_start_consumer()
            if flat < io.lists * e.beam:
                search(io, s)
            else:
                do.clear(io, flat - io.lists * e.beam, t)

    return kernel
# fmt: on
