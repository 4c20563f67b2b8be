"""A share in registers of a row on whose bound blocks agree: a warp proceeds as soon as its own vectors have come.

Exponentials are computed while tops are in flight, and by a warp whose vectors came early while others wait for theirs.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from .agreement import agree, offer_top, tell
from .state import WEIGHED
from .sums import weigh_warp
from .words import NOTHING, largest


# fmt: off
@phase
def look(layout, /, s):
    """Look at a share in registers: its largest elements, and the warp's sum."""
    for u in T.unroll(layout.vectors):
        s.peaks[u] = largest(layout.dtype, [s.raw[u * 4 + w] for w in range(4)])
    s.pair[0] = largest(layout.dtype, [s.peaks[u] for u in range(layout.vectors)])
    offer_top(layout)(s)
    weigh_warp(layout)(s)
    s.thread_sums[s.t] = s.sum[0]
    if s.t % 32 == 0:
        s.warp_references[s.t // 32] = s.reference[0]
    tell(s, WEIGHED)


@phase
def take_held(layout, /, s):
    """The thread's largest elements and its sum; the warp that has no vectors finds the bound.

    Reads: `raw`, `factor`.
    Writes: `peaks`, `top`, `thread_sums`, `warp_references`; as `offer_top`, `weigh_warp` and `agree`; scratch is
        `pair`.
    Barriers: as `offer_top` and `agree`; arrives at WEIGHED.
    """
    s.top[0] = T.reinterpret("float32", T.uint32(NOTHING["float32"]))
    if s.t < layout.threads:
        look(layout)(s)
    else:
        agree(layout)(s)
# fmt: on
