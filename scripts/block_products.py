"""Time products with block-sparse weights beyond tens of rows: points of `block_warpgroups`, beside other products.

    python scripts/block_products.py --out products.csv --dense dense.csv --points 40 --seconds 170

A *family* is a weight's shape and block, for which points are compiled once, on all cores: a kernel serves every number
of rows and every pattern. They are the defaults of its problems, those of `CHOSEN`, and `--points` that are drawn from
those with as many stages as one or two thread blocks of a multiprocessor have room for. Beside them stand the default
of `tensor_core`, PyTorch's product with a dense copy of the weight (cuBLAS), and with `--triton` PyTorch's block-sparse
one. Each point is compared with the product in float64 before it is timed; a wrong one is a line with a reason. Times
are of a kernel alone, in a CUDA graph, inputs hot, contenders in turn. `tflops` counts stored blocks, and a default is
marked for its problem.

`--dense` writes what PyTorch's dense product takes, by rows and shape; `--sampled` what points of `sampled_warpgroups`
take, the gradient of stored blocks, beside PyTorch's dense product alone and with the blocks copied out of it;
`--training` what a step of a layer takes, forward and backward, beside a dense layer, with the errors of its gradients
relative to those of PyTorch's.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from heads import Report
from reproduction import provenance

from tvm_sparse.bench.timing import time_cuda
from tvm_sparse.cli.common import Fixed, fixed_values, machine_here
from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.rounding import ROUNDING
from tvm_sparse.core.template import Template
from tvm_sparse.formats.bsr import random_pattern
from tvm_sparse.operators.bsr_matmul.pattern import SUMMATION, BlockSparse
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul
from tvm_sparse.operators.bsr_matmul.weight import BsrWeight
from tvm_sparse.operators.bsr_sddmm.problem import BsrSddmm
from tvm_sparse.runtime import loading
from tvm_sparse.workers.building import BUILD_TIMEOUT, BUILD_WORKER, library_name, request
from tvm_sparse.workers.processes import Pool

# k, n and block; and for each rows and sparsities.
FAMILIES: dict[tuple[int, int, int], tuple[tuple[int, float], ...]] = {
    (4096, 4096, 64): ((128, 0.75), (512, 0.5), (512, 0.8), (2048, 0.5), (2048, 0.9), (4096, 0.8)),
    (4096, 4096, 128): ((512, 0.8), (2048, 0.75)),
    (2048, 8192, 64): ((8192, 0.8),),
    (2048, 8192, 128): ((8192, 0.5),),
    (4096, 14336, 64): ((256, 0.8),),
    (4096, 4096, 32): ((512, 0.5), (512, 0.8), (512, 0.95), (2048, 0.8), (4096, 0.8), (8192, 0.8), (8192, 0.9)),
    (4096, 11008, 32): ((1024, 0.9),),
    (4096, 4096, 16): ((512, 0.5), (512, 0.8), (512, 0.95), (4096, 0.8)),
}
# Points beside the defaults, by a block's rows: tile_m, tile_n, panel, stages and producers.
CHOSEN: dict[int, tuple[tuple[int, int, int, int, int], ...]] = {
    16: ((256, 64, 64, 4, 1),),
    32: ((192, 64, 32, 6, 1), (128, 128, 32, 6, 2), (256, 96, 32, 8, 2), (192, 128, 32, 8, 2), (128, 256, 32, 8, 2)),
    64: ((128, 64, 64, 4, 2), (128, 128, 64, 3, 2), (128, 256, 64, 4, 2), (64, 64, 64, 6, 1)),
    128: ((128, 128, 32, 6, 2), (128, 256, 64, 4, 2), (64, 128, 64, 4, 2)),
}
DENSE_SHAPES = ((1024, 1024), (768, 3072), (4096, 4096), (4096, 11008), (2048, 8192))
DENSE_ROWS = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# m, k and n of a layer that is trained, with blocks and sparsities.
TRAINED, PRUNED = (8192, 4096, 4096), ((64, 0.8), (64, 0.9), (128, 0.8), (32, 0.8), (32, 0.9), (16, 0.8))
# Axes of sampled products by shape and block, and points by block: tile_m, tile_k and cluster, each with as many stages
# as two thread blocks of a multiprocessor have room for, or one.
SAMPLED: dict[tuple[int, int, int], tuple[tuple[int, float], ...]] = {
    (4096, 4096, 64): ((8192, 0.8), (8192, 0.9), (2048, 0.8)),
    (4096, 4096, 128): ((8192, 0.8),),
    (4096, 4096, 32): ((8192, 0.8), (8192, 0.9)),
}
SAMPLED_POINTS: dict[int, tuple[tuple[int, int, int], ...]] = {
    64: (
        (32, 256, 1),
        (32, 256, 2),
        (32, 256, 4),
        (64, 256, 1),
        (64, 256, 2),
        (32, 128, 1),
        (32, 512, 1),
        (32, 512, 2),
    ),
    128: ((32, 256, 1), (32, 256, 2), (64, 128, 1), (64, 256, 1)),
    32: ((32, 256, 1), (64, 256, 1), (64, 128, 1)),
}
ROUNDS = 5
COLUMNS = ("m", "k", "n", "block", "sparsity", "us", "tflops", "contender", "decisions", "registers", "note")
DEFAULT = "default"


def most_stages(template: Template, problem: BlockSparse, machine: Machine, point: dict[str, int], each: int) -> int:
    """The most stages with which a multiprocessor has room for `each` thread blocks; 0 if there is none."""

    def fits(stages: int) -> bool:
        with_them = point | {"stages": stages}
        if template.allowed(problem, machine, with_them) is not None:
            return False
        needed = template.needs(problem, with_them)["dynamic_shared_bytes"]
        return machine.blocks_at_once(1, 1, needed) >= each * machine.cores

    return max(filter(fits, template.space(problem, machine)["stages"]), default=0)


def drawn(
    problems: Sequence[BsrMatmul], machine: Machine, fix: list[str], count: int, seed: int
) -> dict[Candidate, None]:
    """The defaults for the problems of a family, those of `CHOSEN`, and other points up to `count`."""
    template, before = spaces.find("block_warpgroups"), spaces.find("tensor_core")
    largest = max(problems, key=lambda problem: problem.m)
    found = {of.candidate(of.default(problem, machine)): None for of in (template, before) for problem in problems}
    for chosen in CHOSEN[largest.block_shape[0]]:
        names = ("tile_m", "tile_n", "panel", "stages", "producers")
        point = dict(zip(names, chosen, strict=True)) | {"overlap": 1}
        if template.point(largest, machine, point) is None:
            found[template.candidate(point)] = None
    if not count:
        return found
    table = template.space(largest, machine)
    space = {**spaces.narrowed(table, fixed_values(fix, table)), "stages": (0,)}
    combinations: list[dict[str, int]] = [{}]
    for name in space:
        combinations = [one | {name: value} for one in combinations for value in space[name]]
    others: dict[Candidate, None] = {}
    for point in combinations:
        for each in (1, 2):
            if stages := most_stages(template, largest, machine, point, each):
                others[template.candidate(point | {"stages": stages})] = None
    left = [one for one in others if one not in found]
    return found | dict.fromkeys(random.Random(seed).sample(left, min(count, len(left))))


def weight_of(
    problem: BlockSparse, seed: int, device: str = "cuda", blocks: int | None = None
) -> tuple[BsrWeight, Any]:
    """A random weight of this number of blocks, or as many as its sparsity says, and x."""
    import numpy as np
    import torch

    rng = np.random.default_rng(seed)
    block_rows, block_cols = problem.grid
    indptr, indices = random_pattern(rng, problem.nnzb if blocks is None else blocks, block_cols, np.ones(block_rows))
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[str, Any] = {"generator": generator, "device": device}
    dtype = getattr(torch, problem.dtype)
    data = torch.randn((len(indices), *problem.block_shape), **made).to(dtype)
    x = torch.randn((problem.m, problem.k), **made).to(dtype)
    parts = data, torch.from_numpy(indices).to(device), torch.from_numpy(indptr).to(device)
    return BsrWeight(parts, columns=problem.k, constant=True), x


def checker(problem: BsrMatmul, weight: BsrWeight, x: Any) -> Callable[[Any], str]:
    """Says what is wrong with a product, compared with that in float64."""
    import torch

    dense = weight.to_dense()
    expected = x.double() @ dense.double().T
    scale = x.double().abs() @ dense.double().abs().T
    bound = scale * SUMMATION + expected.abs() * ROUNDING[problem.dtype] * 2

    def check(y: Any) -> str:
        error = (y.double() - expected).abs()
        bad = ~(error <= bound)
        if not bool(bad.any()):
            return ""
        first = [int(i) for i in torch.nonzero(bad)[0]]
        return f"wrong: {int(bad.sum())} of {bad.numel()}, first at {first}, largest error {float(error.max()):.3g}"

    return check


def bound_call(function: Any, arguments: Sequence[Any]) -> Callable[[], Any]:
    """A call of a kernel on PyTorch's current stream."""
    import tvm_ffi

    def call() -> None:
        with tvm_ffi.use_torch_stream():
            function(*arguments)

    return call


