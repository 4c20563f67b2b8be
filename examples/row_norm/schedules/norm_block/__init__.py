"""RMS norm on a GPU, a kernel in phases: a thread block a row, read twice, the second time from a cache."""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

norm_block = in_phases(
    space,
    name="norm_block",
    version=1,
    operator="row_norm",
    summary="a thread block a row, two reads, the second from a cache",
)
