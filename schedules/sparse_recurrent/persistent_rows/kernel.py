"""The kernel of `persistent_rows`, a list of phases.

before the first step

    take_units      which units are whose                                  (`weights`)
    load_weights    their weights, to registers
    mark            the exchange made ready                                (`exchange`)
    begin           states before the first step
    a barrier of the grid

in each step, for each pack

    load_inputs     what the next one needs                                (`step`)
    load_ahead      weights that are not on chip                           (`weights`)
    stage           the states before the step, from all thread blocks     (`recurrent.exchange`)
    gather          products of weights and states                         (`step`)
    reduce_lanes    their sums
    finish          gates; the state after the step, to all thread blocks
    write_before    the state before the step, to the caller: the output of the step before

With the reset before the product a step has two halves, each with a slot of the exchange. In the first one
`send_scaled` takes the place of `finish`: it sends the states times their reset gates, which the second one multiplies
by the candidate's rows.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program, Resident, Workspace
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from ...device.words import held_address
from ...interface import gpu_program
from ...recurrent.exchange import collect, find_source, mark, put, stage
from ...recurrent.sizes import WIDEST
from .space import Extents
from .state import State
from .step import (
    finish,
    first_state,
    gather,
    load_inputs,
    load_length,
    reduce_lanes,
    send_scaled,
    take_inputs,
    write_before,
)
from .weights import load_ahead, load_weights, take_units


# fmt: off
@phase
def begin(e, /, s, io):
    """The states before the first step.

    Reads: `h0`, `c0`. Writes: the exchange's first slot; what is carried.
    Barriers: none, but all lanes of a warp take part.
    """
    for u in T.unroll(e.units):
        for p in T.serial(e.packs):
            mine = T.meta_var(u * e.groups + s.group < s.count[0])
            first_state(e)(s, io, p, u, mine)
            collect(e)(s)
            put(e)(s, 0, p, s.unit[u], s.lane == 0 and mine)


def sum_products(
    e: Extents, begin: int = 0, end: int | None = None, region: tuple[int, int] | None = None
) -> Phase:
    """The sums of a pack of what the exchange has in a slot; the phase is (s, io, slot, pack). See its parts.

    `begin`, `end`: as for `gather`. `region`: the first vector that is copied, and how many; all by default.
    """
    length, find = load_length(e), find_source(e)
    ahead, multiply, reduce = (of(e, begin, end) for of in (load_ahead, gather, reduce_lanes))
    first, many = region or (0, e.vectors)
    copy = stage(e, many, lambda number: number + first, e.stages == 1, e.polled)

    @T.inline
    def phase(s, io, slot, pack):
        length(s, io, pack)
        ahead(s, io)
        find(s, io, slot, pack)
        if first > 0:
            s.source[0] = s.source[0] + T.uint64(first * WIDEST)
        copy(s)
        multiply(s, io)
        reduce(s)

    return phase


@phase
def load_next(e, /, s, io, step, pack):
    """Load the inputs of the next pack, or of the next step's first one."""
    load = T.meta_var(load_inputs(e))
    if pack + 1 < e.packs:
        load(s, io, step, pack + 1)
    elif step + 1 < io.steps:
        load(s, io, step + 1, 0)


@phase
def turn_copies(e, /, s):
    """Go on to the other copy of the states."""
    if e.stages == 2:
        s.front[0] = s.copies[0] - s.front[0]


def take_pack(e: Extents) -> Phase:
    """A pack's way through one step; the phase is (s, io, step, pack)."""
    if e.exchanges == 2:
        return take_pack_twice(e)
    load, take, sums, end, write = load_next(e), take_inputs(e), sum_products(e), finish(e), write_before(e)
    turn = turn_copies(e)

    @T.inline
    def phase(s, io, step, pack):
        take(s)
        load(s, io, step, pack)
        sums(s, io, step if e.polled else step % 2, pack)
        end(s, io, step, pack, step + 1 if e.polled else (step + 1) % 2)
        if step > 0:
            write(s, io, step, pack)
        turn(s)

    return phase


@phase
def take_pack_twice(e, /, s, io, step, pack):
    """`take_pack` of a cell whose step has two exchanges: slot 2 * step has states, the next one scaled states."""
    turn = T.meta_var(turn_copies(e))
    take_inputs(e)(s)
    load_next(e)(s, io, step, pack)
    sum_products(e, 0, 2)(s, io, step * 2, pack)
    send_scaled(e)(s, io, pack, step * 2 + 1)
    if step > 0:
        write_before(e)(s, io, step, pack)
    turn(s)
    sum_products(e, 2, 3)(s, io, step * 2 + 1, pack)
    finish(e)(s, io, step, pack, step * 2 + 2)
    turn(s)


@phase
def persistent(e, state, ready, first, begin, go, /, io):
    """The body of a kernel that stays for all steps; called with the kernel's arguments.

    `ready` and `first`, phases (s, io, block), come before the barrier of the grid; `begin`, a phase (s, io), after it,
    and `go`, a phase (s, io, step, pack), in each step. Without `polled` a barrier of the grid divides steps.
    """
    T.device_entry()
    block = T.cta_id([e.blocks])
    t = T.thread_id([e.threads])
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
    s = T.meta_var(state.of(e, t))
    s.base[0] = held_address("u64", io.exchange.ptr_to([0, 0]))
    s.front[0] = T.cuda.cvta_generic_to_shared(s.stages.ptr_to([0]))
    s.copies[0] = s.front[0] * T.uint32(2) + T.uint32(e.vectors * WIDEST)
    take_units(e)(s, io, block)
    ready(s, io, block)
    first(s, io, block)
    load_weights(e)(s, io)
    T.cuda.grid_sync()
    begin(s, io)
    for step in T.serial(io.steps):
        if e.packs == 1:
            go(s, io, step, 0)
        else:
            for pack in T.serial(e.packs):
                go(s, io, step, pack)
        if not e.polled:
            if step + 1 < io.steps:
                T.cuda.grid_sync()


def kernel_body(e: Extents) -> Phase:
    """The kernel, as the body of the function; called with its arguments."""
    first_states, first_inputs = begin(e), load_inputs(e)

    @T.inline
    def first(s, io, block):
        first_states(s, io)

    @T.inline
    def first_load(s, io):
        first_inputs(s, io, 0, 0)

    return persistent(e, State, mark(e, e.polled), first, first_load, take_pack(e))
# fmt: on


def program(problem: SparseRecurrent, decisions: Decisions, polled: bool = True) -> Program:
    """The program of a point; `polled`: without a barrier of the grid."""
    e = Extents.of(problem, decisions, polled)
    words = e.exchanges * e.packs * e.pitch * WIDEST // 4  # of all slots of a step
    own = Workspace("exchange", ("steps" if e.polled else 2, words), "uint32", fill=None)
    return gpu_program(problem, kernel_body(e), (own,), resident=Resident(e.blocks, e.threads, e.shared_bytes))
