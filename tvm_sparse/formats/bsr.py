"""Block compressed sparse rows: random patterns, and the checks that a kernel cannot make."""

from __future__ import annotations

import numpy as np

from .compressed import check_compressed

# A block row is long if it exceeds both this multiple of the mean number of blocks and this number of bytes: one thread
# block reads a shorter row in less time than several need to join their sums (measured on an H200, at means of 10 and
# 20 KB).
LONG, LONG_BYTES = 1.5, 28 * 1024
# Rows of a block from which on like block rows are put beside each other, and the most multiplications of the
# comparison that finds them, which take some tenths of a second.
PAIRED_ROWS, MOST_COMPARED = 32, 2**31


def random_pattern(
    rng: np.random.Generator, nnzb: int, block_cols: int, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`indptr` and sorted `indices` (int32) of about `nnzb` weight blocks, whose block rows are drawn in proportion to
    `weights`.

    A row never holds a block twice, so rows fill up; further blocks go to rows with room and a weight above 0. Fewer
    than `nnzb` blocks result only if those rows are full.
    """
    counts = np.zeros(len(weights), np.int64)
    left = nnzb
    while left:
        room = np.where(counts < block_cols, weights, 0.0)
        if not room.any():
            break
        counts = np.minimum(counts + rng.multinomial(left, room / room.sum()), block_cols)
        left = nnzb - int(counts.sum())
    indices = [np.sort(rng.choice(block_cols, size=count, replace=False)) for count in counts]
    indptr = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return indptr, np.concatenate([*indices, []]).astype(np.int32)


def check_structure(indptr: np.ndarray, indices: np.ndarray, nnzb: int, grid: tuple[int, int]) -> None:
    """Raise `ValueError` unless the arrays describe a block-sparse matrix of `grid` = (block rows, block columns).

    `indptr` must have block rows + 1 entries, start at 0, never decrease, and end at `nnzb`; `indices` must have `nnzb`
    entries in [0, block columns).
    """
    check_compressed(indptr, indices, nnzb, grid, item="block", stored_in="block of data")


def fullest_first(indptr: np.ndarray, block_bytes: int) -> tuple[np.ndarray, int]:
    """The order in which a GPU processes block rows: the longest first, which several thread blocks share.

    Returns `order`, int32 of shape (block rows, 3), and the number of long block rows. Each row of `order` holds a
    block row, its first block and the one after its last; block rows with most blocks come first, and among equals the
    lower one.
    """
    counts = np.diff(indptr)
    rows = np.argsort(-counts, kind="stable")
    order = np.stack([rows, indptr[:-1][rows], indptr[1:][rows]], axis=1).astype(np.int32)
    most = max(LONG * counts.mean(), LONG_BYTES / block_bytes) if len(counts) else 0
    return order, int(np.count_nonzero(counts > most))


def like_beside(order: np.ndarray, long: int, indptr: np.ndarray, indices: np.ndarray, block_cols: int) -> np.ndarray:
    """The order of `fullest_first` with block rows in pairs after the long ones: the fullest that is left, and among
    the others that which shares the most block columns with it.

    A thread block with two block rows then reads x for both where they have the same columns. On random patterns x is
    read 4 to 16 % less often. Entries that do not fit a matrix are not looked at, as on a GPU nobody has checked them.
    """
    counts, count = np.diff(indptr), len(order)
    if (counts < 0).any() or indptr[-1] != len(indices) or count * count * block_cols > MOST_COMPARED:
        return order
    place = np.empty(count, np.int64)
    place[order[:, 0]] = np.arange(count)
    inside = (indices >= 0) & (indices < block_cols)
    stored = np.zeros((count, block_cols), np.float32)
    stored[np.repeat(place, counts)[inside], indices[inside]] = 1
    shared, left = stored @ stored.T, np.ones(count, bool)
    first = long + long % 2
    found, left[:first] = list(range(min(first, count))), False
    for one in range(first, count):
        if left[one]:
            left[one] = False
            found.append(one)
            if left.any():
                other = int(np.where(left, shared[one], -1).argmax())
                left[other] = False
                found.append(other)
    return np.ascontiguousarray(order[found])


def analysed(
    indptr: np.ndarray, indices: np.ndarray, block: tuple[int, int], block_cols: int, itemsize: int
) -> tuple[np.ndarray, int]:
    """What kernels know of a pattern: the order in which they process block rows, and the number of long ones."""
    order, long = fullest_first(indptr, block[0] * block[1] * itemsize)
    return (like_beside(order, long, indptr, indices, block_cols) if block[0] >= PAIRED_ROWS else order), long


def skew(indptr: np.ndarray) -> float:
    """Blocks in the fullest block row, divided by the mean plus one; 1 or less means balanced.

    The added one is for matrices with few blocks: 20 blocks drawn uniformly over 24 rows typically put 4 into one row.
    """
    counts = np.diff(indptr)
    return float(counts.max() / (counts.mean() + 1)) if counts.any() else 1.0
