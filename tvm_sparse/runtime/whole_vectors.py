"""Copies of logits whose rows are whole vectors, for `configure(batch_invariant=True)`.

Kernels on a GPU load a row in vectors of 16 bytes, and group its entries by their addresses. Where rows are not whole
vectors, a row's sums therefore depend on its place in the batch, in their last bits. In a copy they do not: columns of
-inf follow, which add nothing to a sum, come last in every order and are never drawn.
"""

from __future__ import annotations

import math
from typing import Any

from ..core.problem import numpy_dtype
from ..formats.bitmap import bitmap_words
from . import arrays
from .arrays import Facts
from .dispatch import dispatcher

VECTOR_BYTES = 16


def wanted(known: Facts) -> bool:
    """Whether a call with these logits has to take a copy."""
    return dispatcher.batch_invariant and known.device == "cuda" and ends_within_a_vector(known)


def ends_within_a_vector(known: Facts) -> bool:
    """Whether rows are not whole vectors."""
    return known.shape[-1] * numpy_dtype(known.dtype).itemsize % VECTOR_BYTES != 0


def copies(logits: Any, known: Facts, bias: Any = None, allowed: Any = None) -> tuple[Any, Any, Any]:
    """Copies of logits `(batch, vocab)` with more columns, and of the bias of the columns and the bitmap of allowed
    words, if there are any.

    Raises
    ------
    ValueError
        For arrays of a library that cannot be written.
    """
    if not (arrays.is_torch(logits) or arrays.is_numpy(logits) or arrays.is_cupy(logits)):
        raise ValueError(
            f"logits: with batch_invariant rows of a {type(logits).__name__} have to be whole vectors of {VECTOR_BYTES}"
            f" bytes, got {known.shape[-1]} of {known.dtype}; pass torch.from_dlpack(logits)"
        )
    batch, vocab = known.shape
    lanes = VECTOR_BYTES // numpy_dtype(known.dtype).itemsize
    columns = -(-vocab // lanes) * lanes

    def wider(array: Any, shape: tuple[int, ...], dtype: str, value: float) -> Any:
        made = arrays.full(shape, value, dtype, logits, known)
        made[..., : array.shape[-1]] = array
        return made

    return (
        wider(logits, (batch, columns), known.dtype, -math.inf),
        bias if bias is None else wider(bias, (columns,), "float32", 0.0),
        allowed if allowed is None else wider(allowed, (batch, bitmap_words(columns)), "int32", 0),
    )