def dense_times(path: Path, machine: Machine, dtype: str) -> None:
    """Write what PyTorch's dense product takes."""
    import torch

    report = Report(path, provenance(machine), ("m", "k", "n", "us"), quiet=True)
    for k, n in DENSE_SHAPES:
        w = torch.randn((n, k), device="cuda").to(getattr(torch, dtype))
        xs = {m: torch.randn((m, k), device="cuda").to(w.dtype) for m in DENSE_ROWS}
        calls = {str(m): (lambda x=x, w=w: torch.nn.functional.linear(x, w)) for m, x in xs.items()}
        for name, (_, seconds) in time_cuda(calls, ROUNDS).items():
            report.add(m=name, k=k, n=n, us=f"{statistics.median(seconds) * 1e6:.2f}")


def sampled_times(path: Path, machine: Machine, dtype: str, folder: Path, seed: int) -> None:
    """Write what points of `sampled_warpgroups` take, after a check, beside PyTorch's dense product."""
    template = spaces.find("sampled_warpgroups")
    work: dict[tuple[int, int, int], Any] = {}
    for (k, n, block), asked in SAMPLED.items():
        problems = [BsrSddmm(m, k, n, str(block), gaps, dtype=dtype) for m, gaps in asked]
        found = {template.candidate(template.default(problem, machine)): None for problem in problems}
        for tile_m, tile_k, cluster in SAMPLED_POINTS[block]:
            point = {"tile_m": tile_m, "tile_k": tile_k, "stages": 0, "cluster": cluster}
            for each in (1, 2):
                if stages := most_stages(template, problems[0], machine, point, each):
                    found[template.candidate(point | {"stages": stages})] = None
        work[k, n, block] = problems, found
    built = compiled(work, machine, folder)
    report = Report(path, provenance(machine), COLUMNS, quiet=True)
    for family, (problems, _) in work.items():
        functions = [loading.load_function(Path(reply["path"]), machine.kind, None) for _, reply in built[family]]
        for problem in problems:
            for line in _sampled_timed(problem, machine, built[family], functions, seed):
                report.add(**dict(zip(COLUMNS, line, strict=True)))


