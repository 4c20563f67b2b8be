"""Compressed rows, of elements (CSR) or of blocks (BSR): the checks that a kernel cannot make."""

from __future__ import annotations

import numpy as np


def check_compressed(
    indptr: np.ndarray,
    indices: np.ndarray,
    stored: int,
    shape: tuple[int, int],
    *,
    item: str = "",
    stored_in: str,
) -> None:
    """Raise `ValueError` unless the arrays describe `stored` entries of a matrix of `shape` = (rows, columns).

    `indptr` must have rows + 1 entries, start at 0, never decrease, and end at `stored`; `indices` must have `stored`
    entries in [0, columns). In messages `item` is put before "rows" and "columns", and `stored_in` names the array that
    holds the entries.
    """
    rows, columns = shape
    prefix = f"{item} " if item else ""
    if indptr.ndim != 1 or len(indptr) != rows + 1:
        raise ValueError(f"indptr: expected {rows + 1} entries ({prefix}rows + 1), got shape {indptr.shape}")
    if indices.ndim != 1 or len(indices) != stored:
        raise ValueError(f"indices: expected {stored} entries (one a {stored_in}), got shape {indices.shape}")
    if indptr[0] != 0 or indptr[-1] != stored:
        raise ValueError(
            f"indptr: must start at 0 and end at {stored} (the number of entries), got {indptr[0]} and {indptr[-1]}"
        )
    falls = np.flatnonzero(indptr[1:] < indptr[:-1])
    if len(falls):
        row = int(falls[0])
        raise ValueError(
            f"indptr: must never fall, but indptr[{row + 1}]={indptr[row + 1]} < indptr[{row}]={indptr[row]}"
        )
    outside = np.flatnonzero((indices < 0) | (indices >= columns))
    if len(outside):
        at = int(outside[0])
        raise ValueError(f"indices: indices[{at}]={indices[at]} is outside [0, {columns}) ({prefix}columns)")
