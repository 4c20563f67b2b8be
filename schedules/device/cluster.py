"""What blocks of a thread-block cluster share: barriers, and the shared memory of their peers."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T


def peer_write(name: str, kind: str) -> Any:
    """A function (shared address, rank, value) that writes a `kind` there in the rank-th block of the cluster.

    A few words of CUDA, because no TIR intrinsic maps a shared address to a peer's and writes it.
    """
    source = (
        f"__device__ __forceinline__ void {name}(void* p, int r, {kind} v)"
        f" {{ *(volatile {kind}*)__cluster_map_shared_rank(p, r) = v; }}"
    )
    return lambda pointer, rank, value: T.cuda.func_call(
        name, pointer, rank, value, source_code=source, return_type="void"
    )


@T.inline
def cluster_arrive():
    """The first half of `cluster_barrier`: what this thread wrote before is visible to who waits."""
    T.evaluate(T.call_extern("void", "__cluster_barrier_arrive"))


@T.inline
def cluster_arrive_silent():
    """As `cluster_arrive`, where nothing was written that others read: only tells them that this block is here."""
    T.ptx.barrier.cluster.arrive.relaxed()


@T.inline
def cluster_wait():
    """The second half: until all threads of all blocks have arrived."""
    T.evaluate(T.call_extern("void", "__cluster_barrier_wait"))


@T.inline
def cluster_barrier():
    """All threads of all blocks arrive; what they wrote to shared memory before is visible after."""
    cluster_arrive()
    cluster_wait()
