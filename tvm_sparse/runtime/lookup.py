"""Choosing the decisions for a problem on a machine from tuned records and built libraries.

Without side effects: it compares problems and candidates and queries the spaces; it loads and compiles nothing.
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

if TYPE_CHECKING:  # if a record or a library decides, `records` is not imported
    from ..records import Best
    from ..records.predictor import Predictor

# Ways of look-up that a policy permits, by the policy's name.
POLICIES = {"exact": HOW[:2], "nearest": HOW[:5], "any": HOW}

# Octaves (`Problem.distance`) within which a record has priority over the model if it was not in its training data.
LIKE = 1.0
# Octaves between problems that differ in their 16-bit dtype. On a GPU decisions of one suit the other: for problems
# tuned in both, they lost 0.3 % on average, and at most 4 % (way "twin" of scripts/study_prediction.py). Problems of 16
# and 32 bits are not compared, since a row has twice the bytes.
HALVES, BETWEEN_HALVES, BETWEEN_WIDTHS = ("float16", "bfloat16"), 0.1, 1.0
# Decisions of one problem are used for another only if they are expected to beat the template's default there. It is
# known that they beat the default of their own problem by a factor of e^gain. They are used if this problem's default
# has the same decisions, so that the same two were compared, and gain exceeds `SURE`, and `DOUBT` more for each octave
# between the problems; batches may be at most `BATCHES` octaves apart, and problems `FAR`. For pairs of tuned problems
# on an H200 where both kernels were timed, none of such choices was slower than the default, and their geometric mean
# was 0.81 of its time; without `SURE` 18 % were more than 5 % slower, by up to 1.5 times (scripts/study_transfer.py).
SURE = 0.15
DOUBT, BATCHES, FAR = 0.07, 2.0, 3.0
# Octaves between architectures.
ELSEWHERE = 1.0
# A predicted choice is used if the model expects it to beat the default by a factor of e^CLEAR, and by more than the
# loss it expects of the choice itself: far from its training data the model expects every point to lose. The factor
# must also exceed the loss of its choices for problems left out of its training, so a model trained on few problems
# must predict a large gain.
CLEAR = 0.05
# Problems of which a model must know times of both templates, its choice's and the default's, for its choice to
# replace the default. In `scripts/regret.py` (seeds 1, 7 and 8) models of fewer than 12 problems chose points that took
# 1.2 to 1.9 times as long as the default. For recorded problems that were left out of the training, models of 12 to 24
# problems chose three points that took 1.08 to 1.11 times as long as today's default, and none that was faster; models
# of 50 and more chose 19 points, which took 0.67 to 1.05 times as long. A model of 32 problems, of which two had times
# of `head_warpgroups`, chose points of it that read the embedding once for every 32 rows.
ENOUGH = 24


@dataclass(frozen=True)
class Known:
    """The winner of a tuned problem."""

    candidate: Candidate
    figures: Mapping[str, Any]
    at_hand: bool = False  # a library of it is in an exported folder, so that nothing has to be built
    unfit: str | None = None  # why this machine cannot launch that library
    fallback: Candidate | None = None  # with which it was compared; None if not recorded

    @property
    def gain(self) -> float:
        """ln of the speed-up over the fallback; 0 if that is not recorded."""
        tuned, untuned = self.figures.get("seconds"), self.figures.get("fallback_seconds")
        return math.log(untuned / tuned) if tuned and untuned else 0.0


def known_of(records: Mapping[str, tuple[Best, Mapping[str, Any]]]) -> dict[str, Known]:
    """The winners in the result of `records.queries.best_records`, by key."""
    return {key: Known(best.candidate, figures, fallback=best.fallback) for key, (best, figures) in records.items()}


@dataclass(frozen=True)
class Built:
    """A kernel in a folder, however its decisions were chosen."""

    problem: str  # the problem's key
    candidate: Candidate
    chosen: str  # one of HOW
    figures: Mapping[str, Any]
    distance: int = 0  # `core.machine.suitability` of its architecture


@dataclass(frozen=True)
class Evidence:
    """The records, libraries and rules from which look-up chooses.

    `records`: winners by key, on this architecture. `borrowed`: those on another one, `lender`, if this one has none of
    the operator. `built`: kernels in folders that this machine can launch. `compiles`: whether missing kernels can be
    compiled. `predictor`: reads this architecture's model of the operator, if there is one. `permitted`: the ways of
    look-up (`HOW`) that may be used.
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
    """The decisions for a problem, and their origin."""

    how: str  # one of HOW
    why: str
    compiled_for: Problem  # its batch may differ from the call's
    candidate: Candidate
    record: str | None  # key of the problem whose record it is; None if predicted, and for the fallback
    figures: Mapping[str, Any]


