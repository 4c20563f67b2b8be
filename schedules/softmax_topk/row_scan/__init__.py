"""Softmax + top-k on a CPU: one pass over the row in chunks that stay in the L1 cache, and a heap of the best.

A thread has a row, and takes it in chunks. It finds a chunk's maximum (a vector loop), rescales the running sum if
that is a new maximum of the row, and adds the chunk's exponentials (a second vector loop, now from L1): Algorithm 3
of Milakov & Gimelshein with one rescaling per chunk instead of one per element. The k best elements so far are in a
binary heap of keys. Only of chunks whose maximum exceeds the least of these are elements looked at one by one. Nothing
else touches the row, so main memory is read once, and the cost hardly grows with k.

Elements that no vector covers, at the row's end, follow one by one. A row with a NaN is gone through once more for the
heap, as a NaN passes no comparison but comes first in the order.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

row_scan = in_phases(
    space,
    name="row_scan",
    version=5,
    operator="softmax_topk",
    kind="llvm",
    summary="a thread a row, one pass in chunks, a heap behind a threshold",
)
