"""How the block rows of a weight are dealt out to clusters of blocks of threads.

The rows come in the order of `formats.bsr.fullest_first`, or as they are where nobody has looked at the pattern. A
block row is `slices` units of work beside each other. A unit of a long row belongs to a whole cluster; of the others
each block of a cluster takes one. The long rows are the first clusters' work: what takes longest must not begin last.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T


@dataclass(frozen=True)
class Deal:
    """Of `units` in all; `long` is the number of long rows, which the launch knows, or -1 if nobody has looked."""

    units: int
    slices: int
    spread: int  # blocks of a cluster

    def clusters(self, long: tirx.PrimExpr) -> tirx.PrimExpr | int:
        """Clusters for one strip of x; blocks, if a cluster has one."""
        if self.spread == 1:
            return self.units
        shared = self.shared(long)
        return shared + (self.units - shared + (self.spread - 1)) // self.spread

    def shared(self, long: tirx.PrimExpr) -> tirx.PrimExpr:
        """Units that a cluster shares."""
        return T.max(long, 0) * self.slices

    def unit(self, cluster: tirx.PrimExpr, place: tirx.PrimExpr | int, long: tirx.PrimExpr) -> tirx.PrimExpr:
        """The unit of a cluster's block at `place`; `units` or more, if there is none left for it."""
        if self.spread == 1:
            return cluster
        shared = self.shared(long)
        return T.Select(cluster < shared, cluster, shared + (cluster - shared) * self.spread + place)

    def ranks(self, cluster: tirx.PrimExpr, long: tirx.PrimExpr) -> tirx.PrimExpr | int:
        """Blocks that share this cluster's unit."""
        return 1 if self.spread == 1 else T.Select(cluster < self.shared(long), self.spread, 1)

    def rank(self, cluster: tirx.PrimExpr, place: tirx.PrimExpr | int, long: tirx.PrimExpr) -> tirx.PrimExpr | int:
        """Which of those that share the unit the block at `place` is."""
        return 0 if self.spread == 1 else T.Select(cluster < self.shared(long), place, 0)
