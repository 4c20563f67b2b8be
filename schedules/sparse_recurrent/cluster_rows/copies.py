"""The two copies of the states that a thread block has, one of which is read while the other is written."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.mbarriers import arrive_expecting, await_phase
from .space import BARRIER_BYTES, COPIES

try_wait = T.ptx.mbarrier.try_wait.parity.acquire.cluster.shared__cta.b64


# fmt: off
@T.inline
def await_bulk_copies(done, barrier, parity):
    """`await_phase`, by a wait of the cluster's scope."""
    done[0] = T.uint32(0)
    while done[0] == T.uint32(0):
        try_wait(done[0], barrier, parity)


@phase
def await_states(e, /, s, io, number):
    """Wait until the others' states are there, by the exchange of this `number`.

    The first thread then tells the mbarrier how many bytes to expect next: those of the exchange after the next one.

    Reads and writes: `barriers`. Barriers: none.
    """
    wait = T.meta_var(await_phase if e.stores else await_bulk_copies)
    at = T.meta_var(s.pool[0] + T.uint32(e.barriers_at) + T.Cast("uint32", s.turn[0] * BARRIER_BYTES))
    wait(s.done, at, T.Cast("uint32", number // COPIES % 2))
    if s.t == 0 and number + 1 + COPIES < io.steps * e.exchanges:
        arrive_expecting(at, T.uint32(e.expected_bytes))


@phase
def turn_copies(s):
    """Read the other copy from now on, and write this one."""
    s.front[0] = s.copies[0] - s.front[0]
    s.turn[0] = 1 - s.turn[0]
# fmt: on
