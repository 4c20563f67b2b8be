"""Cost models that order a problem's points, all behind one signature.

    model(rows, seconds, others) -> predictions of `others`, the smaller the faster

`rows` and `others` are points as numbers, a row each: log2(value + 1) of decisions, -1 where a template has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

Model = Callable[["np.ndarray", "np.ndarray", "np.ndarray"], "np.ndarray"]

# As `meta_schedule.cost_model.XGBModel` of TVM 0.27 has them.
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


def metaschedule(rows: np.ndarray, seconds: np.ndarray, others: np.ndarray) -> np.ndarray:
    """MetaSchedule's XGBoost model, trained as it trains it, without the compiler.

    Target is the share best / time, the squared error of a point is weighed by that share, so that fast points count
    most; training ends once the error on what is learnt has not fallen for 50 rounds. Returns the negative share.
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
    """XGBoost's trees for ln(seconds): small, many, every point with the same weight."""
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
        warnings.simplefilter("ignore")  # of few points the likelihood may be greatest at a bound
        return process.fit(rows, np.log(seconds)).predict(others)


def linear(rows: np.ndarray, seconds: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Ridge regression of ln(seconds): every decision by itself, a power law."""
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
