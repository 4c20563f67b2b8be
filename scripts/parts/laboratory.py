"""Results of recorded trials: distributions, failures, models, budgets; and of simulated searches."""

from __future__ import annotations

import collections
import statistics
import textwrap
from functools import partial

from tvm_sparse.core import registry
from tvm_sparse.records.space import read as read_space
from tvm_sparse.tuning.strategies import DEFAULT

from .register import PARTS, part
from .results import RESULTS, Row, provenance, results, studied
from .text import WIDTH, code, listed, percent, table, us

TRIALS_GPU = "sm_90a"


def _number(row: Row, name: str, digits: int = 2) -> str:
    """A figure, with its interval if it has one; empty if missing."""
    if not row[name]:
        return ""
    text = f"{float(row[name]):.{digits}f}"
    low, high = row.get(f"{name}_low", ""), row.get(f"{name}_high", "")
    return f"{text} [{float(low):.{digits}f}, {float(high):.{digits}f}]" if low and high else text


@part
def trials_distribution() -> str:
    rows = [
        [code(r["operator"]), code(r["template"]), r["problems"], f"{int(r['trials']):,}", percent(float(r["failed"]))]
        + [r["wins"], _number(r, "best"), _number(r, "median"), percent(float(r["within_1.25"] or 0))]
        for r in results("trials-distribution").rows
        if r["arch"] == TRIALS_GPU
    ]
    head = ["operator", "template", "problems", "trials", "failed", "wins", "its best", "its median", "within 1.25x"]
    return table(head, rows)


@part
def trials_failures() -> str:
    rows = [
        [code(r["template"]), r["arch"], r["outcome"], r["reason"], r["trials"]]
        for r in results("trials-failures").rows
    ]
    return table(["template", "arch", "outcome", "reason", "trials"], rows)


