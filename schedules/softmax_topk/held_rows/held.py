"""A share in registers of a row on whose bound blocks agree: a warp proceeds as soon as its own vectors have come.

Exponentials are computed while tops are in flight, and by a warp whose vectors came early while others wait for theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from .agreement import agree, offer_top, tell
from .space import Layout
from .state import WEIGHED
from .sums import weigh_warp
from .words import NOTHING, largest


# fmt: off
def take_held(layout: Layout) -> Callable[..., Any]:
    """The thread's largest elements and its sum; the warp that has no vectors finds the bound. The phase is (s).

    Reads: `raw`, `factor`.
    Writes: `peaks`, `top`, `thread_sums`, `warp_references`; as `offer_top`, `weigh_warp` and `agree`; scratch is
        `pair`.
    Barriers: as `offer_top` and `agree`; arrives at WEIGHED.
    """
    dtype, vectors = layout.dtype, layout.vectors
    offer, weigh, bound = offer_top(layout), weigh_warp(layout), agree(layout)

    @T.inline
    def look(s):
        for u in T.unroll(vectors):
            s.peaks[u] = largest(dtype, [s.raw[u * 4 + w] for w in range(4)])
        s.pair[0] = largest(dtype, [s.peaks[u] for u in range(vectors)])
        offer(s)
        weigh(s)
        s.thread_sums[s.t] = s.sum[0]
        if s.t % 32 == 0:
            s.warp_references[s.t // 32] = s.reference[0]
        tell(s, WEIGHED)

    @T.inline
    def phase(s):
        s.top[0] = T.reinterpret("float32", T.uint32(NOTHING["float32"]))
        if s.t < layout.threads:
            look(s)
        else:
            bound(s)

    return phase
# fmt: on
