"""Thread block clusters (compute capability 9.0 on): barriers, and stores to the shared memory of other thread blocks.

The thread blocks of a cluster run at the same time, on neighbouring multiprocessors, and reach each other's shared
memory, which is then called distributed shared memory. Two rules hold for every exchange:

* a thread block must have begun before others reach its shared memory: a barrier comes before the first access;
* it must not end while others may still do so: a barrier, or what implies one, comes after the last.

A barrier has two halves, so that work that needs nothing of the other thread blocks can stand between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.template import ceildiv

# Thread blocks send few keys each. So that all lanes get some, the first key of each block goes to a lane at this
# distance from that of the block before; the number is odd, so that each lane comes to be the first.
TURN = 11


def place_in_grid(groups: Any, cluster: int) -> tuple[Any, Any]:
    """The number of a thread block's cluster among `groups`, and the thread block's own number in it; with clusters of
    one thread block its number in the grid, and 0. For the beginning of a kernel: it declares the grid.
    """
    if cluster > 1:
        return T.cluster_id([groups]), T.cta_id_in_cluster([cluster])
    return T.cta_id([groups]), 0


def peer_store(name: str, kind: str) -> Any:
    """A function (shared address, rank, value) that stores a `kind` there in the rank-th thread block of the cluster.

    `name` and `kind` are the C++ function's. A few words of CUDA, because no TIR intrinsic maps an address of shared
    memory to another thread block's and stores to it.
    """
    source = (
        f"__device__ __forceinline__ void {name}(void* p, int r, {kind} v)"
        f" {{ *(volatile {kind}*)__cluster_map_shared_rank(p, r) = v; }}"
    )
    return lambda pointer, rank, value: T.cuda.func_call(
        name, pointer, rank, value, source_code=source, return_type="void"
    )


def peer_load(name: str, kind: str, dtype: str) -> Any:
    """A function (shared address, rank) of the `kind` that is there in the rank-th thread block of the cluster.

    `name` and `kind` are the C++ function's, `dtype` is TIR's for the same. Loads that follow each other are in flight
    together, as they are not waited for before they are used.
    """
    source = (
        f"__device__ __forceinline__ {kind} {name}(const void* p, int r)"
        f" {{ return *(const volatile {kind}*)__cluster_map_shared_rank(p, r); }}"
    )
    return lambda pointer, rank: T.cuda.func_call(name, pointer, rank, source_code=source, return_type=dtype)


@T.inline
def cluster_arrive():
    """The first half of `cluster_barrier`: releases what this thread wrote before, for those that wait."""
    T.evaluate(T.call_extern("void", "__cluster_barrier_arrive"))


@T.inline
def cluster_arrive_relaxed():
    """As `cluster_arrive`, but releases nothing, which is faster: it only says that this thread has arrived."""
    T.ptx.barrier.cluster.arrive.relaxed()


@T.inline
def cluster_wait():
    """The second half: waits until all threads of the cluster have arrived, and acquires what they released."""
    T.evaluate(T.call_extern("void", "__cluster_barrier_wait"))


@T.inline
def cluster_barrier():
    """All threads of all thread blocks arrive; what they wrote to shared memory before is visible after."""
    cluster_arrive()
    cluster_wait()


@T.inline
def place_there(there, place, rank):
    """Set `there` to the address, in the rank-th thread block of the cluster, of what lies at `place` in this one."""
    T.ptx.mapa.shared__cluster.u32(there[0], T.cuda.cvta_generic_to_shared(place), rank)


extent = Derived["Deal", int]


@dataclass(frozen=True)
class Deal:
    """How a block's warps share what the blocks of its cluster have sent: each part goes to a few warps, which take 32
    keys at a time.
    """

    cluster: int  # parts
    warps: int

    # Parts that are read at the same time.
    together = extent(lambda e: min(e.cluster, e.warps))
    # Warps of each of these parts.
    groups = extent(lambda e: max(e.warps // e.cluster, 1))
    # Rounds until all parts have been read.
    rounds = extent(lambda e: ceildiv(e.cluster, e.warps))

    def part(self, t: Any, r: Any) -> Any:
        """The part that a thread reads in a round; `has` says whether there is one."""
        return r * self.warps + t // 32 % self.together

    def has(self, t: Any, part: Any) -> Any:
        return T.And(part < self.cluster, t // 32 < self.groups * self.together)

    def turn(self, t: Any) -> Any:
        """The number of the thread's warp among those of its part."""
        return t // 32 // self.together
