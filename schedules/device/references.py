"""References of exponentials: 2^(x * factor - reference), where reference = m * factor for a row's largest element m.

One `fma` computes the exponent, so that the rounding of the reference is the same for all elements and cancels in the
quotient. It is at most 2^-24 of the reference. From `FAR` on that is so much that powers overflow or vanish: in a row
of padding, say, whose elements are all -1e30. But then elements that differ are at least 2^7 apart once they are
multiplied by the factor, and those below m contribute nothing to the sum. With a power of two for a factor that brings
m between 2^31 and 2^32 all products are exact, and the others still contribute nothing; `unit_of` converts exponents.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from .arithmetic import LN_2

# The size of a reference from which on a row needs an exact factor: 2^31.
FAR = 2.0**31
_FAR_BITS = (127 + 31) << 23
# The largest unit: a product of 0 and infinity would be NaN.
_LARGEST = 3e38


def exponent(value: Any, factor: Any, reference: Any) -> tirx.PrimExpr:
    """The exponent of an element, with one rounding whether or not the compiler contracts products and sums."""
    return T.call_extern("float32", "__fmaf_rn", value, factor, T.float32(0) - reference)


def is_far(reference: Any) -> tirx.PrimExpr:
    """Whether a reference's size is at least `FAR`; also true of NaN."""
    return (T.reinterpret("uint32", reference) & T.uint32(0x7FFFFFFF)) >= T.uint32(_FAR_BITS)


def sampled_reference(reference: Any) -> tirx.PrimExpr:
    """The reference of a row of which a sample is known: 0 where the sample's largest element is far below 0, or minus
    infinity. If the sum then becomes 0, the row's own largest element is needed.
    """
    return T.Select(reference > T.float32(-FAR), reference, T.float32(0))


def exact_factor(largest: Any) -> tirx.PrimExpr:
    """The power of two by which a row's largest element comes between 2^31 and 2^32, in size."""
    exponent = T.Cast("int32", (T.reinterpret("uint32", largest) >> T.uint32(23)) & T.uint32(0xFF))
    return T.reinterpret("float32", T.min(2 * 127 + 31 - exponent, 254) << 23)


def unit_of(reference: Any, factor: Any, scale: Any) -> tirx.PrimExpr:
    """The factor that turns differences of exponents into powers of e: ln(2), unless the factor is exact."""
    return T.Select(is_far(reference), T.min(scale / factor, T.float32(_LARGEST)), T.float32(LN_2))
