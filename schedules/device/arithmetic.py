"""Expressions on float32 that templates share: exponentials and what is made of them for SIMD code, a test for NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

# (a, b, c) -> a * b + c, with one rounding or two.
Fma = Callable[[Any, Any, Any], Any]

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453

# The polynomial of degree 6 that interpolates 2^r at Chebyshev nodes of [-0.5, 0.5], with a relative error of 2.5e-9.
# The constant term comes first.
EXP2 = (1.0, 0.6931472067, 0.2402265092, 0.0555032723, 0.0096180567, 0.0013400428, 0.0001546144)

# (tanh(x) / x - 1) / x^2 as a polynomial in x^2, at Chebyshev nodes of |x| < 0.625, with an error of 1.7e-8 of tanh(x).
TANH_ODD = (-0.3333332894, 0.1333276974, -0.05385090958, 0.020997179, -0.006096714165)
TANH_SMALL = 0.625


def exp_nonpositive(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """e^x for x <= 0 in float32, from instructions that every SIMD unit has.

    e^x = 2^n * 2^r, n a whole number and r in [-0.5, 0.5]: 2^r is a polynomial, and n is added to its exponent's bits.
    NaN stays NaN; results below 2^-126, the smallest normal float32, are 0. LLVM turns a vector of `llvm.exp` into
    calls of the scalar library function, which are 20 times slower.
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
    """e^x in float32, computed as `exp_nonpositive` does; infinite where it exceeds the largest float32."""
    return T.Select(x > tirx.const(88.7228, "float32"), T.infinity("float32"), exp_nonpositive(x))


def sigmoid(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """1 / (1 + e^-x) in float32, for SIMD code; NaN stays NaN."""
    power = exp_nonpositive(-T.abs(x))
    return T.Select(x < tirx.const(0, "float32"), power, tirx.const(1, "float32")) / (tirx.const(1, "float32") + power)


def tanh(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Hyperbolic tangent in float32, for SIMD code, with an absolute error of some 2^-23; NaN stays NaN."""
    one = tirx.const(1, "float32")
    power = exp_nonpositive(tirx.const(-2, "float32") * T.abs(x))
    size = (one - power) / (one + power)
    return T.Select(x < tirx.const(0, "float32"), -size, size)


def tanh_small(x: tirx.PrimExpr, fma: Fma) -> tirx.PrimExpr:
    """Hyperbolic tangent of |x| < `TANH_SMALL` in float32 with a relative error of some 2^-22; NaN stays NaN."""
    square = x * x
    series = tirx.const(TANH_ODD[-1], "float32")
    for coefficient in reversed(TANH_ODD[:-1]):
        series = fma(series, square, tirx.const(coefficient, "float32"))
    return fma(x * square, series, x)


def tanh_relative(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Hyperbolic tangent in float32 with a relative error of some 2^-22, for SIMD code; NaN stays NaN."""
    small = tanh_small(x, lambda a, b, c: a * b + c)
    return T.Select(T.abs(x) < tirx.const(TANH_SMALL, "float32"), small, tanh(x))


def tanh_on_gpu(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """The same on a GPU. `T.tanh` is one instruction there, with a relative error of 2^-11, as TVM compiles with
    `--use_fast_math`. Wherever it stands, the compiler makes the same operations of it: each sum is one of a product,
    which leaves nothing to contract.
    """
    f32 = lambda value: tirx.const(value, "float32")  # noqa: E731
    inverse = f32(1) / (T.exp2(T.abs(x) * f32(2 * LOG2_E)) + f32(1))
    size = fma_on_gpu(f32(-2), inverse, f32(1))
    large = T.Select(x < f32(0), f32(0) - size, size)
    return T.Select(T.abs(x) < f32(TANH_SMALL), tanh_small(x, fma_on_gpu), large)


def fma_on_gpu(a: tirx.PrimExpr, b: tirx.PrimExpr, c: tirx.PrimExpr) -> tirx.PrimExpr:
    """a * b + c with one rounding."""
    return T.call_extern("float32", "__fmaf_rn", a, b, c)


def is_nan(x: tirx.PrimExpr) -> tirx.PrimExpr:
    """Whether a float32 is NaN, by its bits: TVM's simplifier folds `x != x` to false."""
    return (T.reinterpret("int32", x) & 0x7FFFFFFF) > 0x7F800000
