"""A decode loop: the best tokens of each step, and the log-probability of the one that was drawn.

    python examples/decode_loop.py                # kernels from the user's cache, compiled at the warm-up if need be
    python examples/decode_loop.py kernels        # kernels that `tvm-sparse export` wrote into a folder

On a GPU if PyTorch finds one, else on the CPU. The model is a random matrix: what matters is how the calls are made.
"""

from __future__ import annotations

import sys

import torch

import tvm_sparse

BATCH, HIDDEN, VOCAB, K, STEPS = 8, 64, 5000, 10, 12
TEMPERATURE = 0.7


def main() -> None:
    if len(sys.argv) > 1:
        count = tvm_sparse.load(sys.argv[1])
        print(f"{count} libraries of {sys.argv[1]} fit this machine")

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    embedding = torch.randn(VOCAB, HIDDEN, device=device)
    output = torch.randn(HIDDEN, VOCAB, device=device) / 4
    state = torch.zeros(BATCH, HIDDEN, device=device)
    token = torch.zeros(BATCH, 1, dtype=torch.int64, device=device)
    total = torch.zeros(BATCH, 1, device=device)
    # Written into by every step: a call then allocates nothing.
    out = (
        torch.empty(BATCH, K, device=device),
        torch.empty(BATCH, K, dtype=torch.int64, device=device),
        torch.empty(BATCH, 1, device=device),
    )

    # Before the first request: the first call of a shape looks the kernel up and loads it, or compiles it.
    tvm_sparse.softmax_topk(torch.zeros(BATCH, VOCAB, device=device), K, log=True, ids=token, out=out)
    print(tvm_sparse.explain("softmax_topk", batch=BATCH, vocab=VOCAB, k=K, ids=1))

    for _ in range(STEPS):
        state = torch.tanh(0.5 * state + embedding[token[:, 0]])
        logits = state @ output
        # Drawn by the exponential race, which needs no normaliser.
        token = (logits / TEMPERATURE - torch.empty_like(logits).exponential_().log()).argmax(1, keepdim=True)
        # The best tokens and the drawn one, with their log-probabilities, from one pass over the logits.
        best_logprobs, best, logprob = tvm_sparse.softmax_topk(
            logits, K, log=True, temperature=TEMPERATURE, ids=token, out=out
        )
        total += logprob
    print(f"drawn last: {token[:, 0].tolist()}; the best would have been {best[:, 0].tolist()}")
    print(f"log-probabilities of the sequences: {[round(x, 1) for x in total[:, 0].tolist()]}")


if __name__ == "__main__":
    main()
