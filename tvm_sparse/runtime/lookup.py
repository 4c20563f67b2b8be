"""Which decisions a problem gets on a machine, from what is tuned and what is built.

Pure: it knows candidates and the problems that they won, and asks the spaces; it loads and compiles nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..artifacts.manifest import HOW
from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from ..core.registry import parse

if TYPE_CHECKING:  # where a record or a library decides, nothing of records is imported
    from ..records.predictor import Predictor

# Which of these are no miss, by the name of a policy.
POLICIES = {"exact": HOW[:2], "nearest": HOW[:5], "any": HOW}

# Octaves (`Problem.distance`) up to which a record that the model was not trained on comes before it.
LIKE = 1.0
# Octaves between problems that differ in which of the two dtypes of 16 bits they have. On a GPU decisions of the one
# suit the other: of problems that were tuned in both they lost 0.3 % in the mean, and 4 % at most (way "twin" of
# scripts/study_prediction.py).
HALVES, BETWEEN_HALVES = ("float16", "bfloat16"), 0.1
# How many times as large the batch of a bucket may be where there is a model that knows its record. Decisions for 4000
# rows are none for 10: what the model takes there was up to 1.6x as fast (scripts/study_prediction.py).
BUCKET = 4


@dataclass(frozen=True)
class Known:
    """What won for one problem."""

    candidate: Candidate
    figures: Mapping[str, Any]
    at_hand: bool = False  # a library of it lies in an exported folder, so that nothing has to be built
    unfit: str | None = None  # why this machine cannot launch that library


@dataclass(frozen=True)
class Built:
    """A kernel that lies in a folder, whatever chose its decisions."""

    problem: str  # its key
    candidate: Candidate
    chosen: str  # one of HOW
    figures: Mapping[str, Any]
    distance: int = 0  # `core.machine.suitability` of its architecture


@dataclass(frozen=True)
class Evidence:
    """What is known when a problem is looked up.

    `records`: by key, this architecture's. `borrowed`: another one's, `lender`, where this one has none of the
    operator. `built`: kernels at hand that this machine can launch. `compiles`: whether others can be made.
    `predictor`: reads this architecture's model of the operator, if there is one.
    """

    records: Mapping[str, Known] = field(default_factory=dict)
    borrowed: Mapping[str, Known] = field(default_factory=dict)
    lender: str = ""
    built: Sequence[Built] = ()
    compiles: bool = True
    predictor: Callable[[], Predictor | None] = lambda: None


@dataclass(frozen=True)
class Choice:
    """The decisions for a problem, and where they come from."""

    how: str  # one of HOW
    why: str
    compiled_for: Problem  # the batch of this problem may differ from the call's
    candidate: Candidate
    record: str | None  # key of the problem that it won; None if predicted, and for the fallback
    figures: Mapping[str, Any]


def choose(problem: Problem, machine: Machine, evidence: Evidence) -> Choice:
    """The first of: the problem's own record, that of the next larger batch, a kernel built for it at a like batch,
    what a model predicts, the nearest problem's record, another architecture's, the fallback.

    The model comes before a batch more than `BUCKET` times as large, if it knows that record and no library of it is at
    hand, and behind what `_by_model` says.

    A record whose decisions are no point of its template's space here (another number of multiprocessors, another
    version of the template) is passed over, and the reason is part of the choice's. A library at hand runs as it is, if
    the machine can launch it. Where nothing compiles, only what is at hand is chosen, if anything is.
    """
    passed_over: list[str] = []
    records = evidence.records
    if not evidence.compiles:
        records = {key: known for key, known in records.items() if known.at_hand}
    found = _by_record(problem, machine, records, passed_over)
    if found is not None and found.how != "nearby" and not _far(problem, found, evidence):
        return found
    near = found if evidence.compiles else None
    found = _by_library(problem, evidence.built, machine, passed_over, anything=not evidence.compiles)
    if found is None and evidence.compiles:
        found = _by_model(problem, machine, evidence, near, passed_over) or near
    if found is None and evidence.compiles:
        found = _by_record(problem, machine, evidence.borrowed, passed_over, adapts=True)
        if found is not None:
            why = f"not tuned on {machine.arch}; the decisions are those of {_typed(found.record)} on {evidence.lender}"
            if evidence.borrowed[found.record or ""].candidate != found.candidate:
                why += ", but for what this one lacks"
            found = Choice("borrowed", why, found.compiled_for, found.candidate, found.record, found.figures)
    if found is None:
        why = f"not tuned, nor anything like it on {machine.arch}; the decisions are a template's default"
        why += "".join(passed_over)
        found = fallback(problem, machine, why)
    return found


def fallback(
    problem: Problem, machine: Machine, why: str, *, cooperative: bool = True, refused: Collection[Candidate] = ()
) -> Choice:
    """A template's default, as `spaces.fallback` says."""
    return Choice("fallback", why, problem, spaces.fallback(problem, machine, cooperative, refused), None, {})


