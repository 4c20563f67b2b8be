"""The layers of Tables 2 and 3 of Zhu, Pool et al. 2018 on this machine: LSTMs of translation, Deep Speech 2.

    python scripts/zhu_pool_tables23.py                       # the GPU if there is one, else the CPU
    python scripts/zhu_pool_tables23.py --table 3 --shrink 16

Weights are random, with the paper's densities, so that only times are reproduced, not BLEU or error rates. The paper
does not give the batch and the number of steps of Table 2; here they are 4 and 256. Table 3 has batch 1 and 256 steps,
and the batch of 8 of figure 7. "GEMM" is the dense step loop for dense layers and the sparse one for sparse layers, as
in the paper's column; its dense persistent layers are replaced by torch's module (cuDNN on a GPU) with its input
product.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from heads import Report, over, show
from recurrent import COLUMNS, DENSE, MODULE, OURS, PRODUCT, ROUNDS, SPARSE, Case, measured, shrunk
from reproduction import provenance, result_path

from tvm_sparse.cli.common import Target, errors, machine_here

# By layer size and density: the paper's milliseconds on a V100 by GEMM and persistent; None if it has none.
TABLE_2 = {
    (256, 1.0): (1.74, 1.11), (362, 1.0): (2.05, 1.14), (512, 1.0): (3.00, 1.12), (768, 1.0): (3.55, 1.26),
    (1024, 1.0): (4.34, 3.65), (1448, 1.0): (7.21, None), (256, 0.125): (2.44, 0.33), (512, 0.0625): (2.21, 0.37),
    (768, 0.0417): (2.19, 0.48), (1024, 0.047): (1.87, 0.55), (1024, 0.125): (3.19, 0.63),
    (1448, 0.047): (3.39, 0.78),
}  # fmt: skip
TABLE_3 = {
    (704, 1.0): (3.02, 0.74), (1760, 1.0): (10.80, 1.11), (2560, 1.0): (14.30, None), (1760, 0.12): (3.95, 0.72),
    (2560, 0.12): (4.70, 0.89), (3072, 0.12): (6.09, 0.94),
}  # fmt: skip
BATCHES = {"2": (4,), "3": (1, 8)}
CELLS = {"2": "lstm", "3": "relu"}
PAPER = {"2": TABLE_2, "3": TABLE_3}


def main(
    target: Target = "auto",
    table: Annotated[list[str] | None, typer.Option(help="2, 3 or both.")] = None,
    shrink: Annotated[int, typer.Option(min=1, help="Divide units and steps, to see whether it runs.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Of timing on a GPU.")] = ROUNDS,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write; default: in scripts/results/.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, patterns and inputs.")] = 0,
) -> None:
    """Measure the layers."""
    with errors():
        where = machine_here(target, "comparing")
        if set(table or ()) - set(PAPER):
            raise typer.BadParameter(f"expected 2 or 3, got {', '.join(table or ())}", param_hint="--table")
        path = csv_path or result_path("zhu-pool-tables23", where).with_suffix(".csv")
        report = Report(path, provenance(where), ("table", *COLUMNS))
        cases = {
            (name, batch): [
                shrunk(Case(hidden, batch, density=density, cell=CELLS[name]), shrink)
                for hidden, density in PAPER[name]
            ]
            for name in table or PAPER
            for batch in BATCHES[name]
        }
        labels = {case: {"table": name} for (name, _), some in cases.items() for case in some}
        results = measured(labels, where, report, rounds=rounds, seed=seed)
        for (name, batch), some in cases.items():
            rows = []
            for case, theirs in zip(some, PAPER[name].values(), strict=True):
                found = results[case]
                gemm = found[DENSE if case.density == 1 else SPARSE, "float32"]
                columns = [gemm, *(found[which, kind] for which in (MODULE, OURS, PRODUCT) for kind in
                                   ("float32", "float16"))]  # fmt: skip
                shown = "-" if theirs[1] is None or batch != BATCHES[name][0] else f"{theirs[0] / theirs[1]:.2f}"
                gain = over(found[MODULE, "float16"], found[PRODUCT, "float16"])
                rows.append([f"{case.hidden}, {case.density:.2%}", *columns, gain, over(gemm, found[OURS,
                             "float32"]), shown])  # fmt: skip
            heads = ("size, density", "GEMM float32", "module float32", "float16", "ours float32", "float16",
                     "+ product float32", "float16", "module / ours, float16", "GEMM / ours",
                     "paper's GEMM / persistent")  # fmt: skip
            show(f"Table {name}, {CELLS[name]}, batch {batch}: microseconds", heads, rows)
        report.close()


if __name__ == "__main__":
    typer.run(main)
