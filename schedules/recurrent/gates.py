"""The gates of a unit in a persistent kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tvm import tirx
from tvm.script import tirx as T

Phase = Callable[..., Any]
# 1 / (1 + e^-x) by the approximations of the hardware: an error of 2 units in the last place and |x| / 2 more of the
# exponential, where x is large and the result as good as 0 or 1. 1 / inf is 0.
SIGMOID = """
__device__ __forceinline__ float sigmoid_of(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
"""


# 1 - 2 / (1 + e^2x) likewise: an absolute error of some 2^-23. The compiler's own, by its flag for fast arithmetic, is
# an instruction that is off by 2^-11.
TANH = """
__device__ __forceinline__ float tanh_of(float x) { return 1.0f - __fdividef(2.0f, 1.0f + __expf(2.0f * x)); }
"""


def tanh(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Hyperbolic tangent."""
    return T.cuda.func_call("tanh_of", x, source_code=TANH, return_type="float32")


def sigmoid(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """1 / (1 + e^-x)."""
    return T.cuda.func_call("sigmoid_of", x, source_code=SIGMOID, return_type="float32")


class Gated(Protocol):
    """What the extents of a kernel say of its gates."""

    @property
    def cell(self) -> str:
        """One of the problem's cells."""

    @property
    def pack(self) -> int:
        """Sums between one gate's and the next one's."""


# fmt: off
def gates(e: Gated) -> Phase:
    """The state after the step from the sums and the inputs; the phase is (s, io, u).

    Reads: `sums`, `x`, `own`, `cell`, the bias. Writes: `result`, `cell`. Barriers: none.
    """
    k = e.pack

    @T.inline
    def plain(s, io, u):
        if e.cell == "tanh":
            s.result[0] = tanh(s.x[u] + s.sums[0])
        else:  # of a comparison with NaN the other side is taken
            s.result[0] = s.x[u] + s.sums[0]
            s.result[0] = T.Select(s.result[0] < T.float32(0), T.float32(0), s.result[0])

    @T.inline
    def lstm(s, io, u):
        s.cell[0] = (
            sigmoid(s.x[u * 4 + 1] + s.sums[k]) * s.cell[0]
            + sigmoid(s.x[u * 4] + s.sums[0]) * tanh(s.x[u * 4 + 2] + s.sums[2 * k]))
        s.result[0] = sigmoid(s.x[u * 4 + 3] + s.sums[3 * k]) * tanh(s.cell[0])

    @T.inline
    def gru(s, io, u):
        s.passed[0] = sigmoid(s.x[u * 3 + 1] + s.sums[k])
        s.result[0] = tanh(s.x[u * 3 + 2] + sigmoid(s.x[u * 3] + s.sums[0]) * (
            s.sums[2 * k] + T.Cast("float32", io.hidden_bias[s.unit[u]])))
        s.result[0] = (T.float32(1) - s.passed[0]) * s.result[0] + s.passed[0] * s.own[0]

    return {"lstm": lstm, "gru": gru}.get(e.cell, plain)
# fmt: on
