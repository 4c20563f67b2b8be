"""What `softmax_topk` adds to the product of a decoding step, in one CUDA graph.

    python scripts/after_product.py --csv scripts/results/after-product-h200.csv       # a minute and a half
    python scripts/after_product.py --batch 32 --vocab 151936 --hidden 2560

The product alone is torch's. It is followed by `softmax_topk`, by torch's softmax and topk, or by a kernel that only
reads the logits (`floors`), a lower bound for any separate kernel. A product streams the embedding through the L2 cache
while it writes logits, and lets no other kernel start before it ends, so that logits of many rows come from memory, and
the consumer kernel's start is not hidden. `head_topk` replaces both and writes no logits: its added time is its own
time minus the product's, and may be negative.

The added time is the difference of two long times, and a product's time depends on the addresses of its operands. So
all are timed with operands at several addresses, and the table has the median and the extremes of the added time.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from floors import fastest
from heads import OURS as OURS_BOUND
from heads import ROUNDED, Call, Check, Report, behind, draw, ready, show, timed, top_check
from reproduction import provenance

import tvm_sparse
from tvm_sparse.cli.common import Target, errors, machine_here
from tvm_sparse.core.registry import make

PRODUCT, OURS, TORCH, READ = "product", "softmax_topk", "torch softmax + topk", "read of the logits"
HEAD = "head_topk instead"
ROUNDS = 60  # a product takes fifty times as long as the kernel after it
PLACES = 7
# Bytes between the operands of one measurement and of the next.
APART = 37 * 2**20
COLUMNS = ("batch", "vocab", "hidden", "k", "dtype", "behind_product", "microseconds", "added", "least", "most",
           "timed", "kernel")  # fmt: skip


def piece_of(numbers: int, size: int) -> int:
    """Numbers that a warp reads at a time: all pieces are equal, and so are the lanes' parts if possible."""
    vectors = numbers * size // 16
    if numbers * size % 16:
        raise typer.BadParameter(f"expected logits of whole 16-byte vectors, got {numbers * size} bytes")
    return max((n for n in range(1, 129) if vectors % n == 0), key=lambda n: (n % 32 == 0, n)) * 16 // size


def contenders(
    states: torch.Tensor, embedding: torch.Tensor, k: int, reader_of: Callable[..., Call | None] | None
) -> tuple[dict[str, Call], dict[str, Check]]:
    """Calls by name, each including the product, and checks of their results; without `reader_of` no reader."""
    logits = states.new_empty((len(states), len(embedding)))

    def product() -> None:
        torch.mm(states, embedding.T, out=logits)

    product()
    calls: dict[str, Call] = {
        PRODUCT: product,
        OURS: behind(product, lambda: tvm_sparse.softmax_topk(logits, k)),
        TORCH: behind(product, lambda: torch.topk(torch.softmax(logits, -1, dtype=torch.float32), k)),
    }
    if reader_of is not None:
        pieces = logits.view(-1, piece_of(logits.numel(), logits.element_size()))
        if reader := reader_of(pieces, before=product):
            calls[READ] = behind(product, reader)
    calls[HEAD] = lambda: tvm_sparse.head_topk(states, embedding, k, constant=True)
    check = top_check(states, embedding, k)(OURS_BOUND if states.dtype == torch.float32 else ROUNDED)
    return calls, {OURS: check, TORCH: check, HEAD: check}


def in_places(
    draw_operands: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    k: int,
    reader_of: Callable[..., Call | None],
    places: int,
    device: str,
) -> tuple[dict[str, list[float]], dict[str, list[float]], str]:
    """By name, the microseconds of each contender and the time it adds to the product, for each placement of operands
    at which both were timed (the reader has one); and how they were timed.
    """
    microseconds: dict[str, list[float]] = {}
    added: dict[str, list[float]] = {}
    how, between = "", []
    for place in range(places):
        embedding, states = draw_operands()
        calls, checks = contenders(states, embedding, k, None if place else reader_of)
        found = timed(calls, checks, device, ROUNDS)
        how, alone = found[PRODUCT].how, found[PRODUCT].seconds
        for name, result in found.items():
            if alone and result.seconds:
                microseconds.setdefault(name, []).append(result.seconds * 1e6)
                added.setdefault(name, []).append((result.seconds - alone) * 1e6)
        del embedding, states, calls, checks
        between.append(torch.empty(APART, dtype=torch.uint8, device=device))
        if device == "cuda":
            torch.cuda.empty_cache()
    return microseconds, added, how


def main(
    target: Target = "auto",
    batch: Annotated[list[int] | None, typer.Option(help="Rows; may be given again.  [default: 1 10 16 32 64]")] = None,
    vocab: Annotated[int, typer.Option(min=1, help="Words.")] = 128256,
    hidden: Annotated[int, typer.Option(min=1, help="Columns.")] = 4096,
    k: Annotated[int, typer.Option(min=1, help="Best words of a row.")] = 20,
    dtype: Annotated[str, typer.Option(help="Of states, embedding and logits.")] = "bfloat16",
    places: Annotated[int, typer.Option(min=1, help="Of the operands in memory.")] = PLACES,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    seed: Annotated[int, typer.Option(help="Of states and embedding.")] = 0,
) -> None:
    """Time kernels that follow a product."""
    with errors():
        where = machine_here(target, "comparing")
        batches = batch or [1, 10, 16, 32, 64]
        axes = {"vocab": vocab, "k": k, "dtype": dtype}
        tops = {rows: make("softmax_topk", {"batch": rows, **axes}) for rows in batches}
        heads = {rows: make("head_topk", {"batch": rows, "hidden": hidden, **axes}) for rows in batches}
        report, lines = Report(csv_path, provenance(where), COLUMNS), []
        with ready([*tops.values(), *heads.values()], where), fastest(where) as reader_of:
            for rows in batches:
                operands = functools.partial(draw, vocab, hidden, rows, dtype, where.device, seed)
                microseconds, added, how = in_places(operands, k, reader_of, places, where.device)
                chosen = {OURS: tvm_sparse.explain(tops[rows]), HEAD: tvm_sparse.explain(heads[rows])}
                for name, times in microseconds.items():
                    figures = (statistics.median(added[name]), min(added[name]), max(added[name]))
                    shown = [f"{figure:.2f}" for figure in figures] if name != PRODUCT else [""] * 3
                    report.add(
                        batch=rows, vocab=vocab, hidden=hidden, k=k, dtype=dtype, behind_product=name,
                        microseconds=f"{statistics.median(times):.3f}", added=shown[0], least=shown[1], most=shown[2],
                        timed=how,
                        kernel=f"{chosen[name].candidate} ({chosen[name].how})" if name in chosen else "",
                    )  # fmt: skip
                figures_of = {PRODUCT: microseconds, OURS: added, TORCH: added, READ: added, HEAD: added}
                cells = [f"{statistics.median(of[name]):.1f}" if name in of else "-" for name, of in figures_of.items()]
                lines.append([str(rows), *cells])
        title = f"microseconds of a product of {vocab} x {hidden}, {dtype}, and what is added to it"
        show(title, ("batch", PRODUCT, OURS, TORCH, READ, HEAD), lines)
        report.close()


if __name__ == "__main__":
    typer.run(main)
