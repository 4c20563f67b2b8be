"""Cost models that rank a problem's points, with one signature, and their quality.

    model(rows, seconds, others) -> predictions of `others`, the smaller the faster

`rows` and `others` are points as numbers, a row for each: log2(value + 1) of decisions, -1 where a template has none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .bootstrap import mean_interval, ratio_interval
from .points import numbers, points

if TYPE_CHECKING:
    import numpy as np
    import pandas

Model = Callable[["np.ndarray", "np.ndarray", "np.ndarray"], "np.ndarray"]

# The parameters of `meta_schedule.cost_model.XGBModel` in TVM 0.27.
METASCHEDULE: Mapping[str, Any] = {
    "max_depth": 10,
    "gamma": 0.001,
    "min_child_weight": 0,
    "eta": 0.2,
    "seed": 43,
    "nthread": 1,
    "tree_method": "auto",
}
METASCHEDULE_ROUNDS, METASCHEDULE_PATIENCE = 10000, 50
# Least number of points for a rank correlation.
LEAST_OTHERS = 10


def metaschedule(rows: np.ndarray, seconds: np.ndarray, others: np.ndarray) -> np.ndarray:
    """MetaSchedule's XGBoost model, trained in the same way, without the compiler.

    The target is the share best / time, and the squared error of a point is weighted by it, so that fast points count
    most; training ends when the training error has not decreased for 50 rounds. Returns the negative share.
    """
    import numpy as np
    import xgboost

    shares = (seconds.min() / seconds).astype(np.float32)
    data = xgboost.DMatrix(rows, label=shares)
    state: dict[str, float] = {"best": np.inf, "since": 0}

    def objective(said: np.ndarray, _: Any) -> tuple[np.ndarray, np.ndarray]:
        return (said - shares) * shares, np.ones_like(said) * shares

    class Patience(xgboost.callback.TrainingCallback):
        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:
            error = float(np.sqrt(np.square(model.predict(data) - shares).mean()))
            improved = error < state["best"]
            state.update(best=min(error, state["best"]), since=0 if improved else state["since"] + 1)
            return state["since"] >= METASCHEDULE_PATIENCE

    booster = xgboost.train(dict(METASCHEDULE), data, METASCHEDULE_ROUNDS, obj=objective, callbacks=[Patience()])
    return -booster.predict(xgboost.DMatrix(others))


def log_trees(rows: np.ndarray, seconds: np.ndarray, others: np.ndarray) -> np.ndarray:
    """XGBoost's trees for ln(seconds): small and many, with equal weights for all points."""
    import numpy as np
    import xgboost

    logs = np.log(seconds)
    parameters = {"max_depth": 4, "eta": 0.1, "subsample": 0.8, "colsample_bytree": 0.7, "tree_method": "exact"}
    parameters |= {"nthread": 1, "seed": 0, "base_score": float(logs.mean())}
    booster = xgboost.train(parameters, xgboost.DMatrix(rows, label=logs), 100)
    return booster.predict(xgboost.DMatrix(others))


