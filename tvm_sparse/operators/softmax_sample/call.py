"""The public call of sampling."""

from __future__ import annotations

import math
import operator
import sys
from typing import Any

from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import (
    facts_beside,
    launch,
    logits_facts,
    machine_of,
    outputs_for,
    passed,
)
from tvm_sparse.runtime.dispatch import dispatcher

from . import philox
from .problem import MAX_K, UNSAID, SoftmaxSample, width_of

# What numbers may be, and what else arrays of them are; top_k is known by being the one of integers.
FILTERS = (
    ("temperature", "float32", lambda x: 0 <= x < math.inf, "a finite number of at least 0"),
    ("top_k", "int32", lambda x: x >= 1, "an integer of at least 1, or None"),
    ("top_p", "float32", lambda x: 0 < x <= 1, "a number in (0, 1]"),
    ("min_p", "float32", lambda x: 0 <= x <= 1, "a number in [0, 1]"),
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
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, ...]:
    """A word of each row of logits, drawn from what top-k, top-p and min-p leave of its softmax: a server's sampler.

    With p = softmax((logits + bias) / temperature), whose words w_1, w_2, ... descend, equals in the order of their
    columns, and S_i = p(w_1) + ... + p(w_i), what is left are the words w_i that meet all of

        i <= top_k,    S_(i-1) < top_p * S_(top_k),    p(w_i) >= min_p * p(w_1),

    which is a prefix w_1 ... w_n of them, never empty. The token is w_j with the least j for which S_j > u * S_n, u
    being the row's uniform number: each word that is left comes with the share of its probability. One kernel, which
    gives the same token for the same inputs.

    With a top_k that is one pass over the logits, at little more than what `softmax_topk` costs. Without one it is as
    long as the token and the bounds of top-p and min-p are found among the 128 best words, as they are of peaked
    distributions. Rows of which that does not hold are read again, three to ten times, from the L2 cache.

    Parameters
    ----------
    logits
        Shape `(batch, vocab)`, or `(..., vocab)`, whose leading dimensions then stand in the place of `batch` below;
        float32, float16 or bfloat16, accumulated in float32. Otherwise as for `softmax_topk`.
    temperature
        A number of at least 0, or `(batch,)` float32. Below 1e-5 the row is greedy, as in vLLM: its token is w_1, and
        its log-probabilities are those at a temperature of 1.
    top_k
        A number from 1 to 1024, or one of at least vocab, or None, which leave all words; or `(batch,)` int32, where 0
        or less leaves all words.
    top_p
        A number in (0, 1], or `(batch,)` float32; 1 leaves all words.
    min_p
        A number in [0, 1], or `(batch,)` float32.
        Filters are best all numbers or all arrays: of a mix, each number is written to an array first.
    bias
        `(vocab,)` float32, added to every row in float32; -inf masks a column.
    uniforms
        `(batch,)` float32 numbers in [0, 1), of which u is one; others are taken as the nearest of these.
    seed, offset
        In the place of `uniforms`: u is made by Philox4x32-10 under the key `seed` from the counter `offset`, a
        multiple of 2^-24. `seed` is an integer, then the row's number stands in the counter, too, and u is made on the
        host; or `(batch, 2)` int64 with the seed and the offset of each row, which the kernel reads: a row's tokens
        then do not depend on where in the batch it is, and a CUDA graph draws anew when the array changes.
        Without any of the three, u comes from torch's or NumPy's own generator.
    max_top_k
        With an array `top_k`: the largest number below vocab that it has, 128 by default and at most 1024. Larger ones
        are taken as this one.
    best
        How many of the best words are wanted beside the token: at most top_k, or max_top_k, or 128 if top_k is None.
    out
        `(tokens, logprobs)` to write into: contiguous, on the device of `logits`.

    Returns
    -------
    tokens
        `(batch,)` int32.
    logprobs
        `(batch,)` float32: ln p(token), of the distribution after the temperature and before all filters.
    values, indices
        With `best` only: `(batch, best)` float32 log-probabilities as `logprobs`, and `(batch, best)` int64 words w_i.

    A row with NaN or +inf, or with nothing above -inf, has no distribution: its token is the first word in the order
    (NaN counts as the largest), and its log-probability NaN. A word at -inf is never drawn from another row.

    Raises
    ------
    TypeError
        If an argument is neither a number nor an array, or lies on another kind of device.
    ValueError
        For another shape, dtype or device, a number out of range, both `uniforms` and `seed`, or an `out` that does not
        fit. Values in arrays are not looked at: a temperature that is no number is greedy, a `top_p` of 0 or less
        leaves w_1.
    RuntimeError
        If `logits` requires a gradient: there is none of a token.

    When not to use it: for flat distributions without top_k, which torch.multinomial, or adding Gumbel noise to logits
    before their largest is taken, draw from faster; where scores are changed word by word of each row before
    (repetition penalties, grammars), which is a pass of its own; and for more than one token a row.

    Sources: Fan, Lewis & Dauphin 2018 (top-k); Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p); Salmon et al.
    2011 (Philox).
    """
    filters = [temperature, top_k, top_p, min_p]
    own = [type(one) not in (float, int) and bool(getattr(one, "shape", ())) for one in filters]
    filters = [one if array else _number(i, one) for i, (one, array) in enumerate(zip(filters, own, strict=True))]
    drawn = seed if uniforms is None else uniforms
    # What a kernel depends on: numbers other than top_k are passed to it.
    what = ("softmax_sample", None if own[1] else filters[1], max_top_k, best)
    if out is None and any(own) is all(own) and (uniforms is None or seed is None):
        results = repeat.again(dispatcher.launchers, what, (logits, *filters, bias, drawn), None)
        if results is not None:
            return tuple([*results[:2], *[array[:, :best] for array in results[2:] if best]])

    tensors = [one for one, array in zip(filters, own, strict=True) if array]
    if custom.transformed(logits, *tensors, bias, uniforms, None if isinstance(seed, int) else seed):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "bias": bias}
        options |= {"uniforms": uniforms, "seed": seed, "offset": offset}
        options |= {"max_top_k": max_top_k, "best": best, "out": out}
        return custom.module_of("softmax_sample").softmax_sample(logits, **options)
    known = logits_facts(logits)
    *leading, vocab = known.shape
    if not vocab:
        raise ValueError(f"logits: expected at least one word, got shape {known.shape}")
    if uniforms is not None and seed is not None:
        raise ValueError("uniforms: expected these or a seed, got both")
    width, most, whole = _width(None if own[1] else filters[1], max_top_k, vocab)
    if not 0 <= operator.index(best) <= most:
        raise ValueError(f"best: expected at most the {most} words that top_k leaves, got {best}")
    batch, rows = math.prod(leading), tuple(leading)

    def by_row(name: str, array: Any, dtype: str, *rest: int) -> Any:
        """An array with something for each row, checked, as a kernel takes it."""
        return passed(facts_beside(name, array, (*rows, *rest), dtype, known), (batch, *rest))

    passed_filters = [
        by_row(name, one, dtype) if array else one
        for (name, dtype, *_), one, array in zip(FILTERS, filters, own, strict=True)
    ]
    if any(own):
        passed_filters = [
            one if array else arrays.argument(arrays.full((batch,), one, dtype, logits, known))
            for (_, dtype, *_), one, array in zip(FILTERS, passed_filters, own, strict=True)
        ]
    extras = [] if bias is None else [passed(facts_beside("bias", bias, (vocab,), "float32", known))]
    seeded = uniforms is None and bool(getattr(seed, "shape", ()))
    if seeded:
        numbers = by_row("seed", seed, "int64", 2)
    else:
        made = _uniforms(seed, offset, rows, logits, known) if uniforms is None else uniforms
        numbers = by_row("uniforms", made, "float32")
    wanted = (("tokens", rows, "int32"), ("logprobs", rows, "float32"))
    kept = (("values", (*rows, width), "float32"), ("indices", (*rows, width), "int64"))
    outputs = outputs_for(out, wanted, logits, known) + outputs_for(None, kept, logits, known)
    if batch and not arrays.is_fake(logits):
        axes = {"bias": len(extras), "per_row": int(any(own)), "seeded": int(seeded), "whole": int(whole)}
        problem = SoftmaxSample(batch, vocab, width, known.dtype, **axes)
        ready = arrays.reshaped(arrays.ready("logits", logits, known), (batch, vocab))
        flat = [
            arrays.reshaped(array, (batch, *shape[len(rows) :]))
            for array, (_, shape, _) in zip(outputs, (*wanted, *kept), strict=True)
        ]
        arguments = (ready, *passed_filters, *(extras or [None]), numbers)
        launch(dispatcher, problem, machine_of("logits", known), what, arguments, flat)
    shown = [arrays.returned(array, logits) for array in outputs]
    return tuple([*(out or shown[:2]), *[array[..., :best] for array in shown[2:] if best]])


