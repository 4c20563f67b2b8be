"""A ring of stages in shared memory: a producer warp fills them, consumer warps multiply them and hand them back.

Phases work on a state `s` with the registers `slot`, the stage in hand, `turn`, the parity of its mbarriers' phase, and
`left`, the stage to hand back; and with the mbarriers `full`, of stages that have come, and `empty`, of those that all
warps have handed back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from .mbarriers import arrive_expecting


# fmt: off
def begin_stages(stages: int, warps: int) -> Callable[..., Any]:
    """Make the mbarriers, in one thread; the phase is (s). `warps`: those that hand stages back.

    Reads: nothing. Writes: `full`, `empty`. Barriers: none; one of the thread block must follow.
    """

    @T.inline
    def phase(s):
        for i in T.unroll(stages):
            T.ptx.mbarrier.init.shared__cta.b64(s.full.ptr_to([i]), T.uint32(1))
            T.ptx.mbarrier.init.shared__cta.b64(s.empty.ptr_to([i]), T.uint32(warps))
        T.ptx.fence.mbarrier_init.release.cluster()

    return phase


def next_stage(stages: int) -> Callable[..., Any]:
    """Reads and writes: `slot`, `turn`. Barriers: none."""

    @T.inline
    def phase(s):
        s.slot = s.slot + 1
        if s.slot == stages:
            s.slot = 0
            s.turn = s.turn ^ T.uint32(1)

    return phase


def hand_back() -> Callable[..., Any]:
    """Tell the producer warp that a warp has multiplied the stage `left`; the phase is (s).

    Reads: `left`. Writes: nothing. Barriers: of the warp; arrives at `empty`.
    """

    @T.inline
    def phase(s):
        T.cuda.warp_sync()
        if s.lane == 0:
            arrive_expecting(s.empty.ptr_to([s.left]), T.uint32(0))

    return phase
# fmt: on
