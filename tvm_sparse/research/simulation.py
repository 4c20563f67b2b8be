"""Simulated searches on recorded spaces: what a strategy finds within a budget, without a device.

A completely measured space (`records.space`) replaces builds and measurements. The search is told the times of one
round, drawn for every seed and the same for all strategies, and is judged by all rounds together. Its result is the
best measured point, as the final of a tuning run would find it.

A trial's seconds are those of its recorded build, shared by `BUILDERS` processes, and a typical measurement's; those
that the strategy itself takes are measured.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import machine as machines
from ..core import registry, spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import ProblemError
from ..records import Log, operator_of
from ..records import space as files
from ..records.predictor import Trees
from ..schedules.vocabulary import present
from ..tuning import strategies, training
from ..tuning.domain import Domain
from ..tuning.plans import BATCH, PROVEN_SHARE, TYPICAL, winners_nearby
from .bootstrap import Interval, interval

if TYPE_CHECKING:
    import numpy as np

NEAR = 1.05
"""A point within this factor of the optimum is as good as the optimum, to most."""
BUILDERS = 16
# Seeds that one process simulates in a row, since starting it and loading the libraries takes seconds.
CHUNK = 5


@dataclass(frozen=True, eq=False)
class Recorded:
    """A recorded space, ready to answer searches.

    Attributes
    ----------
    name
        Name of its file.
    domain
        The points of the space.
    rounds
        For each point its seconds in each round; empty for a failure.
    seconds
        For each point the time by which it is judged: the median of its rounds on a GPU, the minimum on a CPU, where
        other processes can only increase it. Infinite for a failure.
    cost
        For each point the seconds of its trial.
    start
        The points that a tuning run measures before its search, if the space has them: the fallback and the templates'
        defaults.
    proven
        Winners of similar problems, the most similar first: a run with their log measures some of them.
    complete
        Whether every point of the space was measured.
    """

    name: str
    problem: str
    arch: str
    domain: Domain
    rounds: Sequence[tuple[float, ...]]
    seconds: np.ndarray
    cost: np.ndarray
    start: Sequence[Candidate]
    proven: Sequence[Candidate]
    complete: bool

    @property
    def optimum(self) -> float:
        """Seconds of the space's best point."""
        return float(self.seconds.min())


def load(path: Path, logs: Path | None = None) -> Recorded:
    """Load the space of a file; `logs` has the records of similar problems, for their winners and the prior.

    Records of the problem itself are not used. Points have today's names and versions, with the times of when the space
    was measured.

    Raises
    ------
    SpaceError
        If the file is damaged, or has no right point.
    """
    import numpy as np

    found = files.read(path)
    facts = found.sessions[-1].machine
    where = dataclasses.replace(
        machines.resolve(found.arch), name=str(facts.get("name", "")), cores=int(facts.get("cores", 1))
    )
    trials = {_today(trial.candidate): trial for trial in found.trials}
    domain = Domain.recorded(where, trials)
    trees = None if logs is None else _trees_without(found.problem, logs, found.arch)
    if trees is not None:
        domain = domain.with_prior(registry.parse(found.problem), trees)
    rounds = [trials[point].seconds for point in domain.points]
    if not any(rounds):
        raise files.SpaceError(f"{path}: no point of the space was right")
    judge: Callable[[Sequence[float]], float] = min if where.kind == "llvm" else lambda times: float(np.median(times))
    seconds = np.array([judge(times) if times else math.inf for times in rounds])
    name = path.name.removesuffix(".xz").removesuffix(".jsonl")
    build, measure = TYPICAL[where.kind]
    cost = np.array([(trials[point].build_seconds or build) / BUILDERS + measure for point in domain.points])
    start, proven = _before(found.problem, where, domain, logs)
    return Recorded(
        name, found.problem, found.arch, domain, rounds, seconds, cost, start, proven, complete=found.complete
    )


def _today(candidate: Candidate) -> Candidate:
    """A recorded point under the present names of its template and decisions, and of the present version."""
    point = present(candidate)
    try:
        return dataclasses.replace(point, version=spaces.find(point.template).version)
    except KeyError:  # no template has this name any more
        return point


@functools.lru_cache(maxsize=16)
def _trees_without(key: str, logs: Path, arch: str) -> Trees | None:
    """A model of the operator's other problems, fitted like the one that ships; None if they are too few."""
    log = Log(logs, arch, operator_of(key))
    data = [one for one in training.measured(log) if one.problem.key != key]
    return training.fit(data) if len(data) >= training.LEAST_PROBLEMS else None


