"""How wide a load of a table's row can be."""

from __future__ import annotations

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

WIDEST = 16  # bytes of the widest load that a thread can issue


def load_widths(problem: NhotLookup) -> tuple[int, ...]:
    """Elements per load, of 16 bytes and of 8; where neither divides a row of the table, the widest two that do."""
    most = WIDEST // numpy_dtype(problem.table_dtype).itemsize
    return tuple(v for v in (16, 8, 4, 2, 1) if v <= most and problem.width % v == 0)[:2]
