"""`tvm-sparse adopt`: check and tune on a GPU that nobody has tuned on yet."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..core import machine, shape_files
from ..core.commands import command, options
from ..core.machine import Machine
from .common import (
    FAILED,
    INTERRUPTED,
    Builders,
    Plugins,
    ProgramSet,
    Target,
    console,
    default_roots,
    duration,
    errors,
    machine_here,
    ratio,
    require,
    share,
    table,
    us,
)

if TYPE_CHECKING:
    from ..tuning.adopting import Row


Chosen = Annotated[
    ProgramSet, typer.Option("--set", help="Problems of a server's output layer, of pruned weights, of RNNs.")
]
Shapes = Annotated[
    Path | None, typer.Option(metavar="FILE", help="These problems in the place of a set; TOML as for tune.")
]


def adopt(
    minutes: Annotated[float, typer.Option(min=0.05, help="Time for all of it.")] = 30.0,
    chosen: Chosen = ProgramSet.all,
    shapes: Shapes = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder of records to write.  \\[default: adopted-GPU]")
    ] = None,
    target: Target = "auto",
    logs: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of records that look-up reads.  \\[default: the package's, then yours]"),
    ] = None,
    builders: Builders = None,
    plugin: Plugins = None,
) -> None:
    """Check and tune on your own GPU what was tuned on others, and write a bundle of records.

    Shows the GPU's limits, checks every kernel that look-up would borrow or take by default against its reference, and
    spends the rest of the time on tuning, starting with the problems farthest from the memory's limit. Ctrl-C stops
    after the current batch; the same command continues. `tvm-sparse db merge` accepts the folder.
    """
    with errors():
        from ..tuning import adopting, fleet
        from .tune import run

        began = time.monotonic()
        where = machine_here(target, "tuning")
        require("tune", *(["cuda"] if where.kind == "cuda" else []))
        folder = output or Path(f"adopted-{slug(where)}")
        problems = adopting.problems_of(chosen) if shapes is None else read(shapes)
        bandwidth = show_limits(where)
        standings = adopting.standings(problems, where, default_roots(logs))
        wanted = [one for one in standings if not one.own]
        typer.echo(
            f"{len(problems)} problems, of which {len(problems) - len(wanted)} were tuned on {where.name}:"
            f" {len(wanted)} are checked and tuned. Records: {folder}"
        )
        if not wanted:
            return
        again = _again(minutes, chosen, shapes, output, target, logs, builders)
        count = builders or machine.default_builders(1 if where.kind == "cuda" else 0)

        def over() -> bool:
            return time.monotonic() - began > 60 * minutes

        interrupted = False
        finals: dict[str, Any] = {}
        gpus = [machine.gpus().index(where)] if where.kind == "cuda" else [0]
        with fleet.local(where, count, gpus=gpus) as devices:
            for trials in (0, *adopting.PASSES):
                if over() or interrupted:
                    break
                rows = adopting.rows(wanted, folder)
                plans = adopting.searches(rows, trials, bandwidth, count) if trials else adopting.checks(rows, count)
                what = (
                    f"Tuning, up to {trials} trials each" if trials else "Checking what look-up chose, and the fallback"
                )
                if plans:
                    typer.echo(f"{what}: {len(plans)} problems")
                outcome = run(plans, folder, 0, again, devices, over)
                finals |= outcome.finals
                interrupted = outcome.interrupted
        rows = adopting.rows(wanted, folder, finals)
        console().print(result_table(rows, where))
        typer.echo("\n".join(notes(rows, where, folder, time.monotonic() - began)))
        if interrupted or any(row.trials < adopting.PASSES[-1] for row in rows):
            typer.echo(f"To go on from here: {again}")
        if interrupted:
            raise typer.Exit(INTERRUPTED)
        if any(row.fault for row in rows):
            raise typer.Exit(FAILED)


def read(path: Path) -> list[Any]:
    """The problems of a file, as calls look them up."""
    return list(dict.fromkeys(problem.as_called() for problem in shape_files.read(path)))


def slug(where: Machine) -> str:
    """A machine's name as part of a folder's name."""
    name = where.name.removeprefix("NVIDIA ") if where.kind == "cuda" else where.arch
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _again(
    minutes: float,
    chosen: ProgramSet,
    shapes: Path | None,
    output: Path | None,
    target: str,
    logs: Sequence[Path] | None,
    builders: int | None,
) -> str:
    words = ["adopt", "--minutes", f"{minutes:g}"]
    given = (("set", chosen.value, ProgramSet.all), ("shapes", shapes, None), ("output", output, None))
    for name, value, default in (*given, ("target", target, "auto"), ("builders", builders, None)):
        if value != default:
            words += [f"--{name}", str(value)]
    return command(*words, *options("--logs", logs or ()))


def show_limits(where: Machine) -> float | None:
    """Print a GPU's limits as it reports them, beside those that the package assumes; returns its read bandwidth, if
    known.
    """
    if where.kind != "cuda":
        return None
    from ..bench.probe import probe

    found = probe({"CUDA_VISIBLE_DEVICES": machine.visible_gpus()[machine.gpus().index(where)]})
    made = table("limit", "this GPU", "assumed", title=f"{where.name} ({where.arch})", right=("this GPU", "assumed"))
    told = found.get("limits")
    if told:
        at_once = told["clusters_at_once"]
        sizes = [size for size in (2, 4, 8, 16) if size <= len(at_once)]
        for name, value, assumed in (
            ("multiprocessors", told["multiprocessors"], where.cores),
            ("threads of a multiprocessor", told["threads"], where.threads_at_once),
            ("shared memory of a thread block, bytes", told["block_shared_bytes"], where.block_shared_bytes),
            ("L2 cache, bytes", told["l2_bytes"], where.l2_bytes),
            ("thread blocks of the largest cluster", told["largest_cluster"], where.most_cluster),
            *((f"clusters of {size} at once", at_once[size - 1], where.clusters_at_once(size)) for size in sizes),
            (
                f"cooperative thread blocks of {told['max_threads']} threads",
                told["cooperative_blocks"],
                where.blocks_at_once(told["max_threads"], 16, 0),
            ),
        ):
            mark = "" if value == assumed else " !"
            made.add_row(name, f"{value:,}", f"{assumed:,}{mark}")
    bandwidth = found.get("bandwidth")
    known = f"{where.bandwidth / 1e12:.2f}" if where.bandwidth else "-"
    made.add_row("read bandwidth, TB/s", f"{bandwidth / 1e12:.2f}" if bandwidth else "-", known)
    console().print(made)
    for problem in found.get("problems", ()):
        typer.echo(f"note: {problem}", err=True)
    return bandwidth or where.bandwidth


def result_table(rows: Sequence[Row], where: Machine) -> Any:
    right = ("before", "now", "now over before", "x fallback", *(("of limit",) if where.bandwidth else ()), "trials")
    made = table("problem", "look-up", *right, "", title="Microseconds", right=right)
    for row in rows:
        cells = [us(row.before), us(row.after), ratio(row.before, row.after), ratio(row.fallback, row.after)]
        if where.bandwidth:
            cells.append(share(row.standing.problem.cost().bytes, row.after, where))
        fault = row.fault[:120].replace("[", "\\[")
        made.add_row(row.standing.problem.typed, row.standing.how, *cells, str(row.trials), fault)
    return made


def notes(rows: Sequence[Row], where: Machine, folder: Path, seconds: float) -> list[str]:
    """Conclusions from the table, and what to do with the folder."""
    import statistics

    lines = []
    for word in sorted({row.standing.how for row in rows}):
        gains = [row.gain for row in rows if row.standing.how == word and row.gain]
        if gains:
            mean = statistics.geometric_mean(gains)
            lines.append(f"tuned over {word}: {mean:.2f}x in the mean of {len(gains)}, {max(gains):.2f}x at most")
    if faults := sum(bool(row.fault) for row in rows):
        lines.append(f"{faults} kernels that look-up would have run were not right or did not run here; see the table")
    if left := sum(row.before is None and not row.fault for row in rows):
        lines.append(f"{left} problems were not reached")
    lines.append(f"{duration(seconds)} on {where.name}. To use what was found, here or on other such machines:")
    lines.append(f"  {command('db', 'merge', folder)}")
    return lines
