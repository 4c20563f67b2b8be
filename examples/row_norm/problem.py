"""What is computed: rows divided by their root mean square.

Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", equation 4, without its gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core.problem import (
    Argument,
    Cost,
    Problem,
    ProblemError,
    Settings,
    numpy_dtype,
    require_dtype,
    require_positive,
)

if TYPE_CHECKING:
    import numpy as np
    from tvm import tirx

# Float32 sums of up to 2^20 squares in one chain, whose errors the square root halves.
RELATIVE = 2e-5
# Half a unit in the last place of the output, and half of its least subnormal number.
ROUNDING = {"float32": (0.0, 1.2e-38), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 1.2e-38)}


@dataclass(frozen=True)
class RowNorm(Problem):
    """`out = x / sqrt(mean(x^2, -1) + eps)` for x `(rows, width)`, accumulated in float32."""

    rows: int
    width: int
    dtype: str = "float32"

    operator: ClassVar[str] = "row_norm"
    batch_axis: ClassVar[str] = "rows"
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("x", ("rows", "width"), "dtype", "Rows, row-major."),
        Argument("eps", (), "float32", "Added to the mean square; at least 0."),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("out", ("rows", "width"), "dtype", "Rows of root mean square 1."),
    )
    structures: ClassVar[tuple[str, ...]] = ("random", "zeros", "special", "large")
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = structures
    settings: ClassVar[tuple[Settings, ...]] = ({"eps": 1e-6}, {"eps": 1e-3})
    example: ClassVar[Mapping[str, Any]] = {"rows": 64, "width": 4096}
    source: ClassVar[str] = "Zhang & Sennrich 2019, equation 4"

    def __post_init__(self) -> None:
        require_positive(self, "rows", "width")
        require_dtype(self)
        if self.width > 2**20:
            raise ProblemError(f"row_norm: width must be at most 2^20, got {self.width}")

    def definition(self) -> tirx.PrimFunc:
        """The formula, one row after another."""
        return self.stages(parts=1)

    def stages(self, parts: int) -> tirx.PrimFunc:
        """The formula in the stages that a schedule places: `part`, `squares` and `out`.

        `part[r, p]` sums every `parts`-th square of row r; `parts` divides the width. More parts are more chains of
        additions that run side by side. TVMScript and not TE, whose buffers promise an alignment of 64 bytes, which
        arrays of other libraries do not keep.
        """
        from tvm.script import tirx as T

        width, dtype, each, itemsize = self.width, self.dtype, self.width // parts, numpy_dtype(self.dtype).itemsize

        # fmt: off
        @T.prim_func(s_tir=True)
        def main(x_h: T.handle, eps: T.float32, out_h: T.handle):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            rows = T.int64()
            X = T.match_buffer(x_h, (rows, T.int64(width)), dtype, align=itemsize)
            Y = T.match_buffer(out_h, (rows, T.int64(width)), dtype, align=itemsize)
            P = T.sblock_alloc_buffer((rows, T.int64(parts)), "float32")
            S = T.sblock_alloc_buffer((rows,), "float32")
            for r, p, q in T.grid(rows, T.int64(parts), T.int64(each)):
                with T.sblock("part"):
                    row, i, j = T.axis.remap("SSR", [r, p, q])
                    with T.init():
                        P[row, i] = T.float32(0)
                    P[row, i] = P[row, i] + (
                        T.Cast("float32", X[row, j * T.int64(parts) + i])
                        * T.Cast("float32", X[row, j * T.int64(parts) + i]))
            for r, p in T.grid(rows, T.int64(parts)):
                with T.sblock("squares"):
                    row, i = T.axis.remap("SR", [r, p])
                    with T.init():
                        S[row] = T.float32(0)
                    S[row] = S[row] + P[row, i]
            for r, c in T.grid(rows, T.int64(width)):
                with T.sblock("out"):
                    row, i = T.axis.remap("SS", [r, c])
                    Y[row, i] = T.Cast(
                        dtype, T.Cast("float32", X[row, i]) / T.sqrt(S[row] * T.float32(1 / width) + eps))
        # fmt: on
        return main

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Rows by structure, drawn from `seed`.

        `random`: standard normal. `zeros`: half of the rows are zero. `special`: NaN and infinities among normal
        numbers. `large`: normal numbers times 1000, whose squares half precision does not hold.
        """
        import numpy as np

        structure, chosen = self.chosen(structure, settings)
        rng = np.random.default_rng([seed, self.width])
        x = rng.standard_normal((self.rows, self.width), dtype=np.float32)
        if structure == "zeros":
            x[::2] = 0
        elif structure == "special":
            for value in (np.nan, np.inf, -np.inf):
                rows = np.flatnonzero(rng.random(self.rows) < 0.3)
                x[rows, rng.integers(self.width, size=len(rows))] = value
        elif structure == "large":
            x *= 1000
        return [x.astype(numpy_dtype(self.dtype)), chosen["eps"]]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        x, eps = np.asarray(inputs[0]).astype(np.float64), float(np.float32(inputs[1]))
        with np.errstate(invalid="ignore"):
            return [x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps)]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The rounding of a float32 sum and of the output's dtype."""
        import numpy as np

        relative, least = ROUNDING[self.dtype]
        return [least + (relative + RELATIVE) * np.abs(expected[0])]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        elements = self.rows * self.width
        return Cost(2 * elements * numpy_dtype(self.dtype).itemsize, 3 * elements)


PROBLEM = RowNorm
