"""The kernel of `persistent_tiles`, a list of phases.

before the first step

    take_tiles      which tiles are whose                                  (`weights`)
    load_weights    their weights, to registers
    mark            the exchange made ready                                (`recurrent.exchange`)
    begin           states before the first step
    a barrier of the grid

in each pass of each step

    restore         the states of the pass, if there are several passes    (`step`)
    load_inputs     what the next one needs
    stage           the states before the step, from all thread blocks     (`recurrent.exchange`)
    fetch           those of the next pass, if there are several passes
    multiply_tiles  products of weights and states, a part by each warp    (`step`)
    a barrier of the thread block
    finish          the parts' sums, gates; the state after the step, to all thread blocks
    save            the states of the pass

With the reset before the product each pass has two turns, one after those of all others: in the first one `send_scaled`
takes the place of `finish`.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program, Resident, Workspace
from tvm_sparse.operators.block_recurrent.problem import BlockRecurrent

from ...device.words import held_address, value_in
from ...interface import gpu_program
from ...recurrent.exchange import collect, element_bits, fetch, find_source, mark, put, stage
from ...recurrent.sizes import WIDEST
from .space import SAMPLES, Extents
from .state import State
from .step import (
    finish,
    is_item,
    item,
    load_inputs,
    multiply_tiles,
    restore,
    save,
    send_scaled,
    sends,
    take_inputs,
)
from .weights import load_weights, take_tiles


# fmt: off
@phase
def first_states(e, /, s, io):
    """The states of the thread's items before the first step."""
    for j in T.unroll(e.items):
        b = T.meta_var(item(e, s, j, of_batch=True)[1])
        s.unit[j] = s.tile[0] * e.tile_units + item(e, s, j)[0]
        s.bits[0] = T.uint32(0)
        if is_item(e, s, j):
            s.bits[0] = element_bits(e.dtype, io.h0[b, s.unit[j]])
            s.owns[j] = value_in(e.dtype, s.bits[0], 0)
            if e.cell == "lstm":
                s.cells[j] = T.Cast("float32", io.c0[b, s.unit[j]])
            if e.ragged:
                s.length[j] = io.lengths[b]
        collect(e)(s)
        put(e)(s, 0, b, s.unit[j], sends(e, s, j))


@phase
def begin(e, /, s, io):
    """The items, and the states before the first step.

    Reads: `h0`, `c0`, `lengths`. Writes: `unit`, `length`, `cells`, `owns`, `samples`, `kept`; the exchange's first
    slot. Barriers: none, but all lanes of a warp take part.
    """
    apart = T.meta_var((e.copy_pitch if e.stages > 0 else e.pitch) * WIDEST)
    for f in T.unroll(e.fragments):
        # Samples beyond the last one are read as the last one; their sums are not used.
        s.samples[f] = T.Cast("uint32", T.min(f * SAMPLES + s.row, e.samples - 1) * apart)
    if e.passes > 1:
        for part in T.serial(e.passes):
            s.first[0] = part * e.samples
            first_states(e)(s, io)
            save(e)(s)
    else:
        first_states(e)(s, io)


def kernel_body(e: Extents) -> Phase:
    """The kernel, as the body of the function; called with its arguments."""
    deal, load, ready, first_states = take_tiles(e), load_weights(e), mark(e), begin(e)
    take, inputs, multiply, end = take_inputs(e), load_inputs(e), multiply_tiles(e), finish(e)
    find, bring_back, keep, scale = find_source(e), restore(e), save(e), send_scaled(e)
    ahead = e.passes > 1 and e.stages > 0
    fetch_ahead = fetch(e, e.vectors)
    copy = stage(
        e, e.vectors, lambda number: number // e.pitch * e.copy_pitch + number % e.pitch, guarded=False,
        prefetched=ahead)

    @T.inline
    def end_items(s, io, slot, half):
        for j in T.unroll(e.items):
            end(s, io, slot // e.exchanges, j, half, slot + 1)

    @T.inline
    def scale_or_end_items(s, io, slot, half):
        if slot % 2 == 0:
            for j in T.unroll(e.items):
                scale(s, j, half, slot + 1)
        else:
            end_items(s, io, slot, half)

    finish_items = scale_or_end_items if e.exchanges == 2 else end_items

    @T.inline
    def one_pass(s, io, turn, slot, following, first):
        take(s)
        if following < io.steps * e.exchanges:
            inputs(s, io, following)
        find(s, io, slot, first)
        if e.stages > 0:
            copy(s)
        if ahead:
            if following < io.steps * e.exchanges:
                find(s, io, following, s.next_first[0])
                fetch_ahead(s, s.t)
        half: T.int32 = turn % e.halves
        multiply(s, io, half)
        T.cuda.cta_sync()
        finish_items(s, io, slot, half)

    @T.inline
    def one_of_several(s, io, turn):
        bring_back(s, io)
        slot: T.int32 = turn // e.passes
        following: T.int32 = (turn + 1) // e.passes
        s.next_first[0] = (turn + 1) % e.passes * e.samples
        one_pass(s, io, turn, slot, following, s.first[0])
        keep(s)
        s.first[0] = s.next_first[0]

    @T.inline
    def body(io):
        T.device_entry()
        block = T.cta_id([e.blocks])
        t = T.thread_id([e.threads])
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
        s = T.meta_var(State.of(e, t))
        s.base[0] = held_address("u64", io.exchange.ptr_to([0, 0]))
        if e.stages > 0:
            s.front[0] = T.cuda.cvta_generic_to_shared(s.stage.ptr_to([0]))
        deal(s, io, block)
        ready(s, io, block)
        first_states(s, io)
        load(s, io)
        T.cuda.grid_sync()
        if e.passes > 1:
            s.first[0] = 0
            s.next_first[0] = 0
        inputs(s, io, 0)
        if ahead:
            find(s, io, 0, 0)
            fetch_ahead(s, s.t)
        for turn in T.serial(io.steps * (e.exchanges * e.passes)):
            if e.passes > 1:
                one_of_several(s, io, turn)
            else:
                one_pass(s, io, turn, turn, turn + 1, 0)

    return body
# fmt: on


def program(problem: BlockRecurrent, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)
    words = e.exchanges * e.packs * e.pitch * WIDEST // 4  # of all slots of a step
    own = Workspace("exchange", ("steps", words), "uint32", fill=None)
    return gpu_program(problem, kernel_body(e), (own,), resident=Resident(e.blocks, e.threads, e.shared_bytes))
