"""The space of `row_clusters`. Loads no compiler."""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from ...lsh.extents import WARP_SUMS, CompactExtents, CountExtents, HashExtents, Room
from ...lsh.spaces import count_extents, count_refusal, count_table, usual_point


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
    if usual_point(problem, machine, table, partial(allowed, problem, machine)) is None:
        raise NotApplicable(f"hidden={problem.hidden} and vocab={problem.vocab} exceed shared memory, however divided")
    return table


def allowed(problem: LshCandidates, machine: Machine, decisions: Decisions) -> str | None:
    sizes = extents(problem, decisions)
    return count_refusal(problem, machine, sizes[1], Room.of(*sizes))


def default(problem: LshCandidates, machine: Machine) -> Decisions:
    found = usual_point(problem, machine, space(problem, machine), partial(allowed, problem, machine))
    assert found is not None  # as `space` has found
    return found
