"""The logarithm of softmax's normaliser.

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax", Algorithm 3, lines 1 to 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import Argument, Cost, Problem, Settings, numpy_dtype
from tvm_sparse.operators.softmax.problem import Softmax
from tvm_sparse.operators.softmax.rows import SHIFT, STRUCTURES, normaliser, require_rows, row_logits
from tvm_sparse.operators.softmax_topk.problem import ABSOLUTE_LOG

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx


@dataclass(frozen=True)
class LogSumExp(Problem):
    """`values = log(sum(exp(logits), -1))` for logits `(batch, vocab)`: the normaliser of softmax, by Algorithm 3."""

    batch: int
    vocab: int
    dtype: str = "float32"

    operator: ClassVar[str] = "logsumexp"
    batch_axis: ClassVar[str] = "batch"
    inputs: ClassVar[tuple[Argument, ...]] = Softmax.inputs[:1]
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("values", ("batch",), "float32", "Logarithms of the rows' sums of exponentials."),
    )
    structures: ClassVar[tuple[str, ...]] = STRUCTURES
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = (*STRUCTURES, "mixed")
    example: ClassVar[Mapping[str, Any]] = {"batch": 512, "vocab": 10240}
    source: ClassVar[str] = "Milakov & Gimelshein 2018, Algorithm 3, lines 1-6"

    def __post_init__(self) -> None:
        require_rows(self)

    @property
    def scaled(self) -> tuple[str, ...]:
        return ("logits",)

    @property
    def shifted(self) -> tuple[str, ...]:
        return self.scaled

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        return {
            "batch": distribution.batch(rng),
            "vocab": distribution.vocab(rng),
            "dtype": distribution.dtype(rng),
        }

    def definition(self) -> tirx.PrimFunc:
        """Lines 1 to 6 of Algorithm 3, one row after another."""
        return self.stages(lanes=0)

    def stages(self, lanes: int) -> tirx.PrimFunc:
        """The definition in the stages of `Softmax.stages`, the last one `values`."""
        from tvm import te

        batch = te.var("batch", "int64")
        logits = te.placeholder((batch, self.vocab), self.dtype, "logits")
        m, d = normaliser(logits, "online", lanes, finite=True)
        assert m is not None  # only the naive algorithm has none
        out = te.compute((batch,), lambda b: m[b] + te.log(d[b]), "values")
        return te.create_prim_func([logits, out]).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Logits by structure, as for `softmax`."""
        structure, _ = self.chosen(structure, settings)
        return [row_logits(self, seed, structure, SHIFT["online"])]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        x = np.asarray(inputs[0]).astype(np.float64)
        top = np.max(x, axis=1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)  # as in torch, so that infinities propagate
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return [np.log(np.exp(x - top).sum(axis=1)) + top[:, 0]]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The rounding error of a float32 sum and its logarithm."""
        import numpy as np

        return [ABSOLUTE_LOG + 1e-6 * np.abs(expected[0])]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        logits = self.batch * self.vocab
        return Cost(logits * numpy_dtype(self.dtype).itemsize + 4 * self.batch, 3 * logits)


PROBLEM = LogSumExp