def forest(rows: np.ndarray, seconds: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Extremely randomised trees (Geurts et al. 2006) for ln(seconds)."""
    import numpy as np
    from sklearn.ensemble import ExtraTreesRegressor

    return ExtraTreesRegressor(100, random_state=0, n_jobs=1).fit(rows, np.log(seconds)).predict(others)


def gaussian(rows: np.ndarray, seconds: np.ndarray, others: np.ndarray) -> np.ndarray:
    """A Gaussian process for ln(seconds), Matern 5/2 with one length for all columns."""
    import warnings

    import numpy as np
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    kernel = ConstantKernel(1.0) * Matern(3.0, nu=2.5) + WhiteKernel(0.01)
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with few points the likelihood may be greatest at a bound
        return process.fit(rows, np.log(seconds)).predict(others)


def linear(rows: np.ndarray, seconds: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Ridge regression of ln(seconds): each decision contributes a power law."""
    import numpy as np
    from sklearn.linear_model import Ridge

    return Ridge(1.0).fit(rows, np.log(seconds)).predict(others)


MODELS: Mapping[str, Model] = {
    "metaschedule": metaschedule,
    "log trees": log_trees,
    "forest": forest,
    "gaussian": gaussian,
    "linear": linear,
}


def model_quality(
    table: pandas.DataFrame,
    *,
    models: Sequence[str] = tuple(MODELS),
    sizes: Sequence[int] = (8, 16, 32, 64),
    repeats: int = 3,
    problems: int = 8,
    seed: int = 0,
) -> pandas.DataFrame:
    """Learning curves: how well models fitted to some of a problem's points rank the others.

    The `problems` with the most points are used, each split `repeats` times into `size` training points and the others.
    `rank` is Spearman's correlation of prediction and time among the others; `top1` and `top5` are the best time of the
    model's first one or five points over the best time of all others. All are means over problems, with intervals.
    """
    import numpy as np
    import pandas

    lines = []
    for (operator, arch), rows in points(table).groupby(["operator", "arch"], sort=True):
        counts = rows.groupby("problem").size().sort_values(ascending=False, kind="stable")
        # By model and number of training points: for each problem the means over its splits.
        scores: dict[tuple[str, int], list[np.ndarray]] = {}
        for problem in counts[counts >= min(sizes) + LEAST_OTHERS].index[:problems]:
            mine = rows[rows["problem"] == problem]
            data, seconds = _model_rows(mine), mine["seconds"].to_numpy(dtype=float)
            for size in (size for size in sizes if size + LEAST_OTHERS <= len(mine)):
                splits = [
                    np.random.default_rng([seed, repeat, size]).permutation(len(mine)) for repeat in range(repeats)
                ]
                for name in models:
                    found = [_score(MODELS[name], data, seconds, order[:size], order[size:]) for order in splits]
                    scores.setdefault((name, size), []).append(np.mean(found, axis=0))
        for (name, size), by_problem in sorted(scores.items(), key=lambda item: item[0][1]):
            means = np.array(by_problem)
            line: dict[str, Any] = {"operator": operator, "arch": arch, "model": name, "learnt": size}
            line["problems"] = len(means)
            line |= mean_interval(means[:, 0]).columns("rank")
            line |= ratio_interval(means[:, 1]).columns("top1") | ratio_interval(means[:, 2]).columns("top5")
            lines.append(line)
    return pandas.DataFrame(lines)


def _score(
    model: Model, data: np.ndarray, seconds: np.ndarray, learnt: np.ndarray, others: np.ndarray
) -> tuple[float, float, float]:
    """For a model fitted to some points: its rank correlation among the others, and ln of the best time of its first
    one and first five points over the best of all others.
    """
    import numpy as np
    from scipy.stats import spearmanr

    said, times = model(data[learnt], seconds[learnt], data[others]), seconds[others]
    ranked = times[np.argsort(said, kind="stable")]
    flat = np.ptp(said) == 0 or np.ptp(times) == 0
    rank = 0.0 if flat else float(spearmanr(said, times).statistic)
    return rank, math.log(ranked[0] / times.min()), math.log(ranked[:5].min() / times.min())


def _model_rows(rows: pandas.DataFrame) -> np.ndarray:
    """Points of one problem in the form of the tuner's models: a column for each template and each of its decisions."""
    import numpy as np

    columns: dict[str, Any] = {}
    for template, mine in rows.groupby("template"):
        columns[f"{template}"] = np.where(rows["template"] == template, 1.0, -1.0)
        for name in mine:
            if name.startswith("decision.") and mine[name].notna().any():
                columns[f"{template}.{name}"] = np.where(rows["template"] == template, numbers(rows[name]), -1.0)
    return np.column_stack(list(columns.values())).astype(np.float32)


def recorded_quality(table: pandas.DataFrame) -> pandas.DataFrame:
    """Quality of the searches' own models: Spearman's correlation of recorded predictions with times.

    `rank` is the mean over sessions with at least ten predictions. It should be near -1, since a larger prediction
    means a faster point. Empty if no trial has a prediction.
    """
    import pandas
    from scipy.stats import spearmanr

    right = table[(table["outcome"] == "ok") & table["predicted"].notna()] if "predicted" in table else table[:0]
    lines = []
    for key, rows in right.groupby(["operator", "arch", "strategy"]) if len(right) else ():
        each = [
            float(spearmanr(mine["predicted"], mine["seconds"]).statistic)
            for _, mine in rows.groupby(["problem", "session"])
            if len(mine) >= 10 and mine["predicted"].nunique() > 1
        ]
        if each:
            line = {**dict(zip(("operator", "arch", "strategy"), key, strict=True)), "sessions": len(each)}
            lines.append(line | mean_interval(each).columns("rank"))
    return pandas.DataFrame(lines)
