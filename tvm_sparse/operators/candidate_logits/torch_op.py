"""`candidate_logits` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.operators.candidate_topk.torch_op import one_list
from tvm_sparse.runtime import custom

from . import call

__all__ = ["candidate_logits"]


def _call(hidden: Any, embedding: Any, candidates: Any, counts: Any, bias: Any, validate: bool) -> Any:
    return call.candidate_logits(hidden, embedding, candidates, counts=counts, bias=bias, validate=validate)


def _batched(info: Any, in_dims: Any, hidden: Any, embedding: Any, candidates: Any, *args: Any) -> Any:
    """Rows of all examples together, with the one list that they share."""
    one_list("candidate_logits", candidates, in_dims[1:5])
    hidden = hidden.movedim(in_dims[0], 0)
    logits = _OPERATOR(hidden.flatten(0, 1), embedding, candidates, *args)
    return logits.unflatten(0, hidden.shape[:2]), 0


_OPERATOR = custom.define(
    "candidate_logits(Tensor hidden, Tensor embedding, Tensor candidates, Tensor? counts=None,"
    " Tensor? bias=None, bool validate=False) -> Tensor",
    _call,
    _batched,
    custom.without_backward("hidden, embedding or bias"),
)


def candidate_logits(
    hidden: Any,
    embedding: Any,
    candidates: Any,
    *,
    counts: Any = None,
    bias: Any = None,
    validate: bool = False,
    out: Any = None,
) -> Any:
    """The public function as torch.compile traces it."""
    return custom.written(_OPERATOR(hidden, embedding, candidates, counts, bias, validate), out)
