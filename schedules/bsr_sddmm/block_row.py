"""Which block row a stored block is in. Loads the compiler."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ..bsr_matmul.block_row import load_int


@phase
def find_block_row(block_rows, /, io, row, block):
    """Set a register to the block row of a stored block.

    Reads: `indptr`, by bisection. Writes: `row`. Barriers: none.
    """
    # fmt: off
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


__all__ = ["find_block_row", "load_int"]
