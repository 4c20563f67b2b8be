"""The gain of tuning over the alternatives, for each operator and architecture, from the records that ship.

    python scripts/tuning_gain.py        # writes scripts/results/tuning-gain.csv; needs no GPU

fallback    the kernel that runs without records and predictions, measured in turn with the winner in each final
defaults    the fastest of the templates' defaults, chosen by their authors: the result of one trial per template
predicted   look-up's choice for a problem that was left out of its model's training (scripts/study_prediction.py)
peers       the fastest other library in the same run of a benchmark (scripts/results/peers-*.csv)
trials      number of trials until 95 % of the gain over the fallback, in a problem's longest run of at least 16 trials
            that began with the fallback; runs that gained less than 2 % are left out. Runs try winners of similar
            problems first

Gains are times over the tuned time, geometric means with bootstrap intervals over problems. Times of defaults are
single trials, compared with the best single trial in the same log, which favours the tuned side by the noise of many
trials, about 1 %.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from reproduction import RESULTS, read_csv, studied, write_csv

from tvm_sparse.bench.compare import NAME
from tvm_sparse.cli.common import console, table
from tvm_sparse.core import registry, spaces
from tvm_sparse.records import Best, Log, Trial
from tvm_sparse.records.queries import recorded_archs
from tvm_sparse.research.bootstrap import interval
from tvm_sparse.tuning import training
from tvm_sparse.tuning.training import Measured

LOGS = Path(__file__).parent.parent / "tuning_logs"
# Gains below this are within the noise of a final.
WORTH = 1.02
SHARE = 0.95
# Least number of trials of a run that is counted: shorter ones continued earlier runs.
LEAST_TRIALS = 16
COLUMNS = ("operator", "arch", "over", "problems", "gain", "low", "high", "least", "most", f"above_{WORTH}")


def gain(ratios: Sequence[float]) -> list[object]:
    """Problems, geometric mean with its interval, minimum and maximum, and the share with a gain."""
    if not ratios:
        return [0, *[""] * 6]
    logs = np.log(ratios)
    found = interval(logs, np.mean)
    ends = (math.exp(x) for x in (found.value, found.low, found.high))
    above = sum(ratio > WORTH for ratio in ratios) / len(ratios)
    return [len(ratios), *(f"{x:.3f}" for x in (*ends, min(ratios), max(ratios))), f"{above:.2f}"]


def over_defaults(data: Iterable[Measured]) -> list[float]:
    """For each problem the fastest of its templates' defaults over the best, if one was measured."""
    ratios = []
    for one in data:
        names = spaces.applicable(one.problem, one.machine)[0]
        found = [spaces.find(n, one.problem.operator) for n in names]
        times = [one.seconds.get(t.candidate(t.default(one.problem, one.machine))) for t in found]
        if any(times):
            ratios.append(min(t for t in times if t) / one.best)
    return ratios


def over_peers(operator: str, arch: str) -> list[float]:
    """Ratios from the benchmark files of this architecture, which their first lines name."""
    ratios = []
    for path in sorted(RESULTS.glob("peers-*.csv")):
        facts, rows = read_csv(path)
        if "rotated" in path.stem or f"({arch})" not in facts.get("device", ""):
            continue
        best: dict[str, float] = {}
        for row in rows:
            if row["problem"].startswith(f"{operator}/") and row["implementation"] != NAME and row["peer_over_ours"]:
                ratio = float(row["peer_over_ours"])
                best[row["problem"]] = min(ratio, best.get(row["problem"], math.inf))
        ratios += best.values()
    return ratios


def over_predicted(operator: str, arch: str) -> list[object]:
    """By cross-validation, of which only mean and worst are recorded."""
    path = RESULTS / f"prediction-{arch}.csv"
    if path.exists():
        for row in read_csv(path)[1]:
            if (row["operator"], row["left_out"], row["way"]) == (operator, "problem", "chosen"):
                return [row["measured"], row["geometric_mean"], "", "", "", row["worst"], ""]
    return gain([])


def trials_needed(trials: Iterable[Trial], best: Best) -> int | None:
    """Number of trials until `SHARE` of the gain, in the longest run with the fallback; None if it gained nothing."""
    runs: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.problem == best.problem:
            runs.setdefault(trial.session, []).append(trial)
    long = [run for run in runs.values() if len(run) >= LEAST_TRIALS]
    whole = [run for run in long if any(t.candidate == best.fallback and t.seconds for t in run)]
    longest = sorted(max(whole, key=len, default=[]), key=lambda trial: trial.order)
    times = [trial.median if trial.outcome == "ok" else math.inf for trial in longest]
    fallback = next((trial.median for trial in longest if trial.candidate == best.fallback), 0.0)
    if fallback < WORTH * min(times, default=math.inf):
        return None
    wanted = fallback - SHARE * (fallback - min(times))
    return next(n for n, time in enumerate(times, start=1) if time <= wanted)


def main(logs: Annotated[Path, typer.Option(help="Folder of records.")] = LOGS) -> None:
    lines: list[list[object]] = []
    for operator in registry.operators():
        for arch in recorded_archs([logs], [operator]):
            log = Log(logs, arch, operator)
            bests, data = log.best(), training.measured(log)
            trials = list(log.read().timed(fresh=False))
            needed = [n for best in bests.values() if (n := trials_needed(trials, best)) is not None]
            rows: dict[str, list[object]] = {
                "fallback": gain([best.fallback_seconds / best.seconds for best in bests.values()]),
                "defaults": gain(over_defaults(data)),
                "predicted": over_predicted(operator, arch),
                "peers": gain(over_peers(operator, arch)),
            }
            lines += [[operator, arch, over, *row] for over, row in rows.items() if row[0]]
            if needed:
                low, middle, high = np.quantile(needed, [0.25, 0.5, 0.9])
                lines.append(
                    [
                        operator,
                        arch,
                        "trials",
                        len(needed),
                        f"{middle:.0f}",
                        f"{low:.0f}",
                        f"{high:.0f}",
                        min(needed),
                        max(needed),
                        "",
                    ]
                )
    shown = table(*COLUMNS, right=COLUMNS[3:])
    for line in lines:
        shown.add_row(*map(str, line))
    console().print(shown)
    facts = studied(logs) | {
        "gain": "time over the tuned time, geometric mean over problems, 95 % bootstrap interval",
        "trials": "to 95 % of the gain over the fallback: median, with the lower quartile and the 90th percentile",
    }
    write_csv(RESULTS / "tuning-gain.csv", facts, COLUMNS, lines)


if __name__ == "__main__":
    typer.run(main)
