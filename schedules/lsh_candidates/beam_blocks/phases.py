"""Phases of `beam_blocks`; those that it shares are in `schedules.lsh`.

The words of the first half of the vocabulary have the low halves of the cells, the others the high halves. There are
fewer than 2^16 bands, so that no count overflows into its neighbour, and none is 65,535 before a hit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv
from tvm_sparse.formats.bitmap import BITS
from tvm_sparse.operators.lsh_lookup.definition import valid_bits

from ...device.cluster import cluster_barrier, peer_load, peer_store
from ...device.selection import lanes_sum
from ...lsh.buckets import find_buckets, set_bits
from ...lsh.extents import WARP, HashExtents
from ...lsh.hashing import code_of_places, find_places, load_first_columns, stage_row
from .space import BlockExtents

Phase = Callable[..., Any]
bits_of_peer = peer_load("bits_of_peer", "unsigned int", "uint32")
put_words = peer_store("put_words", "int")


def clear_bits(e: BlockExtents) -> Phase:
    """The thread block's bitmap to 0; called with (s, t).

    Writes: `bitmap`. Barriers: none; one has to follow.
    """

    # fmt: off
    @T.inline
    def phase(s, t):
        for n in T.serial(ceildiv(e.bitmap, e.threads)):
            if n * e.threads + t < e.bitmap:
                s.bitmap[n * e.threads + t] = T.uint32(0)
    # fmt: on
    return phase


def load_always(e: BlockExtents) -> Phase:
    """A thread's share of the words that are candidates anyway; called with (s, io, t).

    Reads: `always`. Writes: `anyway`. Barriers: none.
    """

    # fmt: off
    @T.inline
    def phase(s, io, t):
        for n in T.unroll(e.shares):
            if n * e.threads + t < e.share and s.rank * e.share + n * e.threads + t < e.bitmap:
                T.ptx.ld.global_.u32(s.anyway[n], io.always.ptr_to([s.rank * e.share + n * e.threads + t]))
    # fmt: on
    return phase


def hash_rows(h: HashExtents, e: BlockExtents) -> Phase:
    """Where the buckets of some rows and bands are; called with (s, io, place, band, t): `pack` of the thread block's
    rows from its `place`-th on, `tile` bands from `band` on. Rows and bands that there are not have none.

    Reads: rows, permutations, tables. Writes: `spans`, those of a row one after another; as scratch `row`, `places`.
    Barriers: two, between which nobody reads `spans`; one has to follow.
    """
    stage, load_first, find_all = stage_row(h), load_first_columns(h), find_places(h)
    find = find_buckets(e)

    # fmt: off
    @T.inline
    def phase(s, io, place, band, t):
        columns = T.decl_buffer((io.bands * h.units * h.k,), "int16", data=io.permutations.data)
        rows = T.decl_buffer((io.lists * io.beam * h.hidden,), h.dtype, data=io.hidden.data)
        s.begin = band
        s.many = T.min(io.bands - band, e.tile)
        load_first(s, columns, s.begin * h.units, s.many * h.units, t)
        s.row_at = s.list * io.beam + s.rank + place * e.peers
        stage(s, rows, s.row_at * h.hidden, t, e.peers * h.hidden, s.rows - place)
        T.cuda.cta_sync()
        find_all(s, columns, s.begin * h.units, s.many * h.units, t)
        T.cuda.cta_sync()
        for n in T.serial(ceildiv(e.spans, e.finds * e.threads)):
            for u in T.unroll(e.finds):
                at: T.let = (n * e.finds + u) * e.threads + t
                there = T.meta_var(tirx.all(at < e.spans, at % e.tile < s.many, at // e.tile < s.rows - place))
                s.band[u] = T.Select(there, s.begin + at % e.tile, -1)
                s.code[u] = 0
                if there:
                    s.code[u] = code_of_places(h, s, at % e.tile, at // e.tile)
            find(s, io, e.finds)
            for u in T.unroll(e.finds):
                if (n * e.finds + u) * e.threads + t < e.spans:
                    s.spans[(n * e.finds + u) * e.threads + t] = (
                        (T.Cast("uint64", s.last[u]) << T.uint64(32)) | T.Cast("uint64", s.first[u]))
    # fmt: on
    return phase


def count_row(e: BlockExtents) -> Phase:
    """The hits of a row in a tile of bands; called with (s, io, i, t), for the `i`-th of the rows hashed together.

    The longest of a group's buckets decides how often it waits for memory, not the sum of all of them.

    Reads: `spans`, words. Writes: `cells`, and in `bitmap` the bits of words whose count reaches the threshold, or of
    any words if it is below 1; as scratch `first`, `last`, `word`, `cell`, `low`, `local`.
    Barriers: none; one has to come before and one has to follow.
    """

    # fmt: off
    @T.inline
    def phase(s, io, i, t):
        words = T.decl_buffer((io.bands * e.vocab,), "int32", data=io.words.data)
        # What a count is before the hit that makes it reach the threshold, in both halves.
        s.target = T.Cast("uint32", T.max(T.min(io.threshold - 1, 0xFFFF), 0)) * T.uint32(0x10001)
        s.at = t // e.lanes
        while s.at < s.many:
            s.longest = 0
            for u in T.unroll(e.loads):
                s.first[u] = 0
                s.last[u] = 0
                if s.at + u * e.groups < s.many:
                    s.span = s.spans[i * e.tile + s.at + u * e.groups]
                    s.first[u] = T.Cast("int32", s.span & T.uint64(0xFFFFFFFF)) + t % e.lanes
                    s.last[u] = T.Cast("int32", s.span >> T.uint64(32))
                s.longest = T.max(s.longest, s.last[u] - s.first[u])
            s.next = 0
            while s.next < s.longest:
                for u in T.unroll(e.loads):
                    s.word[u] = -1
                    if s.first[u] + s.next < s.last[u]:
                        T.ptx.ld.global_.s32(s.word[u], words.ptr_to([s.first[u] + s.next]))
                for u in T.unroll(e.loads):
                    if s.word[u] >= 0:
                        s.local = T.Select(s.word[u] < e.cells, s.word[u], s.word[u] - e.cells)
                        s.low = T.Select(s.word[u] < e.cells, T.uint32(0xFFFF), T.uint32(0xFFFF0000))
                        s.cell = T.cuda.atomic_add(s.cells.ptr_to([s.local]), s.low & T.uint32(0x10001))
                        if (s.cell ^ s.target) & s.low == T.uint32(0):
                            T.evaluate(set_bits(
                                s.bitmap.ptr_to([s.word[u] // BITS]),
                                T.uint32(1) << T.Cast("uint32", s.word[u] % BITS)))
                s.next = s.next + e.lanes
            s.at = s.at + e.loads * e.groups
    # fmt: on
    return phase


@T.inline
def meet(peers: Any):
    """A barrier of the cluster, or of the thread block if it is alone."""
    if peers > 1:
        cluster_barrier()
    else:
        T.cuda.cta_sync()


def combine(e: BlockExtents) -> Phase:
    """A share of the list's bitmap, and what the other shares have; called with (s, io, t).

    A threshold below 1, which any count reaches, makes every word a candidate.

    Reads: `bitmap` of all peers, `anyway`. Writes: of `bitmap` the thread block's share, which no peer reads; `before`,
    words of the shares before it, and `total`, all words, in every thread; as scratch `peer`, `bits`, `mine`, and
    `totals` of all peers.
    Barriers: begins with one of the cluster, and ends with one, after which no peer reaches for the shared memory of
    the thread block.
    """

    # fmt: off
    @T.inline
    def phase(s, io, t):
        meet(e.peers)
        s.total = 0
        for n in T.unroll(e.shares):
            word: T.let = s.rank * e.share + n * e.threads + t
            if n * e.threads + t < e.share and word < e.bitmap:
                # From the own one on, so that not all ask the same one at a time.
                for r in T.unroll(e.peers):
                    s.peer[r] = bits_of_peer(s.bitmap.ptr_to([word]), (s.rank + r) & (e.peers - 1))
                s.bits[0] = T.Select(io.threshold < 1, T.uint32(0xFFFFFFFF), s.anyway[n])
                for r in T.unroll(e.peers):
                    s.bits[0] = s.bits[0] | s.peer[r]
                s.bits[0] = s.bits[0] & valid_bits(e.vocab, word)
                s.bitmap[word] = s.bits[0]
                s.total = s.total + T.Cast("int32", T.popcount(s.bits[0]))
        s.mine[0] = lanes_sum(s.total)
        if t % WARP == 0:
            s.totals[t // WARP] = s.mine[0]
        T.cuda.cta_sync()
        if t < WARP:
            s.mine[1] = lanes_sum(T.if_then_else(t < e.warps, s.totals[t], 0))
            if t < e.peers:
                T.evaluate(put_words(s.totals.ptr_to([WARP + s.rank]), t, s.mine[1]))
        meet(e.peers)
        s.before = lanes_sum(T.if_then_else(t % WARP < s.rank, s.totals[WARP + t % WARP], 0))
        s.total = lanes_sum(T.if_then_else(t % WARP < e.peers, s.totals[WARP + t % WARP], 0))
    # fmt: on
    return phase
