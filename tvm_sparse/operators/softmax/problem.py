"""Softmax over rows, and the logarithm of its normaliser: the three algorithms of the paper, each as TE.

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax": Algorithm 1 (`naive`), 2 (`safe`) and 3
(`online`), and the operator of equation 4, which joins partial results of a row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from tvm_sparse.core import distribution
from tvm_sparse.core.problem import OPTIONAL, Argument, Cost, Problem, ProblemError, Settings, numpy_dtype
from tvm_sparse.core.rounding import ROUNDING, SMALLEST
from tvm_sparse.operators.softmax_topk.problem import ABSOLUTE_LOG, RELATIVE

from .rows import SHIFT, STRUCTURES, float32_range, normaliser, require_rows, row_logits

if TYPE_CHECKING:
    import random

    import numpy as np
    from tvm import tirx

ALGORITHMS = ("online", "safe", "naive")


@dataclass(frozen=True)
class Softmax(Problem):
    """`probabilities = softmax(logits, -1)`, or their logarithms, for logits `(batch, vocab)`.

    `result` is the dtype of the probabilities: that of the logits by default, or float32 for logits of 16 bits.
    """

    batch: int
    vocab: int
    algorithm: str = "online"
    dtype: str = "float32"
    result: str = field(default="", metadata=OPTIONAL)

    operator: ClassVar[str] = "softmax"
    batch_axis: ClassVar[str] = "batch"
    inputs: ClassVar[tuple[Argument, ...]] = (
        Argument("logits", ("batch", "vocab"), "dtype", "Unnormalised scores, row-major."),
        Argument("log", (), "int32", "Nonzero for log-probabilities."),
    )
    outputs: ClassVar[tuple[Argument, ...]] = (
        Argument("probabilities", ("batch", "vocab"), "dtype", "Probabilities, or their logarithms."),
    )
    structures: ClassVar[tuple[str, ...]] = STRUCTURES
    tuned: ClassVar[str] = "random"
    verified: ClassVar[tuple[str, ...]] = (*STRUCTURES, "mixed")
    settings: ClassVar[tuple[Settings, ...]] = ({"log": 0}, {"log": 1})
    alike: ClassVar[tuple[str, ...]] = ("result",)
    example: ClassVar[Mapping[str, Any]] = {"batch": 512, "vocab": 10240}
    source: ClassVar[str] = "Milakov & Gimelshein 2018, Algorithms 1, 2 and 3"

    def __post_init__(self) -> None:
        require_rows(self)
        if self.algorithm not in ALGORITHMS:
            raise ProblemError(f"softmax: algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}")
        if self.result and (self.result != "float32" or self.dtype == "float32"):
            raise ProblemError(
                f"softmax: result is float32, for logits of 16 bits, or absent, got {self.result!r} of {self.dtype}"
            )

    @property
    def out_dtype(self) -> str:
        """The dtype of the probabilities."""
        return self.result or self.dtype

    def dtype_of(self, argument: Argument) -> str:
        return self.out_dtype if argument in self.outputs else super().dtype_of(argument)

    @property
    def scaled(self) -> tuple[str, ...]:
        """None for the naive algorithm, whose limited range is part of its definition."""
        return ("logits",) if self.algorithm != "naive" else ()

    @property
    def shifted(self) -> tuple[str, ...]:
        return self.scaled

    @classmethod
    def drawn_axes(cls, rng: random.Random) -> dict[str, Any]:
        axes = {
            "batch": distribution.batch(rng),
            "vocab": distribution.vocab(rng),
            "algorithm": "online" if distribution.flag(rng, 0.8) else rng.choice(ALGORITHMS),
            "dtype": distribution.dtype(rng),
        }
        wide = axes["dtype"] != "float32" and distribution.flag(rng, 0.2)
        return {**axes, "result": "float32" if wide else ""}

    def definition(self) -> tirx.PrimFunc:
        """The algorithm as the paper writes it, one row after another."""
        return self.stages(lanes=0)

    def stages(self, lanes: int) -> tirx.PrimFunc:
        """The definition in stages for schedules: those of the normaliser, and `probabilities`.

        naive: `d`. safe: `m`, `d`. online: `md`, the reduction by equation 4 over `lanes` parts of a row (0: over the
        whole row), which `m` and `d` then join.
        """
        from tvm import te, tirx

        batch, log = te.var("batch", "int64"), te.var("log", "int32")
        logits = te.placeholder((batch, self.vocab), self.dtype, "logits")
        m, d = normaliser(logits, self.algorithm, lanes, finite=False)

        def probability(b: tirx.Var, i: tirx.Var) -> tirx.PrimExpr:
            shifted = logits[b, i].astype("float32") - (m[b] if m is not None else tirx.const(0, "float32"))
            chosen = tirx.Select(log != 0, shifted - te.log(d[b]), te.exp(shifted) / d[b])
            return chosen.astype(self.out_dtype)

        out = te.compute((batch, self.vocab), probability, "probabilities")
        return te.create_prim_func([logits, log, out]).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None, settings: Settings | None = None) -> list[Any]:
        """Logits by structure.

        `shifted`: normal around 1000, where e^x overflows (around 60 for the naive algorithm, which cannot handle
        overflow). The other structures are those of `softmax_topk`.
        """
        structure, chosen = self.chosen(structure, settings)
        return [row_logits(self, seed, structure, SHIFT[self.algorithm]), chosen["log"]]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """Equation 1 or 2 in float64; for the naive algorithm with float32's range, which is part of its definition."""
        import numpy as np

        logits, log = inputs
        x = np.asarray(logits).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            if self.algorithm != "naive":
                x = x - np.max(x, axis=1, keepdims=True)
            e = float32_range(np.exp(x))
            total = float32_range(e.sum(axis=1, keepdims=True))
            return [x - np.log(total) if log else e / total]

    def tolerance(self, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> list[np.ndarray | None]:
        """The rounding error of float32 sums and of the output's dtype."""
        import numpy as np

        absolute = SMALLEST[self.out_dtype] + (ABSOLUTE_LOG if inputs[1] else 0.0)
        relative = ROUNDING[self.out_dtype] + (1e-6 if inputs[1] else RELATIVE)
        return [absolute + relative * np.abs(expected[0])]

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        logits = self.batch * self.vocab
        sizes = sum(numpy_dtype(dtype).itemsize for dtype in (self.dtype, self.out_dtype))
        return Cost(logits * sizes, 4 * logits)


PROBLEM = Softmax
