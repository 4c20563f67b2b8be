"""Time points of a template's space, for use while its kernel is being written.

    python scripts/probes/explore.py head_topk/batch=10,vocab=100352,hidden=1024,k=20,dtype=bfloat16 \
        --template head_rings --fix tile_m=16 --fix blocks=132,264 --points 60

The default and random points of the space, restricted by `--fix`, are compiled on all cores, checked on every structure
of a smaller problem, and timed one after the other on the tuned structure. Wrong ones are reported and not timed.
Nothing is recorded or searched: use `tvm-sparse tune` for that, which checks more and takes longer. Times are of a
kernel alone, in a CUDA graph, with hot inputs.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from tvm_sparse.bench.buffers import Fatal
from tvm_sparse.bench.timing import time_kernel
from tvm_sparse.bench.verification import Arguments, call, make_case, verify, workspaces_on
from tvm_sparse.cli.common import Fixed, Target, console, errors, fixed_values, machine_here, table
from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Mismatch, Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import Template
from tvm_sparse.runtime import loading
from tvm_sparse.workers.building import BUILD_TIMEOUT, BUILD_WORKER, library_name, request
from tvm_sparse.workers.processes import Pool

FEW_ROWS = 3  # of the smaller problem
POISON = 0xFF


def drawn(
    template: Template, problem: Problem, machine: Machine, fix: list[str], count: int, seed: int
) -> list[Candidate]:
    """The default, and random points up to `count`."""
    table = template.space(problem, machine)
    space = spaces.narrowed(table, fixed_values(fix, table))
    default = template.candidate(template.default(problem, machine))
    others = [point for point in spaces.points(problem, machine, {template.name: space}) if point != default]
    return [default, *random.Random(seed).sample(others, min(count, len(others)))]


def compiled(
    problem: Problem, machine: Machine, candidates: list[Candidate], folder: Path
) -> Iterator[tuple[Candidate, dict[str, Any]]]:
    """Each candidate with its build's reply; those that do not compile are reported."""
    requests = [request(problem, c, machine, folder / library_name(problem, c, machine.arch)) for c in candidates]
    with Pool(os.cpu_count() or 1, BUILD_WORKER, name="build") as pool:
        for candidate, reply in zip(candidates, list(pool.map(requests, timeout=BUILD_TIMEOUT)), strict=True):
            if reply.ok:
                yield candidate, reply.value
            else:
                print(f"does not compile: {candidate}: {reply.message}", file=sys.stderr)


def main(
    problem: Annotated[str, typer.Argument(help="A problem's key.")],
    template: Annotated[str, typer.Option(help="Whose points.")],
    fix: Fixed = None,
    points: Annotated[int, typer.Option(min=0, help="Beside the default.")] = 30,
    top: Annotated[int, typer.Option(min=1, help="Lines to show.")] = 15,
    seed: Annotated[int, typer.Option(help="Of the draw and the data.")] = 0,
    target: Target = "auto",
) -> None:
    """Compile, check and time points of a space."""
    with errors():
        wanted, machine, chosen = parse(problem), machine_here(target, "exploring"), spaces.find(template)
        small = [
            make_case(wanted.smaller(FEW_ROWS), seed + n, structure, wanted.settings[n % len(wanted.settings)])
            for n, structure in enumerate(wanted.structures)
        ]
        whole = make_case(wanted, seed)
        limit = wanted.cost(whole.inputs).bytes / machine.bandwidth if machine.bandwidth else None
        timed: list[tuple[float, Candidate, dict[str, Any]]] = []
        with tempfile.TemporaryDirectory() as folder:
            candidates = drawn(chosen, wanted, machine, fix or [], points, seed)
            built = list(compiled(wanted, machine, candidates, Path(folder)))
            loading.prepare(machine.kind)
            for candidate, reply in built:
                function = loading.load_function(Path(reply["path"]), machine.kind, None)
                try:
                    verify(function, machine.kind, small, reply["workspaces"])
                    own = workspaces_on(machine.kind, reply["workspaces"], wanted)
                    arguments = Arguments(machine.kind, [whole], own, offset=False)
                    given = arguments.load(whole, POISON)
                    call(function, given)
                    whole.check(arguments.outputs())
                    timed.append((statistics.median(time_kernel(machine.kind, function, given)), candidate, reply))
                except (Mismatch, Fatal) as error:
                    print(f"wrong: {candidate}: {error}", file=sys.stderr)
        timed.sort(key=lambda found: found[0])
        shown = table("us", "of the limit", "candidate", "registers", title=f"{wanted} on {machine.name}")
        for seconds, candidate, reply in timed[:top]:
            shown.add_row(
                f"{seconds * 1e6:.2f}",
                f"{limit / seconds:.1%}" if limit else "",
                f"{candidate}{' (default)' if candidate == candidates[0] else ''}",
                str((reply["resources"] or {}).get("registers", "")),
            )
        console().print(shown)


if __name__ == "__main__":
    typer.run(main)