@part
def trials_importance() -> str:
    """For each template the decisions whose interval excludes 0, if the model explains something."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for name in ("trials-importance", "trials-spaces-importance"):
        for r in results(name).rows if (RESULTS / f"{name}.csv").exists() else ():
            kinds.setdefault((r["template"], r["arch"], "space" if "spaces" in name else "logs"), []).append(r)
    rows = []
    for (template, arch, data), found in kinds.items():
        explained = float(found[0]["explained"])
        matter = [r for r in found if r["importance_low"] and float(r["importance_low"]) > 0.01]
        if explained < 0.2:
            told, rest = "-", "-"
        else:
            told = ", ".join(f"{code(r['decision'])} {_number(r, 'importance')}" for r in matter)
            rest = ", ".join(code(r["decision"]) for r in found if r not in matter)
        rows.append([code(template), arch, data, found[0]["points"], f"{explained:.2f}", told, rest])
    head = ["template", "arch", "data", "points", "explained", "matter", "not told apart from nothing"]
    return table(head, rows)


@part
def trials_models() -> str:
    rows = [
        [
            code(r["operator"]),
            r["learnt"],
            r["problems"],
            r["model"],
            *(_number(r, n) for n in ("rank", "top1", "top5")),
        ]
        for r in results("trials-models").rows
        if r["arch"] == TRIALS_GPU and r["learnt"] in ("8", "16", "32")
    ]
    return table(["operator", "learnt", "problems", "model", "rank correlation", "top 1", "top 5"], rows)


@part
def trials_models_sentence() -> str:
    """Which model's first choice is fastest, after how many points, and where intervals distinguish it from
    MetaSchedule's.
    """
    rows = [r for r in results("trials-models").rows if r["arch"] == TRIALS_GPU and r["top5_low"]]
    said = []
    for learnt in ("8", "16", "32"):
        mine = [r for r in rows if r["learnt"] == learnt]
        models = list(dict.fromkeys(r["model"] for r in mine))
        means = {m: statistics.geometric_mean(float(r["top5"]) for r in mine if r["model"] == m) for m in models}
        ranked = sorted(means, key=lambda m: means[m])
        listed_models = ", ".join(f"{m} {means[m]:.3f}" for m in ranked)
        said.append(f"after {learnt} points {listed_models}")
    apart = [
        f"{r['model']} on {code(r['operator'])} after {r['learnt']}"
        for r in rows
        for base in rows
        if base["model"] == "metaschedule"
        and (base["operator"], base["learnt"]) == (r["operator"], r["learnt"])
        and float(r["top5_high"]) < float(base["top5_low"])
    ]
    verdict = f"Better than MetaSchedule's beyond both intervals: {', '.join(apart)}." if apart else (
        "No other model is better than MetaSchedule's by more than the intervals."
    )  # fmt: skip
    text = f"The best of the five favourites takes, over operators: {'; '.join(said)}. {verdict}"
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


@part
def trials_transfer() -> str:
    rows = [
        [code(r["operator"]), r["arch"], r["differs"], r["pairs"], percent(float(r["measured"])), _number(r, "loss"),
         f"{float(r['worst']):.2f}"]
        for r in results("trials-transfer").rows
        if r["loss"] and (r["arch"] == TRIALS_GPU or r["differs"] == "arch")
    ]  # fmt: skip
    return table(["operator", "of", "the two differ in", "pairs", "measured", "loss", "worst"], rows)


@part
def trials_budget() -> str:
    rows = []
    for name in ("trials-budget", "trials-spaces-budget"):
        for r in results(name).rows if (RESULTS / f"{name}.csv").exists() else ():
            data = "space" if "spaces" in name else "logs"
            cells = [code(r["operator"]), r["arch"], data, r["problems"], r["points"], percent(float(r["good"]))]
            rows.append([*cells, r["random"], r["recorded"], r["recorded_90"]])
    head = ["operator", "arch", "data", "problems", "points", "within 5 %", "random draws", "as recorded", "90 %"]
    return table(head, rows)


SEARCHES, GAINS = "searches", "tuning-gain"
STARTS = {"cold": "defaults", "warm": "defaults and other problems' winners"}


@part
def recorded_spaces() -> str:
    rows = []
    for path in sorted((RESULTS / "spaces").glob("*.jsonl.xz")):
        space = read_space(path)
        outcomes = collections.Counter(trial.outcome for trial in space.trials)
        right = [trial.seconds for trial in space.trials if trial.outcome == "ok"]
        best = min(map(min if space.arch.startswith("x86") else statistics.median, right))
        spread = statistics.median(max(times) / min(times) - 1 for times in right)
        failed = ", ".join(f"{n} {what}" for what, n in outcomes.most_common() if what != "ok") or "none"
        cells = [path.name.removesuffix(".jsonl.xz"), code(registry.parse(space.problem).typed)]
        cells += [f"{len(space.trials):,}{'' if space.complete else f' of {space.points:,}'}", failed]
        rows.append([*cells, us(best * 1e6), f"{len(right[0])}", f"{100 * spread:.1f} %"])
    head = ["space", "problem", "points", "not right", "best, us", "rounds", "between rounds"]
    return table(head, rows)


def _search_rows(start: str, space: str | None = None) -> list[Row]:
    return [r for r in results(SEARCHES).rows if r["start"] == start and space in (None, r["space"])]


def _searches_of(start: str) -> str:
    rows = []
    for r in _search_rows(start):
        excess = [f"{100 * float(r[f'excess_{n}']):.1f} %" if r[f"excess_{n}"] else "" for n in (16, 32, 64)]
        over = f"{float(r['over_reference']):.3f} [{float(r['low']):.3f}, {float(r['high']):.3f}]" if r["p"] else ""
        half = f"{float(r['half']):.3f} [{float(r['half_low']):.3f}, {float(r['half_high']):.3f}]" if r["p"] else ""
        near = f"{r['trials_to_5'] or '-'} ({100 * float(r['reached']):.0f} %)" if r["reached"] else ""
        rows.append([r["space"], r["strategy"], *excess, near, over, half, r["own_seconds"]])
    head = ["space", "strategy", "16 trials", "32", "64", "to 5 %", "over evolutionary", "with half", "s"]
    return table(head, rows)


@part
def searches_cold() -> str:
    return _searches_of("cold")


@part
def searches_warm() -> str:
    return _searches_of("warm")


@part
def searches_findings() -> str:
    """Conclusions from the rows of all spaces together."""
    blocks, each = [], list[str]()
    for start, after in STARTS.items():
        rows = {r["strategy"]: r for r in _search_rows(start, "all")}
        if not rows:
            continue
        spaces_ = len({r["space"] for r in _search_rows(start)} - {"all"})
        said = [f"**Started from {after}** ({spaces_} spaces, {rows['random']['searches']} seeds each)."]
        blind = rows["random"]
        value, low, high = (1 / float(blind[name]) for name in ("over_reference", "high", "low"))
        told = not low <= 1 <= high and float(blind["p"]) < 0.05
        verdict = ("a gain" if high < 1 else "a loss") if told else "no difference that can be told"
        said.append(
            f"After 64 trials what the evolutionary search with XGBoost has found takes {value:.3f} times"
            f" [{low:.3f}, {high:.3f}] as long as what random search has found (p = {blind['p']}): {verdict}."
        )
        better = [r for r in rows.values() if r["p"] and float(r["high"]) < 1]
        each = [f"{code(r['strategy'])} takes {float(r['over_reference']):.3f} times as long" for r in better]
        said.append(f"Better than it with its whole interval: {listed(each) if each else 'none'}.")
        halves = [r for r in rows.values() if r["p"] and r["strategy"] != "evolutionary"]
        enough = [r["strategy"] for r in halves if float(r["half_high"]) <= 1.02]
        point = [r["strategy"] for r in halves if float(r["half"]) <= 1.02 and r["strategy"] not in enough]
        said.append(
            "With half of the trials, 32, these come within 2 % of what the evolutionary search finds with 64: "
            + (f"{listed(list(map(code, enough)))}, the whole interval" if enough else "none with its whole interval")
            + (f"; {listed(list(map(code, point)))} by the mean alone" if point else "")
            + "."
        )
        apart = [r for r in _search_rows(start) if r["p"] and r["space"] != "all"]
        names = list(dict.fromkeys(r["strategy"] for r in apart))
        within = {n: sum(float(r["half"]) <= 1.02 for r in apart if r["strategy"] == n) for n in names}
        said.append(
            f"Space by space, of {spaces_}, by the mean: "
            + ", ".join(f"{code(name)} on {count}" for name, count in within.items())
            + "."
        )
        blocks.append(" ".join(said))
    # After the loop these are the lines of `tune`'s own start.
    verdict = f"there {listed(each)}" if each else "nothing is better there"
    blocks.append(
        f"`tune` starts in the second way. It takes {code(DEFAULT)} unless `--strategy` names another: {verdict}."
    )
    return "\n\n".join(blocks)


@part
def tuning_gain() -> str:
    over = {"fallback": "over the fallback", "defaults": "over the best default", "predicted": "over the prediction",
            "peers": "over peers"}  # fmt: skip
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in results(GAINS).rows:
        found.setdefault((row["operator"], row["arch"]), {})[row["over"]] = row
    rows = []
    for (operator, arch), by in found.items():
        cells = [code(operator), arch]
        for name in over:
            r = by.get(name)
            ends = (
                f" [{float(r['low']):.2f}, {float(r['high']):.2f}]" if r and r["low"] and r["problems"] != "1" else ""
            )
            cells.append(f"{float(r['gain']):.2f}{ends} ({r['problems']})" if r else "")
        trials = by.get("trials")
        rows.append([*cells, f"{trials['gain']}, {trials['high']} ({trials['problems']})" if trials else ""])
    return table(["operator", "arch", *over.values(), "trials to 95 %"], rows)


HALVES = "half-the-trials"


@part
def halves_recorded() -> str:
    rows = [
        [r["operator"] if r["operator"] == "all" else code(r["operator"]), r["least"], r["way"], r["problems"],
         r["trials"], f"{float(r['loss']):.3f}" + (f" [{r['low']}, {r['high']}]" if r["low"] else ""), r["worst"],
         percent(float(r["close"])), percent(float(r["measured"]))]
        for r in results(f"{HALVES}-{TRIALS_GPU}").rows
    ]  # fmt: skip
    head = ["operator", "trials, at least", "way", "problems", "trials", "loss", "worst", "within 2 %", "measured"]
    return table(head, rows)


@part
def halves_measured() -> str:
    found = results(f"{HALVES}-h200") if (RESULTS / f"{HALVES}-h200.csv").exists() else None
    if found is None:
        return "No GPU has tuned these anew yet: `python scripts/half_the_trials.py --measure`."
    rows = [
        [code(r["problem"]), r["shipped_trials"], r["trials"], r["shipped_us"], r["found_us"], r["fallback_us"],
         f"{float(r['ratio']):.3f}"]
        for r in found.rows
    ]  # fmt: skip
    head = ["problem", "trials shipped", "trials", "shipped, us", "found, us", "fallback, us", "found / shipped"]
    return f"{provenance(f'{HALVES}-h200')}: {found.facts['ratio']}.\n\n" + table(head, rows)


PARTS["where-trials"] = partial(studied, "trials-distribution")
PARTS["where-searches"] = partial(studied, SEARCHES)
PARTS["where-gain"] = partial(studied, GAINS)
PARTS["where-halves"] = partial(studied, f"{HALVES}-{TRIALS_GPU}")
PARTS["where-prediction"] = partial(studied, "prediction-sm_90a")
