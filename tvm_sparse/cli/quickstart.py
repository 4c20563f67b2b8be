"""`tvm-sparse quickstart`: the main workflow on a small scale, from tuning to a checked and compared call."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.compare import has_torch
from ..bench.load import comparable, sampled, spread
from ..core import commands, machine, registry
from ..core.problem import Problem
from ..core.registry import parse
from .common import (
    FAILED,
    INTERRUPTED,
    WIDE_NOTE,
    Plugins,
    apart,
    console,
    duration,
    errors,
    fail,
    gain,
    load_line,
    ratio_of_rounds,
    require,
    table,
    us,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..records import Best

TRIALS = 16
NOTHING: dict[str, Any] = {"seconds": None, "peer": None, "correct": None, "rounds": []}
CHECK_SECONDS = 300.0


def quickstart(
    trials: Annotated[int, typer.Option(min=1, help="Candidates a shape.")] = TRIALS,
    keep: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Where records and libraries stay.  \\[default: quickstart in your cache folder]"
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Tune a few shapes, export them, and call them in a fresh process: the whole workflow in two or three minutes."""
    with errors():
        from ..runtime import paths

        folder = keep or paths.user_quickstart()
        folder.mkdir(parents=True, exist_ok=True)
        started, before = time.monotonic(), sampled()
        require("tune")
        where = machine.gpu() or machine.cpu()
        if where.kind == "cuda":
            require("cuda")
        problems = [parse(key) for operator in registry.operators().values() for key in operator.shapes.QUICKSTART]
        typer.echo(f"1/3 Tuning {len(problems)} shapes on {where.name} ({where.arch}), {trials} candidates each")
        bests = _tune(
            problems, where, trials, folder / "logs", commands.command("quickstart", *_as_given(trials, keep))
        )
        typer.echo("2/3 Exporting shared libraries")
        _export(where, folder)
        typer.echo("3/3 Loading them in a fresh process, checking on fresh inputs, comparing")
        # Few trials are for trying the workflow, not for good times, so few rounds suffice.
        rounds = None if trials >= TRIALS else trials
        results, wrong = _check(problems, where, folder / "kernels", rounds)
        console().print(final_table(problems, bests, results))
        typer.echo("\n".join([_how(where, results, started), *load_line(before, sampled())]))
        typer.echo("\n".join(_remarks(where, results)))
        if wrong:
            fail("\n".join(wrong))
        typer.echo("\n".join(_next(problems[0], where, folder)))


def _as_given(trials: int, keep: Path | None) -> list[str]:
    words = [] if trials == TRIALS else ["--trials", str(trials)]
    words += [] if keep is None else ["--keep", str(keep)]
    return words + commands.options("--plugin", registry.plugins())


def _tune(
    problems: Sequence[Problem], where: machine.Machine, trials: int, logs: Path, again: str
) -> dict[Problem, Best]:
    from .tune import make_plans, run

    plans = make_plans(problems, [where], trials, logs, machine.default_builders())
    outcome = run(plans, logs, seed=0, again=again)
    if outcome.interrupted:
        typer.echo(f"Interrupted; what was measured is kept. Go on with: {again}", err=True)
        raise typer.Exit(INTERRUPTED)
    if outcome.failures:
        raise typer.Exit(FAILED)
    return {plan.problem: best for plan, best in outcome.bests.items()}


def _export(where: machine.Machine, folder: Path) -> None:
    from ..shipping.export import export

    entries = export(where, folder / "kernels", [folder / "logs"], builders=machine.default_builders())
    total = sum((folder / "kernels" / entry.library).stat().st_size for entry in entries)
    typer.echo(f"    {len(entries)} libraries, {total / 1024:,.0f} KiB")


