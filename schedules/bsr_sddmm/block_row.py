"""Which block row a stored block is in. Loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ..bsr_matmul.block_row import load_int


def find_block_row(block_rows: int) -> Callable[..., Any]:
    """Set a register to the block row of a stored block; the phase is (io, row, block).

    Reads: `indptr`, by bisection. Writes: `row`. Barriers: none.
    """

    # fmt: off
    @T.inline
    def phase(io, row, block):
        end: T.int32 = block_rows  # the row is in [row, end)
        first: T.int32 = 0
        row = 0
        for _ in T.serial(block_rows.bit_length()):
            if end - row > 1:
                load_int(first, io.indptr.ptr_to([(row + end) // 2]))
                if first <= block:
                    row = (row + end) // 2
                else:
                    end = (row + end) // 2
    # fmt: on
    return phase


__all__ = ["find_block_row", "load_int"]
