"""About how long block-sparse products take: where the product with a dense copy of the weight is the faster way
(`runtime.dense`).
"""

from __future__ import annotations

import math

from tvm_sparse.core.machine import Machine
from tvm_sparse.runtime import dense
from tvm_sparse.runtime.dense import Likely, operations

from .problem import BsrMatmul

# Figures of an H200 in 16 bits, inputs hot, measured by scripts/probes/block_products.py. Of `tensor_core` and of
# `block_warpgroups`, by the shorter side of a block: operations on stored blocks in a microsecond. A block of another
# size takes the entry of the next smaller one; that of 8 is half that of 16.
WARPS = {8: 36e6, 16: 72e6, 32: 160e6}
WARPGROUPS = {64: 400e6, 128: 520e6}
# Microseconds of their launches, and rows of x from which on warpgroups are filled.
WARPS_LAUNCH, WARPGROUPS_LAUNCH, MANY_ROWS = 1.7, 5.0, 100


def _by_block(rates: dict[int, float], problem: BsrMatmul) -> float:
    """Microseconds of the operations at the rate for the problem's block."""
    side = min(problem.block_shape)
    return operations(problem) / rates[max((known for known in rates if known <= side), default=min(rates))]


def time_of_warps(problem: BsrMatmul) -> float:
    """About how many microseconds `tensor_core` takes."""
    return WARPS_LAUNCH + _by_block(WARPS, problem)


def time_of_warpgroups(problem: BsrMatmul) -> float:
    """About how many microseconds `block_warpgroups` takes; infinite where it is not worth a try."""
    if problem.m < MANY_ROWS or min(problem.block_shape) < min(WARPGROUPS):
        return math.inf
    return WARPGROUPS_LAUNCH + _by_block(WARPGROUPS, problem)


def likely_way(problem: BsrMatmul, machine: Machine) -> Likely:
    """As `runtime.dense.likely_way`."""

    def kernel_time() -> float:
        return min(time_of_warps(problem), time_of_warpgroups(problem))

    return dense.likely_way(problem, machine, kernel_time, f"blocks of {problem.block}")
