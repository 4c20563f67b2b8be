"""Compares search strategies on the recorded spaces (scripts/results/spaces/), cold and with other problems' winners.

    python scripts/study_searches.py                       # all strategies; minutes
    python scripts/study_searches.py --strategy boosting   # and the reference; prints, writes nothing

Writes scripts/results/searches.csv, from which figures.py fills docs/simulated-search.md, and the page's plots.
Needs no GPU.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from reproduction import RESULTS, studied, write_csv

from tvm_sparse.cli.common import console, table
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Log
from tvm_sparse.research import plots, simulation
from tvm_sparse.research.simulation import Recorded, Run, Summary

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "tuning_logs"
SPACES = RESULTS / "spaces"
IMAGES = ROOT / "docs" / "images"
REFERENCE = "evolutionary"
STRATEGIES = ("evolutionary", "random", "replay", "boosting", "tpe", "qmc", "genetic", "portfolio")
# The number of trials that `tune` measures by default.
BUDGET = 64
MARKS = (16, 32, 64)
COLUMNS = (
    "start",
    "space",
    "problem",
    "points",
    "right",
    "strategy",
    "searches",
    *(f"excess_{n}" for n in MARKS),
    "trials_to_5",
    "seconds_to_5",
    "reached",
    "over_reference",
    "low",
    "high",
    "p",
    "half",
    "half_low",
    "half_high",
    "own_seconds",
)
# Columns that are printed, since a terminal has no room for all.
SHOWN = [COLUMNS.index(name) for name in COLUMNS if name in (
    "start", "space", "strategy", *(f"excess_{n}" for n in MARKS), "trials_to_5", "over_reference", "p", "half",
    "own_seconds",
)]  # fmt: skip


def row(start: str, space: Recorded | None, found: Summary, searches: int) -> list[object]:
    """A line of `COLUMNS`; without a space, for all spaces together."""
    facts: list[object] = ["all", "", "", ""]
    if space is not None:
        right = sum(map(math.isfinite, space.seconds))
        facts = [space.name, parse(space.problem).typed, len(space.domain.points), right]
    near = [found.trials_to_near, found.seconds_to_near and f"{found.seconds_to_near:.0f}", f"{found.reached:.2f}"]
    return [
        start,
        *facts,
        found.strategy,
        searches,
        *(f"{excess.value:.4f}" for excess in found.excess.values()),
        *(["", "", ""] if space is None else ["" if x is None else x for x in near]),
        *(f"{x:.4f}" for x in (found.against.value, found.against.low, found.against.high)),
        f"{found.wilcoxon:.2g}",
        *(f"{x:.4f}" for x in (found.halved.value, found.halved.low, found.halved.high)),
        f"{found.thought:.2f}",
    ]


def recorded_best(start: str, space: Recorded) -> list[object] | None:
    """A row for the best point that tuning had recorded for the problem, if it is still a point of the space."""
    problem = parse(space.problem)
    best = Log(LOGS, space.arch, problem.operator).best().get(problem.key)
    place = None if best is None else space.domain.index.get(best.candidate)
    if place is None:
        return None
    excess = space.seconds[place] / space.optimum - 1
    facts = [start, space.name, problem.typed, len(space.domain.points), sum(map(math.isfinite, space.seconds))]
    return [*facts, "shipped record", "", "", "", f"{excess:.4f}", *[""] * (len(COLUMNS) - 10)]


def lines(start: str, spaces: Mapping[str, Recorded], runs: Sequence[Run], names: Sequence[str]) -> list[list[object]]:
    """A row for each space and strategy, and for each strategy on all spaces together."""
    optima = {name: one.optimum for name, one in spaces.items()}
    groups = [(one, [run for run in runs if run.space == one.name]) for one in spaces.values()]
    groups.append((None, simulation.together(runs, optima)))  # type: ignore[arg-type]
    made = []
    for space, found in groups:
        by_name = {name: [run for run in found if run.strategy == name] for name in names}
        for ours in by_name.values():
            optimum = space.optimum if space else 1.0
            summary = simulation.summarise(ours, optimum, by_name[REFERENCE], MARKS)
            made.append(row(start, space, summary, len(ours)))
        if space and (shipped := recorded_best(start, space)):
            made.append(shipped)
    return made


def main(
    strategy: Annotated[list[str] | None, typer.Option(help="These beside the reference; writes nothing.")] = None,
    repeats: Annotated[int, typer.Option(help="Searches of a space with a strategy.")] = 12,
    jobs: Annotated[int, typer.Option(help="Processes.")] = 2,
) -> None:
    names = list(dict.fromkeys([REFERENCE, *(strategy or STRATEGIES)]))
    paths = sorted(SPACES.glob("*.jsonl.xz"))
    shown = table(*(COLUMNS[place] for place in SHOWN), right=[COLUMNS[place] for place in SHOWN[3:]])
    made: list[list[object]] = []
    for start, logs in (("cold", None), ("warm", LOGS)):
        spaces = {one.name: one for one in (simulation.load(path, logs) for path in paths)}
        # Without winners of other problems a warm start is the same as a cold one.
        chosen = [path for path, one in zip(paths, spaces.values(), strict=True) if start == "cold" or one.proven]
        spaces = {name: one for name, one in spaces.items() if start == "cold" or one.proven}
        if not spaces:
            continue
        runs = simulation.compare(chosen, names, budget=BUDGET, repeats=repeats, jobs=jobs, logs=logs)
        found = lines(start, spaces, runs, names)
        made += found
        for line in found:
            shown.add_row(*(str(line[place]) for place in SHOWN))
        if not strategy:
            curves = simulation.curves(runs, {name: one.optimum for name, one in spaces.items()})
            plots.save(plots.search_curves(curves), IMAGES / f"searches-{start}.png")
    console().print(shown)
    if not strategy:
        facts = studied(LOGS) | {
            "spaces": "every point measured, scripts/measure_spaces.py; excess over the best of the space, mean",
            "searches": f"{BUDGET} trials, 16 at a time; told one round, judged by all",
            "over_reference": f"best time over that of {REFERENCE} with the same seed, geometric mean; 95 % bootstrap",
            "half": f"the same after {BUDGET // 2} trials over the reference's after {BUDGET}",
            "seconds_to_5": f"builds by {simulation.BUILDERS} processes and typical measurements, estimated",
        }
        write_csv(RESULTS / "searches.csv", facts, COLUMNS, made)
        best = statistics.fmean(run.thought for run in runs if run.strategy == REFERENCE)
        typer.echo(f"{REFERENCE}: {best:.1f} s a search of its own")


if __name__ == "__main__":
    typer.run(main)
