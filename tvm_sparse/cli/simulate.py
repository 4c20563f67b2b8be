"""`tvm-sparse simulate`: compare search strategies on recorded spaces."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import USAGE, console, duration, errors, fail, require, table

if TYPE_CHECKING:
    from ..research.simulation import Summary

# Packages that a strategy needs.
NEEDS = {"evolutionary": "tune", "replay": "tune", "boosting": "tune", "random": None}
CSV = ("space", "strategy", "trials", "excess", "low", "high")


def simulate(
    spaces: Annotated[
        list[Path],
        typer.Argument(metavar="SPACE...", exists=True, dir_okay=False, help="Files that measure-space has written."),
    ],
    strategies: Annotated[
        list[str] | None,
        typer.Option("--strategy", metavar="NAME", help="May be given again.  \\[default: evolutionary, random]"),
    ] = None,
    reference: Annotated[str, typer.Option(metavar="NAME", help="What the others are compared with.")] = "evolutionary",
    budget: Annotated[int, typer.Option(min=2, help="Trials of a search.")] = 64,
    repeats: Annotated[int, typer.Option(min=2, help="Searches with each strategy, of other seeds.")] = 20,
    batch: Annotated[int, typer.Option(min=1, help="Points that are proposed at a time.")] = 16,
    ahead: Annotated[
        bool, typer.Option("--ahead", help="Propose before the last points' times are known, as tune does on a GPU.")
    ] = False,
    logs: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, help="Records of similar problems, whose winners are tried first, as by tune."
        ),
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the curves, a row a number of trials.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curves: .svg or .png.")] = None,
) -> None:
    """Simulate searches on completely measured spaces, and compare their results.

    Needs no GPU. The table's columns: mean excess of the best point's time over the optimum after a number of trials;
    median trials, and estimated time, until within 5 % of the optimum, and the share of searches that came so close;
    best time over the reference's with the same seed (below 1 is better), with the signed-rank test's p; the same with
    half of the trials against all of the reference's; the strategy's own seconds for a search.
    """
    import time

    from ..research import simulation
    from ..research.bootstrap import CONFIDENCE
    from ..tuning import strategies as known

    names = list(dict.fromkeys([reference, *(strategies or ("evolutionary", "random"))]))
    for name in names:
        if name not in known.names():
            fail(f"strategy: got {name!r}; expected one of {', '.join(known.names())}", USAGE)
    require(*{extra for name in names if (extra := NEEDS.get(name, "lab"))}, *(["plot"] if plot else []))
    with errors():
        recorded = {path: simulation.load(path, logs) for path in spaces}
        for one in recorded.values():
            part = "" if one.complete else " (not all of the space: the best may be missing)"
            typer.echo(f"{one.name}: {one.problem} on {one.arch}, {len(one.domain.points):,} points{part}")
        started = time.monotonic()
        runs = simulation.compare(
            spaces, names, budget=budget, repeats=repeats, batch=batch, ahead=ahead, jobs=jobs, logs=logs
        )
        marks = sorted({max(1, budget // 4), max(1, budget // 2), budget})
        for one in recorded.values():
            found = {name: [r for r in runs if (r.space, r.strategy) == (one.name, name)] for name in names}
            console().print(
                _table(
                    one.name,
                    [simulation.summarise(ours, one.optimum, found[reference], marks) for ours in found.values()],
                    reference,
                    budget,
                )
            )
        typer.echo(
            f"{len(runs)} searches of {budget} trials, {batch} at a time, in {duration(time.monotonic() - started)}"
            f" on {jobs} processes; in brackets: {CONFIDENCE:.0%} intervals over {repeats} seeds"
        )
        curves = simulation.curves(runs, {one.name: one.optimum for one in recorded.values()})
        if csv:
            _write(csv, curves)
            typer.echo(f"Written to {csv}")
        if plot:
            from ..research import plots

            plots.save(plots.search_curves(curves), plot)
            typer.echo(f"Drawn in {plot}")


def _table(title: str, summaries: list[Summary], reference: str, budget: int) -> Any:
    marks = [f"after {trials}" for trials in summaries[0].excess]
    right = (*marks, "to 5 %", "in", "reached", f"over {reference}", "p", f"with {budget // 2}", "s")
    made = table("strategy", *right, title=title, right=right)
    for one in summaries:
        made.add_row(
            one.strategy,
            *(f"{excess.value:.1%}" for excess in one.excess.values()),
            "-" if one.trials_to_near is None else str(one.trials_to_near),
            "-" if one.seconds_to_near is None else duration(one.seconds_to_near),
            f"{one.reached:.0%}",
            str(one.against),
            "-" if one.strategy == reference else f"{one.wilcoxon:.2g}",
            str(one.halved),
            f"{one.thought:.2f}",
        )
    return made


def _write(path: Path, curves: list[dict[str, Any]]) -> None:
    import csv

    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(CSV), lineterminator="\n")
        writer.writeheader()
        for row in curves:
            writer.writerow({**row, **{name: f"{row[name]:.5f}" for name in ("excess", "low", "high")}})
