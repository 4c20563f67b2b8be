"""Peers of `edit_logits`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem

from .call import edit_logits
from .penalties import PENALTIES
from .problem import EditLogits


def _options(problem: EditLogits, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """The arguments of the call."""
    given = dict(zip((argument.name for argument in problem.kernel_inputs), inputs, strict=True))
    del given["copied"]
    found = {}
    for name, value in given.items():
        if name == "cap":
            found["soft_cap"] = value
            continue
        one = next((one for one, many in PENALTIES.items() if name in (one, many)), None)
        found[name if one is None else f"{one}_penalty"] = convert(value) if hasattr(value, "shape") else value
    return found


def _torch_edits(problem: EditLogits, inputs: Sequence[Any], device: str) -> Call:
    """As vLLM does it: counts of all words in dense arrays, then all logits in several passes."""
    import torch

    options = _options(problem, inputs, lambda one: torch_tensor(one, device))
    logits = options.pop("logits")
    batch, vocab = logits.shape

    def dense(ids: Any, values: Any, dtype: Any) -> Any:
        inside = (ids >= 0) & (ids < vocab)
        spread = torch.zeros((batch, vocab + 1), dtype=dtype, device=device)
        spread.scatter_(1, torch.where(inside, ids, vocab).long(), values.to(dtype))
        return spread[:, :vocab]

    def call() -> Any:
        found = logits.clone()
        if problem.capped:
            found = (torch.tanh(found.float() / options["soft_cap"]) * options["soft_cap"]).to(logits.dtype)
        if problem.bias:
            found += dense(options["bias_ids"], options["bias_values"], torch.float32)
        if problem.penalties:
            repetition, presence, frequency = (
                one.unsqueeze(1) if isinstance(one, torch.Tensor) else one
                for one in (options[f"{name}_penalty"] for name in PENALTIES)
            )
            seen = dense(options["seen_ids"], torch.ones_like(options["seen_ids"]), torch.bool)
            counts = dense(options["seen_ids"], options["generated"], torch.int32)
            repeated = torch.where(found > 0, found / repetition, found * repetition)
            found = torch.where(seen, repeated, found)
            found = found - frequency * counts - presence * (counts > 0)
        return found.to(logits.dtype)

    return call


def ours(problem: EditLogits, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    options = _options(problem, inputs, convert)
    return lambda: edit_logits(**options), problem.as_called()


PEERS = (Peer("torch dense counts", "torch", BOTH, _torch_edits),)
