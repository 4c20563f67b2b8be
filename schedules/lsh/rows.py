"""From the codes of a row to the bitmap of its list, for look-up alone and for all of hashing to compaction.

A row is counted by clusters of thread blocks (see `extents.CountExtents`). Each sets bits of the list's bitmap in
global memory, and takes a ticket; the cluster that takes the last one finds the bitmap complete, does what is left to
do for the list, and leaves bitmap and tickets zero for the next launch. With a single finisher thread blocks take
tickets each for itself, and the last of them does all that is left.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.lsh_lookup.definition import valid_bits

from ..device.cluster import cluster_arrive, cluster_barrier, cluster_wait, peer_store
from ..device.state import Buffers, scalar
from .buckets import count_own_bands, count_spans, set_reached, share_spans

Phase = Callable[..., Any]
put_flag = peer_store("put_flag", "int")


@dataclass
class Place(Buffers):
    """Which row, part and bands a thread block works for: registers."""

    list: Any = scalar()
    row: Any = scalar()  # index among the rows of all lists
    slice: Any = scalar()
    rank: Any = scalar()  # of the thread block in its cluster
    share: Any = scalar()  # bands per thread block; the last one may have fewer
    first: Any = scalar()  # the first of the thread block's bands
    count: Any = scalar()  # how many bands the thread block has


# fmt: off
@phase
def locate(e, /, s, at, io):
    """Which row, part and bands this thread block works for."""
    if e.cluster > 1:
        block = T.cluster_id([io.lists * io.beam * e.slices])
        rank = T.cta_id_in_cluster([e.cluster])
        at.rank = rank
    else:
        block = T.cta_id([io.lists * io.beam * e.slices])
        at.rank = 0
    at.row = block // e.slices
    at.slice = block % e.slices
    at.list = at.row // io.beam
    at.share = (io.bands + (e.cluster - 1)) // e.cluster
    at.first = at.rank * at.share
    at.count = T.max(T.min(io.bands - at.first, at.share), 0)
    s.base = (at.slice * e.cluster + (0 if (e.cluster > 1 and e.exchange == 0) else at.rank)) * e.part


@phase
def count_row(e, make_codes, code_of, /, s, at, io, t):
    """Count how many bands' buckets contain each word of this thread block, for one row.

    Before: all counts are 0, and the thread blocks of the cluster have arrived at the barrier that tells each other so.
    `make_codes(s, at, io, t)` is a phase that computes the codes of the `many` bands from `begin` on. After the thread
    block's next barrier `code_of(s, i)` is the code of the i-th of them.

    Reads: the tables, the words in their buckets. Writes: `cells`, of other thread blocks of the cluster too. Barriers:
    two for each tile of bands; ends with one of the cluster, or of the thread block where it counts alone.
    """
    words = T.decl_buffer((io.bands * e.vocab,), "int32", data=io.words.data)
    if e.cluster > 1:
        cluster_wait()
    for n in T.serial((at.share + (e.tile - 1)) // e.tile, unroll=False):
        s.begin = at.first + n * e.tile
        s.many = T.max(T.min(at.count - n * e.tile, e.tile), 0)
        make_codes(s, at, io, t)
        T.cuda.cta_sync()
        if e.exchange == 1:
            share_spans(e, code_of)(s, io, s.begin, s.many, t, at.rank)
            cluster_barrier()
            count_spans(e)(s, words, io.bands * e.vocab, t)
            if (n + 1) * e.tile < at.share:
                cluster_barrier()
        else:
            count_own_bands(e, code_of)(s, io, words, io.bands * e.vocab, s.begin, s.many, t)
            if (n + 1) * e.tile < at.share:
                T.cuda.cta_sync()
    if e.cluster > 1 and e.exchange == 0:
        cluster_barrier()
    else:
        T.cuda.cta_sync()


@phase
def set_bits_and_leave(e, /, s, at, io, t):
    """Set the bits of words that reach the threshold in the list's bitmap.

    Reads: `cells`. Writes: bitmap and ticket of the list, in `io.workspace`; `settled` of all peers.
    Barriers: two of the cluster; of the thread block, if it may be the one finisher.
    After: only the list's finishers are left, and its bitmap is complete. `rank` is that of a finisher.
    """
    joint, tickets = T.meta_var(e.finishers > 1), T.meta_var(e.slices * e.cluster // e.finishers)
    set_reached(e)(s, io.workspace, at.list, (at.slice * e.cluster + at.rank) * e.part, io.threshold, t)
    T.cuda.thread_fence()
    if joint:
        cluster_barrier()
    else:
        T.cuda.cta_sync()
        at.rank = 0
    if at.rank == 0 and t == 0:
        s.ticket = T.cuda.atomic_add(io.workspace.ptr_to([at.list, e.bitmap]), T.int32(1))
        if joint:
            for r in T.unroll(e.cluster):
                T.evaluate(put_flag(s.settled.ptr_to([0]), r, T.Cast("int32", s.ticket == io.beam * tickets - 1)))
        else:
            s.settled[0] = T.Cast("int32", s.ticket == io.beam * tickets - 1)
    if joint:
        cluster_barrier()
    else:
        T.cuda.cta_sync()
    if s.settled[0] == 0:
        T.thread_return()
    T.cuda.thread_fence()


@phase
def load_reached(vocab, /, s, io, row, word, u):
    """One int32 of a list's complete bitmap, and of the words that are candidates anyway.

    Writes: the `u`-th of `held`, without bits that stand for no word; as scratch `extra`. Barriers: none.
    """
    T.ptx.ld.relaxed.gpu.global_.u32(s.held[u], io.workspace.ptr_to([row, word]))
    T.ptx.ld.global_.u32(s.extra[u], io.always.ptr_to([word]))
    s.held[u] = (s.held[u] | s.extra[u]) & valid_bits(vocab, word)


@phase
def copy_reached(e, /, s, at, io, t):
    """A list's complete bitmap into `chosen`.

    Reads: bitmap and `always`. Writes: `chosen`; the bitmap and its ticket to 0; as scratch `held`, `extra`.
    Barriers: none; each thread block takes a share.
    """
    share = T.meta_var(ceildiv(e.bitmap, e.finishers))
    for n in T.serial(ceildiv(share, e.threads)):
        if n * e.threads + t < share and at.rank * share + n * e.threads + t < e.bitmap:
            load_reached(e.vocab)(s, io, at.list, at.rank * share + n * e.threads + t, 0)
            io.chosen[at.list, at.rank * share + n * e.threads + t] = T.reinterpret("int32", s.held[0])
            io.workspace[at.list, at.rank * share + n * e.threads + t] = 0
    if at.rank == 0 and t == 0:
        io.workspace[at.list, e.bitmap] = 0


@T.inline
def announce_read(finishers: Any):
    """Tell the cluster's thread blocks that this one has read the bitmap, if there are others."""
    if finishers > 1:
        cluster_arrive()


@phase
def clear_workspace(e, /, s, at, io, t):
    """The list's bitmap and tickets to 0, once all thread blocks have read it, after `announce_read`.

    Writes: `io.workspace`. Barriers: the second half of one of the cluster; a single thread block needs a barrier of
    its own between its reads and this phase.
    """
    share = T.meta_var(ceildiv(e.bitmap, e.finishers))
    if e.finishers > 1:
        cluster_wait()
    for n in T.serial(ceildiv(share, e.threads)):
        if n * e.threads + t < share and at.rank * share + n * e.threads + t < e.bitmap:
            io.workspace[at.list, at.rank * share + n * e.threads + t] = 0
    if at.rank == 0 and t == 0:
        io.workspace[at.list, e.bitmap] = 0
# fmt: on