def _sampled_timed(
    problem: BsrSddmm, machine: Machine, built: Sequence[Any], functions: Sequence[Any], seed: int
) -> list[tuple[Any, ...]]:
    import torch

    weight, right = weight_of(problem, seed)
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    left = torch.randn((problem.m, problem.n), generator=generator, device="cuda").to(right.dtype)
    (rows, cols), (block_rows, block_cols) = problem.block_shape, problem.grid
    at = torch.arange(block_rows, device="cuda").repeat_interleave(weight.indptr.diff())

    def blocks_of(whole: Any) -> Any:
        return whole.view(block_rows, rows, block_cols, cols).transpose(1, 2)[at, weight.indices.long()].contiguous()

    expected = blocks_of(left.double().T @ right.double())
    bound = blocks_of(left.double().abs().T @ right.double().abs()) * SUMMATION
    bound += expected.abs() * ROUNDING[problem.dtype] * 2
    data = right.new_empty(expected.shape)

    def check(found: Any) -> str:
        bad = ~((found.double() - expected).abs() <= bound)
        return (
            f"wrong: {int(bad.sum())} of {bad.numel()}, first at {torch.nonzero(bad)[0].tolist()}" if bad.any() else ""
        )

    calls: dict[str, Any] = {
        "dense": lambda: left.T @ right,
        "dense, then blocks": lambda: blocks_of(left.T @ right),
    }
    calls, notes = _admitted(calls, functions, (left, right, weight.indices, weight.indptr, data), check)
    default = spaces.find("sampled_warpgroups").candidate(spaces.find("sampled_warpgroups").default(problem, machine))
    return _lines(problem, built, calls, notes, [default])


