"""Which decisions a problem gets on a machine, from what is tuned and what is built.

Pure: it knows candidates and the problems that they won, and asks the spaces; it loads and compiles nothing.
"""

from __future__ import annotations

import dataclasses
import functools
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
    from ..records import Best
    from ..records.predictor import Predictor

# Which of these are no miss, by the name of a policy.
POLICIES = {"exact": HOW[:2], "nearest": HOW[:5], "any": HOW}

# Octaves (`Problem.distance`) up to which a record that the model was not trained on comes before it.
LIKE = 1.0
# Octaves between problems that differ in which of the two dtypes of 16 bits they have. On a GPU decisions of the one
# suit the other: of problems that were tuned in both they lost 0.3 % in the mean, and 4 % at most (way "twin" of
# scripts/study_prediction.py). Between 16 and 32 bits a row has twice the bytes.
HALVES, BETWEEN_HALVES, BETWEEN_WIDTHS = ("float16", "bfloat16"), 0.1, 1.0
# Decisions of one problem serve another one only if they are expected to beat the template's default there. What is
# known is that they beat the default of their own problem, by a factor e^gain. They are taken if this problem's default
# has the same decisions, so that the same two were compared, and gain exceeds `DOUBT` for each octave between the
# problems; of batches at most `BATCHES` octaves apart, and of problems at most `FAR`. Of pairs of tuned problems on an
# H200 where both kernels were timed, 1.3 % of such choices were more than 5 % slower than the default and their
# geometric mean was 0.63 of it; of pairs whose defaults differ, 56 % were slower, by up to 15 times
# (scripts/study_transfer.py).
DOUBT, BATCHES, FAR = 0.07, 2.0, 3.0
# Octaves between architectures.
ELSEWHERE = 1.0
# A predicted choice is taken if the model expects it to beat the default by a factor of e^CLEAR, and by more than what
# it expects the choice itself to lose: far from what it has seen the model expects every point to lose. And by more
# than what its choices lost for problems left out of its training: a model of few problems has to expect much.
CLEAR = 0.05


@dataclass(frozen=True)
class Known:
    """What won for one problem."""

    candidate: Candidate
    figures: Mapping[str, Any]
    at_hand: bool = False  # a library of it lies in an exported folder, so that nothing has to be built
    unfit: str | None = None  # why this machine cannot launch that library
    fallback: Candidate | None = None  # with which it was compared; None where that is not told

    @property
    def gain(self) -> float:
        """ln of how many times as fast as the fallback it was; 0 if that is not told."""
        tuned, untuned = self.figures.get("seconds"), self.figures.get("fallback_seconds")
        return math.log(untuned / tuned) if tuned and untuned else 0.0


def known_of(records: Mapping[str, tuple[Best, Mapping[str, Any]]]) -> dict[str, Known]:
    """What `records.queries.best_records` found, by key."""
    return {key: Known(best.candidate, figures, fallback=best.fallback) for key, (best, figures) in records.items()}


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
    `predictor`: reads this architecture's model of the operator, if there is one. `permitted`: the ways that may be
    taken, of `HOW`.
    """

    records: Mapping[str, Known] = field(default_factory=dict)
    borrowed: Mapping[str, Known] = field(default_factory=dict)
    lender: str = ""
    built: Sequence[Built] = ()
    compiles: bool = True
    predictor: Callable[[], Predictor | None] = lambda: None
    permitted: Sequence[str] = HOW


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

    Decisions of another problem, and predicted ones, are taken where they are expected to beat the fallback (`DOUBT`,
    `CLEAR`). Where the fallback is not permitted they are taken anyway.

    A record whose decisions are no point of its template's space here (another number of multiprocessors, another
    version of the template) is passed over, and the reason is part of the choice's. A library at hand runs as it is, if
    the machine can launch it. Where nothing compiles, only what is at hand is chosen, if anything is.
    """
    found = _chosen(problem, machine, evidence, Judge(problem, machine))
    if found.how not in evidence.permitted:
        anyway = _chosen(problem, machine, evidence, Judge(problem, machine, lenient=True))
        return anyway if anyway.how in evidence.permitted else found
    return found


