"""Softmax and top-k of scores in float64, by the plainest NumPy: the reference of every operator with a top-k."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_sparse.core import parts

if TYPE_CHECKING:
    import numpy as np

# Where rows have temperatures of their own: those below this one, and NaN, count as 1, as in vLLM for greedy rows.
GREEDY = 1e-5
# The least inverse temperature. Temperatures above 2^90 and infinity are taken as 2^90, where float32 exponentials of
# logits of any usual size are 1, and those of masks (-1e30 and less) still 0.
LEAST_SCALE = 2.0**-90


def row_scales(temperatures: np.ndarray) -> np.ndarray:
    """The factors of rows with these temperatures, in float64."""
    import numpy as np

    wide = np.asarray(temperatures, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(wide >= GREEDY, np.maximum(1.0 / wide, LEAST_SCALE), 1.0)


def soft_capped(scores: np.ndarray, cap: float) -> np.ndarray:
    """`cap * tanh(scores / cap)` of float64 scores; -inf stays."""
    import numpy as np

    return np.where(scores == -np.inf, scores, cap * np.tanh(scores / cap))


def best_and_asked(
    scores: np.ndarray, k: int, ids: np.ndarray | None, scale: float | np.ndarray, log: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """For scores `(rows, n)`: values and columns of the k best, the values of columns `ids`, and the normaliser.

    `scale` is one factor, or `(rows,)` temperatures.

    Returns
    -------
    outputs
        `(rows, k)` values, `(rows, k)` int64 columns, and with `ids` their values, NaN for one outside [0, n).
    normaliser
        `(rows,)` logarithms of the sums of exponentials.
    """
    import numpy as np

    best = ranked(scores, k)
    if ids is None:
        values, normaliser = normalised(scores, np.take_along_axis(scores, best, axis=1), scale, log)
        return [values, best], normaliser
    inside = (ids >= 0) & (ids < scores.shape[1])
    columns = np.concatenate([best, np.where(inside, ids, 0)], axis=1)
    values, normaliser = normalised(scores, np.take_along_axis(scores, columns, axis=1), scale, log)
    return [values[:, :k], best, np.where(inside, values[:, k:], np.nan)], normaliser


def ranked(scores: np.ndarray, k: int) -> np.ndarray:
    """Columns of the k best scores of each row: NaN first, as in torch.topk, then by value, then by column."""
    import numpy as np

    columns = np.empty((len(scores), k), np.int64)

    def rank(begin: int, end: int) -> None:
        for row in range(begin, end):
            key = np.where(np.isnan(scores[row]), -np.inf, -scores[row])
            # Only scores that reach the k-th need sorting.
            some = np.flatnonzero(key <= np.partition(key, k - 1)[k - 1])
            columns[row] = some[np.lexsort((some, key[some], ~np.isnan(scores[row, some])))[:k]]

    parts.of_rows(scores, rank)
    return columns


def normalised(
    scores: np.ndarray, chosen: np.ndarray, scale: float | np.ndarray, log: int
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax of scores `(rows, n)`: its values for the scores `chosen`, and the logarithm of its normaliser.

    `scale` is as in `best_and_asked`.
    """
    import numpy as np

    factor = row_scales(scale)[:, None] if isinstance(scale, np.ndarray) else float(np.float32(scale))
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        top = np.max(np.where(np.isnan(scores), -np.inf, scores), axis=1, keepdims=True)
        total = np.exp(factor * (scores - top)).sum(axis=1, keepdims=True)
        shifted = factor * (chosen - top)
        values = shifted - np.log(total) if log else np.exp(shifted) / total
        # If nothing is above -inf there is no distribution, but the sum of exponentials is 0.
        nothing = np.isneginf(scores).all(axis=1, keepdims=True)
        return values, np.where(nothing, -np.inf, np.log(total) + factor * top)[:, 0]


def same_ranks(scores: np.ndarray, wanted: np.ndarray, found: np.ndarray, slack: np.ndarray) -> np.ndarray:
    """`wanted` in the rows where the ranking `found` is as good, else `found`: at each rank the scores of both columns
    differ by no more than the row's `slack`, and no column is there twice.
    """
    import numpy as np

    found = np.asarray(found)
    inside = (found >= 0) & (found < scores.shape[1])
    have, want = (np.take_along_axis(scores, np.where(inside, c, 0), axis=1) for c in (found, wanted))
    with np.errstate(invalid="ignore"):
        close = (have == want) | (np.abs(have - want) <= slack[:, None]) | (np.isnan(have) & np.isnan(want))
    ordered = np.sort(found, axis=1)
    good = (close & inside).all(axis=1) & (ordered[:, 1:] != ordered[:, :-1]).all(axis=1)
    return np.where(good[:, None], wanted, found)
