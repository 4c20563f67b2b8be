"""A ring of stages in shared memory: a producer warp fills them, consumer warps multiply them and hand them back.

Phases work on a state `s` with the registers `slot`, the stage in hand, `turn`, the parity of its mbarriers' phase, and
`left`, the stage to hand back; and with the mbarriers `full`, of stages that have come, and `empty`, of those that all
warps have handed back.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from .mbarriers import arrive_expecting


# fmt: off
@phase
def begin_stages(stages, warps, /, s):
    """Make the mbarriers, in one thread. `warps`: those that hand stages back.

    Reads: nothing. Writes: `full`, `empty`. Barriers: none; one of the thread block must follow.
    """
    for i in T.unroll(stages):
        T.ptx.mbarrier.init.shared__cta.b64(s.full.ptr_to([i]), T.uint32(1))
        T.ptx.mbarrier.init.shared__cta.b64(s.empty.ptr_to([i]), T.uint32(warps))
    T.ptx.fence.mbarrier_init.release.cluster()


@phase
def next_stage(stages, /, s):
    """Reads and writes: `slot`, `turn`. Barriers: none."""
    s.slot = s.slot + 1
    if s.slot == stages:
        s.slot = 0
        s.turn = s.turn ^ T.uint32(1)


@T.inline
def hand_back(s):
    """Tell the producer warp that a warp has multiplied the stage `left`.

    Reads: `left`. Writes: nothing. Barriers: of the warp; arrives at `empty`.
    """
    T.cuda.warp_sync()
    if s.lane == 0:
        arrive_expecting(s.empty.ptr_to([s.left]), T.uint32(0))
# fmt: on
