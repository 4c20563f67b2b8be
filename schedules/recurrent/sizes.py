"""Sizes of a GPU that persistent kernels of recurrent layers reckon with, and layers without one. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import REGISTER_FILE
from tvm_sparse.core.template import NotApplicable, ceildiv
from tvm_sparse.operators.sparse_recurrent.problem import RecurrentLayer

WARP = 32  # lanes
WIDEST = 16  # bytes of the widest load that a thread can issue
LINE = 128  # bytes of a cache line
ALONE = 4  # samples of a step for which `step_kernels` reads each weight once
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


def step_alone(problem: RecurrentLayer) -> bool:
    """Whether one step of few samples is all there is, without an exchange: `step_kernels` keeps no weights.

    On an H200 a step of 1367 units and two samples took 2.9 us there, 3.7 us in `persistent_rows` and 5.1 us in
    `cluster_rows`; one of 553 units and 14 samples 9.5, 4.8 and 4.3 us.
    """
    return problem.steps == 1 and problem.batch <= ALONE and problem.exchanges == 1
