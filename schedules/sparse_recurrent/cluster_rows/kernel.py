"""The kernel of `cluster_rows`, a list of phases; those that are not here are those of `persistent_rows`.

before the first step

    take_units
    prepare         zeros, the table of places, mbarriers
    a barrier of the thread block
    fill            the states before the first step
    load_weights
    a barrier of the cluster

in each step

    load_inputs     what the next one needs
    gather, reduce_lanes
    keep            the units' states after the step, in the copy that is not read
    send            the same to all other thread blocks of the cluster
    write_outputs
    await_states    those of all other thread blocks

With the reset before the product a step has two halves with an exchange each: in the first one `scaled_state` takes the
place of `next_state`.

Layers with several gates and one exchange take the steps of `stores`.

after the last one a barrier of the cluster, because a thread block's shared memory has to stay until all others have
read of it and written to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program, ceildiv
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from ...device.cluster import cluster_arrive_relaxed, cluster_barrier, cluster_wait
from ...device.mbarriers import arrive_expecting
from ...device.selection import FULL_WARP
from ...device.state import local, pooled
from ...interface import gpu_program
from ...recurrent.exchange import element_bits
from ...recurrent.sizes import WARP
from ..persistent_rows.state import State
from ..persistent_rows.step import (
    first_state,
    gather,
    load_inputs,
    load_length,
    next_state,
    reduce_lanes,
    scaled_state,
    take_inputs,
    write_outputs,
)
from ..persistent_rows.weights import load_ahead, load_weights, take_units
from . import stores
from .copies import await_states, turn_copies
from .space import BARRIER_BYTES, COPIES, ClusterExtents
from .stores import find_longest, first_peer, prepare_step

store_shared = {4: T.ptx.st.shared.u32, 2: T.ptx.st.shared.u16}
bulk_copy = T.ptx.cp.async_.bulk.shared__cluster.shared__cta.mbarrier__complete_tx__bytes


@dataclass
class ClusterState(State):
    """What the phases share."""

    # The address of the thread block's dynamic shared memory.
    pool: Any = local("uint32")
    # The addresses, within the cluster, of the dynamic shared memory of the thread blocks that the warp sends to.
    peers: Any = local("uint32", lambda e: e.sends)
    # Bytes from the beginning of a copy to the thread block's chunk.
    chunk_at: Any = local("uint32")
    # The most of `rounds`.
    longest: Any = local("int32")
    # The states of the lane, or unit, that shares a word.
    other: Any = local("uint32")
    # Which copy is written in this step: 0 or 1.
    turn: Any = local("int32")
    # Whether a wait is over.
    done: Any = local("uint32")
    # Shared: of each column, the place of its states in a copy.
    where: Any = pooled("uint16", lambda e: e.hidden, lambda e: e.stage_bytes // 2)
    # Shared: the mbarrier of each copy.
    barriers: Any = pooled("uint64", COPIES, lambda e: e.barriers_at // BARRIER_BYTES)


# fmt: off
def prepare(e: ClusterExtents) -> Phase:
    """Zeros in both copies of the states, the table of places, and mbarriers; the phase is (s, io, rank).

    Writes: `stages`, `where`, `barriers`, `pool`, `peers`, `chunk_at`, `front`, `copies`, `turn`.
    Barriers: none; one of the thread block has to follow, and one of the cluster before states are sent.
    """
    share, more = divmod(e.hidden, e.cluster)
    words = e.stage_bytes // 4

    @T.inline
    def addresses(s, rank):
        s.pool[0] = T.cuda.cvta_generic_to_shared(s.stages.ptr_to([0]))
        s.front[0] = s.pool[0]
        s.copies[0] = s.pool[0] * T.uint32(2) + T.uint32(e.stage_bytes // COPIES)
        s.chunk_at[0] = T.Cast("uint32", rank * e.chunk_bytes)
        s.turn[0] = 1
        for i in T.unroll(e.sends):
            T.ptx.mapa.shared__cluster.u32(s.peers[i], s.pool[0], T.Cast("uint32", peer_of(e, s, i) % e.cluster))

    @T.inline
    def phase(s, io, rank):
        addresses(s, rank)
        for i in T.serial(ceildiv(words, e.threads)):
            if i * e.threads + s.t < words:
                s.stages[i * e.threads + s.t] = T.uint32(0)
        for i in T.serial(ceildiv(e.hidden, e.threads)):
            slot: T.int32 = i * e.threads + s.t
            # The first `more` thread blocks have one unit more than the others.
            block: T.int32 = T.Select(
                slot < more * (share + 1), slot // (share + 1), more + (slot - more * (share + 1)) // share)
            if slot < e.hidden:
                s.where[io.units[slot]] = T.Cast(
                    "uint16", block * e.chunk + slot - (block * share + T.min(block, more)))
        if s.t == 0:
            for i in T.unroll(COPIES):
                T.ptx.mbarrier.init.shared__cta.b64(s.barriers.ptr_to([i]), T.uint32(1))
            T.ptx.fence.mbarrier_init.release.cluster()
            for i in T.unroll(COPIES):
                # The second copy receives what is exchanged first, the first copy what is exchanged then.
                if COPIES - i < io.steps * e.exchanges:
                    arrive_expecting(s.barriers.ptr_to([i]), T.uint32(e.expected_bytes))

    return phase


def peer_of(e: ClusterExtents, s: Any, i: Any) -> Any:
    """The `i`-th thread block that the thread's warp sends to, or its lane; these share them."""
    if e.stores:
        return first_peer(e, s) + i * e.sharing
    return s.t // WARP + i * (e.threads // WARP)


