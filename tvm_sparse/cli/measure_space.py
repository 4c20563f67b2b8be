"""`tvm-sparse measure-space`: measure every point of a space, for studies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..core import machine
from ..core.problem import ProblemError
from .common import (
    FAILED,
    INTERRUPTED,
    Axes,
    Builders,
    Fixed,
    Operator,
    Plugins,
    Target,
    Templates,
    duration,
    errors,
    fixed_values,
    machine_here,
    note_counting,
    problem_of,
    require,
    us,
)

if TYPE_CHECKING:
    from ..tuning.exhaustive import Progress

SHOW_SECONDS = 10.0


def measure_space(
    operator: Operator,
    axes: Axes = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="Compressed if its name ends in .xz.")
    ] = Path("space.jsonl.xz"),
    target: Target = "auto",
    templates: Templates = None,
    fix: Fixed = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often every point is timed, one round after another.")] = 3,
    builders: Builders = None,
    seed: Annotated[int, typer.Option(help="Of the inputs and of the order.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Count the points and stop.")] = False,
    plugin: Plugins = None,
) -> None:
    """Measure every point of a space, right or wrong, into a file that `simulate` and `study` read.

    Look-up does not read it. The same command continues an interrupted run.
    """
    with errors():
        from collections import Counter

        from ..core import spaces
        from ..research.space import MOST_COMBINATIONS

        problem = problem_of(operator, axes)
        where = machine.resolve(target) if dry_run else machine_here(target, "measuring")
        spaces.named(templates or (), problem.operator, where)  # raises for an unknown name
        applicable = spaces.applicable(problem, where)[0]
        fixed = fixed_values(fix, sorted({name for table in applicable.values() for name in table}))
        tables, left_out = spaces.searched(problem, where, templates or (), fixed)
        for name, table in tables.items():
            if (count := spaces.combinations(table)) > MOST_COMBINATIONS:
                raise ProblemError(
                    f"{name} has {count:,} combinations, too many to measure; leave some values: --fix NAME=VALUE,..."
                )
        note_counting(tables)
        sizes = Counter(point.template for point in spaces.points(problem, where, tables))
        for name, reason in left_out.items():
            typer.echo(f"left out: {name}: {reason}")
        parts = ", ".join(f"{name} {count:,}" for name, count in sizes.items())
        typer.echo(f"{problem.typed} on {where.name} ({where.arch}): {sizes.total():,} points ({parts})")
        if dry_run or not sizes:
            return
        require("tune", *(["cuda"] if where.kind == "cuda" else []))
        from ..tuning import exhaustive, session

        started = said = time.monotonic()

        def show(progress: Progress) -> None:
            nonlocal said
            if time.monotonic() > said + SHOW_SECONDS:
                said = time.monotonic()
                typer.echo(
                    f"{duration(said - started)}: round {progress.round + 1} of {rounds},"
                    f" {progress.done} of {progress.points}, {progress.failed} failed, best {us(progress.best)} us"
                )

        with session.stop_on_interrupt() as stop:
            space = exhaustive.measure_space(
                problem,
                where,
                output,
                named=templates or (),
                fixed=fixed,
                rounds=rounds,
                builders=builders or machine.default_builders(),
                seed=seed,
                show=show,
                stop=stop,
            )
            stopped = stop()
        outcomes = Counter(trial.outcome for trial in space.trials)
        parts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
        typer.echo(f"{duration(time.monotonic() - started)}: {parts}; written to {output}")
        if stopped:
            raise typer.Exit(INTERRUPTED)
        if not space.complete:
            raise typer.Exit(FAILED)
