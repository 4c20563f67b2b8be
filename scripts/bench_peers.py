"""Our kernels beside other libraries over lists of shapes, on this machine: a table, and a CSV with its provenance.

    python scripts/bench_peers.py --csv peers.csv                     # the default shapes of every operator
    python scripts/bench_peers.py --operator softmax_topk --k 5 --k 50 --batch 512
    python scripts/bench_peers.py --operator bsr_matmul --block 16 --dtype float16
    python scripts/bench_peers.py --shapes shapes.toml --target cpu

The softmax shapes are the batches 10 and 4000 of Milakov & Gimelshein 2018, and those of decoders with up to 128256
entries; the block-sparse ones are those of Gu 2020 and a square layer; the lookups are Argueta & Chiang's of 2019.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from contenders import built
from reproduction import provenance, timing_rows, write_csv

from tvm_sparse.bench.compare import compare
from tvm_sparse.cli.bench import comparison_table, notes
from tvm_sparse.cli.common import Target, console, errors, machine_here
from tvm_sparse.core import shape_files
from tvm_sparse.core.problem import Mismatch, Problem
from tvm_sparse.core.registry import make

SOFTMAX = (
    (1, 10240), (10, 25000), (512, 10240), (1024, 10240), (4000, 1000), (4000, 25000), (12, 128256), (64, 128256),
)  # fmt: skip
TOP = (5, 50, 400)
SAMPLED = ((1, 128256), (64, 128256), (256, 128256), (512, 128256))
# What most requests to a server ask of a sampler without a top_k.
FILTERS = (
    {"temperature": 1.0, "top_p": 1.0},
    {"temperature": 1.0, "top_p": 1.0, "min_p": 0.05},
    {"temperature": 1.0, "top_p": 0.9},
)
PRODUCTS = ((1, 128, 768), (8, 128, 768), (1, 1024, 1024), (8, 1024, 1024))
BLOCKS = (8, 16, 32)
SPARSITIES = (0.8, 0.85, 0.95)
LOOKUP = {"rows": 100, "vocab": 10240, "width": 512}
NONZEROS = (1, 2, 5, 10, 50, 100)

COLUMNS = ("problem", "settings", "implementation", "microseconds", "peer_over_ours", "compulsory_GB_per_s",
           "share_of_limit", "timed", "correct", "host_microseconds", "kernel", "note")  # fmt: skip


def default_problems(dtype: str) -> list[Problem]:
    softmax = [make("softmax", {"batch": batch, "vocab": vocab, "dtype": dtype}) for batch, vocab in SOFTMAX]
    top = [
        make("softmax_topk", {"batch": batch, "vocab": vocab, "k": k, "dtype": dtype})
        for batch, vocab in SOFTMAX
        for k in TOP
    ]
    sampled = [
        make("softmax_sample", {"batch": batch, "vocab": vocab, "dtype": dtype, **drawn})
        for batch, vocab in SAMPLED
        for drawn in ({"k": 64}, {"k": 1, "whole": 1})
    ]
    products = [
        make("bsr_matmul", {"m": m, "k": k, "n": n, "block": block, "sparsity": sparsity, "dtype": dtype})
        for m, k, n in PRODUCTS
        for block in BLOCKS
        for sparsity in SPARSITIES
    ]
    lookups = [
        make("nhot_lookup", {**LOOKUP, "nonzeros": nonzeros, "dtype": dtype, "weighted": weighted})
        for nonzeros in NONZEROS
        for weighted in (0, 1)
    ]
    return [*softmax, *top, *sampled, *products, *lookups]


def chosen(problem: Problem, wanted: dict[str, list[Any]]) -> bool:
    """Whether a problem has one of the wanted values on every restricted axis that it has."""
    axes = dict(problem.axes)
    if problem.operator == "bsr_matmul":
        axes["block"] = axes["block"].partition("x")[0]
        axes.pop("k")  # a different axis there
    return all(not values or name not in axes or axes[name] in values for name, values in wanted.items())


def main(
    target: Target = "auto",
    operator: Annotated[list[str] | None, typer.Option(help="Only these operators.")] = None,
    shapes: Annotated[Path | None, typer.Option(metavar="FILE", help="Shapes in TOML, not the default ones.")] = None,
    k: Annotated[list[int] | None, typer.Option(help="Only these k of softmax_topk.")] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Only these batches of softmax_topk.")] = None,
    vocab: Annotated[list[int] | None, typer.Option(help="Only these vocabularies.")] = None,
    m: Annotated[list[int] | None, typer.Option(help="Only these m of bsr_matmul.")] = None,
    block: Annotated[list[int] | None, typer.Option(help="Only these block sizes.")] = None,
    sparsity: Annotated[list[float] | None, typer.Option(help="Only these sparsities.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the default shapes.")] = "float32",
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    rotated: Annotated[bool, typer.Option("--rotated", help="Every call reads its inputs from memory.")] = False,
    alone: Annotated[bool, typer.Option("--alone", help="Time no peers.")] = False,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
    structure: Annotated[str | None, typer.Option(help="How the data lie, in the place of what is tuned.")] = None,
) -> None:
    """Compare with PyTorch, NumPy and SciPy over many shapes."""
    with errors():
        where = machine_here(target, "comparing")
        if rotated and where.kind != "cuda":
            raise typer.BadParameter("expected a GPU: what a CPU caches is not known", param_hint="--rotated")
        problems = shape_files.read(shapes) if shapes else default_problems(dtype)
        wanted = {
            "batch": batch or [],
            "vocab": vocab or [],
            "m": m or [],
            "block": [str(size) for size in block or []],
            "sparsity": sparsity or [],
            "k": k or [],
        }
        problems = [p for p in problems if p.operator in (operator or [p.operator]) and chosen(p, wanted)]
        if not problems:
            raise typer.BadParameter("no shape of the list is left", param_hint="--operator and others")
        runs = [(p, filters) for p in problems for filters in (FILTERS if p.axes.get("whole") else (None,))]
        facts = provenance(where, rotated=rotated)
        for name, value in facts.items():
            typer.echo(f"{name}: {value}")
        lines: list[list[Any]] = []
        if csv_path:
            # A CSV that cannot be written fails before anything is measured.
            write_csv(csv_path, facts, COLUMNS, lines)
        wrong = 0
        last = None
        with built([(problem, (), ()) for problem in problems], where):
            for number, (problem, settings) in enumerate(runs, start=1):
                told = " ".join(f"{name}={value:g}" for name, value in (settings or {}).items())
                typer.echo(f"\n[{number}/{len(runs)}] {problem.typed} {told}".rstrip())
                try:
                    peers = () if alone else None
                    last = compare(
                        problem, where, seed=seed, structure=structure, settings=settings, peers=peers, rotated=rotated
                    )
                except Mismatch as error:
                    wrong += 1
                    typer.echo(f"error: our own result is wrong: {error}", err=True)
                    continue
                typer.echo(f"kernel: {last.kernel} ({last.how})")
                console().print(comparison_table(last))
                if csv_path:
                    lines += timing_rows(COLUMNS, last, settings=told)
                    write_csv(csv_path, facts, COLUMNS, lines)  # results so far are kept if a later one fails
        if last:
            typer.echo("\n".join(notes(last)[1:]))
        if wrong:
            sys.exit(f"{wrong} of {len(runs)} results were wrong")


if __name__ == "__main__":
    typer.run(main)
