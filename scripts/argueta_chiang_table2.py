"""Table 2 of Argueta & Chiang 2019 on this machine: fused softmax and top-N of batches of 1, 512 and 1024 rows.

    python scripts/argueta_chiang_table2.py
    python scripts/argueta_chiang_table2.py --batch 512 --n 10 --n 400

Rows of 10,240 logits, N from 10 to 400. The paper's own method is `packed_insertion` at its own point (and once with
`skip`, which it does not have), Milakov & Gimelshein's is `online_insertion`, as far as its registers go; beside them
the public function ("tvm_sparse"), PyTorch, and FlashInfer if it is there. Prints a table a batch beside the paper's
figures, and writes a CSV and plots into scripts/results/.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from contenders import Named, Shape, built, measured, medians, others, print_origins, say_written
from reproduction import has_plot, provenance, result_path, write_plot

from tvm_sparse.bench.compare import Comparison
from tvm_sparse.bench.contenders import Call, Peer
from tvm_sparse.cli.common import Target, console, errors, machine_here, table, us
from tvm_sparse.core.machine import UnknownArch
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import make

VOCAB = 10240
BATCHES = (1, 512, 1024)
WANTED = (10, 50, 100, 200, 400)
# Table 2 (a), Tesla V100, milliseconds, for these N.
OURS, THEIRS = "paper's, V100", "Milakov et al. in the paper, V100"
PAPER = {
    1: {OURS: (0.07, 0.21, 0.57, 1.54, 4.49), THEIRS: (3.56, 3.44, 3.44, 3.44, 3.44)},
    512: {OURS: (0.14, 0.49, 1.15, 3.03, 9.05), THEIRS: (7.99, 8.01, 8.01, 8.01, 8.02)},
    1024: {OURS: (0.25, 0.93, 2.37, 6.57, 19.65), THEIRS: (12.54, 13.02, 12.59, 12.59, 12.58)},
}
CONTENDERS = (
    Named("packed insertion", "packed_insertion"),
    Named("packed insertion, skip", "packed_insertion", {"skip": 1}),
    Named("online insertion", "online_insertion"),
)
# torch.compile takes seconds for each shape.
COMPILED = (10, 400)


def flashinfer_top_k(problem: Problem, inputs: Sequence[Any], device: str) -> Call:
    import flashinfer
    import torch

    x, k = torch.from_numpy(inputs[0]).to(device), problem.axes["k"]

    def call() -> Any:
        values, indices = flashinfer.top_k(x, k, sorted=True)
        return torch.exp(values - torch.logsumexp(x, -1, keepdim=True)), indices

    return call


FLASHINFER = Peer("FlashInfer top_k, logsumexp", "softmax_topk", "flashinfer", ("cuda",), flashinfer_top_k)


def shape(batch: int, n: int, compiled: bool) -> Shape:
    problem = make("softmax_topk", {"batch": batch, "vocab": VOCAB, "k": n})
    return problem, CONTENDERS, (*others("softmax_topk", compiled=compiled), FLASHINFER)


def show(batch: int, results: dict[int, Comparison]) -> dict[str, dict[int, float]]:
    """Print a batch's table; returns microseconds by contender, including the paper's, and N."""
    series, notes = medians(results, "N")
    for name, row in PAPER.get(batch, {}).items():
        series[name] = {n: ms * 1e3 for n, ms in zip(WANTED, row, strict=True) if n in results}
    heads = [str(n) for n in results]
    made = table("microseconds a call, by N", *heads, right=heads)
    for name, figures in series.items():
        made.add_row(name, *(us(figures[n] / 1e6 if n in figures else None) for n in results))
    ratios = {
        n: (r.best_peer.median or 0.0) / r.ours.median for n, r in results.items() if r.best_peer and r.ours.median
    }
    made.add_row("best other over ours", *(f"{ratios[n]:.2f}x" if n in ratios else "-" for n in results))
    typer.echo(f"\nL = {batch} rows of {VOCAB}")
    console().print(made)
    if ratios:
        mean = statistics.geometric_mean(ratios.values())
        typer.echo(f"the best other takes {mean:.2f} times as long in the geometric mean")
    print_origins(results, notes, "N")
    return series


def main(
    target: Target = "auto",
    batch: Annotated[list[int] | None, typer.Option(help="Only these L.")] = None,
    n: Annotated[list[int] | None, typer.Option(help="Only these N.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="L = 512, N = 10 and 100, without torch.compile.")] = False,
    compiled: Annotated[bool, typer.Option(help="torch.compile at some N; it takes seconds each.")] = True,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
) -> None:
    """Measure Table 2 and print it beside the paper's."""
    with errors():
        where = machine_here(target, "comparing")
        if where.kind != "cuda":
            raise UnknownArch("target: the paper's method is one for GPUs, and there is none here")
        facts = provenance(where)
        for name, value in facts.items():
            typer.echo(f"{name}: {value}")
        batches, wanted = batch or ((512,) if quick else BATCHES), n or ((10, 100) if quick else WANTED)
        plans = {
            rows: {count: shape(rows, count, compiled and not quick and count in COMPILED) for count in wanted}
            for rows in batches
        }
        path = result_path("argueta-chiang-table2" + ("-quick" if quick else ""), where)
        lines: list[list[Any]] = []
        with built([one for row in plans.values() for one in row.values()], where) as libraries:
            for rows, row in plans.items():
                results = measured(row, f"2, L = {rows}", libraries, where, seed, path, facts, lines)
                if not results:
                    continue
                series = show(rows, results)
                if has_plot() and len(results) > 1:
                    points = {name: sorted(figures.items()) for name, figures in series.items() if figures}
                    plot = path.with_name(path.name.replace("table2", f"table2-L{rows}") + ".png")
                    title = f"Fused softmax and top-N, {rows} rows of {VOCAB}"
                    write_plot(plot, facts, points, title=title, x="N", printed=(OURS, THEIRS))
                    typer.echo(f"written: {plot}")
        say_written(path, lines)


if __name__ == "__main__":
    typer.run(main)