@phase
def fill(e, /, s, io, pack):
    """The states of all units before the first step, to the copy that is read first.

    Reads: `h0`, `where`. Writes: `stages`. Barriers: none; one of the thread block has to follow.
    """
    elements = T.meta_var(e.hidden * e.pack)
    for i in T.serial(ceildiv(elements, e.threads)):
        at: T.int32 = i * e.threads + s.t
        if at < elements and pack * e.pack + at % e.pack < e.batch:
            s.bits[0] = element_bits(e.dtype, io.h0[pack * e.pack + at % e.pack, at // e.pack])
            store_shared[e.itemsize](
                s.front[0] + T.Cast("uint32", s.where[at // e.pack]) * T.uint32(e.column_bytes)
                + T.Cast("uint32", at % e.pack * e.itemsize),
                T.Cast("uint16", s.bits[0]) if e.itemsize == 2 else s.bits[0])


@phase
def keep(e, /, s, u, mine):
    """A unit's states after the step, in the thread block's own copy.

    Reads: `bits`. Writes: `stages`, the copy that is not read in this step.
    Barriers: none; one of the thread block has to follow.
    """
    if s.lane < e.finishing and mine:
        at = T.meta_var(
            s.copies[0] - s.front[0] + s.chunk_at[0]
            + T.Cast("uint32", (u * e.groups + s.group) * e.column_bytes + s.sample * e.itemsize))
        store_shared[e.itemsize](at, T.Cast("uint16", s.bits[0]) if e.itemsize == 2 else s.bits[0])


@phase
def send(e, /, s, rank):
    """The states of the thread block's units to all others of the cluster.

    Reads: `stages`, the own chunk of the copy that is not read in this step. Writes: the same place in the others'
    copies. Barriers: of the thread block, at the beginning.
    """
    # Make what threads wrote visible to bulk copies, which read through another proxy.
    T.ptx.fence.proxy.async_.shared__cta()
    T.cuda.cta_sync()
    if s.t % WARP == 0:
        chunk = T.meta_var(s.copies[0] - s.front[0] + s.chunk_at[0])
        for i in T.unroll(e.sends):
            if peer_of(e, s, i) < e.cluster and peer_of(e, s, i) != rank:
                bulk_copy(
                    s.peers[i] + (chunk - s.pool[0]), chunk, T.uint32(e.chunk_bytes),
                    s.peers[i] + T.uint32(e.barriers_at) + T.Cast("uint32", s.turn[0] * BARRIER_BYTES))


@phase
def scale_states(e, /, s, io, step, pack, rank):
    """The first half of a step of two exchanges.

    After: the copy that is read has the states times their reset gates.
    """
    load_ahead(e, 0, 2)(s, io)
    gather(e, 0, 2)(s, io)
    reduce_lanes(e, 0, 2)(s)
    for u in T.unroll(e.units):
        mine = T.meta_var(u * e.groups + s.group < s.count[0])
        scaled_state(e)(s, io, pack, u, mine)
        keep(e)(s, u, mine)
    send(e)(s, rank)
    await_states(e)(s, io, step * 2)
    turn_copies()(s)


@phase
def take_step(e, /, s, io, step, pack, rank):
    """One step."""
    take_inputs(e)(s)
    if step + 1 < io.steps:
        load_inputs(e)(s, io, step + 1, pack)
    if e.exchanges == 2:
        scale_states(e)(s, io, step, pack, rank)
    begin = T.meta_var(2 if e.exchanges == 2 else 0)  # of the gates whose rows the new states need
    load_ahead(e, begin)(s, io)
    gather(e, begin)(s, io)
    reduce_lanes(e, begin)(s)
    for u in T.unroll(e.units):
        mine = T.meta_var(u * e.groups + s.group < s.count[0])
        next_state(e)(s, io, step, pack, u, mine)
        keep(e)(s, u, mine)
    if step + 1 < io.steps:
        send(e)(s, rank)
    for u in T.unroll(e.units):
        write_outputs(e)(s, io, step, pack, u, u * e.groups + s.group < s.count[0])
    if step + 1 < io.steps:
        await_states(e)(s, io, step * e.exchanges + (e.exchanges - 1))
    turn_copies()(s)


@phase
def kernel_body(e, /, io):
    """The kernel, as the body of the function; called with its arguments."""
    T.device_entry()
    # Numbers of clusters are kept in registers: otherwise they are read from a special register at each use.
    cluster_id = T.cluster_id([e.packs])
    rank_id = T.cta_id_in_cluster([e.cluster])
    t = T.thread_id([e.threads])
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
    pack: T.int32 = cluster_id
    rank: T.int32 = rank_id
    s = T.meta_var(ClusterState.of(e, t))
    take_units(e)(s, io, rank)
    prepare(e)(s, io, rank)
    T.cuda.cta_sync()
    fill(e)(s, io, pack)
    for u in T.unroll(e.units):
        first_state(e)(s, io, pack, u, u * e.groups + s.group < s.count[0])
    load_weights(e)(s, io)
    load_length(e)(s, io, pack)
    load_inputs(e)(s, io, 0, pack)
    if e.stores:
        find_longest(e)(s)
        prepare_step(e)(s, io, 0, pack)
        cluster_barrier()
        # Warps without a unit send nothing, and so would not hold up states that they have not awaited. The broadcast
        # tells the compiler that a warp goes one way.
        if T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.t // WARP, 0, 32, 32) * (WARP // e.lanes) < s.count[0]:
            for step in T.serial(io.steps):
                stores.take_step(e)(s, io, step, pack)
    else:
        # Bulk copies will write where threads have written zeros.
        T.ptx.fence.proxy.async_.shared__cta()
        cluster_barrier()
        for step in T.serial(io.steps):
            take_step(e)(s, io, step, pack, rank)
    cluster_arrive_relaxed()
    cluster_wait()
# fmt: on


def program(problem: SparseRecurrent, decisions: Decisions) -> Program:
    """The program of a point."""
    return gpu_program(problem, kernel_body(ClusterExtents.of(problem, decisions)))
