"""Other libraries' ways to sample, and ours as its user calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CUDA, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem

from .call import FILTERS, softmax_sample
from .problem import SoftmaxSample, width_of
from .seeds import GIVEN, OF_ROWS


def _given(problem: SoftmaxSample, inputs: Sequence[Any], device: str) -> tuple[Any, ...]:
    """Logits, and columns of filters `(batch, 1)`, top_k being at least 1."""
    import torch

    if problem.bias:
        raise NotImplementedError("compared without bias only")
    words = problem.words
    columns = [
        (torch_tensor(one, device) if problem.per_row else torch.full((problem.batch,), one, device=device))[:, None]
        for one in inputs[1:5]
    ]
    columns[1] = torch.where(columns[1] <= 0, words, columns[1].clamp(max=words)).long()
    # Greedy rows as one word that is left.
    columns[1] = torch.where(columns[0] < 1e-5, 1, columns[1])
    columns[0] = torch.where(columns[0] < 1e-5, 1.0, columns[0]).float()
    return (torch_tensor(inputs[0], device), *columns)


def _drawn(x: Any, scores: Any, words: Any, top_k: Any, top_p: Any, min_p: Any) -> tuple[Any, Any]:
    """A word of each row of scores that descend, and its log-probability among all scores `x`."""
    import torch

    chances = torch.softmax(scores.masked_fill(torch.arange(words.shape[1], device=x.device) >= top_k, -torch.inf), -1)
    outside = (chances.cumsum(-1) - chances >= top_p) | (chances < min_p * chances[:, :1])
    place = torch.multinomial(chances.masked_fill(outside, 0.0), 1)
    logprobs = scores.gather(1, place) - torch.logsumexp(x, -1, keepdim=True)
    return words.gather(1, place)[:, 0].int(), logprobs[:, 0]


def _torch_sort(problem: SoftmaxSample, inputs: Sequence[Any], device: str) -> Call:
    import torch

    logits, temperature, *filters = _given(problem, inputs, device)

    def call() -> Any:
        x = logits.float() / temperature
        return _drawn(x, *torch.sort(x, -1, descending=True), *filters)

    return call


def _torch_topk(problem: SoftmaxSample, inputs: Sequence[Any], device: str) -> Call:
    import torch

    if problem.whole:
        raise NotImplementedError("compared with a top_k only")
    logits, temperature, *filters = _given(problem, inputs, device)

    def call() -> Any:
        x = logits.float() / temperature
        return _drawn(x, *torch.topk(x, problem.k), *filters)

    return call


# Ways of FlashInfer: what is called after its softmax, and the filters that it takes.
FLASHINFER = {
    "top_k_top_p_sampling_from_probs": ("top_k", "top_p"),
    "top_p_sampling_from_probs": ("top_p",),
    "min_p_sampling_from_probs": ("min_p",),
    "sampling_from_logits": (),
    "cake top_k_top_p_sampling_from_probs": ("top_k", "top_p"),
}


def _flashinfer(way: str) -> Callable[..., Call]:
    """A sampler of FlashInfer, for problems with no other filters than it takes; logits with a temperature of 1 need no
    pass of their own."""

    def prepare(problem: SoftmaxSample, inputs: Sequence[Any], device: str) -> Call:
        import torch
        from flashinfer import sampling

        logits, temperature, top_k, top_p, min_p = _given(problem, inputs, device)
        used = {"top_k": bool((top_k < problem.vocab).any()), "top_p": bool((top_p < 1).any()), "min_p": min_p.any()}
        if others := [name for name, one in used.items() if one and name not in FLASHINFER[way]]:
            raise NotImplementedError(f"takes no {' and no '.join(others)}")
        kept, shares, floors = top_k[:, 0].int(), top_p[:, 0].float(), min_p[:, 0].float()
        heats, seed = temperature[:, 0].contiguous(), torch.zeros(1, dtype=torch.int64, device=device)
        given = {"top_k": kept, "top_p": shares, "min_p": floors}
        filters = [given[name].contiguous() for name in FLASHINFER[way]]
        if way == "sampling_from_logits":
            heated = bool((temperature != 1).any())
            return lambda: sampling.sampling_from_logits(logits.float() / temperature if heated else logits.float())
        if way.startswith("cake"):
            from flashinfer import cake_sampling

            numbers = {"philox_seed": seed, "philox_offset": seed}
            draw = cake_sampling.top_k_top_p_sampling_from_probs
            return lambda: draw(sampling.softmax(logits.float(), temperature=heats), *filters, **numbers)
        draw = getattr(sampling, way)
        return lambda: draw(sampling.softmax(logits.float(), temperature=heats), *filters)

    return prepare


def ours(problem: SoftmaxSample, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    import numpy as np

    given = list(inputs)
    if not problem.whole:  # in calls a top_k of 0 is all words, and one above k is itself
        kept = np.where((np.asarray(given[2]) > 0) & (np.asarray(given[2]) < problem.k), given[2], problem.k)
        given[2] = kept.astype(np.int32) if problem.per_row else int(kept)
    logits, *filters = map(convert, given)
    names = {GIVEN: ("uniforms",), OF_ROWS: ("seed",)}.get(problem.seeded, ("seed", "offset"))
    numbers = dict(zip(names, filters[len(filters) - len(names) :], strict=True))
    options = dict(zip((name for name, *_ in FILTERS), filters, strict=False))
    options |= numbers | {"bias": filters[4] if problem.bias else None, "best": 0 if problem.alone else problem.k}
    if problem.alone and not problem.per_row:
        options["top_k"] = None
    elif problem.per_row:
        options["max_top_k"] = problem.k
    else:
        options["top_k"] = int(filters[1]) or None
    width = problem.k if problem.alone and not problem.per_row else width_of(problem.k, problem.vocab)
    whole = int(bool(problem.whole or problem.per_row) and width < problem.vocab)  # an array may say anything
    return lambda: softmax_sample(logits, **options), dataclasses.replace(problem, k=width, whole=whole)


PEERS = (
    Peer("torch sort, cumsum, multinomial", "torch", BOTH, _torch_sort),
    Peer("torch topk, cumsum, multinomial", "torch", BOTH, _torch_topk),
    *(Peer(f"FlashInfer {way} (no logprobs)", "flashinfer", CUDA, _flashinfer(way)) for way in FLASHINFER),
)
