"""About how long block-sparse products take: where the product with a dense copy of the weight is the faster way
(`runtime.dense`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.operators.bsr_sddmm.call import likely_faster, rate_of
from tvm_sparse.runtime import dense, dispatch
from tvm_sparse.runtime.dense import Likely, operations

from .problem import BsrMatmul

# Figures of an H200 in 16 bits, inputs hot, fitted to times of scripts/block_grid.py and scripts/block_products.py, by
# the shorter side of a block; one of another size takes the entry of the next smaller one. Microseconds of a launch of
# `tensor_core`, of a million elements of y, of 10^9 operations on stored blocks, and of a megabyte of these; and how
# many times as long products of 17 to 128 rows of x take.
WARPS = {
    8: (2.2, 10.6, 30.6, 0.0),
    16: (2.2, 1.4, 11.7, 0.17),
    32: (1.5, 1.5, 5.1, 0.3),
    64: (1.7, 1.8, 5.0, 0.31),
    128: (2.3, 4.8, 4.5, 0.33),
}
ONE_STRIP, FEW_ROWS, OF_FEW_ROWS = 16, 128, 1.3
# And those of a launch of `block_warpgroups`, of a million elements of y, and of a megabyte of stored blocks for each
# STRIP rows of x, and how many times as long that is where there are no more tiles of STRIP x STRIP elements than a GPU
# has multiprocessors; and rows of x from which on it is worth a try.
WARPGROUPS = {64: (4.0, 0.48, 0.272, 1.1), 128: (4.6, 0.36, 0.234, 1.45)}
STRIP, CORES, MANY_ROWS, WARPGROUPS_LAUNCH = 128, 132, 100, 5.0
# Blocks from this side on that have no rate: `block_warpgroups` then brings bytes from the L2 cache at this rate, in a
# microsecond, for tiles of y of this many rows of x and of the weight.
SMALL, L2_BYTES, TILE_M, TILE_N = 32, 9.5e6, 192, 64
# Microseconds of a tile's begin and end, tiles that a GPU computes at the same time, and the least number of tiles with
# which `block_warpgroups` is the faster template.
BEGIN, AT_ONCE, MANY_TILES = 2.3, 264, 528


def _of_block(figures: Mapping[int, tuple[float, ...]], problem: BsrMatmul) -> tuple[float, ...]:
    """The figures for the problem's block."""
    side = min(problem.block_shape)
    return figures[max((known for known in figures if known <= side), default=min(figures))]


def _stored_megabytes(problem: BsrMatmul) -> float:
    return 2 * (1 - problem.sparsity) * problem.n * problem.k / 1e6


def time_of_warps(problem: BsrMatmul) -> float:
    """About how many microseconds `tensor_core` takes."""
    launch, outputs, rate, stored = _of_block(WARPS, problem)
    time = (
        outputs * problem.m * problem.n / 1e6 + rate * operations(problem) / 1e9 + stored * _stored_megabytes(problem)
    )
    return launch + (OF_FEW_ROWS if ONE_STRIP < problem.m <= FEW_ROWS else 1) * time


def time_of_warpgroups(problem: BsrMatmul) -> float:
    """About how many microseconds `block_warpgroups` takes; infinite where it is not worth a try."""
    side = min(problem.block_shape)
    if problem.m < MANY_ROWS or side < SMALL:
        return math.inf
    if side >= min(WARPGROUPS):
        launch, outputs, stored, few = _of_block(WARPGROUPS, problem)
        strips = math.ceil(problem.m / STRIP)
        stored *= few if strips * problem.n / STRIP <= CORES else 1
        return launch + outputs * problem.m * problem.n / 1e6 + stored * strips * _stored_megabytes(problem)
    density, tiles = 1 - problem.sparsity, math.ceil(problem.m / TILE_M) * problem.n / TILE_N
    if tiles < MANY_TILES:
        return math.inf
    # A panel of x comes if one of the tile's block rows has a block there.
    panels = 1 - problem.sparsity ** max(TILE_N / problem.block_shape[0], 1)
    brought = (panels * TILE_M + density * TILE_N) * problem.k * 2
    return WARPGROUPS_LAUNCH + tiles * (BEGIN / AT_ONCE + brought / L2_BYTES)


# Its name. It reads all of x for each block row: where x has more bytes than CACHED_X, the L2 cache does not hold it,
# and parts of x of PART_X bytes are multiplied one after another.
WARPS_TEMPLATE, CACHED_X, PART_X = "tensor_core", 24_000_000, 17_000_000


def rows_in_cache(problem: BsrMatmul, machine: Machine) -> int:
    """Rows of x that `tensor_core` multiplies at once; all of them where the cache holds these, and on a CPU."""
    row = problem.k * numpy_dtype(problem.dtype).itemsize
    return problem.m if machine.kind != "cuda" or problem.m * row <= CACHED_X else max(PART_X // row // 64, 1) * 64


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
    """Whether a training step is likely faster by dense products, with a dense copy of the weight made in each step.

    A step is the forward pass and the gradients of x `(m, k)` and of the stored blocks of a weight `(n, k)`.
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
