"""The product with a dense copy of a block-sparse weight: where it is the faster way, and how it is computed.

On a GPU the framework's dense product reads and multiplies zeros too, but at a rate that no block-sparse product
reaches. It is the faster way for many rows and many stored blocks.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.runtime import arrays

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


# Density (the share of stored blocks) above which the dense product was the faster way on an H200 in 16 bits: by rows
# of a block, pairs of the least number of rows of x and that density. A block of another size takes the entry of the
# next smaller one, a block of fewer than 8 rows that of 8. Measured by scripts/probes/block_products.py.
BEYOND: dict[int, tuple[tuple[int, float], ...]] = {
    8: ((128, 0.25), (512, 0.12)),
    16: ((128, 0.5), (512, 0.3)),
    32: ((128, 0.6), (512, 0.45)),
    64: ((128, 0.7), (512, 0.6)),
    128: ((128, 0.8), (512, 0.7)),
}


def likely_way(problem: BsrMatmul, machine: Machine) -> Likely:
    """The way of calls with torch tensors for problems whose record does not compare both.

    There is evidence for products of warpgroups in 16 bits; elsewhere the kernel is taken.
    """
    if machine.kind != "cuda" or not machine.has_warpgroups or numpy_dtype(problem.dtype).itemsize != 2:
        return Likely(KERNEL, f"nothing is known of dense products in {problem.dtype} on {machine.arch}")
    size = max((rows for rows in BEYOND if rows <= problem.block_shape[0]), default=min(BEYOND))
    known = [density for rows, density in BEYOND[size] if rows <= problem.m]
    density = 1 - problem.sparsity
    if not known:
        least = BEYOND[size][0][0]
        return Likely(KERNEL, f"below {least} rows of x a dense product is not faster at any density")
    told = f"of blocks of {problem.block}, {density:.0%} are stored, and for m={problem.m} a dense product is faster"
    if density > known[-1]:
        return Likely(DENSE, f"{told} from {known[-1]:.0%} on")
    return Likely(KERNEL, f"{told} only from {known[-1]:.0%} on")


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
