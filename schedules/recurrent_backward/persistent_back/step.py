"""One step back of one pack, for the units of a group: what comes before and after the sums of `persistent_rows`."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.recurrent_backward.definition import through_cell, through_reset

from ...device.words import value_in
from ...recurrent.exchange import collect, element_bits, element_of, put, state_bits
from ...recurrent.gates import sigmoid, tanh
from ...sparse_recurrent.persistent_rows.step import carried, load_shared
from .space import BackExtents


# fmt: off
@phase
def of_unit(e, /, s, io, step, b, u):
    """Begin to load what a step keeps of unit u, and the gradient that is given for it."""
    for k in T.unroll(e.kept):
        s.next_x[u * e.kept + k] = element_bits(e.dtype, io.kept[step, b, k * e.hidden + s.unit[u]])
    s.next_given[u] = element_bits(e.dtype, io.d_output[step, b, s.unit[u]])
    if e.cell == "lstm":
        s.next_before[u] = io.cells[step, b, s.unit[u]]
    elif e.mixed:
        s.next_before[u] = T.Cast("float32", io.before[step, b, s.unit[u]])


@phase
def load_inputs(e, /, s, io, step, pack):
    """Begin the loads of a step's inputs, a step ahead of their use.

    Before the first step (`step` of -1) there is only whether that began a sequence.

    Reads: `kept`, `d_output`, `before` or the workspace `cells`, `resets`.
    Writes: `next_x`, `next_given`, `next_before`, `next_reset`, of lanes that finish a unit and sample. Barriers: none.
    """
    b = T.meta_var(pack * e.pack + s.sample)
    if s.lane < e.finishing and b < e.batch:
        if step >= 0:
            for u in T.unroll(e.units):
                of_unit(e)(s, io, step, b, u)
        if e.cuts:
            if step + 1 < io.steps:
                s.next_reset[0] = io.resets[step + 1, b]


@phase
def take_inputs(e, /, s):
    """Make the loaded inputs those of this step.

    Reads: `next_x`, `next_given`, `next_before`, `next_reset`. Writes: `x`, `given`, `before`, `reset`. Barriers: none.
    """
    for i in T.unroll(e.units * e.kept):
        s.x[i] = value_in(e.dtype, s.next_x[i], 0)
    for u in T.unroll(e.units):
        s.given[u] = value_in(e.dtype, s.next_given[u], 0)
        s.before[u] = s.next_before[u]
    s.reset[0] = s.next_reset[0]


@phase
def last_gradients(e, /, s, io, pack, u, mine):
    """The gradients of the states after the last step, of a unit.

    `mine`: whether the group has the unit.

    Reads: `d_h_n`, `d_c_n`. Writes: `dh`, `dc`. Barriers: none.
    """
    b = T.meta_var(pack * e.pack + s.sample)
    if s.lane < e.finishing and mine and b < e.batch:
        s.dh[0] = T.Cast("float32", io.d_h_n[b, s.unit[u]])
        if e.has_cell:
            s.dc[0] = T.Cast("float32", io.d_c_n[b, s.unit[u]])


@phase
def cut(e, /, s, step):
    """No gradient goes back beyond a step that begins a sequence."""
    if s.reset[0] != 0:
        if e.ragged:
            if step + 1 < s.steps_of[0]:
                s.dh[0] = T.float32(0)
                s.dc[0] = T.float32(0)
        else:
            s.dh[0] = T.float32(0)
            s.dc[0] = T.float32(0)


@phase
def add_gradients(e, /, s, io, step, pack, u, mine):
    """The gradients of the states before the step that has been exchanged, of a unit, `step` being the one before it.

    Reads: `sums`, `reset`, `steps_of`, what is carried. Writes: `dh`, `dc`. Barriers: none.
    """
    cell = T.meta_var(carried(e, s, "cell", u, pack))
    own = T.meta_var(carried(e, s, "own", u, pack))
    if s.lane < e.finishing and mine and pack * e.pack + s.sample < e.batch:
        s.dh[0] = s.sums[u * e.gates * e.pack]
        if e.twice:
            s.dh[0] = s.dh[0] + s.sums[(u * e.gates + 1) * e.pack]
        if e.ragged:
            # An infinite value times the zeros of a sequence that has ended is no gradient of it.
            if step + 1 >= s.steps_of[0]:
                s.dh[0] = T.float32(0)
        if e.has_own:
            s.dh[0] = s.dh[0] + own[0][own[1]]
        if e.has_cell:
            s.dc[0] = cell[0][cell[1]]
        if e.cuts:
            cut(e)(s, step)


@phase
def pass_over(e, /, s):
    """A step after a sequence's end has no gradients."""
    for g in T.unroll(e.derived):
        s.d[g] = T.float32(0)
    s.fresh[0] = T.float32(0)


