"""Tables 1 and 2 of Gu 2020 on this machine: block-sparse products of 36 shapes, with each kind of mapping to a GPU.

    python scripts/gu_tables.py                     # about two minutes on a GPU with 16 cores
    python scripts/gu_tables.py --m 8 --block 16 --points 8

Table 1 compares schedules: each of our templates runs at its best point in the tuning logs, or, without one, at the
best of its default and a few random points. Table 2 compares what a call of `bsr_matmul` runs with other libraries:
torch's BSR product, cuSPARSE's CSR product, Triton's `bsr_dense_mm` where it takes the shape, and dense products of
cuBLAS in float32, TF32 and float16. Prints both beside the paper's own figures, and writes a CSV and a plot with GPU,
versions and date into scripts/results/. Everything is checked against the reference before it is timed; failures are
notes in the CSV.
"""

from __future__ import annotations

import functools
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from contenders import built, call_of
from reproduction import has_plot, provenance, result_path, write_csv, write_plot

from tvm_sparse.bench.compare import NAME, compare
from tvm_sparse.bench.contenders import CUDA, Call, Peer
from tvm_sparse.cli.common import console, errors, machine_here, table, us
from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Mismatch, Problem
from tvm_sparse.core.spaces import points
from tvm_sparse.operators.bsr_matmul.peers import PEERS, dense_weight
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul
from tvm_sparse.records import Log
from tvm_sparse.runtime import paths
from tvm_sparse.runtime.loading import load_function, with_workspaces
from tvm_sparse.workers import building
from tvm_sparse.workers.processes import Pool

SHAPES = ((1, 128, 768), (8, 128, 768), (1, 1024, 1024), (8, 1024, 1024))  # m, k, n
BLOCKS = (8, 16, 32)
SPARSITIES = (0.8, 0.85, 0.95)
BUILD_TIMEOUT = 300.0

# The paper's figures, NVIDIA T4, milliseconds: by shape, a row for each block size and sparsity in order.
# Table 1: per element (4.1), per tile (4.2), reduction over blocks (4.4.1), reduction within blocks (4.4.2).
TABLE_1 = {
    (1, 128, 768): (
        (0.019, 0.14, 0.013, 0.0091), (0.015, 0.11, 0.012, 0.0081), (0.010, 0.043, 0.011, 0.0071),
        (0.025, 0.18, 0.013, 0.0084), (0.021, 0.12, 0.013, 0.0071), (0.010, 0.075, 0.010, 0.0076),
        (0.043, 0.20, 0.012, 0.0070), (0.032, 0.17, 0.012, 0.0071), (0.014, 0.11, 0.010, 0.0070),
    ),
    (8, 128, 768): (
        (0.018, 0.14, 0.033, 0.030), (0.015, 0.099, 0.029, 0.028), (0.010, 0.047, 0.020, 0.025),
        (0.025, 0.15, 0.021, 0.029), (0.020, 0.13, 0.018, 0.027), (0.011, 0.050, 0.012, 0.025),
        (0.043, 0.28, 0.015, 0.030), (0.033, 0.21, 0.013, 0.029), (0.015, 0.077, 0.012, 0.025),
    ),
    (1, 1024, 1024): (
        (0.14, 0.57, 0.046, 0.016), (0.11, 0.45, 0.046, 0.014), (0.042, 0.16, 0.045, 0.010),
        (0.22, 0.64, 0.039, 0.015), (0.16, 0.48, 0.039, 0.014), (0.058, 0.19, 0.038, 0.010),
        (0.42, 0.79, 0.036, 0.014), (0.31, 0.68, 0.036, 0.013), (0.11, 0.27, 0.035, 0.009),
    ),
    (8, 1024, 1024): (
        (0.14, 0.58, 0.23, 0.087), (0.11, 0.44, 0.20, 0.071), (0.041, 0.16, 0.14, 0.046),
        (0.21, 0.64, 0.27, 0.079), (0.16, 0.49, 0.26, 0.065), (0.058, 0.20, 0.26, 0.045),
        (0.42, 0.79, 0.24, 0.070), (0.32, 0.62, 0.24, 0.059), (0.11, 0.28, 0.23, 0.040),
    ),
}  # fmt: skip
# Table 2: reduction within blocks after tuning (4.5), Gray et al. 2017, cuSPARSE.
TABLE_2 = {
    (1, 128, 768): (
        (0.0051, 0.015, 0.0065), (0.0031, 0.013, 0.0060), (0.0036, 0.008, 0.0060),
        (0.0040, 0.015, 0.0061), (0.0037, 0.013, 0.0058), (0.0037, 0.010, 0.0059),
        (0.0036, None, 0.011), (0.0036, None, 0.011), (0.0037, None, 0.011),
    ),
    (8, 128, 768): (
        (0.010, 0.014, 0.0078), (0.0085, 0.011, 0.0078), (0.0051, 0.011, 0.0059),
        (0.0070, 0.016, 0.0063), (0.0083, 0.014, 0.0060), (0.0047, 0.010, 0.0060),
        (0.010, None, 0.011), (0.0043, None, 0.011), (0.0048, None, 0.011),
    ),
    (1, 1024, 1024): (
        (0.013, 0.015, 0.0065), (0.011, 0.012, 0.0060), (0.0059, 0.009, 0.0059),
        (0.013, 0.018, 0.0062), (0.011, 0.012, 0.0060), (0.0058, 0.008, 0.0060),
        (0.012, None, 0.011), (0.0047, None, 0.011), (0.0042, None, 0.011),
    ),
    (8, 1024, 1024): (
        (0.078, 0.015, 0.0078), (0.061, 0.013, 0.0061), (0.026, 0.008, 0.0060),
        (0.074, 0.019, 0.0079), (0.058, 0.014, 0.0079), (0.025, 0.009, 0.0062),
        (0.018, None, 0.011), (0.017, None, 0.011), (0.014, None, 0.011),
    ),
}  # fmt: skip
PAPER_1 = ("paper 4.1, T4", "paper 4.2, T4", "paper 4.4.1, T4", "paper 4.4.2, T4")
PAPER_2 = ("paper tuned, T4", "paper's Gray, T4", "paper's cuSPARSE, T4")

