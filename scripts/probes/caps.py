"""What a soft cap and temperatures of rows cost on a GPU: calls with them over the plain call, in one process.

    python scripts/probes/caps.py [softmax_topk] [head_topk] [softmax_sample]

A line has the plain call's microseconds, in a CUDA graph, and the ratios of three others to it: with a temperature of
each row, with a soft cap, and with the soft cap in a pass of its own (a copy by `edit_logits`; of a head, from product
and sampler).
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch

import tvm_sparse

CAP, K, VOCAB, HIDDEN = 30.0, 8, 128256, 4096
ROUNDS = 5


def recorded(call: Callable[[], Any], calls: int) -> torch.cuda.CUDAGraph:
    """A graph of some calls."""
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return graph


def microseconds(contenders: dict[str, Callable[[], Any]], calls: int = 40) -> dict[str, float]:
    """The median of rounds, in which the contenders take turns."""
    graphs = {name: recorded(call, calls) for name, call in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times[name].append(1000 * begin.elapsed_time(end) / calls)
    return {name: statistics.median(each) for name, each in times.items()}


def show(name: str, contenders: dict[str, Callable[[], Any]], calls: int = 40) -> None:
    plain, *others = (found := microseconds(contenders, calls)).items()
    ratios = ", ".join(f"{other} {seconds / plain[1]:.2f}" for other, seconds in others)
    print(f"{name}: {plain[1]:.1f} us; {ratios}", flush=True)


def compare_rows(name: str, rows: int, dtype: torch.dtype) -> None:
    """`softmax_topk` or `softmax_sample`."""
    x = torch.randn(rows, VOCAB, device="cuda").to(dtype)
    heats, uniforms = torch.full((rows,), 0.8, device="cuda"), torch.rand(rows, device="cuda")
    ids = torch.randint(VOCAB, (rows, 1), device="cuda")

    def call(x: Any = x, **options: Any) -> Any:
        if name == "softmax_sample":
            return tvm_sparse.softmax_sample(x, uniforms=uniforms, **options)
        return tvm_sparse.softmax_topk(x, K, log=True, ids=ids, **options)

    contenders = {
        "plain": call,
        "capped": lambda: call(soft_cap=CAP),
        "composed": lambda: call(tvm_sparse.edit_logits(x, soft_cap=CAP)),
        "temperatures": lambda: call(temperature=heats),
    }
    show(f"{name} {rows} x {VOCAB} {str(dtype)[6:]}", contenders)


def compare_heads(rows: int, embedding: Any) -> None:
    """`head_topk`, and `head_sample` over its time."""
    hidden = torch.randn(rows, HIDDEN, device="cuda").bfloat16()
    heats, uniforms = torch.full((rows,), 0.8, device="cuda"), torch.rand(rows, device="cuda")

    def head(**options: Any) -> Any:
        return tvm_sparse.head_topk(hidden, embedding, K, constant=True, **options)

    def draw(**options: Any) -> Any:
        return tvm_sparse.head_sample(hidden, embedding, uniforms=uniforms, top_k=K, constant=True, **options)

    def product() -> Any:
        scores = torch.mm(hidden, embedding.t(), out_dtype=torch.float32)
        return tvm_sparse.softmax_topk(tvm_sparse.edit_logits(scores, soft_cap=CAP, out=scores), K)

    contenders = {
        "plain": head,
        "capped": lambda: head(soft_cap=CAP),
        "composed": product,
        "temperatures": lambda: head(temperature=heats),
        "head_sample": draw,
        "head_sample with temperatures": lambda: draw(temperature=heats),
    }
    show(f"head_topk {rows} x {VOCAB} x {HIDDEN} bfloat16", contenders, calls=10)


def main() -> None:
    wanted = sys.argv[1:] or ["softmax_topk", "head_topk", "softmax_sample"]
    for name in ("softmax_topk", "softmax_sample"):
        for dtype in (torch.float32, torch.bfloat16) if name in wanted else ():
            for rows in (1, 16, 64):
                compare_rows(name, rows, dtype)
    if "head_topk" in wanted:
        embedding = (torch.randn(VOCAB, HIDDEN, device="cuda") / HIDDEN**0.5).bfloat16()
        for rows in (1, 16, 64):
            compare_heads(rows, embedding)


if __name__ == "__main__":
    main()
