"""The search of the kernel that finds the best: a bound that k keys reach, the keys that reach it, and their order.

The bound is the k-th best of the maxima of groups of threads: k keys reach it at least. Few more do, so that they are
ranked by counting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.ranking import rank_at_once
from ...device.selection import FULL_WARP, join_key, key_bits, take_places
from ...rows.best import find_kth, offer
from .state import COUNT
from .sums import add_up, best_of_lanes, exponentials


@dataclass(frozen=True)
class Search:
    """What `select` looks through."""

    # 0 of tiles, 1 of tokens: of their counters.
    number: int
    # How many there may be: memory is read so far before their number is known.
    most: int
    # (io, s, i, j) loads the i-th into `bits[j]`.
    load: Callable[..., Any]
    # (s, i, j) makes it the bits that order like it, 0 for none.
    finish: Callable[..., Any]
    # (s, i) is the number by which equals are put in order.
    name: Callable[..., Any]
    # (io, s, rank, key, factor) does with one of the k best what is to be done.
    place: Callable[..., Any]


# fmt: off
@phase
def begin_search(e, search, /, io, s):
    """Load what each thread looks at first. Writes: `bits`. Barriers: none."""
    for j in T.unroll(e.loads):
        s.bits[j] = T.uint32(0)
        if j * e.threads + s.t < search.most:
            search.load(io, s, j * e.threads + s.t, j)


@phase
def write_largest(e, /, s, lanes, bits):
    """The row's largest score, by the group of threads that has it.

    Reads: `rank`. Writes: `largest`, if that is to be told. Barriers: none. The next one makes it visible.
    """
    if e.tells_largest:
        if s.t % lanes == 0 and s.rank[0] == 0:
            s.largest[0] = bits


@phase
def hold(search, /, s, i, j, size):
    """Hold the j-th score in hand as the i-th of the thread, and the best key of these."""
    if i < size:
        search.finish(s, i, j)
        s.held[i] = s.bits[j]
        s.best[0] = T.max(s.best[0], join_key(s.bits[j], search.name(s, i)))


@phase
def collect(e, search, /, io, s, size, factor):
    """Collect keys that reach a bound, which k of `size` do at least.

    Reads: `bits`, from `begin_search`.
    Writes: `held`, `maxima`, `bound`, `keys`, `count`; of tiles `largest`; of all tokens also `top` and `d` of
        the row, and the normaliser.
    Barriers: several; ends with one.
    """
    threads, lanes = T.meta_var(e.threads), T.meta_var(e.threads // e.groups)
    at, join = T.meta_var(search.number), T.meta_var(best_of_lanes(lanes))
    s.best[0] = T.uint64(0)
    for j in T.unroll(e.loads):
        hold(search)(s, j * threads + s.t, j, size)
    for i in T.serial((size - 1) // (threads * e.loads)):
        for j in T.unroll(e.loads):
            if ((i + 1) * e.loads + j) * threads + s.t < size:
                search.load(io, s, ((i + 1) * e.loads + j) * threads + s.t, j)
        for j in T.unroll(e.loads):
            hold(search)(s, ((i + 1) * e.loads + j) * threads + s.t, j, size)
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
        write_largest(e)(s, lanes, key_bits(s.best[0]))
    if e.direct > 0:
        exponentials(e)(s, size, factor)
    T.cuda.cta_sync()
    for i in T.serial((size - s.t + (threads - 1)) // threads):
        s.best[0] = join_key(s.held[i * threads + s.t], search.name(s, i * threads + s.t))
        if s.best[0] >= s.bound[at]:
            s.keys[take_places(s.counters[0] + T.uint32(at * COUNT), T.int32(1))] = s.best[0]
    if e.direct > 0:
        add_up(e)(io, s)
    T.cuda.cta_sync()
    if e.direct > 0:
        s.d[0] = s.pairs[32]


@phase
def find_tops(e, /, s, size):
    """The best of each thread's tiles, and of each group of threads.

    Reads: `bits`, from `begin_search`; `tops`, which come as 0.
    Writes: `tops`; `bits` of what is no tile as 0; scratch is `peak`.
    Barriers: one, at the end.
    """
    s.peak[0] = T.uint32(0)
    for j in T.unroll(e.loads):
        if j * e.threads + s.t >= size:
            s.bits[j] = T.uint32(0)
        s.peak[0] = T.max(s.peak[0], s.bits[j])
    offer(s, s.tops, s.t % e.tile_groups, s.peak[0])
    T.cuda.cta_sync()


@T.inline
def tell(s, top):
    """The bound is the lowest key of a score."""
    s.bound[0] = T.Cast("uint64", top) << T.uint64(32)


@phase
def bound_tiles(e, /, s):
    """The k-th best of the groups' best tiles.

    Reads: `tops`.
    Writes: `own`; `bound`, of fewer than k groups with a tile 0; scratch is `need`, `slot`.
    Barriers: one, at the end.
    """
    find_kth(e.tile_groups, e.threads // 32, e.k, tell)(s, s.tops)
    T.cuda.cta_sync()


@phase
def collect_bits(e, /, io, s, size, factor):
    """`collect` of tiles by scores alone, of which threads have all in registers: equal ones are all taken.

    Reads: `bits`, from `begin_search`; `tops`, which come as 0.
    Writes: `own`, `bound`, `keys`, as far as there is room, `count`; scratch.
    Barriers: three; ends with one.
    """
    find_tops(e)(s, size)
    bound_tiles(e)(s)
    for j in T.unroll(e.loads):
        if s.bits[j] != T.uint32(0) and s.bits[j] >= key_bits(s.bound[0]):
            s.slot[0] = take_places(s.counters[0], T.int32(1))
            if s.slot[0] < e.most_tiles:
                s.keys[s.slot[0]] = join_key(s.bits[j], j * e.threads + s.t)
    T.cuda.cta_sync()


@phase
def rank(e, search, keys, /, io, s, factor):
    """Place the k best of the keys that were collected.

    Reads: `count`, and `keys` or another buffer. Writes: what the search's `place` does. Barriers: one, at the end.
    """
    # Threads that compare a key with the others.
    rankers, at = T.meta_var(16), T.meta_var(search.number)
    collected = T.meta_var(getattr(s, keys))
    # All threads come as often: those that compare a key add up what they count.
    for i in T.serial((s.count[at] * rankers + (e.threads - 1)) // e.threads):
        s.place[0] = (i * e.threads + s.t) // rankers
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


@phase
def rank_few(e, search, /, io, s, factor):
    """`rank` of the tokens that reach the tiles' bound, in one step if they are few.

    Reads: `count`, `reached`, with zeros after it.
    Writes: what the search's `place` does.
    Barriers: one, at the end, if they are many.
    """
    if s.count[1] <= e.at_once:
        rank_at_once(e.at_once, e.rankers)(s, s.t, s.reached)
        if s.t % e.rankers == 0 and s.need[0] < s.count[1] and s.slot[0] < e.k:
            search.place(io, s, s.slot[0], s.pivot[0], factor)
    else:
        rank(e, search, "reached")(io, s, factor)


@phase
def choose_tiles(e, search, /, io, s, size, factor):
    """The k best of `size` tiles, one after another: for `collect_bits`, where equal ones are more than `keys` has room
    for.

    Reads: `tops` of the row.
    Writes: what the search's `place` does; `bits`, `maxima`; scratch is `best`, `pivot`.
    Barriers: two a tile.
    """
    join = T.meta_var(best_of_lanes(32))
    begin_search(e, search)(io, s)
    s.pivot[0] = T.max_value("uint64")
    for i in T.serial(T.min(size, e.k)):
        s.best[0] = T.uint64(0)
        for j in T.unroll(e.loads):
            if j * e.threads + s.t < size and join_key(s.bits[j], j * e.threads + s.t) <= s.pivot[0]:
                s.best[0] = T.max(s.best[0], join_key(s.bits[j], j * e.threads + s.t))
        join(s)
        if s.t % 32 == 0:
            s.maxima[s.t // 32] = s.best[0]
        T.cuda.cta_sync()
        s.best[0] = s.maxima[s.t % (e.threads // 32)]
        join(s)
        # The next key is a lower one; the first may be the largest there is: of tile 0, with NaN.
        s.pivot[0] = s.best[0] - T.uint64(1)
        if s.t == 0:
            search.place(io, s, i, s.best[0], factor)
        T.cuda.cta_sync()


@phase
def rank_tiles(e, search, /, io, s, size, factor):
    """The k best tiles, where more tiles or tokens reach the bound than are looked through.

    Reads: `count`; `keys`; or `tops` of the row.
    Writes: what the search's `place` does.
    Barriers: one at least, at the end.
    """
    put = T.meta_var(rank(e, search, "keys"))
    if e.by_bits:
        if s.count[0] > e.most_tiles:
            choose_tiles(e, search)(io, s, size, factor)
        else:
            put(io, s, factor)
    else:
        put(io, s, factor)


@phase
def select(e, search, /, io, s, size, factor):
    """Place the k best of `size` keys: `collect`, then `rank`."""
    collect(e, search)(io, s, size, factor)
    rank(e, search, "keys")(io, s, factor)
# fmt: on
