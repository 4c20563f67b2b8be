"""Expressions that several templates share: a vectorisable exponential, and keys that order like floats."""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

# 2^r for r in [-0.5, 0.5], interpolated at the Chebyshev nodes of degree 6 (relative error 2.5e-9); constant first.
EXP2 = (1.0, 0.6931472067, 0.2402265092, 0.0555032723, 0.0096180567, 0.0013400428, 0.0001546144)


def exp_nonpositive(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """e^x for x <= 0 in float32, from instructions that every vector unit has; NaN stays NaN, below e^-87 is 0.

    LLVM turns a vector of `llvm.exp` into calls of the scalar library function, which are 20 times slower.
    """
    f32 = lambda value: tirx.const(value, "float32")  # noqa: E731
    scaled = x * f32(LOG2_E)
    whole = T.floor(scaled + f32(0.5))
    r = scaled - whole
    power = f32(EXP2[-1])
    for coefficient in reversed(EXP2[:-1]):
        power = power * r + f32(coefficient)
    value = T.reinterpret("float32", T.reinterpret("int32", power) + (T.Cast("int32", whole) << 23))
    return T.Select(scaled < f32(-126.0), f32(0.0), value)


def exp_any(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """e^x in float32, as `exp_nonpositive`; infinite where e^x exceeds the largest float32."""
    return T.Select(x > tirx.const(88.7228, "float32"), T.infinity("float32"), exp_nonpositive(x))


def is_nan(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Whether a float32 is NaN, by its bits: the simplifier takes `x != x` for false."""
    return (T.reinterpret("int32", x) & 0x7FFFFFFF) > 0x7F800000


def order_key(x: tirx.PrimExpr, index: tirx.PrimExpr) -> tirx.PrimExpr:
    """An int64 that orders as (x descending, index ascending) does under `>`; NaN above all, -0.0 equal to 0.0."""
    bits = T.reinterpret("int32", x)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = T.Select(x == T.float32(0), T.int32(0), T.Select(is_nan(x), T.int32(0x7FFFFFFF), ordered))
    return (T.Cast("int64", ordered) << T.int64(32)) | (T.int64(0xFFFFFFFF) - T.Cast("int64", index))


def key_value(key: tirx.PrimExpr) -> tirx.PrimExpr:
    """The float32 of a key of `order_key`."""
    ordered = T.Cast("int32", key >> T.int64(32))
    return T.reinterpret("float32", ordered ^ ((ordered >> 31) & 0x7FFFFFFF))


def key_index(key: tirx.PrimExpr) -> tirx.PrimExpr:
    """The int64 index of a key of `order_key`."""
    return T.int64(0xFFFFFFFF) - (key & T.int64(0xFFFFFFFF))