def _number(which: int, value: Any) -> Any:
    """A filter that is one number for all rows, checked."""
    name, dtype, fits, wanted = FILTERS[which]
    if value is None and name == "top_k":
        return 0
    try:
        if isinstance(value, bool):
            raise TypeError
        number: Any = operator.index(value) if dtype == "int32" else float(value)
    except (TypeError, ValueError, RuntimeError):
        what = "an integer" if dtype == "int32" else "a number"
        raise TypeError(
            f"{name}: expected {what} or an array with one for each row, got {type(value).__name__}"
        ) from None
    if not fits(number):
        raise ValueError(f"{name}: expected {wanted}, got {value!r}")
    return min(number, 2**31 - 1) if dtype == "int32" else number


def _width(top_k: int | None, max_top_k: int | None, vocab: int) -> tuple[int, int, bool]:
    """How many of the best words the kernel keeps, how many may be asked for, and whether it has to draw from all.

    `top_k` is None for an array, and 0 for none.
    """
    most = UNSAID
    if top_k is not None and max_top_k is not None:
        raise ValueError("max_top_k: comes with an array top_k, and top_k is none")
    if max_top_k is not None:
        most = operator.index(max_top_k)
        if not 1 <= most <= MAX_K:
            raise ValueError(f"max_top_k: expected 1 <= max_top_k <= {MAX_K}, got {max_top_k}")
    bounded = top_k is not None and 0 < top_k < vocab
    if bounded:
        most = top_k or 0
        if most > MAX_K:
            raise ValueError(f"top_k: expected at most {MAX_K}, or all {vocab} words, got {top_k}")
    width = width_of(most, vocab)
    return width, min(most, vocab), width < vocab and not bounded


def _uniforms(seed: Any, offset: int, rows: tuple[int, ...], like: Any, known: Facts) -> Any:
    """Uniform numbers of an integer seed, or of PyTorch's or NumPy's own generator, beside the logits."""
    import numpy as np

    torch = sys.modules.get("torch")
    if seed is None and torch is not None and arrays.is_torch(like):
        return torch.rand(rows, device=like.device)
    if seed is None:
        made = np.random.default_rng().random(rows, dtype=np.float32)
    else:
        try:
            key, at = (np.asarray([operator.index(one) % 2**64], np.uint64) for one in (seed, offset))
        except TypeError:
            raise TypeError(
                f"seed: expected an integer or an int64 array (batch, 2), got {type(seed).__name__}"
            ) from None
        made = philox.uniforms(key, at, np.arange(math.prod(rows))).reshape(rows)
    if torch is not None and arrays.is_torch(like):
        return torch.from_numpy(made).to(like.device)
    if known.device == "cuda":
        namespace = getattr(like, "__array_namespace__", lambda: None)()
        if namespace is None:
            raise TypeError(f"uniforms: {type(like).__name__} offers no way to make arrays on a GPU; pass them")
        return namespace.asarray(made, device=like.device)
    return made
