"""`head_topk` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.formats.quantized import QuantizedEmbedding
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
    scales: Any,
    stored: str,
    soft_cap: float | None,
    cap: Any,
    allowed: Any,
) -> list[Any]:
    embedding = _whole(embedding, scales, stored)
    temperature = custom.value_of(temperature, heat)
    options = {"log": log, "temperature": temperature, "bias": bias, "ids": ids, "normaliser": normaliser}
    options |= {
        "allowed": allowed,
        "constant": constant,
        "rounded": rounded,
        "soft_cap": custom.value_of(soft_cap, cap),
    }
    return list(call.head_topk(hidden, embedding, k, **options))


def _batched(info: Any, in_dims: Any, *args: Any) -> Any:
    """Rows of all examples together."""
    hidden, embedding, k, log, temperature, bias, ids, *rest, allowed = args
    places = {"embedding": 1, "bias": 5, "scales": 11, "soft_cap": 14}
    custom.unbatched("head_topk", tuple(in_dims[place] for place in places.values()), tuple(places))
    hidden = custom.in_front(hidden, in_dims[0], info.batch_size)
    ids, allowed = (
        None if one is None else custom.in_front(one, dim, info.batch_size).flatten(0, 1)
        for one, dim in ((ids, in_dims[6]), (allowed, in_dims[15]))
    )
    heat = custom.of_rows_in_front(rest[2], in_dims[9], hidden.shape[:2])
    rest[2] = heat.flatten(0, 1) if heat is not None and heat.dim() else heat
    results = _OPERATOR(hidden.flatten(0, 1), embedding, k, log, temperature, bias, ids, *rest, allowed)
    return [result.unflatten(0, hidden.shape[:2]) for result in results], [0] * len(results)


_OPERATOR = custom.define(
    # `heat` is a temperature in a tensor, or one of each row, see `custom.number`.
    "head_topk(Tensor hidden, Tensor embedding, SymInt k, bool log=False, float temperature=1.0, Tensor? bias=None,"
    " Tensor? ids=None, bool normaliser=False, bool constant=False, Tensor? heat=None,"
    " bool rounded=False, Tensor? scales=None, str stored='', float? soft_cap=None, Tensor? cap=None,"
    " Tensor? allowed=None) -> Tensor[]",
    _call,
    _batched,
    custom.without_backward("hidden, embedding or bias"),
)


def _batched_scores(info: Any, in_dims: Any, hidden: Any, embedding: Any, scales: Any, stored: str) -> Any:
    """Rows of all examples together."""
    custom.unbatched("head_sample", in_dims[1:3], ("embedding", "scales"))
    hidden = custom.in_front(hidden, in_dims[0], info.batch_size)
    return _SCORES(hidden.flatten(0, 1), embedding, scales, stored).unflatten(0, hidden.shape[:2]), 0


_SCORES = custom.define(
    "head_scores(Tensor hidden, Tensor embedding, Tensor? scales=None, str stored='') -> Tensor",
    lambda hidden, embedding, scales, stored: float_scores(hidden, _whole(embedding, scales, stored)),
    _batched_scores,
    custom.without_backward("hidden or embedding"),
)


def _whole(embedding: Any, scales: Any, stored: str) -> Any:
    """The embedding that a custom operator has got in parts."""
    return QuantizedEmbedding.of_octets(embedding, scales, stored) if stored else embedding


def _in_parts(embedding: Any) -> tuple[Any, Any, str]:
    """What a custom operator takes of an embedding: a tensor, scales or None, and the dtype of stored values."""
    if isinstance(embedding, QuantizedEmbedding):
        return embedding.octets, embedding.scales, embedding.stored
    return embedding, None, ""


def head_scores(hidden: Any, embedding: Any) -> Any:
    """`float_scores`, which a graph of `head_sample` contains."""
    return _SCORES(hidden, *_in_parts(embedding))


_candidate_logits = custom.module_of("candidate_logits").candidate_logits


def head_topk(
    hidden: Any,
    embedding: Any,
    k: int,
    *,
    log: bool = False,
    temperature: Any = 1.0,
    bias: Any = None,
    ids: Any = None,
    allowed: Any = None,
    normaliser: bool = False,
    constant: bool = False,
    rounded: bool = False,
    shard: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    out: Any = None,
) -> tuple[Any, ...]:
    """The public function as torch.compile traces it."""
    if shard is not None:
        shards.refuse_beside(log, ids)
        options = {"temperature": temperature, "constant": constant, "rounded": rounded, "soft_cap": soft_cap}
        named = {"shard": shard, "bias": bias, "allowed": allowed, **options}
        part = shards.part_of_head(head_topk, _candidate_logits, hidden, embedding, k, **named)
        return custom.written(part, out)
    temperature, heat = custom.number(temperature)
    cap = (None, None) if soft_cap is None else custom.number(soft_cap)
    words, *parts = _in_parts(embedding)
    given = (log, temperature, bias, ids, normaliser, constant, heat, rounded)
    found = _OPERATOR(hidden, words, k, *given, *parts, *cap, allowed)
    return custom.written(tuple(found), out)
