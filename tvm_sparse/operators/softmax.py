"""Softmax over rows, and the logarithm of its normaliser: the three algorithms of the paper, each as TE.

Milakov & Gimelshein 2018, "Online normalizer calculation for softmax": Algorithm 1 (`naive`), 2 (`safe`) and
3 (`online`), and the operator of equation 4, by which parts of a row that were gone through apart are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .problem import Argument, Cost, Mismatch, Problem, ProblemError, numpy_dtype, require_dtype, require_positive
from .softmax_topk import ABSOLUTE_LOG, RELATIVE, TINY, SoftmaxTopk

if TYPE_CHECKING:
    import numpy as np
    from tvm import te, tirx

ALGORITHMS = ("online", "safe", "naive")

# Half a unit in the last place, relative; and half of the least subnormal number.
ROUNDING = {"float32": (0.0, 0.0), "float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 0.0)}
# Logits of the structure `shifted` lie around this: e^1000 overflows, and e^60 times any vocabulary does not.
SHIFT = {"online": 1000.0, "safe": 1000.0, "naive": 60.0}
STRUCTURES = ("random", "special", "masked", "ascending", "shifted")


@dataclass(frozen=True)
class Softmax(Problem):
    """`probabilities = softmax(logits, -1)`, or their logarithms, for logits `(batch, vocab)`."""

    batch: int
    vocab: int
    algorithm: str = "online"
    dtype: str = "float32"

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
    example: ClassVar[Mapping[str, Any]] = {"batch": 512, "vocab": 10240}
    source: ClassVar[str] = "Milakov & Gimelshein 2018, Algorithms 1, 2 and 3"

    def __post_init__(self) -> None:
        _require_rows(self)
        if self.algorithm not in ALGORITHMS:
            raise ProblemError(f"softmax: algorithm must be one of {', '.join(ALGORITHMS)}, got {self.algorithm!r}")

    def definition(self) -> tirx.PrimFunc:
        """The algorithm as the paper writes it, one row after another."""
        return self.stages(lanes=0)

    def stages(self, lanes: int) -> tirx.PrimFunc:
        """The definition, in the stages that a schedule places: the normaliser's, and `probabilities`.

        naive: `d`. safe: `m`, `d`. online: `md`, the reduction by equation 4; of `lanes` parts of a row (0: one, the
        whole), which `m` and `d` then join.
        """
        from tvm import te, tirx

        batch, log = te.var("batch", "int64"), te.var("log", "int32")
        logits = te.placeholder((batch, self.vocab), self.dtype, "logits")
        m, d = _normaliser(logits, self.algorithm, lanes, finite=False)

        def probability(b: tirx.Var, i: tirx.Var) -> tirx.PrimExpr:
            shifted = logits[b, i].astype("float32") - (m[b] if m is not None else tirx.const(0, "float32"))
            chosen = tirx.Select(log != 0, shifted - te.log(d[b]), te.exp(shifted) / d[b])
            return chosen.astype(self.dtype)

        out = te.compute((batch, self.vocab), probability, "probabilities")
        return te.create_prim_func([logits, log, out]).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None) -> list[Any]:
        """Logits by structure, drawn from `seed`; `log` is 0 for even seeds and 1 for odd ones.

        `shifted`: normal around 1000, where e^x overflows (around 60 for the naive algorithm, for which it must not).
        The others are those of `softmax_topk`.
        """
        return [_logits(self, seed, structure, SHIFT[self.algorithm]), seed % 2]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        """Equation 1 or 2 in float64; of the naive algorithm with float32's range, which is part of it."""
        import numpy as np

        logits, log = inputs
        x = np.asarray(logits).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            if self.algorithm != "naive":
                x = x - np.max(x, axis=1, keepdims=True)
            e = _float32_range(np.exp(x))
            total = _float32_range(e.sum(axis=1, keepdims=True))
            return [x - np.log(total) if log else e / total]

    def check(self, inputs: Sequence[Any], expected: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Within the rounding of float32 sums and of the output's dtype; NaN and infinities where the reference has."""
        import numpy as np

        wanted = expected[0]
        relative, least = ROUNDING[self.dtype]
        absolute = ABSOLUTE_LOG if inputs[1] else TINY
        with np.errstate(invalid="ignore"):
            bound = absolute + least + (relative + (1e-6 if inputs[1] else RELATIVE)) * np.abs(wanted)
        _compare("probabilities", outputs[0], wanted, bound)

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        logits = self.batch * self.vocab
        return Cost(2 * logits * numpy_dtype(self.dtype).itemsize, 4 * logits)


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
    example: ClassVar[Mapping[str, Any]] = {"batch": 512, "vocab": 10240}
    source: ClassVar[str] = "Milakov & Gimelshein 2018, Algorithm 3, lines 1-6"

    def __post_init__(self) -> None:
        _require_rows(self)

    def definition(self) -> tirx.PrimFunc:
        """Lines 1 to 6 of Algorithm 3, one row after another."""
        return self.stages(lanes=0)

    def stages(self, lanes: int) -> tirx.PrimFunc:
        """The definition in the stages of `Softmax.stages`, the last one `values`."""
        from tvm import te

        batch = te.var("batch", "int64")
        logits = te.placeholder((batch, self.vocab), self.dtype, "logits")
        m, d = _normaliser(logits, "online", lanes, finite=True)
        assert m is not None  # only the naive algorithm has none
        out = te.compute((batch,), lambda b: m[b] + te.log(d[b]), "values")
        return te.create_prim_func([logits, out]).with_attr("global_symbol", "main")

    def generate(self, seed: int, structure: str | None = None) -> list[Any]:
        """Logits by structure, as for `softmax`."""
        return [_logits(self, seed, structure, SHIFT["online"])]

    def reference(self, inputs: Sequence[Any]) -> list[np.ndarray]:
        import numpy as np

        x = np.asarray(inputs[0]).astype(np.float64)
        top = np.max(x, axis=1, keepdims=True)
        top = np.where(np.isfinite(top), top, 0.0)  # as torch does, so that infinities come through
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            return [np.log(np.exp(x - top).sum(axis=1)) + top[:, 0]]

    def check(self, inputs: Sequence[Any], expected: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> None:
        """Within the rounding of a float32 sum and its logarithm; NaN and infinities where the reference has them."""
        import numpy as np

        with np.errstate(invalid="ignore"):
            bound = ABSOLUTE_LOG + 1e-6 * np.abs(expected[0])
        _compare("values", outputs[0], expected[0], bound)

    def cost(self, inputs: Sequence[Any] | None = None) -> Cost:
        logits = self.batch * self.vocab
        return Cost(logits * numpy_dtype(self.dtype).itemsize + 4 * self.batch, 3 * logits)


def _require_rows(problem: Problem) -> None:
    require_positive(problem, "batch", "vocab")
    require_dtype(problem)
    vocab = problem.axes["vocab"]
    if vocab >= 2**31:
        raise ProblemError(f"{problem.operator}: vocab must be below 2^31, got {vocab}")


def _logits(problem: Softmax | LogSumExp, seed: int, structure: str | None, shift: float) -> np.ndarray:
    if structure is not None and structure not in STRUCTURES:
        raise ProblemError(f"structure: got {structure!r}; expected one of {', '.join(STRUCTURES)}")
    base = "random" if structure in (None, "shifted") else structure
    x = SoftmaxTopk(problem.batch, problem.vocab, 1, problem.dtype).generate(seed, base)[0]
    return (x.astype("float32") + shift).astype(x.dtype) if structure == "shifted" else x


def _float32_range(x: np.ndarray) -> np.ndarray:
    """What is beyond the largest float32 becomes infinite, what is below the least normal one 0."""
    import numpy as np

    x = np.where(x > np.finfo(np.float32).max, np.inf, x)
    return np.where(x < TINY, 0.0, x)


def _compare(name: str, found: np.ndarray, wanted: np.ndarray, bound: np.ndarray) -> None:
    import numpy as np

    found = np.asarray(found).astype(np.float64)
    with np.errstate(invalid="ignore"):
        # Where an infinity is wanted the bound is infinite too, and says nothing.
        close = np.isfinite(wanted) & (np.abs(found - wanted) <= bound)
    wrong = np.argwhere(~(close | (found == wanted) | (np.isnan(found) & np.isnan(wanted))))
    if len(wrong):
        place = tuple(wrong[0])
        raise Mismatch(
            f"{name}[{', '.join(map(str, place))}] is {found[place]:.9g}, expected {wanted[place]:.9g}"
            f" ({len(wrong)} of {found.size} differ)"
        )


def _normaliser(logits: te.Tensor, algorithm: str, lanes: int, finite: bool) -> tuple[te.Tensor | None, te.Tensor]:
    """(m, d) of every row, by the paper's Algorithm 1 (which has no m), 2 or 3.

    The maximum begins at the least finite number in the place of minus infinity, so that no difference of infinities
    arises: rows of nothing but minus infinity have d = 0. `finite` also keeps it at the largest finite number, so
    that plus infinity makes d infinite and not NaN, as the logarithm of the sum wants it.
    """
    from tvm import te, tirx

    batch, vocab = logits.shape
    f32 = "float32"

    def x(b: tirx.Var, j: tirx.PrimExpr) -> tirx.PrimExpr:
        if logits.dtype == "bfloat16" and algorithm == "online":
            # By its bits: a cast in a reduction of pairs is one inside of a let, where the compiler takes the bits of a
            # bfloat16 for an integer's (0.27).
            return tirx.reinterpret(f32, tirx.reinterpret("uint16", logits[b, j]).astype("uint32") << 16)
        return logits[b, j].astype(f32)

    if algorithm == "naive":
        j = te.reduce_axis((0, vocab), "j")
        return None, te.compute((batch,), lambda b: te.sum(te.exp(x(b, j)), axis=j), "d")
    if algorithm == "safe":
        j, k = te.reduce_axis((0, vocab), "j"), te.reduce_axis((0, vocab), "k")
        m = te.compute((batch,), lambda b: te.max(x(b, k), axis=k), "m")
        return m, te.compute((batch,), lambda b: te.sum(te.exp(x(b, j) - m[b]), axis=j), "d")

    def joined(left: tuple[Any, Any], right: tuple[Any, Any]) -> tuple[Any, Any]:
        """Equation 4."""
        m = te.max(left[1], right[1])
        if finite:
            m = te.min(m, te.max_value(f32))
        return left[0] * te.exp(left[1] - m) + right[0] * te.exp(right[1] - m), m

    join = te.comm_reducer(joined, lambda *_: (tirx.const(0, f32), te.min_value(f32)), "join")
    one = tirx.const(1, f32)
    q = te.reduce_axis((0, -(-vocab // max(lanes, 1))), "q")
    if not lanes:
        d, m = te.compute((batch,), lambda b: join((one, x(b, q)), axis=q), "md")
        return m, d

    def element(b: tirx.Var, lane: tirx.Var) -> tirx.PrimExpr:
        j = q * lanes + lane
        return tirx.if_then_else(j < vocab, x(b, j), -tirx.infinity(f32)) if vocab % lanes else x(b, j)

    # Within a part both are reduced at once; the parts then one after the other, by reductions that every schedule
    # primitive knows and with one exponential a part. A reduction of pairs across threads is lowered as if its outputs
    # were independent, which these are not.
    parts_d, parts_m = te.compute((batch, lanes), lambda b, lane: join((one, element(b, lane)), axis=q), "md")
    k, n = te.reduce_axis((0, lanes), "k"), te.reduce_axis((0, lanes), "n")
    m = te.compute((batch,), lambda b: te.max(parts_m[b, n], axis=n), "m")
    return m, te.compute((batch,), lambda b: te.sum(parts_d[b, k] * te.exp(parts_m[b, k] - m[b]), axis=k), "d")
