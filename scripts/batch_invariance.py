"""What `configure(batch_invariant=True)` costs: times of public functions with it and without, by batch.

    python scripts/batch_invariance.py --csv scripts/results/batch-invariance-h200.csv       # two minutes on an H200
    python scripts/batch_invariance.py "softmax_topk/batch=1,vocab=32000,k=20" --batch 1 --batch 64

Without it a call takes the kernel, or PyTorch's product, that look-up expects to be the fastest for its batch; with it
one kernel for all batches. Both are timed in turn, twice, in CUDA graphs on a GPU.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from heads import Report, show
from reproduction import provenance

import tvm_sparse
from tvm_sparse.bench.contenders import torch_tensor
from tvm_sparse.bench.timing import time_cpu, time_cuda
from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core import registry
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse

KEYS = (
    "softmax/batch=1,vocab=128256,dtype=bfloat16",
    "logsumexp/batch=1,vocab=128256,dtype=bfloat16",
    "softmax_topk/batch=1,vocab=128256,k=20,dtype=bfloat16",
    "softmax_sample/batch=1,vocab=128256,k=64,dtype=bfloat16",
    "head_topk/batch=1,vocab=32000,hidden=4096,k=20,dtype=bfloat16",
    "bsr_matmul/m=1,k=4096,n=4096,block=64,sparsity=0.8,dtype=bfloat16",
)
BATCHES = (1, 8, 64, 256)
COLUMNS = ("problem", "batch", "microseconds", "invariant_microseconds", "ratio", "kernel", "invariant_kernel")
ROUNDS, TURNS = 20, 2


def in_batch(problem: Problem, rows: int) -> Problem:
    return dataclasses.replace(problem, **{problem.batch_axis: rows})


def microseconds(problem: Problem, inputs: Sequence[Any], where: Machine, invariant: bool) -> tuple[float, str]:
    """Microseconds of a call of torch tensors, and its kernel."""
    tvm_sparse.configure(batch_invariant=invariant)
    ours = registry.find(problem.operator).peers.ours
    call, called = ours(
        problem, inputs, lambda one: torch_tensor(one, where.device) if isinstance(one, np.ndarray) else one
    )
    times = time_cuda({"ours": call}, ROUNDS) if where.device == "cuda" else time_cpu({"ours": call}, ROUNDS)
    _, seconds = times["ours"]
    assert not isinstance(seconds, str), seconds
    told = tvm_sparse.explain(called)
    way = "" if told.way is None or told.way.startswith("the kernel") else f"{told.way.partition(':')[0]} instead of "
    return statistics.median(seconds) * 1e6, f"{way}{told.candidate} ({told.how})"


def main(
    keys: Annotated[list[str] | None, typer.Argument(help="Problems, whose batch is replaced.")] = None,
    target: Target = "auto",
    batch: Annotated[list[int] | None, typer.Option(help="Rows; may be given again.  [default: 1 8 64 256]")] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
) -> None:
    """Time public functions with results that do not depend on the batch, and without."""
    with errors():
        where = machine_here(target, "comparing")
        report, lines = Report(csv_path, provenance(where), COLUMNS), []
        problems = {key: [in_batch(parse(key), rows) for rows in batch or BATCHES] for key in keys or KEYS}
        for invariant in (False, True):
            tvm_sparse.configure(batch_invariant=invariant)
            tvm_sparse.warmup([one for some in problems.values() for one in some], target=target)
        for key, some in problems.items():
            cells = []
            for problem in some:
                inputs = problem.generate(0)
                turns = [
                    [microseconds(problem, inputs, where, invariant) for invariant in (False, True)]
                    for _ in range(TURNS)
                ]
                (plain, kernel), (same, other) = (min(each) for each in zip(*turns, strict=True))
                report.add(
                    problem=problem.key, batch=problem.batch_extent, microseconds=f"{plain:.2f}",
                    invariant_microseconds=f"{same:.2f}",
                    ratio=f"{same / plain:.3f}", kernel=kernel, invariant_kernel=other,
                )  # fmt: skip
                cells.append(f"{plain:.1f} / {same:.1f} = {same / plain:.2f}")
            lines.append([parse(key).operator, *cells])
        tvm_sparse.configure(batch_invariant=False)
        title = "microseconds, the fastest kernel of each batch / one kernel for all batches = ratio, by rows"
        show(title, ("function", *map(str, batch or BATCHES)), lines)
        report.close()


if __name__ == "__main__":
    typer.run(main)
