"""The second kernel of `tiles` and `warpgroups`: a block a row finds the best words, of the best tiles or of all.

clear           shared memory
begin_search    of tiles: what each thread looks at first is loaded
load_pairs      maxima and sums of exponentials of the first kernel's blocks
collect         the tiles that reach a bound, k at least; or, if threads have them all in registers,
collect_bits    the same, sooner: `find_tops`, `bound_tiles`, and the tiles that reach the bound
begin_near      the words of these tiles
join_lanes      maxima and sums meanwhile, of a warp
collect_near    the words that reach the same bound
join_pairs      the row's maximum and sum of exponentials
rank            these words in order, the k best to their places; `rank_few` in one step, if they are few
write_absent    what stands where there are no words left
write_asked     the probabilities of words that were asked for

The bound is no more than the best word of the k-th best tile, so k words at least reach it, and no search among words
is needed. Where too many tiles or words reach it, as of equal scores,

rank_tiles      the k best tiles
select          of their words: the k best

With `direct`, a list so short that its scores are all looked at, no tiles are searched and no pairs joined:

begin_search    of all words
select          the k best; between its barriers `exponentials` has the row's sum of exponentials
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.arithmetic import LN_2, LOG2_E
from ...device.overlap import wait_then_start_consumer
from ...device.powers import change_base, over_largest, power_unit
from ...device.ranking import rank_at_once
from ...device.region import device_region
from ...device.selection import (
    FULL_WARP,
    bits_value,
    counter_address,
    join_key,
    key_bits,
    key_index,
    key_value,
    order_bits,
    take_places,
)
from ...device.state import Buffers, local, pooled, shared
from ...device.tops import find_kth, offer
from .space import SearchSizes, TileSearchSizes
from .words import count_words, find_word

load_uint = T.ptx.ld.global_.u32
load_float = T.ptx.ld.global_.f32
load_pair = T.ptx.ld.global_.v2.f32
load_whole_pair = T.ptx.ld.global_.v2.f64
load_long = T.ptx.ld.global_.s64
LOWEST = T.min_value("float32")
COUNT = 4  # bytes of a counter


@dataclass
class State(Buffers):
    """What the phases share.

    Attributes
    ----------
    index, row, t
        The list, the row of its beam, and the thread.
    words
        Of the list.
    m, d, top
        Maximum and sum of exponentials: a thread's, then the row's.
    whole, rest
        With `whole_sums` a thread's base and sum, and others; an exponential.
    best
        A thread's best key, or another one.
    bits, peak, value, pair, place, rank, near, wanted
        Registers for what is loaded and counted.
    bound
        Shared: the least key that counts, of tiles and of words.
    count, counters
        Shared: how many keys reached it; and a register with its address (see `selection.counter_address`).
    maxima
        Shared: the best key of each group of threads.
    chosen
        Shared: the best tiles, in order, where more reached the bound than are looked through.
    reached
        Shared: keys of the words that reached it.
    pairs
        Shared: each warp's maximum and sum of exponentials, or of `whole_sums` the latter.
    peak, own, need, slot, pivot
        Registers, for `by_bits`: the largest ordered bits of a thread's tiles; `tops` by lanes; what `find_kth` and
        `rank_at_once` count, and a key.
    tops
        Shared, for `by_bits`: the largest ordered bits of each group of threads.
    largest
        Shared, with `whole_sums` where tiles are not found by bits: ordered bits of the row's largest score.
    keys, held
        Pool: keys that reached the bound, and ordered bits of all that is searched.
    """

    index: Any
    row: Any
    t: Any
    words: Any = local("int32")
    m: Any = local("float32")
    d: Any = local("float32")
    whole: Any = local("float64", 4, when=lambda e: e.whole_sums)
    rest: Any = local("float32", when=lambda e: e.whole_sums)
    top: Any = local("float32")
    best: Any = local("uint64")
    bits: Any = local("uint32", lambda e: e.loads)
    peak: Any = local("uint32", when=lambda e: e.by_bits)
    own: Any = local("uint32", lambda e: e.tile_groups // 32, when=lambda e: e.by_bits)
    need: Any = local("int32", when=lambda e: e.by_bits)
    slot: Any = local("int32", when=lambda e: e.by_bits)
    pivot: Any = local("uint64", when=lambda e: e.by_bits)
    value: Any = local("float32")
    pair: Any = local("float32", 2)
    place: Any = local("int32")
    rank: Any = local("int32")
    near: Any = local("int32")
    wanted: Any = local("int64")
    bound: Any = shared("uint64", 2)
    count: Any = shared("int32", 2)
    counters: Any = local("uint32")
    maxima: Any = shared("uint64", lambda e: e.groups)
    chosen: Any = shared("int32", lambda e: e.k)
    reached: Any = shared("uint64", lambda e: e.most_near, when=lambda e: not e.direct)
    tops: Any = shared("uint32", lambda e: e.tile_groups, when=lambda e: e.by_bits)
    largest: Any = shared("uint32", when=lambda e: e.tells_largest)
    pairs: Any = shared(lambda e: e.sum_dtype, 64)
    keys: Any = pooled("uint64", lambda e: e.searched, 0)
    held: Any = pooled("uint32", lambda e: e.searched, lambda e: 2 * e.searched)

    @classmethod
    def of_row(cls, e: TileSearchSizes, io: Any, flat: Any, t: Any) -> State:
        """Of one row of all lists. A division would stand between the wait and the first load: tiles that are taken as
        thread blocks come to them are of one list."""
        index, row = (0, flat) if e.dynamic else (flat // io.beam, flat % io.beam)
        return cls.alloc(e, e.pool_bytes, index=index, row=row, t=t)


def pair_warps(e: TileSearchSizes) -> int:
    """Warps that have a pair of the first kernel's blocks."""
    return ceildiv(min(e.blocks, e.threads), 32)