# Our templates in the order of the paper's sections.
TEMPLATES = ("per_element", "per_tile", "staged_x", "over_blocks", "cross_thread", "warp_shuffle")
OURS, OURS_HALF = NAME, f"{NAME}, float16"
COLUMNS = ("m", "k", "n", "block", "sparsity", "implementation", "microseconds", "timed", "correct", "kernel", "note")


def torch_csr(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    """cuSPARSE's product of the weight in CSR format, through torch."""
    import warnings

    import torch

    x = torch.from_numpy(inputs[0]).to(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse tensors are in beta
        weight = torch.from_numpy(dense_weight(problem, inputs)).to(device).to_sparse_csr()
    return lambda: (weight @ x.T).T


def dense_tf32(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    """cuBLAS in TF32, with the values of a float16 problem, which TF32 represents exactly."""
    import torch

    x = torch.from_numpy(inputs[0]).to(device).float()
    weight = torch.from_numpy(dense_weight(problem, inputs)).to(device).float()

    def call() -> Any:
        before, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, True
        try:
            return torch.nn.functional.linear(x, weight)
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before

    return call


BY_NAME = {peer.name: peer for peer in PEERS}
FLOAT = (
    *(BY_NAME[name] for name in ("torch BSR @ dense", "torch bsr_dense_mm (Triton)", "torch dense linear")),
    Peer("cuSPARSE CSR @ dense", "torch", CUDA, torch_csr),
)
HALF = (BY_NAME["torch dense linear"], Peer("cuBLAS TF32", "torch", CUDA, dense_tf32))
SHOWN = {"torch dense linear": "cuBLAS float32"}
SHOWN_HALF = {OURS: OURS_HALF, "torch dense linear": "cuBLAS float16"}


def cases(m: Sequence[int], block: Sequence[int], dtype: str) -> list[BsrMatmul]:
    return [
        BsrMatmul(*s, str(b), sparsity, dtype=dtype)
        for s in SHAPES
        for b in BLOCKS
        for sparsity in SPARSITIES
        if s[0] in (m or [s[0]]) and b in (block or [b])
    ]


def place(problem: BsrMatmul) -> tuple[tuple[int, int, int], int, float]:
    """The key of a case: (m, k, n), block size, sparsity."""
    return (problem.m, problem.k, problem.n), problem.block_shape[0], problem.sparsity


def printed(problem: BsrMatmul) -> dict[str, float]:
    """The paper's figures for a case, in microseconds."""
    shape, block, sparsity = place(problem)
    row = BLOCKS.index(block) * len(SPARSITIES) + SPARSITIES.index(sparsity)
    figures = zip((*PAPER_1, *PAPER_2), (*TABLE_1[shape][row], *TABLE_2[shape][row]), strict=True)
    return {name: milliseconds * 1e3 for name, milliseconds in figures if milliseconds is not None}


def known_points(where: Machine) -> dict[tuple[str, str], Candidate]:
    """By problem and template, the fastest trial in the logs at the template's present version."""
    versions = {t.name: t.version for t in spaces.templates()}
    best: dict[tuple[str, str], Any] = {}
    for root in (paths.shipped_logs(), paths.user_logs()):
        for trial in Log(root, where.arch, "bsr_matmul").read().timed(fresh=False):
            key = trial.problem, trial.candidate.template
            if trial.outcome == "ok" and versions.get(key[1]) == trial.candidate.version:
                if key not in best or trial.median < best[key].median:
                    best[key] = trial
    return {key: trial.candidate for key, trial in best.items()}


def contenders(
    problem: Problem, where: Machine, known: dict[tuple[str, str], Candidate], count: int
) -> list[Candidate]:
    """For each template its best known point, or its default and random points, `count` together."""
    chosen = []
    tables, _ = spaces.applicable(problem, where)
    for name in (n for n in TEMPLATES if n in tables):
        if found := known.get((problem.key, name)):
            chosen.append(found)
            continue
        template = spaces.find(name)
        default = template.candidate(template.default(problem, where))
        others = list(points(problem, where, {name: tables[name]}))
        random.Random(f"{name} {problem}").shuffle(others)
        chosen += list(dict.fromkeys([default, *others]))[:count]
    return chosen


def as_peer(candidate: Candidate, path: str, workspaces: Sequence[Any]) -> Peer:
    """A library of ours as a contender."""

    def prepare(problem: Any, inputs: Sequence[Any], device: str) -> Call:
        function = with_workspaces(load_function(Path(path), "cuda", None), workspaces, problem, "cuda")
        return call_of(function, problem, inputs, device)

    return Peer(str(candidate), "torch", CUDA, prepare)


def built_peers(
    wanted: Sequence[tuple[BsrMatmul, Candidate]], where: Machine, folder: Path, builders: int
) -> tuple[dict[str, list[Peer]], dict[str, list[tuple[str, str]]]]:
    """By problem the contenders, and those that did not compile or spill registers, with the reason."""
    made: dict[str, list[Peer]] = {}
    failed: dict[str, list[tuple[str, str]]] = {}
    requests = [
        building.request(problem, candidate, where, folder / f"{number}.so")
        for number, (problem, candidate) in enumerate(wanted)
    ]
    with Pool(builders, building.BUILD_WORKER, name="build") as pool:
        replies = pool.map(requests, timeout=BUILD_TIMEOUT)
        for (problem, candidate), reply in zip(wanted, replies, strict=True):
            if not reply.ok:
                failed.setdefault(problem.key, []).append((str(candidate), reply.message.partition("\n")[0][:120]))
            elif (reply.value["resources"] or {}).get("spill_instructions"):
                failed.setdefault(problem.key, []).append((str(candidate), "spills registers"))
            else:
                peer = as_peer(candidate, reply.value["path"], reply.value["workspaces"])
                made.setdefault(problem.key, []).append(peer)
    return made, failed


def measure(
    problem: BsrMatmul, where: Machine, seed: int, others: Sequence[Peer], shown: dict[str, str]
) -> tuple[dict[str, float], list[list[Any]]]:
    """Microseconds by implementation (for a template its best point's), and the lines for the CSV."""
    try:
        result = compare(problem, where, seed=seed, peers=others, host=False)
    except Mismatch as error:
        sys.exit(f"{problem}: our own result is wrong: {error}")
    times: dict[str, float] = {}
    lines = []
    (m, k, n), block, sparsity = place(problem)
    for timing in result.timings:
        template = timing.name.partition("@")[0]
        name = template if template in TEMPLATES else shown.get(timing.name, timing.name)
        kernel = f"{result.kernel} ({result.how})" if timing is result.ours else ""
        kernel = timing.name if template in TEMPLATES else kernel
        correct = "" if timing.correct is None else timing.correct
        figure = f"{timing.median * 1e6:.3f}" if timing.median else ""
        lines.append([m, k, n, block, sparsity, name, figure, timing.how, correct, kernel, timing.note])
        if timing.median:
            times[name] = min(times.get(name, float("inf")), timing.median * 1e6)
    return times, lines


def show(title: str, problems: Sequence[BsrMatmul], results: dict[Any, dict[str, float]], names: Sequence[str]) -> None:
    """Print a table for each shape, with the columns that have a figure."""
    names = [name for name in names if any(name in figures for figures in results.values())]
    heads = [name.replace(" ", "\n").replace("_", "_\n") for name in names]  # otherwise the figures would not fit
    for shape in dict.fromkeys(place(problem)[0] for problem in problems):
        made = table(
            "block", "sparsity", *heads, title=f"{title}, (m, k, n) = {shape}", right=("block", "sparsity", *heads)
        )
        for key, figures in results.items():
            if key[0] == shape:
                cells = (us(figures[name] / 1e6 if name in figures else None) for name in names)
                made.add_row(str(key[1]), f"{key[2]:g}", *cells)
        console().print(made)


def mean_ratio(results: dict[Any, dict[str, float]], name: str, over: str) -> str:
    ratios = [figures[name] / figures[over] for figures in results.values() if name in figures and over in figures]
    return f"{statistics.geometric_mean(ratios):.2f} ({len(ratios)} cases)" if ratios else "-"


def main(
    m: Annotated[list[int] | None, typer.Option(help="Only these m.")] = None,
    block: Annotated[list[int] | None, typer.Option(help="Only these block sizes.")] = None,
    count: Annotated[int, typer.Option("--points", help="Points of a template that the logs do not know.")] = 3,
    builders: Annotated[int, typer.Option(help="Processes that compile.")] = 16,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
) -> None:
    """Measure Tables 1 and 2 and print them beside the paper's."""
    with errors():
        where = machine_here("cuda", "comparing")
        problems, halves = (cases(m or [], block or [], dtype) for dtype in ("float32", "float16"))
        facts = provenance(where)
        for name, value in facts.items():
            typer.echo(f"{name}: {value}")
        known = known_points(where)
        wanted = [(p, candidate) for p in problems for candidate in contenders(p, where, known, count)]
        results: dict[Any, dict[str, float]] = {}
        lines: list[list[Any]] = []
        say = functools.partial(typer.echo, err=True)
        called = [(problem, (), ()) for problem in (*problems, *halves)]
        with built(called, where), tempfile.TemporaryDirectory(prefix="tvm_sparse-") as folder:
            say(f"compiling {len(wanted)} points of templates")
            made, failed = built_peers(wanted, where, Path(folder), builders)
            for number, (problem, half) in enumerate(zip(problems, halves, strict=True), start=1):
                say(f"[{number}/{len(problems)}] {problem}")
                times, rows = measure(problem, where, seed, (*FLOAT, *made.get(problem.key, ())), SHOWN)
                half_times, half_rows = measure(half, where, seed, HALF, SHOWN_HALF)
                results[place(problem)] = {**times, **half_times, **printed(problem)}
                lines += [*rows, *half_rows]
                (rows_m, k, n), size, sparsity = place(problem)
                for text, reason in failed.get(problem.key, ()):
                    name = text.partition("@")[0]
                    lines.append([rows_m, k, n, size, sparsity, name, "", "", "", text, reason])

        others = [SHOWN.get(peer.name, peer.name) for peer in FLOAT]
        halved = [SHOWN_HALF.get(peer.name, peer.name) for peer in HALF]
        show("Table 1: schedules, microseconds a call", problems, results, (*TEMPLATES, OURS, *PAPER_1))
        show(
            "Table 2: what a call runs, and others, microseconds a call",
            problems,
            results,
            (OURS, *others, OURS_HALF, *halved, *PAPER_2),
        )
        for name in (*TEMPLATES, *others, *halved):
            typer.echo(f"{name} over {OURS}, geometric mean: {mean_ratio(results, name, OURS)}")
        typer.echo(
            f"cuBLAS float16 over {OURS_HALF}, geometric mean: {mean_ratio(results, 'cuBLAS float16', OURS_HALF)}"
        )

        path = result_path("gu-tables", where)
        write_csv(path.with_suffix(".csv"), facts, COLUMNS, lines)
        typer.echo(f"written: {path.with_suffix('.csv')}")
        size = 16 if not block or 16 in block else block[0]
        if has_plot():
            names = (OURS, *others, "per_element", "cross_thread", OURS_HALF, *halved, *PAPER_2)
            at = {place(p): p.m * p.nnzb * p.block_shape[0] * p.block_shape[1] for p in problems}
            drawn = {
                name: sorted(
                    (at[key], figures[name]) for key, figures in results.items() if key[1] == size and name in figures
                )
                for name in names
            }
            title = f"Gu 2020, Tables 1 and 2: blocks of {size} x {size}"
            write_plot(path.with_suffix(".png"), facts, drawn, title=title, x="products of stored elements",
                       printed=PAPER_2)  # fmt: skip
            typer.echo(f"written: {path.with_suffix('.png')}")
        else:
            typer.echo('no plot, matplotlib is absent: pip install "tvm_sparse[plot]"')


if __name__ == "__main__":
    typer.run(main)
