"""The public call of row_norm."""

from __future__ import annotations

import math
from typing import Any

from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.calls import check_floats, machine_of, outputs_for, refuse_gradient
from tvm_sparse.runtime.dispatch import dispatcher

from .problem import RowNorm


def row_norm(x: Any, eps: float = 1e-6, *, out: Any = None) -> Any:
    """x / sqrt(mean(x^2, -1) + eps): rows of root mean square 1.

    Parameters
    ----------
    x
        Shape `(rows, width)`; float32, float16 or bfloat16, accumulated in float32: squares of a row must not sum to
        more than 3.4e38. Copied first if it is not contiguous, or not aligned to 16 bytes on a GPU.
    eps
        At least 0 and finite. With 0 a row of zeros becomes NaN.
    out
        Array to write into: contiguous, of the shape, dtype and device of `x`.

    Raises
    ------
    TypeError
        If `x` is no array or lies on another kind of device.
    ValueError
        For another rank or dtype, a width above 2^20, or an `out` or `eps` that does not fit.
    RuntimeError
        If `x` requires a gradient.

    Notes
    -----
    Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization", equation 4.
    """
    known = arrays.facts("x", x)
    check_floats("x", known, rank=2)
    refuse_gradient("x", x)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number of at least 0, got {eps!r}")
    [result] = outputs_for(out, (("out", known.shape, known.dtype),), x, known)
    rows, width = known.shape
    if rows and width:
        prepared = arrays.ready("x", x, known)
        function = dispatcher.kernel(RowNorm(rows, width, known.dtype), machine_of("x", known)).function
        function(arrays.argument(prepared), float(eps), arrays.argument(result))
    return out if out is not None else arrays.returned(result, x)
