"""Hash and look-up of `fused_step`, by clusters of thread blocks that have a row each: counts in shared memory.

begin_row       what needs nothing of the producer kernel: counts to 0, columns of the first units
count_hits      the row's codes, their buckets, and the hits of all words, in the phases of `schedules.lsh`
vote            which words have hits enough, as bits
take_reached    of these the words that no row of the list won before, on the thread block's list
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.cluster import cluster_arrive, cluster_barrier, cluster_wait
from ...device.overlap import CACHE_LINE
from ...device.selection import scan_lanes
from ...device.state import named, register
from ...lsh.buckets import clear_counts, count_hit
from ...lsh.extents import PER_WARP
from ...lsh.hashing import code_of_places, find_places, load_first_columns, stage_row
from ...lsh.rows import Place
from ...lsh.state import alloc_state
from .hits import ballot, from_lane, give_places, list_buckets, list_word, load_word, set_bits
from .space import WARP, Extents

Phase = Callable[..., Any]
LINE_WORDS = CACHE_LINE // 4
AT_ONCE = 8  # cells of counts that a lane loads together


def alloc_row_state(e: Extents, b: SimpleNamespace) -> SimpleNamespace:
    """Within thread blocks of a row: what `schedules.lsh` needs, in shared memory where sums come later; and

    ``work``  which row, part of the vocabulary and bands are the thread block's
    ``upto``, ``offset``, ``total``  words of buckets as one list: how many up to a lane's, its offset to where they
                                     lie, and all of them; and of words that a warp won those up to a lane, those before
                                     it, and all
    ``some``, ``before``, ``anyway``  of a lane, cells of counts, or words of votes, of the bitmap and of `always`
    ``won_bits``  words that a lane won
    """
    found = vars(alloc_state(e.hashing, e.counting, pool=b.pool, pool_at=e.state_bytes))
    rounds = ceildiv(e.counting.part // WARP, e.threads)
    found |= {
        "upto": T.alloc_local([1], "int32"),
        "other": T.alloc_local([1], "int32"),
        "some": T.alloc_local([max(AT_ONCE, rounds)], "uint32"),
        "before": T.alloc_local([rounds], "uint32"),
        "anyway": T.alloc_local([rounds], "uint32"),
        "won_bits": register("uint32"),
        **{
            name: register()
            for name in ("offset", "total", "slot_at", "place_at", "beyond", "rank", "found_word", "item", "which")
        },
    }
    return named(SimpleNamespace(**found, work=Place.alloc(), b=b))


def cell_of_votes(pair: Any, half: Any) -> Any:
    """Where the bits of the `pair`-th 64 words of a part stand, 32 in each `half`: in the cells that counted them,
    so that threads that read neighbouring ones read different banks."""
    return pair * WARP + pair % (WARP // 2) * 2 + half


# fmt: off
def begin_row(e: Extents) -> Phase:
    """Reads: permutations. Writes: the place, counts, columns. Barriers: the first half of one of the cluster. The
    phase is (s, io)."""
    c, h = e.counting, e.hashing
    clear, load_first = clear_counts(c), load_first_columns(h)

    @T.inline
    def phase(s, io):
        at = T.meta_var(s.work)
        columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
        at.row = s.b.first_row + s.b.block // c.cluster
        at.list = s.b.first_list + s.b.block // c.cluster // e.beam
        at.rank = s.b.block % c.cluster
        at.share = (io.bands + (c.cluster - 1)) // c.cluster
        at.first = at.rank * at.share
        at.count = T.max(T.min(io.bands - at.first, at.share), 0)
        # Hits go to the thread block that counts the word: all words are the cluster's.
        s.base = 0
        clear(s, s.b.t)
        if c.cluster > 1:
            cluster_arrive()
        load_first(s, columns, at.first * h.units, T.min(at.count, c.tile) * h.units, s.b.t)

    return phase


def count_bands(e: Extents) -> Phase:
    """The hits of some bands, whose units' places are known; the phase is (s, io, first, count): `count` bands from
    `first` on.

    A warp goes through the words of up to 32 bands as one list, a lane a word, so that long buckets cost nothing extra.

    Reads: `places`, tables, words. Writes: counts, of the cluster's other thread blocks too. Barriers: of the warp.
    """
    c, h = e.counting, e.hashing
    join, hit, load = list_buckets(e), count_hit(c), load_word((WARP - 1).bit_length())

    @T.inline
    def prefetch(s, words):
        """All of a lane's bucket into the L2 cache, so that memory is waited for once."""
        for n in T.serial((s.last[0] - s.first[0] + (LINE_WORDS - 1)) // LINE_WORDS + 1):
            if s.last[0] > s.first[0]:
                T.ptx.prefetch.global_.L2(words.ptr_to([T.min(s.first[0] + n * LINE_WORDS, s.last[0] - 1)]))

    @T.inline
    def phase(s, io, first, count):
        words = T.decl_buffer((io.bands * e.vocab,), "int32", data=io.words.data)
        each: T.int32 = T.min((count + (e.warps - 1)) // e.warps, WARP)
        for n in T.serial((count + (T.max(each, 1) * e.warps - 1)) // (T.max(each, 1) * e.warps)):
            s.at = (n * e.warps + s.b.warp) * each + s.b.lane
            s.band[0] = -1
            s.code[0] = 0
            if s.b.lane < each and s.at < count:
                s.band[0] = first + s.at
                s.code[0] = code_of_places(h, s, s.at)
            join(s, io, s.b.lane)
            prefetch(s, words)
            for m in T.serial((s.total + (e.loads * WARP - 1)) // (e.loads * WARP)):
                for j in T.unroll(e.loads):
                    s.item = (m * e.loads + j) * WARP + s.b.lane
                    load(s, words, j, s.total)
                for j in T.unroll(e.loads):
                    if s.word[j] >= 0:
                        hit(s, s.word[j])

    return phase


def count_hits(e: Extents) -> Phase:
    """Reads: hidden states, permutations, tables. Writes: counts, of the cluster's other thread blocks too. Barriers:
    some; ends with one of the cluster. The phase is (s, io)."""
    c, h = e.counting, e.hashing
    stage, load_first, find, count = stage_row(h), load_first_columns(h), find_places(h), count_bands(e)

    @T.inline
    def phase(s, io):
        rows = T.decl_buffer((io.lists * e.beam * e.hidden,), e.dtype, data=io.hidden.data)
        columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
        stage(s, rows, s.work.row * e.hidden, s.b.t)
        T.cuda.cta_sync()
        if c.cluster > 1:
            cluster_wait()
        for n in T.serial((s.work.share + (c.tile - 1)) // c.tile, unroll=False):
            s.begin = s.work.first + n * c.tile
            s.many = T.max(T.min(s.work.count - n * c.tile, c.tile), 0)
            if n > 0:
                T.cuda.cta_sync()
                load_first(s, columns, s.begin * h.units, s.many * h.units, s.b.t)
            find(s, columns, s.begin * h.units, s.many * h.units, s.b.t)
            T.cuda.cta_sync()
            count(s, io, s.begin, s.many)
        if c.cluster > 1:
            cluster_barrier()
        else:
            T.cuda.cta_sync()

    return phase


def vote(e: Extents) -> Phase:
    """A bit for each word of the part, a warp 64 at a time; the phase is (s, io).

    Reads: counts. Writes: the bits, in their place. Barriers: of the warp; one has to follow.
    """
    c = e.counting
    pairs = c.part // PER_WARP

    @T.inline
    def phase(s, io):
        for n in T.serial(ceildiv(pairs, e.warps * AT_ONCE)):
            for u in T.unroll(AT_ONCE):
                pair = T.meta_var((n * AT_ONCE + u) * e.warps + s.b.warp)
                s.some[u] = T.uint32(0)
                if pair < pairs:
                    s.some[u] = s.cells[pair * WARP + s.b.lane]
            T.cuda.warp_sync()
            for u in T.unroll(AT_ONCE):
                pair = T.meta_var((n * AT_ONCE + u) * e.warps + s.b.warp)
                s.low = ballot(T.Cast("int32", s.some[u] & T.uint32(0xFFFF)) >= io.threshold)
                s.high = ballot(T.Cast("int32", s.some[u] >> T.uint32(16)) >= io.threshold)
                if s.b.lane < 2 and pair < pairs:
                    s.cells[cell_of_votes(pair, s.b.lane)] = T.Select(s.b.lane == 0, s.low, s.high)

    return phase


def take_reached(e: Extents) -> Phase:
    """The words with hits enough; the phase is (s, io).

    Reads: bits, `always`. Writes: the bitmap, the list's counters; `won`, `places`, `owners` and `listed` of the thread
    block. Barriers: of the warp; one has to come before.
    """
    c = e.counting
    words = c.part // WARP  # of the bitmap
    rounds = ceildiv(words, e.threads)

    @T.inline
    def prefetch(s, io):
        """The word's embedding into the L2 cache."""
        for i in T.serial(ceildiv(e.hidden, CACHE_LINE // e.itemsize)):
            T.ptx.prefetch.global_.L2(io.embedding.ptr_to([s.found_word, i * (CACHE_LINE // e.itemsize)]))

    give, keep = give_places(e), list_word(e, prefetch)

    @T.inline
    def phase(s, io):
        # All of a thread's are asked for together.
        for n in T.unroll(rounds):
            i = T.meta_var(n * e.threads + s.b.t)
            s.some[n] = T.uint32(0)
            if i < words:
                s.some[n] = s.cells[cell_of_votes(i // 2, i % 2)]
        for n in T.unroll(rounds):
            at = T.meta_var(s.work.rank * words + n * e.threads + s.b.t)
            s.before[n] = T.uint32(0)
            s.anyway[n] = T.uint32(0)
            if s.some[n] != T.uint32(0):
                s.before[n] = set_bits(io.bitmap.ptr_to([s.work.list, at]), s.some[n])
                T.ptx.ld.global_.u32(s.anyway[n], io.always.ptr_to([at]))
        for n in T.unroll(rounds):
            s.won_bits = s.some[n] & ~(s.before[n] | s.anyway[n])
            s.upto[0] = T.Cast("int32", T.popcount(s.won_bits))
            s.offset = s.upto[0]
            scan_lanes(s.b.lane, s.upto, s.other)
            s.offset = s.upto[0] - s.offset
            s.total = from_lane(s.upto[0], WARP - 1)
            if s.total > 0:
                give(s, io, s.b, s.work.list)
                s.rank = s.slot_at + s.offset
                while s.won_bits != T.uint32(0):
                    s.found_word = (
                        (s.work.rank * words + n * e.threads + s.b.t) * WARP + T.cuda.ffs_u32(s.won_bits) - 1)
                    keep(s, io, s.b, s.work.list, s.rank, s.found_word)
                    s.won_bits = s.won_bits & (s.won_bits - T.uint32(1))
                    s.rank = s.rank + 1

    return phase
# fmt: on