def _check(
    problems: Sequence[Problem], where: machine.Machine, kernels: Path, rounds: int | None
) -> tuple[dict[Problem, dict[str, Any]], list[str]]:
    """The fresh process's report for each problem, and failures."""
    request = {
        "folder": str(kernels),
        "kind": where.kind,
        "problems": [problem.key for problem in problems],
        "plugins": registry.plugins(),
        "rounds": rounds,
    }
    command = [sys.executable, "-m", "tvm_sparse.cli.fresh", json.dumps(request)]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=CHECK_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        fail(f"the fresh process did not end within {CHECK_SECONDS:g} s; start it again when the machine is less busy")
    results: dict[Problem, dict[str, Any]] = {}
    for line in done.stdout.splitlines():
        with contextlib.suppress(ValueError):
            result = json.loads(line)
            results[parse(result["problem"])] = result
    wrong = [f"the fresh process ended with status {done.returncode}"] if done.returncode else []
    for problem in problems:
        result = results.get(problem)
        if result is None:
            wrong.append(f"{problem.typed}: no result")
        elif result["error"]:
            wrong.append(f"{problem.typed}: {result['error']}")
    return results, wrong


def final_table(
    problems: Sequence[Problem], bests: dict[Problem, Best], results: dict[Problem, dict[str, Any]]
) -> Table:
    right = ("fallback", "tuned", "gain", "call", "peer", "spread", "vs peer")
    made = table("shape", *right, "fastest peer", "correct", title="\nMicroseconds", right=right)
    for problem in problems:
        best, result = bests[problem], results.get(problem, NOTHING)
        peer = result["peer"] or {"seconds": None, "name": "-", "rounds": []}
        rounds = peer["rounds"], result["rounds"]
        correct = {True: "[green]yes[/green]", False: "[red]NO[/red]", None: "[red]-[/red]"}[result["correct"]]
        made.add_row(
            problem.typed,
            us(best.fallback_seconds),
            us(best.seconds),
            gain(best),
            us(result["seconds"]),
            us(peer["seconds"]),
            apart(max(rounds, key=lambda one: spread(one) or 0.0)),
            ratio_of_rounds(*rounds),
            peer["name"],
            correct,
        )
    return made


def _how(where: machine.Machine, results: dict[Problem, dict[str, Any]], started: float) -> str:
    timed = "in CUDA graphs" if where.kind == "cuda" else "from Python"
    compiler = "loaded" if any(result.get("compiler") for result in results.values()) else "did not load"
    return (
        f"fallback, tuned: the kernel alone, in tuning's final; call, peer: {timed}, in turn, in the fresh process,\n"
        f"which {compiler} the compiler. Inputs hot. {duration(time.monotonic() - started)} in all.\n"
        f"{WIDE_NOTE[0].upper()}{WIDE_NOTE[1:]}"
    )


def _remarks(where: machine.Machine, results: dict[Problem, dict[str, Any]]) -> list[str]:
    """Remarks on the table: missing peers, and rows in which ours is slower."""
    remarks = []
    if not has_torch(where.device):
        missing = "PyTorch" if where.device == "cpu" else "PyTorch with CUDA"
        rest = "the peers are NumPy's" if where.device == "cpu" else "nothing is timed beside ours"
        remarks.append(f"{missing} is not installed: {rest}. To compare with it: {commands.install('torch')}")
    for problem, result in results.items():
        ours, peer = result["seconds"], result["peer"]
        if ours and peer and peer["seconds"] < ours and comparable(result["rounds"], peer["rounds"]):
            python = f", of which {us(host)} are Python's" if (host := result["host_seconds"]) else ""
            more = commands.command("bench", *problem.typed.split(), "--target", machine.target(where))
            remarks.append(
                f"{problem.typed}: {peer['name']} is faster here; ours takes {us(ours)} us a call{python}.\n"
                f"  All figures: {more}"
            )
    return remarks


def _next(problem: Problem, where: machine.Machine, folder: Path) -> list[str]:
    public = registry.find(problem.operator).public
    kernels, logs = folder / "kernels", folder / "logs"
    target = machine.target(where)
    shape = (*problem.typed.split(), "--target", target)
    return [
        f"Kept: {logs} and {kernels}; nothing else uses them until it is told to. Next:",
        f"  1. call it in Python:     tvm_sparse.load({str(kernels)!r}); then tvm_sparse.{public[0]}(...)",
        f"  2. which kernel runs:     {commands.command('explain', *shape, '--logs', logs, '--kernels', kernels)}",
        f"  3. beside others again:   {commands.command('bench', *shape, '--kernels', kernels)}",
        f"  4. tune your own shapes:  {commands.command('tune', *shape)} (many: --shapes FILE)",
        f"  5. ship the result:       {commands.command('export', '-o', 'kernels', '--target', target)}",
    ]
