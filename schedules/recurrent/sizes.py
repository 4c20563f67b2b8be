"""Sizes of a GPU that persistent kernels of recurrent layers reckon with. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import REGISTER_FILE
from tvm_sparse.core.template import ceildiv

WARP = 32  # lanes
WIDEST = 16  # bytes of the widest load that a thread can issue
LINE = 128  # bytes of a cache line
# Parts of a multiprocessor, each with as large a share of the registers and of the warps; and registers that a thread
# can address.
QUARTERS, MOST_REGISTERS = 4, 255


def register_limit(threads: int) -> int:
    """Registers that the file leaves each thread of a block, alone on its multiprocessor; they are given by eight."""
    warps = ceildiv(threads, QUARTERS * WARP)  # of a quarter
    return min(REGISTER_FILE // QUARTERS // (warps * WARP) // 8 * 8, MOST_REGISTERS)
