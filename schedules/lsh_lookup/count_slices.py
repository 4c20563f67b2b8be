"""Look-up on a CPU: threads take lists, and slices of the vocabulary, whose counts stay in a core's cache.

Each slice goes through all buckets of the list, so that several threads can work for one list.
"""

from __future__ import annotations

from ..lsh.slices import schedule, sliced

count_slices = sliced(
    name="count_slices",
    version=1,
    operator="lsh_lookup",
    summary="threads take lists and slices of the vocabulary",
    program=schedule,
)
