"""The public call of sampling."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.edit_logits.call import SOFT_CAP, soft_cap_of
from tvm_sparse.operators.softmax_topk.call import capped_floats
from tvm_sparse.runtime import arrays, custom, repeat, whole_vectors
from tvm_sparse.runtime.calls import (
    by_parts,
    facts_beside,
    is_of_rows,
    logits_facts,
    machine_of,
    most_rows,
    outputs_for,
    passed,
    run,
    whole_number,
)
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.loading import Miss
from tvm_sparse.runtime.signature import FLOAT_ROWS, OF_ROWS, ROWS, Absent, Array, Number, Output, Signature

from . import seeds
from .problem import MAX_K, SoftmaxSample
from .problem import width_of_call as _width

SIGNATURES = {
    "softmax_sample": Signature(
        ("logits", FLOAT_ROWS),
        ("temperature", Number("float", 0.2, 3.0), OF_ROWS),
        ("top_k", Absent(), Number("int", 1, MAX_K), Array((ROWS,), ("int32",), below=MAX_K)),
        ("top_p", Number("float", 0.1, 1.0), OF_ROWS),
        ("min_p", Number("float", 0.0, 0.2), OF_ROWS),
        ("bias", Absent(), Array(("vocab",), ("float32",))),
        ("allowed", Absent(), Array((ROWS, "bitmap"), ("int32",))),
        ("uniforms", OF_ROWS, Absent()),
        ("seed", Absent(), Number("int", -(2**63), 2**63 - 1), Array((ROWS, 2), ("int64",))),
        ("offset", Number("int", 0, 2**63 - 1), Array((ROWS,), ("int64",))),
        ("max_top_k", Absent(), Number("int", 1, MAX_K)),
        ("best", Number("int", 0, "k")),
        ("soft_cap", Absent(), SOFT_CAP),
        outputs=(
            *(Output("tokens"), Output("logprobs")),
            *(Output("values", asked="best", given=False), Output("indices", asked="best", given=False)),
        ),
    )
}

# What is said of the arrays that uniform numbers are, or are made of, by `seeded`: name, dtype, extents of a row.
NUMBERS = {
    seeds.GIVEN: ("uniforms", "float32", ()),
    seeds.OF_ROWS: ("seed", "int64", (2,)),
    seeds.OF_CALL: ("", "", ()),
    seeds.OFFSETS: ("offset", "int64", ()),
}
LARGEST = 3.4e38  # as float32 has it
# What numbers may be, and what else arrays of them are; top_k is known by being the one of integers.
FILTERS = (
    ("temperature", "float32", lambda x: x >= 0, "a number of at least 0"),
    ("top_k", "int32", lambda x: True, "an integer, or None"),
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
    allowed: Any = None,
    uniforms: Any = None,
    seed: Any = None,
    offset: Any = 0,
    max_top_k: int | None = None,
    best: int = 0,
    soft_cap: float | None = None,
    out: tuple[Any, Any] | None = None,
) -> tuple[Any, ...]:
    """A word of each row of logits, drawn from what top-k, top-p and min-p leave of its softmax: a server's sampler.

    With p = softmax((logits + bias) / temperature), whose words w_1, w_2, ... descend, equals in the order of their
    columns, and S_i = p(w_1) + ... + p(w_i), what is left are the words w_i that meet all of

        i <= top_k,    S_(i-1) < top_p * S_(top_k),    p(w_i) >= min_p * p(w_1),

    which is a prefix w_1 ... w_n of them, never empty. Each word that is left comes with the share of its probability,
    by the row's uniform number u:

    - with a top_k the token is w_j with the least j for which S_j > u * S_n;
    - without one it is the first word in the order of columns up to which the words that are left have a probability
      above u * S_n.

    With arrays each row has its own kind. A token depends on the row's logits, filters and number alone. Devices and
    kernels round sums differently, by 1e-6 of the probability that is left: they give the same token unless u is that
    close to the bound between two words.

    With a top_k of at most 1024 that is one pass over the logits, at little more than what `softmax_topk` costs.
    Without one it is a pass that sums slices of the columns, and one more of a slice; min_p takes one more pass over
    the row, and top_p some more, from shared memory or the L2 cache.

    Parameters
    ----------
    logits
        Shape `(batch, vocab)`, or `(..., vocab)`, whose leading dimensions then stand in the place of `batch` below;
        float32, float16 or bfloat16, accumulated in float32. Otherwise as for `softmax_topk`.
    temperature
        A number of at least 0, or `(batch,)` float32. Below 1e-5 the row is greedy, as in vLLM: its token is w_1, and
        its log-probabilities are those at a temperature of 1. Infinity, and all above 2^90, is taken as 2^90: words
        that are left are equally likely, but for masked ones, at -1e30 or below, which are not drawn.
    top_k
        An integer, or `(batch,)` int32. 0 or less, as well as None in the place of a number, leaves all words. Numbers
        above 1024 and below vocab are exact, too, and take some passes more.
    top_p
        A number in (0, 1], or `(batch,)` float32; 1 leaves all words.
    min_p
        A number in [0, 1], or `(batch,)` float32.
        Filters are best all numbers or all arrays: of a mix, each number is written to an array first.
    bias
        `(vocab,)` float32, added to every row in float32; -inf masks a column.
    allowed
        `(batch, ceil(vocab / 32))` int32, a bitmap of each row: where bit `j % 32` of word `j // 32` is 0, the logit in
        column j counts as -inf, whatever it is. As xgrammar and vLLM fill them.
    uniforms
        `(batch,)` float32 numbers in [0, 1), of which u is one; others are taken as the nearest of these.
    seed, offset
        In the place of `uniforms`: u is made in the kernel by Philox4x32-10 under the key `seed` from the counter
        `offset`, a multiple of 2^-24. `seed` is an integer (of more than 64 bits the lower 64), then the row's number
        stands in the counter, too; or `(batch, 2)` int64 with the seed and the offset of each row: a row's tokens then
        do not depend on where in the batch it is. `offset` is an integer, or `(batch,)` int64 with one of each row;
        beside a seed array it is added to the offsets there. A CUDA graph draws anew when an array changes.
        Without a seed and without uniforms: on a GPU seed and offset are those of torch's generator of that device,
        which is moved on (a CUDA graph that is captured draws anew with each replay); on a CPU torch's generator draws
        a seed, so that `torch.manual_seed` tells the tokens. Arrays of other libraries get a seed of the operating
        system.
    max_top_k
        With an array `top_k`: how many of the best words a kernel keeps, 128 by default and at most 1024. Rows whose
        top_k is larger get their tokens as the others, but are read again for that.
    best
        How many of the best words are wanted beside the token: at most top_k, or max_top_k, or 128 if top_k is None or
        above 1024.
    soft_cap
        The soft cap c of the model's final logits, which become c * tanh(logits / c) in float32 before anything else,
        as for `softmax_topk`: a number above 0, as 30 for Gemma 2. Beside a `bias`, and in graphs of PyTorch, a capped
        copy is made first.
    out
        `(tokens, logprobs)` to write into: contiguous, on the device of `logits`.

    Returns
    -------
    tokens
        `(batch,)` int32, as vocabularies have fewer than 2^31 words.
    logprobs
        `(batch,)` float32: ln p(token), of the distribution after the temperature and before all filters.
    values, indices
        With `best` only: `(batch, best)` float32 log-probabilities as `logprobs`, and `(batch, best)` int64 words w_i.

    Raises
    ------
    TypeError
        If an argument is neither a number nor an array, or lies on another kind of device.
    ValueError
        For another shape, dtype or device, a number out of range, both `uniforms` and `seed`, an `offset` without a
        seed, or an `out` that does not fit. Values in arrays are not looked at: a temperature that is no number is
        greedy, a `top_p` of 0 or less leaves w_1.
    RuntimeError
        If `logits` requires a gradient: there is none of a token.

    Notes
    -----
    A row with NaN or +inf, or with nothing above -inf, has no distribution: its token is the first word in the order
    (NaN counts as the largest), and its log-probability NaN. A word at -inf is never drawn from another row.

    Penalties and biases of single words come before: `edit_logits`. Log-probabilities after the filters, the mass of
    what is left, and ranks: `sample_details`.

    When not to use it: for more than one token a row.

    Sources: Fan, Lewis & Dauphin 2018 (top-k); Holtzman et al. 2020 (top-p); Nguyen et al. 2024 (min-p); Salmon et al.
    2011 (Philox).
    """
    cap = None if soft_cap is None else soft_cap_of(soft_cap)
    best = best if type(best) is int else whole_number("best", best)
    max_top_k = max_top_k if max_top_k is None or type(max_top_k) is int else whole_number("max_top_k", max_top_k)
    filters = [temperature, top_k, top_p, min_p]
    own = [is_of_rows(one) for one in filters]
    filters = [one if array else _number(i, one) for i, (one, array) in enumerate(zip(filters, own, strict=True))]
    given = _filled(filters, own, logits)
    said = seeds.told(uniforms, seed, offset)
    tensors = [
        one
        for one, array in zip(filters, own, strict=True)
        if array or (type(one) is not float and type(one) is not int and arrays.unread(one))
    ]
    if cap is not None and arrays.unread(cap):
        tensors.append(cap)
    through = said is None and custom.transformed(logits, *tensors, bias, allowed)
    seeded, numbers = (seeds.GIVEN, ()) if through else said or seeds.fresh(logits)
    drawn = [one for one in numbers if hasattr(one, "__dlpack__")]
    # What a kernel depends on: numbers other than top_k are passed to it.
    what = ("softmax_sample", None if own[1] else filters[1], max_top_k, best, seeded)
    if cap is not None and bias is not None and not through:
        logits, cap, soft_cap = capped_floats(logits, cap), None, None
    if out is None and not through and type(best) is int:
        results = repeat.again(dispatcher.launchers, what, (logits, *given, cap, bias, allowed, *numbers), None)
        if results is not None:
            return tuple([*results[:2], *[array[:, :best] for array in results[2:] if best]])

    if through or custom.transformed(logits, *tensors, bias, allowed, *drawn):
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "bias": bias}
        options |= {"allowed": allowed, "uniforms": uniforms, "seed": seed, "offset": offset}
        options |= {"max_top_k": max_top_k, "best": best, "soft_cap": soft_cap, "out": out}
        return custom.module_of("softmax_sample").softmax_sample(logits, **options)
    known = logits_facts(logits)
    *leading, vocab = known.shape
    if not vocab:
        raise ValueError(f"logits: expected at least one word, got shape {known.shape}")
    symbols = arrays.is_fake(logits) and not (type(best) is int and (own[1] or type(filters[1]) is int))
    # A graph that was specialised to the kernel's width would be one of a few values of top_k alone.
    width, most, whole = (
        (best, best, False) if symbols else _width(None if own[1] else filters[1], max_top_k, vocab, best == 0)
    )
    if not symbols and not 0 <= best <= most:
        raise ValueError(f"best: expected at most the {most} words that top_k leaves, got {best}")
    batch, rows = math.prod(leading), tuple(leading)

    def by_row(name: str, array: Any, dtype: str, *rest: int) -> Any:
        """An array with something for each row, checked, as a kernel takes it."""
        return passed(facts_beside(name, array, (*rows, *rest), dtype, known), (batch, *rest))

    def checked(seeded: int, numbers: tuple[Any, ...]) -> list[Any]:
        """What a kernel is given for its uniform numbers."""
        name, dtype, rest = NUMBERS[seeded]
        known_numbers = [type(one) is int or arrays.is_symbol(one) for one in numbers]
        return [
            one if number else by_row(name, one, dtype, *rest)
            for one, number in zip(numbers, known_numbers, strict=True)
        ]

    passed_filters = [
        by_row(name, one, dtype)
        if is_of_rows(one)
        else arrays.argument(arrays.full((batch,), one, dtype, logits, known))
        if any(own)
        else one
        for (name, dtype, *_), one in zip(FILTERS, given, strict=True)
    ]
    words = bitmap_words(vocab)
    extras = [
        None if bias is None else passed(facts_beside("bias", bias, (vocab,), "float32", known)),
        None if allowed is None else by_row("allowed", allowed, "int32", words),
    ]
    passed_numbers = checked(seeded, numbers)
    wanted = (("tokens", rows, "int32"), ("logprobs", rows, "float32"))
    kept = (("values", (*rows, width), "float32"), ("indices", (*rows, width), "int64"))
    written = outputs_for(out, wanted, logits, known)
    SIGNATURES["softmax_sample"].refuse_overlap(
        out, logits=logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, bias=bias, allowed=allowed,
        uniforms=uniforms, seed=seed, offset=offset,
    )  # fmt: skip
    outputs = written + outputs_for(None, kept, logits, known)
    most_at_once = most_rows(vocab)
    copied = not arrays.is_fake(logits) and whole_vectors.wanted(known)
    if batch and (copied or (batch > most_at_once and not arrays.is_fake(logits))):
        if seeded in (seeds.OF_CALL, seeds.OFFSETS):  # the numbers of rows count
            numbers, seeded = (seeds.uniforms(seeded, numbers, rows, logits, known),), seeds.GIVEN
        names, masks = [name for name, *_ in FILTERS], () if allowed is None else (allowed,)
        by_rows = [arrays.reshaped(one, (batch, *one.shape[len(rows) :])) for one in (*masks, *tensors, numbers[0])]
        flat = [
            arrays.reshaped(array, (batch, *shape[len(rows) :]))
            for array, (_, shape, _) in zip(outputs, (*wanted, *kept), strict=True)
        ]

        def some(given: list[Any], into: list[Any]) -> None:
            part, *arrays_of_rows, drawn_numbers = given
            ones = iter(arrays_of_rows)
            mask, row = next(ones) if masks else None, bias
            if copied:
                part, row, mask = whole_vectors.copies(part, arrays.facts("logits", part), row, mask)
            options = {name: next(ones) if a else one for name, a, one in zip(names, own, filters, strict=True)}
            if copied and not own[1] and filters[1] >= vocab:
                options["top_k"] = None  # all words, which a copy has more of
            options |= {"uniforms" if seeded == seeds.GIVEN else "seed": drawn_numbers, "bias": row, "allowed": mask}
            options["soft_cap"] = cap
            found = softmax_sample(part, **options, max_top_k=max_top_k, best=best and most, out=(into[0], into[1]))
            for have, want in zip(into[2:], found[2:], strict=bool(best)):
                have[:, :most] = want

        by_parts(some, batch, most_at_once, (arrays.reshaped(logits, (batch, vocab)), *by_rows), flat)
    elif batch and not arrays.is_fake(logits):
        axes = {"bias": int(bias is not None), "per_row": int(any(own)), "seeded": seeded, "whole": int(whole)}
        axes |= {"allowed": int(allowed is not None), "capped": int(cap is not None)}
        problem = SoftmaxSample(batch, vocab, width, known.dtype, **axes)
        launchers = dispatcher.launchers  # before others take their place
        function, made = _kernel(problem, machine_of("logits", known))
        if made != seeded:
            passed_numbers = checked(made, (seeds.uniforms(seeded, numbers, rows, logits, known),))
        ready = arrays.ready("logits", logits, known)
        ready = ready if len(rows) == 1 else arrays.reshaped(ready, (batch, vocab))
        flat = [
            arrays.reshaped(array, (batch, *shape[len(rows) :]))
            for array, (_, shape, _) in zip(outputs, (*wanted, *kept), strict=True)
        ]
        arguments = (ready, *passed_filters, cap, *extras, *passed_numbers)
        run(launchers if made == seeded else None, what, function, arguments, flat)
    shown = [arrays.returned(array, logits) for array in outputs]
    return tuple([*(out or shown[:2]), *[array[..., :best] for array in shown[2:] if best]])


def _kernel(problem: SoftmaxSample, machine: Machine) -> tuple[Any, int]:
    """The kernel of a problem, and the `seeded` that it is for.

    Where there is no kernel that makes the uniform numbers of one seed, one that is given them does as well. That is
    remembered until other kernels are loaded, as looking in vain takes long.
    """
    given = dataclasses.replace(problem, seeded=seeds.GIVEN)
    if ("softmax_sample, given", problem) in dispatcher.launchers:
        return dispatcher.kernel(given, machine).function, seeds.GIVEN
    try:
        return dispatcher.kernel(problem, machine).function, problem.seeded
    except Miss as miss:
        if problem.seeded not in (seeds.OF_CALL, seeds.OFFSETS):
            raise
        try:
            found = dispatcher.kernel(given, machine).function
        except Miss:
            raise miss from None
        dispatcher.launchers["softmax_sample, given", problem] = True
        return found, seeds.GIVEN


# The numbers of a call that says nothing of them. Kernels that take arrays of filters are given kept ones of these.
NEUTRAL = (1.0, 0, 1.0, 0.0)


def _filled(filters: list[Any], own: list[bool], logits: Any) -> list[Any]:
    """The filters; where some are arrays beside a plain torch tensor, neutral numbers as arrays too."""
    if any(own) is all(own) or not arrays.is_torch(logits) or not repeat.is_plain(logits):
        return filters
    return [
        one if array or one != neutral else arrays.constant(logits.shape[:-1], neutral, dtype, logits)
        for (_, dtype, *_), one, array, neutral in zip(FILTERS, filters, own, NEUTRAL, strict=True)
    ]


def _number(which: int, value: Any) -> Any:
    """A filter that is one number for all rows, checked; a tensor whose value must not be read (`arrays.unread`) as it
    is.
    """
    name, dtype, fits, wanted = FILTERS[which]
    if value is None and name == "top_k":
        return 0
    if type(value) is not float and type(value) is not int and arrays.unread(value):
        return value
    try:
        if isinstance(value, bool):
            raise TypeError
        number: Any = whole_number(name, value) if dtype == "int32" else float(value)
    except (TypeError, ValueError, RuntimeError):
        what = "an integer" if dtype == "int32" else "a number"
        raise TypeError(
            f"{name}: expected {what} or an array with one for each row, got {type(value).__name__}"
        ) from None
    if dtype == "int32" and type(number) is not int:  # a symbol of a graph
        return number
    if not fits(number):
        raise ValueError(f"{name}: expected {wanted}, got {value!r}")
    return max(0, min(number, 2**31 - 1)) if dtype == "int32" else min(number, LARGEST)
