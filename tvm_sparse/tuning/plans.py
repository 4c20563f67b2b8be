"""What a tuning run will do: what of a space is paid for, what comes before its search, and how far it is."""

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
# One in this many trials goes to what won for similar problems, before the search begins.
PROVEN_SHARE = 4
# One in this many goes to what the log's model takes for the fastest, but no more than so many of a long run.
PREDICTED_SHARE, MOST_PREDICTED = 2, 8
FINALISTS = 4
FINAL_ROUNDS = 5
# For the estimate of a plan, until this run has its own figures: seconds to build and to measure one candidate.
TYPICAL = {"llvm": (0.5, 0.4), "cuda": (1.0, 0.3)}

Measured = dict[Candidate, float | None]
"""Median seconds of candidates, None for a failure."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run will do, before it does it."""

    problem: Problem
    machine: Machine
    templates: Mapping[str, int]  # points of each template's space, of a very large one those that a search is given
    left_out: Mapping[str, str]  # templates that do not apply, and why
    trials: int  # to be measured now
    paid: int  # in the log already
    builders: int
    seconds: float  # estimate
    named: tuple[str, ...] = ()  # templates that were asked for; none: all but those for comparison
    fixed: Table = field(default_factory=dict)  # decisions whose values were given
    strategy: str = strategies.DEFAULT
    fresh: bool = False  # whether every timed call is behind a kernel that has just written the inputs of the batch
    drawn: tuple[str, ...] = ()  # templates of which a search is given some points (`spaces.searchable`)
    limit: float | None = None  # seconds to check and to time a candidate; None: `workbench.MEASURE_TIMEOUT`
    proposed: tuple[Candidate, ...] = ()  # points that are measured before all but the fallback
    # What takes part in the final whatever its trials took, and the problem that it is compiled for, of which only the
    # batch may be another. It wins only if it is a point of this problem's spaces.
    rivals: Mapping[Candidate, Problem] = field(default_factory=dict)
    rounds: int | None = None  # of the final; None: `FINAL_ROUNDS`
    given: int = (
        0  # if not 0: only the fallback and `proposed` are measured, so many at a time, and nothing is searched
    )

    @property
    def size(self) -> int:
        return sum(self.templates.values())

    @property
    def trial_seconds(self) -> float:
        """What a trial of the search takes by estimate."""
        build, measure = TYPICAL[self.machine.kind]
        return build / self.builders + measure

    @property
    def final_rounds(self) -> int:
        """How often the best are timed in turn."""
        return FINAL_ROUNDS if self.rounds is None else self.rounds

    @property
    def final_seconds(self) -> float:
        """What the final takes by estimate."""
        return self.final_rounds * (FINALISTS + 1) * TYPICAL[self.machine.kind][1]


@dataclass
class Progress:
    """The state of a run, for whoever shows it."""

    plan: Plan
    outcomes: dict[str, int] = field(default_factory=dict)
    best: Candidate | None = None
    best_seconds: float = float("inf")
    fallback_seconds: float | None = None
    measured: int = 0
    ends: list[float] = field(default_factory=list)  # when each trial was through
    last: Trial | None = None
    phase: str = "search"
    final_share: float = 0.0  # of the final that is through
    medians: dict[Candidate, float] = field(default_factory=dict)  # of the final, once it is through
    search_seconds: float = 0.0  # spent on the search: its beginning and its proposals

    @property
    def slowness(self) -> float:
        """How many times as long as estimated the last two batches took.

        What of them is not measured yet counts as estimated. A batch is built before it is measured: over one and less
        the pace jumps. The first trial waits for the processes to start, and tells nothing of the others.
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
    """A plan of so many trials that says nothing of its space: for points that are given, and runs against the clock.

    `fields`: others of `Plan`.
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
    """Count the points to search, of the named templates if there are any, and what of it is paid for.

    `known` is what `recorded` says of the log: plans of many problems read it once.

    Raises
    ------
    ProblemError
        If inputs are to be fresh on a machine that is no GPU.
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
    """By problem key the candidates of the log at their templates' present version; of one problem, or of all.

    Of trials with fresh inputs, or of all others: neither knows of the other.
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
    """What won for this operator's problems and is a point of these spaces, of the most similar problems first.

    Winners at an earlier version of a template count as well, those of the problem itself too, unless not `itself`:
    kernels change more often than what suits a shape. So do those of rankings with other inputs, hot or fresh: what
    they took is not looked at.
    """

    found: list[tuple[float, Candidate]] = []
    for key, best in log.best().items():
        if key == problem.key and not itself:
            continue
        with contextlib.suppress(KeyError, ValueError):  # of an operator or a template that is no longer there
            template, values = spaces.find(best.candidate.template), best.candidate.values
            if spaces.among(best.candidate, tables) and not template.point(problem, machine, values):
                distance = problem.distance(parse(key))  # None for one of another dtype: last
                found.append((math.inf if distance is None else distance, template.candidate(values)))
    return list(dict.fromkeys(candidate for _, candidate in sorted(found, key=lambda pair: pair[0])))


def predicted(problem: Problem, machine: Machine, tables: Mapping[str, Table], log: Log, count: int) -> list[Candidate]:
    """What the log's model takes for the fastest, of what these spaces have; trials tell how far off the model is."""
    model = predictor((log.root,), machine.arch, problem.operator)
    if model is None:
        return []
    chosen = model.choose(problem, machine)  # what look-up takes, which ranks for a larger batch
    found = dict.fromkeys([*([chosen.candidate] if chosen else []), *model.fastest(problem, machine, count)])
    there = [c for c in found if spaces.among(c, tables) and spaces.refusal(c, problem, machine) is None]
    return there[:count]


def before_search(
    problem: Problem, machine: Machine, tables: Mapping[str, Table], log: Log, trials: int
) -> list[Candidate]:
    """What a run of so many trials measures before it asks a search, the fallback first: each point once.

    The fallback, and what is in the tables of every template's default, what a model of the log's trials predicts, and
    what won for other problems.
    """
    templates = map(spaces.find, tables)
    defaults = [c for t in templates if spaces.among(c := t.candidate(t.default(problem, machine)), tables)]
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
    """Whether the trials suffice for all points that are left: then no search is asked."""
    most = itertools.islice(spaces.searchable(problem, machine, tables), trials + len(known) + 1)
    return sum(candidate not in known for candidate in most) <= trials
