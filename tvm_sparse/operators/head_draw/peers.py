"""Peers of the draw of `head_sample`, and its call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CUDA, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem
from tvm_sparse.operators.head_topk.product import float_scores
from tvm_sparse.operators.softmax_sample.call import softmax_sample
from tvm_sparse.operators.softmax_sample.seeds import GIVEN, OF_ROWS

from .call import head_draw
from .problem import HeadDraw


def _given(problem: HeadDraw, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """The arguments of a draw beside hidden states and embedding."""
    made = [convert(one) if hasattr(one, "shape") else one for one in inputs]
    count = 2 if problem.counts_rows else 1
    names = {GIVEN: ("uniforms",), OF_ROWS: ("seed",)}.get(problem.seeded, ("seed", "offset"))
    options = dict(zip(names, made[len(problem.kernel_inputs) - count :], strict=False))
    bias, cap = problem.extras(made)
    return options | {"temperature": made[2] if problem.per_row else 1 / made[2], "bias": bias, "soft_cap": cap}


def _torch(problem: HeadDraw, inputs: Sequence[Any], device: str) -> Call:
    import torch

    options = _given(problem, inputs, lambda one: torch_tensor(one, device))
    if problem.seeded or problem.capped:
        raise TypeError("numbers made of seeds, and soft caps, are not compared")
    hidden, embedding = (torch_tensor(array, device) for array in inputs[:2])
    heat, bias, uniform = (options[name] for name in ("temperature", "bias", "uniforms"))
    heat = heat[:, None] if problem.per_row else heat

    def call() -> Any:
        scores = torch.nn.functional.linear(hidden, embedding).float()
        scores = (scores if bias is None else scores + bias) / heat
        total = torch.softmax(scores, -1).cumsum(-1)
        tokens = torch.searchsorted(total, uniform[:, None] * total[:, -1:], right=True)
        tokens = tokens.clamp(max=scores.shape[1] - 1)
        return tokens[:, 0].int(), torch.log_softmax(scores, -1).gather(1, tokens)[:, 0]

    return call


def _composed(problem: HeadDraw, inputs: Sequence[Any], device: str) -> Call:
    options = _given(problem, inputs, lambda one: torch_tensor(one, device))
    hidden, embedding = (torch_tensor(array, device) for array in inputs[:2])
    return lambda: softmax_sample(float_scores(hidden, embedding), **options)


def ours(problem: HeadDraw, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    options = _given(problem, inputs, convert)
    hidden, embedding = map(convert, inputs[:2])
    call = lambda: head_draw(hidden, embedding, constant=bool(inputs[3]), **options)  # noqa: E731
    return call, problem


PEERS = (
    Peer("torch linear, softmax, cumsum, searchsorted", "torch", BOTH, _torch),
    Peer("torch linear + softmax_sample", "torch", CUDA, _composed),
)
