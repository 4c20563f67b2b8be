"""Keys of the CPU's heap: value and index in one signed integer, whose order is that of the results.

The CUDA kernels' keys (`device/selection.py`) are unsigned, as atomics and shuffles want them.
"""

from __future__ import annotations

from tvm import tirx
from tvm.script import tirx as T

from ...device.arithmetic import is_nan


def heap_key(x: tirx.PrimExpr, index: tirx.PrimExpr) -> tirx.PrimExpr:
    """The sort key of a float32 at an index: larger keys come first in the order (x descending, index ascending).

    NaN comes before all other values, and -0.0 equals 0.0.
    """
    bits = T.reinterpret("int32", x)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    ordered = T.Select(x == T.float32(0), T.int32(0), T.Select(is_nan(x), T.int32(0x7FFFFFFF), ordered))
    return (T.Cast("int64", ordered) << T.int64(32)) | (T.int64(0xFFFFFFFF) - T.Cast("int64", index))


def value_of(key: tirx.PrimExpr) -> tirx.PrimExpr:
    """The float32 that `heap_key` was given; of -0.0 it is 0.0, and of any NaN one of them."""
    ordered = T.Cast("int32", key >> T.int64(32))
    return T.reinterpret("float32", ordered ^ ((ordered >> 31) & 0x7FFFFFFF))


def index_of(key: tirx.PrimExpr) -> tirx.PrimExpr:
    """The index that `heap_key` was given, as an int64."""
    return T.int64(0xFFFFFFFF) - (key & T.int64(0xFFFFFFFF))
