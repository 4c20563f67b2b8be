"""The sparse and the dense way of recurrent stacks beside torch's modules (cuDNN), over a grid or drawn calls, and the
regret of the way that stacks take.

    python scripts/rnn_grid.py --minutes 2.3 --csv scripts/results/rnn-grid-h200.csv       # a GPU and 16 cores
    python scripts/rnn_grid.py --draw 30 --seed 7 --minutes 2 --csv scripts/results/rnn-grid-drawn-h200.csv
    python scripts/rnn_grid.py --draw 16 --seed 7 --minutes 1 --dtype bfloat16
    python scripts/rnn_grid.py --summary scripts/results/rnn-grid-h200.csv   # by the present table

The grid has cells, hidden units, densities of a random pattern, and batches; `--draw N` draws N layers within its
range, each with a few batches. All have as many inputs as units, and calls include the product with the inputs, in
float16 unless `--dtype` says bfloat16. A run in float16 times torch's module in bfloat16 too, for which cuDNN has no
persistent kernels.

regret       time of the way that a stack takes over that of the faster way
over_cudnn   time of that way over that of torch's module

A sparse way of several launches that took more than twice the time of the dense way at half of the batch is not timed.
At the end the table of `tvm_sparse.layers.recurrent_dense` that these measurements make is printed. Results of both
ways are compared with each other.
"""

from __future__ import annotations

import functools
import math
import multiprocessing
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import scipy.sparse
import torch
import typer
from heads import Report, ready, show
from recurrent import NORM, TOLERANCE, Case, layer
from reproduction import provenance, read_csv

import tvm_sparse
from tvm_sparse.bench.timing import time_cpu, time_cuda
from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core import machine
from tvm_sparse.core.machine import Machine
from tvm_sparse.layers.recurrent import BATCH
from tvm_sparse.layers.recurrent_dense import (
    AT_ONCE,
    DENSITIES,
    FEW,
    MANY,
    NEVER,
    STEPS,
    DenseCall,
    family,
    likely_way,
    persistent,
)
from tvm_sparse.layers.recurrent_stack import MODULES
from tvm_sparse.layers.recurrent_weights import Weights, prepared
from tvm_sparse.operators.sparse_recurrent.problem import GATES
from tvm_sparse.runtime.dense import DENSE
from tvm_sparse.runtime.dispatch import dispatcher

CELLS, UNITS = ("tanh", "lstm", "gru"), (256, 512, 1024, 1280, 2048, 4096)
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
DTYPE, OTHER_DTYPE = "float16", "bfloat16"
# Layers whose kernels are built at once, before any of them is timed.
TOGETHER = 24
# A way with several launches is not timed beyond this multiple of the other's time.
HOPELESS = 2.0
ROUNDS = 3
COLUMNS = ("cell", "hidden", "batch", "steps", "density", "form", "sparse", "dense", "module", "module_bfloat16",
           "persistent", "way", "regret", "over_cudnn", "kernel", "note")  # fmt: skip
SPARSE, WAY, MODULE, OTHER = TIMES = "sparse", "dense", "module", f"module_{OTHER_DTYPE}"


@dataclass(frozen=True)
class Layer:
    """A layer, and the batches of its calls."""

    cell: str
    hidden: int
    density: float
    batches: tuple[int, ...] = BATCHES
    dtype: str = DTYPE


def grid(
    cells: Sequence[str], units: Sequence[int], densities: Sequence[float], batches: Sequence[int], dtype: str
) -> list[Layer]:
    """All layers of the grid, in a random order, so that a run that ends early has seen all kinds."""
    found = [
        Layer(cell, hidden, density, tuple(batches), dtype)
        for cell in cells
        for hidden in units
        for density in densities
    ]
    random.Random(0).shuffle(found)
    return found


def draw(count: int, seed: int, dtype: str) -> list[Layer]:
    """Layers within the range of the grid, half of them with multiples of 128 units, and three batches each."""
    rng, found = random.Random(seed), []
    for number in range(count):
        unit = 128 if number % 2 else 8
        hidden = round(math.exp(rng.uniform(math.log(256), math.log(4096))) / unit) * unit
        density = round(math.exp(rng.uniform(math.log(0.02), 0)), 3)
        batches = sorted({round(math.exp(rng.uniform(0, math.log(256)))) for _ in range(3)})
        found.append(Layer(rng.choice(CELLS), hidden, density, tuple(batches), dtype))
    return found


