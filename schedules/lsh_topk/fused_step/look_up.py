"""The first kernel of `fused_step`: a cluster of thread blocks finds the words that reach the threshold in a row.

begin          what needs nothing of the producer kernel: counts to 0, columns of the first units
count_bands    the hits of some bands, in the thread block's own shared memory
vote           words of its part of the vocabulary that reach the threshold with the whole cluster's hits
list_reached   those that no row of the list had before

Thread blocks of a cluster do not send hits to each other, which took longer than counting them where they are found.
Each counts all words; in the end it reads the others' counts of its part. That takes a good part of the kernel's time,
as a thread block reads about as many bytes as there are words. To ask only of words that one of the thread blocks had
hit often gained nothing with four of them and a threshold of 6, and lost with eight, for whom that is any word that was
hit at all; heads use thresholds from 1 on.

Counts have 8 bits, four in a 32-bit cell. A thread block that looks up more than 255 bands has *wide* counts, of 16
bits: it counts the two halves of its slice of the vocabulary, the *spans*, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.cluster import cluster_arrive, cluster_wait, peer_load
from ...device.overlap import CACHE_LINE, wait_then_start_consumer
from ...device.region import device_region
from ...device.selection import FULL_WARP, scan_lanes
from ...lsh.buckets import find_buckets, set_bits
from ...lsh.hashing import code_of_places, find_places, load_first_columns, stage_row
from .space import MOST_HITS, PER_CELL, PER_STRETCH, PER_VECTOR, WARP, Extents
from .state import alloc_hash_state

Phase = Callable[..., Any]
NO_WORD = -(1 << 30)  # which is negative in every span
counts_of = peer_load("counts_of", "unsigned long long", "uint64")


# fmt: off
def begin(e: Extents) -> Phase:
    """Reads: permutations. Writes: the thread block's bands, how it counts, counts, columns. Barriers: none; one has to
    follow before counts. The phase is (s, io)."""
    h = e.hashing
    load_first, clear = load_first_columns(h), clear_counts(e)

    @T.inline
    def phase(s, io):
        columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
        s.share = (io.bands + (e.cluster - 1)) // e.cluster
        s.from_band = s.rank * s.share
        s.bands = T.max(T.min(io.bands - s.from_band, s.share), 0)
        s.wide = T.Cast("int32", s.share > MOST_HITS)
        s.span = e.slice >> s.wide
        clear(s)
        load_first(s, columns, s.from_band * h.units, T.min(s.bands, e.tile_bands) * h.units, s.t)

    return phase


def clear_counts(e: Extents) -> Phase:
    """Writes: counts to 0, and none is listed. Barriers: none. The phase is (s)."""

    @T.inline
    def phase(s):
        for n in T.serial(ceildiv(e.cells, e.hash_threads)):
            if n * e.hash_threads + s.t < e.cells:
                s.cells[n * e.hash_threads + s.t] = T.uint32(0)
        if s.t == 0:
            s.listed[0] = 0

    return phase


def load_vectors(e: Extents) -> Phase:
    """A lane's next vectors of its bucket; the phase is (s, io, words).

    Reads: `first`, `last`, `upcoming`, words. Writes: `word`, `NO_WORD` for what is not of the bucket. Barriers: none.
    """

    @T.inline
    def phase(s, io, words):
        for j in T.unroll(e.loads):
            at = T.meta_var([j * PER_VECTOR + v for v in range(PER_VECTOR)])
            for v in T.unroll(PER_VECTOR):
                s.word[j * PER_VECTOR + v] = NO_WORD
            place: T.let = (s.upcoming + j * e.bucket_lanes) * PER_VECTOR
            if place < s.last[0]:
                if place + PER_VECTOR <= io.bands * e.vocab:
                    T.ptx.ld.global_.v4.s32(*[s.word[i] for i in at], words.ptr_to([place]))
                else:
                    for v in T.unroll(PER_VECTOR):
                        if place + v < io.bands * e.vocab:
                            T.ptx.ld.global_.s32(s.word[j * PER_VECTOR + v], words.ptr_to([place + v]))
        for j in T.unroll(e.loads):
            for v in T.unroll(PER_VECTOR):
                # A number below 0 is a large one without a sign.
                within: T.let = (s.upcoming + j * e.bucket_lanes) * PER_VECTOR + v - s.first[0]
                if T.Cast("uint32", within) >= T.Cast("uint32", s.last[0] - s.first[0]):
                    s.word[j * PER_VECTOR + v] = NO_WORD

    return phase


def cell_of(local: Any, wide: Any) -> Any:
    """The cell that counts a word of the span: 32 neighbouring words are counted in the same bytes of every other cell,
    so that a warp whose lanes have two cells each votes on 32 neighbouring words together."""
    return (local >> (8 - wide)) * PER_STRETCH + (local & (WARP - 1)) * 2 + ((local >> (7 - wide)) & 1)


def shift_of(local: Any, wide: Any) -> tirx.PrimExpr:
    """Where in it its count begins."""
    return T.Cast("uint32", ((local >> 5) & (3 >> wide)) << (3 + wide))


def count_bands(e: Extents, wide: int) -> Phase:
    """The hits of `many` bands from `begin` on, whose units' places are known; the phase is (s, io).

    `bucket_lanes` lanes go through a bucket together.

    Reads: `places`, tables, words. Writes: counts. Barriers: none; one of the thread block has to follow.
    """
    find, load = find_buckets(e), load_vectors(e)
    groups = e.hash_threads // e.bucket_lanes

    @T.inline
    def hit(s, j):
        s.local = s.word[j] - s.base
        # A number below 0 is a large one without a sign.
        if T.Cast("uint32", s.local) < T.Cast("uint32", s.span):
            T.evaluate(T.cuda.atomic_add(
                s.cells.ptr_to([cell_of(s.local, wide)]), T.uint32(1) << shift_of(s.local, wide)))

    @T.inline
    def phase(s, io):
        words = T.decl_buffer((io.bands * e.vocab,), "int32", data=io.words.data)
        for n in T.serial((s.many + (groups - 1)) // groups):
            s.at = n * groups + s.t // e.bucket_lanes
            s.band[0] = -1
            s.code[0] = 0
            if s.at < s.many:
                s.band[0] = s.begin + s.at
                s.code[0] = code_of_places(e.hashing, s, s.at)
            find(s, io, 1)
            s.upcoming = s.first[0] // PER_VECTOR + s.t % e.bucket_lanes
            while s.upcoming * PER_VECTOR < s.last[0]:
                load(s, io, words)
                for j in T.unroll(e.loads * PER_VECTOR):
                    hit(s, j)
                s.upcoming = s.upcoming + e.loads * e.bucket_lanes

    return phase


def vote(e: Extents, wide: int) -> Phase:
    """What reaches the threshold in the thread block's part of the span; the phase is (s, io).

    Reads: counts, of the cluster's other thread blocks too. Writes: `votes`. Barriers: of the warp; one of the cluster
    has to come before and after.
    """
    per_cell = PER_CELL >> wide
    low = T.uint64(0x0000FFFF0000FFFF if wide else 0x00FF00FF00FF00FF)
    width = 8 << wide

    def hits(s: Any, u: Any, q: Any) -> tirx.PrimExpr:
        """Of the `q`-th 32 words of a stretch: the first of a lane's two cells counts the first half of them."""
        shift = T.Cast("uint64", q // per_cell * 32 + q % per_cell // 2 * 16)
        return T.Cast("int32", (s.sums[u * 2 + q % per_cell % 2] >> shift) & T.uint64(0xFFFF))

    @T.inline
    def phase(s, io):
        for i in T.serial(e.rounds, unroll=False):
            for u in T.unroll(e.at_once):
                stretch = T.meta_var((i * e.at_once + u) * e.hash_warps + s.warp)
                at = T.meta_var((s.rank * e.part + stretch) * (PER_STRETCH // 2) + s.lane)
                for r in T.unroll(e.cluster):
                    s.parts[u * e.cluster + r] = T.uint64(0)
                    if stretch < e.part:
                        if e.cluster > 1:
                            s.parts[u * e.cluster + r] = counts_of(s.pairs.ptr_to([at]), r)
                        else:
                            s.parts[u] = s.pairs[at]
            for u in T.unroll(e.at_once):
                stretch = T.meta_var((i * e.at_once + u) * e.hash_warps + s.warp)
                for half in T.unroll(2):
                    s.sums[u * 2 + half] = T.uint64(0)
                    for r in T.unroll(e.cluster):
                        s.sums[u * 2 + half] = s.sums[u * 2 + half] + (
                            (s.parts[u * e.cluster + r] >> T.Cast("uint64", half * width)) & low)
                s.mine = T.uint32(0)
                for q in T.unroll(2 * per_cell):
                    s.ballot = T.cuda.ballot_sync(T.uint32(FULL_WARP), hits(s, u, q) >= io.threshold)
                    if s.lane == q:
                        s.mine = s.ballot
                if s.lane < 2 * per_cell and stretch < e.part:
                    s.votes[stretch * (2 * per_cell) + s.lane] = s.mine

    return phase


@T.inline
def arrive(e):
    """The first half of a barrier of the thread blocks of a row."""
    if e.cluster > 1:
        cluster_arrive()


@T.inline
def wait(e):
    """The second half."""
    if e.cluster > 1:
        cluster_wait()
    else:
        T.cuda.cta_sync()


def list_reached(e: Extents) -> Phase:
    """Words that no row of the list had before, and that are not candidates anyway, to the list; the phase is (s, io).

    Words are brought to the L2 cache, where the second kernel will look for them.

    Reads: `votes`, `always`. Writes: the bitmap, the list and its length; as scratch `listed`. Barriers: of the
    thread block; one has to come before.
    """
    rounds = ceildiv(e.votes, e.hash_threads)

    @T.inline
    def prefetch(s, io):
        for n in T.serial(ceildiv(e.hidden, CACHE_LINE // e.itemsize)):
            T.ptx.prefetch.global_.L2(io.embedding.ptr_to([s.local, n * (CACHE_LINE // e.itemsize)]))

    @T.inline
    def phase(s, io):
        votes: T.int32 = e.votes >> s.wide
        first: T.int32 = s.base // WARP + s.rank * votes
        for i in T.unroll(rounds):
            s.reached[i] = T.uint32(0)
            s.before[i] = T.uint32(0)
            s.anyway[i] = T.uint32(0)
            if i * e.hash_threads + s.t < votes:
                s.reached[i] = s.votes[i * e.hash_threads + s.t]
            if s.reached[i] != T.uint32(0):
                s.before[i] = set_bits(
                    io.bitmap.ptr_to([s.work_list, first + i * e.hash_threads + s.t]), s.reached[i])
                T.ptx.ld.global_.u32(s.anyway[i], io.always.ptr_to([first + i * e.hash_threads + s.t]))
        s.upto[0] = 0
        for i in T.unroll(rounds):
            s.reached[i] = s.reached[i] & ~(s.before[i] | s.anyway[i])
            s.upto[0] = s.upto[0] + T.Cast("int32", T.popcount(s.reached[i]))
        s.place_at = s.upto[0]
        scan_lanes(s.lane, s.upto, s.other)
        s.place_at = s.upto[0] - s.place_at
        s.other[0] = 0
        if s.lane == WARP - 1 and s.upto[0] > 0:
            s.other[0] = T.cuda.atomic_add(s.listed.ptr_to([0]), s.upto[0])
        s.place_at = s.place_at + T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.other[0], WARP - 1, 32, 32)
        T.cuda.cta_sync()
        # One for all warps: a counter in memory takes additions one after another.
        if s.t == 0 and s.listed[0] > 0:
            s.listed[0] = T.cuda.atomic_add(io.found.ptr_to([s.work_list, 0]), s.listed[0])
        T.cuda.cta_sync()
        s.place_at = s.place_at + s.listed[0]
        for i in T.unroll(rounds):
            while s.reached[i] != T.uint32(0):
                s.local = (first + i * e.hash_threads + s.t) * WARP + T.cuda.ffs_u32(s.reached[i]) - 1
                io.queue[s.work_list, s.place_at] = s.local
                prefetch(s, io)
                s.reached[i] = s.reached[i] & (s.reached[i] - T.uint32(1))
                s.place_at = s.place_at + 1

    return phase


def look_up(e: Extents) -> Phase:
    """The kernel, called with (io)."""
    h = e.hashing
    prepare, stage, load_first, find = begin(e), stage_row(h), load_first_columns(h), find_places(h)
    clear, take = clear_counts(e), list_reached(e)
    count, count_wide, elect, elect_wide = count_bands(e, 0), count_bands(e, 1), vote(e, 0), vote(e, 1)

    def state(io: Any, t: Any) -> SimpleNamespace:
        many = io.lists * (e.beam * e.slices)
        if e.cluster == 1:
            work, rank = T.cta_id([many]), 0
        else:
            work, rank = T.cluster_id([many]), T.cta_id_in_cluster([e.cluster])
        return alloc_hash_state(e, work // e.slices, work % e.slices, rank, t)

    @T.inline
    def kernel(io):
        with device_region():
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": e.hash_resident})
            t = T.thread_id([e.hash_threads])
            s = T.meta_var(state(io, t))
            columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
            rows = T.decl_buffer((io.lists * e.beam * e.hidden,), e.dtype, data=io.hidden.data)
            prepare(s, io)
            if e.overlap == 1:
                wait_then_start_consumer()
            stage(s, rows, s.work_row * e.hidden, s.t)
            T.cuda.cta_sync()
            turns: T.int32 = (s.share + (e.tile_bands - 1)) // e.tile_bands
            for n in T.serial(turns << s.wide):
                # A span after another; all bands for each.
                s.begin = s.from_band + n % turns * e.tile_bands
                s.many = T.max(T.min(s.bands - n % turns * e.tile_bands, e.tile_bands), 0)
                s.base = s.slice * e.slice + n // turns * s.span
                if n > 0:
                    T.cuda.cta_sync()
                    load_first(s, columns, s.begin * h.units, s.many * h.units, s.t)
                find(s, columns, s.begin * h.units, s.many * h.units, s.t)
                T.cuda.cta_sync()
                if s.wide == 0:
                    count(s, io)
                else:
                    count_wide(s, io)
                if (n + 1) % turns == 0:
                    arrive(e)
                    wait(e)
                    if s.wide == 0:
                        elect(s, io)
                    else:
                        elect_wide(s, io)
                    arrive(e)
                    T.cuda.cta_sync()
                    take(s, io)
                    wait(e)
                    if n + 1 < turns << s.wide:
                        clear(s)

    return kernel
# fmt: on
