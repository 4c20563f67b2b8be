"""Sparse recurrent layers compared with cuDNN and loops over steps: the cases of a table of peers, and larger ones.

    python scripts/rnn_bench.py --csv scripts/results/rnn-h200.csv      # some minutes
    python scripts/rnn_bench.py --case 1792,4,256,0.1 --case 1024,4,256,0.125,lstm --dtype float16
    python scripts/rnn_bench.py --no-loops --spread 0.4 --case 1024,1,32,0.1,lstm    # rows of unequal length

A case is hidden units, batch, steps, density and cell ("tanh" if none is named). Patterns are random; with `--spread`
they are those that magnitude pruning leaves if the logarithms of rows' scales have this standard deviation. "sparse
layer" is ours without the input product, "+ input product" with it, like "torch module", which is cuDNN on a GPU; in
float32 both use TF32 for it, as cuDNN does by default. "layer of blocks" is ours with the weight in tiles for tensor
cores, which for a random pattern is a dense persistent layer. "dense step loop" is a dense product and the cell a step,
cuBLAS on a GPU, and "sparse step loop" the same with a CSR tensor, cuSPARSE; both are given the input product.
FlashRNN takes part if it is installed. On a GPU, CUDA graphs are timed. `share_of_limit` compares with the time of
gathers from shared memory at the boost clock, or of reading all data once; steps that wait for a grid barrier cannot
approach it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from heads import Report, over, show
from recurrent import BLOCKS, COLUMNS, DENSE, DTYPES, MODULE, OURS, PRODUCT, ROUNDS, SPARSE, Case, measured
from reproduction import provenance

from tvm_sparse.cli.common import Target, errors, machine_here

CASES = (
    "1152,4,256,0.1", "1792,4,256,0.01", "1792,4,256,0.05", "1792,1,256,0.1", "1792,4,256,0.1", "1792,8,256,0.1",
    "1792,4,256,0.3", "2304,4,256,0.1", "2304,4,256,0.3", "5632,4,256,0.01", "11520,4,256,0.01",
    "1152,4,256,0.1,lstm", "1792,4,256,0.1,lstm", "1024,4,256,0.047,lstm", "1024,4,256,0.125,lstm",
    "1024,4,256,0.047,gru", "1024,4,256,0.125,gru",
)  # fmt: skip


def main(
    target: Target = "auto",
    case: Annotated[list[str] | None, typer.Option(help="Only these hidden,batch,steps,density[,cell].")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="Of weights and states; default: float32, float16.")] = None,
    peers: Annotated[bool, typer.Option(help="Time others beside ours.")] = True,
    loops: Annotated[bool, typer.Option(help="Time loops over steps among them.")] = True,
    rounds: Annotated[int, typer.Option(min=1, help="Of timing on a GPU.")] = ROUNDS,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, patterns and inputs.")] = 0,
    spread: Annotated[float, typer.Option(help="Of rows' scales, by which magnitudes are kept; 0: at random.")] = 0,
) -> None:
    """Time sparse recurrent layers and their peers."""
    with errors():
        where = machine_here(target, "comparing")
        cases = {Case.parsed(text): {} for text in case or CASES}
        report = Report(csv_path, provenance(where) | ({"spread": f"{spread:g}"} if spread else {}), COLUMNS)
        dtypes = tuple(dtype or DTYPES)
        results = measured(
            cases, where, report, dtypes=dtypes, peers=peers, loops=loops, rounds=rounds, seed=seed, spread=spread
        )
        for kind in dtypes:
            names = [OURS, PRODUCT] + ([BLOCKS] if kind != "float32" else [])
            others = ([MODULE] if peers else []) + ([DENSE, SPARSE] if peers and loops else [])
            ratios = [(name, PRODUCT if name == MODULE else OURS) for name in others]
            names += others
            rows = []
            for one, found in results.items():
                # The sparse loop exists in float32 only.
                cells = [found.get((name, kind)) or found.get((name, "float32")) for name in names]
                by_name = dict(zip(names, cells, strict=True))
                gains = [over(by_name[name], by_name[base]) for name, base in ratios]
                ours = by_name[OURS]
                step = f"{ours.seconds * 1e6 / one.steps:.2f}" if ours and ours.seconds else "-"
                rows.append([str(one), *cells, step, *gains])
            heads = ("cell, hidden x batch x steps x density", *names, "ours a step",
                     *(f"{name} / ours" for name, _ in ratios))  # fmt: skip
            show(f"microseconds a call, {kind}", heads, rows)
        report.close()


if __name__ == "__main__":
    typer.run(main)
