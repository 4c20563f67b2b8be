"""`softmax_sample` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.operators.edit_logits.torch_op import edit_logits
from tvm_sparse.runtime import arrays, custom

from . import call

__all__ = ["softmax_sample"]


def _call(logits: Any, numbers: Any, top_k: Any, bias: Any, *rest: Any) -> list[Any]:
    uniforms, seeds, seed, offset, max_top_k, best, offsets, *own, allowed = rest
    temperature, top_p, min_p = numbers
    filters = (temperature, top_k, top_p, min_p)
    given = [_of(number, one) for number, one in zip(filters, own, strict=True)]
    options = dict(zip((name for name, *_ in call.FILTERS), given, strict=True))
    options |= {"uniforms": uniforms, "seed": _of(seed, seeds), "offset": _of(offset, offsets)}
    # Results of a custom operator are no views.
    return [
        array.contiguous()
        for array in call.softmax_sample(logits, **options, bias=bias, allowed=allowed, max_top_k=max_top_k, best=best)
    ]


def _of(number: Any, tensor: Any) -> Any:
    """The number, or what a tensor says in its place: its value if it has no dimension, else one of each row."""
    return number if tensor is None else custom.value_of(number, tensor) if not tensor.dim() else tensor


# Where filters stand, and others than the logits that have something for each row.
_FILTERS, _OF_ROWS = range(11, 15), (4, 5, 10, 15)


def _batched(info: Any, in_dims: Any, *args: Any) -> Any:
    """Leading dimensions are the operator's own."""
    custom.unbatched("softmax_sample", in_dims[3:4], ("bias",))

    given = list(args)
    given[0] = custom.in_front(args[0], in_dims[0], info.batch_size)
    for place in _OF_ROWS:
        if args[place] is not None and (in_dims[place] is not None or args[place].dim()):
            given[place] = custom.in_front(args[place], in_dims[place], info.batch_size)
    for place in _FILTERS:
        given[place] = custom.of_rows_in_front(args[place], in_dims[place], given[0].shape[:-1])
    results = _OPERATOR(*given)
    return results, [0] * len(results)


# Tensors after `best` say what the numbers of their names do not: one of each row, or one in all (`custom.number`).
_OPERATOR = custom.define(
    "softmax_sample(Tensor logits, float[] numbers, SymInt? top_k, Tensor? bias, Tensor? uniforms, Tensor? seeds,"
    " SymInt? seed, SymInt offset, int? max_top_k, SymInt best, Tensor? offsets=None, Tensor? temperatures=None,"
    " Tensor? top_ks=None, Tensor? top_ps=None, Tensor? min_ps=None, Tensor? allowed=None) -> Tensor[]",
    _call,
    _batched,
    custom.without_backward("logits"),
)


def _signed(value: Any) -> Any:
    """The lower 64 bits of an integer, as an int64."""
    return value if -(2**63) <= value < 2**63 else (value + 2**63) % 2**64 - 2**63


def softmax_sample(
    logits: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    bias: Any = None,
    allowed: Any = None,
    uniforms: Any = None,
    seed: Any = None,
    offset: Any = 0,
    max_top_k: int | None = None,
    best: int = 0,
    soft_cap: float | None = None,
    out: Any = None,
) -> tuple[Any, ...]:
    """The public function, as it stands in a graph."""
    import torch

    if soft_cap is not None:
        logits = edit_logits(logits.float(), soft_cap=soft_cap)
    if uniforms is not None and seed is not None:
        raise ValueError("uniforms: expected these or a seed, got both")
    if seed is None and (arrays.is_torch(offset) or offset != 0):
        raise ValueError("offset: comes with a seed, and there is none; pass seed= with it")
    if uniforms is None and seed is None:
        uniforms = torch.rand(logits.shape[:-1], device=logits.device)  # a graph draws anew
    # Of those that are arrays the numbers are not looked at.
    temperature, heats = custom.number(temperature)
    top_p, shares = custom.number(top_p)
    min_p, floors = custom.number(min_p)
    top_ks = top_k if arrays.is_torch(top_k) else None
    top_k = None if top_ks is not None else top_k
    own = (heats, top_ks, shares, floors)
    seeds, offsets = seed if arrays.is_torch(seed) else None, offset if arrays.is_torch(offset) else None
    results = _OPERATOR(
        logits,
        [temperature, top_p, min_p],
        top_k,
        bias,
        uniforms,
        seeds,
        # Beside a tensor stands a number, for where its value is not known yet (`custom.value_of`).
        None if seed is None else 0 if seeds is not None else _signed(seed),
        0 if offsets is not None else _signed(offset),
        max_top_k,
        best,
        offsets,
        *own,
        allowed,
    )
    if out is None:
        return tuple(results)
    return (*custom.written(tuple(results[:2]), out), *results[2:])