def choose(problem: Problem, machine: Machine, evidence: Evidence) -> Choice:
    """Choose decisions by the first of: the problem's own record, the record of the next larger batch, a kernel built
    for it at a similar batch, the model's prediction, the nearest problem's record, another architecture's record, the
    fallback.

    Decisions of another problem, and predicted ones, are used only if they are expected to beat the fallback (`DOUBT`,
    `CLEAR`), or if the fallback is not permitted.

    A record whose decisions are not a point of its template's space here (another number of multiprocessors, another
    version of the template) is skipped, and the choice's reason says so. An available library is used as it is, if the
    machine can launch it. Without compilation, only available libraries are chosen, if there are any.
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
        like = "".join(judge.doubts or judge.strangers) or f", nor anything like it on {machine.arch}"
        why = f"not tuned{like}; the decisions are a template's default{''.join(passed_over)}"
        found = fallback(problem, machine, why)
    return found


def fallback(
    problem: Problem, machine: Machine, why: str, *, cooperative: bool = True, refused: Collection[Candidate] = ()
) -> Choice:
    """The choice of a template's default, by `spaces.fallback`."""
    return Choice("fallback", why, problem, spaces.fallback(problem, machine, cooperative, refused), None, {})


def of_any_batch(problem: Problem, machine: Machine, refused: Collection[Candidate] = ()) -> Choice:
    """The choice with which a row's result does not depend on its batch, see `spaces.of_any_batch`."""
    compiled_for, candidate = spaces.of_any_batch(problem, machine, refused)
    rows = compiled_for.batch_extent
    why = f"batch_invariant: a template's default for {problem.batch_axis}={rows}, whatever the batch and the records"
    return Choice("fallback", why, compiled_for, candidate, None, {})


@dataclass(frozen=True)
class Judge:
    """Decides whether another problem's decisions are expected to beat the fallback of this one.

    Attributes
    ----------
    lenient
        Accept all decisions.
    adapts
        The records are another architecture's: values that this machine lacks are replaced by the nearest ones.
    doubts
        Why the first record was rejected, for the reason of the fallback.
    strangers
        The same of the first record that is not `comparable`.
    """

    problem: Problem
    machine: Machine
    lenient: bool = False
    adapts: bool = False
    doubts: list[str] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)

    def of_another_architecture(self) -> Judge:
        return dataclasses.replace(self, adapts=True)

    @functools.cached_property
    def default(self) -> Candidate:
        return spaces.fallback(self.problem, self.machine)

    def near(self, other: Problem) -> float | None:
        """The distance to a recorded problem (`octaves`), or None if its decisions are not to be considered: it is too
        far away, or differs in an axis that has no distance.
        """
        away = octaves(self.problem, other, self.machine)
        if away is None or self.lenient:
            return away
        batches = abs(math.log2(self.problem.batch_extent / other.batch_extent))
        return away if away <= FAR and batches <= BATCHES else None

    def comparable(self, other: Problem, known: Known) -> bool:
        """Whether the record was compared with the candidate that is this problem's fallback."""
        if self.lenient:
            return True
        theirs = known.fallback
        if theirs is None:
            theirs = spaces.fallback(other, self.machine)
        if self.adapts and theirs != self.default:
            theirs = spaces.adapted(theirs, self.problem, self.machine)
        if theirs != self.default and not self.strangers:
            self.strangers.append(
                f"; the record of {other.typed}, the most like it, was compared with another default than this one's"
            )
        return theirs == self.default

    def takes(self, other: Problem, known: Known, away: float) -> bool:
        """Whether the decisions of a comparable record are accepted; if not, notes the reason."""
        doubt = SURE + DOUBT * (away + (ELSEWHERE if self.adapts else 0.0))
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
    """Choose by a record of the problem, of a larger batch, or of the most similar problem."""

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
            if "strategy" in own.figures:  # only a few candidates were timed, without a search
                why = f"measured here: the fastest of a few candidates on {own.figures['machine']}"
            if candidate != own.candidate:
                why += ", on a CPU with instructions that this one lacks"
            return Choice("exact", why, problem, candidate, problem.key, own.figures)

    others: dict[Problem, Known] = {}
    for key, found in known.items():
        other = _parsed(key, type(problem))
        if other is not None and other != problem:
            others[other] = found

    larger = [o for o in others if apart_in_batch(o, problem) and o.batch_extent > problem.batch_extent]
    for other in sorted(larger, key=lambda o: o.batch_extent):
        found = others[other]
        away = judge.near(other)
        # An available library needs no compiler, whatever its batch.
        if not found.at_hand and (away is None or not judge.comparable(other, found)):
            continue
        if (candidate := usable(other.key, found, other)) is None:
            continue
        # The default itself cannot be worse than the default.
        if found.at_hand or candidate == judge.default or judge.takes(other, found, away or 0.0):
            why = f"the next larger {problem.batch_axis} that was tuned is {other.batch_extent}{''.join(passed_over)}"
            return Choice("bucket", why, other, candidate, other.key, found.figures)
        break

    by_distance = sorted((d, o.key, o) for o in others if (d := judge.near(o)) is not None)
    for away, key, other in by_distance:
        # A library of another problem cannot be used.
        known_as = dataclasses.replace(others[other], at_hand=False, unfit=None)
        candidate, _ = fitting(known_as, problem)
        if candidate is None or not judge.comparable(other, known_as):
            continue
        if not judge.takes(other, known_as, away):
            return None  # the most similar one says that the default suffices
        same = apart_in_batch(other, problem)
        why = f"not tuned; the decisions are those of {other.typed}, the most like it{''.join(passed_over)}"
        return Choice("nearby", why, other if same else problem, candidate, key, known_as.figures)
    return None