def _before(
    key: str, where: Machine, domain: Domain, logs: Path | None
) -> tuple[Sequence[Candidate], Sequence[Candidate]]:
    """`Recorded.start` and `proven`."""
    try:
        problem = registry.parse(key)
    except ProblemError:
        return [], []
    start = [spaces.fallback(problem, where)]
    for name, table in spaces.applicable(problem, where)[0].items():
        start.append(spaces.default(spaces.find(name, problem.operator), table, problem, where))
    proven: list[Candidate] = []
    if logs is not None:
        log = Log(logs, where.arch, problem.operator)
        proven = winners_nearby(problem, where, domain.tables, log, itself=False)
    there = dict.fromkeys(p for p in start if p in domain.index)
    return list(there), [p for p in proven if p in domain.index and p not in there]


@dataclass(frozen=True, eq=False)
class Run:
    """One simulated search.

    Attributes
    ----------
    best
        Seconds of the best point after each trial; infinite while all have failed.
    clock
        Estimated duration of the run after each trial, in seconds.
    thought
        Seconds of the strategy itself.
    """

    space: str
    strategy: str
    seed: int
    best: np.ndarray
    clock: np.ndarray
    thought: float


def simulate(
    recorded: Recorded, strategy: str, budget: int, seed: int, batch: int = BATCH, *, ahead: bool = False
) -> Run:
    """Simulate one search of `budget` trials, which include those before the search, as in a tuning run.

    `ahead`: a batch is proposed before the results of the previous one are reported, as `tune` does on a GPU.
    """
    import numpy as np

    draw = np.random.default_rng(seed)
    # For each point the round whose time this seed's searches are told.
    picks = draw.random(len(recorded.rounds))
    rounds = zip(recorded.rounds, picks, strict=True)
    told = [times[int(pick * len(times))] if times else None for times, pick in rounds]
    index = recorded.domain.index
    first = [*recorded.start, *recorded.proven[: budget // PROVEN_SHARE]]
    known: dict[Candidate, float | None] = {c: told[index[c]] for c in first[:budget]}
    order, thought = list(known), [0.0] * len(known)
    if budget > len(order):
        began = time.perf_counter()
        search = strategies.make(
            strategy, recorded.domain, known=known, trials=budget - len(order), batch=batch, seed=seed
        )
        untold: list[Candidate] = []
        while len(order) < budget and (proposed := search.propose()[: budget - len(order)]):
            due = untold if ahead else proposed
            search.report({point: told[index[point]] for point in due})
            untold = proposed
            order += proposed
            now = time.perf_counter()
            thought += [(now - began) / len(proposed)] * len(proposed)
            began = now
    places = [index[point] for point in order]

    def padded(values: np.ndarray) -> np.ndarray:
        """Extended to the length of the budget: a search that ended early found no more, and took no longer."""
        return np.concatenate([values, np.full(budget - len(values), values[-1])])

    best = np.minimum.accumulate(recorded.seconds[places])
    clock = np.cumsum(recorded.cost[places] + np.array(thought))
    return Run(recorded.name, strategy, seed, padded(best), padded(clock), sum(thought))


def compare(
    paths: Sequence[Path],
    names: Sequence[str],
    *,
    budget: int,
    repeats: int,
    batch: int = BATCH,
    ahead: bool = False,
    jobs: int = 1,
    logs: Path | None = None,
    show: Callable[[int, int], None] = lambda done, all_of_them: None,
) -> list[Run]:
    """Search each space with each strategy `repeats` times, with the seeds from 0, in `jobs` processes.

    `logs` is as in `load`, `batch` and `ahead` as in `simulate`. `show` is called with the number of finished searches
    and of all.
    """
    tasks = [
        (path, logs, name, range(first, min(first + CHUNK, repeats)), budget, batch, ahead)
        for name in names
        for path in paths
        for first in range(0, repeats, CHUNK)
    ]
    runs: list[Run] = []
    if jobs == 1:
        for task in tasks:
            runs += _chunk(*task)
            show(len(runs), len(paths) * len(names) * repeats)
        return runs
    # Not forked: threads of libraries do not survive that.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context, initializer=_alone) as pool:
        for done in pool.map(_chunk, *zip(*tasks, strict=True)):
            runs += done
            show(len(runs), len(paths) * len(names) * repeats)
    return runs


def _alone() -> None:
    """One thread for each process, since the processes share the cores."""
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"


def _chunk(path: Path, logs: Path | None, name: str, seeds: range, budget: int, batch: int, ahead: bool) -> list[Run]:
    recorded = load(path, logs)
    return [simulate(recorded, name, budget, seed, batch, ahead=ahead) for seed in seeds]


# ------------------------------------------------------------------------------------------------------ statistics


@dataclass(frozen=True)
class Summary:
    """Statistics of the runs of one strategy on one space.

    Attributes
    ----------
    excess
        By number of trials, the mean over seeds of the best time over the optimum, minus 1.
    trials_to_near
        The median number of trials until a point within `NEAR` of the optimum; None if that exceeds the budget.
    seconds_to_near
        The same in estimated seconds of the run.
    reached
        Share of the seeds that reached such a point within the budget.
    against
        Geometric mean over seeds of the best time over the reference's with the same seed; below 1 is better.
    wilcoxon
        p-value of its signed-rank test; 1 if all are equal.
    halved
        As `against`, but with half of the trials, against all of the reference's.
    thought
        Median seconds of the strategy itself for a search.
    """

    space: str
    strategy: str
    excess: Mapping[int, Interval]
    trials_to_near: int | None
    seconds_to_near: float | None
    reached: float
    against: Interval
    wilcoxon: float
    halved: Interval
    thought: float


def together(runs: Sequence[Run], optima: Mapping[str, float]) -> list[Run]:
    """One run for each seed instead of runs on several spaces: the geometric mean of their times over the optima."""
    import numpy as np

    made = []
    for strategy, seed in dict.fromkeys((run.strategy, run.seed) for run in runs):
        parts = [run for run in runs if (run.strategy, run.seed) == (strategy, seed)]
        ratios = np.log([run.best / optima[run.space] for run in parts])
        clock = np.mean([run.clock for run in parts], axis=0)
        thought = statistics.fmean(run.thought for run in parts)
        made.append(Run("all", strategy, seed, np.exp(ratios.mean(axis=0)), clock, thought))
    return made


def summarise(runs: Sequence[Run], optimum: float, reference: Sequence[Run], trials: Sequence[int]) -> Summary:
    """The summary of one strategy's runs on one space, against a reference's with the same seeds."""
    import numpy as np
    from scipy import stats

    if [run.seed for run in runs] != [run.seed for run in reference]:
        raise ValueError("runs and reference: expected the same seeds in the same order")
    best, other = np.array([run.best for run in runs]), np.array([run.best for run in reference])
    budget = best.shape[1]
    near = best <= NEAR * optimum
    to_near = np.where(near.any(axis=1), near.argmax(axis=1) + 1, np.inf)
    clock = np.array([run.clock for run in runs])
    seconds = np.where(near.any(axis=1), clock[np.arange(len(runs)), near.argmax(axis=1)], np.inf)
    middle, middle_seconds = float(np.median(to_near)), float(np.median(seconds))
    ratios = np.log(best[:, -1] / other[:, -1])
    halved = np.log(best[:, budget // 2 - 1] / other[:, -1])
    return Summary(
        runs[0].space,
        runs[0].strategy,
        {n: interval(best[:, n - 1] / optimum - 1, np.mean) for n in trials},
        None if math.isinf(middle) else math.ceil(middle),
        None if math.isinf(middle_seconds) else middle_seconds,
        float(near.any(axis=1).mean()),
        _exp(interval(ratios, np.mean)),
        float(stats.wilcoxon(ratios).pvalue) if ratios.any() else 1.0,
        _exp(interval(halved, np.mean)),
        float(np.median([run.thought for run in runs])),
    )


def _exp(found: Interval) -> Interval:
    return Interval(*map(math.exp, dataclasses.astuple(found)))


def curves(runs: Sequence[Run], optima: Mapping[str, float]) -> list[dict[str, Any]]:
    """Best-so-far curves, for a table or for `plots.search_curves`: rows of space, strategy, trials, and the mean
    excess over the optimum with its interval.
    """
    import numpy as np

    rows = []
    for space, strategy in dict.fromkeys((run.space, run.strategy) for run in runs):
        best = np.array([run.best for run in runs if (run.space, run.strategy) == (space, strategy)])
        for trials in range(1, best.shape[1] + 1):
            found = interval(best[:, trials - 1] / optima[space] - 1, np.mean)
            row = {"space": space, "strategy": strategy, "trials": trials}
            rows.append(row | {"excess": found.value, "low": found.low, "high": found.high})
    return rows
