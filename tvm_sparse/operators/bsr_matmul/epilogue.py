"""The epilogue of a product, applied before it is stored: bias and activation, the same in every template."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T


def activate(value: tirx.PrimExpr, activation: str) -> tirx.PrimExpr:
    """The activation of a float32 value; NaN stays NaN."""
    zero, one, half = (tirx.const(v, "float32") for v in (0.0, 1.0, 0.5))
    if activation == "relu":
        return T.Select(value < zero, zero, value)
    if activation == "gelu":
        return half * value * (one + T.erf(value * tirx.const(0.5**0.5, "float32")))
    if activation == "silu":
        return value / (one + T.exp(-value))
    return value


def finish(value: tirx.PrimExpr, bias: tirx.PrimExpr | None, activation: str, dtype: str) -> tirx.PrimExpr:
    """The stored value for a float32 sum: bias added, activation applied, converted to the output's dtype."""
    if bias is not None:
        value = value + T.Cast("float32", bias)
    return T.Cast(dtype, activate(value, activation))
