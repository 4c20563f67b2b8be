"""The public call of the exact output layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tvm_sparse.core import registry
from tvm_sparse.core.libraries import library
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import FLOATS, numpy_dtype
from tvm_sparse.core.problem import width as rounded_up
from tvm_sparse.core.template import ceildiv
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.formats.quantized import STORED, QuantizedEmbedding
from tvm_sparse.operators.edit_logits.call import SOFT_CAP, soft_cap_of
from tvm_sparse.operators.softmax_topk import shards
from tvm_sparse.operators.softmax_topk.call import capped_floats, softmax_topk
from tvm_sparse.runtime import arrays, custom, repeat
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import (
    by_parts,
    check_floats,
    facts_beside,
    is_of_rows,
    launch,
    machine_of,
    outputs_for,
    refuse_gradient,
    run,
    scales_of,
    tensors_among,
    whole_number,
    with_scratch,
    without_gradient,
)
from tvm_sparse.runtime.dispatch import UNCHANGING, dispatcher
from tvm_sparse.runtime.signature import Absent, Array, Number, Output, Shard, Signature, Stored

from .problem import EIGHT, SIXTEEN, WHOLE_WORDS, HeadTopk, word_size
from .product import all_scores, rounded_scores, rows_at_once

SIGNATURES = {
    "head_topk": Signature(
        ("hidden", Array(("batch", "hidden"), FLOATS)),
        ("embedding", Array(("vocab", "hidden")), Stored(tuple(STORED))),
        ("k", Number("int", 1, "vocab")),
        ("log", Number("bool")),
        ("temperature", Number("float", 0.1, 3.0), Array(("batch",), ("float32",))),
        ("bias", Absent(), Array(("vocab",), ("float32",))),
        ("ids", Absent(), Array(("batch", "n"), ("int64", "int32"), below="vocab", negative=True)),
        ("allowed", Absent(), Array(("batch", "bitmap"), ("int32",))),
        ("normaliser", Number("bool")),
        ("constant", Number("bool")),
        ("rounded", Number("bool")),
        ("shard", Absent(), Shard()),
        ("soft_cap", Absent(), SOFT_CAP),
        outputs=(
            *(Output("values"), Output("indices"), Output("normaliser", asked="normaliser")),
            Output("given", asked="ids"),
        ),
    )
}
_SIGNATURE = SIGNATURES["head_topk"]

WHERE = "the hidden states are"
# The ways to the result: the kernel of this operator, or PyTorch's product followed by `softmax_topk`.
KERNEL, PRODUCT = "kernel", "product"
# Rows up to which the kernel is the faster way on an H200, used if there is no record. With more rows, hidden states
# take so many registers or so much shared memory that it does not reach the memory's speed.
FUSED_ROWS = SIXTEEN
# Rows up to which it is the faster way with products of warpgroups, in 16 bits: for any vocabulary; for a large one;
# and with given words, for which all scores have to be written.
GROUPED_ROWS, MANY_GROUPED_ROWS, ASKED_GROUPED_ROWS = 64, 128, 32
MANY_WORDS = 64 * 1024
# If rows of the embedding are not whole cache lines, it is not faster: 24 and 48 rows with (40000, 1000) in float16
# take 28.5 and 31.6 microseconds, product and `softmax_topk` 27.3 and 30.6.
CACHE_LINE = 128
# Rows up to which it is faster for an odd vocabulary, whose rows of logits are not aligned: at (50257, 768) in bfloat16
# the product of 64 rows takes 156 microseconds, the kernel 29.
ODD_GROUPED_ROWS = 512
# Bytes of hidden states, for eight or sixteen rows, that fit into a multiprocessor: of 16 bits into registers, and into
# registers and shared memory beside rings; and of either dtype into the shared memory of a thread block alone. If only
# eight rows fit, sixteen read all words twice: at (10, 128256, 8192) in bfloat16 that takes 954 microseconds, and the
# product 495.
REGISTER_BYTES, DIVIDED_BYTES, SHARED_BYTES = 128 * 1024, 256 * 1024, 200 * 1024
# Columns of float32 up to which a warp has whole rows of the embedding, and bytes of shared memory for the sums of
# warps that share wider rows.
ALONE_COLUMNS, SUMS_BYTES = 2048, 8192
# A kernel reads an embedding in eight bits for at most STORED_ROWS rows, sixteen of them at a time, and at most
# STORED_COLUMNS columns; of one above STORED_LARGE bytes at most PARTS_COLUMNS, if a thread block may have PARTS_SHARED
# bytes of shared memory (for eight rows 16,384 columns fit, which has not been timed). Otherwise the embedding is
# converted in parts, each read three times, for PyTorch's product. The kernel's WARPS divide the columns in steps of
# STEP, a cache line of 16-bit numbers, and each warp must have some; groups of columns with a scale of their own are
# whole steps.
STORED_ROWS, STORED_COLUMNS, WARPS, STEP = 48, 5120, 8, 64
STORED_LARGE, PARTS_COLUMNS, PARTS_SHARED = 40 * 2**20, 8192, 227 * 1024
# Vectors of which a hidden state must be a whole number, and the largest k, for kernels with tensor cores. Kernels
# without them take 2.5 times as long as the product at (1, 50257, 1001) in bfloat16, and 4.6 times with eight rows.
VECTOR_BYTES, FUSED_K = 16, 256


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
    out: tuple[Any, ...] | None = None,
) -> tuple[Any, ...]:
    """The k most probable words of softmax((hidden @ embedding.T + bias) / temperature, -1), without the logits.

    With s = hidden @ embedding.T + bias the result is `softmax_topk(s, k, ...)`: the output layer of a language model
    and the search for its best words, in one pass over the embedding. On a GPU the scores are not stored in memory; a
    small workspace in the L2 cache holds the part that a call needs.

    Parameters
    ----------
    hidden
        Shape `(batch, hidden)`; float32, float16 or bfloat16. Sums are accumulated in float32.
    embedding
        Shape `(vocab, hidden)`, one row for each word, of the dtype and on the device of `hidden`; `vocab` below 2^31.
        Or a `QuantizedEmbedding` (`quantize_embedding`) on that device, which stands for `embedding.dequantized()`:
        a row's score is the float32 sum of its stored values, times its scale, or of such products of groups.
    k
        1 <= k <= vocab.
    log, temperature, bias, ids
        As for `softmax_topk`: log-probabilities; the temperature, a number or `(batch,)` float32; `(vocab,)` float32
        added to every row, -inf masks a word; `(batch, n)` int64 (or int32, which is copied) words whose probabilities
        are also returned.
    allowed
        `(batch, ceil(vocab / 32))` int32, a bitmap of each row, as for `softmax_topk`: where bit `j % 32` of word
        `j // 32` is 0, word j of the vocabulary counts as -inf, whatever its score. Such a call writes float32 scores
        at every batch (see the notes).
    normaliser
        Also return log(sum_j exp(s[b, j] / temperature)), `(batch,)` float32.
    constant
        A promise that no kernel still running when this call's kernel starts writes the embedding, as for weights in
        inference. On a GPU with programmatic dependent launch the embedding is then read while the producer kernel
        still runs. The result is the same.
    rounded
        Where PyTorch's product is the faster way (see the notes), round its scores to the dtype of `hidden`, which
        takes less time. In 16 bits log-probabilities are then off by up to one nat in bfloat16, and NaN in float16 if
        scores exceed 65,504. Default: scores are float32 at every batch.
    shard
        `(offset, total)`: the embedding is a shard of that of a vocabulary of `total` words, whose first row is that of
        word `offset`. The result is a part for `merge_topk`, always with the normaliser. Rows beyond the vocabulary,
        `total - offset` and later, are padding, which is ignored and not read. `bias` and `allowed` are those of the
        shard's words. Not together with `log` or `ids`, nor for a quantised embedding.
    soft_cap
        The soft cap c of the model's final logits, a number above 0, as 30 for Gemma 2: s = c * tanh(s' / c) + bias for
        the scores s' = hidden @ embedding.T, in float32. Words with equal scores, as saturated ones have, are in
        ascending order.
    out
        Arrays to write into, in the number and order of the results.

    Returns
    -------
    values
        `(batch, k)` float32, descending.
    indices
        `(batch, k)` int64 words. Words with equal float32 scores are in ascending order, NaN first as in torch.topk;
        words whose scores differ by less than the rounding of a float32 sum may be in either order.
    normaliser, given
        If requested.

    Raises
    ------
    TypeError
        If an argument is not an array, is on an unsupported device, or `k` or `temperature` is not a number.
    ValueError
        For another rank, shape, dtype or device, k or temperature out of range, or an `out` that does not fit.
    RuntimeError
        If an argument requires a gradient.

    Notes
    -----
    With `shard` the result is `(values, indices, normaliser)`. The values are scores s, before the temperature, which
    `candidate_logits` sums for the k best words: equal rows of the embedding have equal scores in all shards for which
    its kernel is the same, as for shards of one size. The indices are words of the whole vocabulary. Both have
    min(k, n) columns for a shard with n words, and k may be up to `total`. The normaliser is that of the shard's words,
    -inf without a score above -inf.

    Rows whose float32 scores take more than 240 MB on a GPU, or 120 MB on a CPU, are processed in chunks, so that a
    call needs at most 256 MB beside its results.

    For torch tensors PyTorch's product, a chunk of rows at a time, followed by `softmax_topk` is used where that is
    faster: by the record of the problem (`tvm-sparse bench --record`), or, without one, on a GPU with more rows than
    the kernel reads the embedding once for (docs/limits.md has a table), with k above 256, and if a row is not a whole
    number of 16-byte vectors. Its scores are float32, too, unless `rounded`. `explain` says which way a call takes.

    With `allowed` float32 scores of a chunk of rows are written as well, at every batch, and `softmax_topk` reads them
    with the bitmap: by PyTorch's product, for up to 48 rows of a quantised embedding by the kernel that reads eight
    bits, for NumPy arrays by that of `candidate_logits`. docs/operators/head_topk.md has the times.

    When not to use it: if the logits are needed afterwards; if scores of single words of a row are biased or penalised
    (docs/operators/head_topk.md shows what to call).

    Source: Shi, Xu & Knight 2018, equations 1 and 2 (the full softmax that their head avoids); Milakov & Gimelshein
    2018, "Online normalizer calculation for softmax", Algorithm 4.
    """
    cap = None if soft_cap is None else soft_cap_of(soft_cap)
    if shard is not None:
        options: dict[str, Any] = {"temperature": temperature, "constant": constant, "rounded": bool(rounded)}
        options["soft_cap"] = cap
        return _part(hidden, embedding, k, shard, log, bias, ids, allowed, out, **options)
    scalars = (*scales_of(temperature), 1 if log else 0, 1 if constant else 0)
    own = is_of_rows(temperature)
    words, scales, stored = embedding, None, ""
    if isinstance(embedding, QuantizedEmbedding):
        words, scales, stored = embedding.octets, embedding.factors, embedding.stored
    elif type(embedding) is not type(hidden):
        embedding = words = without_gradient(embedding)
    if type(k) is int:
        what = ("head_topk", k, bool(normaliser), bool(rounded), stored)
        given: tuple[Any, ...] = (hidden, words, *scalars, cap, bias, ids, *by_groups(scales))
        given = given if allowed is None else (*given, allowed)
        found = repeat.again(dispatcher.launchers, what, given, out)
        if found is not None:
            return found

    if custom.transformed(hidden, words, bias, ids, allowed, scales, *tensors_among(temperature, soft_cap)):
        options = {"log": log, "temperature": temperature, "bias": bias, "ids": ids, "allowed": allowed}
        options |= {"normaliser": normaliser, "constant": constant, "rounded": bool(rounded), "soft_cap": soft_cap}
        return custom.module_of("head_topk").head_topk(hidden, embedding, k, out=out, **options)
    known, theirs = pair_facts(hidden, embedding)
    (batch, width), vocab = known.shape, theirs.shape[0]
    k = whole_number("k", k)
    if not 1 <= k <= vocab:
        raise ValueError(f"k: expected 1 <= k <= vocab ({vocab}), got {k}")
    beside = [
        None if one is None else _SIGNATURE.beside(name, one, known, WHERE, **axes_of(batch, vocab))
        for name, one in (("bias", bias), ("ids", ids), ("allowed", allowed), ("temperature", scalars[1]))
    ]
    n = beside[1][1].shape[1] if beside[1] is not None else 0
    sums = ("normaliser", (batch,), "float32")
    wanted: list[tuple[str, tuple[int, ...], str]] = [
        ("values", (batch, k), "float32"),
        ("indices", (batch, k), "int64"),
        *([sums] if normaliser else []),
        *([("given", (batch, n), "float32")] if ids is not None else []),
    ]
    outputs = outputs_for(out, tuple(wanted), hidden, known)
    others = {"bias": bias, "ids": ids, "allowed": allowed, "temperature": temperature}
    _SIGNATURE.refuse_overlap(out, hidden=hidden, embedding=words, **others)
    if arrays.is_fake(hidden):
        return tuple(outputs)
    if batch and not width:
        raise ValueError(f"hidden: expected at least one column, got shape {known.shape}")
    row, asked, bitmap, heats = (None if one is None else arrays.ready(one[0], one[2], one[1]) for one in beside)
    scalars = (scalars[0], heats, *scalars[2:])
    most = rows_at_once(vocab, width, known.device)
    if batch > most:
        options = {"log": log, "bias": row, "normaliser": normaliser}
        options |= {"constant": constant, "rounded": rounded, "soft_cap": soft_cap}

        def some(given: list[Any], into: list[Any]) -> None:
            part, ids, allowed, heat = given
            heat = heat if own else temperature
            head_topk(part, embedding, k, ids=ids, allowed=allowed, temperature=heat, out=tuple(into), **options)

        by_parts(some, batch, most, (hidden, asked, bitmap, heats), outputs)
    if not batch or batch > most:
        return out if out is not None else tuple(arrays.returned(array, hidden) for array in outputs)
    launchers, what = dispatcher.launchers, ("head_topk", k, bool(normaliser), bool(rounded), stored)
    # No kernel accepts an empty array.
    asked, written = (asked, outputs) if n or ids is None else (None, outputs[:-1])
    ready = arrays.ready("hidden", hidden, known), arrays.ready("embedding", words, theirs)
    if scales is not None:
        scales = arrays.ready("embedding (scales)", scales, arrays.facts("embedding (scales)", scales))
    arguments = (*ready, *scalars, cap, row, asked, *by_groups(scales))
    axes = (batch, vocab, width, k, known.dtype, int(bias is not None), n, stored, 0, 0, 0, groups_of(embedding))
    if allowed is not None:
        by_product = True
    else:
        by_product = arrays.is_torch(hidden) and arrays.is_torch(words) and way(axes, known) == PRODUCT
    if by_product:
        as_product = rounded and arrays.is_torch(hidden) and not stored
        optional = {"cap": cap, "bias": row, "ids": asked, "scales": scales, "allowed": bitmap}
        present = tuple(name for name, one in optional.items() if one is not None)
        function = _product(k, present, normaliser, as_product, stored)
        every = arguments if bitmap is None else (*arguments, bitmap)
        if arrays.is_torch(hidden):
            run(launchers, what, function, every, written)
        else:
            known_to_numpy = [one if isinstance(one, int | float) else shards.on_host("hidden", one) for one in every]
            into = [shards.on_host("out", one) for one in written]
            function(*[one for one in known_to_numpy if one is not None], *into)
    else:

        def around(kernel: Any) -> Any:
            if normaliser:
                return kernel
            [unshown] = outputs_for(None, (sums,), hidden, known)
            return with_scratch(kernel, unshown, len(written) - 2)

        problem, where = HeadTopk(*axes), machine_of("hidden", known)
        problem = replace(problem, per_row=int(own), capped=int(cap is not None))
        wider = replace(problem, k=rounded_up(k, vocab), ids=rounded_up(n))
        launch(dispatcher, problem, where, what, arguments, written, around=around, wider=wider)
    return out if out is not None else tuple(arrays.returned(array, hidden) for array in outputs)


def groups_of(embedding: Any) -> int:
    """Scales of a row of a quantised embedding, if it has several; else 0."""
    return embedding.groups if isinstance(embedding, QuantizedEmbedding) and embedding.groups > 1 else 0


def by_groups(factors: Any) -> tuple[Any, Any]:
    """Scales of rows, and scales of groups of columns: one is None."""
    return (factors, None) if factors is None or len(factors.shape) == 1 else (None, factors)


def axes_of(batch: int, vocab: int) -> dict[str, int]:
    """The axes of arrays beside hidden states."""
    return {"batch": batch, "vocab": vocab, "bitmap": bitmap_words(vocab)}


def _part(
    hidden: Any,
    embedding: Any,
    k: int,
    shard: Any,
    log: bool,
    bias: Any,
    ids: Any,
    allowed: Any,
    out: Any,
    **options: Any,
) -> tuple[Any, ...]:
    """`head_topk` with `shard`."""
    shards.refuse_beside(log, ids)
    _, heats = scales_of(options["temperature"])  # also checked for a shard of padding
    if type(embedding) is not type(hidden):
        embedding = without_gradient(embedding)
    numbers = tensors_among(options["temperature"], options["soft_cap"])
    if custom.transformed(hidden, embedding, bias, allowed, *numbers):
        options |= {"bias": bias, "allowed": allowed, "shard": shard}
        return custom.module_of("head_topk").head_topk(hidden, embedding, k, out=out, **options)
    known, theirs = pair_facts(hidden, embedding)
    beside = {"bias": bias, "allowed": allowed, "temperature": heats}
    for name, one in beside.items():
        if one is not None:
            _SIGNATURE.beside(name, one, known, WHERE, **axes_of(known.shape[0], theirs.shape[0]))
    _SIGNATURE.refuse_overlap(out, hidden=hidden, embedding=embedding, ids=ids, **beside)
    if isinstance(embedding, QuantizedEmbedding):
        raise ValueError("shard: not with a quantised embedding, of which no exact scores are made")
    given = {"hidden": hidden, "embedding": embedding, **beside}
    states, words, row, bitmap, heats = (shards.on_host(name, one) for name, one in given.items())
    if heats is not None:
        options["temperature"] = heats
    logits = registry.operators()["candidate_logits"].call.candidate_logits
    found = shards.part_of_head(head_topk, logits, states, words, k, shard, row, bitmap, **options)
    return shards.returned(found, out, hidden, known)


def best_and_scores(
    hidden: Any, embedding: QuantizedEmbedding, k: int, bias: Any = None, soft_cap: float | None = None
) -> tuple[Any, Any] | None:
    """The k best words of each row by a quantised embedding, `(batch, k)` int64, and the scores of all words,
    `(batch, vocab)` float32; None if no kernel that reads eight bits suits the problem.

    Torch tensors, as for `head_topk`, whose errors it raises.
    """
    given = (hidden, embedding.octets, 1.0, None, 1, 0, soft_cap, bias, None, *by_groups(embedding.factors))
    what = ("head_topk and scores", k, embedding.stored)
    if (found := repeat.again(dispatcher.launchers, what, given, None)) is not None:
        return found[1], found[-1]
    known, theirs = pair_facts(hidden, embedding)
    (batch, width), vocab = known.shape, theirs.shape[0]
    beside = None if bias is None else _SIGNATURE.beside("bias", bias, known, WHERE, vocab=vocab)
    problem = HeadTopk(batch, vocab, width, k, known.dtype, int(bias is not None), 0, embedding.stored, 1)
    problem = replace(problem, capped=int(soft_cap is not None), groups=groups_of(embedding))
    machine = machine_of("hidden", known)
    if likely_way(problem, machine) == PRODUCT:
        return None
    row = None if beside is None else arrays.ready(beside[0], beside[2], beside[1])
    layouts = zip(problem.kernel_outputs, problem.output_layouts(), strict=True)
    wanted = tuple((argument.name, shape, dtype) for argument, (shape, dtype) in layouts)
    outputs = outputs_for(None, wanted, hidden, known)
    ready = arrays.ready("hidden", hidden, known), arrays.ready("embedding", given[1], theirs)
    launch(dispatcher, problem, machine, what, (*ready, *given[2:7], row, *given[8:]), outputs)
    return outputs[1], outputs[-1]


def scores_of(hidden: Any, embedding: Any, bias: Any = None) -> Any:
    """`hidden @ embedding.T + bias` in float32 `(batch, vocab)`, of torch tensors or NumPy arrays.

    A quantised embedding is read in eight bits where a kernel does so, and converted in parts elsewhere.
    """
    octets = isinstance(embedding, QuantizedEmbedding) and arrays.is_torch(hidden)
    if octets and 0 < len(hidden) <= STORED_ROWS and not dispatcher.batch_invariant:
        found = best_and_scores(hidden, embedding, 1, bias)
        if found is not None:
            return found[1]
    scores = all_scores(hidden, embedding)
    return scores if bias is None else scores + bias


def way(axes: tuple[Any, ...], known: Facts) -> str:
    """The way of calls with torch tensors: the faster one by the record, or, without one, the one likely to be faster.

    It is stored beside launchers, since making a problem takes the host longer than the rest of a call. Temperatures of
    rows make no difference, and are not among the axes.
    """
    launchers, asked = dispatcher.launchers, ("head_topk by", known.device, *axes)
    found = launchers.get(asked)
    if found is None:
        problem, machine = HeadTopk(*axes), machine_of("hidden", known)
        found = launchers[asked] = dispatcher.way(problem, machine) or likely_way(problem, machine)
    return found


def told_way(problem: HeadTopk, machine: Machine) -> str:
    """For `explain`: the way of calls with torch tensors, and why."""
    recorded = dispatcher.way(problem, machine)
    why = "the record compares both" if recorded else "likely faster by rows, columns and words"
    why = UNCHANGING if dispatcher.batch_invariant else why
    if (recorded or likely_way(problem, machine)) == KERNEL:
        return f"the kernel: {why}"
    rows = rows_at_once(problem.vocab, problem.hidden, machine.device)
    return f"PyTorch's product with float32 scores and softmax_topk, up to {rows} rows at a time: {why}"


def likely_way(problem: HeadTopk, machine: Machine) -> str:
    """The way likely to be faster, for problems without a record, from rows, columns and words."""
    if machine.kind != "cuda" or dispatcher.batch_invariant:
        return KERNEL
    size = numpy_dtype(problem.dtype).itemsize
    if problem.hidden * word_size(problem) % VECTOR_BYTES or problem.k > FUSED_K:
        return PRODUCT
    if problem.stored:
        vectors = problem.hidden * 2 // VECTOR_BYTES
        every_warp = vectors > (WARPS - 1) * 8 * ceildiv(problem.hidden, WARPS * STEP)
        suits = machine.has_clusters and size == 2 and every_warp
        suits = suits and not (problem.logits and problem.vocab % WHOLE_WORDS)
        suits = suits and not (problem.groups and problem.hidden // problem.groups % STEP)
        rows = STORED_ROWS
        if problem.hidden > STORED_COLUMNS:
            room = machine.block_shared_bytes >= PARTS_SHARED and problem.vocab * problem.hidden > STORED_LARGE
            rows = STORED_ROWS if room and problem.hidden <= PARTS_COLUMNS else 0
        return KERNEL if suits and problem.batch <= rows else PRODUCT
    if machine.has_warpgroups and size == 2:
        return KERNEL if problem.batch <= grouped_rows(problem) else PRODUCT
    most = min(machine.block_shared_bytes, SHARED_BYTES)
    if size == 2:
        large = machine.has_clusters and machine.block_shared_bytes > SHARED_BYTES
        most = max(most, DIVIDED_BYTES if large else REGISTER_BYTES)
    rows = EIGHT if problem.batch <= EIGHT else FUSED_ROWS
    shared = rows * problem.hidden * size
    if size == 4 and rows == FUSED_ROWS and problem.hidden > ALONE_COLUMNS:
        shared += SUMS_BYTES
    return KERNEL if problem.batch <= rows and shared <= most else PRODUCT


def grouped_rows(problem: HeadTopk) -> int:
    """Rows up to which products of warpgroups are the faster way."""
    if problem.vocab % 2:
        return ODD_GROUPED_ROWS
    if problem.hidden * numpy_dtype(problem.dtype).itemsize % CACHE_LINE:
        return FUSED_ROWS
    if problem.ids:
        return ASKED_GROUPED_ROWS
    return MANY_GROUPED_ROWS if problem.vocab >= MANY_WORDS else GROUPED_ROWS


def _product(k: int, present: tuple[str, ...], normaliser: bool, rounded: bool, stored: str) -> Any:
    """The function that replaces the kernel where a product that writes scores, and `softmax_topk`, are faster, or
    where no kernel has a bitmap.

    `present`: which of the optional arguments cap, bias, ids, scales and allowed it gets.
    """
    multiply = rounded_scores if rounded else scores_of

    def call(hidden: Any, embedding: Any, scale: Any, log: int, constant: int, *rest: Any) -> None:
        given = iter(rest)
        optional = {name: next(given) for name in present}
        cap, bias, ids, allowed = (optional.get(name) for name in ("cap", "bias", "ids", "allowed"))
        if stored:
            embedding = QuantizedEmbedding.of_octets(embedding, optional["scales"], stored)
        values, indices, *others = given
        sums = others.pop(0) if normaliser else None
        logits = multiply(hidden, embedding)
        if cap is not None and (bias is not None or sums is not None or logits.dtype != values.dtype):
            # Scores that are rounded, too, are capped in float32.
            logits, cap = capped_floats(logits, cap, in_place=True), None
        temperature = scale if is_of_rows(scale) else 1.0 / scale
        written = (values, indices, *others)
        named = {"temperature": temperature, "bias": bias, "ids": ids, "allowed": allowed, "soft_cap": cap}
        named |= {"out": written}
        softmax_topk(logits, k, log=bool(log) or normaliser, **named)
        if sums is not None:
            best = indices[:, :1]
            top = arrays.converted("scores", shards.taken(logits, best), "float32")
            top = top if bias is None else top + bias[best]
            top = top if allowed is None else shards.masked(top, best, allowed)
            sums[...] = shards.normaliser_of(top[:, 0], values[:, 0], temperature)
            if not log:
                for array in (values, *others):
                    library(logits).exp(array, out=array)

    return call


def pair_facts(hidden: Any, embedding: Any) -> tuple[Facts, Facts]:
    """Facts of hidden states and an embedding, or of its bytes if it is quantised, checked against each other."""
    known = arrays.facts("hidden", hidden)
    check_floats("hidden", known, rank=2)
    refuse_gradient("hidden", hidden)
    words, dtype = embedding, known.dtype
    if isinstance(embedding, QuantizedEmbedding):
        words, dtype = embedding.octets, "uint8"
        facts_beside("embedding (scales)", embedding.scales, (None, None), "float32", known, WHERE)
        if arrays.is_torch(words) != arrays.is_torch(hidden):
            raise ValueError(f"embedding: expected arrays of the library of hidden, got {type(words).__name__}")
    _, theirs, _ = facts_beside("embedding", words, (None, known.shape[1]), dtype, known, WHERE)
    if theirs.shape[0] >= 2**31:
        raise ValueError(f"embedding: expected a vocab below 2^31, got {theirs.shape[0]}")
    return known, theirs
