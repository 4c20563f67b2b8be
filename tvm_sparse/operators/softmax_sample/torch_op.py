"""`softmax_sample` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.runtime import arrays, custom

from . import call

__all__ = ["softmax_sample"]


def _call(
    logits: Any, numbers: Any, top_k: Any, own: Any, bias: Any, uniforms: Any, seeds: Any, seed: Any, *rest: Any
) -> list[Any]:
    offset, max_top_k, best = rest
    temperature, top_p, min_p = numbers
    filters = (temperature, top_k, top_p, min_p)
    given = [number if one is None else one for number, one in zip(filters, own, strict=True)]
    options = dict(zip((name for name, *_ in call.FILTERS), given, strict=True))
    options |= {"uniforms": uniforms, "seed": seed if seeds is None else seeds, "offset": offset}
    # Results of a custom operator are no views.
    return [
        array.contiguous()
        for array in call.softmax_sample(logits, **options, bias=bias, max_top_k=max_top_k, best=best)
    ]


def _batched(info: Any, in_dims: Any, *args: Any) -> Any:
    """Leading dimensions are the operator's own."""
    logits, numbers, top_k, own, bias, uniforms, seeds, *rest = args
    custom.unbatched("softmax_sample", in_dims[4:5], ("bias",))

    def rows(one: Any, dim: Any) -> Any:
        return None if one is None else custom.in_front(one, dim, info.batch_size)

    own_dims = in_dims[3] if in_dims[3] is not None else [None] * len(own)
    own = [rows(one, dim) for one, dim in zip(own, own_dims, strict=True)]
    logits, uniforms, seeds = (
        rows(one, dim) for one, dim in zip((logits, uniforms, seeds), (in_dims[0], *in_dims[5:7]), strict=True)
    )
    results = _OPERATOR(logits, numbers, top_k, own, bias, uniforms, seeds, *rest)
    return results, [0] * len(results)


_OPERATOR = custom.define(
    "softmax_sample(Tensor logits, float[] numbers, int? top_k, Tensor?[] own, Tensor? bias, Tensor? uniforms,"
    " Tensor? seeds, int? seed, int offset, int? max_top_k, int best) -> Tensor[]",
    _call,
    _batched,
    custom.without_backward("logits"),
)


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
    offset: int = 0,
    max_top_k: int | None = None,
    best: int = 0,
    out: Any = None,
) -> tuple[Any, ...]:
    """The public function, as it stands in a graph."""
    import torch

    if uniforms is not None and seed is not None:
        raise ValueError("uniforms: expected these or a seed, got both")
    if uniforms is None and seed is None:
        uniforms = torch.rand(logits.shape[:-1], device=logits.device)  # a graph draws anew
    filters = (temperature, top_k, top_p, min_p)
    own = [one if arrays.is_torch(one) else None for one in filters]
    # Of those that are arrays the numbers are not looked at.
    temperature, top_k, top_p, min_p = [1 if one is not None else given for one, given in zip(own, filters)]  # noqa: B905
    seeds = seed if arrays.is_torch(seed) else None
    results = _OPERATOR(
        logits,
        [float(temperature), float(top_p), float(min_p)],
        top_k,
        own,
        bias,
        uniforms,
        seeds,
        None if seeds is not None else seed,
        offset,
        max_top_k,
        best,
    )
    if out is None:
        return tuple(results)
    return (*custom.written(tuple(results[:2]), out), *results[2:])
