"""About how long products with unstructured weights take: where the product with a dense copy of the weight is the
faster way (`runtime.dense`).
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.runtime import dense
from tvm_sparse.runtime.dense import Likely, operations

from .problem import CsrLinear

# Of `warp_entries` on an H200 in 16 bits, inputs hot: operations on entries in a microsecond, bytes of entries in a
# microsecond, and microseconds of its launch. scripts/entry_products.py measures and compares them.
RATE, BYTES, LAUNCH = 4.1e6, 4.5e6, 2.0


def time_of_entries(problem: CsrLinear) -> float:
    """About how many microseconds `warp_entries` takes."""
    entry = numpy_dtype(problem.dtype).itemsize + numpy_dtype(problem.index).itemsize
    return LAUNCH + max(operations(problem) / RATE, problem.nnz * entry / BYTES)


def likely_way(problem: CsrLinear, machine: Machine) -> Likely:
    """As `runtime.dense.likely_way`."""
    return dense.likely_way(problem, machine, lambda: time_of_entries(problem), "entries")
