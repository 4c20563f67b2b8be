"""What the model of times is told about a look-up on a GPU, whichever template builds it."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Features
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

RESIDENT = 2048  # threads of a multiprocessor at the same time, at most


def gathered(problem: NhotLookup, machine: Machine, rounds: int, threads: int, columns: int) -> Features:
    """Bytes of a table row, of all rows that are read, and of a run of `columns` that threads side by side read of one;
    and how often a multiprocessor waits for memory: in `rounds`, and one after another where it has no room for its
    share of all `threads`."""
    itemsize = numpy_dtype(problem.table_dtype).itemsize
    row = problem.width * itemsize
    return {
        "row_bytes": row,
        "gathered_bytes": problem.bags * problem.nonzeros * row,
        "run_bytes": columns * itemsize,
        "trips": rounds * max(1.0, threads / (RESIDENT * machine.cores)),
    }
