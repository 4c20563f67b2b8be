"""The product with a dense copy of a block-sparse weight: where it is the faster way, and how it is computed.

On a GPU the framework's dense product reads and multiplies zeros too, but at a rate that no block-sparse product
reaches. It is the faster way for many rows and many stored blocks.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.runtime import arrays, dispatch

from .problem import BsrMatmul, activated

if TYPE_CHECKING:
    from collections.abc import Callable

    from .weight import BsrWeight

# The ways to the result: a kernel of this operator, or the framework's product with a dense copy.
KERNEL, DENSE = "kernel", "dense"


class Likely(NamedTuple):
    """The way likely to be faster, and the reason."""

    way: str
    why: str


# Figures of an H200 in 16 bits, inputs hot, measured by scripts/block_products.py. Of `tensor_core` and of
# `block_warpgroups`, by the shorter side of a block: operations on stored blocks in a microsecond. A block of another
# size takes the entry of the next smaller one; that of 8 is half that of 16.
WARPS = {8: 36e6, 16: 72e6, 32: 160e6}
WARPGROUPS = {64: 400e6, 128: 520e6}
# Microseconds of their launches, and rows of x from which on warpgroups are filled.
WARPS_LAUNCH, WARPGROUPS_LAUNCH, MANY_ROWS = 1.7, 5.0, 100
# Smaller blocks are bound by what `block_warpgroups` brings from the L2 cache: bytes in a microsecond; thread blocks of
# so many rows of x and of the weight, which take so long beside; and how many a GPU runs at the same time. With fewer
# than `MANY_TILES` of them others are faster.
SMALL, L2_BYTES, TILE_M, TILE_N, BEGIN, AT_ONCE, MANY_TILES = 32, 9.5e6, 192, 64, 2.3, 264, 1200
# Of PyTorch's dense product: operations in a microsecond by the most rows of x, bytes of the weight, and its launch.
DENSE_RATES = ((128, 500e6), (256, 690e6), (sys.maxsize, 830e6))
DENSE_BYTES, DENSE_LAUNCH = 4.5e6, 2.7


def _by_block(rates: dict[int, float], problem: BsrMatmul) -> float:
    """Microseconds of the operations at the rate for the problem's block."""
    side = min(problem.block_shape)
    rate = rates[max((known for known in rates if known <= side), default=min(rates))]
    return 2 * problem.m * problem.k * problem.n * (1 - problem.sparsity) / rate


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


def dense_time(problem: BsrMatmul) -> float:
    """About how many microseconds the dense product takes."""
    rate = next(rate for most, rate in DENSE_RATES if problem.m <= most)
    weight = problem.k * problem.n
    return DENSE_LAUNCH + max(2 * problem.m * weight / rate, 2 * weight / DENSE_BYTES)


def likely_way(problem: BsrMatmul, machine: Machine) -> Likely:
    """The way of calls with torch tensors for problems whose record does not compare both: the one that likely takes
    less time.

    There is evidence for products of warpgroups in 16 bits; elsewhere the kernel is taken.
    """
    if dispatch.dispatcher.batch_invariant:
        return Likely(KERNEL, dispatch.UNCHANGING)
    if machine.kind != "cuda" or not machine.has_warpgroups or numpy_dtype(problem.dtype).itemsize != 2:
        return Likely(KERNEL, f"nothing is known of dense products in {problem.dtype} on {machine.arch}")
    sparse, dense = min(time_of_warps(problem), time_of_warpgroups(problem)), dense_time(problem)
    stored = f"with {1 - problem.sparsity:.0%} of the blocks of {problem.block} stored"
    why = f"for m={problem.m} and {stored} it likely takes {sparse:.1f} us, a dense product {dense:.1f} us"
    return Likely(DENSE if dense < sparse else KERNEL, why)


def dense_call(weight: BsrWeight, activation: str | None, biased: bool) -> Callable[..., None]:
    """A function of torch tensors, a kernel's arguments, which computes the product with the dense copy instead."""
    torch = sys.modules["torch"]
    kept = weight.dense_copy().t() if weight.constant else None
    kind = weight.data.device.type

    def call(x: Any, *rest: Any) -> None:
        y, matrix = rest[-1], weight.dense_copy().t() if kept is None else kept
        with torch.autocast(kind, enabled=False):
            if biased:
                torch.addmm(rest[-2], x, matrix, out=y)
            else:
                torch.mm(x, matrix, out=y)
            if activation is not None:
                y.copy_(getattr(torch.nn.functional, activation)(y))

    return call


def dense_on_host(x: Any, weight: BsrWeight, bias: Any, activation: str | None, y: Any) -> None:
    """The product of arrays of other libraries on the host, into `y`. Raises TypeError for arrays on a GPU."""
    import numpy as np

    found = arrays.as_numpy(x).astype(np.float32) @ arrays.as_numpy(weight.dense_copy()).astype(np.float32).T
    if bias is not None:
        found += arrays.as_numpy(bias).astype(np.float32)
    y[...] = activated(found, activation or "")
