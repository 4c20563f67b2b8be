"""The product with a dense copy of a sparse weight: where it is the faster way, and how it is computed.

On a GPU the framework's dense product reads and multiplies zeros too, but at a rate that no sparse product reaches. It
is the faster way for many rows and many stored elements.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from ..core.machine import Machine
from ..core.problem import numpy_dtype
from . import arrays, dispatch
from .calls import run

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np

    from ..core.problem import Problem

# The ways to the result: a kernel of the operator, or the framework's product with a dense copy.
KERNEL, DENSE = "kernel", "dense"


class Likely(NamedTuple):
    """The way likely to be faster, and the reason."""

    way: str
    why: str


class Product(Protocol):
    """A problem `y = x @ weight.T` for x `(m, k)` and a weight `(n, k)` of which a share `sparsity` is not stored."""

    @property
    def m(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def sparsity(self) -> float: ...
    @property
    def dtype(self) -> str: ...


# Of PyTorch's dense product on an H200 in 16 bits, inputs hot, measured by scripts/block_products.py: operations
# in a microsecond by the most rows of x, bytes of the weight in a microsecond, by the most of these, of which up to the
# first the L2 cache holds, and microseconds of its launch.
DENSE_RATES = ((128, 500e6), (256, 690e6), (sys.maxsize, 830e6))
DENSE_BYTES, DENSE_LAUNCH = ((40_000_000, 5.6e6), (sys.maxsize, 4.5e6)), 2.7


def operations(problem: Product) -> float:
    """Operations on stored elements."""
    return 2 * problem.m * problem.k * problem.n * (1 - problem.sparsity)


def dense_time(problem: Product) -> float:
    """About how many microseconds the dense product takes."""
    rate = next(rate for most, rate in DENSE_RATES if problem.m <= most)
    weight = problem.k * problem.n
    brought = next(rate for most, rate in DENSE_BYTES if 2 * weight <= most)
    return DENSE_LAUNCH + max(2 * problem.m * weight / rate, 2 * weight / brought)


def is_known(dtype: str, machine: Machine) -> bool:
    """Whether there is evidence on the time of dense products: in 16 bits on GPUs with products of warpgroups."""
    return machine.kind == "cuda" and machine.has_warpgroups and numpy_dtype(dtype).itemsize == 2


def likely_way(problem: Product, machine: Machine, sparse_time: Callable[[], float], stored: str) -> Likely:
    """The way of calls with torch tensors for problems whose record does not compare both: the one that likely takes
    less time.

    Parameters
    ----------
    sparse_time
        About how many microseconds the kernel takes.
    stored
        Name of the stored parts in the reason: "blocks of 16x16", "entries".

    Notes
    -----
    The kernel is taken where nothing is known of dense products.
    """
    if dispatch.dispatcher.batch_invariant:
        return Likely(KERNEL, dispatch.UNCHANGING)
    if not is_known(problem.dtype, machine):
        return Likely(KERNEL, f"nothing is known of dense products in {problem.dtype} on {machine.arch}")
    sparse, dense = sparse_time(), dense_time(problem)
    share = f"with {1 - problem.sparsity:.0%} of the {stored} stored"
    why = f"for m={problem.m} and {share} it likely takes {sparse:.1f} us, a dense product {dense:.1f} us"
    return Likely(DENSE if dense < sparse else KERNEL, why)


def way(problem: Problem, machine: Machine, likely: Callable[[Any, Machine], Likely]) -> str:
    """The way of calls with torch tensors and a constant weight: the faster one by the record, or, without one, the one
    likely to be faster.
    """
    return dispatch.dispatcher.way(problem, machine) or likely(problem, machine).way


def told_way(problem: Problem, machine: Machine, likely: Callable[[Any, Machine], Likely]) -> str:
    """For `explain`: that way, and why."""
    recorded, found = dispatch.dispatcher.way(problem, machine), likely(problem, machine)
    what = "the kernel" if (recorded or found.way) == KERNEL else "PyTorch's product with a dense copy"
    return f"{what}: {'the record compares both' if recorded else found.why}"


class DenseCopy:
    """Part of a prepared weight: its dense copy. A class that derives from it has `constant` and `to_dense`."""

    constant: bool
    _dense: Any = None

    def to_dense(self) -> Any:
        raise NotImplementedError

    def dense_copy(self) -> Any:
        """`to_dense()`, made once and kept if the weight is `constant`; it must not be written."""
        if not self.constant:
            return self.to_dense()
        if self._dense is None:
            self._dense = self.to_dense()
        return self._dense


def densified(data: Any, indices: Any, indptr: Any, shape: tuple[int, int]) -> Any:
    """The dense matrix of stored blocks, as an array of the library, dtype and device of `data`.

    Parameters
    ----------
    data
        Blocks `(nnzb, block_rows, block_cols)`.
    indices, indptr
        The block column of each, and the first block of each block row.

    Raises
    ------
    TypeError
        For arrays on a GPU that are not PyTorch's.

    Notes
    -----
    Duplicate blocks are added, in float32.
    """
    (n, k), (_, rows, cols) = shape, data.shape
    high, wide = n // rows, k // cols
    if arrays.is_torch(data):
        torch = sys.modules["torch"]
        counts = indptr.diff().long()
        at = torch.arange(high, device=counts.device).repeat_interleave(counts) * wide + indices
        blocks = torch.zeros((high * wide, rows, cols), dtype=torch.float32, device=data.device)
        blocks.index_add_(0, at, data.float())
        return blocks.view(high, wide, rows, cols).transpose(1, 2).reshape(n, k).to(data.dtype)
    if arrays.facts("data", data).device != "cpu":
        raise TypeError(f"weight: only weights of torch tensors become dense on a GPU, got {type(data).__name__}")
    import numpy as np

    stored = arrays.as_numpy(data)
    sums = np.zeros((high * wide, rows, cols), np.float32)
    at = np.repeat(np.arange(high), np.diff(arrays.as_numpy(indptr))) * wide + arrays.as_numpy(indices)
    np.add.at(sums, at, stored.astype(np.float32))
    dense = sums.reshape(high, wide, rows, cols).transpose(0, 2, 1, 3).reshape(n, k).astype(stored.dtype)
    return arrays.returned(dense, data)


def run_dense(
    weight: DenseCopy,
    launchers: dict[Any, Any] | None,
    what: Any,
    arguments: tuple[Any, ...],
    y: Any,
    *,
    activation: str | None = None,
    biased: bool = False,
    finish: Callable[[np.ndarray], np.ndarray] | None = None,
) -> None:
    """As `calls.run` of a kernel, but with the dense copy.

    Parameters
    ----------
    arguments
        Those of the kernel: x first, a bias last where the product is `biased`.
    activation
        A function of `torch.nn.functional`, for torch tensors.
    finish
        Bias and activation for arrays of other libraries on the host, from the product in float32.

    Raises
    ------
    TypeError
        For arrays on a GPU that are not PyTorch's.
    """
    if arrays.is_torch(y):
        run(launchers, what, _dense_call(weight, y.device.type, activation, biased), arguments, (y,), single=True)
        return
    import numpy as np

    x, matrix = (arrays.as_numpy(one).astype(np.float32) for one in (arguments[0], weight.dense_copy()))
    found = x @ matrix.T
    y[...] = found if finish is None else finish(found)


def _dense_call(weight: DenseCopy, kind: str, activation: str | None, biased: bool) -> Callable[..., None]:
    """A function of a kernel's arguments, torch tensors on a device of this kind."""
    torch = sys.modules["torch"]
    kept = weight.dense_copy().t() if weight.constant else None

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
