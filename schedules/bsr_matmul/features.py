"""What the time of a product depends on, for every template alike. Loads no compiler."""

from __future__ import annotations

import functools
from math import ceil

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Features, ceildiv
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul


def row_blocks(problem: BsrMatmul) -> float:
    """Stored blocks of a block row, on average."""
    return (1 - problem.sparsity) * problem.grid[1]


def longest_row(problem: BsrMatmul) -> float:
    """Stored blocks of the fullest block row, as expected from the pattern."""
    rows, cols = problem.grid
    if problem.pattern != "skewed":
        return row_blocks(problem)
    # The number that Zipf's law gives each row; what exceeds a full row is divided among the others.
    return min(cols, rows * row_blocks(problem) / _harmonic(rows))


@functools.cache
def _harmonic(count: int) -> float:
    """1 + 1/2 + ... + 1/count."""
    return sum(1 / rank for rank in range(1, count + 1))


def features(
    problem: BsrMatmul,
    machine: Machine,
    *,
    tile_m: int,
    outputs: int,
    threads: int,
    blocks: int,
    work_each: float,
    at_once: int,
    held: int,
    sharing: int = 1,
) -> Features:
    """The features of a product, by name.

    Parameters
    ----------
    tile_m
        Rows of x of a thread block.
    outputs
        Elements of y of a thread block.
    threads
        Of a thread block.
    blocks
        Thread blocks.
    work_each, at_once
        How much of one sum's work a stored block has, and how much one step takes of the weight, in the same unit.
    held
        Sums and elements that a thread has in registers.
    sharing
        Thread blocks that read a long block row together.
    """
    rows, cols = problem.block_shape
    work = row_blocks(problem) * work_each
    steps = max(ceil(work / at_once), 1)
    return {
        "block_rows": rows,
        "block_cols": cols,
        "row_blocks": row_blocks(problem),
        "row_elements": row_blocks(problem) * cols,
        "blocks_each": blocks / machine.cores,
        "threads_each": blocks * threads / machine.cores,
        "outputs_each": outputs / threads,
        "strips": ceildiv(problem.m, tile_m),
        "rows_used": problem.m / (ceildiv(problem.m, tile_m) * tile_m),
        "steps": steps,
        "longest_steps": max(ceil(longest_row(problem) * work_each / (at_once * sharing)), 1),
        "used": work / (steps * at_once),
        "held": held,
    }
