"""The largest element of a row and its logsumexp on a GPU: a thread block a row, one read."""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

argmax_block = in_phases(
    space,
    name="argmax_block",
    version=1,
    operator="row_argmax_logsumexp",
    summary="a thread block a row, one read, by the phases of schedules/rows",
)
