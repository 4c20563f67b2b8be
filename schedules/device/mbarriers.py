"""Mbarriers: barriers in shared memory that also count the bytes which asynchronous copies and stores bring."""

from __future__ import annotations

from tvm.script import tirx as T

# An arrival that tells how many bytes more to await: at an mbarrier of the own thread block, or of another one.
arrive_expecting = T.ptx.mbarrier.arrive.expect_tx.shared__cta.b64
arrive_expecting_there = T.ptx.mbarrier.arrive.expect_tx.relaxed.cluster.shared__cluster.b64
try_wait = T.ptx.mbarrier.try_wait.parity.acquire.cta.shared__cta.b64
# A word to another thread block of the cluster, whose bytes an mbarrier there counts.
send_word = T.ptx.st_async.weak.shared__cluster.mbarrier__complete_tx__bytes.u64


@T.inline
def await_arrivals(barrier):
    """Wait until the first phase of an mbarrier is over, and see what was sent until then."""
    done = T.alloc_local([1], "uint32")
    done[0] = T.uint32(0)
    while done[0] == T.uint32(0):
        try_wait(done[0], barrier, T.uint32(0))
