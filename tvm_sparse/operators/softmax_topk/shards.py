"""Results of a shard of a vocabulary, in the form in which they can be merged exactly: scores, words, normaliser.

The functions take torch tensors, or NumPy arrays alone, and consist of operations that torch.compile traces.
"""

from __future__ import annotations

import sys
from typing import Any

from tvm_sparse.runtime import arrays


def library(array: Any) -> Any:
    """PyTorch for a tensor, else NumPy."""
    if arrays.is_torch(array):
        return sys.modules["torch"]
    import numpy as np

    return np


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
    with space.errstate(invalid="ignore", over="ignore"):
        return space.logaddexp.reduce(normalisers.astype("float64"), axis=0).astype("float32")
