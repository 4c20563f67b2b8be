"""Sigmoid and tanh of a GPU, and the gates of a unit in a persistent kernel."""

from __future__ import annotations

from typing import Protocol

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

# 1 / (1 + e^-x) by the approximate instructions of the hardware: an error of 2 units in the last place, and of |x| / 2
# more from the exponential where x is large and the result is nearly 0 or 1. 1 / inf is 0.
SIGMOID = """
__device__ __forceinline__ float sigmoid_of(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
"""
# 1 - 2 / (1 + e^2x) in the same way: an absolute error of some 2^-23. The instruction that the compiler's flag for fast
# arithmetic would choose is off by 2^-11.
TANH = """
__device__ __forceinline__ float tanh_of(float x) { return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x)); }
"""


def sigmoid(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """1 / (1 + e^-x)."""
    return T.cuda.func_call("sigmoid_of", x, source_code=SIGMOID, return_type="float32")


def tanh(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Hyperbolic tangent."""
    return T.cuda.func_call("tanh_of", x, source_code=TANH, return_type="float32")


class Gated(Protocol):
    """What the extents of a kernel say of its gates."""

    @property
    def cell(self) -> str:
        """The problem's cell, such as "lstm"."""

    @property
    def gates(self) -> int:
        """Gates of a unit."""

    @property
    def pack(self) -> int:
        """Stride from a unit's sum for one gate to its sum for the next, in elements."""


# fmt: off
def gates(e: Gated) -> Phase:
    """The state after the step from the sums and the inputs; the phase is (s, io, u).

    Reads: `sums`, `x`, `own`, `cell`, the bias; with the reset before the product z, in `passed`.
    Writes: `result`, `cell`. Barriers: none.
    """
    many, k = e.gates, e.pack

    @T.inline
    def plain(s, io, u):
        if e.cell == "tanh":
            s.result[u] = tanh(s.x[u] + s.sums[u * k])
        else:  # in a comparison with NaN the other operand is taken
            s.result[u] = s.x[u] + s.sums[u * k]
            s.result[u] = T.Select(s.result[u] < T.float32(0), T.float32(0), s.result[u])
        if e.cell == "clipped_relu":
            s.result[u] = T.Select(s.result[u] > io.limit, io.limit, s.result[u])

    @T.inline
    def lstm(s, io, u):
        row = T.meta_var(u * many)
        s.cell[0] = (
            sigmoid(s.x[row + 1] + s.sums[(row + 1) * k]) * s.cell[0]
            + sigmoid(s.x[row] + s.sums[row * k]) * tanh(s.x[row + 2] + s.sums[(row + 2) * k]))
        s.result[u] = sigmoid(s.x[row + 3] + s.sums[(row + 3) * k]) * tanh(s.cell[0])

    @T.inline
    def gru(s, io, u):
        row = T.meta_var(u * many)
        s.passed[0] = sigmoid(s.x[row + 1] + s.sums[(row + 1) * k])
        s.result[u] = tanh(s.x[row + 2] + sigmoid(s.x[row] + s.sums[row * k]) * (
            s.sums[(row + 2) * k] + T.Cast("float32", io.hidden_bias[s.unit[u]])))
        s.result[u] = (T.float32(1) - s.passed[0]) * s.result[u] + s.passed[0] * s.own[0]

    @T.inline
    def reset_before(s, io, u):
        row = T.meta_var(u * many)
        s.result[u] = (
            (T.float32(1) - s.passed[0]) * tanh(s.x[row + 2] + s.sums[(row + 2) * k]) + s.passed[0] * s.own[0])

    return {"lstm": lstm, "gru": gru, "gru_reset_before": reset_before}.get(e.cell, plain)


@phase
def reset_gates(e, /, s, u):
    """The first half of a step with the reset before the product.

    Reads: `sums` and `x` of r and z, `own`. Writes: `passed`, z; `result`, the state before the step times r.
    Barriers: none.
    """
    row = T.meta_var(u * e.gates)
    s.passed[0] = sigmoid(s.x[row + 1] + s.sums[(row + 1) * e.pack])
    s.result[u] = sigmoid(s.x[row] + s.sums[row * e.pack]) * s.own[0]
# fmt: on
