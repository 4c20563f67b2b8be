"""Plans of tuning runs: the points still to be measured, those that come before the search, and progress."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from ..core.registry import parse
from ..core.template import Table
from ..records import Log, Trial
from ..records.queries import predictor
from . import strategies

# Candidates that are built at the same time: enough to keep the builders busy, few enough to lose to a kill.
BATCH = 16
# One in this many trials measures a winner of a similar problem, before the search begins.
PROVEN_SHARE = 4
# One in this many measures a point that the log's model predicts to be the fastest, up to a maximum in a long run.
PREDICTED_SHARE, MOST_PREDICTED = 2, 8
FINALISTS = 4
FINAL_ROUNDS = 5
# Estimates for a plan until this run has its own times: seconds to build and to measure one candidate.
TYPICAL = {"llvm": (0.5, 0.4), "cuda": (1.0, 0.3)}

Measured = dict[Candidate, float | None]
"""Median seconds of candidates, None for a failure."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a tuning run will do, known before it starts."""

    problem: Problem
    machine: Machine
    templates: Mapping[str, int]  # points of each space; of a very large one, those given to a search
    left_out: Mapping[str, str]  # templates that do not apply, and why
    trials: int  # number of trials to measure now
    paid: int  # number already in the log
    builders: int
    seconds: float  # estimated duration
    named: tuple[str, ...] = ()  # templates that were named; if empty, all but those for comparison
    fixed: Table = field(default_factory=dict)  # decisions with given values
    strategy: str = strategies.DEFAULT
    fresh: bool = False  # whether every timed call follows a kernel that has just written the batch's inputs
    drawn: tuple[str, ...] = ()  # templates whose points are sampled (`spaces.searchable`)
    limit: float | None = None  # seconds to check and to time a candidate; None: `workbench.MEASURE_TIMEOUT`
    structure: str | None = None  # of the timed inputs; None: `Problem.tuned`
    proposed: tuple[Candidate, ...] = ()  # points that are measured directly after the fallback
    # Takes part in the final whatever its trials took, together with the problem that it is compiled for, which may
    # differ in its batch. It wins only if it is a point of this problem's spaces.
    rivals: Mapping[Candidate, Problem] = field(default_factory=dict)
    rounds: int | None = None  # of the final; None: `FINAL_ROUNDS`
    given: int = 0  # if not 0: only the fallback and `proposed` are measured, this many at a time, without a search

    @property
    def size(self) -> int:
        return sum(self.templates.values())

    @property
    def trial_seconds(self) -> float:
        """Estimated seconds of one trial of the search."""
        build, measure = TYPICAL[self.machine.kind]
        return build / self.builders + measure

    @property
    def final_rounds(self) -> int:
        """Number of rounds in which the best are timed in turn."""
        return FINAL_ROUNDS if self.rounds is None else self.rounds

    @property
    def final_seconds(self) -> float:
        """Estimated seconds of the final."""
        return self.final_rounds * (FINALISTS + 1) * TYPICAL[self.machine.kind][1]


@dataclass
class Progress:
    """The state of a run, for display."""

    plan: Plan
    outcomes: dict[str, int] = field(default_factory=dict)
    best: Candidate | None = None
    best_seconds: float = float("inf")
    fallback_seconds: float | None = None
    measured: int = 0
    ends: list[float] = field(default_factory=list)  # time at which each trial ended
    last: Trial | None = None
    phase: str = "search"
    final_share: float = 0.0  # finished share of the final
    medians: dict[Candidate, float] = field(default_factory=dict)  # from the final, once it has ended
    search_seconds: float = 0.0  # spent on the search itself: its start and its proposals

    @property
    def slowness(self) -> float:
        """Duration of the last two batches, as a multiple of the estimate.

        Their unmeasured trials count with the estimate. Two batches are needed because a batch is built before it is
        measured, which makes the pace of a single one uneven. The first trial is left out, since it includes starting
        the processes.
        """
        ends = self.ends[-2 * BATCH - 1 :]
        if not ends:
            return 1.0
        counted, planned = len(ends) - 1, self.plan.trial_seconds
        assumed = 2 * BATCH - counted
        return (ends[-1] - ends[0] + assumed * planned) / ((counted + assumed) * planned)

    @property
    def seconds_left(self) -> float:
        trials = max(self.plan.trials - self.measured, 0) if self.phase == "search" else 0
        return self.slowness * (trials * self.plan.trial_seconds + (1 - self.final_share) * self.plan.final_seconds)


def uncounted(problem: Problem, machine: Machine, trials: int, builders: int, **fields: Any) -> Plan:
    """A plan of `trials` trials without the size of its space, for given points and for runs with a time limit.

    `fields`: other fields of `Plan`.
    """
    return Plan(problem, machine, {}, {}, trials, 0, builders, 0.0, **fields)


