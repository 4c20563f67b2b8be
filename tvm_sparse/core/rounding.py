"""Errors of rounding to a floating dtype, from which all tolerances are made."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

# Half a unit in the last place, as a relative error.
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# Absolute error of subnormal numbers. float16 rounds them to within half the distance of two of them; in the other two
# dtypes kernels may flush them to zero, or round to up to two units above the least normal number.
SMALLEST = {"float32": 1.2e-38, "float16": 2.0**-25, "bfloat16": 1.25e-38}


def aligned(magnitudes: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Magnitudes of factors as tensor cores align their products before they add them up: a subnormal number counts as
    the least normal one, and what the bits of their sums do not reach from there is truncated.
    """
    import ml_dtypes
    import numpy as np

    return np.where(magnitudes > 0, np.maximum(magnitudes, ml_dtypes.finfo(dtype).smallest_normal), magnitudes)


def overflow(dtype: np.dtype) -> float:
    """The least magnitude that rounds to infinity in a floating dtype."""
    import ml_dtypes

    facts = ml_dtypes.finfo(dtype)
    return float(facts.max) * (1 + 2.0 ** -(facts.nmant + 2))
