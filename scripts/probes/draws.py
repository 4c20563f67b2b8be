"""What a draw from a head takes on a GPU beside the best words of the same head: calls in a CUDA graph, in one process.

    python scripts/probes/draws.py [ROWS,VOCAB,HIDDEN ...]

A line has the microseconds of `head_topk` for 20 words, and the ratios to it of `head_topk` for one word; of
`head_sample` without filters, with uniform numbers and with a seed, and with top_k = 20; of PyTorch's product in
float32 followed by `softmax_sample`; and, where FlashInfer is installed, followed by its sampler.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from caps import show

import tvm_sparse

SHAPES = tuple(f"{rows},{vocab},4096" for vocab in (128256, 151936) for rows in (1, 16, 64, 128))
K = 20


def contenders(rows: int, embedding: Any) -> dict[str, Callable[[], Any]]:
    hidden = torch.randn(rows, embedding.shape[1], device="cuda").bfloat16()
    uniforms = torch.rand(rows, device="cuda")

    def draw(**options: Any) -> Any:
        return tvm_sparse.head_sample(hidden, embedding, constant=True, **options)

    def scores() -> Any:
        return torch.mm(hidden, embedding.t(), out_dtype=torch.float32)

    found = {
        "head_topk": lambda: tvm_sparse.head_topk(hidden, embedding, K, constant=True),
        "one word": lambda: tvm_sparse.head_topk(hidden, embedding, 1, constant=True),
        "draw": lambda: draw(temperature=0.8, uniforms=uniforms),
        "seed": lambda: draw(temperature=0.8, seed=7),
        "top_k": lambda: draw(temperature=0.8, top_k=K, top_p=0.9, uniforms=uniforms),
        "product + softmax_sample": lambda: tvm_sparse.softmax_sample(scores(), temperature=0.8, uniforms=uniforms),
    }
    if importlib.util.find_spec("flashinfer"):
        from flashinfer import sampling

        found["product + FlashInfer"] = lambda: sampling.sampling_from_logits(scores() / 0.8)
    return found


def main() -> None:
    for shape in sys.argv[1:] or SHAPES:
        rows, vocab, columns = map(int, shape.split(","))
        embedding = (torch.randn(vocab, columns, device="cuda") / columns**0.5).bfloat16()
        show(f"{rows} x {vocab} x {columns} bfloat16", contenders(rows, embedding), calls=10)


if __name__ == "__main__":
    main()
