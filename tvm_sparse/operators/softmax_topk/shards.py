"""Results of a shard of a vocabulary, in the form in which they can be merged exactly: scores, words, normaliser.

The functions take torch tensors, or NumPy arrays alone, and consist of operations that torch.compile traces.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_sparse.core.libraries import library
from tvm_sparse.formats.bitmap import BITS, bitmap_words
from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.arrays import Facts
from tvm_sparse.runtime.calls import is_of_rows, outputs_for, whole_number

from .reference import GREEDY, LEAST_SCALE

# The arrays of a part.
PART = (("values", "float32"), ("indices", "int64"), ("normaliser", "float32"))


def taken(array: Any, places: Any) -> Any:
    """The entries of the last axis at `places`, an integer array with the other axes of `array`."""
    space = library(array)
    if arrays.is_torch(array):
        return space.take_along_dim(array, places, -1)
    return space.take_along_axis(array, places, -1)


def in_order(scores: Any, words: Any, k: int) -> tuple[Any, Any]:
    """The k best of float32 `scores` `(..., n)` and their int64 `words`: NaN first, then by score, then by word.

    0.0 and -0.0 are equal, as in the kernels.
    """
    space = library(scores)
    if not arrays.is_torch(scores):
        places = space.lexsort((words, -scores, ~space.isnan(scores)), axis=-1)[..., :k]
        return taken(scores, places), taken(words, places)
    by_word = space.argsort(words, dim=-1, stable=True)
    ordered = taken(scores, by_word)
    # Sorting floats on a GPU goes by their bits, in which zeros and NaN differ from each other: integers do not.
    bits = (ordered + 0.0).view(space.int32)
    keys = space.where(ordered.isnan(), 2**31 - 1, bits ^ ((bits >> 31) & (2**31 - 1)))
    places = taken(by_word, space.argsort(keys, dim=-1, descending=True, stable=True)[..., :k])
    return taken(scores, places), taken(words, places)


def joined(normalisers: Any) -> Any:
    """log(sum_i exp(normalisers[i])) in float32; NaN if one is NaN, -inf if all are."""
    space = library(normalisers)
    if arrays.is_torch(normalisers):
        return normalisers.double().logsumexp(0).float()
    return quietly(lambda: space.logaddexp.reduce(normalisers.astype("float64"), axis=0).astype("float32"), normalisers)


def within(shard: Any, vocab: int, k: Any) -> tuple[int, int, int]:
    """The first word of a shard of `vocab` words, how many of these belong to the vocabulary, and k, checked.

    The number is 0 or negative for a shard that consists of padding.
    """
    try:
        first, words = shard
    except (TypeError, ValueError):
        raise TypeError(f"shard: expected a pair (offset, total) of integers, got {shard!r}") from None
    offset, total = whole_number("shard (offset)", first), whole_number("shard (total)", words)
    if offset < 0 or total < 1:
        raise ValueError(f"shard: expected an offset of at least 0 and a total of at least 1, got {shard!r}")
    k = whole_number("k", k)
    if not 1 <= k <= total:
        raise ValueError(f"k: expected 1 <= k <= the total of shard ({total}), got {k}")
    return offset, min(vocab, total - offset), k


def refuse_beside(log: Any, ids: Any) -> None:
    """Raise ValueError for arguments that a call with `shard` does not take."""
    for name, given in (("log", bool(log)), ("ids", ids is not None)):
        if given:
            raise ValueError(f"{name}: not with shard, which returns scores; merge_topk says how to take probabilities")


def on_host(name: str, array: Any) -> Any:
    """Torch tensors unchanged, other arrays as NumPy's, without a copy; None stays None.

    Raises
    ------
    TypeError
        If NumPy does not take an array of another library.
    ValueError
        If an array of another library than PyTorch lies on a GPU.
    """
    if array is None or arrays.is_torch(array) or arrays.is_numpy(array):
        return array
    if arrays.facts(name, array).device != "cpu":
        raise ValueError(f"{name}: lies on a GPU and is no torch tensor; pass torch.from_dlpack(array)")
    try:
        return arrays.as_numpy(array)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{name}: NumPy does not take it by DLPack: {error}; pass torch.from_dlpack(array)") from None


def part_of_logits(
    call: Callable[..., Any], logits: Any, k: int, shard: Any, temperature: Any, bias: Any, allowed: Any
) -> tuple[Any, Any, Any]:
    """`softmax_topk` of a shard, by its `call` without one."""
    offset, held, k = within(shard, logits.shape[-1], k)
    if held <= 0:
        return _nothing(logits)
    if held < logits.shape[-1]:
        logits = logits[..., :held]
        bias = bias if bias is None else bias[:held]
        allowed = allowed if allowed is None else allowed[..., : bitmap_words(held)]
    values, words = call(logits, min(k, held), log=True, temperature=temperature, bias=bias, allowed=allowed)
    scores = arrays.converted("logits", taken(logits, words), "float32")
    if bias is not None:
        scores = quietly(lambda: scores + bias[words], scores)
    if allowed is not None:
        scores = masked(scores, words, allowed)
    return scores, words + offset, normaliser_of(scores[..., 0], values[..., 0], temperature)


def capped(scores: Any, cap: float) -> Any:
    """Scores after the soft cap; -inf stays."""
    space = library(scores)
    return quietly(lambda: space.where(scores == -space.inf, scores, cap * space.tanh(scores / cap)), scores)


def masked(scores: Any, words: Any, allowed: Any) -> Any:
    """The scores of int64 `words`, both `(..., n)`, -inf where the bitmap of a row does not allow the word."""
    space = library(scores)
    shifted = taken(allowed, words // BITS) >> arrays.converted("indices", words % BITS, "int32")
    return space.where((shifted & 1) != 0, scores, -space.inf)


def normaliser_of(best: Any, logprobs: Any, temperature: Any) -> Any:
    """The logarithm of each row's sum of exponentials, by which score and log-probability of its best word differ; -inf
    without a score above -inf.

    `temperature` is a number, or an array with one for each row.
    """
    space = library(best)

    def normaliser() -> Any:
        scale = 1.0 / temperature
        if is_of_rows(temperature):  # as in kernels
            hot = space.where(scale < LEAST_SCALE, LEAST_SCALE, scale)
            scale = arrays.converted("temperature", space.where(temperature >= GREEDY, hot, 1.0), "float32")
        return space.where(best == -space.inf, best, best * scale - logprobs)

    return quietly(normaliser, best)


def part_of_head(
    call: Callable[..., Any],
    candidate_logits: Callable[..., Any],
    hidden: Any,
    embedding: Any,
    k: int,
    shard: Any,
    bias: Any,
    allowed: Any,
    soft_cap: float | None,
    **options: Any,
) -> tuple[Any, Any, Any]:
    """`head_topk` of a shard, by its `call` without one.

    The best words' scores are multiplied again, because the head returns none: one kernel of `candidate_logits` sums
    equal rows of the embedding in the same order, so that their scores are equal in different shards.
    """
    offset, held, k = within(shard, embedding.shape[0], k)
    if held <= 0:
        return _nothing(hidden)
    if held < embedding.shape[0]:
        embedding = embedding[:held]
        bias = bias if bias is None else bias[:held]
        allowed = allowed if allowed is None else allowed[:, : bitmap_words(held)]
    k = min(k, held)
    named = {"log": True, "bias": bias, "allowed": allowed, "normaliser": True, "soft_cap": soft_cap}
    _, words, normaliser = call(hidden, embedding, k, **named, **options)
    scores = candidate_logits(hidden, embedding, words, bias=None if soft_cap is not None else bias)
    if soft_cap is not None:
        scores = capped(scores, soft_cap)
        scores = scores if bias is None else scores + bias[words]
    scores = scores if allowed is None else masked(scores, words, allowed)
    scores, words = in_order(scores, words, k)
    return scores, words + offset, normaliser


def returned(found: tuple[Any, Any, Any], out: Any, like: Any, known: Facts) -> tuple[Any, ...]:
    """The part as arrays of the library of `like`, or written into `out`."""
    if out is None:
        return tuple(arrays.returned(one, like) for one in found)
    wanted = tuple((name, tuple(one.shape), dtype) for (name, dtype), one in zip(PART, found, strict=True))
    for into, one in zip(outputs_for(out, wanted, like, known), found, strict=True):
        on_host("out", into)[...] = one
    return out


def quietly(compute: Callable[[], Any], like: Any) -> Any:
    """The result without NumPy's warnings about infinities, which are wanted here."""
    if arrays.is_torch(like):
        return compute()
    with library(like).errstate(invalid="ignore", over="ignore", divide="ignore"):
        return compute()


def _nothing(rows: Any) -> tuple[Any, Any, Any]:
    """The part of a shard without words, for arrays `(..., width)`."""
    space, shape = library(rows), rows.shape[:-1]
    where = {"device": rows.device} if arrays.is_torch(rows) else {}
    scores = space.zeros((*shape, 0), dtype=space.float32, **where)
    words = space.zeros((*shape, 0), dtype=space.int64, **where)
    return scores, words, space.full(shape, -space.inf, dtype=space.float32, **where)