def _by_record(
    problem: Problem, machine: Machine, known: Mapping[str, Known], passed_over: list[str], *, adapts: bool = False
) -> Choice | None:
    """By a record of the problem, of a larger batch, or of the problem most like it; `adapts`: as near as it gets."""

    def fitting(found: Known, wanted: Problem) -> tuple[Candidate | None, str | None]:
        if found.at_hand:
            candidate, reason = found.candidate, found.unfit
        else:
            candidate = spaces.built_here(found.candidate, wanted, machine)
            reason = spaces.refusal(candidate, wanted, machine)
        if reason is None:
            return candidate, None
        return (spaces.adapted(found.candidate, wanted, machine) if adapts else None), reason

    def usable(key: str, found: Known, wanted: Problem) -> Candidate | None:
        candidate, reason = fitting(found, wanted)
        if candidate is None and not passed_over:
            passed_over.append(f"; the record of {key} is passed over: {reason}")
        return candidate

    own = known.get(problem.key)
    if own is not None and (candidate := usable(problem.key, own, problem)) is not None:
        why = "tuned for this very problem"
        if "strategy" in own.figures:  # a few candidates were timed, and nothing was searched
            why = f"measured here: the fastest of a few candidates on {own.figures['machine']}"
        if candidate != own.candidate:
            why += ", on a CPU with instructions that this one lacks"
        return Choice("exact", why, problem, candidate, problem.key, own.figures)

    others: dict[Problem, Known] = {}
    for key, found in known.items():
        other = _parsed(key, problem)
        if other is not None and other != problem:
            others[other] = found

    larger = [o for o in others if apart_in_batch(o, problem) and o.batch_extent > problem.batch_extent]
    for other in sorted(larger, key=lambda o: o.batch_extent):
        if (candidate := usable(other.key, others[other], other)) is not None:
            why = f"the next larger {problem.batch_axis} that was tuned is {other.batch_extent}{''.join(passed_over)}"
            return Choice("bucket", why, other, candidate, other.key, others[other].figures)

    by_distance = sorted((d, o.key, o) for o in others if (d := octaves(problem, o, machine)) is not None)
    for _, key, other in by_distance:
        known_as = Known(others[other].candidate, others[other].figures)  # of another problem a library is no help
        candidate, _ = fitting(known_as, problem)
        if candidate is not None:
            same = apart_in_batch(other, problem)
            why = f"not tuned; the decisions are those of {other.typed}, the most like it{''.join(passed_over)}"
            return Choice("nearby", why, other if same else problem, candidate, key, others[other].figures)
    return None


def apart_in_batch(one: Problem, other: Problem) -> bool:
    """Whether two problems of an operator differ in nothing but their batch, if in that."""
    return all(other.axes[name] == value for name, value in one.axes.items() if name != one.batch_axis)


def with_batch(problem: Problem, extent: int) -> Problem | None:
    """The problem at another batch; None where no problem has it: its arrays would be too large to be counted."""
    try:
        return problem.with_batch(extent)
    except ProblemError:
        return None


def octaves(problem: Problem, other: Problem, machine: Machine) -> float | None:
    """`Problem.distance`, on a GPU also between the two dtypes of 16 bits."""
    away = problem.distance(other)
    if away is not None or machine.kind != "cuda" or (twin := twin_of(other)) is None:
        return away
    away = problem.distance(twin)
    return None if away is None else away + BETWEEN_HALVES


