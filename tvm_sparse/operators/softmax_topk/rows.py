"""Rows of logits of different kinds, and columns whose probabilities are requested."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.formats.bitmap import BITS, bitmap_words, pack_bits

if TYPE_CHECKING:
    import numpy as np

KINDS = (
    "normal", "few finite", "nan", "infinities", "ascending", "descending", "constant", "padding", "peak", "equals",
    "zeros", "pairs",
)  # fmt: skip
# Columns around which a peak may lie: widths of vectors, warps and tiles.
BORDERS = (1, 4, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096)


def mixed(rng: np.random.Generator, x: np.ndarray, k: int, dtype: str) -> None:
    """Change normal rows `x` in place to rows of all kinds, in random order.

    `few finite`: all but up to 2k elements are -inf. `nan`: one to three NaN. `infinities`: one to three positive ones,
    and some negative ones. `ascending` and `descending` in columns, `constant`. `padding`: all equal to a number far
    below any logit, -1e30 or the least finite one. `peak`: one element far above the others, in the first or the last
    column or beside the border of a vector or a tile. `equals`: few different values. `zeros` of both signs. `pairs`:
    the two largest elements are equal and neighbours.
    """
    import ml_dtypes
    import numpy as np

    vocab = x.shape[1]
    least = float(ml_dtypes.finfo(numpy_dtype(dtype)).min)
    order = np.resize(rng.permutation(len(KINDS)), len(x))
    for row, kind in zip(x, (KINDS[i] for i in order), strict=True):
        some = rng.choice(vocab, min(vocab, int(rng.integers(1, 4))), replace=False)
        if kind == "few finite":
            kept = rng.choice(vocab, min(vocab, int(rng.integers(0, 2 * k + 1))), replace=False)
            finite = row[kept]
            row[:] = -np.inf
            row[kept] = finite
        elif kind == "nan":
            row[some] = np.nan
        elif kind == "infinities":
            row[rng.random(vocab) < 0.1] = -np.inf
            row[some] = np.inf
        elif kind == "ascending":
            row.sort()
        elif kind == "descending":
            row[:] = np.sort(row)[::-1]
        elif kind == "constant":
            row[:] = row[0]
        elif kind == "padding":
            row[:] = max(least, rng.choice([-1e30, least]))
        elif kind == "peak":
            border = int(rng.choice(BORDERS)) * int(rng.integers(1, 5)) + int(rng.integers(-1, 2))
            row[rng.choice([0, vocab - 1, border % vocab])] += 30
        elif kind == "equals":
            row[:] = np.round(row)
        elif kind == "zeros":
            row[:] = np.where(rng.random(vocab) < 0.5, np.float32(-0.0), np.float32(0.0))
        elif kind == "pairs" and vocab > 1:
            at = int(rng.integers(vocab - 1))
            row[at : at + 2] = 9


def bitmaps(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Bitmaps of allowed columns `(rows, ceil(vocab / 32))` int32: all, most, half or few columns of a row, or none.

    Bits beyond the vocabulary are random.
    """
    shares = rng.choice([1, 0.9, 0.5, 2 / vocab, 0], size=(rows, 1), p=[0.2, 0.3, 0.3, 0.15, 0.05])
    return pack_bits(rng.random((rows, bitmap_words(vocab) * BITS)) < shares)


def asked(rng: np.random.Generator, shape: tuple[int, ...], vocab: int) -> np.ndarray:
    """Columns, one in eight of which is outside of [0, vocab): directly beside it, or with a valid column in its low
    half.
    """
    import numpy as np

    ids = rng.integers(vocab, size=shape)
    far = [-1, vocab, -(2**63), 2**63 - 1, 2**31, -(2**31), -vocab]
    outside = np.where(rng.random(shape) < 0.5, rng.choice(far, size=shape), ids + rng.choice([-1, 1], shape) * 2**32)
    return np.where(rng.random(shape) < 0.125, outside, ids)


def temperatures(rng: np.random.Generator, rows: int, chosen: float, plain: bool) -> np.ndarray:
    """A temperature of each row, `(rows,)` float32: the chosen one, or, unless `plain`, in half of the rows another
    one, which may be greedy, infinite or no number.
    """
    import numpy as np

    others = np.array([0, 1e-6, 0.3, 1, 5, 2.0**100, np.inf, np.nan, -1], np.float32)
    own = rng.choice(others, rows)
    return np.where(plain | (rng.random(rows) < 0.5), np.float32(chosen), own).astype(np.float32)
