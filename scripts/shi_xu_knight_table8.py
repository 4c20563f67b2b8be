"""Table 8 of Shi, Xu & Knight 2018 on this machine: the LSH head's speed-up at beams of 12 to 48.

    python scripts/shi_xu_knight_table8.py                    # under a minute on a GPU
    python scripts/shi_xu_knight_table8.py --beam 12 --beam 96 --vocab 66000

One head, built for about 6,000 candidates at the first beam; rows of a beam share their candidates, so that lists grow
with it. Speed-ups are over torch's product, softmax and topk, over our product + softmax_topk, and over the exact head.
The paper's are for whole decoding over its full softmax; quality needs real data (`lsh_recall.py`,
`examples/lsh_decoding.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from heads import (
    CHAIN,
    EXACT,
    LSH,
    TORCH,
    Report,
    candidates_of,
    changed,
    draw,
    lsh_head,
    micro,
    over,
    problems_of,
    ready,
    show,
    step_contenders,
    timed,
)
from reproduction import provenance, result_path

from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core.registry import make

BEAMS = (12, 24, 36, 48)
PAPER = {12: 2.06, 24: 2.22, 36: 2.23, 48: 2.21}
COLUMNS = ("beam", "vocab", "hidden", "dtype", "k", "units", "bands", "threshold", "frequent", "candidates", "capacity",
           "implementation", "microseconds", "lsh_speedup", "timed", "note")  # fmt: skip


def main(
    target: Target = "auto",
    beam: Annotated[list[int] | None, typer.Option(help="Only these beams, in rising order.")] = None,
    vocab: Annotated[int, typer.Option(min=1, help="Words.")] = 40000,
    hidden: Annotated[int, typer.Option(min=1, help="Columns.")] = 1000,
    candidates: Annotated[int, typer.Option(min=1, help="About so many at the first beam.")] = 6000,
    n: Annotated[int, typer.Option(min=1, help="Best words of a row.")] = 12,
    k: Annotated[int, typer.Option(min=2)] = 16,
    units: Annotated[int, typer.Option(min=1)] = 3,
    bands: Annotated[int, typer.Option(min=1)] = 500,
    dtype: Annotated[str, typer.Option(help="Of states and embeddings.")] = "float16",
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write; default: in scripts/results/.")] = None,
    seed: Annotated[int, typer.Option(help="Of states and embeddings.")] = 0,
) -> None:
    """Time the LSH head by beam."""
    with errors():
        where = machine_here(target, "comparing")
        path = csv_path or result_path("shi-xu-knight-table8", where).with_suffix(".csv")
        report = Report(path, provenance(where), COLUMNS)
        beams = sorted(beam or BEAMS)
        embedding, states = draw(vocab, hidden, beams[-1], dtype, where.device, seed)
        first = lsh_head(embedding, states[: beams[0]], candidates, k=k, units=units, bands=bands)
        own = first.settings
        # For each beam its words, and a head with room for an eighth more of them.
        words = {rows: torch.from_numpy(candidates_of(first, states[:rows])).to(where.device) for rows in beams}
        heads = {
            rows: changed(first, capacity=min(vocab, -(-len(words[rows]) * 9 // 8 // 256) * 256)) for rows in beams
        }
        problems = [problem for rows, head in heads.items() for problem in problems_of(head, rows, n)]
        problems += [make("softmax_topk", {"batch": rows, "vocab": vocab, "k": n, "dtype": dtype}) for rows in beams]
        lines, kept = [], None
        with ready(problems, where):
            for rows, head in heads.items():
                some = states[:rows].contiguous()
                found = timed(*step_contenders(head, some, n, words[rows]), where.device)
                for name, result in found.items():
                    report.add(
                        beam=rows, vocab=vocab, hidden=hidden, dtype=dtype, k=k, units=units, bands=bands,
                        threshold=own.threshold, frequent=own.frequent, candidates=len(words[rows]),
                        capacity=head.settings.capacity, implementation=name, microseconds=micro(result),
                        lsh_speedup=over(result, found[LSH]), timed=result.how, note=result.note,
                    )  # fmt: skip
                gains = [over(found[name], found[LSH]) for name in (TORCH, CHAIN, EXACT)]
                kept = kept or gains[0]
                part = f"{float(gains[0]) / float(kept):.0%}" if gains[0] and kept else "-"
                paper = f"{PAPER[rows]:.2f}" if rows in PAPER else "-"
                lines.append([rows, len(words[rows]), *found.values(), *gains, part, paper])
        names = ("beam", "candidates", LSH, EXACT, "+ softmax_topk", "torch", "gathered", "torch / LSH",
                 "+ softmax_topk / LSH", "exact / LSH", "of the first", "paper's")  # fmt: skip
        show(f"microseconds a step, {vocab} words of {hidden}, {dtype}, and the LSH head's speed-ups", names, lines)
        report.close()


if __name__ == "__main__":
    typer.run(main)
