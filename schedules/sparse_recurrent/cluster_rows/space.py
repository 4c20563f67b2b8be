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
    Extents,
    longest_row,
    packs_of,
    refusal,
    shared_limit,
    step_cycles,
)

# Of more than 8 thread blocks clusters are not portable: an H100 has them, of 16.
CLUSTERS = (2, 4, 8, 16)
PORTABLE = 8
THREADS = (128, 256, 384, 512, 768, 1024)


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
    def carried_bytes(self) -> int:
        return 0  # in registers

    @property
    def held(self) -> int:
        return super().held + 2 * self.sends + 3 * self.units

    @classmethod
    def of(cls, problem: SparseRecurrent, decisions: Decisions) -> ClusterExtents:
        whole = {"blocks": decisions["cluster"], "stages": 2, "exchange": 0, **decisions}
        found = super().of(problem, whole)
        assert isinstance(found, ClusterExtents)
        return found


def space(problem: SparseRecurrent, machine: Machine) -> Table:
    if not machine.has_clusters:
        raise NotApplicable("clusters of thread blocks need compute capability 9.0")
    if problem.words == 1 and problem.hidden >> 16:
        raise NotApplicable(f"16 bits leave no column beyond hidden={problem.hidden} for absent entries")
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
    if decisions["cluster"] > problem.hidden:
        return f"of {decisions['cluster']} thread blocks some have none of hidden={problem.hidden} units"
    reason = refusal(problem, machine, decisions, ClusterExtents)
    if reason is not None:
        return reason
    row, reach = longest_row(problem), (decisions["registers"] + decisions["shared"]) * decisions["reduce_threads"]
    if reach < row:
        return f"{row} entries of a row exceed the {reach} that a thread block keeps"
    return None


def default(problem: SparseRecurrent, machine: Machine) -> Decisions:
    return dict(best_point(problem, machine))


@functools.lru_cache(maxsize=64)
def best_point(problem: SparseRecurrent, machine: Machine) -> tuple[tuple[str, int], ...]:
    """Of portable clusters with as many samples a gather as there may be, the point that takes the fewest cycles.

    Raises `NotApplicable` if no cluster keeps the layer's weights.
    """
    table, row = _table(problem), longest_row(problem)
    for pack, most in itertools.product(reversed(table["pack"]), (PORTABLE, CLUSTERS[-1])):
        points = (
            {
                "cluster": cluster,
                "threads": threads,
                "reduce_threads": lanes,
                "registers": registers,
                "shared": next((n for n in SHARED if (registers + n) * lanes >= row), 0),
                "pack": pack,
            }
            for cluster, threads, lanes, registers in itertools.product(
                (n for n in table["cluster"] if n <= most), THREADS, LANES, REGISTERS
            )
        )
        found = [p for p in points if allowed(problem, machine, p) is None]
        if found:
            return tuple(min(found, key=lambda p: step_cycles(ClusterExtents.of(problem, p))).items())
    limit = shared_limit(machine)
    raise NotApplicable(f"no cluster keeps {row} entries in each row of hidden={problem.hidden}, {limit} bytes a block")
