"""Buckets of codes, hit counts in shared memory, and the words that reach the threshold: the order of Figure 4.

A group of `lanes` lanes goes through a bucket together, so that no lane waits for another one's longer bucket; Shi, Xu
& Knight's groups are whole warps. Counts are those of one row and part of the vocabulary, two in a 32-bit cell: of 64
neighbouring words the first 32 have the low halves of 32 cells, the others the high halves. There are fewer than 2^16
bands, so that no count overflows into its neighbour; and a warp that reads 32 cells has two words of the bitmap by two
votes.

Phases are called with a state that has the buffers which their heads name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.lsh_lookup.definition import slot_of

from ..device.cluster import peer_store
from ..device.selection import FULL_WARP
from .extents import PER_WARP, WARP

Phase = Callable[..., Any]
ADD = """
__device__ __forceinline__ void add_at_peer(void* p, int r, unsigned int v) {
  atomicAdd((unsigned int*)__cluster_map_shared_rank(p, r), v);
}
"""
SET_BITS = """
__device__ __forceinline__ unsigned int set_bits(void* p, unsigned int v) { return atomicOr((unsigned int*)p, v); }
"""
LARGER_HALVES = """
__device__ __forceinline__ unsigned int larger_halves(unsigned int a, unsigned int b) { return __vmaxu2(a, b); }
"""
put_span = peer_store("put_span", "unsigned long long")


def set_bits(where: Any, bits: Any) -> tirx.PrimExpr:
    """Set bits of a word in which other threads set bits at the same time; returns the word as it was before."""
    return T.cuda.func_call("set_bits", where, bits, source_code=SET_BITS, return_type="uint32")


def larger_halves(one: Any, other: Any) -> tirx.PrimExpr:
    """The larger number of 16 bits in either half of two words: on compute capability 9.0 one instruction."""
    return T.cuda.func_call("larger_halves", one, other, source_code=LARGER_HALVES, return_type="uint32")


def add_at_peer(where: Any, rank: Any, value: Any) -> tirx.PrimExpr:
    """Add `value` to the same place of shared memory in the `rank`-th thread block of the cluster."""
    return T.cuda.func_call("add_at_peer", where, rank, value, source_code=ADD, return_type="void")


def cell_of(local: Any) -> Any:
    """The cell that counts a word of a part: of 64 neighbouring words the first 32 have the low halves of 32 cells."""
    return (local >> 6) * WARP + (local & (WARP - 1))


def one_of(local: Any) -> tirx.PrimExpr:
    """What one hit of that word adds to the cell."""
    return T.uint32(1) << T.Cast("uint32", (local & WARP) >> 1)


def span_of(first: Any, last: Any) -> tirx.PrimExpr:
    """Where a bucket, or a piece of one, begins and ends, in one word."""
    return (T.Cast("uint64", last) << T.uint64(32)) | T.Cast("uint64", first)


def first_of(span: Any) -> tirx.PrimExpr:
    return T.Cast("int32", span & T.uint64(0xFFFFFFFF))


def last_of(span: Any) -> tirx.PrimExpr:
    return T.Cast("int32", span >> T.uint64(32))


# fmt: off
@phase
def clear_counts(e, /, s, t):
    """All counts to 0.

    Writes: `cells`. Barriers: none; one of the cluster has to follow before peers add to them.
    """
    for n in T.serial(ceildiv(e.cells, e.threads)):
        if n * e.threads + t < e.cells:
            s.cells[n * e.threads + t] = T.uint32(0)


@phase
def find_buckets(e, /, s, io, loads):
    """Where the buckets of `loads` codes are, all look-ups in flight together.

    Reads: `code`, `band` of each; a `band` of -1 has no bucket. Tables.
    Writes: `first` and `last` of each, places in all bands' words as one list; as scratch `entry`, for cuckoo tables.
    Barriers: none.
    """
    if e.cuckoo:
        for u in T.unroll(loads):
            s.row_of = T.max(s.band[u], 0)
            for half in T.unroll(2):
                s.slot = slot_of(s.code[u], io.multipliers[s.row_of, half], io.slots)
                T.ptx.ld.global_.v4.s32(
                    *[s.entry[(u * 2 + half) * 4 + i] for i in range(4)],
                    io.entries.ptr_to([s.row_of, half, s.slot, 0]))
        for u in T.unroll(loads):
            s.first[u] = 0
            s.last[u] = 0
            for half in T.unroll(2):
                if s.entry[(u * 2 + half) * 4] == s.code[u] and s.band[u] >= 0:
                    s.first[u] = s.band[u] * e.vocab + s.entry[(u * 2 + half) * 4 + 1]
                    s.last[u] = s.first[u] + s.entry[(u * 2 + half) * 4 + 2]
    else:
        for u in T.unroll(loads):
            # A load that is not needed costs less than a branch around it.
            s.row_of = T.max(s.band[u], 0)
            T.ptx.ld.global_.s32(s.first[u], io.starts.ptr_to([s.row_of, s.code[u]]))
            T.ptx.ld.global_.s32(s.last[u], io.starts.ptr_to([s.row_of, s.code[u] + 1]))
        for u in T.unroll(loads):
            s.row_of = T.max(s.band[u], 0)
            s.first[u] = s.first[u] + s.row_of * e.vocab
            s.last[u] = T.Select(s.band[u] >= 0, s.last[u] + s.row_of * e.vocab, s.first[u])


@phase
def count_hit(e, /, s, word):
    """A hit of a word for the thread block that counts it.

    Reads: `base`, the first word of the cluster's parts, or of the thread block's own part where hits stay.
    Writes: `cells`, of a peer where hits go to each other; as scratch `local`, `owner`. Barriers: none.
    """
    away = T.meta_var(e.cluster > 1 and e.exchange == 0)
    s.local = word - s.base
    # A number below 0 is a large one without a sign.
    if T.Cast("uint32", s.local) < T.uint32(e.part * (e.cluster if away else 1)):
        if away:
            s.owner = s.local // e.part
            s.local = s.local - s.owner * e.part
        cell = T.meta_var(s.cells.ptr_to([cell_of(s.local)]))
        if away:
            T.evaluate(add_at_peer(cell, s.owner, one_of(s.local)))
        else:
            T.evaluate(T.cuda.atomic_add(cell, one_of(s.local)))


@phase
def count_words(e, /, s, words, total, lane):
    """Hits of the words of `loads` buckets, the first words of all of them in flight together: `words` are those of all
    bands as one list, `lane` the thread's lane in the group.

    Reads: `first` and `last` of each, the words. Writes: as `count_hit`; as scratch `word`, `next`. Barriers: none.
    """
    hit = T.meta_var(count_hit(e))
    for u in T.unroll(e.loads):
        T.ptx.ld.global_.s32(s.word[u], words.ptr_to([T.min(s.first[u] + lane, total - 1)]))
    for u in T.unroll(e.loads):
        if s.first[u] + lane < s.last[u]:
            hit(s, s.word[u])
    for u in T.unroll(e.loads):
        s.next = s.first[u] + lane + e.lanes
        while s.next < s.last[u]:
            T.ptx.ld.global_.s32(s.word[u], words.ptr_to([s.next]))
            hit(s, s.word[u])
            s.next = s.next + e.lanes


@phase
def count_own_bands(e, code_of, /, s, io, words, total, first, count, t):
    """The hits of some bands: `count` bands from `first` on, whose codes are `code_of(s, i)`.

    Reads: codes, tables, words. Writes: as `count_hit`. Barriers: none.
    """
    s.at = t // e.lanes
    while s.at < count:
        for u in T.unroll(e.loads):
            s.band[u] = T.Select(s.at + u * e.groups < count, first + s.at + u * e.groups, -1)
            s.code[u] = code_of(s, T.min(s.at + u * e.groups, count - 1))
        find_buckets(e)(s, io, e.loads)
        count_words(e)(s, words, total, t % e.lanes)
        s.at = s.at + e.loads * e.groups


@phase
def share_spans(e, code_of, /, s, io, first, count, t, rank):
    """Where the buckets of some bands are, for all thread blocks of the cluster.

    Reads: codes, tables. Writes: `spans` of all peers, `tile` of them, those from `count` on empty.
    Barriers: none; one of the cluster has to come before and one has to follow.
    """
    s.at = t
    while s.at < e.tile:
        s.band[0] = T.Select(s.at < count, first + s.at, -1)
        s.code[0] = T.Select(s.at < count, code_of(s, s.at), 0)
        find_buckets(e)(s, io, 1)
        for r in T.unroll(e.cluster):
            T.evaluate(put_span(
                s.spans.ptr_to([rank * e.tile + s.at]), r, span_of(s.first[0], s.last[0])))
        s.at = s.at + e.threads


@phase
def count_spans(e, /, s, words, total, t):
    """The hits of the buckets that all thread blocks of the cluster found.

    Reads: `spans`, words. Writes: as `count_hit`. Barriers: none.
    """
    s.at = t // e.lanes
    while s.at < e.spans:
        for u in T.unroll(e.loads):
            s.first[u] = 0
            s.last[u] = 0
            if s.at + u * e.groups < e.spans:
                s.span = s.spans[s.at + u * e.groups]
                s.first[u] = first_of(s.span)
                s.last[u] = last_of(s.span)
        count_words(e)(s, words, total, t % e.lanes)
        s.at = s.at + e.loads * e.groups


@phase
def set_reached(e, /, s, bits, row, first, threshold, t):
    """Bits of the words of a part that reach the threshold: into the row `row` of the bitmaps `bits`, the part's first
    word being `first`.

    Reads: `cells`. Writes: bits of other thread blocks' rows, too, hence by atomics; as scratch `cell`, `low`, `high`.
    Barriers: votes of a warp; one has to come before.
    """
    at_once = T.meta_var(e.part // PER_WARP)
    for n in T.serial(ceildiv(at_once, e.warps)):
        if n * e.warps + t // WARP < at_once:
            s.cell = s.cells[(n * e.warps + t // WARP) * WARP + t % WARP]
            s.low = T.cuda.ballot_sync(
                T.uint32(FULL_WARP), T.Cast("int32", s.cell & T.uint32(0xFFFF)) >= threshold)
            s.high = T.cuda.ballot_sync(
                T.uint32(FULL_WARP), T.Cast("int32", s.cell >> T.uint32(16)) >= threshold)
            if t % WARP == 1:
                s.low = s.high
            if t % WARP < 2 and s.low != T.uint32(0):
                T.evaluate(set_bits(
                    bits.ptr_to([row, first // WARP + (n * e.warps + t // WARP) * 2 + t % WARP]), s.low))
# fmt: on
