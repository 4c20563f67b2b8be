"""Questions to recorded trials: which templates and decisions matter, how good cost models are, what transfers, and how
many trials a space needs.

Every function takes the table of `trials.trials` and returns a table. Figures are ratios of times over the best
recorded time of the problem, averaged as logarithms; intervals have 95 % confidence and come from the bootstrap (Efron
1979) over problems, as trials of one problem resemble each other. Points that a search chose are no random sample of a
space: what is said of logs holds for such points, what is said of a space that was measured in full for the space.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from .models import MODELS

if TYPE_CHECKING:
    import numpy as np
    import pandas

DRAWS = 1000
# Of fewer problems the bootstrap is over points.
LEAST_PROBLEMS = 5
# Of fewer points of a template a forest learns nothing worth reporting.
LEAST_POINTS = 40
# Of fewer points of a template in a problem little can be said of what lies between them.
LEAST_OF_PROBLEM = 4
FOLDS = 5
SHUFFLES = 3
TREES = 50
WITHIN = 1.05


def points(table: pandas.DataFrame) -> pandas.DataFrame:
    """A row for each point that was right, at its fastest trial, with `ratio`: its time over the problem's best.

    Of several versions of a template the latest one counts: decisions of others mean other programs.
    """
    right = table[table["outcome"] == "ok"]
    latest = right.groupby(["operator", "template"])["version"].transform("max")
    right = right[right["version"] == latest]
    first = right.sort_values("seconds", kind="stable").drop_duplicates(["arch", "problem", "candidate"])
    first = first.sort_index()
    best = first.groupby(["arch", "problem"])["seconds"].transform("min")
    return first.assign(ratio=first["seconds"] / best)


def mean_interval(logs: Sequence[float] | np.ndarray, seed: int = 0) -> tuple[float, float, float]:
    """exp of the mean of logarithms, and of the ends of its interval; NaN where there are too few."""
    import numpy as np

    values = np.asarray(logs, dtype=float)
    if not len(values):
        return math.nan, math.nan, math.nan
    low, high = _bootstrap(values, seed)
    return math.exp(values.mean()), math.exp(low), math.exp(high)


def _bootstrap(values: np.ndarray, seed: int) -> tuple[float, float]:
    """The interval of a mean; none where there are too few values to draw from."""
    import numpy as np

    if len(values) < LEAST_PROBLEMS:
        return math.nan, math.nan
    draws = np.random.default_rng(seed).integers(len(values), size=(DRAWS, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [0.025, 0.975])
    return float(low), float(high)


# ------------------------------------------------------------------------------------------------- distributions


def distribution(table: pandas.DataFrame) -> pandas.DataFrame:
    """Of each template: how its trials ended, and how its times lie over the best of each problem.

    Columns: `problems`, `trials`, `failed` (share), `wins` (problems whose best point is the template's), `best` and
    `median`: geometric means over problems of the template's best and median time over the problem's best; `quarter`:
    the share of its points that are within 1.25x.
    """
    import pandas

    known, lines = points(table), []
    for key, group in table.groupby(["operator", "arch", "template"], sort=True):
        own = known[(known["operator"] == key[0]) & (known["arch"] == key[1]) & (known["template"] == key[2])]
        tried = group[group["outcome"] != "environment"]
        by_problem = own.groupby("problem")["ratio"]
        best, low, high = mean_interval(by_problem.min().map(math.log).tolist())
        median, _, _ = mean_interval(by_problem.median().map(math.log).tolist())
        lines.append(
            {
                **dict(zip(("operator", "arch", "template"), key, strict=True)),
                "problems": group["problem"].nunique(),
                "trials": len(tried),
                "failed": float((tried["outcome"] != "ok").mean()) if len(tried) else math.nan,
                "wins": int((by_problem.min() == 1).sum()),
                "best": best,
                "best_low": low,
                "best_high": high,
                "median": median,
                "quarter": float((own["ratio"] <= 1.25).mean()) if len(own) else math.nan,
            }
        )
    return pandas.DataFrame(lines)


def failures(table: pandas.DataFrame) -> pandas.DataFrame:
    """How often trials of each template ended otherwise than right, by outcome and reason (numbers as `#`)."""
    bad = table[table["outcome"] != "ok"]
    reason = bad["reason"].astype(str).str.split("\n").str[0].str.replace(r"\d[\d.,]*", "#", regex=True).str[:120]
    keys = ["operator", "arch", "template", "outcome", "reason"]
    found = bad.assign(reason=reason).groupby(keys).size().reset_index(name="trials")
    return found.sort_values("trials", ascending=False, ignore_index=True)


# ---------------------------------------------------------------------------------------------- importance of decisions


def features(rows: pandas.DataFrame) -> pandas.DataFrame:
    """What a model of one template's times is given: decisions and axes that vary, as numbers."""
    import pandas

    names = [name for name in rows if name.startswith(("decision.", "axis.")) and rows[name].nunique() > 1]
    return pandas.DataFrame({name: _numbers(rows[name]) for name in names}, index=rows.index)


def _numbers(values: pandas.Series) -> np.ndarray:
    """log2(value + 1), as decisions and extents are mostly powers of two, or a text's place; -1 where there is none."""
    import numpy as np
    import pandas

    if not pandas.api.types.is_numeric_dtype(values):
        return pandas.factorize(values)[0].astype(float)
    found = values.astype(float)
    return (np.log2(found + 1) if not (found < 0).any() else found).fillna(-1.0).to_numpy()


def _groups(rows: pandas.DataFrame) -> np.ndarray:
    """What the bootstrap draws and cross-validation leaves out: problems, or points where there are few problems."""
    import numpy as np

    keys = rows["arch"] + " " + rows["problem"]
    return keys.to_numpy() if keys.nunique() >= LEAST_PROBLEMS else np.arange(len(rows))


def _by_template(table: pandas.DataFrame) -> Iterable[tuple[tuple[Any, ...], pandas.DataFrame]]:
    """Points of each template with enough of them, and `log`: ln(seconds) less its mean over the problem's points."""
    import numpy as np

    for key, rows in points(table).groupby(["operator", "arch", "template"], sort=True):
        rows = rows[rows.groupby(["arch", "problem"])["seconds"].transform("size") >= LEAST_OF_PROBLEM]
        if len(rows) >= LEAST_POINTS:
            logs = np.log(rows["seconds"])
            yield key, rows.assign(log=logs - logs.groupby(rows["problem"]).transform("mean"))


def importance(table: pandas.DataFrame, seed: int = 0) -> pandas.DataFrame:
    """Permutation importance of each decision (Breiman 2001, "Random Forests", section 10).

    A forest is fitted to ln(time) less its mean over the problem, of a template's points of all problems but some, and
    asked for those. There each decision is shuffled among the points of a problem. `importance` is by how much that
    raises the mean squared error, as a share of the variance within problems: 0 if the decision does not matter, or if
    another tells the same. `explained` is the share of that variance which the forest explains at all: where it is
    small, or negative, the importances mean little.
    """
    import numpy as np
    import pandas
    from sklearn.ensemble import ExtraTreesRegressor
    from sklearn.model_selection import GroupKFold

    lines = []
    for key, rows in _by_template(table):
        data, target, groups = features(rows), rows["log"].to_numpy(dtype=float), _groups(rows)
        problems, variance = pandas.factorize(rows["problem"])[0], float((target**2).mean())
        decisions = [name for name in data if name.startswith("decision.")]
        error = np.full(len(rows), math.nan)
        raised = {name: np.zeros(len(rows)) for name in decisions}
        generator = np.random.default_rng(seed)
        for train, test in GroupKFold(FOLDS).split(data, target, groups):
            forest = ExtraTreesRegressor(TREES, min_samples_leaf=2, random_state=seed, n_jobs=1)
            forest.fit(data.iloc[train].to_numpy(), target[train])
            kept = data.iloc[test].to_numpy()
            error[test] = (forest.predict(kept) - target[test]) ** 2
            # All shuffles of all decisions are asked for at once: a forest takes long to begin.
            shuffled = []
            for name, _ in itertools.product(decisions, range(SHUFFLES)):
                other = kept.copy()
                column = data.columns.get_loc(name)
                for problem in np.unique(problems[test]):
                    mine = np.flatnonzero(problems[test] == problem)
                    other[mine, column] = kept[generator.permutation(mine), column]
                shuffled.append(other)
            said = forest.predict(np.concatenate(shuffled)).reshape(len(decisions), SHUFFLES, len(test))
            for name, each in zip(decisions, said, strict=True):
                raised[name][test] = ((each - target[test]) ** 2).mean(axis=0) - error[test]
        for name in decisions:
            by_group = pandas.Series(raised[name]).groupby(groups).mean().to_numpy() / variance
            low, high = _bootstrap(by_group, seed)
            lines.append(
                {
                    **dict(zip(("operator", "arch", "template"), key, strict=True)),
                    "decision": name.removeprefix("decision."),
                    "importance": float(by_group.mean()),
                    "importance_low": low,
                    "importance_high": high,
                    "explained": 1 - float(error.mean()) / variance,
                    "points": len(rows),
                    "problems": rows["problem"].nunique(),
                }
            )
    found = pandas.DataFrame(lines)
    keys, rising = ["operator", "arch", "template", "importance"], [True, True, True, False]
    return found.sort_values(keys, ascending=rising, ignore_index=True) if lines else found


def main_effects(table: pandas.DataFrame) -> pandas.DataFrame:
    """By what factor points with a decision's value are slower than the mean of their template's points of the problem.

    `effect`: geometric mean over problems. A search measures good values of one decision
    together with good ones of others, so in logs effects are smaller than they would be one decision at a time.
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
                effect, low, high = mean_interval(mine.groupby(groups[mine.index]).mean().tolist())
                lines.append(
                    {
                        **dict(zip(("operator", "arch", "template"), key, strict=True)),
                        "decision": name.removeprefix("decision."),
                        "value": value,
                        "effect": effect,
                        "effect_low": low,
                        "effect_high": high,
                        "points": len(mine),
                    }
                )
    return pandas.DataFrame(lines)


# ---------------------------------------------------------------------------------------------------- cost models


def model_quality(
    table: pandas.DataFrame,
    *,
    models: Sequence[str] = tuple(MODELS),
    sizes: Sequence[int] = (8, 16, 32, 64),
    repeats: int = 3,
    problems: int = 8,
    seed: int = 0,
) -> pandas.DataFrame:
    """How well models that learnt some of a problem's points order the others: a learning curve.

    `problems` of those with the most points are taken, each split `repeats` times into `size` points to learn from and
    the others. `rank` is Spearman's correlation of prediction and time among the others, `top1` and `top5` the best of
    the one or five that the model favours over the best of the others (of which a search would measure so many); means
    over problems, with intervals.
    """
    import numpy as np
    import pandas
    from scipy.stats import spearmanr

    known = points(table)
    lines = []
    for (operator, arch), rows in known.groupby(["operator", "arch"], sort=True):
        counts = rows.groupby("problem").size().sort_values(ascending=False, kind="stable")
        scores: dict[tuple[str, int], dict[str, list[tuple[float, float, float]]]] = {}
        for problem in counts[counts >= min(sizes) + 10].index[:problems]:
            mine = rows[rows["problem"] == problem]
            data = _model_rows(mine)
            seconds = mine["seconds"].to_numpy(dtype=float)
            for size, repeat in itertools.product(sizes, range(repeats)):
                if size + 10 > len(mine):
                    continue
                order = np.random.default_rng([seed, repeat, size]).permutation(len(mine))
                learnt, others = order[:size], order[size:]
                best = seconds[others].min()
                for name in models:
                    said = MODELS[name](data[learnt], seconds[learnt], data[others])
                    ranked = seconds[others][np.argsort(said, kind="stable")]
                    flat = np.ptp(said) == 0 or np.ptp(seconds[others]) == 0
                    rank = 0.0 if flat else float(spearmanr(said, seconds[others]).statistic)
                    found = scores.setdefault((name, size), {}).setdefault(problem, [])
                    found.append((rank, math.log(ranked[0] / best), math.log(ranked[:5].min() / best)))
        for (name, size), by_problem in scores.items():
            means = np.array([np.mean(one, axis=0) for one in by_problem.values()])
            low, high = _bootstrap(means[:, 0], seed)
            top1, top5 = mean_interval(means[:, 1], seed), mean_interval(means[:, 2], seed)
            line = {"operator": operator, "arch": arch, "model": name, "learnt": size, "problems": len(means)}
            line |= {"rank": float(means[:, 0].mean()), "rank_low": low, "rank_high": high}
            line |= {"top1": top1[0], "top1_low": top1[1], "top1_high": top1[2]}
            line |= {"top5": top5[0], "top5_low": top5[1], "top5_high": top5[2]}
            lines.append(line)
    return pandas.DataFrame(lines)


def _model_rows(rows: pandas.DataFrame) -> np.ndarray:
    """Points of one problem as the tuner's models see them: a column a template, and one for each of its decisions."""
    import numpy as np

    columns: dict[str, Any] = {}
    for template, mine in rows.groupby("template"):
        columns[f"{template}"] = np.where(rows["template"] == template, 1.0, -1.0)
        for name in mine:
            if name.startswith("decision.") and mine[name].notna().any():
                columns[f"{template}.{name}"] = np.where(rows["template"] == template, _numbers(rows[name]), -1.0)
    return np.column_stack(list(columns.values())).astype(np.float32)


def recorded_quality(table: pandas.DataFrame) -> pandas.DataFrame:
    """What searches' own models were worth: Spearman's correlation of recorded predictions with times.

    Of each session with ten predictions or more, all of one batch or of several models: `rank`, the mean over sessions,
    should be near -1, as a larger prediction means a faster point. Empty where no trial has a prediction.
    """
    import numpy as np
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
            low, high = _bootstrap(np.array(each), 0)
            line = dict(zip(("operator", "arch", "strategy"), key, strict=True))
            lines.append(
                {**line, "sessions": len(each), "rank": float(np.mean(each)), "rank_low": low, "rank_high": high}
            )
    return pandas.DataFrame(lines)


# --------------------------------------------------------------------------------------------------------- transfer


def transfer(table: pandas.DataFrame) -> pandas.DataFrame:
    """What is lost when the best point of one problem is used for another, of the same operator.

    A row for each ordered pair of problems, with `arch`, `problem`, `to_arch`, `to_problem`: `loss` is the time of the
    first one's best point on the second, over the second one's best; NaN where nobody measured it. Problems of other
    architectures are paired, too, where they have points in common.
    """
    import pandas

    lines = []
    for _, rows in points(table).groupby("operator", sort=True):
        nodes: dict[tuple[str, str], dict[str, float]] = {}
        for (arch, problem), mine in rows.groupby(["arch", "problem"], sort=True):
            nodes[arch, problem] = dict(zip(mine["candidate"], mine["ratio"], strict=True))
        best = {node: min(found, key=lambda c: found[c]) for node, found in nodes.items()}
        shared = {arch: set().union(*(found for (a, _), found in nodes.items() if a == arch)) for arch, _ in nodes}
        for one, other in itertools.product(nodes, nodes):
            if one[0] == other[0] or shared[one[0]] & shared[other[0]]:
                line = {"arch": one[0], "problem": one[1], "to_arch": other[0], "to_problem": other[1]}
                lines.append({**line, "loss": nodes[other].get(best[one], math.nan)})
    return pandas.DataFrame(lines, columns=["arch", "problem", "to_arch", "to_problem", "loss"])


def transfer_summary(table: pandas.DataFrame) -> pandas.DataFrame:
    """`transfer` by what two problems differ in: their number, the share of them that was measured, and mean and worst
    loss. `batch` alone, `dtype` alone, another architecture, or anything else.
    """
    import pandas

    from ..core import registry
    from ..core.problem import ProblemError

    def kind(row: Any) -> str:
        if row.arch != row.to_arch:
            return "arch"
        try:
            one, other = registry.parse(row.problem), registry.parse(row.to_problem)
        except ProblemError:
            return "other"
        differing = {name for name, value in one.axes.items() if other.axes[name] != value}
        return "batch" if differing == {one.batch_axis} else "dtype" if differing == {"dtype"} else "other"

    pairs = transfer(table)
    pairs = pairs[(pairs["problem"] != pairs["to_problem"]) | (pairs["arch"] != pairs["to_arch"])]
    if not len(pairs):
        return pandas.DataFrame(columns=["operator", "arch", "differs", "pairs", "measured", "loss", "worst"])
    operator = pairs["problem"].str.partition("/")[0].rename("operator")
    differs = pandas.Series([kind(row) for row in pairs.itertuples()], index=pairs.index, name="differs")
    lines = []
    for key, mine in pairs.groupby([operator, "arch", differs]):
        there = mine["loss"].dropna()
        mean, low, high = mean_interval(there.map(math.log).tolist())
        line = dict(zip(("operator", "arch", "differs"), key, strict=True))
        line |= {"pairs": len(mine), "measured": float(mine["loss"].notna().mean())}
        lines.append({**line, "loss": mean, "loss_low": low, "loss_high": high, "worst": there.max()})
    return pandas.DataFrame(lines)


# ----------------------------------------------------------------------------------------------------------- budget


def searches(table: pandas.DataFrame) -> pandas.DataFrame:
    """The points of each problem's longest session that were right, in the order in which they were measured, with
    `ratio`: over the best of that session. A space that was measured in full is one.

    Other sessions of a problem began with what was known already, or had other templates.
    """
    right = table[table["outcome"] == "ok"].drop_duplicates(["arch", "problem", "session", "candidate"])
    length = right.groupby(["arch", "problem", "session"])["order"].transform("size")
    right = right[length == length.groupby([right["arch"], right["problem"]]).transform("max")]
    first = right.groupby(["arch", "problem"])["session"].transform("first")
    right = right[right["session"] == first].sort_values(["arch", "problem", "order"], kind="stable")
    return right.assign(ratio=right["seconds"] / right.groupby(["arch", "problem"])["seconds"].transform("min"))


def budget(table: pandas.DataFrame, within: float = WITHIN) -> pandas.DataFrame:
    """How many trials of a problem's search came `within` a factor of its best.

    A row a problem, of its `searches`: `points` that were right, the share of `good` ones, `random`: how many draws
    without replacement find a good one with a probability of 95 %, and `recorded`: how many the search took.
    """
    import pandas

    lines = []
    for (operator, arch, problem), rows in searches(table).groupby(["operator", "arch", "problem"], sort=True):
        good = (rows["ratio"] <= within).to_numpy()
        lines.append(
            {
                "operator": operator,
                "arch": arch,
                "problem": problem,
                "points": len(rows),
                "good": float(good.mean()),
                "random": draws_needed(len(rows), int(good.sum())),
                "recorded": int(good.argmax()) + 1,
            }
        )
    return pandas.DataFrame(lines)


def draws_needed(count: int, good: int, probability: float = 0.95) -> int:
    """The least number of draws without replacement that hold one of the `good` of `count` with this probability."""
    missed = 1.0
    for draws in range(1, count + 1):
        missed *= max(count - good - draws + 1, 0) / (count - draws + 1)
        if missed <= 1 - probability:
            return draws
    return count


def budget_summary(table: pandas.DataFrame, within: float = WITHIN) -> pandas.DataFrame:
    """`budget` of all problems of an operator: medians, and the 90th percentile of what searches took."""
    import pandas

    lines = []
    for key, mine in budget(table, within).groupby(["operator", "arch"], sort=True):
        line = dict(zip(("operator", "arch"), key, strict=True))
        line |= {"problems": len(mine), "points": int(mine["points"].median()), "good": float(mine["good"].median())}
        line |= {"random": int(mine["random"].median()), "recorded": int(mine["recorded"].median())}
        lines.append({**line, "recorded_90": int(mine["recorded"].quantile(0.9))})
    return pandas.DataFrame(lines)


def best_so_far(table: pandas.DataFrame) -> pandas.DataFrame:
    """The best time after each trial of a problem's search (`searches`), over its best: as it was `reached`, and what
    is expected of as many `random` draws of the same points.
    """
    import numpy as np
    import pandas

    lines = []
    for (operator, arch, problem), rows in searches(table).groupby(["operator", "arch", "problem"], sort=True):
        ratios = rows["ratio"].to_numpy(dtype=float)
        reached = np.minimum.accumulate(ratios)
        expected = expected_best(np.sort(ratios))
        for trial, (now, drawn) in enumerate(zip(reached, expected, strict=True), start=1):
            lines.append((operator, arch, problem, trial, now, drawn))
    return pandas.DataFrame(lines, columns=["operator", "arch", "problem", "trial", "reached", "random"])


def expected_best(rising: np.ndarray) -> np.ndarray:
    """The expected least of 1, 2, ... draws without replacement from values in rising order."""
    import numpy as np

    count = len(rising)
    found = np.empty(count)
    # Of k draws the i-th value is the least with probability C(count - i - 1, k - 1) / C(count, k).
    chance = np.full(count, 1 / count)
    place = np.arange(count)
    for k in range(1, count + 1):
        found[k - 1] = (chance * rising).sum()
        chance = chance * np.maximum(count - place - k, 0) / k * (k + 1) / max(count - k, 1)
    return found


PARTS: dict[str, Callable[[pandas.DataFrame], pandas.DataFrame]] = {
    "distribution": distribution,
    "failures": failures,
    "importance": importance,
    "effects": main_effects,
    "models": model_quality,
    "recorded-models": recorded_quality,
    "transfer": transfer_summary,
    "budget": budget_summary,
}
"""What `tvm-sparse study` prints, by the name of `--part`."""


def sections(table: pandas.DataFrame, parts: Iterable[str] | None = None) -> dict[str, pandas.DataFrame]:
    """The tables of these parts, or of all; those that have no rows are left out."""
    chosen = PARTS if parts is None else {name: PARTS[name] for name in parts}
    found = {name: part(table) for name, part in chosen.items()}
    return {name: rows for name, rows in found.items() if len(rows)}


def shown(rows: pandas.DataFrame) -> pandas.DataFrame:
    """A table of these as people read it: texts, figures with three digits behind the point, intervals in brackets."""
    import pandas

    def text(value: Any) -> str:
        if isinstance(value, float):
            return "" if value != value else f"{value:.3f}"
        return f"{value:,}" if isinstance(value, int) else str(value)

    found = {}
    for name in rows:
        if not name.endswith(("_low", "_high")):
            texts = rows[name].map(text)
            if f"{name}_low" in rows:
                low, high = rows[f"{name}_low"].map(text), rows[f"{name}_high"].map(text)
                texts = texts + (" [" + low + ", " + high + "]").where(low != "", "")
            found[name] = texts
    return pandas.DataFrame(found)
