"""One step of one pack, for the units of a group: gather and multiply, reduce over the lanes, gates."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device.selection import FULL_WARP
from ...device.words import value_at, value_in
from ...recurrent.exchange import collect, element_bits, element_of, put, state_bits
from ...recurrent.gates import gates, reset_gates
from .space import BATCHED, Extents
from .weights import held_place, held_value, place_of, read_entry, value_of

load_shared = {
    16: T.ptx.ld.shared.v4.u32, 8: T.ptx.ld.shared.v2.u32, 4: T.ptx.ld.shared.u32, 2: T.ptx.ld.shared.u16,
}  # fmt: skip
# One instruction, which converts the half without moving it first.
HALVES = {
    part: f"""
__device__ __forceinline__ float {part}_half_of(unsigned int word) {{
  return __{part}2float(*reinterpret_cast<__half2*>(&word));
}}
"""
    for part in ("low", "high")
}


def half_of(part: str, word: tirx.PrimExpr) -> tirx.PrimExpr:
    """The float32 of the "low" or "high" float16 of a word."""
    return T.cuda.func_call(f"{part}_half_of", word, source_code=HALVES[part], return_type="float32")


# fmt: off
@phase
def load_inputs(e, /, s, io, step, pack):
    """Begin the loads of a step's inputs, a step ahead of their use.

    Reads: `x_projected`, `resets`. Writes: `next_x`, `next_reset`, of lanes that finish a unit and sample.
    Barriers: none.
    """
    if s.lane < e.finishing and pack * e.pack + s.sample < e.batch:
        for u in T.unroll(e.units):
            for g in T.unroll(e.gates):
                s.next_x[u * e.gates + g] = element_bits(
                    e.dtype, io.x_projected[step, pack * e.pack + s.sample, g * e.hidden + s.unit[u]])
        if e.resets:
            s.next_reset[0] = io.resets[step, pack * e.pack + s.sample]


@phase
def take_inputs(e, /, s):
    """Make the loaded inputs those of this step.

    Reads: `next_x`, `next_reset`. Writes: `x`, `reset`. Barriers: none.
    """
    for i in T.unroll(e.rows):
        s.x[i] = value_in(e.dtype, s.next_x[i], 0)
    s.reset[0] = s.next_reset[0]


@phase
def load_length(e, /, s, io, pack):
    """How many steps the sample has.

    Reads: `lengths`. Writes: `steps_of`. Barriers: none.
    """
    if e.ragged:
        if pack * e.pack + s.sample < e.batch:
            s.steps_of[0] = io.lengths[pack * e.pack + s.sample]


@phase
def fetch(e, /, s, i, place):
    """Begin the gather of a column's states.

    Reads: `stages` at `front`. Writes: `vectors`, its `i`-th. Barriers: none.
    """
    load = T.meta_var(load_shared[e.column_bytes])
    if e.column_bytes == 2:
        load(s.small[0], s.front[0] + place)
        s.vectors[i] = T.Cast("uint32", s.small[0])
    else:
        load(*[s.vectors[i * e.column_words + w] for w in range(e.column_words)], s.front[0] + place)


@phase
def multiply(e, /, s, row, i, value):
    """Add an entry's products with the states that its gather brought.

    Reads: `vectors`. Writes: `sums` of the row. Barriers: none.
    """
    if e.dtype == "float16" and e.pack > 1:
        for w in T.unroll(e.column_words):
            at = T.meta_var(row * e.pack + w * 2)
            s.sums[at] = s.sums[at] + value * half_of("low", s.vectors[i * e.column_words + w])
            s.sums[at + 1] = s.sums[at + 1] + value * half_of("high", s.vectors[i * e.column_words + w])
    else:
        for j in T.unroll(e.pack):
            s.sums[row * e.pack + j] = s.sums[row * e.pack + j] + value * value_at(
                e.dtype, s.vectors, i * e.column_words, j)


def in_turn(phases: Sequence[Phase]) -> Phase:
    """One phase (s, row) that calls several ones."""

    def then(first: Phase, second: Phase) -> Phase:
        @T.inline
        def both(s, row):
            first(s, row)
            second(s, row)

        return both

    return functools.reduce(then, phases)


@phase
def add_rounds(e, first, count, /, s, row):
    """Add up the products of `count` rounds of a row's entries in registers, from the `first` on: all states first.

    Reads: `weights`, `stages`. Writes: `sums`. Barriers: none.
    """
    for i in T.unroll(count):
        fetch(e)(s, i, held_place(e, s, row, first + i))
    for i in T.unroll(count):
        multiply(e)(s, row, i, held_value(e, s, row, first + i))


def gather_held(e: Extents) -> Phase:
    """Add up the products of a row's entries in registers; the phase is (s, row).

    Rounds that no lane of the warp has are left out, by the batch.

    Reads: `weights`, `rounds`, `stages`. Writes: `sums`. Barriers: none.
    """

    def batch(first: int, count: int) -> Phase:
        some = add_rounds(e, first, count)

        @T.inline
        def if_any(s, row):
            if s.rounds[row] > first:
                some(s, row)

        return if_any if first else some

    return in_turn([batch(first, count) for first, count in e.batches])


@phase
def from_memory(e, /, s, io, row):
    """Add the products of a row's entries that are not on chip, from memory, BATCHED at a time."""
    bring, add = T.meta_var(fetch(e)), T.meta_var(multiply(e))
    bring(s, 0, place_of(e, s.ahead, row * e.words))
    add(s, row, 0, value_of(e, s.ahead, row * e.words))
    for b in T.serial((s.rounds[row] - e.registers - 1 + (BATCHED - 1)) // BATCHED):
        for i in T.unroll(BATCHED):
            read_entry(e)(s, io, row, e.registers + 1 + b * BATCHED + i, s.word, 0)
            s.places[i] = place_of(e, s.word, 0)
            s.values[i] = value_of(e, s.word, 0)
        for i in T.unroll(BATCHED):
            bring(s, i, s.places[i])
        for i in T.unroll(BATCHED):
            add(s, row, i, s.values[i])


@phase
def gather_rest(e, /, s, io, row):
    """Add up the products of a row's other entries.

    Reads: `ahead`, the entries, `rounds`, `stages`. Writes: `sums`. Barriers: none.
    """
    if s.rounds[row] > e.registers:
        from_memory(e)(s, io, row)


def gather(e: Extents, begin: int = 0, end: int | None = None) -> Phase:
    """The recurrent sums of the group's units, each lane its part; the phase is (s, io).

    `begin`, `end`: of the gates that are summed; all by default.

    Reads: weights, and the states before the step. Writes: `sums`. Barriers: none.
    """
    held, rest = gather_held(e) if e.registers else None, gather_rest(e)
    gates = begin, e.gates if end is None else end

    @T.inline
    def phase(s, io):
        for i in T.unroll(e.rows * e.pack):
            s.sums[i] = T.float32(0)
        if e.registers > 0:
            for u in T.unroll(e.units):
                for g in T.unroll(*gates):
                    held(s, u * e.gates + g)
        for u in T.unroll(e.units):
            for g in T.unroll(*gates):
                rest(s, io, u * e.gates + g)

    return phase


def reduce_lanes(e: Extents, begin: int = 0, end: int | None = None) -> Phase:
    """Add up the sums of a group's lanes; the phase is (s). `begin`, `end`: as for `gather`.

    Halving: in a step of the first kind two lanes exchange half of their samples each, so that a lane has half as many
    left. When a lane has one sample left, that of its number modulo `pack`, lanes of the same sample are added.

    Reads and writes: `sums`. Barriers: none, but all lanes of a warp take part.
    After: `sums[row * pack]` is the sum of the row for the sample `sample`, in all lanes.
    """
    halvings, rest = e.pack.bit_length() - 1, (e.lanes // e.pack).bit_length() - 1
    gates = begin, e.gates if end is None else end

    @T.inline
    def halve(s, row, half):
        for j in T.unroll(e.pack // 2):
            if j < half:
                s.passed[0] = T.tvm_warp_shuffle_xor(
                    T.uint32(FULL_WARP),
                    T.Select((s.t & half) != 0, s.sums[row * e.pack + j], s.sums[row * e.pack + j + half]),
                    half, 32, 32)
                s.sums[row * e.pack + j] = s.passed[0] + T.Select(
                    (s.t & half) != 0, s.sums[row * e.pack + j + half], s.sums[row * e.pack + j])

    @T.inline
    def phase(s):
        for h in T.unroll(halvings):
            for u in T.unroll(e.units):
                for g in T.unroll(*gates):
                    halve(s, u * e.gates + g, e.pack >> (h + 1))
        for h in T.unroll(rest):
            for u in T.unroll(e.units):
                for g in T.unroll(*gates):
                    row = T.meta_var(u * e.gates + g)
                    s.sums[row * e.pack] = s.sums[row * e.pack] + T.tvm_warp_shuffle_xor(
                        T.uint32(FULL_WARP), s.sums[row * e.pack], e.pack << h, 32, 32)

    return phase


def carried(e: Extents, s: Any, what: str, u: Any, pack: Any) -> tuple[tirx.Buffer, Any]:
    """Where a unit's `cell` or `own` is from step to step: in registers where the thread block has one pack."""
    if e.packs_each == 1:
        return getattr(s, what + "_of"), u
    slot = u * e.groups + s.group
    return getattr(s, what + "s"), (slot * e.packs + pack) * e.pack + s.sample


@phase
def first_state(e, /, s, io, pack, u, mine):
    """A unit's state before the first step, `mine` as for `next_state`.

    Reads: `h0`, `c0`. Writes: `bits`, what is carried. Barriers: none.
    """
    b = T.meta_var(pack * e.pack + s.sample)
    cell = T.meta_var(carried(e, s, "cell", u, pack))
    own = T.meta_var(carried(e, s, "own", u, pack))
    s.bits[0] = T.uint32(0)
    if s.lane < e.finishing and mine and b < e.batch:
        s.bits[0] = element_bits(e.dtype, io.h0[b, s.unit[u]])
        if e.has_cell:
            cell[0][cell[1]] = T.Cast("float32", io.c0[b, s.unit[u]])
        if e.has_own:
            own[0][own[1]] = value_in(e.dtype, s.bits[0], 0)


@phase
def begin_anew(e, gates, /, s, u):
    """Zero states where a sequence begins, for the first `gates` of a unit.

    Reads: `reset`, `zeros`. Writes: `sums`, `cell`, `own`. Barriers: none.
    """
    if e.resets:
        if s.reset[0] != 0:
            for g in T.unroll(gates):
                s.sums[(u * e.gates + g) * e.pack] = s.zeros[u * e.gates + g]
            s.cell[0] = T.float32(0)
            s.own[0] = T.float32(0)


@phase
def scaled_state(e, /, s, io, pack, u, mine):
    """A unit's state times its reset gate, of a cell with two exchanges.

    Reads: `sums` and `x` of r and z, `reset`, `zeros`, what is carried. Writes: `bits`; z, to `cell_of`.
    Barriers: none.
    """
    own = T.meta_var(carried(e, s, "own", u, pack))
    s.bits[0] = T.uint32(0)
    if s.lane < e.finishing and mine and pack * e.pack + s.sample < e.batch:
        s.own[0] = own[0][own[1]]
        begin_anew(e, 2)(s, u)
        reset_gates(e)(s, u)
        s.cell_of[u] = s.passed[0]
        s.bits[0] = state_bits(e, s.result[u])


def next_state(e: Extents) -> Phase:
    """A unit's state after the step; the phase is (s, io, step, pack, u, mine), `mine` being whether the group has it.

    Reads: `sums`, `x`, `reset`, `zeros`, `steps_of`, and what is carried.
    Writes: `result`, `bits`, what is carried. Lanes that finish no sample have `bits` of 0.
    Barriers: none.
    """
    # With two exchanges the sums of r and z are spent, and the candidate's, of r times zero, are right: NaN if an r is.
    compute, anew = gates(e), begin_anew(e, 0 if e.exchanges == 2 else e.gates)

    @T.inline
    def begin(s, u):
        if e.ragged:
            s.last_cell[0] = s.cell[0]
            s.last_own[0] = s.own[0]
        anew(s, u)

    @T.inline
    def end(s, step, u):
        s.bits[0] = state_bits(e, s.result[u])
        s.result[u] = value_in(e.dtype, s.bits[0], 0)
        if e.ragged:
            if step >= s.steps_of[0]:
                s.result[u] = s.last_own[0]
                s.bits[0] = state_bits(e, s.last_own[0])
                s.cell[0] = s.last_cell[0]

    @T.inline
    def phase(s, io, step, pack, u, mine):
        cell = T.meta_var(carried(e, s, "cell", u, pack))
        own = T.meta_var(carried(e, s, "own", u, pack))
        s.bits[0] = T.uint32(0)
        if s.lane < e.finishing and mine and pack * e.pack + s.sample < e.batch:
            if e.has_cell:
                s.cell[0] = cell[0][cell[1]]
            if e.has_own:
                s.own[0] = own[0][own[1]]
            begin(s, u)
            if e.exchanges == 2:
                s.passed[0] = s.cell_of[u]
            compute(s, io, u)
            end(s, step, u)
            if e.has_cell:
                cell[0][cell[1]] = s.cell[0]
            if e.has_own:
                own[0][own[1]] = s.result[u]

    return phase


@phase
def write_outputs(e, /, s, io, step, pack, u, mine):
    """A unit's state after the step to the caller.

    Reads: `result`, `steps_of`, what is carried. Writes: the outputs. Barriers: none.
    """
    b = T.meta_var(pack * e.pack + s.sample)
    cell = T.meta_var(carried(e, s, "cell", u, pack))
    if s.lane < e.pack and mine and b < e.batch:
        if e.ragged:
            io.output[step, b, s.unit[u]] = T.Cast(
                e.dtype, T.Select(step < s.steps_of[0], s.result[u], T.float32(0)))
        else:
            io.output[step, b, s.unit[u]] = T.Cast(e.dtype, s.result[u])
        if step + 1 == io.steps:
            io.h_n[b, s.unit[u]] = T.Cast(e.dtype, s.result[u])
            if e.has_cell:
                io.c_n[b, s.unit[u]] = T.Cast(e.dtype, cell[0][cell[1]])


@phase
def send_scaled(e, /, s, io, pack, slot):
    """The units' states times their reset gates, to all thread blocks.

    Reads: as `scaled_state`. Writes: the exchange. Barriers: none, but all lanes of a warp take part.
    """
    for u in T.unroll(e.units):
        mine = T.meta_var(u * e.groups + s.group < s.count[0])
        scaled_state(e)(s, io, pack, u, mine)
        collect(e)(s)
        put(e)(s, slot, pack, s.unit[u], s.lane == 0 and mine)


@phase
def finish(e, /, s, io, step, pack, slot):
    """The units' new states, to all who need them.

    `slot`: of the exchange, that of the next step. The exchange comes first: all others wait for it. After the last
    step there is none, and the states go to the caller; after the others `write_before` sees to that.

    Reads: as `next_state`. Writes: the exchange or the outputs, what is carried.
    Barriers: none, but all lanes of a warp take part.
    """
    for u in T.unroll(e.units):
        mine = T.meta_var(u * e.groups + s.group < s.count[0])
        next_state(e)(s, io, step, pack, u, mine)
        if step + 1 < io.steps:
            collect(e)(s)
            put(e)(s, slot, pack, s.unit[u], s.lane == 0 and mine)
    if step + 1 == io.steps:
        for u in T.unroll(e.units):
            write_outputs(e)(s, io, step, pack, u, u * e.groups + s.group < s.count[0])


@phase
def write_before(e, /, s, io, step, pack):
    """The output of the step before, which is the state before this one.

    The thread block writes neighbouring columns, as many as it has units: stores of 2 bytes here and there, which the
    units' own threads would make, hold up the exchange in the L2 cache.

    Reads: `stages` at `front`, `lengths`. Writes: `output`. Barriers: none.
    """
    load = T.meta_var(load_shared[e.itemsize])
    for i in T.serial(ceildiv(e.most * e.pack, e.threads)):
        number: T.int32 = i * e.threads + s.t
        column: T.int32 = s.first[0] + number % e.most
        member: T.int32 = number // e.most
        if number < e.most * e.pack and number % e.most < s.count[0] and pack * e.pack + member < e.batch:
            at = T.meta_var(s.front[0] + T.Cast("uint32", column * e.column_bytes + member * e.itemsize))
            if e.itemsize == 2:
                load(s.small[0], at)
                s.bits[0] = T.Cast("uint32", s.small[0])
            else:
                load(s.bits[0], at)
            if e.ragged:
                if step > io.lengths[pack * e.pack + member]:
                    s.bits[0] = T.uint32(0)
            io.output[step - 1, pack * e.pack + member, column] = element_of(e.dtype, s.bits[0])
# fmt: on
