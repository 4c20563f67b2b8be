"""The public call of edits of logits."""

from __future__ import annotations

import math
from typing import Any

from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import (
    by_parts,
    logits_facts,
    machine_of,
    most_rows,
    outputs_for,
    run,
    tensors_among,
)
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import FLOAT_ROWS, ROWS, Absent, Array, Number, Output, Signature

from .penalties import PENALTIES
from .problem import EditLogits, places

_WORDS = Array((ROWS, "n"), ("int32", "int64"), below="vocab", negative=True)
_OF_ROWS = Array((ROWS,), ("float32",))
SOFT_CAP = Number("float", 0.5, 50.0)
SIGNATURES = {
    "edit_logits": Signature(
        ("logits", FLOAT_ROWS),
        ("bias_ids", Absent(), _WORDS),
        ("bias_values", Absent(), Array((ROWS, "n"), ("float32",))),
        ("seen_ids", Absent(), _WORDS),
        ("generated", Absent(), Array((ROWS, "n"), ("int32", "int64"))),
        ("repetition_penalty", Number("float", 0.5, 2.0), _OF_ROWS),
        ("presence_penalty", Number("float", -2.0, 2.0), _OF_ROWS),
        ("frequency_penalty", Number("float", -2.0, 2.0), _OF_ROWS),
        ("soft_cap", Absent(), SOFT_CAP),
        outputs=(Output("edited"),),
    )
}
_SIGNATURE = SIGNATURES["edit_logits"]
LARGEST = 3.4e38  # as float32 has it
IN_PLACE = ("edit_logits", "in place")


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
    """Biases and penalties of few words of each row, before `softmax_sample`, `softmax_topk` or anything else.

    First x[b, w] = logits[b, w] + bias_values[b, i] for the words w = bias_ids[b, i]. Then, for w = seen_ids[b, i] with
    the count c = generated[b, i],

        y[b, w] = (x[b, w] / repetition if x[b, w] > 0 else x[b, w] * repetition)
                  - frequency * c - presence * (c > 0).

    All other words keep their logits. With a `soft_cap` c all logits are replaced by c * tanh(logits / c) before.

    With `out=logits` the named words are changed where they are, and nothing else is read or written: one short kernel,
    whatever the vocabulary. Without it all logits are copied first. A soft cap reads and writes all logits in any case.

    Parameters
    ----------
    logits
        Shape `(batch, vocab)`, or `(..., vocab)`, whose leading dimensions then replace `batch` below; float32, float16
        or bfloat16.
    bias_ids, bias_values
        `(batch, m)` int32 words and float32 numbers; -inf forbids a word. Spare places of a row have -1, or any other
        number outside of [0, vocab).
    seen_ids
        `(batch, n)` int32 words that the penalties concern, prompt and output; spare places as in `bias_ids`.
        In either array a word stands at most once in a row: of several places one counts, on a GPU any of them. int64
        words are copied.
    generated
        `(batch, n)` int32: how often each of `seen_ids` was generated, 0 for a word of the prompt alone. By default 1.
    repetition_penalty
        A number above 0, or `(batch,)` float32; 1 changes nothing.
    presence_penalty, frequency_penalty
        Numbers, or `(batch,)` float32; 0 changes nothing. The penalties are best all numbers or all arrays: of a mix,
        each number is written to an array first.
    soft_cap
        The soft cap of the model's final logits, a number above 0, as 30 for Gemma 2; None for a model without one.
        In float32, rounded to the dtype of `logits`. Infinity becomes the cap; -inf stays, as a mask.
    out
        `logits` itself, for edits in place, or another array of its shape and dtype to write into: contiguous, on the
        same device.

    Returns
    -------
    edited
        `(batch, vocab)` of the dtype of `logits`, or `out`. A word on both lists is rounded to that dtype in between, a
        word with a bias or penalty after the soft cap, too.

    Raises
    ------
    TypeError
        If an argument is neither an array nor, for penalties, a number.
    ValueError
        For another shape, dtype or device, a penalty that is not finite, a repetition penalty or soft cap of 0 or less,
        `bias_values` without `bias_ids` or the reverse, `generated` without `seen_ids`, an `out` that does not fit, or
        logits to edit in place that are not contiguous, or not aligned to 16 bytes on a GPU. Values in arrays are not
        looked at.
    RuntimeError
        If `logits` requires a gradient: there is none.

    Notes
    -----
    The order is that of vLLM: biases, repetition, frequency, presence; then temperature and filters. `transformers` has
    the first two in this order. In both a soft cap is part of the model, before all edits, as here.

    Log-probabilities of edited logits are those after the penalties. Call `softmax_topk` before this for others.

    In a graph of torch.compile `out=logits` is a copy that is written back.

    Source: Keskar et al. 2019, "CTRL", section 4.1 (repetition).
    """
    given = [repetition_penalty, presence_penalty, frequency_penalty]
    own = [type(one) not in (float, int) and bool(getattr(one, "shape", ())) for one in given]
    penalties = [
        one if array else _number(f"{name}_penalty", one)
        for name, one, array in zip(PENALTIES, given, own, strict=True)
    ]
    plain = seen_ids is not None and (generated is None or any(own) is not all(own))  # arrays are made for the kernel
    cap = None if soft_cap is None else soft_cap_of(soft_cap)
    words = (bias_ids, bias_values, seen_ids, generated, *(penalties if seen_ids is not None else (None,) * 3), cap)
    if not plain:
        if out is logits:
            if repeat.again(dispatcher.launchers, IN_PLACE, (logits, 0, *words, logits), ()) is not None:
                return out
        else:
            found = repeat.again(dispatcher.launchers, "edit_logits", (logits, 1, *words), out)
            if found is not None:
                return found

    tensors = tensors_among(*given, soft_cap)
    options = {"bias_ids": bias_ids, "bias_values": bias_values, "seen_ids": seen_ids, "generated": generated}
    options |= dict(zip((f"{name}_penalty" for name in PENALTIES), given, strict=True))
    if custom.transformed(logits, bias_ids, bias_values, seen_ids, generated, *tensors):
        return custom.module_of("edit_logits").edit_logits(logits, out=out, soft_cap=soft_cap, **options)
    known = logits_facts(logits)
    *leading, vocab = known.shape
    rows, batch = tuple(leading), math.prod(leading)
    if (bias_ids is None) != (bias_values is None):
        there, missing = ("bias_ids", "bias_values") if bias_values is None else ("bias_values", "bias_ids")
        raise ValueError(f"{missing}: expected an array beside {there}, got None")
    if seen_ids is None and generated is not None:
        raise ValueError("generated: counts the words of seen_ids, which is None; pass seen_ids= with it")

    def beside(name: str, array: Any, shape: tuple[Any, ...] = ()) -> tuple[Any, Facts]:
        """An array of the rows, checked, and with two dimensions, or one."""
        extents = {} if not shape else {"n": shape[-1]}
        _, found, array = _SIGNATURE.beside(name, array, known, vocab=vocab, **extents)
        array = arrays.ready(name, array, found)
        return (array if len(rows) == 1 else arrays.reshaped(array, (batch, *found.shape[len(rows) :]))), found

    kernel: list[Any] = [None] * 7 + [cap]
    seen = biased = 0
    if bias_ids is not None:
        kernel[0], facts = beside("bias_ids", bias_ids)
        biased = facts.shape[-1]
        kernel[1], _ = beside("bias_values", bias_values, facts.shape)
    if seen_ids is not None:
        kernel[2], facts = beside("seen_ids", seen_ids)
        seen = facts.shape[-1]
        if generated is not None:
            kernel[3], _ = beside("generated", generated, facts.shape)
        elif not arrays.is_fake(logits):
            kernel[3] = arrays.argument(arrays.full((batch, seen), 1, "int32", logits, known))
    for place, (name, one, array) in enumerate(zip(PENALTIES, penalties, own, strict=True)):
        if array:
            one, _ = beside(f"{name}_penalty", one)
        elif any(own) and seen_ids is not None and not arrays.is_fake(logits):
            one = arrays.argument(arrays.full((batch,), one, "float32", logits, known))
        kernel[4 + place] = one
    in_place = out is logits
    _SIGNATURE.refuse_overlap(out, **options, logits=None if in_place else logits)
    [result] = outputs_for(out, (("out", known.shape, known.dtype),), logits, known)
    if arrays.is_fake(logits):
        return result
    most = most_rows(vocab)
    if batch > most:
        flat = arrays.reshaped(result, (batch, vocab))
        if not in_place:
            flat[...] = arrays.reshaped(logits, (batch, vocab))

        def some(part: list[Any], into: list[Any]) -> None:
            some_words = dict(zip(("bias_ids", "bias_values", "seen_ids", "generated"), part, strict=False))
            some_words |= dict(zip((f"{name}_penalty" for name in PENALTIES), part[4:], strict=True))
            some_words |= {
                f"{name}_penalty": one for name, one in zip(PENALTIES, penalties, strict=True) if not any(own)
            }
            edit_logits(into[0], out=into[0], soft_cap=cap, **some_words)

        by_parts(some, batch, most, kernel[:4] + (kernel[4:7] if any(own) else [None] * 3), (flat,))
    elif batch and vocab:
        # No kernel accepts an empty array.
        kernel[:2] = kernel[:2] if biased else (None, None)
        kernel[2:7] = kernel[2:7] if seen else (None,) * 5
        flags = {"bias": int(biased > 0), "penalties": int(seen > 0), "per_row": int(any(own) and seen > 0)}
        flags["capped"] = int(cap is not None)
        problem = EditLogits(batch, vocab, places(max(seen, biased)), known.dtype, **flags)
        launchers = dispatcher.launchers  # before others take their place
        function = dispatcher.kernel(problem, machine_of("logits", known)).function
        kept = None if plain or (seen == 0) != (seen_ids is None) or (biased == 0) != (bias_ids is None) else launchers
        ready = result if in_place else arrays.ready("logits", logits, known)
        ready, flat = (one if len(rows) == 1 else arrays.reshaped(one, (batch, vocab)) for one in (ready, result))
        if in_place:
            run(kept, IN_PLACE, function, (ready, 0, *kernel, flat), ())
        else:
            run(kept, "edit_logits", function, (ready, 1, *kernel), (flat,), single=True)
    return out if out is not None else arrays.returned(result, logits)


def soft_cap_of(value: Any) -> Any:
    """A soft cap, checked, as by `_number`."""
    return _number("soft_cap", value)


def _number(name: str, value: Any) -> Any:
    """A penalty or soft cap that is one number for all rows, checked; a tensor whose value must not be read
    (`arrays.unread`) as it is.
    """
    if arrays.unread(value):
        return value
    try:
        if isinstance(value, bool | str):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(
            f"{name}: expected a number{'' if name == 'soft_cap' else ' or an array with one for each row'},"
            f" got {type(value).__name__}"
        ) from None
    above_zero = name in ("repetition_penalty", "soft_cap")
    if not abs(number) < LARGEST or (above_zero and not number > 1e-37):
        raise ValueError(f"{name}: expected a finite number{' above 0' if above_zero else ''}, got {value!r}")
    return number
