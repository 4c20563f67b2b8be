"""The kernel of `cluster_rows`, a list of phases; those that are not here are those of `persistent_rows`.

before the first step

    take_units, load_weights
    fill            both copies of the states: those before the first step, and zeros
    find_peers      where the copies of the other thread blocks are
    a barrier of the cluster

in each step

    load_inputs     what the next one needs
    gather, reduce_lanes
    send            the states after the step, to all thread blocks of the cluster
    write_outputs   between the halves of a barrier of the cluster
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.cluster import cluster_arrive, cluster_barrier, cluster_wait
from ...device.state import local
from ...recurrent.exchange import element_bits
from ...recurrent.sizes import WIDEST
from ..persistent_rows.state import State
from ..persistent_rows.step import (
    first_state,
    gather,
    load_inputs,
    load_length,
    next_state,
    reduce_lanes,
    take_inputs,
    write_outputs,
)
from ..persistent_rows.weights import load_ahead, load_weights, take_units
from .space import ClusterExtents

Phase = Callable[..., Any]
PEER = """
__device__ __forceinline__ unsigned long long place_at_peer(void* p, int r) {
  return (unsigned long long)__cluster_map_shared_rank(p, r);
}
"""
store_word, store_half = T.ptx.st.u32, T.ptx.st.u16


@dataclass
class ClusterState(State):
    """What the phases share.

    Attributes
    ----------
    copy
        Which of the lanes that finish the same sample the thread is.
    peers
        Addresses of the copies of states in the shared memory of the thread blocks that it sends to.
    turn
        Bytes from the first copy to the one that is written in this step.
    """

    copy: Any = local("int32")
    peers: Any = local("uint64", lambda e: e.sends)
    turn: Any = local("int32")


# fmt: off
def fill(e: ClusterExtents) -> Phase:
    """Both copies of the states; the phase is (s, io, pack).

    Each thread block reads the states of all units before the first step. What is behind the last column, samples that
    there are not, and the other copy are zeros.

    Reads: `h0`. Writes: `stages`. Barriers: none; one of the cluster has to follow.
    """
    elements = e.hidden * e.pack
    of_copy = e.vectors * WIDEST // e.itemsize

    @T.inline
    def phase(s, io, pack):
        states = T.decl_buffer(
            (2 * of_copy,), "uint32" if e.itemsize == 4 else "uint16", data=s.stages.data, scope="shared.dyn")
        for i in T.serial(ceildiv(2 * of_copy, e.threads)):
            at: T.int32 = i * e.threads + s.t
            s.bits[0] = T.uint32(0)
            if at < elements:
                if pack * e.pack + at % e.pack < e.batch:
                    s.bits[0] = element_bits(e.dtype, io.h0[pack * e.pack + at % e.pack, at // e.pack])
            if at < 2 * of_copy:
                states[at] = T.Cast(states.dtype, s.bits[0])

    return phase


def find_peers(e: ClusterExtents) -> Phase:
    """The thread blocks that a lane sends its sample's states to; the phase is (s).

    Writes: `copy`, `peers`, `turn`. Barriers: none.
    """

    @T.inline
    def phase(s):
        s.turn[0] = e.vectors * WIDEST
        s.copy[0] = s.lane // e.pack
        for i in T.unroll(e.sends):
            s.peers[i] = T.cuda.func_call(
                "place_at_peer", s.stages.ptr_to([0]), T.min(s.copy[0] + i * e.copies, e.cluster - 1),
                source_code=PEER, return_type="uint64")

    return phase


def send(e: ClusterExtents) -> Phase:
    """A unit's states to all thread blocks of the cluster; the phase is (s, u, mine).

    The lanes that finish the same sample share the thread blocks.

    Reads: `bits`, `peers`. Writes: peers' `stages`, the copy at `turn`.
    Barriers: none; one of the cluster has to follow.
    """

    @T.inline
    def phase(s, u, mine):
        for i in T.unroll(e.sends):
            if s.lane < e.finishing and mine and s.copy[0] + i * e.copies < e.cluster:
                at = T.meta_var(s.peers[i] + T.Cast(
                    "uint64", s.turn[0] + s.unit[u] * e.column_bytes + s.sample * e.itemsize))
                if e.itemsize == 4:
                    store_word(at, s.bits[0])
                else:
                    store_half(at, T.Cast("uint16", s.bits[0]))

    return phase


def take_step(e: ClusterExtents) -> Phase:
    """One step; the phase is (s, io, step, pack)."""
    load, take, ahead = load_inputs(e), take_inputs(e), load_ahead(e)
    multiply, reduce, compute, give, write = gather(e), reduce_lanes(e), next_state(e), send(e), write_outputs(e)

    @T.inline
    def phase(s, io, step, pack):
        take(s)
        if step + 1 < io.steps:
            load(s, io, step + 1, pack)
        ahead(s, io)
        multiply(s, io)
        reduce(s)
        for u in T.unroll(e.units):
            mine = T.meta_var(u * e.groups + s.group < s.count[0])
            compute(s, io, step, pack, u, mine)
            if step + 1 < io.steps:
                give(s, u, mine)
        if step + 1 < io.steps:
            cluster_arrive()
        for u in T.unroll(e.units):
            write(s, io, step, pack, u, u * e.groups + s.group < s.count[0])
        if step + 1 < io.steps:
            cluster_wait()
        s.front[0] = s.copies[0] - s.front[0]
        s.turn[0] = e.vectors * WIDEST - s.turn[0]

    return phase


def kernel_body(e: ClusterExtents) -> Phase:
    """The kernel, as the body of the function; called with its arguments."""
    deal, load, begin, places = take_units(e), load_weights(e), fill(e), find_peers(e)
    first, first_inputs, length, go = first_state(e), load_inputs(e), load_length(e), take_step(e)

    @T.inline
    def body(io):
        T.device_entry()
        pack = T.cluster_id([e.packs])
        rank = T.cta_id_in_cluster([e.cluster])
        t = T.thread_id([e.threads])
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        s = T.meta_var(ClusterState.of(e, t))
        s.front[0] = T.cuda.cvta_generic_to_shared(s.stages.ptr_to([0]))
        s.copies[0] = s.front[0] * T.uint32(2) + T.uint32(e.vectors * WIDEST)
        deal(s, io, rank)
        begin(s, io, pack)
        for u in T.unroll(e.units):
            first(s, io, pack, u, u * e.groups + s.group < s.count[0])
        load(s, io)
        places(s)
        length(s, io, pack)
        first_inputs(s, io, 0, pack)
        cluster_barrier()
        for step in T.serial(io.steps):
            go(s, io, step, pack)

    return body
# fmt: on