def weights_of(one: Layer, seed: int) -> Weights:
    """The recurrent weight of a layer with a random pattern, in the form that layers choose."""
    rng, rows = np.random.default_rng(seed), GATES[one.cell] * one.hidden
    values = rng.standard_normal((rows, one.hidden), np.float32) * (NORM / math.sqrt(one.hidden * one.density))
    if one.density == 1:
        return prepared(values, GATES[one.cell], one.dtype, "blocks", "banks")
    values[rng.random((rows, one.hidden), np.float32) >= one.density] = 0
    return prepared(scipy.sparse.csr_array(values), GATES[one.cell], one.dtype, "auto", "banks")


def layer_of(one: Layer, weights: Weights) -> Any:
    """Our layer with prepared weights."""
    return layer(Case(one.hidden, cell=one.cell), weights, torch.zeros(one.hidden))


def seconds_of(calls: Mapping[str, Any], where: Machine, rounds: int) -> dict[str, float]:
    """Seconds of each call, in turn; calls that fail are left out, with a message."""
    able = {}
    for name, call in calls.items():
        try:
            call()
            able[name] = call
        except RuntimeError as error:
            typer.echo(f"{name} has no time: {str(error)[:200]}", err=True)
    times = time_cuda(able, rounds, fewest=1) if where.kind == "cuda" else time_cpu(able, 1)
    return {name: float(np.median(found)) for name, (_, found) in times.items() if not isinstance(found, str)}


@torch.no_grad()
def measured(one: Layer, made: Any, steps: int, where: Machine, rounds: int, seed: int) -> list[dict[str, Any]]:
    """A line for each batch."""
    weights = made.weights
    generator = torch.Generator(where.device).manual_seed(seed)
    rows, hidden, half, other = (
        GATES[one.cell] * one.hidden,
        one.hidden,
        getattr(torch, one.dtype),
        getattr(torch, OTHER_DTYPE),
    )

    def normal(*shape: int, size: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=where.device).mul_(size).to(half)

    weight_ih, bias = normal(rows, hidden, size=0.7 / hidden**0.5), normal(rows, size=0.1)
    stack = tvm_sparse.RecurrentStack([made], [(weight_ih, bias)])
    mode = {"tanh": "RNN_TANH", "relu": "RNN_RELU", "lstm": "LSTM", "gru": "GRU"}[one.cell]
    module = MODULES[mode](hidden, hidden, device=where.device, dtype=half)
    module.weight_hh_l0.copy_(torch.from_numpy(weights.dense()))
    module.weight_ih_l0.copy_(weight_ih)
    module.bias_ih_l0.copy_(bias)
    module.bias_hh_l0.zero_()
    module.flatten_parameters()
    # float16 times tell of cuDNN's other kernels, too, where it has no persistent ones.
    call = DenseCall(one.cell, hidden, hidden, 8, weights.density, one.dtype)
    second = MODULES[mode](hidden, hidden, device=where.device, dtype=other) if persistent(call) else None
    lines: list[dict[str, Any]] = []
    for batch in one.batches:
        x = normal(steps, batch, hidden)
        lost = [line for line in lines if line[SPARSE] is None or line[SPARSE] > HOPELESS * (line[WAY] or math.inf)]
        hopeless = batch > BATCH and any(BATCH <= line["batch"] for line in lost)

        def way(dense: bool, x: torch.Tensor = x) -> torch.Tensor:
            stack.dense = dense
            return stack(x)[0]

        calls: dict[str, Any] = {WAY: lambda: way(True), MODULE: lambda x=x: module(x)[0]}
        if not hopeless:
            calls[SPARSE] = lambda: way(False)
            error = float((way(True).float() - way(False).float()).abs().max())
            if not error <= TOLERANCE[one.dtype]:
                typer.echo(f"{one}, batch {batch}: the ways differ by {error:.3g}", err=True)
                del calls[SPARSE]
        if second is not None:
            calls[OTHER] = functools.partial(second, x.to(other))
        found = seconds_of(calls, where, rounds)
        line = dict.fromkeys(COLUMNS) | {
            "cell": one.cell, "hidden": hidden, "batch": batch, "steps": steps, "density": one.density,
            "form": made.form,
            "note": "" if not hopeless else f"more than {HOPELESS:g} times the dense way at a smaller batch",
        }  # fmt: skip
        line |= {name: found[name] * 1e6 for name in (SPARSE, WAY, MODULE, OTHER) if name in found}
        if not hopeless:
            problem = next(iter(made.problems(steps, batch, target=where.device).values()))
            line["kernel"] = str(dispatcher.explain(problem, where).candidate)
        lines.append(judged(line, one.dtype, where))
    return lines


