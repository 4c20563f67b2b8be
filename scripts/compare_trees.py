"""Time the recorded kernels of two checkouts in turns, to see the effect of a change of machine code.

    python scripts/compare_trees.py OLD --template threshold_gate --template warp_rows     # OLD: a checkout of before

Each problem whose record has one of the templates is built by both checkouts with the record's decisions, and both
libraries are timed in one process on the same arrays: CUDA graphs on a GPU, wall clock on a CPU. Libraries are built
`--workers` at a time. Prints the ratio for each problem, new over old, and the geometric mean by template.
"""

from __future__ import annotations

import functools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from tvm_sparse.bench.timing import time_cpu, time_cuda
from tvm_sparse.cli.common import Target, console, errors, table, us
from tvm_sparse.core import machine, registry
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.records import queries
from tvm_sparse.runtime import loading

ROOT = Path(__file__).parent.parent
# Runs with a checkout's package: compiles (problem, template, decisions), and prints the workspaces.
BUILD = """
import json, pathlib, sys
from tvm_sparse.artifacts.compile import compile_candidate
from tvm_sparse.core import machine, registry, spaces
arch, key, template, decisions, path = json.loads(sys.argv[1])
problem, where = registry.parse(key), machine.resolve(arch)
candidate = spaces.find(template, problem.operator).candidate(decisions)
print(json.dumps(compile_candidate(problem, candidate, where, pathlib.Path(path)).workspaces))
"""


def build(tree: Path, wanted: list[Any]) -> list[Any] | str:
    """The workspaces of a library built by a checkout, or the reason why the build failed."""
    found = subprocess.run(
        [sys.executable, "-c", BUILD, json.dumps(wanted)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")])},
        cwd=tree,
        capture_output=True,
        text=True,
    )
    if found.returncode:
        return (found.stderr.strip().splitlines() or ["no message"])[-1]
    return json.loads(found.stdout.splitlines()[-1])


def ratio_of(key: str, where: Machine, built: dict[str, tuple[str, list[Any]]]) -> tuple[float, float]:
    """Seconds of the old and of the new library, in turns on the same arrays; both have to be right."""
    import torch

    problem = registry.parse(key)
    device = "cuda" if where.kind == "cuda" else "cpu"

    def placed(array: Any) -> Any:
        if not isinstance(array, np.ndarray):
            return array
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(device)
        return torch.from_numpy(array).to(device)

    def fetched(array: Any) -> Any:
        if array.dtype is torch.bfloat16:
            return array.cpu().view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
        return array.cpu().numpy()

    loading.prepare(where.kind)
    inputs = problem.generate(0)
    expected = problem.reference(inputs)
    given = [*map(placed, inputs), *map(placed, problem.empty_outputs())]
    outputs, calls = given[len(inputs) :], {}
    for name, (path, workspaces) in built.items():
        function = loading.load_function(Path(path), where.kind, None)
        calls[name] = functools.partial(loading.with_workspaces(function, workspaces, problem, where.kind), *given)
        calls[name]()
        problem.check(inputs, expected, [*map(fetched, outputs)])
    times = (time_cuda if where.kind == "cuda" else time_cpu)(calls)
    return statistics.median(times["old"][1]), statistics.median(times["new"][1])


def main(
    old: Annotated[Path, typer.Argument(help="a checkout of the state before")],
    template: Annotated[list[str], typer.Option(help="templates whose records are timed")],
    target: Target = "auto",
    workers: Annotated[int, typer.Option(help="libraries built at a time")] = os.cpu_count() or 1,
    most: Annotated[int, typer.Option(help="records of each template, 0: all")] = 0,
) -> None:
    with errors():
        where = machine.resolve(target)
    best = queries.best_records([ROOT / "tuning_logs"], where.arch)
    chosen = [(key, record.candidate) for key, (record, _) in best.items() if record.candidate.template in template]
    counted: dict[str, int] = defaultdict(int)
    kept = []
    for key, candidate in chosen:
        counted[candidate.template] += 1
        if not most or counted[candidate.template] <= most:
            kept.append((key, candidate))
    ratios: dict[str, list[float]] = defaultdict(list)
    rows = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(workers) as pool:
        jobs = {}
        for number, (key, candidate) in enumerate(kept):
            for name, tree in (("old", old.resolve()), ("new", ROOT)):
                path = f"{folder}/{name}{number}.so"
                wanted = [where.arch, key, candidate.template, candidate.values, path]
                jobs[number, name] = path, pool.submit(build, tree, wanted)
        for number, (key, candidate) in enumerate(kept):
            built = {name: (jobs[number, name][0], jobs[number, name][1].result()) for name in ("old", "new")}
            reasons = [f"{name}: {found}" for name, (_, found) in built.items() if isinstance(found, str)]
            if reasons:
                rows.append([key, candidate.template, reasons[0], "", ""])
                continue
            before, after = ratio_of(key, where, built)  # type: ignore[arg-type]
            ratios[candidate.template].append(after / before)
            rows.append([key, candidate.template, us(before), us(after), f"{after / before:.3f}"])
    shown = table("problem", "template", "old, us", "new, us", "new / old")
    for row in rows:
        shown.add_row(*row)
    console().print(shown)
    for name, found in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, found)))
        console().print(f"{name}: {len(found)} records, {mean:.3f} in the mean, {min(found):.3f} to {max(found):.3f}")


if __name__ == "__main__":
    typer.run(main)
