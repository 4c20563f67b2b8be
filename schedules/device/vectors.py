"""Sums of a SIMD vector's elements, for CPU kernels that hold vectors of sums in rows of a buffer.

Call it in a loop over rows that is not unrolled: otherwise LLVM moves single elements between vectors and their halves.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T


# fmt: off
@T.inline
def add_upper_half(part, row, size):
    """Add the upper half of a vector of twice the size to its lower half."""
    for lane in T.vectorized(size):
        part[row, lane] = part[row, lane] + part[row, size + lane]
# fmt: on


def halves(width: int) -> list[int]:
    """The sizes of a vector's lower half, of the lower half of that, and so on to 1."""
    return [width >> h for h in range(1, width.bit_length())]


def sum_elements(part: Any, row: Any, width: int) -> None:
    """Replace `part[row, 0]` by the sum of `part[row, 0:width]`."""
    for size in halves(width):
        add_upper_half(part, row, size)
