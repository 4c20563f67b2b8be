"""Sums of exponentials that do not depend on the order in which scores come.

Which thread block has a word may differ from run to run, and with it what is summed where. So that results do not
differ, an exponential is written as a float32, of [1, 2) mostly, the same wherever it is computed, times a whole power
of two. A sum of them is a float64 in *units* of the power that belongs to the largest score in it: changing the unit is
exact, and the order of additions shows in the 53rd bit only.

power_unit   the exponent of a score's whole power of two
two_to       the factor between two such
add_power    a score's exponential, to a sum
change_unit  a sum in another unit
over_largest what a sum is over the exponential of its largest score

A sum may also be in the unit of any one of its scores, its *base*: a float64 reaches far enough for most others. Then
nothing waits until the largest score is known.

add_to_base  a score's exponential, to such a sum
change_base  such a sum in another unit
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from .selection import bits_value

LOWEST, HIGHEST = T.min_value("float32"), T.max_value("float32")
# The distance of neighbouring products from here on is 128 and more: what rounding removed from them has no meaning.
APART = T.float32(1 << 31)
# By how many powers of two a term may differ from a sum's base: more than the 53 bits of a float64, less than its
# range.
REACH = T.float32(512)


def power_unit(score: Any, factor: Any) -> tirx.PrimExpr:
    """floor(score * factor), finite; that of the lowest score for NaN. `factor` is the scale times log2(e)."""
    return T.min(T.max(T.floor(T.max(score, LOWEST) * factor), LOWEST), HIGHEST)


def unit_of_bits(bits: Any, factor: Any) -> tirx.PrimExpr:
    """The unit of a sum whose largest score has these ordered bits, 0 for none."""
    return power_unit(bits_value(bits), factor)


def change_unit(total: Any, before: Any, after: Any) -> tirx.PrimExpr:
    """A float64 sum in the unit `before`, in the unit `after`, which is no less."""
    return total * T.Cast("float64", two_to(before - after))


def two_to(whole: Any) -> tirx.PrimExpr:
    """2^whole for a difference of units that is at most 0, in float32; below 2^-126 nothing adds to a sum."""
    exponent = T.Cast("int32", T.min(T.max(whole, T.float32(-126)), T.float32(0))) + 127
    return T.reinterpret("float32", exponent << 23)


def change_base(total: Any, before: Any, after: Any) -> tirx.PrimExpr:
    """A float64 sum in the unit `before`, in the unit `after`, which is no less."""
    return total * two_to_far(T.max(before - after, T.float32(-1022)))


def two_to_far(whole: Any) -> tirx.PrimExpr:
    """2^whole in float64, for a whole number from -1022 to 1023."""
    exponent = T.Cast("int32", whole) + 1023
    return T.reinterpret("float64", T.Cast("int64", exponent) << T.int64(52))


def is_finite(x: Any) -> tirx.PrimExpr:
    return (T.reinterpret("uint32", x) & T.uint32(0x7F800000)) != T.uint32(0x7F800000)


# fmt: off
@T.inline
def raise_rest(rest, score, factor, whole):
    """2^(score * factor - whole), with one rounding; NaN for NaN and for plus or minus infinity."""
    T.ptx.fma.rn.f32(rest[0], score, factor, T.float32(0) - whole)
    rest[0] = T.exp2(T.Select(
        T.abs(whole) >= APART, T.Select(is_finite(score), T.float32(0), T.float32("nan")), rest[0]))


@T.inline
def add_power(total, rest, score, factor, unit):
    """Add a score's exponential, in units of 2^unit, to the float64 `total`; `rest` is a float32 to work with."""
    whole: T.float32 = power_unit(score, factor)
    raise_rest(rest, score, factor, whole)
    total[0] = total[0] + T.Select(
        score == T.float32("-inf"), T.float64(0), T.Cast("float64", rest[0] * two_to(whole - unit)))


@T.inline
def add_to_base(total, base, rest, score, factor):
    """Add a score's exponential to the float64 `total`, in units of 2^`base`; of no scores `base` is LOWEST. `rest` is
    a float32 to work with."""
    whole: T.float32 = T.floor(score * factor)
    # False for NaN, too.
    if T.abs(whole - base[0]) <= REACH and T.abs(whole) < APART:
        T.ptx.fma.rn.f32(rest[0], score, factor, T.float32(0) - whole)
        total[0] = total[0] + T.Cast("float64", T.exp2(rest[0])) * two_to_far(whole - base[0])
    else:
        unit: T.float32 = power_unit(score, factor)
        raise_rest(rest, score, factor, unit)
        if unit - base[0] > REACH:
            total[0] = change_base(total[0], base[0], unit)
            base[0] = unit
        total[0] = total[0] + T.Cast(
            "float64", T.Select(score == T.float32("-inf"), T.float32(0), rest[0])) * two_to_far(
                T.max(unit - base[0], -REACH))


@T.inline
def over_largest(d, rest, total, largest, factor):
    """Set `d`, a float32, to `total` divided by the exponential of `largest`; `total` is in the unit of `largest`."""
    raise_rest(rest, largest, factor, power_unit(largest, factor))
    d[0] = T.Select(total[0] == T.float64(0), T.float32(0), T.Cast("float32", total[0]) / rest[0])
# fmt: on
