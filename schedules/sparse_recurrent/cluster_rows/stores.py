"""Steps in which each warp stores its units' states in all thread blocks of the cluster, of layers with several gates.

A step takes about as long as its longest chain of instructions that wait for each other. So no barrier of the thread
block is part of it; all lanes of a group compute the gates of its unit, each to send the state to other thread blocks;
loads of all rows of a group are in flight together; and inputs, outputs and entries that are not on chip are seen to
while states are awaited.
"""

from __future__ import annotations

import functools
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.selection import FULL_WARP
from ..persistent_rows.step import (
    add_rounds,
    gather_rest,
    load_inputs,
    next_state,
    reduce_lanes,
    take_inputs,
    write_outputs,
)
from ..persistent_rows.weights import load_ahead
from .copies import await_states, turn_copies
from .space import BARRIER_BYTES, ClusterExtents

send_word = T.ptx.st_async.weak.shared__cluster.mbarrier__complete_tx__bytes.u32


# fmt: off
def first_peer(e: ClusterExtents, s: Any) -> Any:
    """The first thread block that the lane sends to: lanes that have the same word of states share them."""
    if e.itemsize == 4:
        return s.lane // e.pack
    return s.lane // e.pack * 2 + s.t % 2 if e.pack > 1 else s.lane + s.group % 2 * e.lanes


@phase
def find_longest(e, /, s):
    """Rounds of the group's longest row.

    Reads: `rounds`. Writes: `longest`. Barriers: none.
    """
    s.longest[0] = 0
    for row in T.unroll(e.rows):
        s.longest[0] = T.max(s.longest[0], s.rounds[row])


@phase
def all_rows(e, held, /, s):
    """Call a phase (s, row) for each row of the group."""
    for row in T.unroll(e.rows):
        held(s, row)


def gather_batch(e: ClusterExtents, first: int, count: int) -> Phase:
    """Add up the products of a batch of rounds of all rows; the phase is (s).

    The first batch has no branch. Later ones are left out where no row of the warp has any of their rounds.

    Reads: `weights`, `longest`, `stages`. Writes: `sums`. Barriers: none.
    """
    every = all_rows(e, add_rounds(e, first, count))

    @T.inline
    def if_any(s):
        if s.longest[0] > first:
            every(s)

    return if_any if first else every


def gather_together(e: ClusterExtents) -> Phase:
    """The recurrent sums of the group's units, each lane its part; the phase is (s, io).

    Reads: weights, and the states before the step. Writes: `sums`. Barriers: none.
    """
    rest = gather_rest(e)

    def then(first: Phase, second: Phase) -> Phase:
        @T.inline
        def both(s):
            first(s)
            second(s)

        return both

    batches = [gather_batch(e, first, count) for first, count in e.batches]
    held = functools.reduce(then, batches) if batches else None

    @T.inline
    def phase(s, io):
        for i in T.unroll(e.rows * e.pack):
            s.sums[i] = T.float32(0)
        if e.registers > 0:
            held(s)
        if s.longest[0] > e.registers:
            for row in T.unroll(e.rows):
                rest(s, io, row)

    return phase


@phase
def send(e, /, s, u):
    """The states of a unit after the step, to all thread blocks of the cluster.

    In 16 bits the states of two samples, or else of two neighbouring units, are one word.

    Reads: `bits`. Writes: the copies that are not read in this step.
    Barriers: none, but all lanes of a warp take part.
    """
    paired = T.meta_var(e.itemsize == 2)
    apart = T.meta_var(1 if e.pack > 1 else e.lanes)  # lanes between the halves of a word
    first = T.meta_var(u * e.groups + (s.group // 2 * 2 if paired and e.pack == 1 else s.group))
    # All lanes have read the states that others will write to next.
    T.cuda.warp_sync()
    if paired:
        s.other[0] = T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.bits[0], apart, 32, 32)
        s.bits[0] = T.Select(
            s.t // apart % 2 == 0,
            s.bits[0] | s.other[0] << T.uint32(16), s.bits[0] << T.uint32(16) | s.other[0])
    if first < s.count[0]:
        at = T.meta_var(
            s.copies[0] - s.front[0] - s.pool[0] + s.chunk_at[0]
            + T.Cast("uint32", first * e.column_bytes + s.sample * e.itemsize // 4 * 4))
        for i in T.unroll(e.sends):
            if first_peer(e, s) + i * e.sharing < e.cluster:
                send_word(
                    s.peers[i] + at, s.bits[0],
                    s.peers[i] + T.uint32(e.barriers_at) + T.Cast("uint32", s.turn[0] * BARRIER_BYTES))


@phase
def prepare_step(e, /, s, io, step, pack):
    """What a step needs beside states: its inputs are taken, those of the next one loaded, and what is not on chip."""
    take_inputs(e)(s)
    if step + 1 < io.steps:
        load_inputs(e)(s, io, step + 1, pack)
    if s.longest[0] > e.registers:
        load_ahead(e)(s, io)


@phase
def take_step(e, /, s, io, step, pack):
    """One step."""
    gather_together(e)(s, io)
    reduce_lanes(e)(s)
    for u in T.unroll(e.units):
        next_state(e)(s, io, step, pack, u, u * e.groups + s.group < s.count[0])
        if step + 1 < io.steps:
            send(e)(s, u)
    for u in T.unroll(e.units):
        write_outputs(e)(s, io, step, pack, u, u * e.groups + s.group < s.count[0])
    if step + 1 < io.steps:
        prepare_step(e)(s, io, step + 1, pack)
        await_states(e)(s, io, step)
    turn_copies()(s)
# fmt: on
