"""One result of the results of a vocabulary's shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.libraries import library
from ..operators.softmax_topk.shards import PART, in_order, joined
from ..runtime import arrays, custom
from ..runtime.calls import check_device, whole_number


def merge_topk(parts: Sequence[tuple[Any, Any, Any]], k: int) -> tuple[Any, Any, Any]:
    """The k best words of a vocabulary, of the results of its shards.

    values[b, i] is the i-th largest of all scores in row b, indices[b, i] its word, and
    normaliser[b] = log(sum_p exp(normaliser_p[b])) over the parts p.

    Probabilities are exp(values / temperature - normaliser[:, None]), with the temperature of the parts. Their relative
    error is about 1e-7 of the best score, since the normaliser is a float32 number of that size.

    Parameters
    ----------
    parts
        One `(values, indices, normaliser)` for each shard, as `head_topk` and `softmax_topk` return them with `shard`,
        or as this function does, in any order: float32 scores `(batch, n)` before the temperature; their words in the
        whole vocabulary `(batch, n)` int64, each in one part only; and `(batch,)` float32 logarithms of the sums of
        exponentials of the scores that the part stands for, with the temperature. n may differ between parts, and be 0.
        Any number of leading dimensions may replace `batch`. All are torch tensors of one device, or NumPy arrays or
        other DLPack arrays on the CPU.
    k
        1 <= k <= the sum of all n. The result is exact for a k up to the one with which the shards were searched, where
        a shard with fewer words returns them all.

    Returns
    -------
    values
        `(batch, k)` float32 scores, descending; NaN first, as in `softmax_topk`.
    indices
        `(batch, k)` int64 words. Equal scores are in the order of their words, whichever part they come from.
    normaliser
        `(batch,)` float32; NaN if that of a part is, -inf if all are. Summed in float64.

    Raises
    ------
    TypeError
        If `parts` is not a sequence of triples of arrays, or `k` is not an integer.
    ValueError
        For no parts, other shapes or dtypes, several devices or libraries, or k out of range.

    Notes
    -----
    The values are scores because these are comparable between shards. Probabilities of a shard are relative to its own
    normaliser, and float32 scores computed from them again have lost the last bits that decide order and ties.

    The result is a part itself: merging in a tree gives what merging at once does, but for the rounding of normalisers.
    In a graph of torch.compile it consists of operations of PyTorch.
    """
    if not isinstance(parts, Sequence) or not all(isinstance(one, Sequence) and len(one) == 3 for one in parts):
        raise TypeError("parts: expected a sequence of (values, indices, normaliser), one for each shard")
    if not parts:
        raise ValueError("parts: expected at least one")
    if custom.transformed(*(one for part in parts for one in part)):
        return merged(parts, k)
    facts = [
        [arrays.facts(f"parts[{i}] ({name})", one) for (name, _), one in zip(PART, part, strict=True)]
        for i, part in enumerate(parts)
    ]
    first, like = facts[0][0], parts[0][0]
    width = 0
    for i, (part, known) in enumerate(zip(parts, facts, strict=True)):
        shape = (*first.shape[:-1], *known[0].shape[-1:])
        for (name, dtype), one, fact, wanted in zip(PART, part, known, (shape, shape, shape[:-1]), strict=True):
            what = f"parts[{i}] ({name})"
            if not shape or fact.shape != wanted or fact.dtype != dtype:
                got = f"got {fact.shape} and {fact.dtype}"
                raise ValueError(f"{what}: expected shape {wanted} and dtype {dtype}, {got}")
            check_device(what, fact, first, "the values of the first part are")
            if arrays.is_torch(one) != arrays.is_torch(like):
                raise ValueError(f"{what}: expected arrays of one library, got {type(one).__name__}")
            if fact.device != "cpu" and not arrays.is_torch(one):
                raise ValueError(f"{what}: lies on a GPU and is no torch tensor; pass torch.from_dlpack(array)")
        width += shape[-1]
    k = whole_number("k", k)
    if not 1 <= k <= width:
        raise ValueError(f"k: expected 1 <= k <= the words of all parts ({width}), got {k}")
    if arrays.is_torch(like):
        return merged(parts, k)
    results = merged([tuple(map(arrays.as_numpy, part)) for part in parts], k)
    values, indices, normaliser = (arrays.returned(one, like) for one in results)
    return values, indices, normaliser


def merged(parts: Sequence[tuple[Any, Any, Any]], k: int) -> tuple[Any, Any, Any]:
    """`merge_topk` of torch tensors or NumPy arrays, unchecked."""
    values, indices, normalisers = zip(*parts)  # noqa: B905 (torch.compile)
    space = library(values[0])
    if arrays.is_torch(values[0]):
        best = in_order(space.cat(values, -1), space.cat(indices, -1), k)
    else:
        best = in_order(space.concatenate(values, -1), space.concatenate(indices, -1), k)
    return *best, joined(space.stack(normalisers))
