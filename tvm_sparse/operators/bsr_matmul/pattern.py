"""Problems with the pattern of a block-sparse matrix: axes and extents that the product and its gradient share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import Problem, ProblemError, require_dtype, require_positive

if TYPE_CHECKING:
    import random
    from typing import Any

    import numpy as np

PATTERNS = ("uniform", "skewed")

# Error of a float32 sum relative to the sum of absolute products: rounding errors of terms added in any order grow like
# the square root of their number; 64 half-units leave a wide margin at 16,384 terms.
SUMMATION = 64 * 2.0**-24


@dataclass(frozen=True)
class BlockSparse(Problem):
    """A problem with `m` rows of dense matrices and a block-sparse matrix of `n` rows and `k` columns.

    `block` is `rows`x`columns` of a block. `sparsity` is the share of zero blocks, to two decimals; `pattern` is the
    distribution of the others: `uniform` over the matrix, or `skewed` (Zipf over block rows).
    """

    m: int
    k: int
    n: int
    block: str
    sparsity: float
    pattern: str = "uniform"
    dtype: str = "float32"

    batch_axis: ClassVar[str] = "m"
    data_axes: ClassVar[tuple[str, ...]] = ("sparsity", "pattern")
    counted: ClassVar[tuple[str, ...]] = ("nnzb",)

    def __post_init__(self) -> None:
        require_positive(self, "m", "k", "n")
        require_dtype(self)
        high, _, wide = str(self.block).partition("x")
        try:
            rows, cols = int(high), int(wide or high)
        except ValueError:
            rows = cols = 0
        name = self.operator
        if rows < 1 or cols < 1:
            raise ProblemError(f"{name}: block must be like 16 or 16x32 (rows x columns), got {self.block!r}")
        for axis, extent, size in (("n", self.n, rows), ("k", self.k, cols)):
            if extent % size:
                raise ProblemError(f"{name}: block {rows}x{cols} does not divide {axis}={extent}")
        if not 0 <= self.sparsity <= 1:
            raise ProblemError(f"{name}: sparsity must lie in [0, 1], got {self.sparsity}")
        if self.pattern not in PATTERNS:
            raise ProblemError(f"{name}: pattern must be one of {', '.join(PATTERNS)}, got {self.pattern!r}")
        if max(self.m * self.k, self.m * self.n, self.n * self.k) >= 2**31:
            raise ProblemError(f"{name}: each matrix must have fewer than 2^31 elements")
        object.__setattr__(self, "block", f"{rows}x{cols}")
        object.__setattr__(self, "sparsity", round(float(self.sparsity), 2))

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        high, wide = rng.choice((1, 4, 8, 16, 16, 32, 32, 64, 128)), rng.choice((8, 16, 32, 64))
        wide = high if distribution.flag(rng, 0.8) else wide
        return {
            "m": distribution.batch(rng),
            "k": distribution.whole(rng, 128, 1 << 14, 128),
            "n": distribution.whole(rng, 128, 1 << 14, 128),
            "block": f"{high}x{wide}",
            "sparsity": round(rng.uniform(0.5, 0.98), 2),
            "pattern": "skewed" if distribution.flag(rng, 0.2) else "uniform",
            "dtype": distribution.dtype(rng),
        }

    @property
    def block_shape(self) -> tuple[int, int]:
        rows, _, cols = self.block.partition("x")
        return int(rows), int(cols)

    @property
    def grid(self) -> tuple[int, int]:
        """Number of block rows and of block columns of the matrix."""
        rows, cols = self.block_shape
        return self.n // rows, self.k // cols

    @property
    def nnzb(self) -> int:
        block_rows, block_cols = self.grid
        return round((1 - self.sparsity) * block_rows * block_cols)

    def extent(self, name: str | int) -> int:
        """Beside the axes: extents of the matrix's blocks."""
        (block_rows, _), (rows, cols) = self.grid, self.block_shape
        known = {
            "nnzb": self.nnzb,
            "block_rows": rows,
            "block_cols": cols,
            "n / block_rows": block_rows,
            "n / block_rows + 1": block_rows + 1,
        }
        return known[str(name)] if name in known else super().extent(name)

    def distance(self, other: Problem) -> float | None:
        """As `Problem.distance`, but with the density instead of the sparsity, and a step between patterns.

        Further axes, such as bias and activation, do not count: they cost very little, and decisions do not depend on
        them.
        """
        if type(other) is not type(self) or not isinstance(other, BlockSparse):
            return None
        if (self.dtype, self.block) != (other.dtype, other.block):
            return None
        mine, theirs = ((p.m, p.k, p.n, 1.005 - p.sparsity) for p in (self, other))
        octaves = sum(abs(math.log2(a / b)) for a, b in zip(mine, theirs, strict=True))
        return octaves + (self.pattern != other.pattern)

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """The problem with about as many blocks, none, or half to twice as many."""
        density = rng.choice([0.0, 1.0, 1.0, 2 ** rng.uniform(-1, 1)]) * (1 - self.sparsity)
        pattern = PATTERNS[rng.integers(len(PATTERNS))]
        return replace(self, sparsity=round(1 - min(1.0, float(density)), 2), pattern=pattern)

    def row_weights(self, rng: np.random.Generator, weights: np.ndarray) -> np.ndarray:
        """The weights by which blocks are distributed over block rows, according to `pattern`."""
        import numpy as np

        return weights if self.pattern == "uniform" else weights / rng.permutation(np.arange(1, len(weights) + 1))


def shuffle_columns(rng: np.random.Generator, indptr: Sequence[int] | np.ndarray, indices: np.ndarray) -> None:
    """Put the columns of each block row into random order, in place, and repeat some of them."""
    for start, stop in zip(indptr, indptr[1:], strict=False):
        rng.shuffle(indices[start:stop])
        if stop - start > 1 and rng.random() < 0.5:
            indices[start] = indices[stop - 1]
