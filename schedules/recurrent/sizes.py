"""Sizes of a GPU that persistent kernels of recurrent layers reckon with, and layers without one. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import REGISTER_FILE
from tvm_sparse.core.template import NotApplicable, ceildiv
from tvm_sparse.operators.sparse_recurrent.problem import RecurrentLayer

WARP = 32  # lanes
WIDEST = 16  # bytes of the widest load that a thread can issue
LINE = 128  # bytes of a cache line
# Parts of a multiprocessor, among which registers and warps are divided equally; and registers that a thread can
# address.
QUARTERS, MOST_REGISTERS = 4, 255


def register_limit(threads: int) -> int:
    """Registers for each thread of a block that is alone on its multiprocessor; they are allocated by eight."""
    warps = ceildiv(threads, QUARTERS * WARP)  # warps on a quarter of the multiprocessor
    return min(REGISTER_FILE // QUARTERS // (warps * WARP) // 8 * 8, MOST_REGISTERS)


def require_one_exchange(problem: RecurrentLayer) -> None:
    """Raise `NotApplicable` for a cell in whose step thread blocks exchange values twice."""
    if problem.exchanges > 1:
        raise NotApplicable(f"{problem.cell} exchanges values twice a step, and this kernel does once")
