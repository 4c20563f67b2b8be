"""`edit_logits` as a custom operator of PyTorch."""

from __future__ import annotations

from typing import Any

from tvm_sparse.runtime import custom

from . import call
from .penalties import PENALTIES

__all__ = ["edit_logits"]

_WORDS = ("bias_ids", "bias_values", "seen_ids", "generated")


def _call(logits: Any, numbers: Any, *rest: Any) -> Any:
    words, own, (soft_cap, cap) = rest[:4], rest[4:7], rest[7:]
    penalties = [
        number if tensor is None else custom.value_of(number, tensor) if not tensor.dim() else tensor
        for number, tensor in zip(numbers, own, strict=True)
    ]
    options = dict(zip(_WORDS, words, strict=True))
    options |= dict(zip((f"{name}_penalty" for name in PENALTIES), penalties, strict=True))
    return call.edit_logits(logits, soft_cap=custom.value_of(soft_cap, cap), **options)


def _batched(info: Any, in_dims: Any, *args: Any) -> Any:
    """Leading dimensions are the operator's own."""
    custom.unbatched("edit_logits", in_dims[10:], ("soft_cap",))
    given = list(args)
    given[0] = custom.in_front(args[0], in_dims[0], info.batch_size)
    for place in _OF_ROWS:
        if args[place] is not None:
            given[place] = custom.in_front(args[place], in_dims[place], info.batch_size)
    for place in _PENALTIES:
        given[place] = custom.of_rows_in_front(args[place], in_dims[place], given[0].shape[:-1])
    return _OPERATOR(*given), 0


# Where arguments stand that have words for each row, and the tensors of penalties.
_OF_ROWS, _PENALTIES = range(2, 6), range(6, 9)
# Tensors of penalties say what the numbers do not: one of each row, or one in all (`custom.number`).
_OPERATOR = custom.define(
    "edit_logits(Tensor logits, float[] numbers, Tensor? bias_ids=None, Tensor? bias_values=None,"
    " Tensor? seen_ids=None, Tensor? generated=None, Tensor? repetitions=None, Tensor? presences=None,"
    " Tensor? frequencies=None, float? soft_cap=None, Tensor? cap=None) -> Tensor",
    _call,
    _batched,
    custom.without_backward("logits"),
)


def edit_logits(
    logits: Any,
    *,
    bias_ids: Any = None,
    bias_values: Any = None,
    seen_ids: Any = None,
    generated: Any = None,
    repetition_penalty: Any = 1.0,
    presence_penalty: Any = 0.0,
    frequency_penalty: Any = 0.0,
    soft_cap: float | None = None,
    out: Any = None,
) -> Any:
    """The public function, as it stands in a graph."""
    given = [custom.number(one) for one in (repetition_penalty, presence_penalty, frequency_penalty)]
    numbers, own = [number for number, _ in given], [tensor for _, tensor in given]
    cap = (None, None) if soft_cap is None else custom.number(soft_cap)
    return custom.written(_OPERATOR(logits, numbers, bias_ids, bias_values, seen_ids, generated, *own, *cap), out)