def _as_own(problem: Problem, records: Mapping[str, Known]) -> Mapping[str, Known]:
    """The records; those of problems with the same decisions (`Problem.as_tuned`) also under keys of the problem's own
    form.

    Libraries of those problems do not serve this one.
    """
    like = problem.as_tuned()
    found = dict(records)
    for key, known in records.items():
        other = _parsed(key, type(problem))
        if other is not None and not apart_in_batch(other, problem) and apart_in_batch(other.as_tuned(), like):
            own = with_batch(problem, other.batch_extent)
            if own is not None and own.key not in records:
                found[own.key] = dataclasses.replace(known, at_hand=False, unfit=None)
    return found


def apart_in_batch(one: Problem, other: Problem) -> bool:
    """Whether two problems of an operator differ at most in their batch."""
    return all(other.axes[name] == value for name, value in one.axes.items() if name != one.batch_axis)


def with_batch(problem: Problem, extent: int) -> Problem | None:
    """The problem with another batch; None if that is not valid, since its arrays would be too large."""
    try:
        return problem.with_batch(extent)
    except ProblemError:
        return None


def octaves(problem: Problem, other: Problem, machine: Machine) -> float | None:
    """`Problem.distance`, on a GPU also between the 16-bit dtypes."""
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
    """The same problem in the other 16-bit dtype; None for another dtype."""
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
    """Choose by the model: its best point, or the fallback, if it does not expect the point to be clearly faster.

    None without a model, and if the record of `near` is better evidence: of this problem in the other 16-bit dtype, or
    of a very similar problem that is not in the model's training data.
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
        seen = {name: predictor.seen.get(name, 0) for name in (found.candidate.template, judge.default.template)}
        rarest = min(seen, key=lambda name: seen[name])
        if seen[rarest] < ENOUGH:
            why = f"not tuned; a template's default, as a model knows {rarest} from {seen[rarest]} problems, too few"
            return fallback(problem, machine, why + "".join(passed_over))
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
    """Choose the best kernel that was built for this problem at another batch.

    With `anything`, for processes that do not compile, batches below half of this one, incomparable batches
    (`Problem.distance`) and other data are admitted: the program is right for all of them, but its decisions were not
    made for this problem.
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
        if (other := _parsed(library.problem, type(problem))) is not None
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
    except ProblemError:  # from a manifest that a version with other axes may have written
        return str(key)


@functools.lru_cache(maxsize=1 << 14)
def _parsed(key: str, cls: type[Problem]) -> Problem | None:
    """The problem of a key, if it is of this operator."""
    if key.partition("/")[0] != cls.operator:
        return None
    try:
        found = parse(key)
    except ProblemError:
        return None  # recorded by a version with other axes
    return found if type(found) is cls else None


def same_program(key: str, problem: Problem) -> bool:
    """Whether a candidate's program for the problem of `key` is its program for `problem`."""
    other = _parsed(key, type(problem))
    return other is not None and _one_program(other, problem)


def _one_program(one: Problem, other: Problem) -> bool:
    free = {one.batch_axis, *one.data_axes}
    return all(getattr(other, name) == value for name, value in one.axes.items() if name not in free)
