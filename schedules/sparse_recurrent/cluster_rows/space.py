"""The space of `cluster_rows`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Launch, NotApplicable, Table, ceildiv
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from ...recurrent.sizes import WARP, WIDEST, step_alone
from ..persistent_rows.space import (
    BATCHED,
    LANES,
    REGISTERS,
    THREADS,
    Extents,
    enough,
    longest_row,
    packs_of,
    refusal,
    require,
    too_much,
)
from ..persistent_rows.space import cycles as persistent_cycles
from ..persistent_rows.space import default as persistent_default

# Clusters of more than 8 thread blocks are not portable; an H100 allows 16.
CLUSTERS = (2, 4, 8, 16)
COPIES = 2  # of the hidden states
LONGER = 1.35  # times as long as guessed a step of `persistent_rows` takes, at least
BARRIER_BYTES = 8  # bytes of an mbarrier

# For `cycles`, as fitted to an H200. Cycles of a step until all states are exchanged, and for each thread block that
# takes part; for each warp; for 32 words that are read from shared memory; for an instruction of all warps of a quarter
# of a multiprocessor; for the reduction and the gates of a row and sample by such a warp; and for each row, one after
# another, of a group.
EXCHANGE, EACH_BLOCK, EACH_WARP, WORDS, ISSUED, FINISHED, ROW = 500, 16, 10, 1, 3, 72, 200
# The same with `stores`, by 20 points of four layers, whose steps took 0.83 to 1.2 times as many cycles: of a step at
# least; for each thread block; for each warp that has units; for an instruction of all warps of a quarter; for each
# exchange between lanes.
STEP, STORE_BLOCK, STORE_WARP, STORE_ISSUED, LEVEL = 430, 9, 45, 4.2, 21


extent = Derived["ClusterExtents", int]
whether = Derived["ClusterExtents", bool]


@dataclass(frozen=True)
class ClusterExtents(Extents):
    """The sizes of one point's kernel: `blocks` are a cluster's, and each cluster has one pack.

    A copy of the hidden states has a chunk for each thread block, and one more vector of zeros.
    """

    # Thread blocks of a cluster.
    cluster = extent(lambda e: e.blocks)
    packs_each = extent(lambda e: 1)
    # Nothing is copied.
    loads = extent(lambda e: 1)
    by_slot = whether(lambda e: True)
    # The states of a thread block's units.
    chunk_bytes = extent(lambda e: ceildiv(e.most * e.column_bytes, WIDEST) * WIDEST)
    # Places of a chunk; the last ones may be unused.
    chunk = extent(lambda e: e.chunk_bytes // e.column_bytes)
    absent = extent(lambda e: e.cluster * e.chunk)
    vectors = extent(lambda e: e.cluster * e.chunk_bytes // WIDEST + 1)
    # Whether each warp stores its states in all thread blocks of the cluster; else a thread block's states are sent
    # together, by bulk copies. At the same points on an H200 that took 0.69 to 1.04 times as long in ten calls of LSTMs
    # and GRUs, and 0.90 to 1.19 times in nine of layers with one gate.
    stores = whether(lambda e: e.gates > 1 and e.exchanges == 1)
    # With `stores` all lanes finish: each sends to some thread blocks.
    finishing = extent(lambda e: e.lanes if e.stores else e.pack)
    # Lanes that have the same word of states, and thread blocks that each of them sends it to, at most.
    sharing = extent(lambda e: e.lanes * 4 // (e.pack * e.itemsize))
    sends = extent(lambda e: ceildiv(e.cluster, e.sharing if e.stores else e.threads // WARP))

    @property
    def expected_bytes(self) -> int:
        """Bytes that a thread block is sent in an exchange: with `stores` whole words, also by itself; else chunks."""
        if not self.stores:
            return (self.cluster - 1) * self.chunk_bytes
        share, more = divmod(self.hidden, self.cluster)
        few, many = (ceildiv(units * self.column_bytes, 4) * 4 for units in (share, share + 1))
        return (self.cluster - more) * few + more * many

    # Shared memory: the copies, the table of places (16 bits each: two copies of more do not fit), mbarriers.

    where_bytes = extent(lambda e: e.hidden * 2)

    @property
    def barriers_at(self) -> int:
        """Where the mbarriers begin, in bytes."""
        before = self.stage_bytes + self.where_bytes
        return ceildiv(before, BARRIER_BYTES) * BARRIER_BYTES

    shared_bytes = extent(lambda e: e.barriers_at + COPIES * BARRIER_BYTES)

    @property
    def batches(self) -> tuple[tuple[int, int], ...]:
        """As in `persistent_rows`, but the first batch has as many rounds as most rows, where one batch may be so
        large.

        Gathers take most of a step's time, and those of absent entries as much as others.
        """
        first = min(self.registers, ceildiv(min(self.nonzeros, self.hidden), self.lanes) + 1)
        if not 0 < first <= self.gathered:
            return super().batches
        rest = range(first, self.registers, BATCHED)
        return ((0, first), *((at, min(BATCHED, self.registers - at)) for at in rest))

    def held_in(self, form: str) -> int:
        return super().held_in(form) + 4 + self.sends + 4 * self.units

    @classmethod
    def of(cls, problem: SparseRecurrent, decisions: Decisions, polled: bool = False) -> ClusterExtents:
        found = super().of(problem, {"blocks": decisions["cluster"], "stages": COPIES, **decisions}, polled)
        assert isinstance(found, ClusterExtents)
        return found


def space(problem: SparseRecurrent, machine: Machine) -> Table:
    if not machine.has_clusters:
        raise NotApplicable("clusters of thread blocks need compute capability 9.0")
    require(problem, machine)
    best_point(problem, machine)
    return _table(problem, machine)


def _table(problem: SparseRecurrent, machine: Machine) -> Table:
    return {
        "cluster": tuple(n for n in machine.clusters(CLUSTERS) if n <= max(CLUSTERS[0], problem.hidden)),
        "threads": THREADS,
        "reduce_threads": LANES,
        "registers": REGISTERS,
        "pack": packs_of(problem),
    }


def allowed(problem: SparseRecurrent, machine: Machine, decisions: Decisions) -> str | None:
    row = longest_row(problem)
    if reason := refusal(row, decisions):
        return reason
    reach = decisions["registers"] * decisions["reduce_threads"]
    if reach < row:
        return f"{row} entries of a row exceed the {reach} that a group keeps"
    if decisions["cluster"] > problem.hidden:
        return f"of {decisions['cluster']} thread blocks some have none of hidden={problem.hidden} units"
    e = ClusterExtents.of(problem, decisions)
    if e.stores and e.column_bytes < 4 and e.lanes == WARP:
        return "two units of a warp share a word of states"
    return too_much(e, problem, machine)


def launch(problem: SparseRecurrent, decisions: Decisions) -> Launch:
    e = ClusterExtents.of(problem, decisions)
    return Launch(e.threads, e.shared_bytes)


def default(problem: SparseRecurrent, machine: Machine) -> Decisions:
    return dict(best_point(problem, machine))


def declines(problem: SparseRecurrent, machine: Machine) -> bool:
    """Whether a step is expected to take longer than one of `persistent_rows`, or the GPU has too few multiprocessors
    for a cluster, or there is nothing to exchange.

    Both are guesses of cycles: on an H200 64 layers took 0.76 to 1.20 times this template's (0.98 in the geometric
    mean) and 149 took 1.5 times those of `persistent_rows` in the geometric mean, which count one exchange a step.
    Those of both that were timed for the same layer: `persistent_rows` took 0.77 times as long where half as many
    cycles are guessed, and 1.3 to 25 times as long where `LONGER` and `exchanges` times as many are.
    """
    e = ClusterExtents.of(problem, default(problem, machine))
    if step_alone(problem) or not machine.clusters_at_once(e.cluster):
        return True
    try:
        other = Extents.of(problem, persistent_default(problem, machine))
    except NotApplicable:
        return False
    return cycles(e, machine) > LONGER * e.exchanges * persistent_cycles(other)


def cycles(e: ClusterExtents, machine: Machine) -> float:
    """A guess of the cycles of one step, including clusters that have to wait for others."""
    warps = min(e.threads // WARP, ceildiv(e.most * e.lanes, WARP)) / 4
    row = min(e.nonzeros, e.hidden)
    read_again = max(0, row - e.registers * e.lanes) * e.words
    words = e.most * e.gates * (row * e.column_words + read_again) / WARP
    if e.stores:
        issued = max(1, warps) * e.rows * ceildiv(row, e.lanes) * (e.pack + 2)
        step = STEP + STORE_BLOCK * e.cluster + STORE_WARP * 4 * warps + STORE_ISSUED * issued
        return _waves(e, machine) * (step + LEVEL * (e.lanes.bit_length() - 1))
    issued = warps * e.rows * ceildiv(row, e.lanes) * (e.pack + 2)
    step = (
        (EXCHANGE + EACH_BLOCK * e.cluster) * e.exchanges
        + EACH_WARP * (e.threads // WARP)
        + WORDS * words
        + ISSUED * issued
        + (FINISHED * warps * e.pack + ROW) * e.rows
    )
    return _waves(e, machine) * step


def _waves(e: ClusterExtents, machine: Machine) -> int:
    """Clusters that follow each other."""
    return ceildiv(e.packs, max(1, machine.cores // e.cluster))


def likely_points(problem: SparseRecurrent, machine: Machine) -> Iterator[Decisions]:
    """Points that may be the best, all of them allowed: rows are in registers as far as these reach."""
    row, table = longest_row(problem), _table(problem, machine)
    for cluster, threads, lanes, pack in itertools.product(table["cluster"], THREADS, LANES, table["pack"]):
        for registers in reversed(REGISTERS[: enough(REGISTERS, row, lanes) + 1]):
            point = {
                "cluster": cluster,
                "threads": threads,
                "reduce_threads": lanes,
                "registers": registers,
                "pack": pack,
            }
            if allowed(problem, machine, point) is None:
                yield point
                break


@functools.lru_cache(maxsize=64)
def best_point(problem: SparseRecurrent, machine: Machine) -> tuple[tuple[str, int], ...]:
    """Of the likely points the one that takes the fewest `cycles`.

    Raises `NotApplicable` if no cluster keeps the layer's weights.
    """
    found = list(likely_points(problem, machine))
    if not found:
        row = longest_row(problem)
        raise NotApplicable(f"no cluster keeps {row} entries in each row of hidden={problem.hidden}")
    return tuple(min(found, key=lambda point: cycles(ClusterExtents.of(problem, point), machine)).items())
