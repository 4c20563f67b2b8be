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
    Mismatch,
    Problem,
    ProblemError,
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
        additions that run side by side.
        """
        from tvm import te, tirx

        rows, eps = te.var("rows", "int64"), te.var("eps", "float32")
        x = te.placeholder((rows, self.width), self.dtype, "x")
        q, p = te.reduce_axis((0, self.width // parts), "q"), te.reduce_axis((0, parts), "p")

        def square(r: tirx.Var, i: tirx.PrimExpr) -> tirx.PrimExpr:
            return x[r, i].astype("float32") * x[r, i].astype("float32")

        part = te.compute((rows, parts), lambda r, i: te.sum(square(r, q * parts + i), axis=q), "part")
        squares = te.compute((rows,), lambda r: te.sum(part[r, p], axis=p), "squares")
        mean = tirx.const(1.0 / self.width, "float32")
        out = te.compute(
            (rows, self.width),
            lambda r, i: (x[r, i].astype("float32") / te.sqrt(squares[r] * mean + eps)).astype(self.dtype),
            "out",
        )
        return te.create_prim_func([x, eps, out]).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None) -> list[Any]:
        """Rows by structure, drawn from `seed`; `eps` is 1e-6 for even seeds and 1e-3 for odd ones.

        `random`: standard normal. `zeros`: half of the rows are zero. `special`: NaN and infinities among normal
        numbers. `large`: normal numbers times 1000, whose squares half precision does not hold.
        """
        import numpy as np

        structure = structure or self.structures[0]
        if structure not in self.structures:
            raise ProblemError(f"structure: got {structure!r}; expected one of {', '.join(self.structures)}")
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
        return [x.astype(numpy_dtype(self.dtype)), (1e-6, 1e-3)[seed % 2]]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        x, eps = np.asarray(inputs[0]).astype(np.float64), float(np.float32(inputs[1]))
        with np.errstate(invalid="ignore"):
            return [x / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps)]

    def check(self, inputs: Sequence[Any], expected: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Within the rounding of a float32 sum and of the output's dtype; NaN where the reference has it."""
        import numpy as np

        wanted, found = expected[0], np.asarray(outputs[0]).astype(np.float64)
        relative, least = ROUNDING[self.dtype]
        close = np.abs(found - wanted) <= least + (relative + RELATIVE) * np.abs(wanted)
        wrong = np.argwhere(~(close | (np.isnan(found) & np.isnan(wanted))))
        if len(wrong):
            row, column = wrong[0]
            raise Mismatch(
                f"out[{row}, {column}] is {found[row, column]:.9g}, expected {wanted[row, column]:.9g}"
                f" ({len(wrong)} of {found.size} differ)"
            )

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        elements = self.rows * self.width
        return Cost(2 * elements * numpy_dtype(self.dtype).itemsize, 3 * elements)


PROBLEM = RowNorm
