"""Fused softmax and top-k: one read of each logit, k values and k indices written.

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 4; Argueta & Chiang 2019,
section 4.2. In place of the paper's insertion after every element any selection may be used: the order is
total (value descending, index ascending), so that every kernel returns the same indices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .problem import Argument, Cost, Mismatch, Problem, ProblemError, numpy_dtype, require_dtype, require_positive

if TYPE_CHECKING:
    import numpy as np
    from tvm import tirx

# Probabilities: float32 sums of up to 2^18 terms kept in at least 16 partial sums, plus one exponential.
RELATIVE = 2e-5
# Log-probabilities: the same relative error of the sum is an absolute one of its logarithm.
ABSOLUTE_LOG = 2e-5
# Below this a probability may be flushed: it is subnormal in float32.
TINY = 1.2e-38


@dataclass(frozen=True)
class SoftmaxTopk(Problem):
    """`values, indices = topk(softmax(logits, -1), k)` for logits `(batch, vocab)`."""

    batch: int
    vocab: int
    k: int
    dtype: str = "float32"

    operator: ClassVar[str] = "softmax_topk"
    batch_axis: ClassVar[str] = "batch"
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("logits", ("batch", "vocab"), "dtype", "Unnormalised scores, row-major."),
        Argument("log", (), "int32", "Nonzero for log-probabilities."),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("values", ("batch", "k"), "float32", "Probabilities, or their logarithms, descending."),
        Argument("indices", ("batch", "k"), "int64", "Columns of the values, in [0, vocab)."),
    )
    structures: ClassVar[tuple[str, ...]] = ("random", "ties", "masked", "special", "ascending", "constant", "zipf")
    example: ClassVar[Mapping[str, Any]] = {"batch": 10, "vocab": 25000, "k": 5}
    source: ClassVar[str] = "Milakov & Gimelshein 2018, Algorithm 4; Argueta & Chiang 2019, 4.2"

    def __post_init__(self) -> None:
        require_positive(self, "batch", "vocab", "k")
        require_dtype(self)
        if self.k > self.vocab:
            raise ProblemError(f"softmax_topk: k must be at most vocab ({self.vocab}), got {self.k}")
        if self.vocab >= 2**31:
            raise ProblemError(f"softmax_topk: vocab must be below 2^31, got {self.vocab}")

    def definition(self) -> tirx.PrimFunc:
        """Algorithm 4 as written, one row after another, with NaN first in the order as in torch.topk."""
        from tvm.script import tirx as T

        vocab, k, dtype = self.vocab, self.k, self.dtype
        lowest = T.min_value("float32")

        def is_nan(x):  # by its bits: the simplifier takes x != x for false
            return (T.reinterpret("int32", x) & 0x7FFFFFFF) > 0x7F800000

        # fmt: off
        @T.prim_func(s_tir=True)
        def main(logits_h: T.handle, log: T.int32, values_h: T.handle, indices_h: T.handle):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            batch = T.int64()
            X = T.match_buffer(logits_h, (batch, T.int64(vocab)), dtype, align=2)
            V = T.match_buffer(values_h, (batch, T.int64(k)), "float32", align=4)
            Z = T.match_buffer(indices_h, (batch, T.int64(k)), "int64", align=8)
            for b in range(batch):
                with T.sblock("row"):
                    row = T.axis.spatial(batch, b)
                    T.reads(X[row, 0:vocab])
                    T.writes(V[row, 0:k], Z[row, 0:k])
                    m = T.sblock_alloc_buffer((1,), "float32")
                    d = T.sblock_alloc_buffer((1,), "float32")
                    u = T.sblock_alloc_buffer((k + 1,), "float32")
                    p = T.sblock_alloc_buffer((k + 1,), "int64")
                    slot = T.sblock_alloc_buffer((1,), "int32")
                    x = T.sblock_alloc_buffer((1,), "float32")
                    m[0] = lowest
                    d[0] = T.float32(0)
                    for j in range(vocab):
                        x[0] = T.Cast("float32", X[row, j])
                        if x[0] > m[0]:
                            d[0] = d[0] * T.exp(m[0] - x[0])
                            m[0] = x[0]
                        d[0] = d[0] + T.exp(x[0] - m[0])
                        slot[0] = T.min(j, k)
                        while slot[0] > 0 and (
                            u[slot[0] - 1] < x[0] or (is_nan(x[0]) and not is_nan(u[slot[0] - 1]))
                        ):
                            u[slot[0]] = u[slot[0] - 1]
                            p[slot[0]] = p[slot[0] - 1]
                            slot[0] = slot[0] - 1
                        u[slot[0]] = x[0]
                        p[slot[0]] = T.int64(j)
                    for i in range(k):
                        Z[row, i] = p[i]
                        if log != 0:
                            V[row, i] = u[i] - m[0] - T.log(d[0])
                        else:
                            V[row, i] = T.exp(u[i] - m[0]) / d[0]
        # fmt: on
        return main

    def generate(self, seed: int, structure: str | None = None) -> list[Any]:
        """Logits by structure, drawn from `seed`; `log` is 0 for even seeds and 1 for odd ones.

        `random`: standard normal. `ties`: a handful of distinct values. `masked`: most entries -inf, one row
        wholly so. `special`: NaN, +inf and -0.0 among normal values. `ascending`: each entry above the last,
        the worst case of a threshold. `constant`: all equal. `zipf`: a few large values, a long tail.
        """
        import numpy as np

        rng = np.random.default_rng([seed, self.vocab, self.k])
        shape = (self.batch, self.vocab)
        structure = structure or self.structures[0]
        x = rng.standard_normal(shape, dtype=np.float32)
        if structure == "ties":
            x = np.round(x)
        elif structure == "masked":
            x[rng.random(shape) < 0.9] = -np.inf
            x[rng.integers(self.batch)] = -np.inf
        elif structure == "special":
            for value, share in ((np.nan, 0.3), (np.inf, 0.3), (-np.inf, 0.3), (-0.0, 1.0)):
                rows = np.flatnonzero(rng.random(self.batch) < share)
                x[rows, rng.integers(self.vocab, size=len(rows))] = value
        elif structure == "ascending":
            x = np.sort(x, axis=1)
        elif structure == "constant":
            x[:] = x[:, :1]
        elif structure == "zipf":
            x = -np.log(rng.permuted(np.tile(np.arange(1, self.vocab + 1, dtype=np.float32), (self.batch, 1)), axis=1))
        elif structure != "random":
            raise ProblemError(f"structure: got {structure!r}; expected one of {', '.join(self.structures)}")
        return [x.astype(numpy_dtype(self.dtype)), seed % 2]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        logits, log = inputs
        x = np.asarray(logits).astype(np.float64)
        # Stable, so that ties keep the lower index; NaN sorts last and is put first, as torch.topk does.
        key = np.where(np.isnan(x), -np.inf, -x)
        nan_first = np.lexsort((np.broadcast_to(np.arange(x.shape[1]), x.shape), key, ~np.isnan(x)), axis=1)
        indices = nan_first[:, : self.k]
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            shifted = x - np.max(np.where(np.isnan(x), -np.inf, x), axis=1, keepdims=True)
            total = np.exp(shifted).sum(axis=1, keepdims=True)
            top = np.take_along_axis(shifted, indices, axis=1)
            values = top - np.log(total) if log else np.exp(top) / total
        return [values, indices.astype(np.int64)]

    def check(self, inputs: Sequence[Any], expected: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Equal indices, as the order is total; values within float32 rounding; NaN where the reference has it."""
        import numpy as np

        (values, indices), (wanted, wanted_indices) = outputs, expected
        wrong = np.argwhere(np.asarray(indices) != wanted_indices)
        if len(wrong):
            row, column = wrong[0]
            raise Mismatch(
                f"indices[{row}, {column}] is {indices[row, column]}, expected {wanted_indices[row, column]}"
                f" ({len(wrong)} of {indices.size} differ)"
            )
        values = np.asarray(values).astype(np.float64)
        bound = ABSOLUTE_LOG + 1e-6 * np.abs(wanted) if inputs[1] else TINY + RELATIVE * np.abs(wanted)
        with np.errstate(invalid="ignore"):
            # Where an infinity is wanted the bound is infinite too, and says nothing.
            close = np.isfinite(wanted) & (np.abs(values - wanted) <= bound)
            good = close | (values == wanted) | (np.isnan(values) & np.isnan(wanted))
        wrong = np.argwhere(~good)
        if len(wrong):
            row, column = wrong[0]
            raise Mismatch(
                f"values[{row}, {column}] is {values[row, column]:.9g}, expected {wanted[row, column]:.9g}"
                f" ({len(wrong)} of {values.size} differ)"
            )

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        logits = self.batch * self.vocab
        return Cost(logits * numpy_dtype(self.dtype).itemsize + self.batch * self.k * 12, 3 * logits)
