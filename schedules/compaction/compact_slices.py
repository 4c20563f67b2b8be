"""Stream compaction on a CPU: threads take slices of lists, and each counts the words before its slice itself."""

from __future__ import annotations

from ..lsh.slices import schedule, sliced

compact_slices = sliced(
    name="compact_slices",
    version=2,
    operator="compaction",
    summary="threads take slices of lists",
    program=schedule,
)
