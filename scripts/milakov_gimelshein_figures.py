"""Figures 1 to 4 and section 5.2 of Milakov & Gimelshein 2018 on this machine: softmax, and softmax with top-k.

    python scripts/milakov_gimelshein_figures.py                    # the GPU if there is one, else the CPU
    python scripts/milakov_gimelshein_figures.py --figure 3 --figure 5.2 --quick
    python scripts/milakov_gimelshein_figures.py --target cpu       # which section 7 leaves as future work

Softmax at batches of 4000 and 10 by the three algorithms, all with the same template at its default point, so that only
their passes differ; top-k with k = 5 as safe softmax and then top-k, as both in one kernel, and by the online algorithm
with the paper's insertion; and the sweep over k. They are compared with the public function ("tvm_sparse", tuned where
there is a record) and the other libraries. The paper plots its figures without tables, so its values are those given in
the text. Prints a table for each figure, and writes a CSV and plots into scripts/results/.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from contenders import Named, Shape, built, measured, medians, others, print_origins, say_written
from reproduction import has_plot, provenance, result_path, write_plot

from tvm_sparse.bench.compare import NAME, Comparison
from tvm_sparse.cli.common import Target, console, errors, machine_here, table, us
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.core.registry import make

NAIVE, SAFE, ONLINE = "naive", "safe", "online"
UNFUSED, FUSED, ONLINE_FUSED = "safe, then top-k", "safe, fused", "online, fused"


@dataclass(frozen=True)
class Figure:
    """One of the paper's measurements: a row of shapes along one axis."""

    name: str
    title: str
    operator: str
    axis: str  # "vocab" or "k"
    fixed: dict[str, int]
    values: tuple[int, ...]
    quick: tuple[int, ...]
    ratios: tuple[tuple[str, str], ...]  # (slower, faster), whose ratio is the speed-up
    paper: str
    printed: tuple[tuple[int, float], ...] = ()  # the paper's values of the last ratio
    compiled: tuple[int, ...] = ()  # values for which torch.compile takes part


SOFTMAX_RATIOS = ((SAFE, NAIVE), (SAFE, ONLINE), (SAFE, NAME))
TOPK_RATIOS = ((UNFUSED, NAME), (FUSED, ONLINE_FUSED), (UNFUSED, FUSED), (UNFUSED, ONLINE_FUSED))

GPU = (
    Figure(
        "1", "Softmax, batch 4000", "softmax", "vocab", {"batch": 4000},
        (63, 250, 1000, 4000, 10000, 32000), (1000, 4000), SOFTMAX_RATIOS,
        "on a V100, alike up to V = 1000; online 1.3x as fast as safe from V = 4000 on", compiled=(1000, 10000),
    ),
    Figure(
        "2", "Softmax, batch 10", "softmax", "vocab", {"batch": 10},
        (63, 250, 1000, 4000, 10000, 32000, 100000, 400000), (1000, 100000), SOFTMAX_RATIOS,
        "on a V100, alike up to V = 1000; then online 1.15x as fast as safe", compiled=(10000, 100000),
    ),
    Figure(
        "3", "Softmax and top-5, batch 4000", "softmax_topk", "vocab", {"batch": 4000, "k": 5},
        (63, 250, 1000, 4000, 10000, 25000), (1000, 4000), TOPK_RATIOS,
        "on a V100, online fused 1.5x as fast as safe unfused, rising to 5x at V = 25000: fusion 2.5x, online 2x",
        compiled=(1000, 25000),
    ),
    Figure(
        "4", "Softmax and top-5, batch 10", "softmax_topk", "vocab", {"batch": 10, "k": 5},
        (63, 250, 1000, 4000, 10000, 25000, 100000), (1000, 100000), TOPK_RATIOS,
        "on a V100, online fused 1.5x to 2.5x as fast as safe unfused", compiled=(25000,),
    ),
    Figure(
        "5.2", "Softmax and top-k, batch 4000, V = 25000", "softmax_topk", "k", {"batch": 4000, "vocab": 25000},
        (5, 10, 15, 30, 50, 100, 400), (5, 30), TOPK_RATIOS,
        "on a V100, 5x at k = 5 (figure 3), 3.5x at 10, 2x at 15, 1.4x at 30, less beyond",
        printed=((5, 5.0), (10, 3.5), (15, 2.0), (30, 1.4)),
    ),
)  # fmt: skip
# Without other libraries: their results are new arrays in every call, see `contenders.call_of`.
CPU_RATIOS = ((SAFE, NAIVE), (SAFE, ONLINE))
CPU = (
    Figure(
        "1", "Softmax, batch 1000", "softmax", "vocab", {"batch": 1000}, (1000, 10000), (1000,), CPU_RATIOS,
        "not measured; section 7 expects speed-ups like a GPU's if the online sum stays in vectors",
    ),
    Figure(
        "2", "Softmax, batch 10", "softmax", "vocab", {"batch": 10}, (1000, 10000, 100000, 1000000), (1000,),
        CPU_RATIOS, "not measured",
    ),
    Figure(
        "4", "Softmax and top-5, batch 10", "softmax_topk", "vocab", {"batch": 10, "k": 5},
        (1000, 25000, 100000), (1000,), (), "not measured",
    ),
)  # fmt: skip
CONTENDERS = {
    ("softmax", "cuda"): tuple(
        Named(how, "softmax_streamed", axes={"algorithm": how}) for how in (NAIVE, SAFE, ONLINE)
    ),
    ("softmax", "llvm"): tuple(Named(how, "softmax_rows", axes={"algorithm": how}) for how in (NAIVE, SAFE, ONLINE)),
    ("softmax_topk", "cuda"): (
        Named(UNFUSED, "safe_then_topk"),
        Named(FUSED, "safe_fused"),
        Named(ONLINE_FUSED, "online_insertion"),
    ),
    ("softmax_topk", "llvm"): (),
}


