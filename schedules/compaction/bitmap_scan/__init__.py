"""Stream compaction on a GPU without sorting: population counts, a scan, one launch.

Each thread block of a list reads the whole bitmap, which is small, and writes the words of a share of it, so that no
block waits for another one's count. Lanes take 8 to 32 bits each, and a scan over the warp and one over the warps' sums
give their places (see `schedules.lsh.compact`).

With `overlap` 1 the kernel waits for its producer kernel, and then lets its consumer kernel start; with 2 it lets the
consumer start before it waits. In both nothing is read before the wait.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

bitmap_scan = in_phases(
    space,
    name="bitmap_scan",
    version=2,
    operator="compaction",
    summary="population counts and a scan in one launch (Figure 5, by lanes)",
)
