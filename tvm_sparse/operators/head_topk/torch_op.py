"""`head_topk` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.operators.softmax_topk import shards
from tvm_sparse.runtime import custom

from . import call
from .product import float_scores

__all__ = ["head_topk"]


def _call(
    hidden: Any,
    embedding: Any,
    k: int,
    log: bool,
    temperature: float,
    bias: Any,
    ids: Any,
    normaliser: bool,
    constant: bool,
    heat: Any,
    rounded: bool,
) -> list[Any]:
    temperature = custom.value_of(temperature, heat)
    options = {"log": log, "temperature": temperature, "bias": bias, "ids": ids, "normaliser": normaliser}
    options |= {"constant": constant, "rounded": rounded}
    return list(call.head_topk(hidden, embedding, k, **options))


def _batched(info: Any, in_dims: Any, *args: Any) -> Any:
    """Rows of all examples together."""
    hidden, embedding, k, log, temperature, bias, ids, *rest = args
    custom.unbatched("head_topk", (in_dims[1], in_dims[5], in_dims[9]), ("embedding", "bias", "temperature"))
    hidden = custom.in_front(hidden, in_dims[0], info.batch_size)
    ids = None if ids is None else custom.in_front(ids, in_dims[6], info.batch_size).flatten(0, 1)
    results = _OPERATOR(hidden.flatten(0, 1), embedding, k, log, temperature, bias, ids, *rest)
    return [result.unflatten(0, hidden.shape[:2]) for result in results], [0] * len(results)


_OPERATOR = custom.define(
    # `heat` is a temperature in a tensor, see `custom.number`.
    "head_topk(Tensor hidden, Tensor embedding, SymInt k, bool log=False, float temperature=1.0, Tensor? bias=None,"
    " Tensor? ids=None, bool normaliser=False, bool constant=False, Tensor? heat=None,"
    " bool rounded=False) -> Tensor[]",
    _call,
    _batched,
    custom.without_backward("hidden, embedding or bias"),
)


def _batched_scores(info: Any, in_dims: Any, hidden: Any, embedding: Any) -> Any:
    """Rows of all examples together."""
    custom.unbatched("head_sample", in_dims[1:], ("embedding",))
    hidden = custom.in_front(hidden, in_dims[0], info.batch_size)
    return head_scores(hidden.flatten(0, 1), embedding).unflatten(0, hidden.shape[:2]), 0


# `float_scores`, which a graph of `head_sample` contains.
head_scores = custom.define(
    "head_scores(Tensor hidden, Tensor embedding) -> Tensor",
    float_scores,
    _batched_scores,
    custom.without_backward("hidden or embedding"),
)

_candidate_logits = custom.module_of("candidate_logits").candidate_logits


def head_topk(
    hidden: Any,
    embedding: Any,
    k: int,
    *,
    log: bool = False,
    temperature: float = 1.0,
    bias: Any = None,
    ids: Any = None,
    normaliser: bool = False,
    constant: bool = False,
    rounded: bool = False,
    shard: tuple[int, int] | None = None,
    out: Any = None,
) -> tuple[Any, ...]:
    """The public function as torch.compile traces it."""
    if shard is not None:
        shards.refuse_beside(log, ids)
        options = {"temperature": temperature, "constant": constant, "rounded": rounded}
        part = shards.part_of_head(head_topk, _candidate_logits, hidden, embedding, k, shard, bias, **options)
        return custom.written(part, out)
    temperature, heat = custom.number(temperature)
    found = _OPERATOR(hidden, embedding, k, log, temperature, bias, ids, normaliser, constant, heat, rounded)
    return custom.written(tuple(found), out)
