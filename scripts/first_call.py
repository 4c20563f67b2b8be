"""The cost of a first call: import, first result and second result, each time in a fresh process with PyTorch imported.

python scripts/first_call.py                                             # the GPU if there is one, else the CPU
python scripts/first_call.py --target cpu --kernels kernels softmax_topk/batch=8,vocab=32000,k=20
python scripts/first_call.py --prebuilt                                  # problems of the installed kernels

The clock of the first result starts with arrays in memory, PyTorch imported and (on a GPU) used, and tvm_sparse not yet
imported; it stops when the result is available. Compilation happens, and is included, only if no library is available,
and the line says so. Each figure is the median over the processes, with minimum and maximum. One process before them is
not counted: it leaves bytecode of imported modules, as pip does on installation, but no compiled kernels.
"""

from __future__ import annotations

import json
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from reproduction import provenance, write_csv

from tvm_sparse.cli.common import console, errors, table
from tvm_sparse.core import machine
from tvm_sparse.core.registry import parse
from tvm_sparse.runtime.dispatch import Dispatcher

KEYS = (
    "softmax_topk/batch=8,vocab=32000,k=20",
    "softmax/batch=8,vocab=32000",
    "bsr_matmul/m=8,k=1024,n=1024,block=16,sparsity=0.9",
    "nhot_lookup/rows=64,vocab=32000,width=256,nonzeros=8",
)
COLUMNS = ("problem", "import ms", "first result ms", "second ms", "kernel")

CHILD = """
import json, pickle, sys, time

import torch

key, path, device, folder = sys.argv[1:]
with open(path, "rb") as file:
    inputs = pickle.load(file)

def sync():
    if device == "cuda":
        torch.cuda.synchronize()

def tensor(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16).to(device)
    return torch.from_numpy(array).to(device)

ready = {id(one): tensor(one) for one in inputs if hasattr(one, "dtype")}
torch.ones(8, device=device).sum().item()
sync()
started = time.perf_counter()
import tvm_sparse
imported = time.perf_counter()
if folder:
    tvm_sparse.load(folder)
from tvm_sparse.core import registry

problem = registry.parse(key)
call, called = registry.find(problem.operator).peers.ours(problem, inputs, lambda one: ready.get(id(one), one))
call()
sync()
first = time.perf_counter()
call()
sync()
second = time.perf_counter()
found = tvm_sparse.explain(called, target=device)
compiled = "tvm_sparse.workers.building" in sys.modules
print(json.dumps([imported - started, first - started, second - first, found.how, found.candidate, compiled]))
"""


def main(
    keys: Annotated[list[str] | None, typer.Argument(help="Problems.")] = None,
    target: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    kernels: Annotated[Path | None, typer.Option(help="A folder for tvm_sparse.load, in the time.")] = None,
    prebuilt: Annotated[bool, typer.Option(help="Problems of the installed kernels, one an operator.")] = False,
    repeats: Annotated[int, typer.Option(min=1)] = 5,
    csv: Annotated[Path | None, typer.Option(help="Where the figures go, too.")] = None,
) -> None:
    with errors():
        where = machine.resolve(target)
        wanted = list(keys or (_installed(where) if prebuilt else KEYS))
        shown, rows = table(*COLUMNS, right=COLUMNS[1:2]), []
        with tempfile.TemporaryDirectory() as scratch:
            for key in wanted:
                path = Path(scratch) / "inputs"
                path.write_bytes(pickle.dumps(parse(key).generate(0)))
                command = [sys.executable, "-c", CHILD, key, str(path), where.device, str(kernels or "")]
                _output(command, {"XDG_CACHE_HOME": str(Path(scratch) / "cache"), "PYTHONDONTWRITEBYTECODE": ""})
                lines = [json.loads(_output(command).splitlines()[-1]) for _ in range(repeats)]
                figures = [_spread([line[i] * 1e3 for line in lines]) for i in range(3)]
                note = f"{lines[-1][3]}: {lines[-1][4]}"
                if compiled := sum(line[5] for line in lines):
                    note += f"; compiled in {compiled} of {repeats}"
                rows.append([parse(key).typed, *figures, note])
                shown.add_row(*rows[-1])
        console().print(shown)
        if csv:
            timing = f"median (least to most) of {repeats} processes"
            write_csv(csv, provenance(where) | {"timing": timing}, COLUMNS, rows)


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def _output(command: list[str], besides: Mapping[str, str] = {}) -> str:
    """The output of a process that has these additional environment variables."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **besides})
    if done.returncode:
        sys.exit(done.stderr)
    return done.stdout


def _installed(where: machine.Machine) -> list[str]:
    """The smallest problem of each operator for which kernels were built, tuned ones first."""
    found: dict[str, tuple[bool, int, str]] = {}
    for entry in Dispatcher().installed(where):
        problem = parse(entry.problem)
        rank = (entry.chosen != "exact", problem.cost().bytes, entry.problem)
        found[problem.operator] = min(rank, found.get(problem.operator, rank))
    return [key for _, _, key in found.values()]


if __name__ == "__main__":
    sys.exit(typer.run(main))
