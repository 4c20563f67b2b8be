"""Filtering and sampling in float64, by the plainest NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_sparse.operators.softmax_topk.reference import GREEDY, row_scales

if TYPE_CHECKING:
    import numpy as np

# The largest float32 below 1: uniform numbers are taken as no more.
BELOW_ONE = 1 - 2.0**-24


@dataclass(frozen=True)
class Filters:
    """What is asked for of each row, as float64 and int64 arrays `(rows,)`; kernels get float32 and int32."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray

    @property
    def greedy(self) -> np.ndarray:
        return ~(self.temperature >= GREEDY)

    @property
    def scale(self) -> np.ndarray:
        """The factors of the scores."""
        return row_scales(self.temperature)

    def limits(self, words: int) -> np.ndarray:
        """How many of the best words of each row count, of `words` in all, which a top_k of 0 or less leaves."""
        import numpy as np

        free = (self.top_k <= 0) | (self.top_k >= words)
        return np.where(self.greedy, 1, np.where(free, words, self.top_k))

    def free(self, words: int, vocab: int) -> np.ndarray:
        """Which rows have no top_k: their uniform number goes through what is left in the order of columns."""
        return self.limits(words) == vocab

    def rows(self, rows: np.ndarray) -> Filters:
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def kept(chances: np.ndarray, limits: np.ndarray, top_p: np.ndarray, min_p: np.ndarray) -> np.ndarray:
    """How many of the best words of each row are left, one at least; `chances (rows, n)` descend.

    None of chance 0 is left beside the best: no rounding of a draw can come to a word that is masked.
    """
    import numpy as np

    within = (np.arange(chances.shape[1]) < limits[:, None]) & (chances > 0)
    chances = np.where(within, chances, 0)
    total = np.cumsum(chances, axis=1)
    with np.errstate(invalid="ignore"):
        nucleus = (total - chances < top_p[:, None] * total[:, -1:]) | (top_p >= 1)[:, None]
        left = within & nucleus & (chances >= min_p[:, None] * chances[:, :1])
    # Of a row of NaN nothing is left, and of a top_p of 0, but the best.
    return np.maximum(left.sum(axis=1), 1)


def drawn(
    chances: np.ndarray, left: np.ndarray, uniform: np.ndarray, columns: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """The rank of the word that each row gets: the first whose cumulative chance exceeds uniform * that of all left.

    Words are gone through by rank, or in the order of `columns (rows, n)` where a row is `free`.
    """
    import numpy as np

    ranks = np.arange(chances.shape[1])
    within = ranks < left[:, None]
    order = np.argsort(np.where(within, np.where(free[:, None], columns, ranks), np.iinfo(np.int64).max), axis=1)
    total = np.cumsum(np.take_along_axis(np.where(within, chances, 0), order, axis=1), axis=1)
    mass = np.take_along_axis(total, left[:, None] - 1, axis=1)
    below = (total <= uniform[:, None] * mass) & within
    return np.take_along_axis(order, np.minimum(below.sum(axis=1), left - 1)[:, None], axis=1)[:, 0]


def possible(
    chances: np.ndarray,
    ranks: np.ndarray,
    filters: Filters,
    limits: np.ndarray,
    uniform: np.ndarray,
    slack: float,
    columns: np.ndarray,
    free: np.ndarray,
    apart: np.ndarray | None = None,
) -> np.ndarray:
    """Whether a kernel may have drawn the word of each rank, whose sums of chances are off by a share of `slack`.

    Both of its decisions are allowed for: how many words are left, and which of them is drawn. Words whose chances
    differ by a factor of no more than exp(apart) may be in either order, `apart (rows,)`, if it is given.
    """
    import numpy as np

    def cut(factor: float) -> np.ndarray:
        top_p = np.where(filters.top_p >= 1, filters.top_p, np.minimum(filters.top_p * factor, BELOW_ONE))
        return kept(chances, limits, top_p, filters.min_p / factor)

    fewest, most = cut(1 - slack), cut(1 + slack)
    total = np.cumsum(chances, axis=1)
    rows, counts = np.arange(len(chances)), np.arange(1, chances.shape[1] + 1)
    # The chances before the word, by how many words are left: of a free row those in columns before its own.
    before = np.where(ranks > 0, total[rows, ranks - 1], 0)[:, None]
    before = np.where(
        free[:, None], np.cumsum(np.where(columns < columns[rows, ranks][:, None], chances, 0), axis=1), before
    )
    after = before + chances[rows, ranks][:, None]
    if apart is not None:
        own, factor = chances[rows, ranks][:, None], np.exp(apart)[:, None]
        above, reached = chances > own * factor, chances * factor >= own
        before = np.where(free[:, None], before, np.where(above, chances, 0).sum(axis=1, keepdims=True))
        after = np.where(free[:, None], after, np.where(reached, chances, 0).sum(axis=1, keepdims=True))
        ranks = above.sum(axis=1)
    start = before - slack * total[:, -1:]
    end = after + slack * total[:, -1:]
    wanted = uniform[:, None] * total  # of each number of words that may be left
    fits = (counts >= fewest[:, None]) & (counts <= most[:, None]) & (counts > ranks[:, None])
    fits &= (chances[rows, ranks] > 0)[:, None]
    return (fits & (wanted >= start) & (wanted <= end)).any(axis=1)