def judged(line: dict[str, Any], dtype: str, where: Machine) -> dict[str, Any]:
    """A line with the kind of cuDNN's kernel, the way that stacks take, and what it costs where that is known."""
    call = DenseCall(line["cell"], line["hidden"], line["hidden"], line["batch"], line["density"], dtype)
    line |= {"persistent": int(persistent(call)), "way": likely_way(call, where).way}
    line |= {"regret": None, "over_cudnn": None}
    chosen = line[WAY] if line["way"] == DENSE else line[SPARSE]
    if chosen and line[WAY] and line[MODULE]:
        line["regret"] = chosen / min(seconds for seconds in (line[WAY], line[SPARSE]) if seconds)
        line["over_cudnn"] = chosen / line[MODULE]
    return line


def dense_time(line: Mapping[str, Any], kind: str) -> float | None:
    """The dense way's time by cuDNN's kernels of a kind, or None."""
    own = STEPS if not line["persistent"] else FEW if line["batch"] <= AT_ONCE else MANY
    found = line[WAY] if own == kind else line[OTHER] if kind == STEPS else None
    return None if found is None else float(found)


def crossing(lines: Sequence[Mapping[str, Any]], kind: str) -> int | None:
    """The least batch from which the dense way, by kernels of a kind, is faster; None if it has no times.

    Logarithms of sparse over dense time are interpolated between batches, and for few sequences extrapolated beyond
    them. A sparse time that was not measured is taken to be in proportion to the batch.
    """
    ratios: dict[int, float] = {}
    known = None
    for line in sorted(lines, key=lambda line: line["batch"]):
        batch, sparse = line["batch"], line[SPARSE]
        dense = dense_time(line, kind)
        known = (batch, sparse) if sparse else known
        if dense:
            ratios[batch] = math.inf if known is None else known[1] * batch / known[0] / dense
    if not ratios:
        return None
    if kind == FEW and len(ratios) > 1:
        return reaches_one(*sorted(ratios.items())[-2:])
    first = None
    for batch in sorted(ratios, reverse=True):
        if ratios[batch] < 1:
            break
        first = batch
    if first is None:
        return NEVER
    before = max((batch for batch in ratios if batch < first), default=None)
    if before is None:
        return AT_ONCE + 1 if kind == MANY else first
    found = where_one((before, ratios[before]), (first, ratios[first]))
    # The sparse way takes as long for any further 16 sequences.
    return math.ceil(found) if before < BATCH else math.floor(found / BATCH) * BATCH + 1


def where_one(one: tuple[int, float], other: tuple[int, float]) -> float:
    """The batch at which the line through two batches' logarithms of ratios is 0."""
    share = math.log(1 / one[1]) / math.log(other[1] / one[1])
    return math.exp(math.log(one[0]) + share * math.log(other[0] / one[0]))


def reaches_one(one: tuple[int, float], other: tuple[int, float]) -> int:
    """`where_one` of ratios that grow, rounded; `NEVER` of others that are below 1, and 1 of others that are above."""
    if other[1] <= one[1]:
        return NEVER if other[1] < 1 else 1
    return max(1, round(min(where_one(one, other), NEVER)))


def print_table(found: Mapping[Layer, Sequence[Mapping[str, Any]]]) -> None:
    """The rows of `LEAST_BATCH` that the measurements make."""
    for cell in CELLS:
        for name, kind in (("MANY", MANY), ("FEW", FEW), ("STEPS", STEPS)):
            rows = []
            for units in sorted({one.hidden for one in found}):
                least = [
                    next((crossing(lines, kind) for one, lines in found.items()
                          if (one.cell, one.hidden, one.density) == (cell, units, density)), None)
                    for density in DENSITIES
                ]  # fmt: skip
                if any(least):
                    cells = ("?" if one is None else "NEVER" if one == NEVER else str(one) for one in least)
                    rows.append(f"        {units}: ({', '.join(cells)}),")
            if rows:
                typer.echo("\n".join([f'    ("{family(cell)}", {name}): {{', *rows, "    },"]))


