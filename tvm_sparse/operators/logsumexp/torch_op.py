"""`logsumexp` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.operators.softmax import torch_op as softmax_op
from tvm_sparse.runtime import custom, repeat

from . import call

__all__ = ["logsumexp"]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, grad: Any) -> Any:
    """dx = g * softmax(x); NaN where the softmax is NaN."""
    [logits] = ctx.saved_tensors
    return (grad[..., None] * softmax_op.softmax(logits)).to(logits.dtype)


def _launched(launchers: Any, logits: Any) -> tuple[Any, tuple[Any, ...]]:
    return repeat.repeated(launchers, "logsumexp", (logits,)), (logits,)


def _batched(info: Any, in_dims: Any, logits: Any) -> Any:
    return _OPERATOR(logits.movedim(in_dims[0], 0)), 0


_OPERATOR = custom.define("logsumexp(Tensor logits) -> Tensor", call.logsumexp, _batched, _backward, _setup, _launched)


def logsumexp(logits: Any, out: Any = None) -> Any:
    """The public function as torch.compile traces it."""
    return custom.written(_OPERATOR(logits), out)
