"""What `bsr_matmul` takes beside a dense product and other block-sparse ones, over a grid of rows of x, blocks and
sparsities: a CSV, and where it is the fastest.

    python scripts/block_grid.py --csv scripts/results/block-grid-h200.csv --seconds 170

ours        a call for a constant weight, by the faster `way` as calls choose it without a record
dense       PyTorch's product with a dense copy of the weight (cuBLAS)
triton      PyTorch's block-sparse product `bsr_dense_addmm`, by the fastest of SETTINGS for this block and these rows
over_best   time of ours over that of the fastest other one

`bsr_dense_addmm` of torchao is a copy of PyTorch's kernel with another search over the same settings. stk multiplies
blocks of 128 by a Triton kernel of the same kind, with tiles of 128 x 128, four stages and four warps, which is one of
SETTINGS. So neither has a column. The kernel takes no blocks below 16.

Problems are taken in an order drawn by `--seed`, until time ends. Each product is compared with that in float64 before
it is timed, in CUDA graphs, inputs hot, all in turn. For each block and number of rows all settings are timed once, and
the `KEPT` fastest afterwards. Triton's kernels are compiled before, by several processes; a setting that does not
compile or run is reported and left out. A weight has one block less than its sparsity says where their number would be
a multiple of 16, for which Triton compiles another kernel.
"""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from block_products import ROUNDS, checker, triton_call, weight_of
from heads import Report
from reproduction import provenance

import tvm_sparse
from tvm_sparse.bench.timing import time_cpu, time_cuda
from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core.machine import Machine
from tvm_sparse.operators.bsr_matmul.call import way
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul
from tvm_sparse.operators.bsr_matmul.weight import BsrWeight
from tvm_sparse.runtime.dense import KERNEL

ROWS = (16, 64, 256, 512, 1024, 2048, 4096, 8192, 16384)
BLOCKS = (8, 16, 32, 64, 128)
SPARSITIES = (0.3, 0.5, 0.6, 0.8, 0.9, 0.95)
WEIGHT = (4096, 4096)  # k and n
# Rows of x of a tile, stages and warps of Triton's kernel; and how many of them are timed for each sparsity.
SETTINGS = ((32, 4, 4), (64, 4, 4), (64, 3, 8), (128, 3, 8), (128, 4, 4), (256, 3, 8))
KEPT = 2
LEAST_TRITON = 16
# Triton compiles other kernels for multiples of this; seconds for all of its kernels.
MULTIPLE, COMPILE_SECONDS = 16, 80.0
# Calls of a graph at least: those of many rows take milliseconds.
FEWEST = 2
# Ours counts as no slower than the best up to this ratio.
EQUAL = 1.03
OURS, DENSE, TRITON = "ours", "dense", "triton"
COLUMNS = ("m", "k", "n", "block", "sparsity", "dtype", OURS, "way", DENSE, TRITON, "setting", "over_best", "note")
Setting = tuple[int, int, int]


def way_of(problem: BsrMatmul, where: Machine) -> str:
    """The way that calls choose without a record."""
    return way(problem, where) if where.kind == "cuda" else KERNEL


