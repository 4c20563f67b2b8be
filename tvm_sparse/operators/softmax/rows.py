"""Code shared by softmax and logsumexp: their rows, and the stages of the normaliser."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm_sparse.core.problem import Problem, ProblemError, require_dtype, require_positive
from tvm_sparse.operators.softmax_topk.problem import TINY, SoftmaxTopk

if TYPE_CHECKING:
    import numpy as np
    from tvm import te, tirx

# Center of the logits of structure `shifted`: e^1000 overflows, while e^60 times any vocabulary does not.
SHIFT = {"online": 1000.0, "safe": 1000.0, "naive": 60.0}
STRUCTURES = ("random", "special", "masked", "ascending", "constant", "shifted", "mixed")


def require_rows(problem: Problem) -> None:
    require_positive(problem, "batch", "vocab")
    require_dtype(problem)
    vocab = problem.axes["vocab"]
    if vocab >= 2**31:
        raise ProblemError(f"{problem.operator}: vocab must be below 2^31, got {vocab}")


def row_logits(problem: Problem, seed: int, structure: str, shift: float) -> np.ndarray:
    base = "random" if structure == "shifted" else structure
    x = SoftmaxTopk(problem.axes["batch"], problem.axes["vocab"], 1, problem.axes["dtype"]).generate(seed, base)[0]
    return (x.astype("float32") + shift).astype(x.dtype) if structure == "shifted" else x


def float32_range(x: np.ndarray) -> np.ndarray:
    """Numbers beyond the largest float32 become infinite, those below the least normal one 0."""
    import numpy as np

    x = np.where(x > np.finfo(np.float32).max, np.inf, x)
    return np.where(x < TINY, 0.0, x)


def normaliser(logits: te.Tensor, algorithm: str, lanes: int, finite: bool) -> tuple[te.Tensor | None, te.Tensor]:
    """(m, d) of every row, by the paper's Algorithm 1 (which has no m), 2 or 3.

    The maximum begins at the least finite number instead of minus infinity, so that no difference of infinities occurs:
    rows with only minus infinity have d = 0. `finite` also limits it to the largest finite number, so that plus
    infinity makes d infinite instead of NaN, as logsumexp requires.
    """
    from tvm import te, tirx

    batch, vocab = logits.shape
    f32 = "float32"

    def x(b: tirx.Var, j: tirx.PrimExpr) -> tirx.PrimExpr:
        if logits.dtype == "bfloat16" and algorithm == "online":
            # Converted by its bits: a cast in a reduction of pairs becomes one inside a let, where the compiler (0.27)
            # takes the bits of a bfloat16 for an integer.
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

    # Within a part both are reduced together; the parts are joined by separate reductions, which every schedule
    # primitive supports, with one exponential per part. A reduction of pairs across threads would be lowered as if its
    # outputs were independent, which these are not.
    parts_d, parts_m = te.compute((batch, lanes), lambda b, lane: join((one, element(b, lane)), axis=q), "md")
    k, n = te.reduce_axis((0, lanes), "k"), te.reduce_axis((0, lanes), "n")
    m = te.compute((batch,), lambda b: te.max(parts_m[b, n], axis=n), "m")
    return m, te.compute((batch,), lambda b: te.sum(parts_d[b, k] * te.exp(parts_m[b, k] - m[b]), axis=k), "d")
