"""What the phases of `beam_blocks` keep beside what those of `schedules.lsh` do."""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from ...device.state import named, register
from ...lsh.extents import CompactExtents, HashExtents
from ...lsh.state import alloc_state
from .space import BlockExtents


def alloc_block_state(h: HashExtents, e: BlockExtents, c: CompactExtents) -> SimpleNamespace:
    """Within a kernel: `lsh.state.alloc_state`, and registers.

    ``list``    of the cluster
    ``rank``    of the thread block in it, and the first of its rows
    ``rows``    of the thread block
    ``anyway``  words that are candidates anyway, of a thread's share
    ``peer``    what thread blocks have of the bitmap
    ``target``  what a count is before the hit that makes it reach the threshold, in both halves of a cell
    """
    own = {
        "list": register(),
        "rank": register(),
        "rows": register(),
        "row_at": register(),
        "longest": register(),  # words of the longest of the buckets in flight
        "target": register("uint32"),
        "anyway": T.alloc_local([e.shares], "uint32"),
        "peer": T.alloc_local([e.peers], "uint32"),
    }
    return named(SimpleNamespace(**vars(alloc_state(h, e, c)), **own))
