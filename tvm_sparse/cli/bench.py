"""`tvm-sparse bench`: compare our functions with other libraries, in one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.compare import compare
from ..bench.load import spread, watch
from ..bench.ways import time_ways, ways_of
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from ..records import Log
from ..runtime import paths
from .common import (
    WIDE_NOTE,
    AsJson,
    Axes,
    Kernels,
    Operator,
    Plugins,
    ReadLogs,
    Target,
    apart,
    as_called,
    console,
    echo_json,
    errors,
    fail,
    load_line,
    looking_in,
    machine_here,
    problem_of,
    rate,
    ratio_of_rounds,
    share,
    structure_of,
    table,
    us,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..bench.compare import Comparison
    from ..bench.load import Load


def bench(
    operator: Operator,
    axes: Axes = None,
    target: Target = "auto",
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    record: Annotated[
        bool,
        typer.Option(
            "--record",
            help="Time the ways of an operator that has more than one instead, and note them.",
        ),
    ] = False,
    logs: ReadLogs = None,
    kernels: Kernels = None,
    as_json: AsJson = False,
    plugin: Plugins = None,
) -> None:
    """Time our function beside PyTorch, NumPy and SciPy, after checking each against the reference.

    --record writes to the last folder of --logs, by default to your own records.
    """
    with errors(), looking_in(logs, kernels):
        [problem] = as_called([problem_of(operator, axes)], "timed", err=as_json)
        where = machine_here(target, "comparing")
        from ..core.problem import Mismatch

        try:
            if record:
                into = logs[-1] if logs else paths.user_logs()
                show_ways(problem, where, record_ways(problem, where, into, seed), as_json)
                return
            load = watch()
            result = compare(problem, where, seed=seed, structure=structure_of(axes))
        except Mismatch as error:
            fail(f"{problem}: our own result is wrong: {error}")
        except ModuleNotFoundError as error:
            fail(str(error))
        if as_json:
            echo_json(as_dict(result, load()))
            return
        typer.echo(f"{problem.typed} on {where.name} ({where.arch})")
        typer.echo(f"kernel: {result.kernel} ({result.how})")
        console().print(comparison_table(result))
        typer.echo("\n".join([*notes(result), *load_line(load())]))


def record_ways(problem: Problem, where: Machine, logs: Path, seed: int) -> dict[str, float]:
    """Add the result of `time_ways` to the problem's record. Raises `ProblemError` if this folder has none."""
    ways_of(problem)
    log = Log(logs, where.arch, problem.operator)
    best = log.best().get(problem.key)
    if best is None:
        raise ProblemError(f"record: {logs} has none of {problem.typed} on {where.arch}; tvm-sparse tune makes it")
    found = time_ways(problem, where, seed=seed)
    log.append_best(dataclasses.replace(best, ways=found))
    return found


def show_ways(problem: Problem, where: Machine, found: dict[str, float], as_json: bool) -> None:
    if as_json:
        echo_json({"problem": problem.key, "arch": where.arch, "ways": found})
        return
    typer.echo(f"{problem.typed} on {where.name} ({where.arch})")
    typer.echo("\n".join(f"{name}: {us(seconds)} us a call" for name, seconds in found.items()))


def comparison_table(result: Comparison) -> Table:
    bytes_ = result.problem.cost().bytes
    limit = result.machine.bandwidth is not None
    right = ("us", "spread", "ours is", "GB/s", *(("of limit",) if limit else ()))
    made = table("implementation", *right, "correct", "timed", "", right=right, prose=("",))
    for timing in result.timings:
        cells = [us(timing.median), apart(timing.seconds), ratio_of_rounds(timing.seconds, result.ours.seconds)]
        cells.append(rate(bytes_, timing.median))
        if limit:
            cells.append(share(bytes_, timing.median, result.machine))
        correct = {True: "yes", False: "[red]no[/red]", None: "-"}[timing.correct]
        made.add_row(timing.name, *cells, correct, timing.how or "-", timing.note)
    return made


def notes(result: Comparison) -> list[str]:
    """How the times were taken, which is needed to interpret them."""
    bytes_ = result.problem.cost().bytes
    lines = [
        f"GB/s counts compulsory bytes: {bytes_:,} a call, each input read and each output written once.",
        WIDE_NOTE[0].upper() + WIDE_NOTE[1:],
    ]
    if result.machine.device == "cuda":
        hot = "Hot: inputs are not rotated, and what fits into the L2 cache (about 50 MB) is read from there."
        lines.append("Every call has other copies of the inputs, and reads memory." if result.rotated else hot)
        lines.append("graph: replays of a CUDA graph of 10-50 calls, timed by events, median of 30 rounds in turn.")
        host = "of our public function costs the host"
    else:
        lines.append("Hot: inputs are not rotated. eager: calls from Python, median of 15 rounds in turn.")
        lines.append(f"Threads: {result.threads}.")
        host = "of our public function costs beyond its kernel"
    if result.host_seconds is not None:
        spent = us(result.host_seconds) if result.host_seconds > 1e-7 else "less than 0.1"
        lines.append(f"Python: a call {host} {spent} us.")
    return lines


def as_dict(result: Comparison, load: Load | None) -> dict[str, Any]:
    bytes_ = result.problem.cost().bytes
    return {
        "problem": result.problem.key,
        "machine": result.machine.name,
        "arch": result.machine.arch,
        "kernel": result.kernel,
        "how": result.how,
        "bytes": bytes_,
        "host_seconds": result.host_seconds,
        "load": None if load is None else dataclasses.asdict(load),
        "timings": [
            {
                "name": t.name,
                "seconds": t.median,
                "spread": spread(t.seconds),
                "how": t.how,
                "correct": t.correct,
                "note": t.note,
                "bytes_per_second": bytes_ / t.median if t.median else None,
            }
            for t in result.timings
        ],
    }
