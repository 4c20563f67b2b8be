"""`softmax_topk` as custom operators of PyTorch: one without `ids`, and one with them, which has an additional result.

There are two, because PyTorch handles a list of results more slowly than a fixed number of results, which is noticeable
in small calls.
"""

from __future__ import annotations

from typing import Any

from tvm_sparse.operators.edit_logits.torch_op import edit_logits
from tvm_sparse.runtime import custom, repeat
from tvm_sparse.runtime.calls import inverse_temperature

from . import call, shards

__all__ = ["softmax_topk"]


def _call(
    logits: Any,
    k: int,
    log: bool,
    temperature: float,
    bias: Any,
    heat: Any,
    allowed: Any,
    soft_cap: float | None,
    cap: Any,
    ids: Any = None,
) -> tuple[Any, ...]:
    options = {"temperature": custom.value_of(temperature, heat), "soft_cap": custom.value_of(soft_cap, cap)}
    return call.softmax_topk(logits, k, log=log, bias=bias, ids=ids, allowed=allowed, **options)


def _call_given(logits: Any, k: int, ids: Any, *rest: Any) -> tuple[Any, ...]:
    return _call(logits, k, *(*rest, ids))


def _launched(
    launchers: Any,
    logits: Any,
    k: int,
    log: bool,
    temperature: float,
    bias: Any,
    heat: Any,
    allowed: Any,
    soft_cap: float | None,
    cap: Any,
    ids: Any = None,
) -> tuple[Any, tuple[Any, ...]]:
    # The value of a number in a tensor may differ in the next call; a bias beside a cap has a call in parts.
    if heat is not None and not heat.dim() or cap is not None or soft_cap is not None and bias is not None:
        return None, ()
    scale = inverse_temperature(temperature) if heat is None else heat
    arguments = (logits, scale, int(log), soft_cap, bias, allowed, ids)
    return repeat.repeated(launchers, ("softmax_topk", k), arguments), arguments


def _launched_given(launchers: Any, logits: Any, k: int, ids: Any, *rest: Any) -> tuple[Any, tuple[Any, ...]]:
    return _launched(launchers, logits, k, *(*rest, ids))


def _batched(info: Any, in_dims: Any, *args: Any) -> Any:
    """Leading dimensions are handled by the operator itself."""
    logits, *rest, heat, allowed, soft_cap, cap = args
    custom.unbatched("softmax_topk", (in_dims[4], in_dims[8]), ("bias", "soft_cap"))
    logits = custom.in_front(logits, in_dims[0], info.batch_size)
    allowed = allowed if allowed is None else custom.in_front(allowed, in_dims[6], info.batch_size)
    heat = custom.of_rows_in_front(heat, in_dims[5], logits.shape[:-1])
    return _OPERATOR(logits, *rest, heat, allowed, soft_cap, cap), (0, 0)


def _batched_given(info: Any, in_dims: Any, *args: Any) -> Any:
    logits, k, ids, *rest, heat, allowed, soft_cap, cap = args
    custom.unbatched("softmax_topk", (in_dims[5], in_dims[9]), ("bias", "soft_cap"))
    logits, ids = (custom.in_front(one, dim, info.batch_size) for one, dim in ((logits, in_dims[0]), (ids, in_dims[2])))
    allowed = allowed if allowed is None else custom.in_front(allowed, in_dims[7], info.batch_size)
    heat = custom.of_rows_in_front(heat, in_dims[6], logits.shape[:-1])
    return _GIVEN(logits, k, ids, *rest, heat, allowed, soft_cap, cap), (0, 0, 0)


# `heat` is a temperature in a tensor, or one of each row, see `custom.number`.
_REST = "bool log=False, float temperature=1.0, Tensor? bias=None, Tensor? heat=None, Tensor? allowed=None,"
_REST += " float? soft_cap=None, Tensor? cap=None"
_OPERATOR = custom.define(
    f"softmax_topk(Tensor logits, SymInt k, {_REST}) -> (Tensor, Tensor)",
    _call,
    _batched,
    custom.without_backward("logits", call.INSTEAD),
    launched=_launched,
)
_GIVEN = custom.define(
    f"softmax_topk_given(Tensor logits, SymInt k, Tensor ids, {_REST}) -> (Tensor, Tensor, Tensor)",
    _call_given,
    _batched_given,
    custom.without_backward("logits", call.INSTEAD),
    launched=_launched_given,
)


def softmax_topk(
    logits: Any,
    k: int,
    *,
    log: bool = False,
    temperature: Any = 1.0,
    bias: Any = None,
    ids: Any = None,
    allowed: Any = None,
    shard: tuple[int, int] | None = None,
    soft_cap: float | None = None,
    out: Any = None,
) -> tuple[Any, ...]:
    """The public function as torch.compile traces it."""
    if soft_cap is not None and (bias is not None or shard is not None):
        logits, soft_cap = edit_logits(logits.float(), soft_cap=soft_cap), None
    if shard is not None:
        shards.refuse_beside(log, ids)
        found = shards.part_of_logits(softmax_topk, logits, k, shard, temperature, bias, allowed)
        return custom.written(found, out)
    temperature, heat = custom.number(temperature)
    cap = (None, None) if soft_cap is None else custom.number(soft_cap)
    if ids is None:
        return custom.written(_OPERATOR(logits, k, log, temperature, bias, heat, allowed, *cap), out)
    return custom.written(_GIVEN(logits, k, ids, log, temperature, bias, heat, allowed, *cap), out)