def make_plan(
    problem: Problem,
    machine: Machine,
    trials: int,
    log: Log,
    builders: int,
    named: Collection[str] = (),
    fixed: Table | None = None,
    strategy: str = strategies.DEFAULT,
    *,
    fresh: bool = False,
    known: Mapping[str, Measured] | None = None,
) -> Plan:
    """Make a plan: count the points to search, of the named templates if any are named, and those already measured.

    `known` is the result of `recorded` for the log, which plans of many problems read once.

    Raises
    ------
    ProblemError
        If inputs are to be fresh on a machine that is not a GPU.
    """
    if fresh and machine.kind != "cuda":
        raise ProblemError(f"inputs: fresh ones are for GPUs, and {machine.arch} is a CPU; expected hot")
    tables, reasons = spaces.searched(problem, machine, named, fixed)
    sizes = dict.fromkeys(tables, 0)
    for candidate in spaces.searchable(problem, machine, tables):
        sizes[candidate.template] += 1
    # The fallback is measured in every run.
    fallback = spaces.fallback(problem, machine)
    size = sum(sizes.values()) + (not spaces.among(fallback, tables))
    there = (recorded(log, problem, fresh=fresh) if known is None else known).get(problem.key, {})
    paid = sum(candidate == fallback or spaces.among(candidate, tables) for candidate in there)
    left = max(0, min(trials, size) - paid)
    plan = Plan(
        problem,
        machine,
        sizes,
        reasons,
        left,
        paid,
        builders,
        0.0,
        tuple(named),
        fixed or {},
        strategy,
        fresh,
        drawn=tuple(spaces.drawn(tables)),
    )
    return dataclasses.replace(plan, seconds=left * plan.trial_seconds + plan.final_seconds)


def recorded(log: Log, problem: Problem | None = None, *, fresh: bool = False) -> dict[str, Measured]:
    """The log's candidates at their templates' present versions, by problem key, for one problem or all.

    They are from trials with fresh inputs, or from all others.
    """
    known: dict[str, Measured] = {}
    for trial in (log.read() if problem is None else log.of_problem(problem.key)).timed(fresh):
        if trial.outcome != "environment":
            with contextlib.suppress(KeyError):
                if spaces.find(trial.candidate.template).version == trial.candidate.version:
                    seconds = trial.median if trial.outcome == "ok" else None
                    known.setdefault(trial.problem, {})[trial.candidate] = seconds
    return known


def winners_nearby(
    problem: Problem, machine: Machine, tables: Mapping[str, Table], log: Log, *, itself: bool = True
) -> list[Candidate]:
    """Winners of this operator's problems that are points of these spaces, of the most similar problems first.

    Winners at earlier versions of a template count as well, including those of the problem itself if `itself`, since a
    good choice for a shape often outlives a change of the kernel. Rankings with hot and fresh inputs both count, since
    their times are not used.
    """

    found: list[tuple[float, Candidate]] = []
    for key, best in log.best().items():
        if key == problem.key and not itself:
            continue
        with contextlib.suppress(KeyError, ValueError):  # of an operator or a template that was removed
            template, values = spaces.find(best.candidate.template), best.candidate.values
            if spaces.among(best.candidate, tables) and not template.point(problem, machine, values):
                distance = problem.distance(parse(key))  # None for one of another dtype: last
                found.append((math.inf if distance is None else distance, template.candidate(values)))
    return list(dict.fromkeys(candidate for _, candidate in sorted(found, key=lambda pair: pair[0])))


def predicted(problem: Problem, machine: Machine, tables: Mapping[str, Table], log: Log, count: int) -> list[Candidate]:
    """The points of these spaces that the log's model predicts to be fastest; their trials show the model's error."""
    model = predictor((log.root,), machine.arch, problem.operator)
    if model is None:
        return []
    chosen = model.choose(problem, machine)  # look-up's choice, ranked for a larger batch
    found = dict.fromkeys([*([chosen.candidate] if chosen else []), *model.fastest(problem, machine, count)])
    there = [c for c in found if spaces.among(c, tables) and spaces.refusal(c, problem, machine) is None]
    return there[:count]


def before_search(
    problem: Problem, machine: Machine, tables: Mapping[str, Table], log: Log, trials: int
) -> list[Candidate]:
    """The points that a run of `trials` trials measures before its search, without duplicates, the fallback first.

    They are the fallback and, as far as they are in the tables, every template's default, the predictions of a model of
    the log's trials, and winners of other problems.
    """
    points = (spaces.default(spaces.find(name), table, problem, machine) for name, table in tables.items())
    defaults = [point for point in points if spaces.among(point, tables)]
    count = max(1, min(trials // PREDICTED_SHARE, MOST_PREDICTED))
    found = dict.fromkeys(
        [spaces.fallback(problem, machine), *defaults, *predicted(problem, machine, tables, log, count)]
    )
    proven = [point for point in winners_nearby(problem, machine, tables, log) if point not in found]
    return [*found, *proven[: trials // PROVEN_SHARE]]


def covered(
    problem: Problem,
    machine: Machine,
    tables: Mapping[str, Table],
    known: Mapping[Candidate, float | None],
    trials: int,
) -> bool:
    """Whether the trials suffice for all remaining points, so that no search is needed."""
    most = itertools.islice(spaces.searchable(problem, machine, tables), trials + len(known) + 1)
    return sum(candidate not in known for candidate in most) <= trials
