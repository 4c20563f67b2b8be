"""The public call of softmax + top-k."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from tvm_sparse.core.problem import width
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.edit_logits.call import SOFT_CAP, edit_logits, soft_cap_of
from tvm_sparse.runtime import arrays, custom, repeat, whole_vectors
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import (
    by_parts,
    by_rows,
    is_of_rows,
    launch,
    logits_facts,
    machine_of,
    most_rows,
    outputs_for,
    scales_of,
    tensors_among,
    whole_number,
)
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import FLOAT_ROWS, OF_ROWS, ROWS, Absent, Array, Number, Output, Shard, Signature

from . import shards
from .problem import SoftmaxTopk

SIGNATURES = {
    "softmax_topk": Signature(
        ("logits", FLOAT_ROWS),
        ("k", Number("int", 1, "vocab")),
        ("log", Number("bool")),
        ("temperature", Number("float", 0.1, 3.0), OF_ROWS),
        ("bias", Absent(), Array(("vocab",), ("float32",))),
        ("ids", Absent(), Array((ROWS, "n"), ("int64", "int32"), below="vocab", negative=True)),
        ("allowed", Absent(), Array((ROWS, "bitmap"), ("int32",))),
        ("shard", Absent(), Shard()),
        ("soft_cap", Absent(), SOFT_CAP),
        outputs=(
            *(Output("values"), Output("indices")),
            *(Output("given", asked="ids"), Output("normaliser", asked="shard")),
        ),
    )
}
_SIGNATURE = SIGNATURES["softmax_topk"]

# For the message: functions with a gradient.
INSTEAD = (
    "call it under torch.no_grad(), or take the entries at its indices of tvm_sparse.log_softmax(logits), which has one"
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
    out: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    """The k most probable entries of softmax((logits + bias) / temperature, -1), in one pass over the logits.

    values[b, i] = exp((y[b, z_i] - m_b) / temperature) / sum_j exp((y[b, j] - m_b) / temperature),

    with y = logits + bias, m_b = max_j y[b, j], and z_i the index of the i-th largest entry of row b of y.

    Parameters
    ----------
    logits
        Shape `(batch, vocab)`, or `(..., vocab)` with any number of leading dimensions, which then replace `batch`
        below as well; float32, float16 or bfloat16, accumulated in float32. `vocab` below 2^31. Arrays that are not
        contiguous, or not aligned to 16 bytes on a GPU, are copied first. Finite entries may have any size; on a GPU
        log-probabilities below -2e38 may be -inf.
    k
        1 <= k <= vocab.
    log
        Return log-probabilities instead of probabilities.
    temperature
        A number above 0 and finite; below 1 sharpens the distribution. Or `(batch,)` float32, one of each row, on the
        device of `logits`: there a temperature below 1e-5, or NaN, counts as 1, as for greedy rows of `softmax_sample`,
        and one above 2^90 as 2^90.
    bias
        `(vocab,)` float32, added to every row in float32; -inf masks a column. On the device of `logits`.
    ids
        `(batch, n)` int64, or int32, which is copied: columns whose probabilities are also returned, whatever their
        rank, for example the logprobs of sampled or given tokens; from the same pass. On the device of `logits`.
    allowed
        `(batch, ceil(vocab / 32))` int32, a bitmap of each row: where bit `j % 32` of word `j // 32` is 0, the entry in
        column j counts as -inf, whatever it is. As xgrammar and vLLM fill them. On the device of `logits`.
    shard
        `(offset, total)`: the logits are those of a shard of a vocabulary of `total` words, the first of which is
        `offset`. The result is a part for `merge_topk`. Columns beyond the vocabulary, `total - offset` and later, are
        padding, which is ignored; logits with padding are copied. `bias` and `allowed` belong to the shard's columns.
        Not together with `log` or `ids`.
    soft_cap
        The soft cap c of the model's final logits, which become c * tanh(logits / c) in float32 before anything else: a
        number above 0, as 30 for Gemma 2. -inf stays, as masked columns do. Kernels apply it where they load logits;
        beside a `bias` or with `shard` a capped copy is made first. Capped logits are rounded to float32: equal ones,
        as those of saturated columns, are in the order of their indices, and columns whose capped logits differ by less
        than 2^-20 of the cap may be in either order.
    out
        `(values, indices)`, with `ids` `(values, indices, given)`, with `shard` `(values, indices, normaliser)`, to
        write into: contiguous, of the shapes and dtypes below, on the device of `logits`.

    Returns
    -------
    values
        `(batch, k)` float32, descending.
    indices
        `(batch, k)` int64 columns. Equal entries are in the order of their indices, so the result is deterministic. NaN
        counts as the largest, as in torch.topk; all values of a row with NaN or +inf, or with nothing above -inf, are
        NaN, as in torch.softmax.
    given
        With `ids` only: `(batch, n)` float32, the probabilities (with `log` their logarithms) of these columns; NaN for
        a column outside [0, vocab).
    normaliser
        With `shard` only: `(batch,)` float32, log(sum_j exp(y[b, j] / temperature)) over the shard. Then `values` are
        the scores y, exact float32 sums before the temperature; `indices` are words of the whole vocabulary, offset and
        more; and both have min(k, n) columns for a shard with n words, so that k may be up to `total`. Without a word
        above -inf the normaliser is -inf.

    Raises
    ------
    TypeError
        If an argument is not an array, is on an unsupported device, or `k` or `temperature` is not a number.
    ValueError
        For a 0-d array, another shape, dtype or device, k or temperature out of range, vocab of 2^31 or more, or an
        `out` that does not fit.
    RuntimeError
        If `logits` or `bias` requires a gradient: there is no backward pass. Call it under `torch.no_grad()`; for a
        gradient gather from `softmax` or `log_softmax` at the indices.

    Notes
    -----
    When not to use it: if the whole distribution is needed afterwards.

    Source: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 4.
    """
    cap = None if soft_cap is None else soft_cap_of(soft_cap)
    if cap is not None and (bias is not None or shard is not None):
        options = {"log": log, "temperature": temperature, "bias": bias, "ids": ids, "allowed": allowed}
        return softmax_topk(capped_floats(logits, cap), k, shard=shard, out=out, **options)
    scales = scales_of(temperature)
    if shard is not None:
        return _part(logits, k, shard, log, temperature, bias, ids, allowed, out)
    arguments = (logits, *scales, 1 if log else 0, cap, bias, allowed, ids)
    if type(k) is int:
        found = repeat.again(dispatcher.launchers, ("softmax_topk", k), arguments, out)
        if found is not None:
            return found

    own = is_of_rows(temperature)
    if custom.transformed(logits, bias, allowed, ids, *tensors_among(temperature, soft_cap)):
        options = {"log": log, "temperature": temperature, "bias": bias, "ids": ids, "allowed": allowed}
        return custom.module_of("softmax_topk").softmax_topk(logits, k, out=out, soft_cap=soft_cap, **options)
    known = logits_facts(logits, INSTEAD)
    k = whole_number("k", k)
    vocab = known.shape[-1]
    if not 1 <= k <= vocab:
        raise ValueError(f"k: expected 1 <= k <= vocab ({vocab}), got {k}")
    if len(known.shape) != 2:
        return _by_rows(logits, known, k, ids, allowed, temperature, out, {"log": log, "bias": bias, "soft_cap": cap})
    batch = known.shape[0]
    beside = [
        None if one is None else _SIGNATURE.beside(name, one, known, vocab=vocab, bitmap=bitmap_words(vocab))
        for name, one in (("bias", bias), ("allowed", allowed), ("ids", ids), ("temperature", scales[1]))
    ]
    n = beside[2][1].shape[1] if beside[2] is not None else 0
    wanted = [("values", (batch, k), "float32"), ("indices", (batch, k), "int64")]
    if ids is not None:
        wanted.append(("given", (batch, n), "float32"))
    outputs = outputs_for(out, tuple(wanted), logits, known)
    _SIGNATURE.refuse_overlap(out, logits=logits, bias=bias, ids=ids, allowed=allowed, temperature=temperature)
    if arrays.is_fake(logits):
        return tuple(outputs)
    row, bitmap, asked, heats = (None if one is None else arrays.ready(one[0], one[2], one[1]) for one in beside)
    temperature = heats if own else temperature
    most = most_rows(vocab)
    if batch > most:

        def some(given: list[Any], into: list[Any]) -> None:
            part, *extras, heat = given
            options = dict(zip(("ids", "allowed"), extras, strict=True)) | {"log": log, "bias": row, "soft_cap": cap}
            softmax_topk(part, k, temperature=heat if own else temperature, out=tuple(into), **options)

        by_parts(some, batch, most, (logits, asked, bitmap, heats), outputs)
    elif batch and whole_vectors.wanted(known):
        logits_copy, row, bitmap = whole_vectors.copies(logits, known, row, bitmap)
        options = {"log": log, "temperature": temperature, "bias": row, "allowed": bitmap, "soft_cap": cap}
        if asked is not None and n:
            options["ids"] = asked * (asked < vocab) - 1 * (asked >= vocab)  # -1 names no column
        softmax_topk(logits_copy, k, out=tuple(outputs if n else outputs[:2]), **options)
    elif batch:
        axes = {"bias": int(bias is not None), "ids": n, "allowed": int(allowed is not None), "per_row": int(own)}
        axes["capped"] = int(cap is not None)
        problem = SoftmaxTopk(batch, vocab, k, known.dtype, **axes)
        ready = arrays.ready("logits", logits, known)
        arguments = (ready, scales[0], heats, 1 if log else 0, cap, row, bitmap, asked if n else None)
        written = outputs if n else outputs[:2]  # no kernel accepts an empty array
        wider = replace(problem, k=width(k, vocab), ids=width(n))
        launch(dispatcher, problem, machine_of("logits", known), ("softmax_topk", k), arguments, written, wider=wider)
    return out if out is not None else tuple(arrays.returned(array, logits) for array in outputs)


def capped_floats(logits: Any, cap: float, in_place: bool = False) -> Any:
    """The logits after the soft cap, in float32: a copy, unless they are float32 and may be overwritten."""
    given = shards.on_host("logits", logits)
    wide = arrays.converted("logits", given, "float32")
    return edit_logits(wide, soft_cap=cap, out=wide if in_place or wide is not given else None)


def _by_rows(
    logits: Any, known: Facts, k: int, ids: Any, allowed: Any, temperature: Any, out: Any, options: dict[str, Any]
) -> tuple[Any, ...]:
    """`softmax_topk` for logits with other than two dimensions."""
    leading = known.shape[:-1]
    wanted: list[tuple[str, tuple[int, ...], str]] = [("values", (k,), "float32"), ("indices", (k,), "int64")]
    if ids is not None:
        _, theirs, ids = _SIGNATURE.beside("ids", ids, known)
        ids = arrays.reshaped(ids, (math.prod(leading), theirs.shape[-1]))
        wanted.append(("given", theirs.shape[-1:], "float32"))
    if allowed is not None:
        words = bitmap_words(known.shape[-1])
        _, _, allowed = _SIGNATURE.beside("allowed", allowed, known, bitmap=words)
        allowed = arrays.reshaped(allowed, (math.prod(leading), words))
    if is_of_rows(temperature):
        _, _, temperature = _SIGNATURE.beside("temperature", temperature, known)
        temperature = arrays.reshaped(temperature, (math.prod(leading),))
    options |= {"ids": ids, "allowed": allowed, "temperature": temperature}

    def call(rows: Any, given: list[Any] | None) -> tuple[Any, ...]:
        return softmax_topk(rows, k, out=tuple(given) if given else None, **options)

    results = by_rows(call, logits, known, out, tuple(wanted))
    return out if out is not None else tuple(results)


def _part(
    logits: Any, k: int, shard: Any, log: bool, temperature: Any, bias: Any, ids: Any, allowed: Any, out: Any
) -> tuple[Any, ...]:
    """`softmax_topk` with `shard`."""
    shards.refuse_beside(log, ids)
    own = is_of_rows(temperature)
    if custom.transformed(logits, bias, allowed, *tensors_among(temperature)):
        options = {"temperature": temperature, "bias": bias, "allowed": allowed, "shard": shard}
        return custom.module_of("softmax_topk").softmax_topk(logits, k, out=out, **options)
    known = logits_facts(logits, INSTEAD)
    vocab = known.shape[-1]
    beside = (("bias", bias), ("allowed", allowed), ("temperature", temperature if own else None))
    for name, one in beside:
        if one is not None:
            _SIGNATURE.beside(name, one, known, vocab=vocab, bitmap=bitmap_words(vocab))
    _SIGNATURE.refuse_overlap(out, logits=logits, bias=bias, ids=ids, allowed=allowed, temperature=temperature)
    rows, row, bitmap, heats = (shards.on_host(name, one) for name, one in (("logits", logits), *beside))
    found = shards.part_of_logits(softmax_topk, rows, k, shard, heats if own else temperature, row, bitmap)
    return shards.returned(found, out, logits, known)
