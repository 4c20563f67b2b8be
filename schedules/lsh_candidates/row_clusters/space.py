"""The space of `row_clusters`. Loads no compiler."""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from ...lsh.extents import WARP_SUMS, CompactExtents, CountExtents, HashExtents, Room
from ...lsh.spaces import count_extents, count_refusal, count_table, crowded_point, likely_points


def extents(problem: LshCandidates, decisions: Decisions) -> tuple[HashExtents, CountExtents, CompactExtents]:
    """The sizes of one point's kernel."""
    threads, count = decisions["threads"], count_extents(problem, decisions)
    return (
        HashExtents(problem.hidden, problem.k, problem.units, problem.dtype, threads),
        count,
        CompactExtents(problem.vocab, threads, count.finishers),
    )


def space(problem: LshCandidates, machine: Machine) -> Table:
    if machine.capability < WARP_SUMS:
        raise NotApplicable("sums over a warp need compute capability 8.0")
    table = count_table(machine)
    if not any(likely_points(problem, table, partial(allowed, problem, machine))):
        raise NotApplicable(f"hidden={problem.hidden} and vocab={problem.vocab} exceed shared memory, however divided")
    return table


def allowed(problem: LshCandidates, machine: Machine, decisions: Decisions) -> str | None:
    sizes = extents(problem, decisions)
    return count_refusal(problem, machine, sizes[1], Room.of(*sizes))


def default(problem: LshCandidates, machine: Machine) -> Decisions:
    """For many rows `crowded_point`. For few rows the likely point, if possible with the decisions that were measured
    at beam 12 and 40,000 words: large thread blocks with wide lanes, which find the buckets together and overlap their
    producer kernel.
    """
    table, refused = space(problem, machine), partial(allowed, problem, machine)
    points = list(likely_points(problem, table, refused))
    if crowded := crowded_point(problem, machine, points, refused):
        return crowded
    measured = {**points[0], "threads": 1024, "bucket_lanes": 32, "loads": 4, "exchange": 1, "overlap": 1}
    possible = all(measured[name] in values for name, values in table.items()) and refused(measured) is None
    return measured if possible else points[0]
