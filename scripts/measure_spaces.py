"""Measures every point of the spaces that the study of searches uses (docs/simulated-search.md).

    python scripts/measure_spaces.py --list --target sm_90a            # the spaces and their points
    python scripts/measure_spaces.py --target cuda --seconds 170       # of this GPU; each at most so long
    python scripts/measure_spaces.py --target cpu --only bsr-small-batch

Each is a run of `tvm-sparse measure-space`, which continues an earlier one if given the same folder of results. Writes
scripts/results/spaces/.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from reproduction import RESULTS

from tvm_sparse.cli.common import errors
from tvm_sparse.core import machine


@dataclass(frozen=True)
class Wanted:
    """A space: the problem, the measured part of its space, and the number of rounds."""

    kind: str
    problem: str
    fixed: tuple[str, ...] = ()
    templates: tuple[str, ...] = ()
    rounds: int = 3


# On a GPU, problems whose records ship, so that the result of tuning can be compared with the optimum; they have 500 to
# 1,000 points and take two or three minutes each. The spaces of CPU templates have at most 120 points; they need more
# rounds, since other processes disturb the times.
SPACES = {
    "bsr-float32": Wanted("cuda", "bsr_matmul/m=8,k=1024,n=1024,block=16,sparsity=0.9", ("vec=4",)),
    "topk-batch": Wanted("cuda", "softmax_topk/batch=512,vocab=10240,k=5"),
    "topk-clusters": Wanted("cuda", "softmax_topk/batch=10,vocab=40000,k=5"),
    "bsr-float16": Wanted(
        "cuda",
        "bsr_matmul/m=64,k=1024,n=4096,block=16,sparsity=0.8,dtype=float16",
        templates=("tensor_core", "staged_x"),
    ),
    "bsr-small-batch": Wanted("llvm", "bsr_matmul/m=8,k=1024,n=1024,block=32x64,sparsity=0.9", rounds=9),
    "bsr-large-batch": Wanted("llvm", "bsr_matmul/m=64,k=512,n=512,block=64,sparsity=0.9", rounds=9),
}


def command(wanted: Wanted, target: str, *more: str) -> list[str]:
    """The command of `measure-space` for a space."""
    words = ["--target", target, "--rounds", str(wanted.rounds)]
    words += [word for fixed in wanted.fixed for word in ("--fix", fixed)]
    words += [word for name in wanted.templates for word in ("--template", name)]
    return [sys.executable, "-m", "tvm_sparse", "measure-space", wanted.problem, *words, *more]


def main(
    target: Annotated[str, typer.Option(help="cuda or cpu; to count, any architecture.")] = "cuda",
    only: Annotated[list[str] | None, typer.Option(help="This space only; may be given again.")] = None,
    seconds: Annotated[float, typer.Option(help="For one space; what is measured by then is written.")] = 3600.0,
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the results.")] = RESULTS / "spaces",
    listed: Annotated[bool, typer.Option("--list", help="Count the points and stop.")] = False,
) -> None:
    unknown = set(only or ()) - set(SPACES)
    if unknown:
        raise typer.BadParameter(f"expected some of {', '.join(SPACES)}, got {', '.join(sorted(unknown))}")
    with errors():
        where = machine.resolve(target)
    ended = 0
    for name, wanted in SPACES.items():
        if wanted.kind != where.kind or name not in (only or SPACES):
            continue
        path = output / f"{name}-{where.arch}.jsonl.xz"
        print(f"-- {name}", flush=True)
        words = command(wanted, target, "-o", str(path), *(["--dry-run"] if listed else []))
        # With several threads a CPU kernel would wait for any of them that lost its core to another process.
        process = subprocess.Popen(words, env={"TVM_NUM_THREADS": "1", **os.environ})
        try:
            status = process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)
            status = process.wait()
        ended = ended or status
    raise typer.Exit(ended)


if __name__ == "__main__":
    typer.run(main)
