"""The first kernel of `fused_step`: a cluster of thread blocks finds the words that reach the threshold in a row.

begin          what needs nothing of the producer kernel: counts to 0, columns of the first units
find_pieces    where the buckets of a thread block's bands are
lengthen       pieces of these, where there is no room for as many
count_pieces   their words: those of the thread block's part of the vocabulary are counted, others sent
tell           the others how much was sent to them
receive        what they have sent
vote           words of the part that reach the threshold
list_reached   those that no row of the list had before

Each thread block of a cluster hashes some bands, goes through their buckets, and counts the hits of a part of the
vocabulary. A hit of another one's part is *sent*: written down in that one's shared memory, which reads what all have
sent it when they have come to a barrier. Hits that there is no room for are added to the other's counts at once, which
takes longer.

A bucket is gone through in *pieces* of what `bucket_lanes` lanes load together, because some are very long: two units
of a band that share a column make buckets ten times as long as others, and two such pairs hundred times. Pieces beside
the first of each band are *further* ones. Where there is no room for all of them, as with few units, whose buckets are
all long, they are found again, each as many times as long as makes them fit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ...device.cluster import cluster_arrive, cluster_wait, peer_store, place_in_grid
from ...device.overlap import CACHE_LINE, wait_then_start_consumer
from ...device.region import device_region
from ...device.selection import FULL_WARP, scan_lanes
from ...lsh.buckets import (
    add_at_peer,
    cell_of,
    clear_counts,
    find_buckets,
    first_of,
    larger_halves,
    last_of,
    one_of,
    set_bits,
    span_of,
)
from ...lsh.extents import PER_WARP
from ...lsh.hashing import code_of_places, find_places, load_first_columns, stage_row
from .space import PER_VECTOR, SEGMENTS, STRETCHES, WARP, Extents
from .state import HashState

Phase = Callable[..., Any]
RECEIVED = 4  # hits that a lane has in flight
put_hit = peer_store("put_hit", "unsigned short")
put_many = peer_store("put_many", "int")


# fmt: off
@phase
def begin(e, /, s, io):
    """Start the kernel's work: columns of the first units, and counts and votes of 0. Reads: permutations. Writes: the
    thread block's bands and its part, counts and votes to 0, columns. Barriers: none; one of the cluster has to follow
    before hits are added to the counts of others.
    """
    h = T.meta_var(e.hashing)
    columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
    s.share = (io.bands + (e.cluster - 1)) // e.cluster
    s.from_band = s.rank * s.share
    s.bands = T.max(T.min(io.bands - s.from_band, s.share), 0)
    s.base = (s.slice * e.cluster + s.rank) * e.counting.part
    clear_counts(e.counting)(s, s.t)
    if s.t == 0:
        s.listed[0] = 0
        s.further[0] = 0
    if s.t < SEGMENTS:
        s.many_sent[s.t] = 0
    for n in T.unroll(ceildiv(e.votes, e.hash_threads)):
        if n * e.hash_threads + s.t < e.votes:
            s.votes[n * e.hash_threads + s.t] = T.uint32(0)
    load_first_columns(h)(s, columns, s.from_band * h.units, T.min(s.bands, e.counting.tile) * h.units, s.t)


@phase
def find_pieces(e, /, s, io):
    """Where the buckets of `many` bands from `begin` on are, whose units' places are known.

    Reads: `places`, tables; `stride`, the words of a piece; `further`, 0. Writes: `further`; `spans`, all of them if
    `further` is not above `spare`. Barriers: none; one has to come before, and one after.
    """
    for n in T.serial((s.many - s.t + (e.hash_threads - 1)) // e.hash_threads):
        s.at = n * e.hash_threads + s.t
        s.band[0] = s.begin + s.at
        s.code[0] = code_of_places(e.hashing, s, s.at)
        find_buckets(e.counting)(s, io, 1)
        s.next = s.first[0] // PER_VECTOR * PER_VECTOR + s.stride
        s.more = 0
        s.place_at = 0
        if s.next < s.last[0]:
            s.more = T.truncdiv(s.last[0] - s.next + s.stride - 1, s.stride)
            s.place_at = T.cuda.atomic_add(s.further.ptr_to([0]), s.more)
        s.spans[s.at] = span_of(s.first[0], T.min(s.next, s.last[0]))
        if s.place_at + s.more <= e.spare:
            for j in T.serial(s.more):
                s.spans[s.many + s.place_at + j] = span_of(s.next, s.next + T.min(s.stride, s.last[0] - s.next))
                s.next = s.next + s.stride


@phase
def lengthen(e, /, s):
    """Choose longer pieces, if there is no room for all of them.

    Reads: `further`. Writes: `going`, whether they have to be found again; if so `stride`, and `further`, to 0.
    Barriers: two of the thread block, if so; one has to come before. After: found again they all fit, because a band
    has at most one more than its share of those that `spare` has room for beside one a band.
    """
    s.going = T.Cast("int32", s.further[0] > e.spare)
    if s.going != 0:
        s.stride = T.truncdiv(s.further[0] + (e.spare - e.counting.tile - 1), e.spare - e.counting.tile) * e.piece
        T.cuda.cta_sync()
        if s.t == 0:
            s.further[0] = 0
        T.cuda.cta_sync()


@phase
def load_pieces(e, /, s, io, words):
    """Load a lane's vectors of words of `loads` pieces.

    Reads: `last`, `upcoming`, words. Writes: `word`, of vectors that begin before the end of their piece. Barriers:
    none.
    """
    for u in T.unroll(e.loads):
        at = T.meta_var([u * PER_VECTOR + v for v in range(PER_VECTOR)])
        if s.upcoming[u] < s.last[u]:
            if e.vocab % PER_VECTOR == 0 or s.upcoming[u] + PER_VECTOR <= io.bands * e.vocab:
                T.ptx.ld.global_.v4.s32(*[s.word[i] for i in at], words.ptr_to([s.upcoming[u]]))
            else:
                for v in T.unroll(PER_VECTOR):
                    if s.upcoming[u] + v < io.bands * e.vocab:
                        T.ptx.ld.global_.s32(s.word[u * PER_VECTOR + v], words.ptr_to([s.upcoming[u] + v]))


@phase
def send(e, /, s, local, owner):
    """Send a hit to the thread block that counts it; where its segment is full, count it there at once."""
    at: T.int32 = T.cuda.atomic_add(
        s.many_sent.ptr_to([owner * e.segments + s.warp % e.segments]), T.int32(1))
    if at < e.room:
        T.evaluate(put_hit(
            s.sent.ptr_to([(s.rank * e.segments + s.warp % e.segments) * e.room + at]), owner,
            T.Cast("uint16", local)))
    else:
        T.evaluate(add_at_peer(s.cells.ptr_to([cell_of(local)]), owner, one_of(local)))


@phase
def hit(e, /, s, word):
    """Count a hit, here or in the thread block of the cluster that has the token."""
    part = T.meta_var(e.counting.part)
    # As an unsigned number, one below 0 is larger than any word.
    local: T.int32 = word - s.base
    if T.Cast("uint32", local) < T.uint32(part):
        T.evaluate(T.cuda.atomic_add(s.cells.ptr_to([cell_of(local)]), one_of(local)))
    elif e.cluster > 1:
        within: T.uint32 = T.Cast("uint32", word - s.slice * (e.cluster * part))
        if e.slices == 1 or within < T.uint32(e.cluster * part):
            send(e)(s, T.Cast("int32", within % T.uint32(part)), T.Cast("int32", within // T.uint32(part)))


@phase
def count_pieces(e, /, s, io):
    """The hits of these pieces. `bucket_lanes` lanes have a piece, and `loads` pieces in flight.

    Reads: `spans`, `further`, words. Writes: counts, and `sent` of the whole cluster; `many_sent`. Barriers: none; one
    of the cluster has to come before, and one after.
    """
    words = T.decl_buffer((io.bands * e.vocab,), "int32", data=io.words.data)
    pieces: T.int32 = s.many + s.further[0]
    for n in T.serial((pieces + (e.counting.groups * e.loads - 1)) // (e.counting.groups * e.loads)):
        for u in T.unroll(e.loads):
            at = T.meta_var((n * e.loads + u) * e.counting.groups + s.t // e.bucket_lanes)
            s.span = T.uint64(0)
            if at < pieces:
                s.span = s.spans[at]
            s.first[u] = first_of(s.span)
            s.last[u] = last_of(s.span)
            s.upcoming[u] = (s.first[u] // PER_VECTOR + s.t % e.bucket_lanes) * PER_VECTOR
        s.going = 1
        while s.going != 0:
            load_pieces(e)(s, io, words)
            s.going = 0
            for u in T.unroll(e.loads):
                for v in T.unroll(PER_VECTOR):
                    # Only words of this piece are counted, not those before or after it.
                    if T.Cast("uint32", s.upcoming[u] + v - s.first[u]) < T.Cast("uint32", s.last[u] - s.first[u]):
                        hit(e)(s, s.word[u * PER_VECTOR + v])
                s.upcoming[u] = s.upcoming[u] + e.piece
                if s.upcoming[u] < s.last[u]:
                    s.going = 1


@phase
def tell(e, /, s):
    """How many hits the thread block has sent to each other one.

    Reads: `many_sent`. Writes: `many_got`, of the others. Barriers: none; one of the thread block has to come before,
    and one of the cluster after.
    """
    if s.t < e.cluster * e.segments:
        T.evaluate(put_many(
            s.many_got.ptr_to([s.rank * e.segments + s.t % e.segments]), s.t // e.segments, s.many_sent[s.t]))


@phase
def receive(e, /, s):
    """The hits that the cluster's thread blocks have sent, a warp a segment.

    Reads: `sent` and `many_got`. Writes: counts. Barriers: none; one of the cluster has to come before, and one of the
    thread block after.
    """
    for n in T.serial(((e.cluster * e.segments) - s.warp + (e.counting.warps - 1)) // e.counting.warps):
        segment: T.int32 = n * e.counting.warps + s.warp
        s.many = T.min(s.many_got[segment], e.room)
        for i in T.serial((s.many + (WARP * RECEIVED - 1)) // (WARP * RECEIVED)):
            for u in T.unroll(RECEIVED):
                at = T.meta_var((i * RECEIVED + u) * WARP + s.lane)
                if at < s.many:
                    local: T.int32 = T.Cast("int32", s.sent[segment * e.room + at])
                    T.evaluate(T.cuda.atomic_add(s.cells.ptr_to([cell_of(local)]), one_of(local)))


@phase
def vote(e, /, s, io):
    """What reaches the threshold in the thread block's part, 64 words of it at a time.

    Few do: where no lane has one, which a maximum of both halves of its cell tells, 64 words are passed over at once.

    Reads: counts. Writes: `votes`, of words that reach it; the others are 0 before. Barriers: of the warp; one of the
    thread block has to come before and after.
    """
    stretches = T.meta_var(e.counting.part // PER_WARP)
    at_once = T.meta_var(min(STRETCHES, ceildiv(stretches, e.counting.warps)))
    held = T.alloc_local([at_once], "uint32")
    below: T.uint32 = T.Cast("uint32", T.min(io.threshold - 1, 0xFFFF)) * T.uint32(0x10001)
    for n in T.serial(ceildiv(stretches, e.counting.warps * at_once)):
        for u in T.unroll(at_once):
            stretch = T.meta_var((n * at_once + u) * e.counting.warps + s.warp)
            held[u] = T.uint32(0)
            if stretch < stretches:
                held[u] = s.cells[stretch * WARP + s.lane]
        for u in T.unroll(at_once):
            stretch = T.meta_var((n * at_once + u) * e.counting.warps + s.warp)
            if T.cuda.ballot_sync(T.uint32(FULL_WARP), larger_halves(held[u], below) != below) != T.uint32(0):
                low: T.uint32 = T.cuda.ballot_sync(
                    T.uint32(FULL_WARP), T.Cast("int32", held[u] & T.uint32(0xFFFF)) >= io.threshold)
                high: T.uint32 = T.cuda.ballot_sync(
                    T.uint32(FULL_WARP), T.Cast("int32", held[u] >> T.uint32(16)) >= io.threshold)
                if s.lane < 2:
                    s.votes[stretch * 2 + s.lane] = T.Select(s.lane == 0, low, high)


@phase
def prefetch(e, /, s, io):
    """Prefetch a row of the embedding, that of word `local`, into the L2 cache. Reads: `local`. Barriers: none."""
    for n in T.serial(ceildiv(e.hidden, CACHE_LINE // e.itemsize)):
        T.ptx.prefetch.global_.L2(io.embedding.ptr_to([s.local, n * (CACHE_LINE // e.itemsize)]))


@phase
def list_reached(e, /, s, io):
    """Words that no row of the list had before, and that are not candidates anyway, to the list.

    Words are brought to the L2 cache, where the second kernel will look for them.

    Reads: `votes`, `always`. Writes: the bitmap, the list and its length; as scratch `listed`. Barriers: of the
    thread block; one has to come before.
    """
    rounds = T.meta_var(ceildiv(e.votes, e.hash_threads))
    first: T.int32 = s.base // WARP
    for i in T.unroll(rounds):
        s.reached[i] = T.uint32(0)
        s.before[i] = T.uint32(0)
        s.anyway[i] = T.uint32(0)
        if i * e.hash_threads + s.t < e.votes:
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
    # One addition for all warps: a counter in memory takes additions one after another. Its result has a place of
    # its own, because the compiler lets all threads read what the first one adds.
    if s.t == 0 and s.listed[0] > 0:
        s.listed[1] = T.cuda.atomic_add(io.found.ptr_to([s.work_list, 0]), s.listed[0])
    T.cuda.cta_sync()
    s.place_at = s.place_at + s.listed[1]
    for i in T.unroll(rounds):
        while s.reached[i] != T.uint32(0):
            s.local = (first + i * e.hash_threads + s.t) * WARP + T.cuda.ffs_u32(s.reached[i]) - 1
            io.queue[s.work_list, s.place_at] = s.local
            prefetch(e)(s, io)
            s.reached[i] = s.reached[i] & (s.reached[i] - T.uint32(1))
            s.place_at = s.place_at + 1


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


def state(e: Extents, io: Any, t: Any) -> HashState:
    work, rank = place_in_grid(io.lists * (e.beam * e.slices), e.cluster)
    row = work // e.slices
    place = {"work_row": row, "work_list": row // e.beam, "slice": work % e.slices, "rank": rank}
    return HashState.alloc(e, e.hash_bytes, **place, t=t, warp=t // WARP, lane=t % WARP)


@phase
def look_up(e, /, io):
    """The kernel."""
    h, tile = T.meta_var(e.hashing), T.meta_var(e.counting.tile)
    stage, load_first = T.meta_var(stage_row(h)), T.meta_var(load_first_columns(h))
    find = T.meta_var(find_places(h))
    with device_region():
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": e.hash_resident})
        t = T.thread_id([e.hash_threads])
        s = T.meta_var(state(e, io, t))
        columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
        rows = T.decl_buffer((io.lists * e.beam * e.hidden,), e.dtype, data=io.hidden.data)
        begin(e)(s, io)
        arrive(e)
        if e.overlap == 1:
            wait_then_start_consumer()
        stage(s, rows, s.work_row * e.hidden, s.t)
        T.cuda.cta_sync()
        for n in T.serial((s.share + (tile - 1)) // tile):
            s.begin = s.from_band + n * tile
            s.many = T.max(T.min(s.bands - n * tile, tile), 0)
            if n > 0:
                load_first(s, columns, s.begin * h.units, s.many * h.units, s.t)
            find(s, columns, s.begin * h.units, s.many * h.units, s.t)
            T.cuda.cta_sync()
            s.stride = e.piece
            s.going = 1
            while s.going != 0:
                find_pieces(e)(s, io)
                T.cuda.cta_sync()
                lengthen(e)(s)
            if n == 0:
                wait(e)
            count_pieces(e)(s, io)
            T.cuda.cta_sync()
            if s.t == 0:
                s.further[0] = 0
        if e.cluster > 1:
            tell(e)(s)
        arrive(e)
        wait(e)
        # From here on no thread block accesses another one's shared memory.
        if e.cluster > 1:
            receive(e)(s)
            T.cuda.cta_sync()
        vote(e)(s, io)
        T.cuda.cta_sync()
        list_reached(e)(s, io)
# fmt: on
