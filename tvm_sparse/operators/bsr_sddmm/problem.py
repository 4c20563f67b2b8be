"""Sampled dense-dense product (SDDMM): of left.T @ right, the blocks that a block-sparse matrix has.

    data[b] = left[:, rows of block b].T @ right[:, columns of block b]

With y = x @ weight.T this is the gradient of the weight's stored blocks, for left = dy and right = x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core.problem import Argument, Cost, Settings, numpy_dtype
from tvm_sparse.core.rounding import ROUNDING, SMALLEST, aligned
from tvm_sparse.operators.bsr_matmul.pattern import SUMMATION, BlockSparse, shuffle_columns

if TYPE_CHECKING:
    import numpy as np
    from tvm import tirx


@dataclass(frozen=True)
class BsrSddmm(BlockSparse):
    """`data[b] = left[:, rows of b].T @ right[:, columns of b]` for left `(m, n)` and right `(m, k)`."""

    operator: ClassVar[str] = "bsr_sddmm"
    # Each output is a sum over all rows of the batch.
    sequential: ClassVar[bool] = True
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("left", ("m", "n"), "dtype", "Dense rows, as the gradient of a product."),
        Argument("right", ("m", "k"), "dtype", "Dense rows, as those that the product had."),
        Argument("indices", ("nnzb",), "int32", "Block column of each block, in [0, k / block_cols)."),
        Argument("indptr", ("n / block_rows + 1",), "int32", "First block of each block row; the last entry is nnzb."),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("data", ("nnzb", "block_rows", "block_cols"), "dtype", "The blocks of the product."),
    )
    structures: ClassVar[tuple[str, ...]] = ("random", "first_rows", "special", "unsorted")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {"m": 128, "k": 512, "n": 512, "block": 64, "sparsity": 0.8}
    source: ClassVar[str] = "Gu 2020, section 3, differentiated"

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("left", "right")

    def definition(self) -> tirx.PrimFunc:
        """A dot product over the m rows for each element; a block's row is the number of block rows that end before."""
        from tvm import te, tirx

        rows, cols = self.block_shape
        m, nnzb = tirx.Var("m", "int32"), tirx.Var("nnzb", "int32")
        left = te.placeholder((m, self.n), self.dtype, name="left")
        right = te.placeholder((m, self.k), self.dtype, name="right")
        indices = te.placeholder((nnzb,), "int32", name="indices")
        indptr = te.placeholder((self.n // rows + 1,), "int32", name="indptr")

        def ended(b):
            r = te.reduce_axis((0, self.n // rows), name="r")
            return te.sum((indptr[r + 1] <= b).astype("int32"), axis=[r])

        row = te.compute((nnzb,), ended, name="row")

        def product(b, j, c):
            i = te.reduce_axis((0, m), name="i")
            one = left[i, row[b] * rows + j].astype("float32")
            return te.sum(one * right[i, indices[b] * cols + c].astype("float32"), axis=[i])

        total = te.compute((nnzb, rows, cols), product, name="total")
        data = te.compute((nnzb, rows, cols), lambda b, j, c: total[b, j, c].astype(self.dtype), name="data")
        return te.create_prim_func([left, right, indices, indptr, data]).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """left and right standard normal, the pattern as the problem says.

        `first_rows`: the first block rows are full, and the last ones empty. `special`: NaN and infinities in both.
        `unsorted`: columns of a block row are in random order, and some occur twice.
        """
        import numpy as np

        structure, _ = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.m, self.k, self.n])
        block_rows, block_cols = self.grid
        if structure == "first_rows":
            places = np.arange(self.nnzb)
            indices = (places % block_cols).astype(np.int32)
            indptr = np.minimum(np.arange(block_rows + 1) * block_cols, self.nnzb).astype(np.int32)
        else:
            indptr, indices = self.positions(rng, structure, np.ones(block_rows))
        if structure == "unsorted":
            shuffle_columns(rng, indptr, indices)
        given = [rng.standard_normal((self.m, wide), dtype=np.float32) for wide in (self.n, self.k)]
        if structure == "special":
            for array in given:
                array.flat[rng.integers(array.size, size=2)] = [np.nan, np.inf]
        dtype = numpy_dtype(self.dtype)
        return [*(array.astype(dtype) for array in given), indices, indptr]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        left, right, indices, indptr = inputs
        return [self._product(left.astype(np.float64), right.astype(np.float64), indices, indptr)]

    def _product(self, left: np.ndarray, right: np.ndarray, indices: np.ndarray, indptr: np.ndarray) -> np.ndarray:
        import numpy as np

        rows, cols = self.block_shape
        found = np.empty((len(indices), rows, cols), left.dtype)
        at = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
        with np.errstate(invalid="ignore"):
            for b, (row, column) in enumerate(zip(at, indices, strict=True)):
                found[b] = left[:, row * rows : (row + 1) * rows].T @ right[:, column * cols : (column + 1) * cols]
        return found

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The rounding error, relative to the sum of absolute products."""
        import numpy as np

        # float32 suffices for a bound.
        given = [np.asarray(array) for array in inputs[:2]]
        left, right = (aligned(np.abs(array.astype(np.float32)), array.dtype) for array in given)
        with np.errstate(invalid="ignore"):
            magnitude = self._product(left, right, *inputs[2:])
            return [SUMMATION * magnitude + ROUNDING[self.dtype] * np.abs(expected[0]) + SMALLEST[self.dtype]]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        nnzb = self.nnzb if inputs is None else len(inputs[2])
        rows, cols = self.block_shape
        elements = self.m * (self.k + self.n) + nnzb * rows * cols
        return Cost(
            elements * numpy_dtype(self.dtype).itemsize + (nnzb + self.n // rows + 1) * 4,
            2 * self.m * nnzb * rows * cols,
        )


PROBLEM = BsrSddmm
