"""Dense times transposed sparse: Y = X W^T with W in compressed row (CSR) format, its entries anywhere.

values   (nnz,)     the nonzeros, row by row
indices  (nnz,)     the column of each, in [0, k)
indptr   (n + 1,)   row r holds entries indptr[r] .. indptr[r + 1] - 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import (
    OPTIONAL,
    Argument,
    Cost,
    Problem,
    ProblemError,
    Settings,
    numpy_dtype,
    require_dtype,
    require_positive,
)
from tvm_sparse.core.rounding import ROUNDING, SMALLEST
from tvm_sparse.operators.bsr_matmul.pattern import SUMMATION, axes_in_file, positions_of, shuffle_columns

if TYPE_CHECKING:
    import random
    from pathlib import Path

    import numpy as np
    from tvm import tirx

INDEX = ("int32", "int64")


@dataclass(frozen=True)
class CsrLinear(Problem):
    """`y = x @ weight.T` for x `(m, k)` and a weight `(n, k)` of which a share `sparsity` is zero."""

    m: int
    k: int
    n: int
    sparsity: float
    dtype: str = "float32"
    index: str = field(default="int32", metadata=OPTIONAL)

    operator: ClassVar[str] = "csr_linear"
    batch_axis: ClassVar[str] = "m"
    data_axes: ClassVar[tuple[str, ...]] = ("sparsity",)
    counted: ClassVar[tuple[str, ...]] = ("nnz",)
    has_files: ClassVar[bool] = True
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("x", ("m", "k"), "dtype", "Dense rows."),
        Argument("indptr", ("n + 1",), "index", "First entry of each row of the weight; the last one is nnz."),
        Argument("indices", ("nnz",), "index", "Column of each entry, in [0, k)."),
        Argument("values", ("nnz",), "dtype", "Value of each entry."),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (Argument("y", ("m", "n"), "dtype", "The product."),)
    structures: ClassVar[tuple[str, ...]] = ("random", "empty_rows", "one_row", "special", "unsorted")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    example: ClassVar[Mapping[str, Any]] = {"m": 4, "k": 1024, "n": 1024, "sparsity": 0.9}
    source: ClassVar[str] = "Gale et al. 2020, Sparse GPU Kernels for Deep Learning, section 5"

    def __post_init__(self) -> None:
        require_positive(self, "m", "k", "n")
        require_dtype(self)
        if not 0 <= self.sparsity <= 1:
            raise ProblemError(f"csr_linear: sparsity must lie in [0, 1], got {self.sparsity}")
        if self.index not in INDEX:
            raise ProblemError(f"csr_linear: index must be one of {', '.join(INDEX)}, got {self.index!r}")
        if max(self.m * self.k, self.m * self.n, self.n * self.k) >= 2**31:
            raise ProblemError("csr_linear: each matrix must have fewer than 2^31 elements")
        self.settle(sparsity=round(float(self.sparsity), 2))

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "m": distribution.batch(rng),
            "k": distribution.whole(rng, 128, 1 << 14),
            "n": distribution.whole(rng, 128, 1 << 14),
            "sparsity": round(rng.uniform(0.6, 0.98), 2),
            "dtype": distribution.dtype(rng),
            "index": rng.choice(INDEX),
        }

    @classmethod
    def axes_of_file(cls, path: Path, given: Mapping[str, str]) -> dict[str, Any]:
        axes, _ = axes_in_file(path, (1, 1))
        return {name: axes[name] for name in ("k", "n", "sparsity")}

    @property
    def nnz(self) -> int:
        return round((1 - self.sparsity) * self.n * self.k)

    def extent(self, name: str | int) -> int:
        known = {"nnz": self.nnz, "n + 1": self.n + 1}
        return known[str(name)] if name in known else super().extent(name)

    def distance(self, other: Problem) -> float | None:
        """As `Problem.distance`, but with the density instead of the sparsity, and a step between dtypes of indices."""
        if not isinstance(other, CsrLinear) or self.dtype != other.dtype:
            return None
        mine, theirs = ((p.m, p.k, p.n, 1.005 - p.sparsity) for p in (self, other))
        octaves = sum(abs(math.log2(a / b)) for a, b in zip(mine, theirs, strict=True))
        return octaves + 0.25 * (self.index != other.index)

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("x", "values")

    def redrawn(self, rng: np.random.Generator) -> Problem:
        """The problem with about as many entries, none, or half to twice as many."""
        density = rng.choice([0.0, 1.0, 1.0, 2 ** rng.uniform(-1, 1)]) * (1 - self.sparsity)
        return replace(self, sparsity=round(1 - min(1.0, float(density)), 2))

    def definition(self) -> tirx.PrimFunc:
        """One dot product for each output element, over the entries of its row.

        The extent of the reduction is at least 1, because a reduction of extent 0 would leave its output uninitialised;
        a guard makes the single step of an empty row add nothing.
        """
        from tvm import te, tirx

        m, nnz = tirx.Var("m", "int32"), tirx.Var("nnz", "int32")
        x = te.placeholder((m, self.k), self.dtype, name="x")
        indptr = te.placeholder((self.n + 1,), self.index, name="indptr")
        indices = te.placeholder((nnz,), self.index, name="indices")
        values = te.placeholder((nnz,), self.dtype, name="values")

        def product(i, j):
            start, stop = indptr[j].astype("int32"), indptr[j + 1].astype("int32")
            e = te.reduce_axis((0, tirx.max(1, stop - start)), name="e")
            term = values[start + e].astype("float32") * x[i, indices[start + e].astype("int32")].astype("float32")
            return te.sum(tirx.if_then_else(stop > start, term, tirx.const(0, "float32")), axis=[e])

        total = te.compute((m, self.n), product, name="total")
        y = te.compute((m, self.n), lambda i, j: total[i, j].astype(self.dtype), name="y")
        return te.create_prim_func([x, indptr, indices, values, y]).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """x and values standard normal; each row has its share of the entries, in ascending columns, except for these:

        `empty_rows`: every second row is empty. `one_row`: one row has all entries, as many as fit. `special`: NaN and
        infinities in x and in values. `unsorted`: columns of a row are in random order, and some occur twice.
        """
        import numpy as np

        from tvm_sparse.formats.bsr import random_pattern

        structure, _ = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.m, self.k, self.n])
        weights = np.ones(self.n)
        if structure == "empty_rows":
            weights[::2] = 0
        elif structure == "one_row":
            weights[:] = np.arange(self.n) == self.n // 2
        of_file = positions_of(structure, self.n, self.k, (1, 1))
        indptr, indices = of_file or random_pattern(rng, self.nnz, self.k, weights)
        if structure == "unsorted":
            shuffle_columns(rng, indptr, indices)
        x = rng.standard_normal((self.m, self.k), dtype=np.float32)
        values = rng.standard_normal(len(indices), dtype=np.float32)
        if structure == "special":
            for array in (x, values):
                spots: Any = rng.integers(array.size, size=2) if array.size else []
                array.flat[spots] = [np.nan, np.inf][: len(spots)]
        dtype = numpy_dtype(self.dtype)
        return [x.astype(dtype), indptr.astype(self.index), indices.astype(self.index), values.astype(dtype)]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        x, indptr, indices, values = inputs
        return [self._product(x.astype(np.float64), indptr, indices, values.astype(np.float64))]

    def _product(self, x: np.ndarray, indptr: np.ndarray, indices: np.ndarray, values: np.ndarray) -> np.ndarray:
        import numpy as np

        y = np.zeros((len(x), self.n), x.dtype)
        with np.errstate(invalid="ignore"):
            for r, (start, stop) in enumerate(zip(indptr, indptr[1:], strict=False)):
                y[:, r] = x[:, indices[start:stop]] @ values[start:stop]
        return y

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The rounding error, relative to the sum of absolute products."""
        import numpy as np

        # float32 suffices for a bound.
        x, values = (np.abs(np.asarray(array).astype(np.float32)) for array in (inputs[0], inputs[3]))
        with np.errstate(invalid="ignore"):
            magnitude = self._product(x, inputs[1], inputs[2], values)
            return [SUMMATION * magnitude + ROUNDING[self.dtype] * np.abs(expected[0]) + SMALLEST[self.dtype]]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        nnz = self.nnz if inputs is None else len(inputs[2])
        itemsize, index = numpy_dtype(self.dtype).itemsize, numpy_dtype(self.index).itemsize
        dense = self.m * (self.k + self.n) * itemsize
        return Cost(dense + nnz * (itemsize + index) + (self.n + 1) * index, 2 * self.m * nnz)


PROBLEM = CsrLinear
