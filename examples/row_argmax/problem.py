"""The problem: the logarithm of the sum of each row's exponentials, and the column of its largest element.

Together they are what greedy decoding needs: the token, and its log-probability `logits[token] - values`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core.problem import Argument, Cost, Problem, Settings, numpy_dtype
from tvm_sparse.operators.logsumexp.problem import LogSumExp

if TYPE_CHECKING:
    import numpy as np
    from tvm import tirx


@dataclass(frozen=True)
class RowArgmaxLogsumexp(Problem):
    """`values = log(sum(exp(logits), -1))`, `indices = argmax(logits, -1)` for logits `(batch, vocab)`.

    The first column of equal elements counts, and NaN is larger than any number, as for NumPy.
    """

    batch: int
    vocab: int
    dtype: str = "float32"

    operator: ClassVar[str] = "row_argmax_logsumexp"
    batch_axis: ClassVar[str] = "batch"
    inputs: ClassVar[tuple[Argument, ...]] = LogSumExp.inputs
    outputs: ClassVar[tuple[Argument, ...]] = (
        *LogSumExp.outputs,
        Argument("indices", ("batch",), "int64", "Columns of the rows' largest elements, the first of equals."),
    )
    structures: ClassVar[tuple[str, ...]] = LogSumExp.structures
    tuned: ClassVar[str] = LogSumExp.tuned
    verified: ClassVar[tuple[str, ...]] = LogSumExp.verified
    example: ClassVar[Mapping[str, Any]] = {"batch": 64, "vocab": 32000}
    source: ClassVar[str] = "Milakov & Gimelshein 2018, Algorithm 3, lines 1-6, and an argmax"

    def __post_init__(self) -> None:
        LogSumExp(self.batch, self.vocab, self.dtype)  # which checks the axes

    @property
    def sums(self) -> LogSumExp:
        """The problem of `values` alone."""
        return LogSumExp(self.batch, self.vocab, self.dtype)

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("logits",)

    @property
    def shifted(self) -> tuple[str, ...]:
        return ("logits",)

    def definition(self) -> tirx.PrimFunc:
        """A row after the other, in two passes: the largest element, then the sum relative to it."""
        from tvm.script import tirx as T

        vocab, dtype, itemsize = self.vocab, self.dtype, numpy_dtype(self.dtype).itemsize

        def is_nan(x: Any) -> Any:
            # By its bits: the compiler takes x != x for false.
            return (T.reinterpret("uint32", x) & T.uint32(0x7FFFFFFF)) > T.uint32(0x7F800000)

        # fmt: off
        @T.prim_func(s_tir=True)
        def main(logits_h: T.handle, values_h: T.handle, indices_h: T.handle):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            batch = T.int64()
            X = T.match_buffer(logits_h, (batch, T.int64(vocab)), dtype, align=itemsize)
            V = T.match_buffer(values_h, (batch,), "float32", align=4)
            Z = T.match_buffer(indices_h, (batch,), "int64", align=8)
            for b in range(batch):
                with T.sblock("row"):
                    row = T.axis.spatial(batch, b)
                    T.reads(X[row, 0:vocab])
                    T.writes(Z[row], V[row])
                    x = T.sblock_alloc_buffer((1,), "float32")
                    best = T.sblock_alloc_buffer((1,), "float32")
                    m = T.sblock_alloc_buffer((1,), "float32")
                    d = T.sblock_alloc_buffer((1,), "float64")
                    best[0] = T.Cast("float32", X[row, 0])
                    Z[row] = T.int64(0)
                    m[0] = T.min_value("float32")
                    for j in range(T.int64(vocab)):
                        x[0] = T.Cast("float32", X[row, j])
                        m[0] = T.max(m[0], x[0])
                        if x[0] > best[0] or (is_nan(x[0]) and not is_nan(best[0])):
                            best[0] = x[0]
                            Z[row] = j
                    # Finite, so that plus infinity makes the sum infinite and not NaN.
                    m[0] = T.min(m[0], T.max_value("float32"))
                    d[0] = T.float64(0)
                    for j in range(T.int64(vocab)):
                        d[0] = d[0] + T.Cast("float64", T.exp(T.Cast("float32", X[row, j]) - m[0]))
                    V[row] = m[0] + T.log(T.Cast("float32", d[0]))
        # fmt: on
        return main

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Logits by structure, as those of logsumexp."""
        return self.sums.generate(seed, structure, settings)

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        return [*self.sums.reference(inputs), np.argmax(np.asarray(inputs[0]).astype(np.float64), axis=1)]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """Columns must be equal; values as those of logsumexp."""
        return [*self.sums.tolerance(inputs, expected[:1]), None]

    def ranked_by(self, inputs: Sequence[Any], indices: np.ndarray) -> tuple[np.ndarray, float]:
        """The elements in the columns that a peer has found: it may break ties in another way."""
        import numpy as np

        rows = np.asarray(inputs[0]).astype(np.float64)
        return np.take_along_axis(rows, indices[:, None], axis=1)[:, 0], 0.0

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        alone = self.sums.cost(inputs)
        return Cost(alone.bytes + 8 * self.batch, alone.operations + self.batch * self.vocab)


PROBLEM = RowArgmaxLogsumexp
