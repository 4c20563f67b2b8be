"""Studies of recorded trials: which templates and decisions matter, how good cost models are, how well results
transfer, and how many trials a space needs.

Every function takes the table of `trials.trials` and returns a table. Figures are ratios of times to the best recorded
time of the problem, averaged as logarithms; intervals have 95 % confidence and come from the bootstrap (Efron 1979)
over problems, since trials of one problem are not independent. Points that a search chose are not a random sample of a
space: results from logs hold for such points, results from a completely measured space for the space.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from .bootstrap import ratio_interval
from .decisions import importance, main_effects
from .models import model_quality, recorded_quality
from .points import points, searches

if TYPE_CHECKING:
    import numpy as np
    import pandas

WITHIN = 1.05
# A loss that a final between the best few can hardly distinguish from none.
CLOSE = 1.02
# Least number of trials: half of fewer would be little more than the templates' defaults.
LEAST_TRIALS = 8


# ------------------------------------------------------------------------------------------------- distributions


def distribution(table: pandas.DataFrame) -> pandas.DataFrame:
    """For each template: outcomes of its trials, and the distribution of its times relative to the best of each
    problem.

    Columns: `problems`, `trials`, `failed` (share), `wins` (problems whose best point is the template's), `best` and
    `median`: geometric means over problems of the template's best and median time over the problem's best;
    `within_1.25`: the share of its points that take at most 1.25 times as long as that.
    """
    import pandas

    known, lines = points(table), []
    for key, group in table.groupby(["operator", "arch", "template"], sort=True):
        own = known[(known["operator"] == key[0]) & (known["arch"] == key[1]) & (known["template"] == key[2])]
        tried = group[group["outcome"] != "environment"]
        by_problem = own.groupby("problem")["ratio"]
        best, median = (ratio_interval(x.map(math.log).tolist()) for x in (by_problem.min(), by_problem.median()))
        lines.append(
            {
                **dict(zip(("operator", "arch", "template"), key, strict=True)),
                "problems": group["problem"].nunique(),
                "trials": len(tried),
                "failed": float((tried["outcome"] != "ok").mean()) if len(tried) else math.nan,
                "wins": int((by_problem.min() == 1).sum()),
                **best.columns("best"),
                "median": median.value,
                "within_1.25": float((own["ratio"] <= 1.25).mean()) if len(own) else math.nan,
            }
        )
    return pandas.DataFrame(lines)


def failures(table: pandas.DataFrame) -> pandas.DataFrame:
    """Number of failed trials of each template, by outcome and reason (numbers as `#`)."""
    bad = table[table["outcome"] != "ok"]
    reason = bad["reason"].astype(str).str.split("\n").str[0].str.replace(r"\d[\d.,]*", "#", regex=True).str[:120]
    keys = ["operator", "arch", "template", "outcome", "reason"]
    found = bad.assign(reason=reason).groupby(keys).size().reset_index(name="trials")
    return found.sort_values("trials", ascending=False, ignore_index=True)


# --------------------------------------------------------------------------------------------------------- transfer


def transfer(table: pandas.DataFrame) -> pandas.DataFrame:
    """The loss of using the best point of one problem for another one of the same operator.

    A row for each ordered pair of problems, with `arch`, `problem`, `to_arch`, `to_problem`: `loss` is the time of the
    first one's best point on the second, over the second one's best; NaN if it was not measured. Problems on different
    architectures are paired too, if they have points in common.
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
    """`transfer`, grouped by the difference between the two problems: number of pairs, share of them that was measured,
    mean and worst loss. The groups are `arch`, `batch` or `dtype` alone, and anything else, which is `arch, other` if
    the architecture differs too.
    """
    import pandas

    from ..core import registry
    from ..core.problem import ProblemError

    def kind(row: Any) -> str:
        if row.arch != row.to_arch:
            return "arch" if row.problem == row.to_problem else "arch, other"
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
        line = dict(zip(("operator", "arch", "differs"), key, strict=True))
        line |= {"pairs": len(mine), "measured": float(mine["loss"].notna().mean())}
        line |= ratio_interval(there.map(math.log).tolist()).columns("loss")
        lines.append({**line, "worst": there.max()})
    return pandas.DataFrame(lines)


# ----------------------------------------------------------------------------------------------------------- budget


def budget(table: pandas.DataFrame, within: float = WITHIN) -> pandas.DataFrame:
    """Number of trials until a problem's search came `within` a factor of its best.

    A row for each problem's search (`searches`): `points`, the number of right ones; `good`, the share of points within
    the factor; `random`, the number of draws without replacement that find a good one with a probability of 95 %; and
    `recorded`, the number of trials that the search took.
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
    """The least number of draws without replacement that contain one of the `good` among `count`
    with this probability.
    """
    missed = 1.0
    for draws in range(1, count + 1):
        missed *= max(count - good - draws + 1, 0) / (count - draws + 1)
        if missed <= 1 - probability:
            return draws
    return count


def budget_summary(table: pandas.DataFrame, within: float = WITHIN) -> pandas.DataFrame:
    """`budget` over all problems of an operator: medians, and the 90th percentile of the searches' trials."""
    import pandas

    lines = []
    for key, mine in budget(table, within).groupby(["operator", "arch"], sort=True):
        line = dict(zip(("operator", "arch"), key, strict=True))
        line |= {"problems": len(mine), "points": int(mine["points"].median()), "good": float(mine["good"].median())}
        line |= {"random": int(mine["random"].median()), "recorded": int(mine["recorded"].median())}
        lines.append({**line, "recorded_90": int(mine["recorded"].quantile(0.9))})
    return pandas.DataFrame(lines)


def halves(table: pandas.DataFrame, least: int = LEAST_TRIALS) -> pandas.DataFrame:
    """The loss of stopping each search after half of its trials.

    A row for each problem whose first session, which began without known points of the problem, has at least `least`
    trials. `trials` includes failures; `loss` is the best time of the first half over the best of all, both from single
    trials, so that among equally fast points the second half may win by noise; `needed` is the number of trials until
    the best was approached within `CLOSE`.
    """
    import numpy as np
    import pandas

    tried = table[table["outcome"] != "environment"]
    lines = []
    for (operator, arch, problem), rows in tried.groupby(["operator", "arch", "problem"], sort=True):
        first = rows[rows["session"] == rows["session"].iloc[0]]
        best = np.minimum.accumulate(first["seconds"].fillna(math.inf).to_numpy(dtype=float))
        half = len(best) // 2
        if len(best) >= least and math.isfinite(best[half - 1]):
            line = {"operator": operator, "arch": arch, "problem": problem, "trials": len(best)}
            line |= {"loss": best[half - 1] / best[-1]}
            lines.append({**line, "needed": int((best <= CLOSE * best[-1]).argmax()) + 1})
    return pandas.DataFrame(lines, columns=["operator", "arch", "problem", "trials", "loss", "needed"])


def halves_summary(table: pandas.DataFrame) -> pandas.DataFrame:
    """The loss of half of the trials, over the first sessions of problems.

    `trials`: their median number; `loss`: the best time after half of them over the best after all, as the geometric
    mean over problems, and the `worst`; `close`: the share of problems whose loss is at most 2 %; `needed`: the share
    of its trials after which the median session was within 2 % of its best.
    """
    import pandas

    found, lines = halves(table), []
    for (operator, arch), mine in found.groupby(["operator", "arch"], sort=True):
        line = {"operator": operator, "arch": arch, "problems": len(mine), "trials": int(mine["trials"].median())}
        line |= ratio_interval(mine["loss"].map(math.log).tolist()).columns("loss") | {"worst": mine["loss"].max()}
        line |= {"close": float((mine["loss"] <= CLOSE).mean())}
        lines.append({**line, "needed": float((mine["needed"] / mine["trials"]).median())})
    return pandas.DataFrame(lines)


def best_so_far(table: pandas.DataFrame) -> pandas.DataFrame:
    """The best time after each trial of a problem's search (`searches`), over its final best: as `reached`, and as
    expected of equally many `random` draws of the same points.
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
    """The expected minimum of 1, 2, ... draws without replacement from values in ascending order."""
    import numpy as np

    count = len(rising)
    found = np.empty(count)
    # The i-th value is the minimum of k draws with probability C(count - i - 1, k - 1) / C(count, k).
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
    "halves": halves_summary,
}
"""What `tvm-sparse study` prints, by the name of `--part`."""


def sections(table: pandas.DataFrame, parts: Iterable[str] | None = None) -> dict[str, pandas.DataFrame]:
    """The tables of these parts, or of all; those without rows are left out."""
    chosen = PARTS if parts is None else {name: PARTS[name] for name in parts}
    found = {name: part(table) for name, part in chosen.items()}
    return {name: rows for name, rows in found.items() if len(rows)}


def shown(rows: pandas.DataFrame) -> pandas.DataFrame:
    """A table formatted for readers: texts, figures with three decimals, intervals in brackets."""
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