def shapes_of(figure: Figure, where: Machine, quick: bool, compiled: bool) -> dict[int, Shape]:
    """By the value on the figure's axis."""
    contenders = CONTENDERS[figure.operator, where.kind]
    return {
        value: (
            make(figure.operator, {**figure.fixed, figure.axis: value}),
            contenders,
            others(figure.operator, compiled=compiled and value in figure.compiled),
        )
        for value in (figure.quick if quick else figure.values)
    }


def show(figure: Figure, results: dict[int, Comparison]) -> dict[str, dict[int, float]]:
    """Print a figure's table; returns microseconds by contender and value."""
    series, notes = medians(results, figure.axis)
    heads = [f"{value:,}" for value in results]
    made = table(f"microseconds a call, by {figure.axis}", *heads, right=heads)
    for name, figures in series.items():
        made.add_row(name, *(us(figures[v] / 1e6 if v in figures else None) for v in results))
    made.add_section()
    for slower, faster in figure.ratios:
        cells = [
            f"{series[slower][v] / series[faster][v]:.2f}x"
            if v in series.get(slower, {}) and v in series.get(faster, {})
            else "-"
            for v in results
        ]
        made.add_row(f"{faster}: as fast as {slower}", *cells)
    if figure.printed:
        printed = dict(figure.printed)
        made.add_row("  the same, paper's, V100", *(f"{printed[v]:.1f}x" if v in printed else "-" for v in results))
    typer.echo(f"\nFigure {figure.name}: {figure.title}")
    console().print(made)
    typer.echo(f"paper: {figure.paper}")
    print_origins(results, notes, figure.axis)
    return series


def chosen_figures(where: Machine, names: Sequence[str] | None) -> list[Figure]:
    figures = GPU if where.kind == "cuda" else CPU
    known = [figure.name for figure in figures]
    for name in names or ():
        if name not in known:
            raise ProblemError(f"figure: got {name!r}; on {where.arch} expected one of {', '.join(known)}")
    return [figure for figure in figures if not names or figure.name in names]


def main(
    target: Target = "auto",
    figure: Annotated[list[str] | None, typer.Option(help="Only these: 1, 2, 3, 4, 5.2.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Two sizes a figure, without torch.compile.")] = False,
    compiled: Annotated[bool, typer.Option(help="torch.compile at some sizes; it takes seconds each.")] = True,
    seed: Annotated[int, typer.Option(help="Of the inputs.")] = 0,
) -> None:
    """Measure the figures and print them beside the paper's values."""
    with errors():
        where = machine_here(target, "comparing")
        wanted = chosen_figures(where, figure)
        facts = provenance(where)
        for name, fact in facts.items():
            typer.echo(f"{name}: {fact}")
        plans = {one.name: shapes_of(one, where, quick, compiled and not quick) for one in wanted}
        path = result_path("milakov-gimelshein" + ("-quick" if quick else ""), where)
        lines: list[list[Any]] = []
        with built([shape for shapes in plans.values() for shape in shapes.values()], where) as libraries:
            for one in wanted:
                results = measured(plans[one.name], one.name, libraries, where, seed, path, facts, lines)
                if not results:
                    continue
                series = show(one, results)
                if has_plot() and len(results) > 1:
                    points = {name: sorted(figures.items()) for name, figures in series.items()}
                    plot = path.with_name(path.name.replace("gimelshein", f"gimelshein-figure{one.name}") + ".png")
                    axis = "vector size V" if one.axis == "vocab" else "k"
                    write_plot(plot, facts, points, title=one.title, x=axis)
                    typer.echo(f"written: {plot}")
        say_written(path, lines)


if __name__ == "__main__":
    typer.run(main)