def meta_of(m: int, setting: Setting) -> dict[str, int]:
    """The arguments of Triton's kernel for a tile's rows, stages and warps."""
    tile, stages, warps = setting
    return {"GROUP_SIZE_ROW": 4, "SPLIT_N": m // tile, "num_stages": stages, "num_warps": warps}


def settings_of(problem: BsrMatmul) -> list[Setting]:
    """The settings that serve a problem."""
    if problem.block_shape[0] < LEAST_TRITON:
        return []
    found = [one for one in SETTINGS if problem.m % one[0] == 0]
    return found or [(problem.m, 4, 4)]


def operands(problem: BsrMatmul, seed: int, device: str = "cuda") -> tuple[BsrWeight, Any]:
    """A random weight and x, by `weight_of`."""
    return weight_of(problem, seed, device, problem.nnzb - (problem.nnzb % MULTIPLE == 0))


def compile_triton(problem: BsrMatmul, setting: Setting) -> str:
    """Compile a kernel of Triton, in a process of its own: later calls find it in Triton's cache. Returns what is wrong
    with it.
    """
    import torch

    try:
        weight, x = operands(problem, 0)
        triton_call(problem, weight, x, meta_of(problem.m, setting))()
        torch.cuda.synchronize()
    except Exception as error:  # a setting that exceeds the GPU
        return f"{type(error).__name__}: {error}"
    return ""


def without_failures(kept: dict[tuple[int, str], list[Setting]], sparsity: float, like: BsrMatmul, workers: int) -> int:
    """Compile Triton's kernels for settings by rows and blocks. Those that fail are taken out; returns how many do not.

    A kernel serves all sparsities; `sparsity` is that of the first calls.
    """
    jobs: dict[Future[str], tuple[tuple[int, str], Setting]] = {}
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
    for (m, block), settings in kept.items():
        for setting in settings:
            problem = replace(like, m=m, block=block, sparsity=sparsity)
            jobs[pool.submit(compile_triton, problem, setting)] = (m, block), setting
    _, late = wait(jobs, COMPILE_SECONDS)
    for future, (key, setting) in jobs.items():
        # A process that ends breaks the pool.
        reason = "no time" if future in late else str(future.exception() or "") or future.result()
        if reason:
            kept[key].remove(setting)
            typer.echo(f"Triton, m={key[0]}, block {key[1]}, {setting}: {reason}"[:160])
    pool.shutdown(wait=False, cancel_futures=True)
    return sum(map(len, kept.values()))


def summary(lines: Sequence[Mapping[str, Any]]) -> str:
    """For each block how often and by how much ours is slower than the best, and the least sparsity from which on it is
    the fastest at all rows.
    """
    told = []
    for block in sorted({line["block"] for line in lines}):
        own = [line for line in lines if line["block"] == block]
        ratios = [line["over_best"] for line in own]
        slower = [line for line in own if line["over_best"] > 1]
        ahead = [s for s in SPARSITIES if all(line["sparsity"] < s for line in slower)]
        worst = max(own, key=lambda line: line["over_best"])
        told.append(
            f"block {block}: {sum(ratio > EQUAL for ratio in ratios)} of {len(ratios)} slower by more than"
            f" {EQUAL - 1:.0%}, {statistics.geometric_mean(ratios):.2f} in the mean, worst {worst['over_best']:.2f} at"
            f" m={worst['m']}, sparsity {worst['sparsity']}; the fastest from {ahead[0] if ahead else '-'} on"
        )
    return "\n".join(told)


def main(
    csv_path: Annotated[Path, typer.Option("--csv", help="File to write.")],
    target: Target = "auto",
    rows: Annotated[list[int] | None, typer.Option(help="These instead of the grid's.")] = None,
    block: Annotated[list[int] | None, typer.Option(help="These instead of the grid's.")] = None,
    sparsity: Annotated[list[float] | None, typer.Option(help="These instead of the grid's.")] = None,
    weight: Annotated[str, typer.Option(help="Its columns and rows, k,n.")] = ",".join(map(str, WEIGHT)),
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    seconds: Annotated[float, typer.Option(help="No problem is begun after this time.")] = 170.0,
    workers: Annotated[int, typer.Option(help="Processes that compile Triton's kernels.")] = 12,
    seed: Annotated[int, typer.Option(help="Of the order and the data.")] = 0,
) -> None:
    """Compare products with block-sparse weights over a grid."""
    ends = time.monotonic() + seconds
    with errors():
        where = machine_here(target, "comparing")
        k, n = map(int, weight.split(","))
        problems = [
            BsrMatmul(m, k, n, str(side), gaps, dtype=dtype)
            for m, side, gaps in itertools.product(rows or ROWS, block or BLOCKS, sparsity or SPARSITIES)
        ]
        random.Random(seed).shuffle(problems)
        kept = {(p.m, p.block): settings_of(p) if where.kind == "cuda" else [] for p in problems}
        # The fewest blocks make the quickest first call.
        kernels = without_failures(kept, max(sparsity or SPARSITIES), problems[0], workers) if any(kept.values()) else 0
        typer.echo(f"{kernels} kernels of Triton, {ends - time.monotonic():.0f} s left")
        tvm_sparse.warmup([p for p in problems if way_of(p, where) != DENSE], target=where.device)
        typer.echo(f"{len(problems)} problems, {ends - time.monotonic():.0f} s left")
        report, lines = Report(csv_path, provenance(where), COLUMNS, quiet=True), []
        # PyTorch collects garbage before each graph that it records: what lives until the end need not be visited.
        gc.collect()
        gc.freeze()
        for problem in problems:
            if time.monotonic() > ends:
                break
            line = _timed(problem, kept[problem.m, problem.block], where, seed)
            lines.append(line)
            report.add(**line)
        typer.echo(f"{len(lines)} of {len(problems)} problems\n{summary(lines)}")


def _timed(problem: BsrMatmul, settings: list[Setting], where: Machine, seed: int) -> dict[str, Any]:
    """The line of a problem. Leaves the `KEPT` fastest in `settings`."""
    import torch

    prepared, x = operands(problem, seed, where.device)
    matrix, check = prepared.to_dense(), checker(problem, prepared, x)
    calls: dict[Any, Callable[[], Any]] = {
        OURS: lambda: tvm_sparse.bsr_matmul(x, prepared),
        DENSE: lambda: torch.nn.functional.linear(x, matrix),
    }
    triton = {setting: triton_call(problem, prepared, x, meta_of(problem.m, setting)) for setting in settings}
    notes = []
    for name, call in (calls | triton).items():
        try:
            reason = check(call().T if name in triton else call())
        except Exception as error:  # a setting that exceeds the GPU
            if name not in triton:
                raise
            reason = f"{type(error).__name__}: {error}"[:80]
        if not reason:
            calls[name] = call
        elif name in triton:
            settings.remove(name)
        else:
            raise AssertionError(f"{problem.key}: {name}: {reason}")
        if reason:
            notes.append(f"{name}: {reason}")
    times = time_cuda(calls, ROUNDS, fewest=FEWEST) if where.kind == "cuda" else time_cpu(calls)
    us = {name: statistics.median(found) * 1e6 for name, (_, found) in times.items()}
    settings.sort(key=lambda setting: us[setting])
    del settings[KEPT:]
    best = settings[0] if settings else None
    others = min(us[DENSE], us[best] if best else math.inf)
    return {
        **{name: getattr(problem, name) for name in ("m", "k", "n", "sparsity", "dtype")},
        "block": problem.block_shape[0],
        OURS: round(us[OURS], 2),
        "way": way_of(prepared.problem(problem.m), where),
        DENSE: round(us[DENSE], 2),
        TRITON: round(us[best], 2) if best else None,
        "setting": " ".join(map(str, best)) if best else None,
        "over_best": us[OURS] / others,
        "note": "; ".join(notes),
    }


if __name__ == "__main__":
    typer.run(main)
