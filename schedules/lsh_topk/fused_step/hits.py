"""Hash and look-up of `fused_step`: a thread block a row.

take_bands        some bands, and the columns that they compare
find_words        their places, codes and buckets: words as one list
look_up           these, counted
keep_winners      those with hits enough, on the thread block's list while there is room
take_waiting      the others, when the list has been multiplied
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
from .space import LISTED, PER_CELL, SLOTS, WARP, Extents
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


def waiting_key(block: Any, word: Any) -> tirx.PrimExpr:
    """What stands at the place of a word that its thread block is yet to multiply: no key of a score, whose upper half
    would have to be the ordered bits of a negative NaN."""
    return T.bitwise_or(T.Cast("uint64", block + 1) << T.uint64(32), T.Cast("uint64", word))


# fmt: off
def take_bands(e: Extents) -> Phase:
    """The bands in hand, from `from_band` on, and the columns that they compare; the phase is (s, io, bands).

    Reads: permutations. Writes: `many`, `columns`. Barriers: none.
    """
    load = load_first_columns(e.hashing)

    @T.inline
    def phase(s, io, bands):
        columns = T.decl_buffer((io.bands * e.units * e.k,), "int16", data=io.permutations.data)
        s.many = T.min(bands - s.from_band, e.band_tile)
        load(s, columns, s.from_band * e.units, s.many * e.units, s.t)

    return phase


def find_words(e: Extents) -> Phase:
    """Where the words of the bands in hand are, a thread a band; the phase is (s, io).

    Reads: `columns`, the row, tables. Writes: `upto`, `offset`, `total`. Barriers: some of the thread block.
    """
    h = e.hashing
    find_all, find = find_places(h), find_buckets(e)

    @T.inline
    def phase(s, io):
        columns = T.decl_buffer((io.bands * e.units * e.k,), "int16", data=io.permutations.data)
        find_all(s, columns, s.from_band * e.units, s.many * e.units, s.t)
        T.cuda.cta_sync()
        s.band[0] = T.Select(s.t < s.many, s.from_band + s.t, -1)
        s.code[0] = 0
        if s.t < s.many:
            s.code[0] = code_of_places(h, s, s.t)
        find(s, io, 1)
        s.sum[0] = s.last[0] - s.first[0]
        scan_lanes(s.lane, s.sum, s.other)
        if s.lane == WARP - 1:
            s.totals[s.warp] = s.sum[0]
        T.cuda.cta_sync()
        s.total = 0
        for w in T.unroll(e.warps):
            s.other[0] = s.totals[w]
            s.total = s.total + s.other[0]
            s.sum[0] = s.sum[0] + T.Select(w < s.warp, s.other[0], 0)
        if s.t < s.many:
            s.upto[s.t] = s.sum[0]
            s.offset[s.t] = s.last[0] - s.sum[0]
        T.cuda.cta_sync()

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
            s.winner = T.cuda.ffs_u32(s.left) - 1
            s.lone_word = from_lane(s.word[j], s.winner)
            s.left = s.left & (s.left - T.uint32(1))
            for i in T.serial((ceildiv(e.hidden, elements) - s.lane + (WARP - 1)) // WARP):
                T.ptx.prefetch.global_.L2(io.embedding.ptr_to([s.lone_word, (i * WARP + s.lane) * elements]))

    return phase


def keep_winners(e: Extents) -> Phase:
    """Words whose counts have just reached the threshold; the phase is (s, io).

    What the list has no room for stands for now at its place among the keys (`waiting_key`).

    Reads: `winners`, `word`. Writes: the bitmap, the list's counters; `won`, `places`, `owners` and `listed` of the
    thread block; `winners`, without those that another row of the list won before. Barriers: of the warp.
    """
    fetch = prefetch_winners(e)

    @T.inline
    def phase(s, io):
        b = T.meta_var(s.block_state)
        for j in T.unroll(e.loads):
            s.old[j] = T.uint32(0xFFFFFFFF)
            if (s.winners[j] >> T.Cast("uint32", s.lane)) & T.uint32(1) != T.uint32(0):
                s.old[j] = T.cuda.func_call(
                    "set_bit", io.bitmap.ptr_to([s.list, s.word[j] >> 5]),
                    T.uint32(1) << T.Cast("uint32", s.word[j] & 31), source_code=SET_BIT, return_type="uint32")
        for j in T.unroll(e.loads):
            fetch(s, io, j)
        s.total = 0
        for j in T.unroll(e.loads):
            s.winners[j] = ballot((s.old[j] >> T.Cast("uint32", s.word[j] & 31)) & T.uint32(1) == T.uint32(0))
            s.rank[j] = s.total + below(s.lane, s.winners[j])
            s.total = s.total + T.Cast("int32", T.popcount(s.winners[j]))
        if s.total > 0:
            s.slot_at = 0
            s.place_at = 0
            if s.lane == 0:
                s.slot_at = T.cuda.atomic_add(b.listed.ptr_to([0]), s.total)
                T.evaluate(T.cuda.atomic_add(io.found.ptr_to([s.list, 1]), s.total))
            s.slot_at = from_lane(s.slot_at, 0)
            # A thread block has few places of its own; others are given out to all.
            s.beyond = T.max(s.slot_at, SLOTS)
            if s.slot_at + s.total > s.beyond:
                if s.lane == 0:
                    s.place_at = T.cuda.atomic_add(io.found.ptr_to([s.list, 0]), s.slot_at + s.total - s.beyond)
                s.place_at = from_lane(s.place_at, 0)
            for j in T.unroll(e.loads):
                s.rank[j] = s.slot_at + s.rank[j]
                if (s.winners[j] >> T.Cast("uint32", s.lane)) & T.uint32(1) != T.uint32(0):
                    if s.rank[j] < LISTED:
                        b.won[s.rank[j]] = s.word[j]
                        b.owners[s.rank[j]] = s.list - s.first_list
                        b.places[s.rank[j]] = T.Select(
                            s.rank[j] < SLOTS, s.block * SLOTS + s.rank[j],
                            e.slots + s.place_at + s.rank[j] - s.beyond)
                    else:
                        io.others[s.list * e.beam, e.slots + s.place_at + s.rank[j] - s.beyond] = waiting_key(
                            s.block, s.word[j])

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
    """Count the words of the buckets that are of the slice, `loads` of each thread at a time; the phase is (s, io).

    Reads: `upto`, `offset`, `total`, words, `always`. Writes: `counts`; and as `keep_winners`. Barriers: of the warp.
    """
    keep = keep_winners(e)

    @T.inline
    def phase(s, io):
        words = T.decl_buffer((io.bands * e.vocab,), "int32", data=io.words.data)
        count: T.int32 = s.total
        for n in T.serial((count + (e.loads * e.threads - 1)) // (e.loads * e.threads)):
            # A band's words are those from where the words of all bands before end.
            for j in T.unroll(e.loads):
                s.which[j] = 0
            for b in T.unroll(e.search_steps):
                half = T.meta_var(1 << (e.search_steps - 1 - b))
                for j in T.unroll(e.loads):
                    s.item = (n * e.loads + j) * e.threads + s.t
                    if s.which[j] + half <= s.many:
                        if s.upto[s.which[j] + (half - 1)] <= s.item:
                            s.which[j] = s.which[j] + half
            for j in T.unroll(e.loads):
                s.item = (n * e.loads + j) * e.threads + s.t
                s.word[j] = -1
                if s.item < count:
                    T.ptx.ld.global_.s32(s.word[j], words.ptr_to([s.offset[s.which[j]] + s.item]))
            for j in T.unroll(e.loads):
                s.old[j] = T.uint32(0)
                s.anyway[j] = T.uint32(0)
                if e.slices > 1:
                    if s.word[j] < s.first_word or s.word[j] >= s.first_word + e.slice:
                        s.word[j] = -1
                if s.word[j] >= 0:
                    s.old[j] = T.cuda.atomic_add(
                        s.counts.ptr_to([(s.word[j] - s.first_word) // PER_CELL]),
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


def clear_counts(e: Extents) -> Phase:
    """Counts of a slice to 0; the phase is (s). Writes: `counts`. Barriers: none; one has to follow."""
    vectors = e.slice // (4 * PER_CELL)

    @T.inline
    def phase(s):
        for i in T.serial((vectors - s.t + (e.threads - 1)) // e.threads):
            T.ptx.st.shared.v4.u32(s.counts.ptr_to([(i * e.threads + s.t) * 4]), *[T.uint32(0)] * 4)

    return phase


def find_hits(e: Extents, stage_states: Phase) -> Phase:
    """All bands of the thread block's row; the phase is (b, io).

    Reads: permutations; once the producer kernel has ended hidden states, tables, `always`. Writes: `states`; the
    bitmap, counters; the thread block's list. Barriers: of the thread block; one has to follow.
    """
    take, find, count = take_bands(e), find_words(e), look_up(e)
    clear, stage = clear_counts(e), stage_row(e.hashing)

    def state(s: SimpleNamespace) -> SimpleNamespace:
        return alloc_hash_state(e, s)

    @T.inline
    def phase(b, io):
        s = T.meta_var(state(b))
        rows = T.decl_buffer((io.lists * e.beam * e.hidden,), e.dtype, data=io.hidden.data)
        s.list = s.first_list + s.block // e.beam
        bands: T.int32 = T.Select(s.block < b.rows, io.bands, 0)
        s.from_band = 0
        take(s, io, bands)
        clear(s)
        wait_late(e.overlap)
        if s.block < b.rows:
            stage(s, rows, (s.first_row + s.block) * e.hidden, s.t)
        stage_states(b, io)
        for n in T.serial(e.slices):
            s.first_word = n * e.slice
            if n > 0:
                clear(s)
            for i in T.serial((bands + (e.band_tile - 1)) // e.band_tile):
                s.from_band = i * e.band_tile
                if n > 0 or i > 0:
                    take(s, io, bands)
                find(s, io)
                count(s, io)
                T.cuda.cta_sync()

    return phase
# fmt: on