def score_at(io: Any, s: State, position: Any) -> Any:
    """Where the score of a word of the list is, by its position."""
    return io.workspaces["scores"].ptr_to(io.place(s.index, s.row, position))


def rescaled(pairs: Any, at: int, unit: Any) -> Any:
    """The sum of a base and its sum, a pair of `whole_sums`, in another unit."""
    return change_base(pairs[at + 1], T.Cast("float32", pairs[at]), unit)


# fmt: off
def clear(e: TileSearchSizes) -> Callable[..., Any]:
    """Set shared memory to how it is before anything was found; the phase is (s).

    Writes: `chosen`, `count`, `bound`; `tops`, and the front of `reached`, where they come as 0; and `counters`.
    Barriers: one, at the end.
    """

    @T.inline
    def phase(s):
        s.counters[0] = counter_address(s.count.ptr_to([0]))
        for i in T.serial((e.k - s.t + (e.threads - 1)) // e.threads):
            s.chosen[i * e.threads + s.t] = 0
        if s.t < 2:
            s.count[s.t] = 0
            s.bound[s.t] = T.uint64(0)
        if e.by_bits:
            if s.t < e.tile_groups:
                s.tops[s.t] = T.uint32(0)
            if s.t < e.at_once:
                s.reached[s.t] = T.uint64(0)
        T.cuda.cta_sync()

    return phase


def load_pairs(e: TileSearchSizes) -> Callable[..., Any]:
    """Load the pairs of the first kernel's blocks, as far as a thread has them.

    Reads: `sums` of the row.
    Writes: `m` and `d`, or `whole`, of warps that have a pair. With a pair a thread nobody waits for it here.
    Barriers: none.
    """

    @T.inline
    def load(io, s, block, m, d):
        load_pair(m, d, io.workspaces["sums"].ptr_to(io.place(s.index, s.row, block, 0)))

    @T.inline
    def phase(io, s, factor):
        if s.t < pair_warps(e) * 32:
            s.m[0] = LOWEST
            s.d[0] = T.float32(0)
            if e.blocks <= e.threads:
                if s.t < e.blocks:
                    load(io, s, s.t, s.m[0], s.d[0])
            else:
                for i in T.serial((e.blocks - s.t + (e.threads - 1)) // e.threads):
                    load(io, s, i * e.threads + s.t, s.pair[0], s.pair[1])
                    s.top[0] = T.max(s.m[0], s.pair[0])
                    s.d[0] = s.d[0] * T.exp2((s.m[0] - s.top[0]) * factor) + s.pair[1] * T.exp2(
                        (s.pair[0] - s.top[0]) * factor)
                    s.m[0] = s.top[0]

    @T.inline
    def load_whole(io, s, block, at):
        load_whole_pair(
            s.whole[at], s.whole[at + 1], io.workspaces["sums"].ptr_to(io.place(s.index, s.row, block, 0)))

    @T.inline
    def load_joined(io, s, factor):
        if s.t < pair_warps(e) * 32:
            s.whole[0] = T.Cast("float64", LOWEST)
            s.whole[1] = T.float64(0)
            if e.blocks <= e.threads:
                if s.t < e.blocks:
                    load_whole(io, s, s.t, 0)
            else:
                for i in T.serial((e.blocks - s.t + (e.threads - 1)) // e.threads):
                    load_whole(io, s, i * e.threads + s.t, 2)
                    s.top[0] = T.Cast("float32", T.max(s.whole[0], s.whole[2]))
                    s.whole[1] = rescaled(s.whole, 0, s.top[0]) + rescaled(s.whole, 2, s.top[0])
                    s.whole[0] = T.Cast("float64", s.top[0])

    return load_joined if e.whole_sums else phase


def find_top(e: TileSearchSizes) -> Callable[..., Any]:
    """The row's largest score, which the search for tiles has told. The phase is (s).

    Reads: `own`; or `largest`.
    Writes: `top`.
    Barriers: none, but all lanes take part.
    """

    @T.inline
    def of_groups(s):
        s.peak[0] = s.own[0]
        for j in T.unroll(e.tile_groups // 32 - 1):
            s.peak[0] = T.max(s.peak[0], s.own[j + 1])
        s.top[0] = T.max(
            bits_value(T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.peak[0])), LOWEST)

    @T.inline
    def told(s):
        s.top[0] = T.max(bits_value(s.largest[0]), LOWEST)

    return of_groups if e.by_bits else told


def pairwise(terms: Sequence[Any]) -> Any:
    """Their sum, by pairs: in few steps that wait for each other."""
    while len(terms) > 1:
        terms = [functools.reduce(operator.add, terms[i : i + 2]) for i in range(0, len(terms), 2)]
    return terms[0]


@T.inline
def sum_lanes(sums, at):
    """`sums[at]` = its sum over the lanes of a warp."""
    for b in T.unroll(5):
        sums[at] = sums[at] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), sums[at], 1 << b, 32, 32)


def join_lanes(e: TileSearchSizes) -> Callable[..., Any]:
    """The sum of a warp's pairs; and its maximum, unless the row's is known. The phase is (s, factor).

    Reads: `m` and `d`, or `whole`; what `find_top` reads.
    Writes: `pairs`, the warp's; `top`, of the row if that is known.
    Barriers: none. The next one makes them visible.
    """
    find = find_top(e)

    @T.inline
    def join(s, factor):
        if s.t < pair_warps(e) * 32:
            s.top[0] = s.m[0]
            for b in T.unroll(5):
                s.top[0] = T.max(s.top[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.top[0], 1 << b, 32, 32))
            s.d[0] = s.d[0] * T.exp2((s.m[0] - s.top[0]) * factor)
            sum_lanes(s.d, 0)
            if s.t % 32 == 0:
                s.pairs[s.t // 32 * 2] = s.top[0]
                s.pairs[s.t // 32 * 2 + 1] = s.d[0]

    @T.inline
    def join_known(s, factor):
        find(s)
        if s.t < pair_warps(e) * 32:
            s.d[0] = s.d[0] * T.exp2((s.m[0] - s.top[0]) * factor)
            sum_lanes(s.d, 0)
            if s.t % 32 == 0:
                s.pairs[s.t // 32] = s.d[0]

    @T.inline
    def join_whole(s, factor):
        find(s)
        if s.t < pair_warps(e) * 32:
            s.whole[1] = rescaled(s.whole, 0, power_unit(s.top[0], factor))
            sum_lanes(s.whole, 1)
            if s.t % 32 == 0:
                s.pairs[s.t // 32] = s.whole[1]

    return join_whole if e.whole_sums else join_known if e.by_bits else join


def join_pairs(e: TileSearchSizes) -> Callable[..., Any]:
    """The row's sum of exponentials, and its maximum. The phase is (io, s, factor).

    Reads: `pairs`; `top`, if it is known.
    Writes: `d` and `top`, in every thread; the normaliser.
    Barriers: none.
    """

    @T.inline
    def write(io, s):
        if s.t == 0:
            T.buffer_store(io.normaliser, s.top[0] * io.scale + T.log(s.d[0]), io.place(s.index, s.row))

    @T.inline
    def join(io, s, factor):
        s.top[0] = LOWEST
        for w in T.unroll(pair_warps(e)):
            s.top[0] = T.max(s.top[0], s.pairs[w * 2])
        s.d[0] = T.float32(0)
        for w in T.unroll(pair_warps(e)):
            s.d[0] = s.d[0] + s.pairs[w * 2 + 1] * T.exp2((s.pairs[w * 2] - s.top[0]) * factor)
        write(io, s)

    @T.inline
    def add_known(io, s, factor):
        s.d[0] = s.pairs[0]
        for w in T.unroll(pair_warps(e) - 1):
            s.d[0] = s.d[0] + s.pairs[w + 1]
        write(io, s)

    @T.inline
    def add_whole(io, s, factor):
        s.whole[0] = pairwise([s.pairs[w] for w in range(pair_warps(e))])
        over_largest(s.d, s.rest, s.whole, s.top[0], factor)
        write(io, s)

    return add_whole if e.whole_sums else add_known if e.by_bits else join


@dataclass(frozen=True)
class Search:
    """What `select` looks through.

    Attributes
    ----------
    number
        0 of tiles, 1 of words: of their counters.
    most
        How many there may be: memory is read so far before their number is known.
    load
        (io, s, i, j) loads the i-th into `bits[j]`.
    finish
        (s, i, j) makes it the bits that order like it, 0 for none.
    name
        (s, i) is the number by which equals are put in order.
    place
        (io, s, rank, key, factor) does with one of the k best what is to be done.
    """

    number: int
    most: int
    load: Callable[..., Any]
    finish: Callable[..., Any]
    name: Callable[..., Any]
    place: Callable[..., Any]


def begin_search(e: SearchSizes, search: Search) -> Callable[..., Any]:
    """Load what each thread looks at first; the phase is (io, s). Writes: `bits`. Barriers: none."""

    @T.inline
    def phase(io, s):
        for j in T.unroll(e.loads):
            s.bits[j] = T.uint32(0)
            if j * e.threads + s.t < search.most:
                search.load(io, s, j * e.threads + s.t, j)

    return phase


def best_of_lanes(lanes: int) -> Callable[..., Any]:
    """`best` = the best of so many neighbouring lanes, or of a warp. The phase is (s). Barriers: none, but all lanes
    take part."""

    @T.inline
    def phase(s):
        for b in T.unroll(min(lanes, 32).bit_length() - 1):
            s.best[0] = T.max(s.best[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.best[0], 1 << b, 32, 32))

    return phase


def exponentials(e: SearchSizes) -> Callable[..., Any]:
    """What a warp's scores add to the row's sum of exponentials; the phase is (s, size, factor).

    Reads: `maxima`, `held`.
    Writes: `top`, of the row; `pairs`, the warp's sum; `best` is lost.
    Barriers: none. The next one makes the sum visible.
    """
    lanes = e.threads // e.groups
    join = best_of_lanes(lanes)

    @T.inline
    def phase(s, size, factor):
        s.best[0] = T.uint64(0)
        for j in T.serial(e.groups // lanes):
            s.best[0] = T.max(s.best[0], s.maxima[j * lanes + s.t % lanes])
        join(s)
        # Not below the lowest number: the difference of two infinities would be NaN.
        s.top[0] = T.Select(s.best[0] == T.uint64(0), LOWEST, T.max(key_value(s.best[0]), LOWEST))
        s.d[0] = T.float32(0)
        for i in T.serial((size - s.t + (e.threads - 1)) // e.threads):
            s.d[0] = s.d[0] + T.exp2((bits_value(s.held[i * e.threads + s.t]) - s.top[0]) * factor)
        sum_lanes(s.d, 0)
        if s.t % 32 == 0:
            s.pairs[s.t // 32] = s.d[0]

    return phase


def add_up(e: SearchSizes) -> Callable[..., Any]:
    """Reads: `pairs`, `top`. Writes: `d`, of the row, in the first warp, and behind `pairs`; the normaliser.
    Barriers: none. The next one makes the sum visible. The phase is (io, s)."""

    @T.inline
    def phase(io, s):
        if s.t < 32:
            s.d[0] = T.Select(s.t < e.threads // 32, s.pairs[s.t], T.float32(0))
            sum_lanes(s.d, 0)
            if s.t == 0:
                s.pairs[32] = s.d[0]
                T.buffer_store(io.normaliser, s.top[0] * io.scale + T.log(s.d[0]), io.place(s.index, s.row))

    return phase


def write_largest(e: SearchSizes) -> Callable[..., Any]:
    """The row's largest score, by the group of threads that has it; the phase is (s, lanes, bits).

    Reads: `rank`. Writes: `largest`, if that is to be told. Barriers: none. The next one makes it visible.
    """

    @T.inline
    def phase(s, lanes, bits):
        if e.tells_largest:
            if s.t % lanes == 0 and s.rank[0] == 0:
                s.largest[0] = bits

    return phase


def collect(e: SearchSizes, search: Search) -> Callable[..., Any]:
    """Collect keys that reach a bound, which k of `size` do at least; the phase is (io, s, size, factor).

    Reads: `bits`, from `begin_search`.
    Writes: `held`, `maxima`, `bound`, `keys`, `count`; of tiles `largest`; of all words also `top` and `d` of
        the row, and the normaliser.
    Barriers: several; ends with one.
    """
    weigh, total, tell_largest = exponentials(e), add_up(e), write_largest(e)
    threads, lanes = e.threads, e.threads // e.groups
    at, join = search.number, best_of_lanes(lanes)

    @T.inline
    def hold(s, i, j, size):
        if i < size:
            search.finish(s, i, j)
            s.held[i] = s.bits[j]
            s.best[0] = T.max(s.best[0], join_key(s.bits[j], search.name(s, i)))

    @T.inline
    def phase(io, s, size, factor):
        s.best[0] = T.uint64(0)
        for j in T.unroll(e.loads):
            hold(s, j * threads + s.t, j, size)
        for i in T.serial((size - 1) // (threads * e.loads)):
            for j in T.unroll(e.loads):
                if ((i + 1) * e.loads + j) * threads + s.t < size:
                    search.load(io, s, ((i + 1) * e.loads + j) * threads + s.t, j)
            for j in T.unroll(e.loads):
                hold(s, ((i + 1) * e.loads + j) * threads + s.t, j, size)
        join(s)
        if s.t % lanes == 0:
            s.maxima[s.t // lanes] = s.best[0]
        T.cuda.cta_sync()
        # The k-th largest of the maxima: k keys at least reach it. Groups without a key have 0, and share a rank.
        s.rank[0] = 0
        for j in T.serial(e.groups // lanes):
            if s.maxima[j * lanes + s.t % lanes] > s.best[0]:
                s.rank[0] = s.rank[0] + 1
        for b in T.unroll(min(lanes, 32).bit_length() - 1):
            s.rank[0] = s.rank[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.rank[0], 1 << b, 32, 32)
        if s.t % lanes == 0 and s.rank[0] == e.k - 1 and s.best[0] != T.uint64(0):
            s.bound[at] = s.best[0]
        if at == 0:
            tell_largest(s, lanes, key_bits(s.best[0]))
        if e.direct > 0:
            weigh(s, size, factor)
        T.cuda.cta_sync()
        for i in T.serial((size - s.t + (threads - 1)) // threads):
            s.best[0] = join_key(s.held[i * threads + s.t], search.name(s, i * threads + s.t))
            if s.best[0] >= s.bound[at]:
                s.keys[take_places(s.counters[0] + T.uint32(at * COUNT), T.int32(1))] = s.best[0]
        if e.direct > 0:
            total(io, s)
        T.cuda.cta_sync()
        if e.direct > 0:
            s.d[0] = s.pairs[32]

    return phase


def find_tops(e: TileSearchSizes) -> Callable[..., Any]:
    """The best of each thread's tiles, and of each group of threads. The phase is (s, size).

    Reads: `bits`, from `begin_search`; `tops`, which come as 0.
    Writes: `tops`; `bits` of what is no tile as 0; scratch is `peak`.
    Barriers: one, at the end.
    """

    @T.inline
    def phase(s, size):
        s.peak[0] = T.uint32(0)
        for j in T.unroll(e.loads):
            if j * e.threads + s.t >= size:
                s.bits[j] = T.uint32(0)
            s.peak[0] = T.max(s.peak[0], s.bits[j])
        offer(s, s.tops, s.t % e.tile_groups, s.peak[0])
        T.cuda.cta_sync()

    return phase


def bound_tiles(e: TileSearchSizes) -> Callable[..., Any]:
    """The k-th best of the groups' best tiles. The phase is (s).

    Reads: `tops`.
    Writes: `own`; `bound`, of fewer than k groups with a tile 0; scratch is `need`, `slot`.
    Barriers: one, at the end.
    """

    @T.inline
    def tell(s, top):
        s.bound[0] = T.Cast("uint64", top) << T.uint64(32)

    find = find_kth(e.tile_groups, e.threads // 32, e.k, tell)

    @T.inline
    def phase(s):
        find(s, s.tops)
        T.cuda.cta_sync()

    return phase


def collect_bits(e: TileSearchSizes) -> Callable[..., Any]:
    """`collect` of tiles by scores alone, of which threads have all in registers: equal ones are all taken. The phase
    is (io, s, size, factor).

    Reads: `bits`, from `begin_search`; `tops`, which come as 0.
    Writes: `own`, `bound`, `keys`, as far as there is room, `count`; scratch.
    Barriers: three; ends with one.
    """
    tops, bound = find_tops(e), bound_tiles(e)

    @T.inline
    def phase(io, s, size, factor):
        tops(s, size)
        bound(s)
        for j in T.unroll(e.loads):
            if s.bits[j] != T.uint32(0) and s.bits[j] >= key_bits(s.bound[0]):
                s.slot[0] = take_places(s.counters[0], T.int32(1))
                if s.slot[0] < e.most_tiles:
                    s.keys[s.slot[0]] = join_key(s.bits[j], j * e.threads + s.t)
        T.cuda.cta_sync()

    return phase


def rank(e: SearchSizes, search: Search, keys: str = "keys") -> Callable[..., Any]:
    """Place the k best of the keys that were collected; the phase is (io, s, factor).

    Reads: `count`, and `keys` or another buffer.
    Writes: what the search's `place` does.
    Barriers: one, at the end.
    """
    threads = e.threads
    # Threads that compare a key with the others.
    rankers = 16
    at = search.number

    @T.inline
    def phase(io, s, factor):
        collected = T.meta_var(getattr(s, keys))
        # All threads come as often: those that compare a key add up what they count.
        for i in T.serial((s.count[at] * rankers + (threads - 1)) // threads):
            s.place[0] = (i * threads + s.t) // rankers
            s.best[0] = collected[T.min(s.place[0], s.count[at] - 1)]
            s.rank[0] = 0
            for j in T.serial((s.count[at] - s.t % rankers + (rankers - 1)) // rankers):
                if collected[j * rankers + s.t % rankers] > s.best[0]:
                    s.rank[0] = s.rank[0] + 1
            for b in T.unroll(rankers.bit_length() - 1):
                s.rank[0] = s.rank[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.rank[0], 1 << b, 32, 32)
            if s.t % rankers == 0 and s.place[0] < s.count[at] and s.rank[0] < e.k:
                search.place(io, s, s.rank[0], s.best[0], factor)
        T.cuda.cta_sync()

    return phase


def rank_few(e: TileSearchSizes, search: Search) -> Callable[..., Any]:
    """`rank` of the words that reach the tiles' bound, in one step if they are few. The phase is (io, s, factor).

    Reads: `count`, `reached`, with zeros behind it.
    Writes: what the search's `place` does.
    Barriers: one, at the end, if they are many.
    """
    at_once, many = rank_at_once(e.at_once, e.rankers), rank(e, search, "reached")

    @T.inline
    def phase(io, s, factor):
        if s.count[1] <= e.at_once:
            at_once(s, s.t, s.reached)
            if s.t % e.rankers == 0 and s.need[0] < s.count[1] and s.slot[0] < e.k:
                search.place(io, s, s.slot[0], s.pivot[0], factor)
        else:
            many(io, s, factor)

    return phase


def choose_tiles(e: TileSearchSizes, search: Search) -> Callable[..., Any]:
    """The k best of `size` tiles, one after another: for `collect_bits`, where equal ones are more than `keys` has room
    for. The phase is (io, s, size, factor).

    Reads: `tops` of the row.
    Writes: what the search's `place` does; `bits`, `maxima`; scratch is `best`, `pivot`.
    Barriers: two a tile.
    """
    load, join, warps = begin_search(e, search), best_of_lanes(32), e.threads // 32

    @T.inline
    def phase(io, s, size, factor):
        load(io, s)
        s.pivot[0] = T.max_value("uint64")
        for i in T.serial(T.min(size, e.k)):
            s.best[0] = T.uint64(0)
            for j in T.unroll(e.loads):
                if j * e.threads + s.t < size and join_key(s.bits[j], j * e.threads + s.t) < s.pivot[0]:
                    s.best[0] = T.max(s.best[0], join_key(s.bits[j], j * e.threads + s.t))
            join(s)
            if s.t % 32 == 0:
                s.maxima[s.t // 32] = s.best[0]
            T.cuda.cta_sync()
            s.best[0] = s.maxima[s.t % warps]
            join(s)
            s.pivot[0] = s.best[0]
            if s.t == 0:
                search.place(io, s, i, s.pivot[0], factor)
            T.cuda.cta_sync()

    return phase


def rank_tiles(e: TileSearchSizes, search: Search) -> Callable[..., Any]:
    """The k best tiles, where more tiles or words reach the bound than are looked through. The phase is (io, s, size,
    factor).

    Reads: `count`; `keys`; or `tops` of the row.
    Writes: what the search's `place` does.
    Barriers: one at least, at the end.
    """
    put, choose = rank(e, search), choose_tiles(e, search)

    @T.inline
    def of_all(io, s, size, factor):
        put(io, s, factor)

    @T.inline
    def of_few(io, s, size, factor):
        if s.count[0] > e.most_tiles:
            choose(io, s, size, factor)
        else:
            put(io, s, factor)

    return of_few if e.by_bits else of_all


def select(e: SearchSizes, search: Search) -> Callable[..., Any]:
    """Place the k best of `size` keys: `collect`, then `rank`. The phase is (io, s, size, factor)."""
    find, put = collect(e, search), rank(e, search)

    @T.inline
    def phase(io, s, size, factor):
        find(io, s, size, factor)
        put(io, s, factor)

    return phase


def near_position(e: TileSearchSizes, s: Any, i: Any) -> Any:
    """The i-th word of the tiles that were collected."""
    return T.Cast("int32", key_index(s.keys[i // e.tile_n])) * e.tile_n + i % e.tile_n


def begin_near(e: TileSearchSizes) -> Callable[..., Any]:
    """Load the words of the tiles that were collected, those that a thread looks at first; the phase is (io, s).

    Reads: `keys` and `count`, of tiles.
    Writes: `near`, how many words these are, none where there are too many tiles; `bits`.
    Barriers: none.
    """

    @T.inline
    def phase(io, s):
        s.near[0] = T.Select(s.count[0] > e.most_tiles, 0, s.count[0] * e.tile_n)
        for j in T.unroll(e.near_loads):
            if j * e.threads + s.t < s.near[0]:
                load_uint(s.bits[j], score_at(io, s, near_position(e, s, j * e.threads + s.t)))

    return phase


def collect_near(e: TileSearchSizes) -> Callable[..., Any]:
    """Collect the words that reach the tiles' bound; the phase is (io, s).

    Reads: `near` and `bits`, from `begin_near`; `keys` and `bound`, of tiles.
    Writes: `reached`, as far as there is room, and `count`.
    Barriers: one, at the end.
    """

    @T.inline
    def keep(s, i, j):
        s.bits[j] = order_bits(T.reinterpret("float32", s.bits[j]))
        if near_position(e, s, i) < s.words[0] and s.bits[j] >= key_bits(s.bound[0]):
            s.place[0] = take_places(s.counters[0] + T.uint32(COUNT), T.int32(1))
            if s.place[0] < e.most_near:
                s.reached[s.place[0]] = join_key(s.bits[j], near_position(e, s, i))

    @T.inline
    def phase(io, s):
        for j in T.unroll(e.near_loads):
            if j * e.threads + s.t < s.near[0]:
                keep(s, j * e.threads + s.t, j)
        for i in T.serial(T.max((s.near[0] - s.t + (e.threads - 1)) // e.threads - e.near_loads, 0)):
            at: T.int32 = (i + e.near_loads) * e.threads + s.t
            load_uint(s.bits[0], score_at(io, s, near_position(e, s, at)))
            keep(s, at, 0)
        T.cuda.cta_sync()

    return phase


def search_tiles(e: TileSearchSizes) -> Search:
    """Reads: `tops`. Writes: `chosen`, the tiles with the best words, as many as there are up to k."""

    @T.inline
    def load(io, s, i, j):
        load_uint(s.bits[j], io.workspaces["tops"].ptr_to(io.place(s.index, s.row, i)))

    @T.inline
    def finish(s, i, j):
        pass

    @T.inline
    def place(io, s, rank, key, factor):
        s.chosen[rank] = T.Cast("int32", key_index(key))

    return Search(0, e.list_tiles, load, finish, lambda s, i: i, place)


def search_words(e: SearchSizes) -> Search:
    """Reads: the scores of the tiles in `chosen`, or all; `top` and `d`. Writes: values and indices."""
    find = find_word(e)

    def name(s: State, i: Any) -> Any:
        return i if e.direct else s.chosen[i // e.tile_n] * e.tile_n + i % e.tile_n

    @T.inline
    def load(io, s, i, j):
        load_uint(s.bits[j], score_at(io, s, name(s, i)))

    @T.inline
    def finish(s, i, j):
        s.bits[j] = T.Select(
            name(s, i) < s.words[0], order_bits(T.reinterpret("float32", s.bits[j])), T.uint32(0))

    @T.inline
    def place(io, s, rank, key, factor):
        if key_bits(key) != T.uint32(0):
            find(io, s.index, T.Cast("int32", key_index(key)), s.place)
            T.buffer_store(io.indices, T.Cast("int64", s.place[0]), io.place(s.index, s.row, rank))
            write_value(io, s, io.values, io.place(s.index, s.row, rank), key_value(key), factor)

    return Search(1, e.searched_words, load, finish, name, place)


@T.inline
def write_value(io, s, values, at, score, factor):
    """The probability of a score, or its logarithm."""
    s.value[0] = (score - s.top[0]) * factor
    T.buffer_store(values, T.Select(
        io.log != 0, s.value[0] * T.float32(LN_2) - T.log(s.d[0]), T.exp2(s.value[0]) * (T.float32(1) / s.d[0])), at)


def write_absent(e: SearchSizes) -> Callable[..., Any]:
    """Reads: `words`. Writes: -1 and no probability by the ranks for which a list has no word. Barriers: none."""

    @T.inline
    def phase(io, s):
        for i in T.serial((e.k - s.t + (e.threads - 1)) // e.threads):
            if i * e.threads + s.t >= s.words[0]:
                T.buffer_store(io.indices, T.int64(-1), io.place(s.index, s.row, i * e.threads + s.t))
                T.buffer_store(
                    io.values, T.Select(io.log != 0, T.float32("-inf"), T.float32(0)),
                    io.place(s.index, s.row, i * e.threads + s.t))

    return phase


def write_asked(e: SearchSizes) -> Callable[..., Any]:
    """Reads: `ids`, their scores, `top`, `d`. Writes: `given`, NaN for a word that there is not. Barriers: none."""

    @T.inline
    def phase(io, s, factor):
        for i in T.serial((e.ids - s.t + (e.threads - 1)) // e.threads):
            load_long(s.wanted[0], io.ids.ptr_to([s.row, i * e.threads + s.t]))
            if s.wanted[0] >= T.int64(0) and s.wanted[0] < T.Cast("int64", s.words[0]):
                load_float(s.pair[0], score_at(io, s, T.Cast("int32", s.wanted[0])))
                write_value(io, s, io.given, [s.row, i * e.threads + s.t], s.pair[0], factor)
            else:
                io.given[s.row, i * e.threads + s.t] = T.float32("nan")

    return phase


def best(e: TileSearchSizes) -> Callable[..., Any]:
    """The kernel, called with (io)."""
    count, tiles_search, words_search = count_words(e), search_tiles(e), search_words(e)
    do = SimpleNamespace(
        clear=clear(e),
        load_pairs=load_pairs(e),
        begin_tiles=begin_search(e, tiles_search),
        collect_tiles=collect_bits(e) if e.by_bits else collect(e, tiles_search),
        begin_near=begin_near(e),
        join_lanes=join_lanes(e),
        collect_near=collect_near(e),
        join_pairs=join_pairs(e),
        rank_near=rank_few(e, words_search) if e.at_once else rank(e, words_search, "reached"),
        rank_tiles=rank_tiles(e, tiles_search),
        begin_words=begin_search(e, words_search),
        select_words=select(e, words_search),
        write_absent=write_absent(e),
        write_asked=write_asked(e),
    )

    @T.inline
    def kernel(io):
        with device_region():
            if e.by_bits:
                T.attr({"tirx.launch_bounds_min_blocks_per_sm": e.search_resident})
            flat = T.cta_id([io.rows])
            t = T.thread_id([e.threads])
            s = T.meta_var(State.of_row(e, io, flat, t))
            factor: T.float32 = io.scale * T.float32(LOG2_E)
            do.clear(s)
            if e.overlap > 0:
                wait_then_start_consumer()
            if e.dynamic > 0:
                if t == 0:
                    T.buffer_store(io.workspaces["tickets"], 0, io.place(s.index, s.row))
            do.begin_tiles(io, s)
            count(io, s.index, s.words)
            do.load_pairs(io, s, factor)
            tiles: T.int32 = (s.words[0] + (e.tile_n - 1)) // e.tile_n
            do.collect_tiles(io, s, tiles, factor)
            do.begin_near(io, s)
            do.join_lanes(s, factor)
            do.collect_near(io, s)
            do.join_pairs(io, s, factor)
            if s.count[0] <= e.most_tiles and s.count[1] <= e.most_near:
                do.rank_near(io, s, factor)
            else:
                do.rank_tiles(io, s, tiles, factor)
                if t == 0:
                    s.count[1] = 0
                do.begin_words(io, s)
                do.select_words(io, s, T.min(tiles, e.k) * e.tile_n, factor)
            if e.m > 0:
                do.write_absent(io, s)
            if e.ids > 0:
                do.write_asked(io, s, factor)

    return kernel


def best_of_all(e: SearchSizes) -> Callable[..., Any]:
    """The kernel that searches all scores at once, called with (io)."""
    count, search = count_words(e), search_words(e)
    do = SimpleNamespace(
        begin_words=begin_search(e, search),
        select_words=select(e, search),
        write_absent=write_absent(e),
        write_asked=write_asked(e),
    )

    @T.inline
    def kernel(io):
        with device_region():
            beam = T.meta_var(io.beam)
            flat = T.cta_id([io.rows])
            t = T.thread_id([e.threads])
            s = T.meta_var(State.alloc(e, e.pool_bytes, index=flat // beam, row=flat % beam, t=t))
            factor: T.float32 = io.scale * T.float32(LOG2_E)
            s.counters[0] = counter_address(s.count.ptr_to([0]))
            if t < 2:
                s.count[t] = 0
                s.bound[t] = T.uint64(0)
            # The first barrier of the search makes these visible.
            if e.overlap > 0:
                wait_then_start_consumer()
            do.begin_words(io, s)
            count(io, s.index, s.words)
            do.select_words(io, s, s.words[0], factor)
            do.write_absent(io, s)
            if e.ids > 0:
                do.write_asked(io, s, factor)

    return kernel
# fmt: on
