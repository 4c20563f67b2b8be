"""Tensor maps (compute capability 9.0 on): boxes of a matrix in global memory, copied to shared memory by one thread.

A tensor map describes a matrix and the shape of a box. The host makes it before the launch (`describe`) and passes it
as a parameter of the kernel; a copy then names the box's first column and row. Parts of a box beyond the matrix become
zeros, and count among the bytes of which an mbarrier is told.

Rows of a box lie one after another in shared memory. *Swizzled*, the 16-byte vectors of a row change places: vector v
of row r lies where vector v xor f(r) would, so that the same vectors of eight rows lie in different banks. Tensor cores
undo this when they read operands (`device.operands`).
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.problem import numpy_dtype

# Bytes of a row that have a swizzle, and its number in a tensor map.
SWIZZLES = {32: 1, 64: 2, 128: 3}
# Bytes that the L2 cache brings at least: number 2 is 128.
PROMOTION = 2
# Most rows of a box.
MOST_ROWS = 256

_copy = T.ptx.cp.async_.bulk.tensor
copy_box = getattr(_copy, "2d").shared__cluster.global_.mbarrier__complete_tx__bytes


def tensor_map(name: str) -> Any:
    """Room for a tensor map, which `describe` fills in. Both stand before the kernel's region; the kernel gets it by
    `T.address_of`.
    """
    found = T.Var(name, ty=T.handle("tensormap").ty)
    T.Bind(T.tvm_stack_alloca("tensormap", 1), var=found)
    return found


def describe(
    found: tirx.Var, place: tirx.PrimExpr, dtype: str, matrix: tuple[Any, int], box: tuple[int, int]
) -> tirx.PrimExpr:
    """Make it that of a contiguous `matrix` (rows, columns) at `place`, for boxes (rows, columns) that are swizzled by
    the bytes of their rows. An empty matrix has none.
    """
    (rows, cols), (box_rows, box_cols) = matrix, box
    size = numpy_dtype(dtype).itemsize
    return T.tensormap_encode_tiled(
        found,
        place,
        T.int64(cols),
        T.Cast("int64", rows),
        T.int64(cols * size),
        T.int32(box_cols),
        T.int32(box_rows),
        T.int32(1),
        T.int32(1),
        descriptor_dtype=dtype,
        rank=2,
        swizzle=SWIZZLES[box_cols * size],
        l2_promotion=PROMOTION,
    )