def summary(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """For each cell the number of calls, and how regret and times over cuDNN are distributed."""
    rows = []
    for cell in ("all", *CELLS):
        own = [line for line in lines if line["regret"] and cell in ("all", line["cell"])]
        if own:
            regrets, ratios = ([line[name] for line in own] for name in ("regret", "over_cudnn"))
            cells = (np.exp(np.mean(np.log(regrets))), max(regrets), np.exp(np.mean(np.log(ratios))), max(ratios))
            slower = sum(ratio > 1.05 for ratio in ratios)
            rows.append([cell, str(len(own)), *(f"{one:.3f}" for one in cells), str(slower)])
    return rows


def show_regret(lines: Sequence[Mapping[str, Any]]) -> None:
    """Print the summary, and the calls with the largest regret."""
    heads = ("cell", "calls", "regret, mean", "worst", "over cuDNN, mean", "worst", "slower by more than 5 %")
    show("the way that stacks take", heads, summary(lines))
    for line in sorted((line for line in lines if line["regret"]), key=lambda line: -line["regret"])[:12]:
        typer.echo(" ".join(f"{name}={line[name]:.4g}" if isinstance(line[name], float) else f"{name}={line[name]}"
                            for name in COLUMNS[:13]))  # fmt: skip


def judge_again(earlier: Path, csv_path: Path | None) -> None:
    """Print what the present table costs by the times of an earlier run."""
    facts, rows = read_csv(earlier)
    where, lines = machine.resolve(facts["device"].partition("(")[2].rstrip(")")), []
    for row in rows:
        line = dict(row) | {name: float(row[name]) if row[name] else None for name in TIMES}
        line |= {name: int(row[name]) for name in ("hidden", "batch", "steps")}
        lines.append(judged(line | {"density": float(row["density"])}, facts.get("dtype", DTYPE), where))
    report = Report(csv_path, facts, COLUMNS)
    for line in lines:
        report.add(**line)
    show_regret(lines)
    report.close()


def main(
    target: Target = "auto",
    cell: Annotated[list[str] | None, typer.Option(help="Only these cells.")] = None,
    hidden: Annotated[list[int] | None, typer.Option(help="Only these numbers of units.")] = None,
    density: Annotated[list[float] | None, typer.Option(help="Only these densities.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Only these batches.")] = None,
    drawn: Annotated[int, typer.Option("--draw", help="Draw so many layers instead of the grid.")] = 0,
    steps: Annotated[int, typer.Option(min=1, help="Of each call.")] = 64,
    dtype: Annotated[str, typer.Option(help="float16 or bfloat16.")] = DTYPE,
    minutes: Annotated[float, typer.Option(help="No layer is begun after this time.")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, help="Of timing on a GPU.")] = ROUNDS,
    workers: Annotated[int, typer.Option(min=1, help="Processes that lay out weights.")] = 8,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    seed: Annotated[int, typer.Option(help="Of what is drawn, and of weights.")] = 0,
    earlier: Annotated[
        Path | None, typer.Option("--summary", help="Judge the times of this CSV by the present table; write to --csv.")
    ] = None,
) -> None:
    """Time both ways of recurrent stacks beside torch's modules, and tell the regret of the way that stacks take."""
    ends = time.monotonic() + 60 * minutes
    with errors():
        if earlier is not None:
            judge_again(earlier, csv_path)
            return
        if dtype not in (DTYPE, OTHER_DTYPE):
            raise typer.BadParameter(f"expected {DTYPE} or {OTHER_DTYPE}, got {dtype}", param_hint="--dtype")
        chosen = (
            draw(drawn, seed, dtype)
            if drawn
            else grid(cell or CELLS, hidden or UNITS, density or DENSITIES, batch or BATCHES, dtype)
        )
        # Before this process uses a GPU, which forked processes could not.
        context = multiprocessing.get_context("fork")
        with ProcessPoolExecutor(workers, context) as pool:
            waiting = [pool.submit(weights_of, one, seed + number) for number, one in enumerate(chosen)]
            where = machine_here(target, "comparing")
            report, found, left = Report(csv_path, provenance(where) | {"dtype": dtype}, COLUMNS), {}, 0
            for first in range(0, len(chosen), TOGETHER):
                part = list(zip(chosen, waiting, strict=True))[first : first + TOGETHER]
                if time.monotonic() > ends:
                    for _, future in part:
                        future.cancel()
                    left += len(part)
                    continue
                ours = [(one, layer_of(one, future.result())) for one, future in part]
                problems = [
                    problem
                    for one, made in ours
                    for batch in one.batches
                    for problem in made.problems(steps, batch, target=target).values()
                ]
                with ready(problems, where):
                    for one, made in ours:
                        if time.monotonic() > ends:
                            left += 1
                            continue
                        found[one] = measured(one, made, steps, where, rounds, seed)
                        for line in found[one]:
                            report.add(**line)
        lines = [line for of_layer in found.values() for line in of_layer]
        if not drawn:
            print_table(found)
        show_regret(lines)
        if left:
            typer.echo(f"{left} of {len(chosen)} layers were not reached")
        report.close()


if __name__ == "__main__":
    typer.run(main)
