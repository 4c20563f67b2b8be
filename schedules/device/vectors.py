"""Sums of a SIMD vector's elements, for CPU kernels that hold vectors of sums in rows of a buffer.

To be called in a loop over rows that is not unrolled: between its vectors and their halves LLVM else carries single
elements.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T


# fmt: off
@T.inline
def add_upper_half(part, row, size):
    """Of a vector of twice the size, the upper half to the lower one."""
    for lane in T.vectorized(size):
        part[row, lane] = part[row, lane] + part[row, size + lane]
# fmt: on


def halves(width: int) -> list[int]:
    """Sizes of the lower half of a vector, of that one's, and so on to 1."""
    return [width >> h for h in range(1, width.bit_length())]


def sum_elements(part: Any, row: Any, width: int) -> None:
    """The sum of `part[row, 0:width]` to its first element."""
    for size in halves(width):
        add_upper_half(part, row, size)
