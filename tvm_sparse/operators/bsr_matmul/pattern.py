"""Problems with the pattern of a block-sparse matrix: axes and extents that the product and its gradient share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import FROM_FILE, Problem, ProblemError, require_dtype, require_positive

if TYPE_CHECKING:
    import random

    import numpy as np

PATTERNS = ("uniform", "skewed")
# Value of `formats.bsr.skew` from which a pattern counts as skewed: evenly drawn patterns stay below it.
SKEWED = 4.0

# Error of a float32 sum relative to the sum of absolute products: rounding errors of terms added in any order grow like
# the square root of their number; 64 half-units leave a wide margin at 16,384 terms.
SUMMATION = 64 * 2.0**-24


def block_shape(operator: str, block: str | int) -> tuple[int, int]:
    """Rows and columns of a block, as an axis says it. Raises ProblemError."""
    high, _, wide = str(block).partition("x")
    try:
        rows, cols = int(high), int(wide or high)
    except ValueError:
        rows = cols = 0
    if rows < 1 or cols < 1:
        raise ProblemError(f"{operator}: block must be like 16 or 16x32 (rows x columns), got {block!r}")
    return rows, cols


def pattern_of(indptr: np.ndarray) -> str:
    """The pattern of a matrix whose block rows begin so."""
    from tvm_sparse.formats.bsr import skew

    return "skewed" if skew(indptr) > SKEWED else "uniform"


def axes_in_file(path: Path, block: tuple[int, int] | None) -> tuple[dict[str, Any], np.ndarray]:
    """k, n and sparsity of the sparse matrix in a file, its block, and its indptr. Raises ProblemError."""
    (n, k), (rows, cols), indptr, indices = _in_file(path, block)
    sparsity = 1 - len(indices) / max(1, (n // rows) * (k // cols))
    return {"k": k, "n": n, "block": f"{rows}x{cols}", "sparsity": sparsity}, indptr


def positions_of(structure: str, n: int, k: int, block: tuple[int, int]) -> tuple[np.ndarray, np.ndarray] | None:
    """`(indptr, indices)` of the matrix in the file that a structure names; None for other structures. Raises
    ProblemError.
    """
    if not structure.startswith(FROM_FILE):
        return None
    shape, _, indptr, indices = _in_file(Path(structure.removeprefix(FROM_FILE)), block)
    if shape != (n, k):
        raise ProblemError(f"structure: {structure} has shape {shape}; expected ({n}, {k})")
    return indptr, indices


def _in_file(path: Path, block: tuple[int, int] | None) -> tuple[tuple[int, int], tuple[int, int], Any, Any]:
    import numpy as np

    from tvm_sparse.formats import matrix_files

    try:
        found = matrix_files.read(path)
        data, indices, indptr = found.in_blocks(block, np.dtype("float32"), path)
    except OSError as error:
        raise ProblemError(f"structure: {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ProblemError(f"structure: {error}") from None
    return found.shape, data.shape[1:], indptr.astype(np.int32), indices.astype(np.int32)


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
    has_files: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_positive(self, "m", "k", "n")
        require_dtype(self)
        name = self.operator
        rows, cols = block_shape(name, self.block)
        for axis, extent, size in (("n", self.n, rows), ("k", self.k, cols)):
            if extent % size:
                raise ProblemError(f"{name}: block {rows}x{cols} does not divide {axis}={extent}")
        if not 0 <= self.sparsity <= 1:
            raise ProblemError(f"{name}: sparsity must lie in [0, 1], got {self.sparsity}")
        if self.pattern not in PATTERNS:
            raise ProblemError(f"{name}: pattern must be one of {', '.join(PATTERNS)}, got {self.pattern!r}")
        if max(self.m * self.k, self.m * self.n, self.n * self.k) >= 2**31:
            raise ProblemError(f"{name}: each matrix must have fewer than 2^31 elements")
        self.settle(block=f"{rows}x{cols}", sparsity=round(float(self.sparsity), 2))

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

    @classmethod
    def axes_of_file(cls, path: Path, given: Mapping[str, str]) -> dict[str, Any]:
        axes, indptr = axes_in_file(path, block_shape(cls.operator, given["block"]) if "block" in given else None)
        return {**axes, "pattern": pattern_of(indptr)}

    def positions(self, rng: np.random.Generator, structure: str, weights: np.ndarray) -> tuple[Any, Any]:
        """`(indptr, indices)` of the stored blocks: those of the file that a structure names, or random ones, of which
        block rows have shares as `weights` say.
        """
        from tvm_sparse.formats.bsr import random_pattern

        of_file = positions_of(structure, self.n, self.k, self.block_shape)
        return of_file or random_pattern(rng, self.nnzb, self.grid[1], self.row_weights(rng, weights))

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