def _admitted(
    calls: dict[str, Any], functions: Sequence[Any], arguments: Sequence[Any], check: Callable[[Any], str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The calls, with those of functions that are right, by number; and what is wrong with the others."""
    import torch

    notes: dict[str, str] = {}
    for i, function in enumerate(functions):
        arguments[-1].fill_(float("nan"))
        call = bound_call(function, arguments)
        try:
            call()
            torch.cuda.synchronize()
        except Exception as error:  # a launch that the GPU refuses
            notes[str(i)] = f"{type(error).__name__}: {error}"[:300]
            continue
        if reason := check(arguments[-1]):
            notes[str(i)] = reason
        else:
            calls[str(i)] = call
    return calls, notes


def training_times(path: Path, machine: Machine, dtype: str) -> None:
    """Write what a step forward and backward takes, of x and of the stored blocks, beside `torch.nn.Linear`, eagerly
    and in a CUDA graph, and the largest errors of both layers' gradients, against float64.
    """
    import torch

    import tvm_sparse.nn

    rows, k, n = TRAINED
    columns = ("m", "k", "n", "block", "sparsity", "dense_us", "us", "ratio", "dense_graph_us", "graph_us",
               "graph_ratio", "forward_us", "blocks_error", "x_error")  # fmt: skip
    report = Report(path, provenance(machine), columns, quiet=True)
    kind = getattr(torch, dtype)
    linear = torch.nn.Linear(k, n, bias=False, device="cuda", dtype=kind)
    x = torch.randn((rows, k), device="cuda").to(kind).requires_grad_()
    towards = torch.randn((rows, n), device="cuda").to(kind)

    def step(layer: Any) -> Callable[[], Any]:
        def run() -> None:
            x.grad = None
            layer.zero_grad()
            layer(x).backward(towards)

        return run

    for block, sparsity in PRUNED:
        layer = tvm_sparse.nn.BsrLinear.from_dense(linear, block, sparsity)
        errors = _gradient_errors(layer, x, towards)
        line: tuple[Any, ...] = (rows, k, n, block, sparsity)
        graphs = time_cuda({"dense": step(linear), "sparse": step(layer)})
        replayed = [1e6 * statistics.median(seconds) for _, seconds in graphs.values()]
        for before, us in ((_events(step(linear)), _events(step(layer))), replayed):
            line += f"{before:.0f}", f"{us:.0f}", f"{before / us:.2f}"
        line += f"{_events(partial(layer, x)):.0f}", *(f"{error:.2f}" for error in errors)
        print(*line, flush=True)
        report.add(**dict(zip(columns, line, strict=True)))


def _gradient_errors(layer: Any, x: Any, towards: Any) -> tuple[float, float]:
    """Largest errors of the gradients of the stored blocks and of x, in those of PyTorch's dense products."""
    import torch

    layer.zero_grad()
    x.grad = None
    layer(x).backward(towards)
    matrix, given = layer.dense().detach(), x.detach()
    exact = towards.double().T @ given.double()
    rows, cols = layer.block_shape
    at = torch.arange(len(layer.indptr) - 1, device="cuda").repeat_interleave(layer.indptr.diff())

    def blocks_of(whole: Any) -> Any:
        return whole.view(-1, rows, whole.shape[1] // cols, cols).transpose(1, 2)[at, layer.indices.long()]

    def error(found: Any, wanted: Any) -> float:
        return float((found.double() - wanted).abs().max())

    of_blocks = error(layer.data.grad, blocks_of(exact)) / error(blocks_of(towards.T @ given), blocks_of(exact))
    exact = towards.double() @ matrix.double()
    return of_blocks, error(x.grad, exact) / error(towards @ matrix, exact)


def _events(call: Callable[[], Any], calls: int = 20) -> float:
    """Microseconds of a call that PyTorch makes eagerly, by events around many."""
    import torch

    for _ in range(3):
        call()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls * 1e3


def family_of(name: str) -> tuple[int, int, int]:
    k, n, block = map(int, name.split("x"))
    return k, n, block


def compiled(work: dict[tuple[int, int, int], Any], machine: Machine, folder: Path) -> dict[tuple[int, int, int], Any]:
    """For each family its candidates and their builds' replies; those that do not compile are reported."""
    asked = [(family, one, problems[-1]) for family, (problems, candidates) in work.items() for one in candidates]
    requests = [
        request(problem, one, machine, folder / f"{i}-{library_name(problem, one, machine.arch)}")
        for i, (_, one, problem) in enumerate(asked)
    ]
    found: dict[tuple[int, int, int], Any] = {family: [] for family in work}
    with Pool(os.cpu_count() or 1, BUILD_WORKER, name="build") as pool:
        for (family, one, _), reply in zip(asked, list(pool.map(requests, timeout=BUILD_TIMEOUT)), strict=True):
            if reply.ok:
                found[family].append((one, reply.value))
            else:
                print(f"does not compile: {one}: {reply.message}", flush=True)
    return found


def triton_call(problem: BsrMatmul, weight: BsrWeight, x: Any, meta: dict[str, int] | None = None) -> Callable[[], Any]:
    """PyTorch's block-sparse product, transposed: by its usual kernel, or by that with these settings."""
    import warnings

    import torch
    from torch.sparse._triton_ops import bsr_dense_addmm, bsr_dense_mm

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse tensors are in beta
        own = torch.sparse_bsr_tensor(weight.indptr, weight.indices, weight.data, size=(problem.n, problem.k))
    across = x.T
    if meta is None:
        return lambda: bsr_dense_mm(own, across)
    unread = x.new_empty(()).expand(problem.n, problem.m)  # beta is 0
    return lambda: bsr_dense_addmm(unread, own, across, beta=0, meta=dict(meta))


def main(
    out: Annotated[Path | None, typer.Option(help="The CSV of products with block-sparse weights.")] = None,
    dense: Annotated[Path | None, typer.Option(help="The CSV of dense products.")] = None,
    sampled: Annotated[Path | None, typer.Option(help="The CSV of sampled products.")] = None,
    training: Annotated[Path | None, typer.Option(help="The CSV of steps of training.")] = None,
    points: Annotated[int, typer.Option(min=0, help="Of a family, drawn.")] = 0,
    families: Annotated[str, typer.Option(help="Some of them, as 4096x4096x64,...; all by default.")] = "",
    triton: Annotated[bool, typer.Option(help="PyTorch's block-sparse product, too.")] = False,
    dtype: Annotated[str, typer.Option()] = "bfloat16",
    seconds: Annotated[float, typer.Option(help="When to stop.")] = 170,
    seed: Annotated[int, typer.Option(help="Of the draw and the data.")] = 0,
    fix: Fixed = None,
) -> None:
    """Compile, check and time points, and write a CSV."""

    started, machine = time.monotonic(), machine_here("auto", "exploring")

    def late(what: Any) -> bool:
        if over := time.monotonic() - started > seconds:
            print(f"no time for {what}", flush=True)
        return over

    loading.prepare(machine.kind)
    named = [family_of(one) for one in families.split(",") if one]
    work: dict[tuple[int, int, int], Any] = {}
    for k, n, block in (named or FAMILIES) if out else ():
        problems = [BsrMatmul(m, k, n, str(block), gaps, dtype=dtype) for m, gaps in FAMILIES[k, n, block]]
        work[k, n, block] = problems, drawn(problems, machine, fix or [], points, seed)
    with tempfile.TemporaryDirectory() as folder:
        report = Report(out, provenance(machine), COLUMNS, quiet=True)
        built = compiled(work, machine, Path(folder))
        print(f"{sum(map(len, built.values()))} built, {time.monotonic() - started:.0f} s", flush=True)
        if dense is not None:
            dense_times(dense, machine, dtype)
        if sampled is not None:
            sampled_times(sampled, machine, dtype, Path(folder), seed)
        if training is not None:
            training_times(training, machine, dtype)
        for family, (problems, _) in work.items():
            functions = [loading.load_function(Path(reply["path"]), machine.kind, None) for _, reply in built[family]]
            for problem in problems:
                if not late(problem):
                    for line in _timed(problem, machine, built[family], functions, triton, seed):
                        report.add(**dict(zip(COLUMNS, line, strict=True)))
    print(f"{time.monotonic() - started:.0f} s")


def _timed(
    problem: BsrMatmul, machine: Machine, built: Sequence[Any], functions: Sequence[Any], triton: bool, seed: int
) -> list[tuple[Any, ...]]:
    """Lines of a problem, the fastest first; the most interesting ones are printed."""
    import torch

    weight, x = weight_of(problem, seed)
    check, matrix = checker(problem, weight, x), weight.to_dense()
    own = map(spaces.find, ("block_warpgroups", "tensor_core"))
    defaults = [of.candidate(of.default(problem, machine)) for of in own]
    calls: dict[str, Any] = {"dense": lambda: torch.nn.functional.linear(x, matrix)}
    notes: dict[str, str] = {}
    y = x.new_empty((problem.m, problem.n))
    if triton:
        calls["triton"] = triton_call(problem, weight, x)
        try:
            calls["triton"]()
        except Exception as error:  # shapes and blocks that it does not take
            notes["triton"] = f"{type(error).__name__}: {error}"[:300]
            del calls["triton"]
    calls, wrong = _admitted(calls, functions, (x, *weight.arguments, y), check)
    return _lines(problem, built, calls, notes | wrong, defaults)


def _lines(
    problem: BlockSparse, built: Sequence[Any], calls: dict[str, Any], notes: dict[str, str], defaults: Sequence[Any]
) -> list[tuple[Any, ...]]:
    """Time calls in turn; of candidates' calls the names are their numbers."""
    times = time_cuda(calls, ROUNDS)
    operations = 2 * problem.m * problem.nnzb * problem.block_shape[0] * problem.block_shape[1]
    about = (problem.m, problem.k, problem.n, problem.block_shape[0], problem.sparsity)
    lines = []
    for name in (*calls, *notes):
        us = statistics.median(times[name][1]) * 1e6 if name in times else float("nan")
        candidate, reply = built[int(name)] if name.isdigit() else (None, {"resources": {}})
        decisions = "" if candidate is None else " ".join(f"{a}={b}" for a, b in candidate.decisions)
        told = (name, "") if candidate is None else (candidate.template, decisions)
        registers = (reply["resources"] or {}).get("registers", "")
        note = notes.get(name, DEFAULT if candidate in defaults else "")
        lines.append((*about, f"{us:.2f}", f"{operations / us / 1e6:.0f}", *told, registers, note))
    lines.sort(key=lambda line: (line[5] == "nan", float(line[5])))
    for place, line in enumerate(lines):
        if place < 2 or line[-1] or not line[8]:
            print(*line, flush=True)
    return lines


if __name__ == "__main__":
    typer.run(main)
