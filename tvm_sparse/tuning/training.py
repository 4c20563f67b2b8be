"""Fits the model of `records.predictor` to recorded trials, and finds by cross-validation what its choices lose.

XGBoost, of the `tune` extra, is needed here and nowhere else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import statistics
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

# A point is worth ranking for other problems if it came within this factor of the best of one problem.
GOOD = 1.1
# Times beyond this multiple of a problem's best are bad, and how bad does not matter.
CLIP = 3.0
# How much less a point counts in the fit for each e-fold of its time over the best.
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
# Fits that differ in what is drawn at random. Their mean errs less, and far less often badly.
FITS = 4
FOLDS = 10
# Of fewer problems there is nothing to leave out. Look-up asks more of a model that knows little (`lookup.CLEAR`).
LEAST_PROBLEMS = 3
# Of how many problems a point is remembered with what the model says of it.
PROBES = 10


@dataclass(frozen=True)
class Measured:
    """The points of one problem that were measured, with their median seconds."""

    problem: Problem
    machine: Machine
    seconds: Mapping[Candidate, float]

    @property
    def best(self) -> float:
        """Seconds of the fastest."""
        return min(self.seconds.values())


def measured(log: Log) -> list[Measured]:
    """What a log says of points of the spaces as they are now, by problem; problems with one point teach nothing.

    Of several trials of a point the fastest counts. Trials of other versions of a template are left out, and so are
    those with fresh inputs.
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
            continue  # recorded by a version whose problems had other axes
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
    """Trees for ln(time / best of the problem), the mean of several fits. Each problem weighs as the root of its number
    of points."""
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
    """The mean of the trees of some `xgboost.Booster`, laid out anew: children side by side."""
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
        order = [0]  # grows while it is gone through: nodes, children side by side
        for node in order:
            child = tree["left_children"][node]
            threshold = np.float32(tree["split_conditions"][node])
            feature.append(tree["split_indices"][node] if child >= 0 else -1)
            # Rows are compared with thresholds, which have to be exact; to a sum of leaves 1e-6 is nothing.
            value.append(float(str(threshold)) if child >= 0 else round(float(threshold) / len(learners), 6))
            left.append(roots[-1] + len(order) if child >= 0 else 0)
            missing_left.append(int(tree["default_left"][node]) if child >= 0 else 0)
            if child >= 0:
                order += [child, tree["right_children"][node]]
    return Trees(names, roots, feature, value, left, missing_left, base)


def folds(data: Sequence[Measured], apart: Callable[[Problem], object], count: int = FOLDS) -> list[list[int]]:
    """Indices in `count` parts, or as many as there are groups; problems of which `apart` is equal are in one part."""
    groups: dict[object, list[int]] = {}
    for index, one in enumerate(data):
        groups.setdefault(apart(one.problem), []).append(index)
    order = list(groups.values())
    random.Random(0).shuffle(order)
    return [[index for group in order[part::count] for index in group] for part in range(min(count, len(order)))]


def all_batches(problem: Problem) -> object:
    """What is equal for a problem and the same at another batch."""
    return problem.with_batch(1)


def rounds_of(
    data: Sequence[Measured], apart: Callable[[Problem], object] = all_batches
) -> Iterator[tuple[list[Measured], list[Measured]]]:
    """Of each fold: what is left to learn from, and what is left out."""
    for out in folds(data, apart):
        kept = [one for index, one in enumerate(data) if index not in out]
        if kept:
            yield kept, [data[index] for index in out]


def loss_of(trees: Trees, one: Measured) -> float:
    """Time of the measured point that the model takes for fastest, over that of the fastest."""
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
    """A predictor with these trees; of `data` it gets the points that it ranks."""
    good = {c for one in data for c, seconds in one.seconds.items() if seconds <= GOOD * one.best}
    names = {candidate.template: candidate.version for one in data for candidate in one.seconds}
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
    )


def _probe(trees: Trees, one: Measured) -> Probe:
    """What the model says of the last of a problem's points."""
    candidate = list(one.seconds)[-1]
    (said,) = trees.predict(trees.matrix([features_of(one.problem, one.machine, candidate)]))
    return Probe(one.problem.key, one.machine.cores, str(candidate), round(float(said), 6))
