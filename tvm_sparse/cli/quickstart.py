"""`tvm-sparse quickstart`: the main job in small, from tuning to a checked and compared call in a fresh process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..bench.compare import has_torch
from ..core import machine, registry, scratch
from ..core.problem import Problem
from ..core.registry import parse
from .common import (
    FAILED,
    INTERRUPTED,
    Plugins,
    console,
    duration,
    errors,
    fail,
    program,
    ratio,
    require,
    table,
    us,
)

if TYPE_CHECKING:
    from rich.table import Table

    from ..records import Best

TRIALS = 16
CHECK_SECONDS = 300.0


def quickstart(
    trials: Annotated[int, typer.Option(min=1, help="Candidates a shape.")] = TRIALS,
    keep: Annotated[
        Path | None, typer.Option(help="Folder to keep records and libraries in.  \\[default: a temporary one]")
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Tune a few shapes, export them, and call them in a fresh process: the whole way in two or three minutes."""
    with errors(), _folder(keep) as folder:
        started = time.monotonic()
        require("tune")
        where = machine.gpu() or machine.cpu()
        if where.kind == "cuda":
            require("cuda")
        problems = [parse(key) for operator in registry.operators().values() for key in operator.shapes.QUICKSTART]
        typer.echo(f"1/3 Tuning {len(problems)} shapes on {where.name} ({where.arch}), {trials} candidates each")
        bests = _tune(problems, where, trials, folder / "logs")
        typer.echo("2/3 Exporting shared libraries")
        _export(where, folder)
        typer.echo("3/3 Loading them in a fresh process, checking on fresh inputs, comparing")
        # Few trials are a look at the way, not at the times: as many rounds are enough.
        rounds = None if trials >= TRIALS else trials
        results, wrong = _check(problems, where, folder / "kernels", rounds)
        console().print(final_table(problems, bests, results))
        typer.echo(_how(where, results, started))
        typer.echo("\n".join(_remarks(where, results)))
        if wrong:
            fail("\n".join(wrong))
        typer.echo("\n".join(_next(problems[0], keep)))


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with scratch.folder() as folder:
        yield folder


def _tune(problems: Sequence[Problem], where: machine.Machine, trials: int, logs: Path) -> dict[Problem, Best]:
    from .tune import make_plans, run

    plans = make_plans(problems, [where], trials, logs, machine.default_builders())
    outcome = run(plans, logs, seed=0, again=f"{program()} quickstart")
    if outcome.interrupted:
        typer.echo(f"Interrupted; start again with: {program()} quickstart", err=True)
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
    """What the fresh process reports for each problem, and what is wrong."""
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
    right = ("fallback", "tuned", "gain", "call", "peer", "vs peer")
    made = table("shape", *right, "fastest peer", "correct", title="\nMicroseconds", right=right)
    for problem in problems:
        best, result = bests[problem], results.get(problem, {"seconds": None, "peer": None, "correct": None})
        peer = result["peer"] or {"seconds": None, "name": "-"}
        correct = {True: "[green]yes[/green]", False: "[red]NO[/red]", None: "[red]-[/red]"}[result["correct"]]
        made.add_row(
            problem.typed,
            us(best.fallback_seconds),
            us(best.seconds),
            ratio(best.fallback_seconds, best.seconds),
            us(result["seconds"]),
            us(peer["seconds"]),
            ratio(peer["seconds"], result["seconds"]),
            peer["name"],
            correct,
        )
    return made


def _how(where: machine.Machine, results: dict[Problem, dict[str, Any]], started: float) -> str:
    timed = "in CUDA graphs" if where.kind == "cuda" else "from Python"
    compiler = "loaded" if any(result.get("compiler") for result in results.values()) else "did not load"
    return (
        f"fallback, tuned: the kernel alone, in tuning's final; call, peer: {timed}, in turn, in the fresh process,\n"
        f"which {compiler} the compiler. Inputs hot. {duration(time.monotonic() - started)} in all."
    )


def _remarks(where: machine.Machine, results: dict[Problem, dict[str, Any]]) -> list[str]:
    """What a reader would ask of the table: where the peers are, and why we are slower in a row."""
    remarks = []
    if not has_torch(where.device):
        missing = "PyTorch" if where.device == "cpu" else "PyTorch with CUDA"
        rest = "the peers are NumPy's" if where.device == "cpu" else "nothing is timed beside ours"
        remarks.append(f'{missing} is not installed: {rest}. To compare with it: pip install "tvm_sparse[torch]"')
    for problem, result in results.items():
        ours, peer = result["seconds"], result["peer"]
        if ours and peer and peer["seconds"] < ours:
            python = f", of which {us(host)} are Python's" if (host := result["host_seconds"]) else ""
            more = f"bench {problem.typed} --target {machine.target(where)}"
            remarks.append(
                f"{problem.typed}: {peer['name']} is faster here; ours takes {us(ours)} us a call{python}.\n"
                f"  All figures: {program()} {more}"
            )
    return remarks


def _next(problem: Problem, keep: Path | None) -> list[str]:
    kernels = keep / "kernels" if keep else "kernels"
    public = registry.find(problem.operator).public
    return [
        "Next:",
        f"  1. tune your own shapes:  {program()} tune {problem.typed} (many: --shapes FILE)",
        f"  2. ship the result:       {program()} export -o kernels",
        f'  3. use it in Python:      tvm_sparse.load("{kernels}"); then tvm_sparse.{public[0]}(...)',
    ]
