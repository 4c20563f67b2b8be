"""The space of `cluster_rows`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table, ceildiv
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from ..persistent_rows.space import (
    LANES,
    REGISTERS,
    SHARED,
    THREADS,
    Extents,
    enough,
    longest_row,
    operate_cycles,
    packs_of,
    refusal,
    require,
    too_much,
)

# Of more than 8 thread blocks clusters are not portable: an H100 has them, of 16.
CLUSTERS = (2, 4, 8, 16)
PORTABLE = 8


@dataclass(frozen=True)
class ClusterExtents(Extents):
    """The sizes of one point's kernel: `blocks` are a cluster's, and each cluster has one pack."""

    @property
    def cluster(self) -> int:
        """Thread blocks of a cluster."""
        return self.blocks

    @property
    def copies(self) -> int:
        """Lanes of a group that finish the same sample, and send it to different thread blocks."""
        return min(self.lanes // self.pack, self.cluster)

    @property
    def sends(self) -> int:
        """Thread blocks that each of these sends it to."""
        return ceildiv(self.cluster, self.copies)

    @property
    def packs_each(self) -> int:
        return 1

    @property
    def finishing(self) -> int:
        return self.pack * self.copies

    @property
    def loads(self) -> int:
        return 1  # nothing is copied

    def held_with(self, words: int) -> int:
        return super().held_with(words) + 2 * self.sends + 2 * self.units

    @classmethod
    def of(cls, problem: SparseRecurrent, decisions: Decisions) -> ClusterExtents:
        whole = {"blocks": decisions["cluster"], "stages": 2, "exchange": 0, **decisions}
        found = super().of(problem, whole)
        assert isinstance(found, ClusterExtents)
        return found


def space(problem: SparseRecurrent, machine: Machine) -> Table:
    if not machine.has_clusters:
        raise NotApplicable("clusters of thread blocks need compute capability 9.0")
    require(problem, machine)
    best_point(problem, machine)
    return _table(problem)


def _table(problem: SparseRecurrent) -> Table:
    return {
        "cluster": tuple(n for n in CLUSTERS if n <= max(CLUSTERS[0], problem.hidden)),
        "threads": THREADS,
        "reduce_threads": LANES,
        "registers": REGISTERS,
        "shared": SHARED,
        "pack": packs_of(problem),
    }


def allowed(problem: SparseRecurrent, machine: Machine, decisions: Decisions) -> str | None:
    row = longest_row(problem)
    if reason := refusal(row, decisions):
        return reason
    reach = (decisions["registers"] + decisions["shared"]) * decisions["reduce_threads"]
    if reach < row:
        return f"{row} entries of a row exceed the {reach} that a group keeps"
    if decisions["cluster"] > problem.hidden:
        return f"of {decisions['cluster']} thread blocks some have none of hidden={problem.hidden} units"
    return too_much(ClusterExtents.of(problem, decisions), problem, machine)


def default(problem: SparseRecurrent, machine: Machine) -> Decisions:
    return dict(best_point(problem, machine))


@functools.lru_cache(maxsize=64)
def best_point(problem: SparseRecurrent, machine: Machine) -> tuple[tuple[str, int], ...]:
    """Of portable clusters with as many samples a gather as there may be, the point that takes the fewest cycles.

    Raises `NotApplicable` if no cluster keeps the layer's weights.
    """
    row, table = longest_row(problem), _table(problem)
    for portable, pack in itertools.product((True, False), reversed(table["pack"])):
        points = (
            {
                "cluster": cluster,
                "threads": threads,
                "reduce_threads": lanes,
                "registers": registers,
                "shared": SHARED[enough(SHARED, row - registers * lanes, lanes)],
                "pack": pack,
            }
            for cluster, threads, lanes, registers in itertools.product(table["cluster"], THREADS, LANES, REGISTERS)
            if (cluster <= PORTABLE) == portable
        )
        found = [p for p in points if allowed(problem, machine, p) is None]
        if found:
            return tuple(min(found, key=lambda p: operate_cycles(ClusterExtents.of(problem, p))).items())
    raise NotApplicable(f"no cluster keeps {row} entries in each row of hidden={problem.hidden}")
