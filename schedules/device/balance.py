"""How the block rows of a weight are dealt out to the thread blocks of a grid, so that no heavy row ends last.

A *strip* is the rows of x that a thread block multiplies, and a *unit* the rows of the weight: a slice of one block
row, or all of it. Units are numbered in the order in which the host lists the block rows, the fullest first
(`formats.bsr.fullest_first`), or as they lie where the host has not looked at the pattern.

In a skewed pattern a few block rows are *long*: one thread block reads such a row for longer than the rest of the grid
takes for all others. A unit of a long row is shared by all thread blocks of a cluster, which add up their sums through
distributed shared memory. A unit of another row belongs to one thread block, and a cluster takes several of them. With
clusters of 4 thread blocks, 10 units, and 2 long rows of one unit each:

    cluster          0    1    2    3
    thread block 0   0    1    2    6
    thread block 1   0    1    3    7
    thread block 2   0    1    4    8
    thread block 3   0    1    5    9

All strips of a long unit come before those of the next unit, and long units come first, because thread blocks start
in this order and what takes longest must not start last.

The stored blocks of a shared unit are dealt out in *chunks* of as much as a thread block has in flight at once: chunk 0
to rank 0, chunk 1 to rank 1, and so on in turn. Ranks for which there is no chunk leave at once; rank 0 adds up what
the others put into its shared memory, in the order of their ranks, so that equal inputs give equal bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from .cluster import cluster_arrive, cluster_barrier, cluster_wait, peer_store, place_in_grid
from .state import Buffers, scalar

put_sum = peer_store("put_sum", "float")


@dataclass(frozen=True)
class Deal:
    """Which unit a thread block takes, and with how many others.

    Attributes
    ----------
    units
        Units of the weight.
    slices
        Units of a block row.
    cluster
        Thread blocks of a cluster; 1 where nothing is shared.

    The methods take `long`, the number of long block rows as the launch knows it, or -1 if nobody has looked.
    """

    units: int
    slices: int
    cluster: int

    def clusters(self, long: tirx.PrimExpr) -> tirx.PrimExpr | int:
        """Clusters that one strip needs; thread blocks, if clusters have one each."""
        if self.cluster == 1:
            return self.units
        shared = self.shared(long)
        return shared + (self.units - shared + (self.cluster - 1)) // self.cluster

    def shared(self, long: tirx.PrimExpr) -> tirx.PrimExpr:
        """Units that a cluster shares."""
        return T.max(long, 0) * self.slices

    def unit(self, cluster: tirx.PrimExpr, place: tirx.PrimExpr | int, long: tirx.PrimExpr) -> tirx.PrimExpr:
        """The unit of a cluster's thread block at `place`; `units` or more, if none is left for it."""
        if self.cluster == 1:
            return cluster
        shared = self.shared(long)
        return T.Select(cluster < shared, cluster, shared + (cluster - shared) * self.cluster + place)

    def ranks(self, cluster: tirx.PrimExpr, long: tirx.PrimExpr) -> tirx.PrimExpr | int:
        """Thread blocks that share this cluster's unit."""
        return 1 if self.cluster == 1 else T.Select(cluster < self.shared(long), self.cluster, 1)

    def rank(self, cluster: tirx.PrimExpr, place: tirx.PrimExpr | int, long: tirx.PrimExpr) -> tirx.PrimExpr | int:
        """The number of the thread block at `place` among those that share its unit."""
        return 0 if self.cluster == 1 else T.Select(cluster < self.shared(long), place, 0)


@dataclass
class Work(Buffers):
    """What a thread block has to compute: `strip` of x times `unit` of the weight, as rank `rank` of `ranks`."""

    strip: Any = scalar()
    unit: Any = scalar()
    rank: Any = scalar()
    ranks: Any = scalar()


# fmt: off
def strips(strip_rows: int, m):
    return (m + (strip_rows - 1)) // strip_rows


@phase
def deal_out(deal, strip_rows, two_axes, /, w, m, long):
    """Lay out the grid, and tell each thread block its work.

    Reads: the place in the grid.
    Writes: the work, all of it.
    Barriers: none.
    After: thread blocks for which there is no unit have left.

    `strip_rows`: rows of x of a strip. `two_axes`: strips and units get an axis of the grid each. That saves a division
    by a number that is known only at run time, 0.1 us at the kernel's start. It serves up to 65535 units, and no
    clusters: TVM launches those along one axis.
    """
    if two_axes and deal.cluster == 1:
        strip, unit = T.cta_id([strips(strip_rows, m), deal.units])
        w.strip = strip
        w.unit = unit
        w.rank = 0
        w.ranks = 1
    else:
        block, place = T.meta_var(place_in_grid(
            strips(strip_rows, m) * (deal.clusters(long) if deal.cluster > 1 else deal.units), deal.cluster))
        many: T.int32 = strips(strip_rows, m)
        w.strip = block % many
        cluster: T.int32 = block // many
        w.unit = deal.unit(cluster, place, long)
        w.rank = deal.rank(cluster, place, long)
        w.ranks = deal.ranks(cluster, long)
    if deal.cluster > 1:
        if w.unit >= deal.units:
            T.thread_return()


@phase
def join(cluster, chunk, /, w, count):
    """Let those ranks leave that have no chunk, and tell the others that this one has started.

    Reads: the work, and `count`, what its row holds.
    Writes: nothing.
    Barriers: arrives at the cluster's first, for which thread blocks that have left count as arrived.
    After: every thread block that is left has a chunk of `chunk`, or is rank 0. `meet` must follow.
    """
    if cluster > 1:
        if w.rank > 0 and w.rank * chunk >= count:
            T.thread_return()
        if w.ranks > 1 and count > chunk:
            cluster_arrive()


@phase
def meet(cluster, chunk, /, w, count):
    """Wait until the ranks that share a unit have started; rank 0 also until they have put in their sums.

    Reads: as `join`.
    Writes: nothing.
    Barriers: waits at the cluster's first; rank 0 also arrives and waits at its second, where the others arrive in
    `hand_in`.
    After: rank 0 of a shared unit has started, so that the others may write into its shared memory. Rank 0 itself gets
    past it only when they have done so.
    """
    if cluster > 1:
        if w.ranks > 1 and count > chunk:
            cluster_wait()
            if w.rank == 0:
                cluster_barrier()


@phase
def add_ranks(cluster, chunk, width, /, w, count, sums, others, at):
    """Put a thread's sums into rank 0's shared memory, or, as rank 0, add up what is there.

    Reads: `width` sums of a thread, and of rank 0 what others have put into `others`.
    Writes: `sums` of rank 0, `others` of it by the other ranks.
    Barriers: none.
    After: `sums` of rank 0 are those of all ranks.

    `others` is a buffer in shared memory of shape (cluster - 1, sums of a thread block / width, width); `at` is where
    the thread's sums lie along its second axis.
    """
    if cluster > 1:
        if w.rank > 0:
            for e in T.unroll(width):
                T.evaluate(put_sum(others.ptr_to([w.rank - 1, at, e]), 0, sums[e]))
        else:
            for r in T.unroll(cluster - 1):
                if r + 1 < w.ranks and (r + 1) * chunk < count:
                    for e in T.unroll(width):
                        sums[e] = sums[e] + others[r, at, e]


@phase
def hand_in(cluster, /, w):
    """Tell rank 0 that the sums are in its shared memory.

    Reads: the work.
    Writes: nothing.
    Barriers: all ranks but 0 arrive and wait at the cluster's second.
    After: rank 0 has their sums.
    """
    if cluster > 1:
        if w.rank > 0:
            cluster_barrier()
# fmt: on
