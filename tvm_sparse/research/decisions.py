"""Which decisions matter: permutation importance on problems that the model has not seen, and main effects."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from .bootstrap import LEAST, mean_interval, ratio_interval
from .points import numbers, points

if TYPE_CHECKING:
    import numpy as np
    import pandas

# Least points of a template for fitting a forest.
LEAST_POINTS = 40
# Least points of a template in one problem for a study of their differences.
LEAST_OF_PROBLEM = 4
FOLDS = 5
SHUFFLES = 3
TREES = 50


def features(rows: pandas.DataFrame) -> pandas.DataFrame:
    """Features for a model of one template's times: decisions and axes that vary, as numbers."""
    import pandas

    names = [name for name in rows if name.startswith(("decision.", "axis.")) and rows[name].nunique() > 1]
    return pandas.DataFrame({name: numbers(rows[name]) for name in names}, index=rows.index)


def _groups(rows: pandas.DataFrame) -> np.ndarray:
    """Units for the bootstrap and cross-validation: problems, or points if there are few problems."""
    import numpy as np

    keys = rows["arch"] + " " + rows["problem"]
    return keys.to_numpy() if keys.nunique() >= LEAST else np.arange(len(rows))


def _by_template(table: pandas.DataFrame) -> Iterable[tuple[tuple[Any, ...], pandas.DataFrame]]:
    """Points of each template with enough of them, with `log`: ln(seconds) minus its mean over the problem's points."""
    import numpy as np

    for key, rows in points(table).groupby(["operator", "arch", "template"], sort=True):
        rows = rows[rows.groupby(["arch", "problem"])["seconds"].transform("size") >= LEAST_OF_PROBLEM]
        if len(rows) >= LEAST_POINTS:
            logs = np.log(rows["seconds"])
            yield key, rows.assign(log=logs - logs.groupby(rows["problem"]).transform("mean"))


def importance(table: pandas.DataFrame, seed: int = 0) -> pandas.DataFrame:
    """Permutation importance of each decision (Breiman 2001, "Random Forests", section 10).

    A forest is fitted to ln(time) minus its mean over the problem, for a template's points of all problems but some,
    and predicts those. Then each decision is shuffled among the points of a problem. `importance` is the resulting
    increase of the mean squared error, as a share of the variance within problems: 0 if the decision does not matter,
    or if another one carries the same information. `explained` is the share of that variance that the forest explains;
    if it is small or negative, the importances mean little.
    """
    import pandas

    lines = []
    for key, rows in _by_template(table):
        groups, variance = _groups(rows), float((rows["log"] ** 2).mean())
        error, raised = _forest_errors(rows, groups, seed)
        for name, more in raised.items():
            by_group = pandas.Series(more).groupby(groups).mean().to_numpy() / variance
            lines.append(
                {
                    **dict(zip(("operator", "arch", "template"), key, strict=True)),
                    "decision": name.removeprefix("decision."),
                    **mean_interval(by_group).columns("importance"),
                    "explained": 1 - float(error.mean()) / variance,
                    "points": len(rows),
                    "problems": rows["problem"].nunique(),
                }
            )
    found = pandas.DataFrame(lines)
    keys, rising = ["operator", "arch", "template", "importance"], [True, True, True, False]
    return found.sort_values(keys, ascending=rising, ignore_index=True) if lines else found


def _forest_errors(
    rows: pandas.DataFrame, groups: np.ndarray, seed: int
) -> tuple[np.ndarray, Mapping[str, np.ndarray]]:
    """For each point the squared error of a forest that has not seen its group, and the increase of that error when
    each decision is shuffled among the points of its problem, as the mean over `SHUFFLES`.
    """
    import numpy as np
    import pandas
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.model_selection import GroupKFold

    data, target = features(rows), rows["log"].to_numpy(dtype=float)
    problems = pandas.factorize(rows["problem"])[0]
    decisions = [name for name in data if name.startswith("decision.")]
    error = np.full(len(rows), math.nan)
    raised = {name: np.zeros(len(rows)) for name in decisions}
    generator = np.random.default_rng(seed)
    for train, test in GroupKFold(FOLDS).split(data, target, groups):
        forest = ExtraTreesRegressor(TREES, min_samples_leaf=2, random_state=seed, n_jobs=1)
        forest.fit(data.iloc[train].to_numpy(), target[train])
        kept = data.iloc[test].to_numpy()
        error[test] = (forest.predict(kept) - target[test]) ** 2
        # All shuffles of all decisions are predicted at once: a call of a forest costs as much as thousands of points.
        shuffled = []
        for name, _ in itertools.product(decisions, range(SHUFFLES)):
            other = kept.copy()
            column = data.columns.get_loc(name)
            for problem in np.unique(problems[test]):
                mine = np.flatnonzero(problems[test] == problem)
                other[mine, column] = kept[generator.permutation(mine), column]
            shuffled.append(other)
        predicted = forest.predict(np.concatenate(shuffled)).reshape(len(decisions), SHUFFLES, len(test))
        for name, each in zip(decisions, predicted, strict=True):
            raised[name][test] = ((each - target[test]) ** 2).mean(axis=0) - error[test]
    return error, raised


def main_effects(table: pandas.DataFrame) -> pandas.DataFrame:
    """The factor by which points with a decision's value are slower than the mean of their template's points of the
    problem.

    `effect` is the geometric mean over problems. A search measures good values of one decision together with good
    values of others, so effects in logs are smaller than in an experiment that changes one decision at a time.
    """
    import pandas

    lines = []
    for key, rows in _by_template(table):
        logs = rows["log"]
        groups = pandas.Series(_groups(rows), index=rows.index)
        for name in features(rows):
            if not name.startswith("decision."):
                continue
            for value, mine in logs.groupby(rows[name]):
                effect = ratio_interval(mine.groupby(groups[mine.index]).mean().tolist())
                lines.append(
                    {
                        **dict(zip(("operator", "arch", "template"), key, strict=True)),
                        "decision": name.removeprefix("decision."),
                        "value": value,
                        **effect.columns("effect"),
                        "points": len(mine),
                    }
                )
    return pandas.DataFrame(lines)
