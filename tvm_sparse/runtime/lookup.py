"""Which decisions a problem gets on a machine, from what is tuned: exact, bucket, nearby or fallback.

Pure: it knows candidates and the problems that they won, and asks the spaces; it loads and compiles nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from ..core.registry import parse

HOW = ("exact", "bucket", "nearby", "fallback")


@dataclass(frozen=True)
class Known:
    """What won for one problem."""

    candidate: Candidate
    figures: Mapping[str, Any]
    at_hand: bool = False  # a library of it lies in an exported folder, so that nothing has to be built
    too_large: str | None = None  # why this machine cannot launch that library


@dataclass(frozen=True)
class Choice:
    """The decisions for a problem, and where they come from."""

    how: str  # one of HOW
    why: str
    compiled_for: Problem  # the batch of this problem may differ from the call's
    candidate: Candidate
    record: str | None  # key of the problem that it won; None for the fallback
    figures: Mapping[str, Any]


def choose(problem: Problem, machine: Machine, known: Mapping[str, Known]) -> Choice:
    """The first of: the problem's own record, that of the next larger batch, the nearest one's, the fallback.

    A record whose decisions are no point of its template's space here (another number of multiprocessors, another
    version of the template) is passed over, and the reason is part of the choice's. A library at hand runs as it is, if
    the machine can launch it.
    """
    passed_over = ""

    def usable(key: str, found: Known, wanted: Problem) -> bool:
        nonlocal passed_over
        reason = found.too_large if found.at_hand else spaces.refusal(found.candidate, wanted, machine)
        if reason and not passed_over:
            passed_over = f"; the record of {key} is passed over: {reason}"
        return reason is None

    if (own := known.get(problem.key)) is not None and usable(problem.key, own, problem):
        return Choice("exact", "tuned for this very problem", problem, own.candidate, problem.key, own.figures)

    others: dict[Problem, Known] = {}
    for key, found in known.items():
        try:
            other = parse(key)
        except ProblemError:
            continue  # recorded by a version whose problems had other axes
        if type(other) is type(problem) and other != problem:
            others[other] = found

    larger = [
        o for o in others if o.with_batch(problem.batch_extent) == problem and o.batch_extent > problem.batch_extent
    ]
    for other in sorted(larger, key=lambda o: o.batch_extent):
        if usable(other.key, others[other], other):
            why = f"the next larger {problem.batch_axis} that was tuned is {other.batch_extent}{passed_over}"
            return Choice("bucket", why, other, others[other].candidate, other.key, others[other].figures)

    by_distance = sorted((d, o.key, o) for o in others if (d := problem.distance(o)) is not None)
    for _, key, other in by_distance:
        candidate = others[other].candidate
        if spaces.refusal(candidate, problem, machine) is None:
            same = other.with_batch(problem.batch_extent) == problem
            why = f"not tuned; the decisions are those of {other.typed}, the most like it{passed_over}"
            return Choice("nearby", why, other if same else problem, candidate, key, others[other].figures)
    why = f"not tuned, nor anything like it on {machine.arch}; the decisions are a template's default{passed_over}"
    return Choice("fallback", why, problem, spaces.fallback(problem, machine), None, {})


def same_program(key: str, problem: Problem) -> bool:
    """Whether a candidate's program for the problem of `key` is its program for `problem`."""
    try:
        other = parse(key)
    except ProblemError:
        return False
    free = {problem.batch_axis, *problem.data_axes}
    return type(other) is type(problem) and all(
        other.axes[name] == value for name, value in problem.axes.items() if name not in free
    )