@phase
def take(e, /, s, u):
    """What a step keeps of unit u, and the gradient of its state."""
    for k in T.unroll(e.kept):
        s.kept[k] = s.x[u * e.kept + k]
    s.dh[0] = s.dh[0] + s.given[u]
    if e.cell == "lstm":
        s.c[0] = s.before[u]
    elif e.mixed:
        s.h[0] = s.before[u]
    through_cell(e.cell, 1, sigmoid, tanh)(s, 0)


@phase
def take_or_pass(e, /, s, step, u):
    """Take unit u's step, or pass over it after the sequence's end."""
    if step < s.steps_of[0]:
        take(e)(s, u)
    else:
        pass_over(e)(s)
        s.own[0] = s.dh[0]


@phase
def through_step(e, /, s, io, step, pack, u, mine):
    """The gradients of a unit's gates in a step.

    Reads: `dh`, `dc`, `x`, `given`, `before`, `steps_of`.
    Writes: `d`, what is carried, `cell_of`; of a GRU the output `d_new`. Lanes that finish no sample have `d` of 0.
    Barriers: none.
    """
    b = T.meta_var(pack * e.pack + s.sample)
    cell = T.meta_var(carried(e, s, "cell", u, pack))
    own = T.meta_var(carried(e, s, "own", u, pack))
    if s.lane < e.finishing and mine and b < e.batch:
        if e.ragged:
            take_or_pass(e)(s, step, u)
        else:
            take(e)(s, u)
        if e.has_cell:
            cell[0][cell[1]] = s.dc[0]
        if e.has_own:
            own[0][own[1]] = s.own[0]
        if e.twice:
            s.cell_of[u] = s.d[1]
    else:
        pass_over(e)(s)


def through_gate(e: BackExtents) -> Phase:
    """The gradients of a unit's reset gate, of a cell with two exchanges; the phase is (s, step, pack, u, mine).

    Reads: `sums` of the last gate, `x`, `before`, `cell_of`, `steps_of`.
    Writes: `d` of the first two gates; adds to what is carried. Lanes that finish no sample have `d` of 0.
    Barriers: none.
    """
    through = through_reset(1, sigmoid)

    @T.inline
    def take(s, u, own, at):
        s.dh[0] = s.sums[(u * e.gates + 2) * e.pack]
        s.kept[0] = s.x[u * e.kept]
        s.h[0] = s.before[u]
        through(s, 0)
        s.d[1] = s.cell_of[u]
        own[at] = own[at] + s.own[0]

    @T.inline
    def phase(s, step, pack, u, mine):
        own = T.meta_var(carried(e, s, "own", u, pack))
        s.d[0] = T.float32(0)
        s.d[1] = T.float32(0)
        if s.lane < e.finishing and mine and pack * e.pack + s.sample < e.batch:
            if e.ragged:
                if step < s.steps_of[0]:
                    take(s, u, own[0], own[1])
            else:
                take(s, u, own[0], own[1])

    return phase


def send_gradients(e: BackExtents, begin: int = 0, end: int | None = None) -> Phase:
    """The gradients of a unit's gates, to all thread blocks; the phase is (s, slot, pack, u, mine).

    `begin`, `end`: of the gates whose gradients are sent; all by default.

    Reads: `d`. Writes: the exchange. Barriers: none, but all lanes of a warp take part.
    """
    join, send, gates = collect(e), put(e), (begin, e.derived if end is None else end)

    @T.inline
    def phase(s, slot, pack, u, mine):
        for g in T.unroll(*gates):
            s.bits[0] = state_bits(e, s.d[g])
            join(s)
            send(s, slot, pack, e.column(g) + s.unit[u], s.lane == 0 and mine)

    return phase


@phase
def write_new(e, /, s, io, step, pack, u, mine):
    """Write the gradient of x_n of a GRU's unit to the caller.

    Reads: `fresh`. Writes: `d_new`. Barriers: none.
    """
    b = T.meta_var(pack * e.pack + s.sample)
    if s.lane < e.finishing and mine and b < e.batch:
        io.d_new[step, b, s.unit[u]] = T.Cast(e.dtype, s.fresh[0])


