"""The space of `shared_counts`. Loads no compiler."""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from ...lsh.extents import Room
from ...lsh.spaces import count_extents, count_refusal, count_table, usual_point


def space(problem: LshLookup, machine: Machine) -> Table:
    table = count_table(machine)
    if usual_point(problem, machine, table, partial(allowed, problem, machine)) is None:
        raise NotApplicable(f"vocab={problem.vocab} exceeds shared memory, however divided")
    return table


def allowed(problem: LshLookup, machine: Machine, decisions: Decisions) -> str | None:
    e = count_extents(problem, decisions)
    return count_refusal(problem, machine, e, Room.of(count=e))


def default(problem: LshLookup, machine: Machine) -> Decisions:
    found = usual_point(problem, machine, space(problem, machine), partial(allowed, problem, machine))
    assert found is not None  # as `space` has found
    return found
