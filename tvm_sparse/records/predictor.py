"""Decisions for problems that nobody tuned: a model of the recorded times ranks points of the templates' spaces.

The model is regression trees (Chen & Guestrin 2016, "XGBoost: A Scalable Tree Boosting System") that were fitted to
trials offline (`tuning.training`). They give ln(time / best time of the problem) from a problem's axes, a point's
decisions, and what its template derives from both (`Template.features`). One file for each operator and architecture
ships, `<root>/<arch>/<operator>/predictor.json`, and is read and evaluated here with NumPy alone.

It ranks a few hundred points: those that were nearly the best of some problem, and templates' defaults, as far as they
are in the problem's spaces. For other points the model is untested: in the cross-validation nearly all of its choices
among neighbours of these points had never been measured.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError, numpy_dtype
from ..core.template import NotApplicable, Table

if TYPE_CHECKING:
    import numpy as np

NAME = "predictor.json"
FORMAT = 1


class PredictorError(ValueError):
    """A file without a valid predictor of this format; the message says what is wrong."""


@dataclass(frozen=True)
class Trees:
    """An ensemble of regression trees, stored one after the other in flat arrays, whose values are summed.

    Attributes
    ----------
    features
        Names of the input numbers.
    roots
        Index of the first node of each tree.
    feature
        For each node the index of its feature; -1 for a leaf.
    value
        For a node the threshold, float32: rows with a smaller value go left. For a leaf its addend.
    left
        Index of the left child; the right child follows it.
    missing_left
        1 where rows without the feature go left.
    base
        Initial value of the sum.
    """

    features: tuple[str, ...]
    roots: Sequence[int]
    feature: Sequence[int]
    value: Sequence[float]
    left: Sequence[int]
    missing_left: Sequence[int]
    base: float

    def matrix(self, rows: Iterable[Mapping[str, float]]) -> np.ndarray:
        """Rows of named numbers as a float32 matrix; NaN where a row has no such number."""
        import numpy as np

        nan = math.nan
        return np.array([[row.get(name, nan) for name in self.features] for row in rows], np.float32)

    def predict(self, matrix: np.ndarray) -> np.ndarray:
        """The sum for each row of a matrix made by `matrix`, in float64."""
        import numpy as np

        feature, left = np.asarray(self.feature, np.int32), np.asarray(self.left, np.int32)
        value, missing_left = np.asarray(self.value, np.float32), np.asarray(self.missing_left, bool)
        rows = np.arange(len(matrix))[:, None]
        at = np.broadcast_to(np.asarray(self.roots, np.int32), (len(matrix), len(self.roots))).copy()
        while True:
            asked = feature[at]
            if (asked < 0).all():
                return self.base + value[at].sum(axis=1, dtype=np.float64)
            found = matrix[rows, asked]
            goes_left = np.where(np.isnan(found), missing_left[at], found < value[at])
            at = np.where(asked < 0, at, left[at] + ~goes_left)


@dataclass(frozen=True)
class Prediction:
    """The point that a predictor chose, the number of points ranked, and the problem at the batch for which they were
    ranked.
    """

    problem: Problem
    candidate: Candidate
    ranked: int


@dataclass(frozen=True)
class Probe:
    """The model's value for a point when it was trained. A different value now means that templates' features have
    changed.
    """

    problem: str
    cores: int
    candidate: str
    said: float


@dataclass(frozen=True)
class Predictor:
    """A trained predictor, as a file holds it.

    Attributes
    ----------
    operator, arch
        The operator and architecture that it was trained for.
    templates
        Versions of the templates in it.
    trees
        The model.
    known
        Points that were good for some problem.
    trials
        Number of trials it was trained on.
    problems
        Keys of their problems.
    loss, worst_loss
        Ratio of the chosen point's time to the best recorded time, for problems left out of the training: geometric
        mean, and maximum. The model chose among the measured points.
    probes
        Values that tests compare.
    seen
        For each template, of how many of the problems the training data have times of its points.
    """

    operator: str
    arch: str
    templates: Mapping[str, int]
    trees: Trees
    known: tuple[Candidate, ...]
    trials: int
    problems: tuple[str, ...]
    loss: float
    worst_loss: float
    probes: tuple[Probe, ...] = ()
    seen: Mapping[str, int] = dataclasses.field(default_factory=dict)

    @property
    def outdated(self) -> str | None:
        """Why the predictor cannot be used, if a template has another version now; else None."""
        current = {template.name: template.version for template in spaces.templates(self.operator)}
        for name, version in self.templates.items():
            if current.get(name) != version:
                return f"trained with version {version} of {name}, which is at {current.get(name, 'none')}"
        return None

    @property
    def provenance(self) -> str:
        """A description of its training data and of its loss."""
        return (
            f"a model of {self.trials} trials of {len(self.problems)} problems; of problems left out of its training"
            f" its choices took {self.loss:.2f}x the best time recorded, at worst {self.worst_loss:.2f}x"
        )

    def choose(self, problem: Problem, machine: Machine) -> Prediction | None:
        """The point with the smallest predicted time; None if no template of the model fits the problem.

        Points are ranked for the batch rounded up to a power of two, so that one library serves all batches in between,
        unless arrays of that size would exceed the largest extent.
        """
        with contextlib.suppress(ProblemError):
            problem = problem.with_batch(1 << (problem.batch_extent - 1).bit_length())
        ranked = self.ranked(problem, machine)
        return Prediction(problem, self.fastest(problem, machine, 1, ranked)[0], len(ranked)) if ranked else None

    def said(self, problem: Problem, machine: Machine, candidates: Sequence[Candidate]) -> list[float | None]:
        """Predicted ln(time / best time of the problem) of points; None for templates that the model does not know."""
        known = [candidate for candidate in candidates if candidate.template in self.templates]
        rows = (features_of(problem, machine, candidate) for candidate in known)
        values = dict(zip(known, map(float, self.trees.predict(self.trees.matrix(rows))), strict=True)) if known else {}
        return [values.get(candidate) for candidate in candidates]

    def fastest(
        self, problem: Problem, machine: Machine, count: int, ranked: Sequence[Candidate] | None = None
    ) -> list[Candidate]:
        """The `count` points with the smallest predicted times among `ranked`, the fastest first."""
        ranked = self.ranked(problem, machine) if ranked is None else ranked
        if not ranked:
            return []
        seconds = self.trees.predict(self.trees.matrix(features_of(problem, machine, c) for c in ranked))
        # In this order, because evaluating the model is quicker than checking restrictions. At least the defaults are
        # allowed.
        order = (ranked[index] for index in seconds.argsort(kind="stable"))
        return list(itertools.islice((c for c in order if spaces.refusal(c, problem, machine) is None), count))

    def ranked(self, problem: Problem, machine: Machine) -> list[Candidate]:
        """The points that the model ranks for a problem; none for one with axes that no problem of its training had."""
        if not _axes_of(problem, problem.as_tuned().added).keys() <= set(self.trees.features):
            return []
        tables: dict[str, Table] = {}
        for name in self.templates:
            template = spaces.find(name, self.operator)
            if template.kind == machine.kind:
                try:
                    tables[name] = template.space(problem, machine)
                except NotApplicable:
                    continue
        found = ((spaces.find(name, self.operator), table) for name, table in tables.items())
        wanted = [*self.known, *(spaces.default(template, table, problem, machine) for template, table in found)]
        return [c for c in dict.fromkeys(wanted) if c.template in tables and _in_table(c, tables[c.template])]

    def write(self, root: Path) -> Path:
        """Write this predictor's file under a folder of logs."""
        path = root / self.arch / self.operator / NAME
        content = {
            "format": FORMAT,
            "operator": self.operator,
            "arch": self.arch,
            "templates": dict(self.templates),
            "seen": dict(self.seen),
            "trials": self.trials,
            "problems": list(self.problems),
            "loss": self.loss,
            "worst_loss": self.worst_loss,
            "known": [str(candidate) for candidate in self.known],
            "probes": [dataclasses.asdict(probe) for probe in self.probes],
            "features": list(self.trees.features),
            "base": self.trees.base,
            **{name: list(getattr(self.trees, name)) for name in ARRAYS},
        }
        lines = (f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'))}" for name, value in content.items())
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f"{path.name}.unfinished")
        unfinished.write_text("{" + ",\n".join(lines) + "}\n")
        os.replace(unfinished, path)
        return path