def _chosen(problem: Problem, machine: Machine, evidence: Evidence, judge: Judge) -> Choice:
    passed_over: list[str] = []
    records = evidence.records
    records = _as_own(problem, records) if evidence.compiles else {k: one for k, one in records.items() if one.at_hand}
    found = _by_record(problem, machine, records, passed_over, judge)
    if found is not None and found.how != "nearby":
        return found
    near = found if evidence.compiles else None
    found = _by_library(problem, evidence.built, machine, passed_over, anything=not evidence.compiles)
    if found is None and evidence.compiles:
        found = _by_model(problem, machine, evidence, near, passed_over, judge) or near
    if found is None and evidence.compiles:
        found = _by_record(problem, machine, evidence.borrowed, passed_over, judge.of_another_architecture())
        if found is not None:
            why = f"not tuned on {machine.arch}; the decisions are those of {_typed(found.record)} on {evidence.lender}"
            if evidence.borrowed[found.record or ""].candidate != found.candidate:
                why += ", but for what this one lacks"
            found = Choice("borrowed", why, found.compiled_for, found.candidate, found.record, found.figures)
    if found is None:
        like = "".join(judge.doubts) or f", nor anything like it on {machine.arch}"
        why = f"not tuned{like}; the decisions are a template's default{''.join(passed_over)}"
        found = fallback(problem, machine, why)
    return found


def fallback(
    problem: Problem, machine: Machine, why: str, *, cooperative: bool = True, refused: Collection[Candidate] = ()
) -> Choice:
    """A template's default, as `spaces.fallback` says."""
    return Choice("fallback", why, problem, spaces.fallback(problem, machine, cooperative, refused), None, {})


@dataclass(frozen=True)
class Judge:
    """Says whether decisions of another problem are expected to beat the fallback of this one.

    Attributes
    ----------
    lenient
        All are taken.
    adapts
        Records are another architecture's: decisions that this machine lacks take the nearest value here.
    doubts
        Why the first one was not taken, for the reason of a fallback.
    """

    problem: Problem
    machine: Machine
    lenient: bool = False
    adapts: bool = False
    doubts: list[str] = field(default_factory=list)

    def of_another_architecture(self) -> Judge:
        return dataclasses.replace(self, adapts=True)

    @functools.cached_property
    def default(self) -> Candidate:
        return spaces.fallback(self.problem, self.machine)

    def near(self, other: Problem) -> float | None:
        """Octaves to a problem whose decisions may be asked about; None if it is too far, or of another kind."""
        away = octaves(self.problem, other, self.machine)
        if away is None or self.lenient:
            return away
        batches = abs(math.log2(self.problem.batch_extent / other.batch_extent))
        return away if away <= FAR and batches <= BATCHES else None

    def comparable(self, other: Problem, known: Known) -> bool:
        """Whether what a record was compared with is this problem's fallback."""
        if self.lenient:
            return True
        theirs = known.fallback
        if theirs is None:
            theirs = spaces.fallback(other, self.machine)
        if self.adapts and theirs != self.default:
            theirs = spaces.adapted(theirs, self.problem, self.machine)
        return theirs == self.default

    def takes(self, other: Problem, known: Known, away: float) -> bool:
        """Whether the decisions of a comparable record are taken; notes why not."""
        doubt = DOUBT * (away + (ELSEWHERE if self.adapts else 0.0))
        if self.lenient or known.gain > doubt:
            return True
        if not self.doubts:
            self.doubts.append(
                f"; the record of {other.typed}, the most like it, is {math.exp(known.gain):.2f}x the default's speed"
                " there, too little to count on here"
            )
        return False


