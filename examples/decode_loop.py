"""A decode loop: a token of each row, drawn by one kernel, with its log-probability and the best tokens beside it.

    python examples/decode_loop.py                # kernels from the user's cache, compiled at the warm-up if need be
    python examples/decode_loop.py kernels        # kernels that `tvm-sparse export` wrote into a folder

On a GPU if PyTorch finds one, else on the CPU. The model is a random matrix: what matters is how the calls are made.
"""

from __future__ import annotations

import sys

import torch

import tvm_sparse

BATCH, HIDDEN, VOCAB, BEST, STEPS = 8, 64, 5000, 10, 12
FILTERS = {"temperature": 0.7, "top_k": 50, "top_p": 0.95}


def main() -> None:
    if len(sys.argv) > 1:
        count = tvm_sparse.load(sys.argv[1])
        print(f"{count} libraries of {sys.argv[1]} fit this machine")

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    embedding = torch.randn(VOCAB, HIDDEN, device=device)
    output = torch.randn(HIDDEN, VOCAB, device=device) / 4
    state = torch.zeros(BATCH, HIDDEN, device=device)
    total = torch.zeros(BATCH, device=device)
    # Seed and offset of each request: its tokens do not depend on the rows beside it, and can be drawn again.
    seeds = torch.stack([torch.arange(BATCH), torch.zeros(BATCH, dtype=torch.int64)], 1).to(device)
    token = torch.zeros(BATCH, dtype=torch.int64, device=device)

    # Before the first request: the first call of a shape looks the kernel up and loads it, or compiles it.
    tvm_sparse.softmax_sample(torch.zeros(BATCH, VOCAB, device=device), **FILTERS, seed=seeds, best=BEST)
    print(tvm_sparse.explain("softmax_sample", batch=BATCH, vocab=VOCAB, top_k=FILTERS["top_k"], seed="array"))

    for _ in range(STEPS):
        state = torch.tanh(0.5 * state + embedding[token])
        logits = state @ output
        # The token, its log-probability, and the best tokens with theirs, from one pass over the logits.
        drawn, logprob, best_logprobs, best = tvm_sparse.softmax_sample(logits, **FILTERS, seed=seeds, best=BEST)
        seeds[:, 1] += 1
        token = drawn.long()
        total += logprob
    print(f"drawn last: {token.tolist()}; the best would have been {best[:, 0].tolist()}")
    print(f"log-probabilities of the sequences: {[round(x, 1) for x in total.tolist()]}")


if __name__ == "__main__":
    main()
