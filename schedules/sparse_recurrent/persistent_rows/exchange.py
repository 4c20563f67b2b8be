"""The exchange of `recurrent.exchange` where states of several samples lie side by side: how it is made ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ...recurrent.exchange import HALF_MARK, MARK, WIDEST
from .space import Extents

Phase = Callable[..., Any]


# fmt: off
def mark(e: Extents) -> Phase:
    """Make the exchange ready; the phase is (s, io, states, block).

    Reads: `first`, `count`, `units`.
    Writes: of the block's own columns, the mark for each sample from the second slot on, if the exchange is polled; and
        zeros for samples that there are not. The first block: zeros in what is behind the last column of each pack.
    Barriers: none; one of the grid has to follow.
    """
    behind = e.elements - e.hidden * e.pack
    kind, marked = ("uint32", MARK) if e.itemsize == 4 else ("uint16", HALF_MARK)

    @T.inline
    def phase(s, io, states, block):
        slots = T.meta_var(io.steps if e.polled else 2)
        if e.polled or e.batch % e.pack > 0:
            for i in T.serial((s.count[0] * e.packs * slots - s.t + (e.threads - 1)) // e.threads):
                item: T.int32 = i * e.threads + s.t
                own: T.int32 = item % (s.count[0] * e.packs)
                slot: T.int32 = item // (s.count[0] * e.packs)
                column: T.int32 = io.units[s.first[0] + own // e.packs]
                for j in T.unroll(e.pack):
                    at = T.meta_var(T.Cast("int64", slot * e.packs + own % e.packs) * e.elements
                                    + T.Cast("int64", column * e.pack + j))
                    if own % e.packs * e.pack + j >= e.batch:
                        states[at] = tirx.const(0, kind)
                    elif e.polled:
                        if slot > 0:
                            states[at] = tirx.const(marked, kind)
        if block == 0:
            for i in T.serial((slots * (e.packs * behind) - s.t + (e.threads - 1)) // e.threads):
                item: T.int32 = i * e.threads + s.t
                states[T.Cast("int64", item // behind) * e.elements + T.Cast("int64", e.hidden * e.pack + item % behind)
                       ] = tirx.const(0, kind)

    return phase


def find_source(e: Extents) -> Phase:
    """Where the states of a pack before a step are; the phase is (s, io, slot, pack).

    Writes: `source`. Barriers: none.
    """

    @T.inline
    def phase(s, io, slot, pack):
        s.source[0] = s.base[0] + T.Cast("uint64", slot * e.packs + pack) * T.uint64(e.vectors * WIDEST)

    return phase
# fmt: on
