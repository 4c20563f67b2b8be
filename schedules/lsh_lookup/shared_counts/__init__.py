"""Look-up on a GPU, lanes sharing buckets as in Figure 4: a cluster of thread blocks a row, counts in shared memory.

Lanes of a warp go through a bucket together, so that none waits for another one's longer bucket (see
`schedules.lsh.buckets`). Thread blocks of a cluster share the bands of a row and the words of a slice of the
vocabulary; `exchange` says what they send each other. The cluster that comes last for its list copies the list's
bitmap, which all have set bits of in a workspace, together with the words that are chosen anyway.

With `overlap` 1 the kernel waits for its producer kernel, and then lets its consumer kernel start; with 2 it lets the
consumer start before it waits. In both nothing is read before the wait.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

shared_counts = in_phases(
    space,
    name="shared_counts",
    version=1,
    operator="lsh_lookup",
    summary="a cluster of blocks a row, lanes share buckets, counts in shared memory (Figure 4, optimised)",
)