def _by_record(
    problem: Problem, machine: Machine, known: Mapping[str, Known], passed_over: list[str], judge: Judge
) -> Choice | None:
    """By a record of the problem, of a larger batch, or of the problem most like it."""

    def fitting(found: Known, wanted: Problem) -> tuple[Candidate | None, str | None]:
        if found.at_hand:
            candidate, reason = found.candidate, found.unfit
        else:
            candidate = spaces.built_here(found.candidate, wanted, machine)
            reason = spaces.refusal(candidate, wanted, machine)
        if reason is None:
            return candidate, None
        return (spaces.adapted(found.candidate, wanted, machine) if judge.adapts else None), reason

    def usable(key: str, found: Known, wanted: Problem) -> Candidate | None:
        candidate, reason = fitting(found, wanted)
        if candidate is None and not passed_over:
            passed_over.append(f"; the record of {key} is passed over: {reason}")
        return candidate

    own = known.get(problem.key)
    if own is not None and (candidate := usable(problem.key, own, problem)) is not None:
        if not judge.adapts or (judge.comparable(problem, own) and judge.takes(problem, own, 0.0)):
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
        found = others[other]
        away = judge.near(other)
        # A library at hand needs no compiler, whatever its batch.
        if not found.at_hand and (away is None or not judge.comparable(other, found)):
            continue
        if (candidate := usable(other.key, found, other)) is None:
            continue
        # The default itself is no worse than the default.
        if found.at_hand or candidate == judge.default or judge.takes(other, found, away or 0.0):
            why = f"the next larger {problem.batch_axis} that was tuned is {other.batch_extent}{''.join(passed_over)}"
            return Choice("bucket", why, other, candidate, other.key, found.figures)
        break

    by_distance = sorted((d, o.key, o) for o in others if (d := judge.near(o)) is not None)
    for away, key, other in by_distance:
        # Of another problem a library is no help.
        known_as = dataclasses.replace(others[other], at_hand=False, unfit=None)
        candidate, _ = fitting(known_as, problem)
        if candidate is None or not judge.comparable(other, known_as):
            continue
        if not judge.takes(other, known_as, away):
            return None  # the one most like it says that the default will do
        same = apart_in_batch(other, problem)
        why = f"not tuned; the decisions are those of {other.typed}, the most like it{''.join(passed_over)}"
        return Choice("nearby", why, other if same else problem, candidate, key, known_as.figures)
    return None


def _as_own(problem: Problem, records: Mapping[str, Known]) -> Mapping[str, Known]:
    """Records, and those whose decisions are the problem's own (`Problem.as_tuned`) under keys like its own, too.

    What lies in a folder for one of these is no library of the problem.
    """
    like = problem.as_tuned()
    found = dict(records)
    for key, known in records.items():
        other = _parsed(key, problem)
        if other is not None and not apart_in_batch(other, problem) and apart_in_batch(other.as_tuned(), like):
            own = with_batch(problem, other.batch_extent)
            if own is not None and own.key not in records:
                found[own.key] = dataclasses.replace(known, at_hand=False, unfit=None)
    return found


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
    """`Problem.distance`, on a GPU also between dtypes."""
    away = problem.distance(other)
    if away is not None or machine.kind != "cuda":
        return away
    mine, theirs = problem.axes.get("dtype"), other.axes.get("dtype")
    if mine is None or theirs is None or mine == theirs:
        return None
    alike = _in_dtype(other, mine)
    away = None if alike is None else problem.distance(alike)
    if away is None:
        return None
    return away + (BETWEEN_HALVES if {mine, theirs} == set(HALVES) else BETWEEN_WIDTHS)


def twin_of(problem: Problem) -> Problem | None:
    """The same problem in the other dtype of 16 bits; None of another dtype."""
    dtype = problem.axes.get("dtype")
    return _in_dtype(problem, HALVES[1 - HALVES.index(dtype)]) if dtype in HALVES else None


def _in_dtype(problem: Problem, dtype: str) -> Problem | None:
    try:
        return dataclasses.replace(problem, dtype=dtype)  # type: ignore[call-arg]
    except ProblemError:
        return None


def _by_model(
    problem: Problem,
    machine: Machine,
    evidence: Evidence,
    near: Choice | None,
    passed_over: list[str],
    judge: Judge,
) -> Choice | None:
    """What the model predicts: its choice, or the fallback, if it does not expect the choice to be clearly faster.

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
    if found.candidate != judge.default and not judge.lenient:
        said, default = predictor.said(problem, machine, (found.candidate, judge.default))
        if default is None or said is None or default - said <= max(CLEAR, said, math.log(predictor.loss)):
            why = f"not tuned; a template's default, as the best of {found.ranked} points is not expected to be clearly"
            why += f" faster by {predictor.provenance}"
            return fallback(problem, machine, why + "".join(passed_over))
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
