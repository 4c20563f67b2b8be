"""The call of the sampled product, for gradients of `bsr_matmul`: it is no public function."""

from __future__ import annotations

import functools
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.runtime import arrays
from tvm_sparse.runtime.calls import launch, machine_of
from tvm_sparse.runtime.dense import DENSE_RATES, is_known
from tvm_sparse.runtime.dispatch import dispatcher
from tvm_sparse.runtime.signature import Signature

from .problem import BsrSddmm

SIGNATURES: dict[str, Signature] = {}

# Figures of an H200 in 16 bits: operations on stored blocks in a microsecond, by the shorter side of a block; and the
# rows that are multiplied at the same time, of which smaller blocks have a part.
RATES, GROUP_M, LEAST_COLS = {64: 400e6, 128: 520e6}, 64, 16


@functools.lru_cache(256)
def likely_faster(density: float, block: tuple[int, int], dtype: str, machine: Machine) -> bool:
    """Whether the kernel of warpgroups serves such blocks, and likely takes less time than the dense product of all
    rows and columns, of which a share `density` would be used.
    """
    rows, cols = block
    if not is_known(dtype, machine) or rows % 8 or cols % LEAST_COLS:
        return False
    return density * DENSE_RATES[-1][1] < rate_of(block)


def rate_of(block: tuple[int, int]) -> float:
    """Operations on stored blocks in a microsecond by the kernel of warpgroups."""
    rate = RATES[max((side for side in RATES if side <= min(block)), default=min(RATES))]
    return rate * block[0] / (-(-block[0] // GROUP_M) * GROUP_M)


def choice_of(block: str, n: int, k: int, pattern: str) -> tuple[Any, ...]:
    """What decides on the kernel beside its arguments: the key under which launchers are kept."""
    return "bsr_sddmm", block, n, k, pattern


def bsr_sddmm(
    left: Any, right: Any, indices: Any, indptr: Any, block: tuple[int, int], pattern: str = "uniform"
) -> Any:
    """The blocks of left.T @ right at a pattern, see `problem`.

    Parameters
    ----------
    left, right
        `(m, n)` and `(m, k)` of one dtype, contiguous or not, m at least 1.
    indices, indptr
        int32, contiguous: the structure of an `(n, k)` matrix in BSR format with at least one block. It is not checked.
    block
        Rows and columns of a block.
    pattern
        `"skewed"` if some block rows have far more blocks than others.

    Returns
    -------
    data
        `(nnzb, *block)` of the same dtype, sums in float32.
    """
    known = arrays.facts("left", left)
    theirs = arrays.facts("right", right)
    (m, n), k, nnzb = known.shape, theirs.shape[1], arrays.facts("indices", indices).shape[0]
    rows, cols = block
    sparsity = min(max(1 - nnzb / ((n // rows) * (k // cols)), 0.0), 1.0)
    problem = BsrSddmm(m, k, n, f"{rows}x{cols}", sparsity, pattern, known.dtype)
    data = arrays.empty((nnzb, rows, cols), known.dtype, left, known)
    given = (arrays.ready("left", left, known), arrays.ready("right", right, theirs), indices, indptr)
    what = choice_of(problem.block, n, k, pattern)
    launch(dispatcher, problem, machine_of("left", known), what, given, (data,), single=True)
    return data
