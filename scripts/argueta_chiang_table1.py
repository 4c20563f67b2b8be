"""Table 1 of Argueta & Chiang 2019 on this machine: N-hot lookups with 1 to 100 nonzeros per row.

    python scripts/argueta_chiang_table1.py                    # the GPU if there is one, else the CPU
    python scripts/argueta_chiang_table1.py --nonzeros 1 --nonzeros 100 --dtype float16

100 rows, a table of 10,240 by 512, columns at random. The paper's rows have values; without them (all ones) the same
lookup is an embedding bag, and with one nonzero an embedding. Prints a table beside the paper's own figures, and writes
a CSV and a plot with GPU, versions and date into scripts/results/.
"""

from __future__ import annotations

import statistics
import sys
from typing import Annotated, Any

import typer
from reproduction import has_plot, provenance, result_path, timing_rows, write_csv, write_plot

from tvm_sparse.bench.compare import compare
from tvm_sparse.cli.common import Target, console, errors, machine_here, table, us
from tvm_sparse.core.problem import Mismatch
from tvm_sparse.core.registry import make
from tvm_sparse.operators.nhot_lookup.peers import PEERS

SHAPE = {"rows": 100, "vocab": 10240, "width": 512}
NONZEROS = (1, 2, 3, 4, 5, 10, 50, 100)
# Table 1 (a), Tesla V100, milliseconds, by nonzeros.
PAPER = {
    "paper's, V100": (0.02, 0.02, 0.02, 0.02, 0.02, 0.03, 0.06, 0.11),
    "paper's cuBLAS, V100": (0.16, 0.16, 0.16, 0.16, 0.16, 0.16, 0.15, 0.15),
    "paper's cuSPARSE, V100": (0.15, 0.16, 0.16, 0.16, 0.16, 0.17, 0.16, 0.19),
}
COLUMNS = ("nonzeros", "values", "implementation", "microseconds", "peer_over_ours", "timed", "correct", "kernel",
           "note")  # fmt: skip
# For lookups without values; other libraries multiply by 1 and compute the same.
FOR_ONES = tuple(peer for peer in PEERS if peer.name in ("torch embedding_bag", "torch embedding"))


def main(
    target: Target = "auto",
    nonzeros: Annotated[list[int] | None, typer.Option(help="Only these.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the table and the values.")] = "float32",
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
) -> None:
    """Measure Table 1 and print it beside the paper's."""
    with errors():
        where, counts = machine_here(target, "comparing"), nonzeros or list(NONZEROS)
        facts = provenance(where)
        for name, value in facts.items():
            typer.echo(f"{name}: {value}")
        series: dict[str, dict[int, float]] = {}  # microseconds by nonzeros
        best: dict[str, dict[int, float]] = {"stored": {}, "ones": {}}  # fastest peer over ours, by nonzeros
        lines: list[list[Any]] = []
        for values, contenders, suffix in (
            ("stored", PEERS, ""),
            ("ones", FOR_ONES, ", all ones"),
        ):
            for count in counts:
                axes = {**SHAPE, "nonzeros": count, "dtype": dtype, "weighted": int(values == "stored")}
                problem = make("nhot_lookup", axes)
                typer.echo(f"measuring {problem}", err=True)
                try:
                    result = compare(problem, where, seed=seed, peers=contenders, host=False)
                except Mismatch as error:
                    sys.exit(f"{problem}: our own result is wrong: {error}")
                lines += timing_rows(COLUMNS, result, nonzeros=count, values=values)
                for timing in result.timings:
                    if timing.median:
                        series.setdefault(timing.name + suffix, {})[count] = timing.median * 1e6
                if result.ours.median and result.best_peer:
                    best[values][count] = (result.best_peer.median or 0.0) / result.ours.median

        printed = {name: {n: ms * 1e3 for n, ms in zip(NONZEROS, row, strict=True)} for name, row in PAPER.items()}
        heads = [str(count) for count in counts]
        made = table("microseconds a call, by nonzeros a row", *heads, right=heads)
        for name, figures in {**series, **printed}.items():
            made.add_row(name, *(us(figures[n] / 1e6 if n in figures else None) for n in counts))
        for values, ratios in best.items():
            label = f"best other over ours, values {values}"
            made.add_row(label, *(f"{ratios[n]:.2f}x" if n in ratios else "-" for n in counts))
        console().print(made)
        for values, ratios in best.items():
            if ratios:
                mean = statistics.geometric_mean(ratios.values())
                typer.echo(f"values {values}: the best other takes {mean:.2f} times as long in the geometric mean")

        path = result_path("argueta-chiang-table1" + ("" if dtype == "float32" else f"-{dtype}"), where)
        write_csv(path.with_suffix(".csv"), facts, COLUMNS, lines)
        typer.echo(f"written: {path.with_suffix('.csv')}")
        if has_plot():
            points = {name: sorted(figures.items()) for name, figures in {**series, **printed}.items()}
            title = f"N-hot lookup of 100 rows in a table of 10240 x 512, {dtype}"
            write_plot(path.with_suffix(".png"), facts, points, title=title, x="nonzeros a row", printed=list(printed))
            typer.echo(f"written: {path.with_suffix('.png')}")
        else:
            typer.echo('no plot, matplotlib is absent: pip install "tvm_sparse[plot]"')


if __name__ == "__main__":
    typer.run(main)