def twin_of(problem: Problem) -> Problem | None:
    """The same problem in the other dtype of 16 bits; None of another dtype."""
    dtype = problem.axes.get("dtype")
    if dtype not in HALVES:
        return None
    return dataclasses.replace(problem, dtype=HALVES[1 - HALVES.index(dtype)])  # type: ignore[call-arg]


def _far(problem: Problem, bucket: Choice, evidence: Evidence) -> bool:
    """Whether the model comes before a record: of a batch much larger, which it knows, and not built."""
    if bucket.compiled_for.batch_extent <= BUCKET * problem.batch_extent or not evidence.compiles:
        return False
    predictor, record = evidence.predictor(), bucket.record or ""
    return predictor is not None and record in predictor.problems and not evidence.records[record].at_hand


def _by_model(
    problem: Problem, machine: Machine, evidence: Evidence, near: Choice | None, passed_over: list[str]
) -> Choice | None:
    """What the model predicts.

    None without a model, and where the record of `near` says more: of this very problem in the other dtype of 16 bits,
    or one that the model was not trained on, of a problem much like this.
    """
    predictor = evidence.predictor()
    if predictor is None:
        return None
    if near is not None and near.record is not None:
        away = octaves(problem, parse(near.record), machine)
        if away == BETWEEN_HALVES or (away is not None and away <= LIKE and near.record not in predictor.problems):
            return None
    found = predictor.choose(problem, machine)
    if found is None:
        return None
    why = f"not tuned; the best of {found.ranked} points by {predictor.provenance}{''.join(passed_over)}"
    return Choice("predicted", why, found.problem, found.candidate, None, {})


def _by_library(
    problem: Problem, built: Sequence[Built], machine: Machine, passed_over: list[str], *, anything: bool
) -> Choice | None:
    """The best kernel that was built for this problem at another batch.

    With `anything`, where nothing compiles, also at one of less than half, at one that says nothing of this one
    (`Problem.distance`), and for other data: the program is right for any, but its decisions were made for those.
    """

    def rank(one: tuple[Problem, Built]) -> tuple[int, int, float, bool, int]:
        other, library = one
        smaller = other.batch_extent < problem.batch_extent
        apart = abs(other.batch_extent - problem.batch_extent)
        here = with_batch(other, problem.batch_extent)
        of_data = None if here is None else here.distance(problem)
        return library.distance, HOW.index(library.chosen), math.inf if of_data is None else of_data, smaller, apart

    same = [
        (other, library)
        for library in built
        if (other := _parsed(library.problem, problem)) is not None
        and (anything or all(other.axes[name] == problem.axes[name] for name in problem.data_axes))
        and _one_program(other, problem)
        and (anything or (2 * other.batch_extent >= problem.batch_extent and problem.distance(other) is not None))
    ]
    if not same:
        return None
    other, library = min(same, key=rank)
    record, arch = library.figures.get("problem"), library.figures.get("arch", machine.arch)
    how = library.chosen
    if record is None:
        decisions = "predicted decisions" if how == "predicted" else "a template's default decisions"
        why = f"not tuned; the library at hand has {decisions}"
    elif arch == machine.arch:
        how = "nearby" if how == "exact" else how
        why = f"not tuned; the library at hand has the decisions of {_typed(record)}"
    else:
        how = "borrowed"
        why = f"not tuned on {machine.arch}; the library at hand has the decisions of {_typed(record)} on {arch}"
    return Choice(how, why + "".join(passed_over), other, library.candidate, record, library.figures)


def _typed(key: str | None) -> str:
    try:
        return parse(key).typed if key else ""
    except ProblemError:  # of a manifest, which may have been written by a version with other axes
        return str(key)


def _parsed(key: str, like: Problem) -> Problem | None:
    """The problem of a key, if it is of the same operator as another."""
    if key.partition("/")[0] != like.operator:
        return None
    try:
        found = parse(key)
    except ProblemError:
        return None  # recorded by a version whose problems had other axes
    return found if type(found) is type(like) else None


def same_program(key: str, problem: Problem) -> bool:
    """Whether a candidate's program for the problem of `key` is its program for `problem`."""
    other = _parsed(key, problem)
    return other is not None and _one_program(other, problem)


def _one_program(one: Problem, other: Problem) -> bool:
    free = {one.batch_axis, *one.data_axes}
    return all(other.axes[name] == value for name, value in one.axes.items() if name not in free)
