"""Hash and look-up of `fused_step`, by warps each on its own.

take_unit         some bands of a row, and the columns that they compare
find_buckets_of   their places, codes and buckets
look_up           the words of these, counted
keep_winners      those with hits enough, on the thread block's list while there is room
take_waiting      the others, when the list has been multiplied

`rows` has some of their parts, too: list_buckets and load_word (the buckets of all lanes as one list, and its words),
give_places and list_word (of words that were won).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.overlap import CACHE_LINE
from ...device.selection import FULL_WARP, below, scan_lanes
from ...lsh.buckets import find_buckets
from ...lsh.hashing import code_of_places, find_places, load_first_columns, stage_row
from .space import LISTED, WARP, Extents
from .state import alloc_hash_state, wait_late

Phase = Callable[..., Any]
SET_BIT = """
__device__ __forceinline__ unsigned int set_bit(void* p, unsigned int bit) { return atomicOr((unsigned int*)p, bit); }
"""


def from_lane(value: Any, lane: Any) -> tirx.PrimExpr:
    """A value of another lane."""
    return T.tvm_warp_shuffle(T.uint32(FULL_WARP), value, lane, 32, 32)


def ballot(what: Any) -> tirx.PrimExpr:
    return T.cuda.ballot_sync(T.uint32(FULL_WARP), what)


def set_bits(where: Any, bits: Any) -> tirx.PrimExpr:
    """Set them in memory; what was there before."""
    return T.cuda.func_call("set_bit", where, bits, source_code=SET_BIT, return_type="uint32")


def waiting_key(block: Any, word: Any) -> tirx.PrimExpr:
    """What stands at the place of a word that its thread block is yet to multiply: no key of a score, whose upper half
    would have to be the ordered bits of a negative NaN."""
    return T.bitwise_or(T.Cast("uint64", block + 1) << T.uint64(32), T.Cast("uint64", word))


# fmt: off
def load_word(steps: int) -> Phase:
    """The `item`-th word of some buckets as one list of `count`; the phase is (s, words, j, count), `2^steps` lanes
    having a bucket each.

    Reads: `upto`, `offset`, `item`, words. Writes: `word[j]`, -1 for none; as scratch `which`, `other`.
    Barriers: of the warp.
    """

    @T.inline
    def phase(s, words, j, count):
        s.which = 0
        for b in T.unroll(steps):
            half = T.meta_var(1 << (steps - 1 - b))
            s.other[0] = from_lane(s.upto[0], s.which + (half - 1))
            s.which = s.which + T.Select(s.item >= s.other[0], half, 0)
        s.other[0] = from_lane(s.offset, s.which)
        s.word[j] = -1
        if s.item < count:
            T.ptx.ld.global_.s32(s.word[j], words.ptr_to([s.other[0] + s.item]))

    return phase


def list_buckets(e: Extents) -> Phase:
    """A lane's bucket as a part of one list of all lanes' words; the phase is (s, io, lane).

    Reads: `band`, `code`, tables. Writes: `upto`, `offset`, `total`. Barriers: of the warp.
    """
    find = find_buckets(e)

    @T.inline
    def phase(s, io, lane):
        find(s, io, 1)
        s.upto[0] = s.last[0] - s.first[0]
        scan_lanes(lane, s.upto, s.other)
        s.offset = s.last[0] - s.upto[0]
        s.total = from_lane(s.upto[0], WARP - 1)

    return phase


def give_places(e: Extents) -> Phase:
    """Places on the thread block's list, and among the keys, for the `total` words that a warp won together; the phase
    is (s, io, b, list), `b` being the thread block's state.

    A thread block has few places of its own; others are given out to all.

    Reads: `total`. Writes: `slot_at`, `place_at`, `beyond`; the list's counters, `listed`. Barriers: of the warp.
    """

    @T.inline
    def phase(s, io, b, list):
        s.slot_at = 0
        s.place_at = 0
        if b.lane == 0:
            s.slot_at = T.cuda.atomic_add(b.listed.ptr_to([0]), s.total)
            T.evaluate(T.cuda.atomic_add(io.found.ptr_to([list, 1]), s.total))
        s.slot_at = from_lane(s.slot_at, 0)
        s.beyond = T.max(s.slot_at, e.own_slots)
        if s.slot_at + s.total > s.beyond:
            if b.lane == 0:
                s.place_at = T.cuda.atomic_add(io.found.ptr_to([list, 0]), s.slot_at + s.total - s.beyond)
            s.place_at = from_lane(s.place_at, 0)

    return phase


def list_word(e: Extents, listed: Phase | None = None) -> Phase:
    """A word that was won, at its `rank` on the thread block's list; the phase is (s, io, b, list, rank, word).

    What the list has no room for stands for now at its place among the keys (`waiting_key`). `listed(s, io)` is done
    for what it has room for.

    Reads: what `give_places` wrote. Writes: `won`, `places`, `owners`, or keys. Barriers: none.
    """

    @T.inline
    def phase(s, io, b, list, rank, word):
        if rank < LISTED:
            b.won[rank] = word
            b.owners[rank] = list - b.first_list
            b.places[rank] = T.Select(
                rank < e.own_slots, b.block * e.own_slots + rank, e.slots + s.place_at + rank - s.beyond)
            if listed is not None:
                listed(s, io)
        else:
            io.others[list * e.beam, e.slots + s.place_at + rank - s.beyond] = waiting_key(b.block, word)

    return phase


def take_unit(e: Extents) -> Phase:
    """The `at`-th unit of the group's, if there is one: some bands of a row; the phase is (s, io, pieces), `pieces` of
    a row.

    Warps of a thread block have rows of their own, so that no block has all words of one.

    Reads: permutations. Writes: where the unit is, `columns`. Barriers: none.
    """
    load = load_first_columns(e.hashing)

    @T.inline
    def phase(s, io, pieces):
        columns = T.decl_buffer((io.bands * e.units * e.k,), "int16", data=io.permutations.data)
        s.member_row = s.at // pieces
        s.list = s.first_list + s.member_row // e.beam
        s.from_band = s.at % pieces * e.unit_bands
        s.many = T.Select(s.at < s.rows * pieces, T.min(io.bands - s.from_band, e.unit_bands), 0)
        load(s, columns, s.from_band * e.units, s.many * e.units, s.lane)

    return phase


def find_buckets_of(e: Extents) -> Phase:
    """Where the words of `many` bands from `from_band` on are, a lane a band; the phase is (s, io).

    Reads: `columns`, the row, tables. Writes: `upto`, `offset`, `total`. Barriers: of the warp.
    """
    h = e.hashing
    stage, find_all, join = stage_row(h), find_places(h), list_buckets(e)

    @T.inline
    def phase(s, io):
        columns = T.decl_buffer((io.bands * e.units * e.k,), "int16", data=io.permutations.data)
        rows = T.decl_buffer((io.lists * e.beam * e.hidden,), e.dtype, data=io.hidden.data)
        stage(s, rows, (s.first_row + s.member_row) * e.hidden, s.lane)
        T.cuda.warp_sync()
        find_all(s, columns, s.from_band * e.units, s.many * e.units, s.lane)
        T.cuda.warp_sync()
        s.band[0] = T.Select(s.lane < s.many, s.from_band + s.lane, -1)
        s.code[0] = 0
        if s.lane < s.many:
            s.code[0] = code_of_places(h, s, s.lane)
        join(s, io, s.lane)

    return phase


def prefetch_winners(e: Extents) -> Phase:
    """Bring the embeddings of the `j`-th words that were won into the L2 cache; the phase is (s, io, j).

    Reads: `winners`, `word`. Barriers: of the warp.
    """
    elements = CACHE_LINE // e.itemsize

    @T.inline
    def phase(s, io, j):
        s.left = s.winners[j]
        while s.left != T.uint32(0):
            s.which = T.cuda.ffs_u32(s.left) - 1
            s.lone_word = from_lane(s.word[j], s.which)
            s.left = s.left & (s.left - T.uint32(1))
            for i in T.serial((ceildiv(e.hidden, elements) - s.lane + (WARP - 1)) // WARP):
                T.ptx.prefetch.global_.L2(io.embedding.ptr_to([s.lone_word, (i * WARP + s.lane) * elements]))

    return phase


def keep_winners(e: Extents) -> Phase:
    """Words whose counts have just reached the threshold; the phase is (s, io).

    Reads: `winners`, `word`. Writes: the bitmap, the list's counters; `won`, `places`, `owners` and `listed` of the
    thread block; `winners`, without those that another row of the list won before. Barriers: of the warp.
    """
    fetch, give, keep = prefetch_winners(e), give_places(e), list_word(e)

    @T.inline
    def phase(s, io):
        b = T.meta_var(s.block_state)
        for j in T.unroll(e.loads):
            s.old[j] = T.uint32(0xFFFFFFFF)
            if (s.winners[j] >> T.Cast("uint32", s.lane)) & T.uint32(1) != T.uint32(0):
                s.old[j] = set_bits(
                    io.bitmap.ptr_to([s.list, s.word[j] >> 5]), T.uint32(1) << T.Cast("uint32", s.word[j] & 31))
        for j in T.unroll(e.loads):
            fetch(s, io, j)
        s.total = 0
        for j in T.unroll(e.loads):
            s.winners[j] = ballot((s.old[j] >> T.Cast("uint32", s.word[j] & 31)) & T.uint32(1) == T.uint32(0))
            s.rank[j] = s.total + below(s.lane, s.winners[j])
            s.total = s.total + T.Cast("int32", T.popcount(s.winners[j]))
        if s.total > 0:
            give(s, io, b, s.list)
            for j in T.unroll(e.loads):
                s.rank[j] = s.slot_at + s.rank[j]
                if (s.winners[j] >> T.Cast("uint32", s.lane)) & T.uint32(1) != T.uint32(0):
                    keep(s, io, b, s.list, s.rank[j], s.word[j])

    return phase


def take_waiting(e: Extents) -> Phase:
    """As many words as the list has room for, of those that had to wait; the phase is (s, io), for all threads.

    Reads: keys beyond. Writes: `won`, `places`, `owners`, `listed`. Barriers: of the thread block.
    """

    @T.inline
    def phase(s, io):
        T.cuda.cta_sync()
        if s.t == 0:
            s.listed[0] = 0
        T.cuda.cta_sync()
        for owner in T.serial(s.rows // e.beam):
            for i in T.serial((io.found[s.first_list + owner, 0] - s.t + (e.threads - 1)) // e.threads):
                place: T.int32 = e.slots + i * e.threads + s.t
                key: T.uint64 = io.others[(s.first_list + owner) * e.beam, place]
                if (key >> T.uint64(32)) == T.Cast("uint64", s.block + 1):
                    slot: T.int32 = T.cuda.atomic_add(s.listed.ptr_to([0]), T.int32(1))
                    if slot < LISTED:
                        s.won[slot] = T.Cast("int32", key & T.uint64(0xFFFFFFFF))
                        s.places[slot] = place
                        s.owners[slot] = owner
        T.cuda.cta_sync()

    return phase


def look_up(e: Extents) -> Phase:
    """Count the words of the buckets, `loads` of each lane at a time; the phase is (s, io).

    Reads: `upto`, `offset`, `total`, words, `always`. Writes: counts; and as `keep_winners`. Barriers: of the warp.
    """
    keep, load = keep_winners(e), load_word(e.search_steps)

    @T.inline
    def phase(s, io):
        words = T.decl_buffer((io.bands * e.vocab,), "int32", data=io.words.data)
        count: T.int32 = s.total
        for n in T.serial((count + (e.loads * WARP - 1)) // (e.loads * WARP)):
            for j in T.unroll(e.loads):
                s.item = (n * e.loads + j) * WARP + s.lane
                load(s, words, j, count)
            for j in T.unroll(e.loads):
                s.old[j] = T.uint32(0)
                s.anyway[j] = T.uint32(0)
                if s.word[j] >= 0:
                    s.old[j] = T.cuda.atomic_add(
                        io.hits.ptr_to([s.first_row + s.member_row, s.word[j] >> 1]),
                        T.uint32(1) << T.Cast("uint32", (s.word[j] & 1) * 16))
                    T.ptx.ld.global_.u32(s.anyway[j], io.always.ptr_to([s.word[j] >> 5]))
            s.total = 0
            for j in T.unroll(e.loads):
                s.winners[j] = ballot(tirx.all(
                    s.word[j] >= 0,
                    T.Cast("int32", (s.old[j] >> T.Cast("uint32", (s.word[j] & 1) * 16)) & T.uint32(0xFFFF))
                    == io.threshold - 1,
                    (s.anyway[j] >> T.Cast("uint32", s.word[j] & 31)) & T.uint32(1) == T.uint32(0)))
                s.total = s.total + T.Cast("int32", T.popcount(s.winners[j]))
            if s.total > 0:
                keep(s, io)

    return phase


def find_hits(e: Extents) -> Phase:
    """All bands of the group's rows that are this thread block's; the phase is (s, io), for the warps that hash.

    Reads: permutations; once the producer kernel has ended hidden states, tables, `always`. Writes: counts, bitmaps,
    counters; the thread block's list. Barriers: of the warp.
    """
    take, find, count = take_unit(e), find_buckets_of(e), look_up(e)

    def state(s: SimpleNamespace) -> SimpleNamespace:
        return alloc_hash_state(e, s)

    @T.inline
    def phase(b, io):
        s = T.meta_var(state(b))
        pieces: T.int32 = (io.bands + (e.unit_bands - 1)) // e.unit_bands
        s.at = s.look * e.blocks + s.block
        take(s, io, pieces)
        wait_late(e.overlap)
        while s.at < s.rows * pieces:
            find(s, io)
            count(s, io)
            T.cuda.warp_sync()
            s.at = s.at + e.blocks * e.hash_warps
            take(s, io, pieces)

    return phase
# fmt: on
