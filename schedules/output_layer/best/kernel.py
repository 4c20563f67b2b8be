"""The kernel that finds the best tokens: a thread block a row, from the best tiles or from all scores.

clear           shared memory
begin_search    of tiles: what each thread looks at first is loaded
load_pairs      maxima and sums of exponentials of the first kernel's thread blocks
collect         the tiles that reach a bound, k at least; or, if threads have them all in registers,
collect_bits    the same, sooner: `find_tops`, `bound_tiles`, and the tiles that reach the bound
begin_near      the tokens of these tiles
join_lanes      maxima and sums meanwhile, of a warp
collect_near    the tokens that reach the same bound
join_pairs      the row's maximum and sum of exponentials
rank            these tokens in order, the k best to their places; `rank_few` in one step, if they are few
write_absent    what stands where there are no tokens left
write_asked     the probabilities of the tokens in `ids`

The bound is no more than the best token of the k-th best tile, so k tokens at least reach it, and no search among
tokens is needed. Where too many tiles or tokens reach it, as with equal scores,

rank_tiles      the k best tiles
select          the k best of their tokens

With `direct`, a list so short that its scores are all looked at, no tiles are searched and no pairs joined:

begin_search    of all tokens
select          the k best; between its barriers `exponentials` has the row's sum of exponentials
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.arithmetic import LN_2, LOG2_E
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.selection import counter_address, join_key, key_bits, key_index, key_value, order_bits, take_places
from ..lists import count_words, find_word
from ..scales import own_arguments
from ..words import at_row
from . import search, sums
from .search import Search, begin_search
from .sizes import SearchSizes, TileSearchSizes
from .state import COUNT, State, score_at

load_uint = T.ptx.ld.global_.u32
load_float = T.ptx.ld.global_.f32
load_long = T.ptx.ld.global_.s64


# fmt: off
@phase
def clear(e, /, s):
    """Set shared memory to how it is before anything was found.

    Writes: `chosen`, `count`, `bound`; `tops`, and the front of `reached`, where they come as 0; and `counters`.
    Barriers: one, at the end.
    """
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


def near_position(e: TileSearchSizes, s: Any, i: Any) -> Any:
    """The i-th token of the tiles that were collected."""
    return T.Cast("int32", key_index(s.keys[i // e.tile_n])) * e.tile_n + i % e.tile_n


@phase
def begin_near(e, /, io, s):
    """Load the tokens of the tiles that were collected, those that a thread looks at first.

    Reads: `keys` and `count`, of tiles.
    Writes: `near`, how many tokens these are, none where there are too many tiles; `bits`.
    Barriers: none.
    """
    s.near[0] = T.Select(s.count[0] > e.most_tiles, 0, s.count[0] * e.tile_n)
    for j in T.unroll(e.near_loads):
        if j * e.threads + s.t < s.near[0]:
            load_uint(s.bits[j], score_at(io, s, near_position(e, s, j * e.threads + s.t)))


@phase
def keep(e, /, s, i, j):
    """Append the j-th score in hand to `reached` if it reaches the bound."""
    s.bits[j] = order_bits(T.reinterpret("float32", s.bits[j]))
    if near_position(e, s, i) < s.words[0] and s.bits[j] >= key_bits(s.bound[0]):
        s.place[0] = take_places(s.counters[0] + T.uint32(COUNT), T.int32(1))
        if s.place[0] < e.most_near:
            s.reached[s.place[0]] = join_key(s.bits[j], near_position(e, s, i))


@phase
def collect_near(e, /, io, s):
    """Collect the tokens that reach the tiles' bound.

    Reads: `near` and `bits`, from `begin_near`; `keys` and `bound`, of tiles.
    Writes: `reached`, as far as there is room, and `count`.
    Barriers: one, at the end.
    """
    for j in T.unroll(e.near_loads):
        if j * e.threads + s.t < s.near[0]:
            keep(e)(s, j * e.threads + s.t, j)
    for i in T.serial(T.max((s.near[0] - s.t + (e.threads - 1)) // e.threads - e.near_loads, 0)):
        at: T.int32 = (i + e.near_loads) * e.threads + s.t
        load_uint(s.bits[0], score_at(io, s, near_position(e, s, at)))
        keep(e)(s, at, 0)
    T.cuda.cta_sync()


def search_tiles(e: TileSearchSizes) -> Search:
    """Reads: `tops`. Writes: `chosen`, the tiles with the best tokens, as many as there are up to k."""

    @T.inline
    def load(io, s, i, j):
        load_uint(s.bits[j], io.tops.ptr_to(at_row(io, s.index, s.row, i)))

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
            T.buffer_store(io.indices, T.Cast("int64", s.place[0]), at_row(io, s.index, s.row, rank))
            write_value(io, s, io.values, at_row(io, s.index, s.row, rank), key_value(key), factor)

    return Search(1, e.searched_words, load, finish, name, place)


@T.inline
def write_value(io, s, values, at, score, factor):
    """The probability of a score, or its logarithm."""
    s.value[0] = (score - s.top[0]) * factor
    T.buffer_store(values, T.Select(
        io.log != 0, s.value[0] * T.float32(LN_2) - T.log(s.d[0]), T.exp2(s.value[0]) * (T.float32(1) / s.d[0])), at)


@phase
def write_absent(e, /, io, s):
    """Reads: `words`. Writes: -1 and no probability by the ranks for which a list has no token. Barriers: none."""
    for i in T.serial((e.k - s.t + (e.threads - 1)) // e.threads):
        if i * e.threads + s.t >= s.words[0]:
            T.buffer_store(io.indices, T.int64(-1), at_row(io, s.index, s.row, i * e.threads + s.t))
            T.buffer_store(
                io.values, T.Select(io.log != 0, T.float32("-inf"), T.float32(0)),
                at_row(io, s.index, s.row, i * e.threads + s.t))


@phase
def write_asked(e, /, io, s, factor):
    """Reads: `ids`, their scores, `top`, `d`. Writes: `given`, NaN for a token that there is not. Barriers: none."""
    for i in T.serial((e.ids - s.t + (e.threads - 1)) // e.threads):
        load_long(s.wanted[0], io.ids.ptr_to([s.row, i * e.threads + s.t]))
        if s.wanted[0] >= T.int64(0) and s.wanted[0] < T.Cast("int64", s.words[0]):
            load_float(s.pair[0], score_at(io, s, T.Cast("int32", s.wanted[0])))
            write_value(io, s, io.given, [s.row, i * e.threads + s.t], s.pair[0], factor)
        else:
            io.given[s.row, i * e.threads + s.t] = T.float32("nan")


@phase
def best(e, /, io):
    """The kernel."""
    tiles_search, words_search = T.meta_var(search_tiles(e)), T.meta_var(search_words(e))
    collect_tiles = T.meta_var(search.collect_bits(e) if e.by_bits else search.collect(e, tiles_search))
    rank_all = T.meta_var(search.rank(e, words_search, "reached"))
    rank_near = T.meta_var(search.rank_few(e, words_search) if e.at_once > 0 else rank_all)
    with device_region():
        if e.by_bits:
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": e.search_resident})
        flat = T.cta_id([io.rows])
        t = T.thread_id([e.threads])
        s = T.meta_var(State.of_row(e, io, flat, t))
        factor: T.float32 = io.scale * T.float32(LOG2_E)
        clear(e)(s)
        if e.overlap > 0:
            wait_then_start_consumer()
        of_row = T.meta_var(own_arguments(io, s.row))
        if of_row is not io:
            factor = of_row.scale * T.float32(LOG2_E)
        if e.dynamic > 0:
            if t == 0:
                T.buffer_store(io.tickets, 0, at_row(io, s.index, s.row))
        begin_search(e, tiles_search)(io, s)
        count_words(e)(io, s.index, s.words)
        sums.load_pairs(e)(io, s, factor)
        tiles: T.int32 = (s.words[0] + (e.tile_n - 1)) // e.tile_n
        collect_tiles(io, s, tiles, factor)
        begin_near(e)(io, s)
        sums.join_lanes(e)(s, factor)
        collect_near(e)(io, s)
        sums.join_pairs(e)(of_row, s, factor)
        if s.count[0] <= e.most_tiles and s.count[1] <= e.most_near:
            rank_near(io, s, factor)
        else:
            search.rank_tiles(e, tiles_search)(io, s, tiles, factor)
            if t == 0:
                s.count[1] = 0
            begin_search(e, words_search)(io, s)
            search.select(e, words_search)(of_row, s, T.min(tiles, e.k) * e.tile_n, factor)
        if e.m > 0:
            write_absent(e)(io, s)
        if e.ids > 0:
            write_asked(e)(io, s, factor)


@phase
def best_of_all(e, /, io):
    """The kernel that searches all scores at once."""
    words_search = T.meta_var(search_words(e))
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
        of_row = T.meta_var(own_arguments(io, s.row))
        if of_row is not io:
            factor = of_row.scale * T.float32(LOG2_E)
        begin_search(e, words_search)(io, s)
        count_words(e)(io, s.index, s.words)
        search.select(e, words_search)(of_row, s, s.words[0], factor)
        write_absent(e)(io, s)
        if e.ids > 0:
            write_asked(e)(io, s, factor)
# fmt: on
