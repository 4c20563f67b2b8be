"""`softmax` and `log_softmax` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

import torch

from tvm_sparse.runtime import custom, repeat

from . import call

__all__ = ["log_softmax", "softmax"]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.log, ctx.dtype = inputs[2], inputs[0].dtype
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Any) -> Any:
    """dx = p * (g - sum(g * p)); for logarithms dx = g - p * sum(g)."""
    [y] = ctx.saved_tensors
    function = torch._log_softmax_backward_data if ctx.log else torch._softmax_backward_data
    return function(grad, y, -1, y.dtype).to(ctx.dtype), None, None, None


def _launched(launchers: Any, logits: Any, algorithm: str, log: bool, dtype: str | None) -> tuple[Any, tuple[Any, ...]]:
    arguments = (logits, int(log))
    return repeat.repeated(launchers, ("softmax", algorithm, dtype), arguments), arguments


def _batched(info: Any, in_dims: Any, logits: Any, algorithm: str, log: bool, dtype: str | None) -> Any:
    return _OPERATOR(logits.movedim(in_dims[0], 0), algorithm, log, dtype), 0


_OPERATOR = custom.define(
    "softmax(Tensor logits, str algorithm='online', bool log=False, str? dtype=None) -> Tensor",
    call.distribution,
    _batched,
    _backward,
    _setup,
    _launched,
)


def softmax(logits: Any, *, algorithm: str = "online", dtype: Any = None, out: Any = None) -> Any:
    """The public function as torch.compile traces it."""
    return custom.written(_OPERATOR(logits, algorithm, False, _name(dtype)), out)


def log_softmax(logits: Any, out: Any = None, *, dtype: Any = None) -> Any:
    """The public function as torch.compile traces it."""
    return custom.written(_OPERATOR(logits, "online", True, _name(dtype)), out)


def _name(dtype: Any) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")
