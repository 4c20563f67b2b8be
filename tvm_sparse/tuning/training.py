"""Fitting the model of `records.predictor` to recorded trials, with the loss of its choices by cross-validation.

Only this module needs XGBoost, from the extra `tune`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..core import machine as machines
from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from ..core.registry import parse
from ..records import Log
from ..records.predictor import Predictor, Probe, Trees, features_of

# A point is ranked for other problems if it came within this factor of the best of one problem.
GOOD = 1.1
# Times beyond this multiple of a problem's best are clipped to it: how bad they are does not matter.
CLIP = 3.0
# Decrease of a point's weight in the fit for each e-fold of its time over the best.
SHARPNESS = 1.5
PARAMETERS = {
    "objective": "reg:squarederror",
    "max_depth": 7,
    "eta": 0.06,
    "subsample": 0.8,
    "colsample_bynode": 0.3,
    "min_child_weight": 4,
    "tree_method": "hist",
    "base_score": 0.3,
    "nthread": 1,
}
ROUNDS = 150
# Number of fits with different random draws. Their mean is more accurate, and far less often wrong by much.
FITS = 4
FOLDS = 10
# Least number of problems, below which none can be left out. Look-up requires more of a model trained on few
# (`lookup.CLEAR`).
LEAST_PROBLEMS = 3
# Number of problems for which the model's value for a point is stored as a probe.
PROBES = 10


@dataclass(frozen=True)
class Measured:
    """The measured points of one problem, with their median seconds."""

    problem: Problem
    machine: Machine
    seconds: Mapping[Candidate, float]

    @property
    def best(self) -> float:
        """Seconds of the fastest point."""
        return min(self.seconds.values())


def measured(log: Log) -> list[Measured]:
    """The log's measurements of points of the present spaces, by problem, without problems with a single point.

    If a point has several trials, the fastest counts. Trials of other template versions, and with fresh inputs, are
    left out.
    """
    contents = log.read()
    sessions = {session.id: session for session in contents.sessions}
    found: dict[tuple[Problem, Machine], dict[Candidate, float]] = {}
    for trial in contents.timed(fresh=False):
        if trial.outcome != "ok" or trial.session not in sessions:
            continue
        try:
            problem = parse(trial.problem)
        except ProblemError:
            continue  # recorded by a version with other axes
        facts = sessions[trial.session].machine
        here = dataclasses.replace(
            machines.resolve(log.arch), name=str(facts.get("name", "")), cores=int(facts["cores"])
        )
        points = found.setdefault((problem, here), {})
        if trial.candidate in points or spaces.refusal(trial.candidate, problem, here) is None:
            points[trial.candidate] = min(trial.median, points.get(trial.candidate, math.inf))
    order = sorted(found.items(), key=lambda item: (item[0][0].key, item[0][1].cores))
    return [Measured(problem, here, points) for (problem, here), points in order if len(points) > 1]


def fit(data: Sequence[Measured]) -> Trees:
    """Trees for ln(time / best time of the problem), the mean of several fits. A problem's weight is the square root of
    its number of points.
    """
    import numpy as np
    import xgboost

    rows = [features_of(one.problem, one.machine, candidate) for one in data for candidate in one.seconds]
    names = tuple(sorted({name for row in rows for name in row}))
    ratios = [math.log(min(s / one.best, CLIP)) for one in data for s in one.seconds.values()]
    weights = [1 / math.sqrt(len(one.seconds)) for one in data for _ in one.seconds]
    weights = [w * math.exp(-SHARPNESS * ratio) for w, ratio in zip(weights, ratios, strict=True)]
    scale = len(weights) / sum(weights)
    matrix = Trees(names, (), (), (), (), (), 0.0).matrix(rows)
    table = xgboost.DMatrix(matrix, label=np.array(ratios), weight=np.array(weights) * scale)
    return trees_of([xgboost.train({**PARAMETERS, "seed": seed}, table, ROUNDS) for seed in range(FITS)], names)


def trees_of(boosters: Sequence[Any], names: tuple[str, ...]) -> Trees:
    """The mean of several `xgboost.Booster`, as trees with siblings stored side by side."""
    import numpy as np

    learners = [json.loads(bytes(booster.save_raw("json")))["learner"] for booster in boosters]
    base = float(str(learners[0]["learner_model_param"]["base_score"]).strip("[]"))
    roots: list[int] = []
    feature: list[int] = []
    value: list[float] = []
    left: list[int] = []
    missing_left: list[int] = []
    for tree in (tree for learner in learners for tree in learner["gradient_booster"]["model"]["trees"]):
        roots.append(len(feature))
        order = [0]  # grows during the loop: nodes, with siblings side by side
        for node in order:
            child = tree["left_children"][node]
            threshold = np.float32(tree["split_conditions"][node])
            feature.append(tree["split_indices"][node] if child >= 0 else -1)
            # Thresholds must be exact, since rows are compared with them; an error of 1e-6 in a sum of leaves does not
            # matter.
            value.append(float(str(threshold)) if child >= 0 else round(float(threshold) / len(learners), 6))
            left.append(roots[-1] + len(order) if child >= 0 else 0)
            missing_left.append(int(tree["default_left"][node]) if child >= 0 else 0)
            if child >= 0:
                order += [child, tree["right_children"][node]]
    return Trees(names, roots, feature, value, left, missing_left, base)


def folds(data: Sequence[Measured], apart: Callable[[Problem], object], count: int = FOLDS) -> list[list[int]]:
    """Indices in `count` folds, or as many as there are groups; problems with equal `apart` are in the same fold."""
    groups: dict[object, list[int]] = {}
    for index, one in enumerate(data):
        groups.setdefault(apart(one.problem), []).append(index)
    order = list(groups.values())
    random.Random(0).shuffle(order)
    return [[index for group in order[part::count] for index in group] for part in range(min(count, len(order)))]


def all_batches(problem: Problem) -> object:
    """A key that is equal for problems that differ only in their batch."""
    return problem.with_batch(1)


def rounds_of(
    data: Sequence[Measured], apart: Callable[[Problem], object] = all_batches
) -> Iterator[tuple[list[Measured], list[Measured]]]:
    """For each fold, the data to train on and the data left out."""
    for out in folds(data, apart):
        kept = [one for index, one in enumerate(data) if index not in out]
        if kept:
            yield kept, [data[index] for index in out]


def loss_of(trees: Trees, one: Measured) -> float:
    """Time of the measured point that the model predicts to be fastest, over that of the fastest."""
    rows = trees.matrix(features_of(one.problem, one.machine, candidate) for candidate in one.seconds)
    seconds = list(one.seconds.values())
    return seconds[int(trees.predict(rows).argmin())] / one.best


def train(log: Log) -> Predictor | None:
    """The predictor of a log, with its losses by cross-validation; None if there are too few problems."""
    data = measured(log)
    if len(data) < LEAST_PROBLEMS:
        return None
    losses = [loss_of(trees, one) for kept, out in rounds_of(data) for trees in [fit(kept)] for one in out]
    return predictor_of(log, data, fit(data), losses)


def predictor_of(log: Log, data: Sequence[Measured], trees: Trees, losses: Sequence[float]) -> Predictor:
    """A predictor with these trees, which ranks the good points in `data`."""
    good = {c for one in data for c, seconds in one.seconds.items() if seconds <= GOOD * one.best}
    names = {candidate.template: candidate.version for one in data for candidate in one.seconds}
    seen = Counter(name for one in data for name in {candidate.template for candidate in one.seconds})
    return Predictor(
        operator=log.operator,
        arch=log.arch,
        templates=dict(sorted(names.items())),
        trees=trees,
        known=tuple(sorted(good, key=str)),
        trials=sum(len(one.seconds) for one in data),
        problems=tuple(sorted({one.problem.key for one in data})),
        loss=round(statistics.geometric_mean(losses), 3),
        worst_loss=round(max(losses), 3),
        probes=tuple(_probe(trees, one) for one in data[:: max(len(data) // PROBES, 1)]),
        seen=dict(sorted(seen.items())),
    )


def _probe(trees: Trees, one: Measured) -> Probe:
    """The model's value for the last of a problem's points."""
    candidate = list(one.seconds)[-1]
    (said,) = trees.predict(trees.matrix([features_of(one.problem, one.machine, candidate)]))
    return Probe(one.problem.key, one.machine.cores, str(candidate), round(float(said), 6))