@phase
def write_first(e, /, s, io, pack, u, mine):
    """The gradients of a unit's states before the first step, to the caller.

    Reads: `dh`, `dc`. Writes: `d_h0`, `d_c0`. Barriers: none.
    """
    b = T.meta_var(pack * e.pack + s.sample)
    if s.lane < e.finishing and mine and b < e.batch:
        io.d_h0[b, s.unit[u]] = T.Cast(e.dtype, s.dh[0])
        if e.has_cell:
            io.d_c0[b, s.unit[u]] = T.Cast(e.dtype, s.dc[0])


@phase
def begin(e, /, s, io, pack):
    """The last step, which needs no sums.

    Reads: `x`, `given`, `before`, `steps_of`, `d_h_n`, `d_c_n`. Writes: the exchange's first slot, what is carried.
    Barriers: none, but all lanes of a warp take part.
    """
    for u in T.unroll(e.units):
        mine = T.meta_var(u * e.groups + s.group < s.count[0])
        last_gradients(e)(s, io, pack, u, mine)
        through_step(e)(s, io, io.steps - 1, pack, u, mine)
        send_gradients(e, 2 if e.twice else 0)(s, 0, pack, u, mine)
        if e.cell == "gru":
            write_new(e)(s, io, io.steps - 1, pack, u, mine)


@phase
def finish(e, /, s, io, step, pack, slot):
    """The units' gradients in a step, to all who need them.

    `slot`: of the exchange, that of this step. Before the first step (`step` of -1) they go to the caller.

    Reads: as `add_gradients` and `through_step`. Writes: the exchange or the outputs, what is carried.
    Barriers: none, but all lanes of a warp take part.
    """
    for u in T.unroll(e.units):
        mine = T.meta_var(u * e.groups + s.group < s.count[0])
        add_gradients(e)(s, io, step, pack, u, mine)
        if step >= 0:
            through_step(e)(s, io, step, pack, u, mine)
            send_gradients(e, 2 if e.twice else 0)(s, slot, pack, u, mine)
            if e.cell == "gru":
                write_new(e)(s, io, step, pack, u, mine)
        else:
            write_first(e)(s, io, pack, u, mine)


@phase
def finish_gates(e, /, s, step, pack, slot):
    """The gradients of the units' reset and update gates, to all who need them.

    Reads: as `through_gate`. Writes: the exchange, what is carried. Barriers: none, but all lanes of a warp take part.
    """
    for u in T.unroll(e.units):
        mine = T.meta_var(u * e.groups + s.group < s.count[0])
        through_gate(e)(s, step, pack, u, mine)
        send_gradients(e, 0, 2)(s, slot, pack, u, mine)


def write_exchanged(e: BackExtents, begin: int = 0, end: int | None = None) -> Phase:
    """The gradients that have been copied, to the caller; the phase is (s, io, step, pack), `step` being theirs.

    The thread block writes neighbouring columns of each gate, as many as it has units, as `write_before` of
    `persistent_rows` does. `begin`, `end`: of the gates; all by default.

    Reads: `stages` at `front`. Writes: `d_sums`. Barriers: none.
    """
    load, gates = load_shared[e.itemsize], (e.derived if end is None else end) - begin

    @T.inline
    def phase(s, io, step, pack):
        for i in T.serial(ceildiv(e.most * e.pack * gates, e.threads)):
            number: T.int32 = i * e.threads + s.t
            place: T.int32 = number % e.most
            gate: T.int32 = begin + number // e.most % gates
            member: T.int32 = number // (e.most * gates)
            if member < e.pack and place < s.count[0] and pack * e.pack + member < e.batch:
                column = T.meta_var(gate * e.hidden + s.first[0] + place)
                copied = T.meta_var(e.column(gate) + s.first[0] + place)
                at = T.meta_var(s.front[0] + T.Cast("uint32", copied * e.column_bytes + member * e.itemsize))
                if e.itemsize == 2:
                    load(s.small[0], at)
                    s.bits[0] = T.Cast("uint32", s.small[0])
                else:
                    load(s.bits[0], at)
                io.d_sums[step, pack * e.pack + member, column] = element_of(e.dtype, s.bits[0])

    return phase
# fmt: on
