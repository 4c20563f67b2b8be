"""The space of `shared_counts`. Loads no compiler."""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from ...lsh.extents import Room
from ...lsh.spaces import count_extents, count_refusal, count_table, crowded_point, likely_points


def space(problem: LshLookup, machine: Machine) -> Table:
    table = count_table(machine)
    if not any(likely_points(problem, table, partial(allowed, problem, machine))):
        raise NotApplicable(f"vocab={problem.vocab} exceeds shared memory, however divided")
    return table


def allowed(problem: LshLookup, machine: Machine, decisions: Decisions) -> str | None:
    e = count_extents(problem, decisions)
    return count_refusal(problem, machine, e, Room.of(count=e))


def default(problem: LshLookup, machine: Machine) -> Decisions:
    """Large clusters for few rows; for more rows than these leave multiprocessors for, `crowded_point`."""
    refused = partial(allowed, problem, machine)
    points = list(likely_points(problem, space(problem, machine), refused))
    return crowded_point(problem, machine, points, refused) or points[0]
