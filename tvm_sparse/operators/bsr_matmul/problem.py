"""Dense times transposed block-sparse: Y = X W^T with W in block compressed row (BSR) format.

Gu 2020, "Optimizing Block-Sparse Matrix Multiplications on CUDA with TVM", section 3:

    data     (nnzb, block_rows, block_cols)   the nonzero blocks, row by row
    indices  (nnzb,)                          the block column of each, in [0, k / block_cols)
    indptr   (n / block_rows + 1,)            block row r holds blocks indptr[r] .. indptr[r + 1] - 1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import OPTIONAL, Argument, Cost, Problem, ProblemError, Settings, numpy_dtype
from tvm_sparse.core.rounding import ROUNDING, SMALLEST, aligned

from .pattern import SUMMATION, BlockSparse, shuffle_columns

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

ACTIVATIONS = ("", "relu", "gelu", "silu")
PRECISIONS = ("", "tf32")
# Error of a product of two float32 numbers without their lowest 13 of 23 bits, relative to it.
TF32 = 2.0**-9 + 2.0**-20


def activated(y: np.ndarray, activation: str) -> np.ndarray:
    """An activation by name, in float64."""
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        if activation == "relu":
            return np.where(y < 0, 0.0, y)
        if activation == "gelu":
            return 0.5 * y * (1 + np.vectorize(math.erf, otypes=[float])(y / math.sqrt(2)))
        if activation == "silu":
            return y / (1 + np.exp(-y))
        return y


@dataclass(frozen=True)
class BsrMatmul(BlockSparse):
    """`y = activation(x @ weight.T + bias)` for x `(m, k)` and a block-sparse weight `(n, k)`.

    Kernels also take the host's analysis of the pattern, `formats.bsr.analysed`; with it they may read the
    structure before their producer kernel is done, since it is not written any more, and the blocks too if they are
    `constant`. `bias` is 1 if there is one, else 0.

    `precision` is `tf32` if tensor cores may ignore the lowest 13 bits of float32 inputs, which kernels need not; else
    empty, as for other dtypes.

    `turned` is 1 if the blocks are those of the transposed weight `(k, n)`, whose structure lies beside it: block b of
    the structure is the transposed `data[places[b]]`. A gradient of x is such a product.
    """

    bias: int = field(default=0, metadata=OPTIONAL)
    activation: str = field(default="", metadata=OPTIONAL)
    turned: int = field(default=0, metadata=OPTIONAL)
    precision: str = field(default="", metadata=OPTIONAL)

    operator: ClassVar[str] = "bsr_matmul"
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("x", ("m", "k"), "dtype", "Dense rows."),
        Argument("data", ("nnzb", "block_rows", "block_cols"), "dtype", "Nonzero blocks of the weight."),
        Argument("indices", ("nnzb",), "int32", "Block column of each block, in [0, k / block_cols)."),
        Argument("indptr", ("n / block_rows + 1",), "int32", "First block of each block row; the last entry is nnzb."),
        Argument(
            "order",
            ("n / block_rows", 3),
            "int32",
            "Block rows, the fullest first: which, its first block, and the one behind its last.",
        ),
        Argument("long", (), "int32", "How many of these are long enough to be shared; -1 if `order` says nothing."),
        Argument("constant", (), "int32", "1 if nobody writes `data` while kernels that read it are queued, else 0."),
        Argument("places", ("nnzb",), "int32", "Which of `data` is a block, transposed.", when="turned"),
        Argument("bias", ("n",), "dtype", "Added to every row of the product.", when="bias"),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (Argument("y", ("m", "n"), "dtype", "The product."),)
    structures: ClassVar[tuple[str, ...]] = ("random", "empty_rows", "one_row", "special", "unsorted")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    # The host's knowledge of the weight: the best order of its block rows, and whether it is constant. Calls with the
    # weight's bare arrays have neither.
    settings: ClassVar[tuple[Settings, ...]] = ({"balance": 1, "constant": 1}, {"balance": 0, "constant": 0})
    example: ClassVar[Mapping[str, Any]] = {"m": 8, "k": 1024, "n": 1024, "block": 16, "sparsity": 0.9}
    source: ClassVar[str] = "Gu 2020, section 4"
    added_axes: ClassVar[tuple[str, ...]] = ("turned", "precision")

    def __post_init__(self) -> None:
        super().__post_init__()
        for axis in ("bias", "turned"):
            if (value := getattr(self, axis)) not in (0, 1):
                raise ProblemError(f"bsr_matmul: {axis} must be 0 or 1, got {value!r}")
        if self.precision not in PRECISIONS:
            raise ProblemError(f"bsr_matmul: precision must be {PRECISIONS[1]} or empty, got {self.precision!r}")
        if self.dtype != "float32":
            self.settle(precision="")
        if self.activation not in ACTIVATIONS:
            raise ProblemError(
                f"bsr_matmul: activation must be one of {', '.join(ACTIVATIONS[1:])}, or empty, got {self.activation!r}"
            )

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return {
            **super().drawn_axes(rng),
            "bias": distribution.flag(rng, 0.3),
            "activation": rng.choice(ACTIVATIONS) if distribution.flag(rng, 0.3) else "",
        }

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("x", "data", "bias")

    def extent(self, name: str | int) -> int:
        """Beside those of `BlockSparse`: extents of the blocks in `data`, which may be transposed."""
        other = {"block_rows": "block_cols", "block_cols": "block_rows"} if self.turned else {}
        return super().extent(other.get(str(name), name))

    def distance(self, other: Problem) -> float | None:
        if not isinstance(other, BsrMatmul) or (self.turned, self.precision) != (other.turned, other.precision):
            return None
        return super().distance(other)

    def definition(self) -> tirx.PrimFunc:
        """One dot product for each output element, over the stored elements of its block row.

        The extent of the reduction depends on the data. It is at least 1, because a reduction of extent 0 would leave
        its output uninitialised; a guard makes the single step of an empty block row add nothing.
        """
        from tvm import te, tirx

        from .epilogue import finish

        rows, cols = self.block_shape
        m, nnzb = tirx.Var("m", "int32"), tirx.Var("nnzb", "int32")
        x = te.placeholder((m, self.k), self.dtype, name="x")
        data = te.placeholder((nnzb, *((cols, rows) if self.turned else (rows, cols))), self.dtype, name="data")
        indices = te.placeholder((nnzb,), "int32", name="indices")
        indptr = te.placeholder((self.n // rows + 1,), "int32", name="indptr")
        order, long = te.placeholder((self.n // rows, 3), "int32", name="order"), tirx.Var("long", "int32")
        constant = tirx.Var("constant", "int32")
        places = [te.placeholder((nnzb,), "int32", name="places")] if self.turned else []

        def product(i, j):
            start, stop = indptr[j // rows], indptr[j // rows + 1]
            e = te.reduce_axis((0, tirx.max(1, (stop - start) * cols)), name="e")
            block, c = start + e // cols, e % cols
            stored = data[places[0][block], c, j % rows] if places else data[block, j % rows, c]
            term = stored.astype("float32") * x[i, indices[block] * cols + c].astype("float32")
            return te.sum(tirx.if_then_else(stop > start, term, tirx.const(0, "float32")), axis=[e])

        total = te.compute((m, self.n), product, name="total")
        bias = [te.placeholder((self.n,), self.dtype, name="bias")] if self.bias else []

        def output(i, j):
            return finish(total[i, j], bias[0][j] if bias else None, self.activation, self.dtype)

        y = te.compute((m, self.n), output, name="y")
        arguments = [x, data, indices, indptr, order, long, constant, *places, *bias, y]
        return te.create_prim_func(arguments).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """x, data and bias standard normal, the pattern as the problem says.

        `empty_rows`: every second block row is empty. `one_row`: one block row has all blocks, as many as fit.
        `special`: NaN and infinities in x and in the stored blocks. `unsorted`: columns of a block row are in random
        order, and some occur twice.
        """
        import numpy as np

        from tvm_sparse.formats.bsr import analysed

        structure, chosen = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.m, self.k, self.n])
        block_rows, _ = self.grid
        weights = np.ones(block_rows)
        if structure == "empty_rows":
            weights[::2] = 0
        elif structure == "one_row":
            weights[:] = np.arange(block_rows) == block_rows // 2
        indptr, indices = self.positions(rng, structure, weights)
        if structure == "unsorted":
            shuffle_columns(rng, indptr, indices)
        dtype = numpy_dtype(self.dtype)
        x = rng.standard_normal((self.m, self.k), dtype=np.float32)
        data = rng.standard_normal((len(indices), *self.block_shape), dtype=np.float32)
        if structure == "special":
            for array in (x, data):
                spots: Any = rng.integers(array.size, size=2) if array.size else []
                array.flat[spots] = [np.nan, np.inf][: len(spots)]
        bias = [rng.standard_normal(self.n, dtype=np.float32).astype(dtype)] if self.bias else []
        order, long = analysed(indptr, indices, self.block_shape, self.grid[1], dtype.itemsize)
        if not chosen["balance"]:
            # Arbitrary content of an array that kernels must not use: indices far outside of the weight.
            order, long = np.full_like(order, 1 << 30), -1
        stored, places = data.astype(dtype), []
        if self.turned:
            places = [rng.permutation(len(indices)).astype(np.int32)]
            turned = np.ascontiguousarray(stored.transpose(0, 2, 1))
            stored = np.empty_like(turned)
            stored[places[0]] = turned
        return [x.astype(dtype), stored, indices, indptr, order, long, chosen["constant"], *places, *bias]

    def biases(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """The bias among the inputs, if there is one."""
        return inputs[-1:] if self.bias else ()

    def blocks(self, inputs: Sequence[Any]) -> Any:
        """The blocks among the inputs in the order of the structure, not transposed."""
        return inputs[1][inputs[7]].transpose(0, 2, 1) if self.turned else inputs[1]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        x, data, indices, indptr = inputs[0], self.blocks(inputs), *inputs[2:4]
        y = self._product(x.astype(np.float64), data.astype(np.float64), indices, indptr)
        for bias in self.biases(inputs):
            y += bias.astype(np.float64)
        return [activated(y, self.activation)]

    def _product(self, x: np.ndarray, data: np.ndarray, indices: np.ndarray, indptr: np.ndarray) -> np.ndarray:
        """The product, one block row at a time: the columns of x that it needs, times its blocks side by side."""
        import numpy as np

        rows, cols = self.block_shape
        y = np.zeros((x.shape[0], self.n), x.dtype)
        columns = x.reshape(x.shape[0], -1, cols)
        with np.errstate(invalid="ignore"):
            for r, (start, stop) in enumerate(zip(indptr, indptr[1:], strict=False)):
                wanted = columns[:, indices[start:stop]].reshape(x.shape[0], -1)
                blocks = data[start:stop].transpose(0, 2, 1).reshape(-1, rows)
                y[:, r * rows : (r + 1) * rows] = wanted @ blocks
        return y

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The rounding error, relative to the sum of absolute products.

        An activation increases an error of its argument by a factor of at most 1.13.
        """
        import numpy as np

        # float32 suffices for a bound.
        floats = (inputs[0], self.blocks(inputs), *self.biases(inputs))
        x, data, *bias = (aligned(np.abs(np.asarray(a).astype(np.float32)), np.asarray(a).dtype) for a in floats)
        with np.errstate(invalid="ignore"):
            magnitude = self._product(x, data, *inputs[2:4]) + sum(bias)
            factor = (1.13 if self.activation else 1) * (SUMMATION + (TF32 if self.precision else 0))
            return [factor * magnitude + ROUNDING[self.dtype] * np.abs(expected[0]) + SMALLEST[self.dtype]]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        nnzb = self.nnzb if inputs is None else len(inputs[2])
        rows, cols = self.block_shape
        elements = self.m * self.k + nnzb * rows * cols + self.m * self.n + self.bias * self.n
        return Cost(
            elements * numpy_dtype(self.dtype).itemsize + (nnzb * (1 + self.turned) + self.n // rows + 1) * 4,
            2 * self.m * nnzb * rows * cols,
        )


PROBLEM = BsrMatmul
