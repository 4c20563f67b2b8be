"""A step of the LSH head compared with the exact head, product + softmax_topk, and torch.

    python scripts/lsh_bench.py --csv scripts/results/lsh-h200.csv          # about a minute
    python scripts/lsh_bench.py --shape 12,40000,1000,6000,float16 --table direct --table cuckoo

Embeddings and states are random, and threshold and frequent words are set for about the given number of candidates: by
default the paper's vocabularies, its hash, and its 6,000 candidates. `LshHead, auto` is the default: LSH, or the exact
head if records say that it is faster. Torch's gather is given the candidates, without hashing and look-up.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from heads import (
    CHAIN,
    EXACT,
    LISTS,
    LSH,
    TORCH,
    TORCH_GATHERED,
    Call,
    Report,
    candidates_of,
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
from reproduction import provenance

from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core.registry import make

# beam, vocab, hidden, candidates, dtype: the target vocabularies of Shi, Xu & Knight 2018, table 6.
SHAPES = (
    "12,25000,1000,6000,float16", "12,40000,1000,6000,float16", "12,50000,1000,6000,float16",
    "12,66000,1000,6000,float16", "12,40000,1000,6000,float32", "12,40000,1000,6000,bfloat16",
)  # fmt: skip
AUTO = "LshHead, auto"
COLUMNS = ("beam", "vocab", "hidden", "dtype", "n", "k", "units", "bands", "table", "threshold", "frequent",
           "candidates", "implementation", "path", "microseconds", "over_lsh", "timed", "note")  # fmt: skip


def parsed(text: str) -> tuple[int, int, int, int, str]:
    parts = text.split(",")
    if len(parts) != 5 or not all(part.isdecimal() for part in parts[:4]):
        raise typer.BadParameter(f"expected beam,vocab,hidden,candidates,dtype, got {text}", param_hint="--shape")
    beam, vocab, hidden, candidates = map(int, parts[:4])
    return beam, vocab, hidden, candidates, parts[4]


def by_default(head: Any, states: torch.Tensor, n: int) -> Call:
    return lambda: head.topk(states, n, path="auto")


def main(
    target: Target = "auto",
    shape: Annotated[list[str] | None, typer.Option(help="Only these beam,vocab,hidden,candidates,dtype.")] = None,
    n: Annotated[int, typer.Option(min=1, help="Best words of a row.")] = 12,
    k: Annotated[int, typer.Option(min=2)] = 16,
    units: Annotated[int, typer.Option(min=1)] = 3,
    bands: Annotated[int, typer.Option(min=1)] = 500,
    tables: Annotated[
        list[str] | None, typer.Option("--table", help="direct, cuckoo; default: by the code's bits.")
    ] = None,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    seed: Annotated[int, typer.Option(help="Of states and embeddings.")] = 0,
) -> None:
    """Time a step of the LSH head and its peers."""
    with errors():
        where = machine_here(target, "comparing")
        report = Report(csv_path, provenance(where), COLUMNS)
        made, problems = [], []
        for beam, vocab, hidden, candidates, dtype in map(parsed, shape or SHAPES):
            embedding, states = draw(vocab, hidden, beam, dtype, where.device, seed)
            for table in tables or [None]:
                head = lsh_head(embedding, states, candidates, k=k, units=units, bands=bands, table=table)
                made.append((head, states))
                problems += problems_of(head, beam, n)
            problems.append(make("softmax_topk", {"batch": beam, "vocab": vocab, "k": n, "dtype": dtype}))
        rows = []
        with ready(problems, where):
            for head, states in made:
                words = torch.from_numpy(candidates_of(head, states)).to(where.device)
                calls, checks = step_contenders(head, states, n, words)
                path = head.explain(len(states), n, path="auto").path
                calls[AUTO] = by_default(head, states, n)
                checks[AUTO] = checks[LSH if path == "lsh" else EXACT]
                found = timed(calls, checks, where.device)
                own, dtype = head.settings, str(states.dtype).removeprefix("torch.")
                for name, result in found.items():
                    report.add(
                        beam=len(states), vocab=own.vocab, hidden=own.hidden, dtype=dtype, n=n, k=k, units=units,
                        bands=bands, table=own.table, threshold=own.threshold, frequent=own.frequent,
                        candidates=len(words), implementation=name, path=path if name == AUTO else "",
                        microseconds=micro(result), over_lsh=over(result, found[LSH]), timed=result.how,
                        note=result.note,
                    )  # fmt: skip
                gains = [over(found[name], found[LSH]) for name in (TORCH, CHAIN, EXACT, TORCH_GATHERED)]
                named = f"{len(states)}, {own.vocab}, {own.hidden}, {len(words)}, {dtype}, {own.table}"
                rows.append([named, *found.values(), path, *gains])
        names = ("beam, vocab, hidden, candidates, table", LSH, LISTS, EXACT, "+ softmax_topk", "torch", "gathered",
                 "auto", "path", "torch / LSH", "+ softmax_topk / LSH", "exact / LSH", "gathered / LSH")  # fmt: skip
        show("microseconds a step", names, rows)
        report.close()


if __name__ == "__main__":
    typer.run(main)
