"""Speculative sampling: a small model drafts tokens, a large one accepts a prefix of them or draws another token.

    python examples/speculative.py

With q the draft's distribution and p the large model's, both after temperature and filters, the drafted token x is
accepted with probability min(1, p(x) / q(x)). At the first refusal a token is drawn from max(0, p - q), normalised; if
all are accepted, one more is drawn from p. The resulting tokens are distributed as draws from p alone (Leviathan,
Kalman & Matias 2023, "Fast inference from transformers via speculative decoding", appendix A.1).

`softmax_sample` draws, `sample_details` says p(x) and q(x) after the filters, and the residual draw is a draw of
`softmax_sample` from the logarithms of max(0, p - q). All of it is on the device; nothing waits for the host.
"""

from __future__ import annotations

from typing import Any

import torch

import tvm_sparse

BATCH, VOCAB, DRAFTED = 64, 200, 4
FILTERS = {"temperature": 0.9, "top_k": 50, "top_p": 0.95}


def left_distribution(logits: torch.Tensor, filters: dict[str, Any]) -> torch.Tensor:
    """The probabilities of all words after the filters, `(..., vocab)`."""
    *_, values, words = tvm_sparse.softmax_sample(
        logits, **filters, uniforms=torch.zeros(logits.shape[:-1], device=logits.device), best=filters["top_k"]
    )
    found = tvm_sparse.sample_details(logits, words[..., 0], **filters)
    stay = torch.arange(values.shape[-1], device=logits.device) < found.counts[..., None]
    shares = torch.where(stay, values - found.mass.log()[..., None], -torch.inf).exp()
    return torch.zeros_like(logits, dtype=torch.float32).scatter(-1, words, shares)


def draft(
    logits_of: Any, context: torch.Tensor, count: int, filters: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """`count` tokens of each row, `(batch, count)`, and the logits from which each was drawn."""
    tokens, logits = [], []
    for _ in range(count):
        logits.append(logits_of(context))
        drawn, _ = tvm_sparse.softmax_sample(logits[-1], **filters)
        tokens.append(drawn.long())
        context = torch.cat([context, tokens[-1][:, None]], 1)
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def verify(
    drafted: torch.Tensor, theirs: torch.Tensor, ours: torch.Tensor, filters: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """How many drafted tokens of each row are accepted, and the token that follows them.

    Parameters
    ----------
    drafted
        `(batch, n)` tokens.
    theirs
        `(batch, n, vocab)` logits of the draft model.
    ours
        `(batch, n + 1, vocab)` logits of the large model, at the same places and after the last token.
    """
    batch, count = drafted.shape
    q = tvm_sparse.sample_details(theirs, drafted, **filters).left_logprobs
    p = tvm_sparse.sample_details(ours[:, :-1].contiguous(), drafted, **filters).left_logprobs
    accepted = torch.rand(batch, count, device=drafted.device).log() < p - q
    kept = accepted.long().cumprod(1).sum(1)
    # The logits at the first refusal; after all that were accepted nothing is subtracted.
    rows = torch.arange(batch, device=drafted.device)
    wanted = left_distribution(ours[rows, kept].contiguous(), filters)
    refused = left_distribution(theirs[rows, kept.clamp_max(count - 1)].contiguous(), filters)
    residual = torch.where((kept < count)[:, None], (wanted - refused).clamp_min(0), wanted)
    following, _ = tvm_sparse.softmax_sample(residual.log())
    return kept, following.long()


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large = torch.randn(VOCAB, VOCAB, device=device) * 2  # logits by the last token: a bigram model
    small = large + torch.randn(VOCAB, VOCAB, device=device)
    context = torch.zeros(BATCH, 1, dtype=torch.int64, device=device)
    generated = rounds = 0
    for _ in range(3):
        drafted, theirs = draft(lambda tokens: small[tokens[:, -1]], context, DRAFTED, FILTERS)
        places = torch.cat([context[:, -1:], drafted], 1)
        kept, following = verify(drafted, theirs, large[places], FILTERS)
        # Rows keep different numbers of tokens; here the shorter ones go on from their own last token.
        context = following[:, None]
        generated, rounds = generated + int((kept + 1).sum()), rounds + BATCH
    print(f"{DRAFTED} tokens are drafted; {generated / rounds:.2f} come out of each pass of the large model")


if __name__ == "__main__":
    main()
