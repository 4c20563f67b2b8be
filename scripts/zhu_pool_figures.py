"""Figures 2 to 4 of Zhu, Pool et al. 2018 on this machine: density, layer size, batch, steps, constant nonzeros.

    python scripts/zhu_pool_figures.py                        # the GPU if there is one, else the CPU; long on a CPU
    python scripts/zhu_pool_figures.py --figure 2a --shrink 16

Elman layers with random patterns. The paper's dense GEMM is the dense step loop, its sparse GEMM the sparse step loop,
and its dense persistent layer is ours with the weight in tiles, since cuDNN has none at these sizes today; cuDNN takes
part as torch's module, with its input product. Speed-ups are over the dense step loop in float32, as in the paper.
Prints a table for each figure, and writes a CSV and plots into scripts/results/.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from contenders import say_written
from heads import Report, over, show
from recurrent import BLOCKS, COLUMNS, DENSE, MODULE, OURS, ROUNDS, SPARSE, Case, measured, shrunk
from reproduction import has_plot, provenance, result_path, write_plot

from tvm_sparse.bench.compare import NAME
from tvm_sparse.cli.common import Target, errors, machine_here

# In float32; as in the paper, 1.32 million nonzeros, from 25 % of 2304 to 1 % of 11520.
CONSTANT = 1_320_000
SIZES = (2304, 2816, 3584, 5120, 7168, 11520)


@dataclass(frozen=True)
class Figure:
    """One of the paper's sweeps: cases by the value on its axis, and the claims of its text."""

    title: str
    axis: str
    cases: tuple[Case, ...]
    paper: str

    def value(self, case: Case) -> float:
        return float(getattr(case, self.axis))


FIGURES = {
    "2a": Figure(
        "Density", "density", tuple(Case(1792, density=d) for d in (0.01, 0.05, 0.1, 0.2, 0.3)),
        "on a V100, over dense GEMM 15.0x at 1 % and 7.3x at 10 %, where the dense persistent layer has 4.1x",
    ),
    "2b": Figure(
        "Layer size", "hidden", tuple(Case(h) for h in (1152, 1792, 2304, 2816, 3584, 5632)),
        "on a V100, dense persistent layers end at 1792, sparse ones before 5632 at 10 %",
    ),
    "2c": Figure(
        "Batch", "batch", tuple(Case(1792, batch=b) for b in (1, 2, 4, 8, 16, 32)),
        "on a V100, scales with the batch, as dense persistent layers do not",
    ),
    "2d": Figure(
        "Steps", "steps", tuple(Case(1792, steps=s) for s in (16, 64, 128, 256, 512, 1024)),
        "on a V100, hardly changes what is faster",
    ),
    "3a": Figure(
        "A layer of 2304", "density", tuple(Case(2304, density=d) for d in (0.01, 0.05, 0.1, 0.2, 0.3)),
        "on a V100, 9.9x dense GEMM at 10 %; over 6x the next best at 30 %",
    ),
    "3b": Figure(
        "A layer of 5760", "density", tuple(Case(5760, density=d) for d in (0.01, 0.04, 0.05, 0.1)),
        "on a V100, 10.6x dense GEMM at 1 %; at 5 % sparse GEMM is faster",
    ),
    "4": Figure(
        "Constant nonzeros", "hidden", tuple(Case(h, density=round(CONSTANT / h**2, 4)) for h in SIZES),
        "on a V100, over the next best 1.9x at 7168 with 2.6 % and at 11520 with 1 %",
    ),
}  # fmt: skip
SERIES = (
    (DENSE, "float32"), (MODULE, "float32"), (MODULE, "float16"), (SPARSE, "float32"), (OURS, "float32"),
    (BLOCKS, "float16"), (OURS, "float16"),
)  # fmt: skip
# The pairs (slower, faster) whose ratio is a speed-up.
RATIOS = (
    ((DENSE, "float32"), (OURS, "float32")), ((SPARSE, "float32"), (OURS, "float32")),
    ((MODULE, "float16"), (OURS, "float16")), ((BLOCKS, "float16"), (OURS, "float16")),
)  # fmt: skip


def main(
    target: Target = "auto",
    figure: Annotated[list[str] | None, typer.Option(help=f"Only these of {', '.join(FIGURES)}.")] = None,
    shrink: Annotated[int, typer.Option(min=1, help="Divide units and steps, to see whether it runs.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of timing on a GPU.")] = ROUNDS,
    output: Annotated[Path | None, typer.Option(help="Path without suffix; default: in scripts/results/.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, patterns and inputs.")] = 0,
) -> None:
    """Measure the sweeps."""
    with errors():
        where = machine_here(target, "comparing")
        unknown = set(figure or ()) - set(FIGURES)
        if unknown:
            raise typer.BadParameter(f"expected {', '.join(FIGURES)}, got {unknown.pop()}", param_hint="--figure")
        path, facts = output or result_path("zhu-pool-figures", where), provenance(where)
        report = Report(path.with_suffix(".csv"), facts, ("figure", *COLUMNS))
        cases = {name: [shrunk(case, shrink) for case in FIGURES[name].cases] for name in figure or FIGURES}
        # A case that is in several sweeps is measured once.
        labels: dict[Case, dict[str, str]] = {}
        for name, some in cases.items():
            for case in some:
                labels.setdefault(case, {"figure": name})
        results = measured(labels, where, report, rounds=rounds, seed=seed)
        for name, some in cases.items():
            one = FIGURES[name]
            rows = []
            for case in some:
                found = results[case]
                gains = [over(found[slower], found[faster]) for slower, faster in RATIOS]
                rows.append([f"{one.value(case):g}", *(found[key] for key in SERIES), *gains])
            heads = (one.axis, *map(" ".join, SERIES), *(f"{slower[0]} / ours {own[1]}" for slower, own in RATIOS))
            show(f"Figure {name}. {one.title}: microseconds", heads, rows)
            typer.echo(f"the paper: {one.paper}")
            if has_plot():
                series = {
                    f"{NAME} {key[1]}" if key[0] == OURS else " ".join(key): [
                        (one.value(case), results[case][key].seconds * 1e6)
                        for case in some
                        if results[case][key].seconds
                    ]
                    for key in SERIES
                }
                title = f"Zhu, Pool et al. 2018, figure {name}: {one.title.lower()}"
                write_plot(path.with_name(f"{path.name}-{name}.png"), facts, series, title=title, x=one.axis)
        say_written(path, [report])


if __name__ == "__main__":
    typer.run(main)
