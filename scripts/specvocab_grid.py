"""SpecVocab's grid: the best words of a separate list for each row, at a draft model's output layer.

    python scripts/specvocab_grid.py --csv scripts/results/specvocab-h200.csv       # about a minute
    python scripts/specvocab_grid.py --m 2048

Batch 10 in bfloat16, with 128 to 8,192 distinct random candidates per row; k = 20. `candidate_topk` and
`candidate_logits` (the gathered product alone) are compared with torch's gather, bmm, softmax and topk, with
`head_topk`, which reads the whole vocabulary, and with a kernel that only reads the rows in the lists (`floors`).
`share_of_limit` compares with the time of reading these rows once at the measured memory bandwidth.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from floors import fastest
from heads import OURS, ROUNDED, Call, Check, Report, draw, micro, over, ready, show, timed, top_check, torch_gathered
from reproduction import provenance

import tvm_sparse
from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core.registry import make

SIZES = ("1024,100352", "4096,100352", "2560,151936", "4096,151936")
LENGTHS = (128, 512, 2048, 8192)
K = 20
OURS_TOP, OURS_LOGITS, TORCH, TORCH_LOGITS, EXACT, READ = (
    "candidate_topk", "candidate_logits", "torch gather + bmm + softmax + topk", "torch gather + bmm", "head_topk",
    "read of the rows",
)  # fmt: skip
SHOWN = (OURS_TOP, TORCH, OURS_LOGITS, TORCH_LOGITS, EXACT, READ)
COLUMNS = ("hidden", "vocab", "batch", "m", "k", "dtype", "implementation", "microseconds", "over_ours",
           "share_of_limit", "timed", "kernel", "note")  # fmt: skip


def lists(vocab: int, rows: int, m: int, device: str, seed: int) -> torch.Tensor:
    """Distinct words in ascending order, one list per row: `(rows, m)` int32."""
    generator = torch.Generator(device).manual_seed(seed)
    drawn = torch.rand((rows, vocab), generator=generator, device=device).topk(m).indices
    return drawn.sort().values.int()


def contenders(
    states: torch.Tensor, embedding: torch.Tensor, candidates: torch.Tensor
) -> tuple[dict[str, Call], dict[str, Check]]:
    """Calls by name, and checks of their results."""
    words = candidates.long()
    k, of_all = min(K, candidates.shape[1]), min(K, len(embedding))
    calls: dict[str, Call] = {
        OURS_TOP: lambda: tvm_sparse.candidate_topk(states, embedding, candidates, k),
        TORCH: torch_gathered(states, embedding, candidates, k),
        OURS_LOGITS: lambda: tvm_sparse.candidate_logits(states, embedding, candidates),
        TORCH_LOGITS: lambda: torch.bmm(embedding[words], states[:, :, None]),
        EXACT: lambda: tvm_sparse.head_topk(states, embedding, of_all, constant=True),
    }
    check = top_check(states, embedding, k, candidates)
    return calls, {OURS_TOP: check(OURS), TORCH: check(OURS if states.dtype == torch.float32 else ROUNDED)}


def main(
    target: Target = "auto",
    size: Annotated[list[str] | None, typer.Option(help="Only these hidden,vocab.")] = None,
    m: Annotated[list[int] | None, typer.Option(help="Only these candidates a row.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows.")] = 10,
    dtype: Annotated[str, typer.Option(help="Of states and embeddings.")] = "bfloat16",
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    seed: Annotated[int, typer.Option(help="Of states, embeddings and lists.")] = 0,
) -> None:
    """Time the product and search over lists of candidates."""
    with errors():
        where = machine_here(target, "comparing")
        sizes = []
        for text in size or SIZES:
            parts = text.split(",")
            if len(parts) != 2 or not all(part.isdecimal() for part in parts):
                raise typer.BadParameter(f"expected hidden,vocab, got {text}", param_hint="--size")
            sizes.append((int(parts[0]), int(parts[1])))
        problems = {}
        for hidden, vocab in sizes:
            axes = {"vocab": vocab, "hidden": hidden, "dtype": dtype}
            exact = make("head_topk", {"batch": batch, "k": min(K, vocab), **axes})
            for length in m or LENGTHS:
                if length > vocab:
                    raise typer.BadParameter(f"expected at most the vocab ({vocab}), got {length}", param_hint="--m")
                of_lists = {"lists": batch, "beam": 1, "m": length, **axes}
                top = make("candidate_topk", {**of_lists, "k": min(K, length)})
                problems[hidden, vocab, length] = (top, make("candidate_logits", of_lists), exact)
        report, rows = Report(csv_path, provenance(where), COLUMNS), []
        with ready([p for some in problems.values() for p in some], where), fastest(where) as reader_of:
            for hidden, vocab in sizes:
                embedding, states = draw(vocab, hidden, batch, dtype, where.device, seed)
                for length in m or LENGTHS:
                    candidates, k = lists(vocab, batch, length, where.device, seed), min(K, length)
                    calls, checks = contenders(states, embedding, candidates)
                    if reader := reader_of(embedding, candidates):
                        calls[READ] = reader
                    found = timed(calls, checks, where.device)
                    # The rows in the lists, each once.
                    size_read = int(candidates.unique().numel()) * hidden * embedding.element_size()
                    limit = size_read / where.bandwidth if where.bandwidth else None
                    chosen = tvm_sparse.explain(problems[hidden, vocab, length][0])
                    for name, result in found.items():
                        share = f"{limit / result.seconds:.3f}" if limit and result.seconds and name != EXACT else ""
                        report.add(
                            hidden=hidden, vocab=vocab, batch=batch, m=length, k=k, dtype=dtype, implementation=name,
                            microseconds=micro(result), over_ours=over(result, found[OURS_TOP]), share_of_limit=share,
                            timed=result.how, kernel=f"{chosen.candidate} ({chosen.how})" if name == OURS_TOP else "",
                            note=result.note,
                        )  # fmt: skip
                    ours = found[OURS_TOP].seconds
                    part = f"{limit / ours:.0%}" if limit and ours else "-"
                    gain = over(found[TORCH], found[OURS_TOP])
                    rows.append([f"{hidden}, {vocab}, {length}", *(found.get(name, "-") for name in SHOWN), part, gain])
                del embedding, states
        heads_of = ("hidden, vocab, m", OURS_TOP, "torch", OURS_LOGITS, "torch's", EXACT, READ, "of limit",
                    "torch / ours")  # fmt: skip
        show(f"microseconds a call, batch {batch}, {dtype}", heads_of, rows)
        report.close()


if __name__ == "__main__":
    typer.run(main)
