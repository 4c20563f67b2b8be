"""The exact head compared with the product alone, product + softmax_topk, and torch's operators.

    python scripts/head_bench.py --csv scripts/results/head-h200.csv        # under a minute
    python scripts/head_bench.py --shape 12,40000,1000,12,float16
    python scripts/head_bench.py --cold --csv scripts/results/head-cold-h200.csv

`head_topk` reads the embedding once and writes no logits. It runs with the promise that the embedding is constant, as
in inference; another line is without it. `product` is torch's product alone (cuBLAS), without softmax or search; `read`
is a kernel that only reads the embedding (`floors`), and `limit` the time of reading it at the measured memory
bandwidth. Calls follow each other directly, so that the L2 cache may contain a part of the embedding; with `--cold`
another kernel, which reads more than the cache's size, runs in between.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer
from floors import fastest
from heads import (
    Call,
    Check,
    Report,
    bounds,
    draw,
    micro,
    over,
    product_topk,
    ready,
    show,
    timed,
    top_check,
    torch_full,
)
from reproduction import provenance

import tvm_sparse
from tvm_sparse.cli.common import Target, errors, fail, machine_here
from tvm_sparse.core.registry import make

# batch, vocab, hidden, k, dtype: beams of Shi, Xu & Knight 2018, and output layers of today's models.
SHAPES = (
    "12,25000,1000,12,float16", "12,40000,1000,12,float16", "12,66000,1000,12,float16", "12,40000,1000,12,float32",
    "1,100352,1024,20,bfloat16", "10,100352,1024,20,bfloat16", "32,100352,1024,20,bfloat16",
    "64,100352,1024,20,bfloat16", "10,151936,2560,20,bfloat16", "1,128256,4096,20,bfloat16",
    "10,128256,4096,20,bfloat16", "32,128256,4096,20,bfloat16", "64,128256,4096,20,bfloat16",
    "10,151936,4096,20,bfloat16", "1,201088,2880,20,bfloat16", "10,201088,2880,20,bfloat16",
    "1,151936,3584,20,bfloat16", "10,151936,3584,20,bfloat16",
    "10,262144,3840,20,bfloat16", "1,256000,4608,20,bfloat16", "10,256000,4608,20,bfloat16",
    "10,151936,5120,20,bfloat16", "1,262144,5376,20,bfloat16", "10,262144,5376,20,bfloat16",
    "64,262144,5376,20,bfloat16", "8,256000,6144,20,bfloat16", "1,129280,7168,20,bfloat16",
    "10,129280,7168,20,bfloat16", "10,128256,8192,20,bfloat16", "128,100352,1024,20,bfloat16",
    "48,50257,768,20,bfloat16",
)  # fmt: skip
HEAD, UNPROMISED, PRODUCT, CHAIN, TORCH, READ = (
    "head_topk", "head_topk, no promise", "product", "product + softmax_topk", "torch product + softmax + topk",
    "read of the embedding",
)  # fmt: skip
COLUMNS = ("batch", "vocab", "hidden", "k", "dtype", "implementation", "microseconds", "over_ours", "over_product",
           "share_of_matrix_limit", "timed", "kernel", "note")  # fmt: skip


def parsed(text: str) -> tuple[int, int, int, int, str]:
    parts = text.split(",")
    if len(parts) != 5 or not all(part.isdecimal() for part in parts[:4]):
        raise typer.BadParameter(f"expected batch,vocab,hidden,k,dtype, got {text}", param_hint="--shape")
    batch, vocab, hidden, k = map(int, parts[:4])
    return batch, vocab, hidden, k, parts[4]


def contenders(states: torch.Tensor, embedding: torch.Tensor, k: int) -> tuple[dict[str, Call], dict[str, Check]]:
    """Calls by name, and checks of their results."""
    calls: dict[str, Call] = {
        HEAD: lambda: tvm_sparse.head_topk(states, embedding, k, constant=True),
        UNPROMISED: lambda: tvm_sparse.head_topk(states, embedding, k),
        PRODUCT: lambda: torch.nn.functional.linear(states, embedding),
        CHAIN: product_topk(states, embedding, k),
        TORCH: torch_full(states, embedding, k),
    }
    check = top_check(states, embedding, k)
    ours, peers = bounds(states, embedding, k)
    return calls, {HEAD: check(ours), UNPROMISED: check(ours), CHAIN: check(peers), TORCH: check(peers)}


def main(
    target: Target = "auto",
    shape: Annotated[list[str] | None, typer.Option(help="Only these batch,vocab,hidden,k,dtype.")] = None,
    cold: Annotated[bool, typer.Option("--cold", help="Another kernel uses the L2 cache between calls.")] = False,
    csv_path: Annotated[Path | None, typer.Option("--csv", help="File to write.")] = None,
    seed: Annotated[int, typer.Option(help="Of states and embeddings.")] = 0,
) -> None:
    """Time the exact head and its peers."""
    with errors():
        where = machine_here(target, "comparing")
        if cold and where.kind != "cuda":
            fail("cold: needs a GPU")
        shapes = [parsed(text) for text in shape or SHAPES]
        heads = [
            make("head_topk", {"batch": batch, "vocab": vocab, "hidden": hidden, "k": k, "dtype": dtype})
            for batch, vocab, hidden, k, dtype in shapes
        ]
        tops = [
            make("softmax_topk", {"batch": batch, "vocab": vocab, "k": k, "dtype": dtype})
            for batch, vocab, _, k, dtype in shapes
        ]
        report, rows = Report(csv_path, provenance(where, cold=cold), COLUMNS), []
        with ready([*heads, *tops], where), fastest(where) as reader_of:
            for problem, (batch, vocab, hidden, k, dtype) in zip(heads, shapes, strict=True):
                embedding, states = draw(vocab, hidden, batch, dtype, where.device, seed)
                calls, checks = contenders(states, embedding, k)
                if reader := reader_of(embedding):
                    calls[READ] = reader
                found = timed(calls, checks, where.device, cold=cold)
                limit = embedding.nbytes / where.bandwidth if where.bandwidth else None
                kernel = tvm_sparse.explain(problem)
                for name, result in found.items():
                    share = f"{limit / result.seconds:.3f}" if limit and result.seconds else ""
                    report.add(
                        batch=batch, vocab=vocab, hidden=hidden, k=k, dtype=dtype, implementation=name,
                        microseconds=micro(result), over_ours=over(result, found[HEAD]),
                        over_product=over(result, found[PRODUCT]), share_of_matrix_limit=share, timed=result.how,
                        kernel=f"{kernel.candidate} ({kernel.how})" if name == HEAD else "", note=result.note,
                    )  # fmt: skip
                limited = "-" if limit is None else f"{limit * 1e6:.1f}"
                shown = [found.get(name, "-") for name in (HEAD, UNPROMISED, PRODUCT, CHAIN, TORCH, READ)]
                rows.append([f"{batch}, {vocab}, {hidden}, {k}, {dtype}", *shown, limited,
                             over(found[HEAD], found[PRODUCT]), over(found[CHAIN], found[HEAD]),
                             over(found[TORCH], found[HEAD])])  # fmt: skip
                del embedding, states
        heads_of = ("batch, vocab, hidden, k, dtype", HEAD, "no promise", PRODUCT, "+ softmax_topk", "torch", "read",
                    "limit", "head / product", "+ softmax_topk / head", "torch / head")  # fmt: skip
        show("microseconds a call", heads_of, rows)
        report.close()


if __name__ == "__main__":
    typer.run(main)
