"""The space of `shared_counts`. Loads no compiler."""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from ...lsh.extents import Room
from ...lsh.spaces import count_extents, count_refusal, count_table, likely_points


def space(problem: LshLookup, machine: Machine) -> Table:
    table = count_table(machine)
    if not any(likely_points(problem, table, partial(allowed, problem, machine))):
        raise NotApplicable(f"vocab={problem.vocab} exceeds shared memory, however divided")
    return table


def allowed(problem: LshLookup, machine: Machine, decisions: Decisions) -> str | None:
    e = count_extents(problem, decisions)
    return count_refusal(problem, machine, e, Room.of(count=e))


def default(problem: LshLookup, machine: Machine) -> Decisions:
    """Large clusters for few rows; for more rows than these leave multiprocessors for, as many thread blocks a row as
    each have one, or the fewest, which then exchange buckets and leave the end to one of them.

    On an H200 50 and 760 rows took 4.6 times as long with clusters of 8 (`scripts/regret.py`, seed 1).
    """
    table, refused = space(problem, machine), partial(allowed, problem, machine)
    points = list(likely_points(problem, table, refused))
    rows, largest = problem.lists * problem.beam, points[0]["cluster"]
    if rows * largest > machine.cores:
        roomy = {"exchange": max(table["exchange"]), "finishers": min(table["finishers"])}
        crowded = [{**point, **roomy} for point in points if point["slices"] == points[0]["slices"]]
        crowded.sort(key=lambda point: (rows * point["cluster"] > machine.cores, -point["cluster"]))
        if rows * crowded[0]["cluster"] > machine.cores:
            crowded.sort(key=lambda point: point["cluster"])
        points = [point for point in crowded if refused(point) is None] or points
    return points[0]
