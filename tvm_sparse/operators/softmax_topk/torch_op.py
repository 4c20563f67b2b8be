"""`softmax_topk` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.runtime import custom

from . import call

__all__ = ["softmax_topk"]


def _call(logits: Any, k: int, log: bool, temperature: float, bias: Any, ids: Any) -> list[Any]:
    return list(call.softmax_topk(logits, k, log=log, temperature=temperature, bias=bias, ids=ids))


def _batched(info: Any, in_dims: Any, *args: Any) -> Any:
    """Leading dimensions are the operator's own."""
    logits, k, log, temperature, bias, ids = args
    custom.unbatched("softmax_topk", in_dims[4:5], ("bias",))
    logits = custom.in_front(logits, in_dims[0], info.batch_size)
    ids = None if ids is None else custom.in_front(ids, in_dims[5], info.batch_size)
    results = _OPERATOR(logits, k, log, temperature, bias, ids)
    return results, [0] * len(results)


_OPERATOR = custom.define(
    "softmax_topk(Tensor logits, int k, bool log=False, float temperature=1.0, Tensor? bias=None, Tensor? ids=None)"
    " -> Tensor[]",
    _call,
    _batched,
    custom.without_backward("logits", call.INSTEAD),
)


def softmax_topk(
    logits: Any,
    k: int,
    *,
    log: bool = False,
    temperature: float = 1.0,
    bias: Any = None,
    ids: Any = None,
    out: Any = None,
) -> tuple[Any, ...]:
    """The public function, as it stands in a graph."""
    return custom.written(tuple(_OPERATOR(logits, k, log, temperature, bias, ids)), out)
