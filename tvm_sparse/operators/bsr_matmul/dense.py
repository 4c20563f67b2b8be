"""About how long block-sparse products take: where the product with a dense copy of the weight is the faster way
(`runtime.dense`).
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.operators.bsr_sddmm.call import likely_faster, rate_of
from tvm_sparse.runtime import dense, dispatch
from tvm_sparse.runtime.dense import Likely, operations

from .problem import BsrMatmul

# Figures of an H200 in 16 bits, inputs hot, measured by scripts/block_products.py. Of `tensor_core` and of
# `block_warpgroups`, by the shorter side of a block: operations on stored blocks in a microsecond. A block of another
# size takes the entry of the next smaller one; that of 8 is half that of 16.
WARPS = {8: 36e6, 16: 72e6, 32: 160e6}
WARPGROUPS = {64: 400e6, 128: 520e6}
# Microseconds of their launches, and rows of x from which on warpgroups are filled.
WARPS_LAUNCH, WARPGROUPS_LAUNCH, MANY_ROWS = 1.7, 5.0, 100
# Blocks from this side on that have no rate: `block_warpgroups` then brings bytes from the L2 cache at this rate, in a
# microsecond, for tiles of y of this many rows of x and of the weight.
SMALL, L2_BYTES, TILE_M, TILE_N = 32, 9.5e6, 192, 64
# Microseconds of a tile's begin and end, tiles that a GPU computes at the same time, and the least number of tiles with
# which `block_warpgroups` is the faster template.
BEGIN, AT_ONCE, MANY_TILES = 2.3, 264, 528


def _by_block(rates: dict[int, float], problem: BsrMatmul) -> float:
    """Microseconds of the operations at the rate for the problem's block."""
    side = min(problem.block_shape)
    return operations(problem) / rates[max((known for known in rates if known <= side), default=min(rates))]


def time_of_warps(problem: BsrMatmul) -> float:
    """About how many microseconds `tensor_core` takes."""
    return WARPS_LAUNCH + _by_block(WARPS, problem)


def time_of_warpgroups(problem: BsrMatmul) -> float:
    """About how many microseconds `block_warpgroups` takes; infinite where it is not worth a try."""
    side = min(problem.block_shape)
    if problem.m < MANY_ROWS or side < SMALL:
        return math.inf
    if side >= min(WARPGROUPS):
        return WARPGROUPS_LAUNCH + _by_block(WARPGROUPS, problem)
    density, tiles = 1 - problem.sparsity, math.ceil(problem.m / TILE_M) * problem.n / TILE_N
    if tiles < MANY_TILES:
        return math.inf
    # A panel of x comes if one of the tile's block rows has a block there.
    panels = 1 - problem.sparsity ** max(TILE_N / problem.block_shape[0], 1)
    brought = (panels * TILE_M + density * TILE_N) * problem.k * 2
    return WARPGROUPS_LAUNCH + tiles * (BEGIN / AT_ONCE + brought / L2_BYTES)


def kernel_time(problem: BsrMatmul) -> float:
    """About how many microseconds the faster one takes."""
    return min(time_of_warps(problem), time_of_warpgroups(problem))


def likely_way(problem: BsrMatmul, machine: Machine) -> Likely:
    """As `runtime.dense.likely_way`."""
    return dense.likely_way(problem, machine, partial(kernel_time, problem), f"blocks of {problem.block}")


# The shorter side of a block from which on `block_warpgroups` reads transposed blocks.
LEAST_TURNED = 16


def reads_turned(m: int, k: int, n: int, block: tuple[int, int], blocks: int, dtype: str, machine: Machine) -> bool:
    """Whether the product of x `(m, k)` and a weight `(n, k)` whose blocks are stored transposed likely takes less time
    by the kernel that reads them so than by one for a copy of them.
    """
    return not dispatch.dispatcher.batch_invariant and _reads_turned(m, k, n, block, blocks, dtype, machine)


@lru_cache(256)
def _reads_turned(m: int, k: int, n: int, block: tuple[int, int], blocks: int, dtype: str, machine: Machine) -> bool:
    rows, cols = block
    if not dense.is_known(dtype, machine) or rows % LEAST_TURNED or cols % LEAST_TURNED:
        return False
    problem = BsrMatmul(m, k, n, f"{rows}x{cols}", 1 - min(blocks * rows * cols / (n * k), 1.0), dtype=dtype)
    return time_of_warpgroups(problem) < time_of_warps(problem)


# Bytes of a dense matrix that are copied in a microsecond, and how often: stored blocks to a dense matrix and to its
# layout, and its gradient's blocks back.
COPIED_BYTES, COPIES, COPIES_BACK = 1.1e6, 5, 2
# How much faster the dense way has to look.
CLEARLY = 1.1


def trains_dense(m: int, k: int, n: int, block: tuple[int, int], blocks: int, dtype: str, machine: Machine) -> bool:
    """Whether a step of training, forward and backward, of x `(m, k)` and of the stored blocks of a weight `(n, k)`,
    likely takes less time by dense products, for which the weight is copied in each step.
    """
    return not dispatch.dispatcher.batch_invariant and _trains_dense(m, k, n, block, blocks, dtype, machine)


@lru_cache(256)
def _trains_dense(m: int, k: int, n: int, block: tuple[int, int], blocks: int, dtype: str, machine: Machine) -> bool:
    rows, cols = block
    density = min(blocks * rows * cols / (n * k), 1.0)
    if not dense.is_known(dtype, machine):
        return False
    problem = BsrMatmul(m, k, n, f"{rows}x{cols}", 1 - density, dtype=dtype)
    product, copy = dense.dense_time(problem), 2 * k * n / COPIED_BYTES
    sparse = 2 * kernel_time(problem)
    if likely_faster(density, block, dtype, machine):
        sparse += operations(problem) / rate_of(block)
    else:
        sparse += product + COPIES_BACK * copy
    return CLEARLY * (3 * product + (COPIES + COPIES_BACK) * copy) < sparse
