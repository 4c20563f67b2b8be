"""Mbarriers: barriers in shared memory that also count the bytes which asynchronous copies and stores bring."""

from __future__ import annotations

from tvm.script import tirx as T

# An arrival that announces further bytes: at an mbarrier of the own thread block, or of another one.
arrive_expecting = T.ptx.mbarrier.arrive.expect_tx.shared__cta.b64
arrive_expecting_there = T.ptx.mbarrier.arrive.expect_tx.relaxed.cluster.shared__cluster.b64
try_wait = T.ptx.mbarrier.try_wait.parity.acquire.cta.shared__cta.b64
# A word to another thread block of the cluster, whose bytes an mbarrier there counts.
send_word = T.ptx.st_async.weak.shared__cluster.mbarrier__complete_tx__bytes.u64
# A copy from global memory, whose bytes an mbarrier of the thread block counts.
bulk_copy = T.ptx.cp.async_.bulk.shared__cluster.global_.mbarrier__complete_tx__bytes


@T.inline
def await_phase(done, barrier, parity):
    """Wait until the phase of an mbarrier that has this parity is over, and see what was sent until then. `done`: a
    register."""
    done[0] = T.uint32(0)
    while done[0] == T.uint32(0):
        try_wait(done[0], barrier, parity)


@T.inline
def await_arrivals(barrier):
    """The same for the first phase."""
    done = T.alloc_local([1], "uint32")
    await_phase(done, barrier, T.uint32(0))