ARRAYS = ("roots", "feature", "value", "left", "missing_left")


def read(path: Path) -> Predictor:
    """Read the predictor of a file.

    Raises
    ------
    PredictorError
        If the file holds no predictor of this format.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if content["format"] != FORMAT:
            raise PredictorError(f"{path}: expected format {FORMAT}, got {content['format']!r}")
        arrays = {name: content[name] for name in ARRAYS}
        trees = Trees(tuple(content["features"]), base=float(content["base"]), **arrays)
        if reason := _malformed(trees):
            raise PredictorError(f"{path}: {reason}")
        for name, kinds in _KINDS.items():
            if not isinstance(content[name], kinds) or isinstance(content[name], bool):
                raise PredictorError(f"{path}: {name}: got {type(content[name]).__name__}")
        seen = content.get("seen", {})  # files of earlier versions have none
        for name, numbers in (("templates", content["templates"]), ("seen", seen)):
            if not all(type(number) is int for number in numbers.values()):
                raise PredictorError(f"{path}: {name}: expected a whole number for each template")
        return Predictor(
            content["operator"],
            content["arch"],
            content["templates"],
            trees,
            tuple(Candidate.parse(text) for text in content["known"]),
            content["trials"],
            tuple(content["problems"]),
            content["loss"],
            content["worst_loss"],
            tuple(Probe(**probe) for probe in content["probes"]),
            seen,
        )
    except PredictorError:
        raise
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError, AttributeError, OSError) as error:
        raise PredictorError(f"{path} holds no predictor: {type(error).__name__}: {error}") from error


_KINDS: dict[str, Any] = {
    "operator": str, "arch": str, "templates": dict, "trials": int, "problems": list, "loss": int | float,
    "worst_loss": int | float,
}  # fmt: skip


def _malformed(trees: Trees) -> str | None:
    """Why trees cannot be evaluated; None if every path ends at a leaf and all indices are in range."""
    import numpy as np

    arrays = {name: np.asarray(getattr(trees, name)) for name in ARRAYS}
    for name, array in arrays.items():
        if array.ndim != 1 or array.dtype.kind not in ("biuf" if name == "value" else "biu"):
            return f"{name}: expected a list of {'numbers' if name == 'value' else 'whole numbers'}"
    roots, feature, value, left, missing = arrays.values()
    count = len(feature)
    if len({count, len(value), len(left), len(missing)}) != 1:
        return f"expected lists of one length: {', '.join(ARRAYS[1:])}"
    if not all(isinstance(name, str) for name in trees.features):
        return "features: expected names"
    if not len(roots) or (roots < 0).any() or (roots >= count).any():
        return f"roots: expected nodes, 0 to {count - 1}"
    if (feature < -1).any() or (feature >= len(trees.features)).any():
        return f"feature: expected -1 to {len(trees.features) - 1}"
    if not math.isfinite(trees.base) or not (np.abs(value) < np.finfo(np.float32).max).all():
        return "value and base: expected finite numbers"
    inner = np.flatnonzero(feature >= 0)
    if (left[inner] <= inner).any() or (left < 0).any() or (left >= count - 1).any():  # else walks may never end
        return f"left: expected nodes behind their own, up to {count - 2}"
    return None


def _axes_of(problem: Problem, axes: Mapping[str, Any]) -> dict[str, float]:
    """The input numbers of some of a problem's axes by name."""
    row: dict[str, float] = {}
    for name, value in axes.items():
        if not isinstance(value, str):
            row[f"problem.{name}"] = value
        elif name == "dtype":
            row["problem.bytes"] = numpy_dtype(value).itemsize
        else:
            row[f"problem.{name}={value}"] = 1.0
    return row


def features_of(problem: Problem, machine: Machine, candidate: Candidate) -> dict[str, float]:
    """The input numbers for one point by name: axes (texts as flags, a dtype as its bytes), template, decisions,
    features.
    """
    tuned = problem.as_tuned()
    axes = {name: value for name, value in tuned.axes.items() if name not in problem.added_axes}
    row = _axes_of(problem, {**axes, **tuned.added})
    row[f"template.{candidate.template}"] = 1.0
    for name, number in candidate.decisions:
        row[f"decision.{name}"] = number
    derived = spaces.find(candidate.template, problem.operator).features(problem, machine, candidate.values)
    for name, figure in derived.items():
        row[f"point.{name}"] = figure
    return row


def _in_table(candidate: Candidate, table: Table) -> bool:
    values = candidate.values
    return list(values) == list(table) and all(values[name] in table[name] for name in table)
