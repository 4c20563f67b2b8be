"""Operands of warpgroups' products (`wgmma`, compute capability 9.0 alone) in shared memory, described by 64 bits.

An operand's rows are along m or n, and its columns along k. An instruction takes 32 bytes of a row, two 16-byte
vectors: 16 elements of 16 bits, or 8 of float32, whose lowest 13 bits it ignores (tf32). A *group* is eight rows. Bits
0 to 13 of a descriptor hold the address, bits 16 to 29 and 32 to 45 two distances, all in units of 16 bytes, and bits
62 and 63 the layout:

* `swizzled`: rows lie one after another, swizzled by their bytes (`device.tensor_maps`). The second distance is from
  one group to the next. The next columns are two units further on. *Transposed* operands, of 16 bits, have columns in
  the place of rows: a group is eight of k, and the first distance is from one box to the next along m or n. The next 16
  of k are two groups further on.
* `matrices`: without a swizzle, matrices of a group by 16 bytes. The first distance is to the next 16 bytes of the same
  rows, the second to the next group, whose matrix follows.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

# Bytes of a unit, and the bits at which the distances and the layout stand.
UNIT, FIRST_BIT, SECOND_BIT, LAYOUT_BIT = 16, 16, 32, 62
SHARED_ADDRESS = 0x3FFFF
# Rows of a group, and units from one step of columns to the next.
GROUP, STEP_UNITS, MATRIX_BYTES = 8, 2, 128
# Number of a layout, by the bytes of a row.
LAYOUTS = {128: 1, 64: 2, 32: 3}
# What operands are called, and how many columns an instruction takes.
KINDS = {"float16": ("f16", 16), "bfloat16": ("bf16", 16), "float32": ("tf32", 8)}


def matrices(address: tirx.PrimExpr, along_columns: tirx.PrimExpr) -> tirx.PrimExpr:
    """The descriptor of an operand of matrices at a shared address; `along_columns` is the first distance, in units."""
    return (
        T.Cast("uint64", (address & T.uint32(SHARED_ADDRESS)) // T.uint32(UNIT))
        + (T.Cast("uint64", along_columns) << T.uint64(FIRST_BIT))
        + T.uint64(MATRIX_BYTES // UNIT << SECOND_BIT)
    )


def place_of(address: tirx.PrimExpr, along: int = 1) -> tirx.PrimExpr:
    """The low half of a descriptor for a shared address: to move it, units are added. `along`: the first distance, in
    units; only transposed operands have one.
    """
    return ((address & T.uint32(SHARED_ADDRESS)) // T.uint32(UNIT)) | T.uint32(along << FIRST_BIT)


def swizzled(place: tirx.PrimExpr, row_bytes: int) -> tirx.PrimExpr:
    """The descriptor of an operand whose rows are swizzled, from `place_of` a multiple of eight rows' bytes."""
    # As 32 bits, because literals of 64 bits end at bit 62.
    high = GROUP * row_bytes // UNIT | LAYOUTS[row_bytes] << (LAYOUT_BIT - SECOND_BIT)
    return T.Cast("uint64", place) | (T.Cast("uint64", T.uint32(high)) << T.uint64(SECOND_BIT))


def product(dtype: str, columns: int) -> Any:
    """The instruction with `columns` columns of operand B, sums in float32."""
    kind, taken = KINDS[dtype]
    return getattr(getattr(getattr(T.ptx.wgmma.mma_async.sync.aligned, f"m64n{columns}k{taken}").f32, kind), kind)


fence = T.ptx.wgmma.fence.sync.aligned
commit = T.ptx.wgmma.commit_group.sync.aligned
wait = T.ptx.wgmma.wait_group.sync.aligned
