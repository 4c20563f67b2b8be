"""`softmax_sample` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.runtime import arrays, custom

from . import call

__all__ = ["softmax_sample"]


def _call(
    logits: Any, numbers: Any, top_k: Any, own: Any, bias: Any, uniforms: Any, seeds: Any, seed: Any, *rest: Any
) -> list[Any]:
    offset, max_top_k, best, offsets = rest
    temperature, top_p, min_p = numbers
    filters = (temperature, top_k, top_p, min_p)
    given = [number if one is None else one for number, one in zip(filters, own, strict=True)]
    options = dict(zip((name for name, *_ in call.FILTERS), given, strict=True))
    options |= {"uniforms": uniforms, "seed": seed if seeds is None else seeds}
    options |= {"offset": offset if offsets is None else offsets}
    # Results of a custom operator are no views.
    return [
        array.contiguous()
        for array in call.softmax_sample(logits, **options, bias=bias, max_top_k=max_top_k, best=best)
    ]


def _batched(info: Any, in_dims: Any, *args: Any) -> Any:
    """Leading dimensions are the operator's own."""
    logits, numbers, top_k, own, bias, uniforms, seeds, *rest, offsets = args
    custom.unbatched("softmax_sample", in_dims[4:5], ("bias",))

    def rows(one: Any, dim: Any) -> Any:
        return None if one is None else custom.in_front(one, dim, info.batch_size)

    own_dims = in_dims[3] if in_dims[3] is not None else [None] * len(own)
    own = [rows(one, dim) for one, dim in zip(own, own_dims, strict=True)]
    dims = (in_dims[0], *in_dims[5:7], in_dims[11])
    logits, uniforms, seeds, offsets = (
        rows(one, dim) for one, dim in zip((logits, uniforms, seeds, offsets), dims, strict=True)
    )
    results = _OPERATOR(logits, numbers, top_k, own, bias, uniforms, seeds, *rest, offsets)
    return results, [0] * len(results)


_OPERATOR = custom.define(
    "softmax_sample(Tensor logits, float[] numbers, int? top_k, Tensor?[] own, Tensor? bias, Tensor? uniforms,"
    " Tensor? seeds, int? seed, int offset, int? max_top_k, int best, Tensor? offsets=None) -> Tensor[]",
    _call,
    _batched,
    custom.without_backward("logits"),
)


def _signed(value: Any) -> Any:
    """An integer as an int64: of larger ones the lower 64 bits."""
    return value if -(2**63) <= value < 2**63 else (value + 2**63) % 2**64 - 2**63


def softmax_sample(
    logits: Any,
    *,
    temperature: Any = 1.0,
    top_k: Any = None,
    top_p: Any = 1.0,
    min_p: Any = 0.0,
    bias: Any = None,
    uniforms: Any = None,
    seed: Any = None,
    offset: Any = 0,
    max_top_k: int | None = None,
    best: int = 0,
    out: Any = None,
) -> tuple[Any, ...]:
    """The public function, as it stands in a graph."""
    import torch

    if uniforms is not None and seed is not None:
        raise ValueError("uniforms: expected these or a seed, got both")
    if seed is None and (arrays.is_torch(offset) or offset != 0):
        raise ValueError("offset: comes with a seed, and there is none; pass seed= with it")
    if uniforms is None and seed is None:
        uniforms = torch.rand(logits.shape[:-1], device=logits.device)  # a graph draws anew
    filters = (temperature, top_k, top_p, min_p)
    own = [one if arrays.is_torch(one) else None for one in filters]
    # Of those that are arrays the numbers are not looked at.
    temperature, top_k, top_p, min_p = [1 if one is not None else given for one, given in zip(own, filters)]  # noqa: B905
    seeds, offsets = seed if arrays.is_torch(seed) else None, offset if arrays.is_torch(offset) else None
    results = _OPERATOR(
        logits,
        [float(temperature), float(top_p), float(min_p)],
        top_k,
        own,
        bias,
        uniforms,
        seeds,
        None if seeds is not None or seed is None else _signed(seed),
        0 if offsets is not None else _signed(offset),
        max_top_k,
        best,
        offsets,
    )
    if out is None:
        return tuple(results)
    return (*custom.written(tuple(results[:2]), out), *results[2:])
