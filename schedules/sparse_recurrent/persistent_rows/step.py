"""One step of one pack, for the units of a group: gather and multiply, reduce over the lanes, gates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.selection import FULL_WARP
from ...device.words import value_at, value_in
from ...recurrent.exchange import element_bits, load_half, load_pair, load_vector, load_word, missing, put, state_bits
from ...recurrent.gates import gates
from .space import BATCHED, Extents
from .weights import find_row, kept_at, place_of, read_entry, value_of

Phase = Callable[..., Any]
load_shared = {
    16: T.ptx.ld.shared.v4.u32, 8: T.ptx.ld.shared.v2.u32, 4: T.ptx.ld.shared.u32, 2: T.ptx.ld.shared.u16,
}  # fmt: skip
load_exchanged = {16: load_vector, 8: load_pair, 4: load_word, 2: load_half}


# fmt: off
def load_inputs(e: Extents) -> Phase:
    """Begin the loads of a step's inputs; the phase is (s, io, step, pack), a step ahead of their use.

    Reads: `x_projected`, `resets`. Writes: `next_x`, `next_reset`, of lanes that finish a unit and sample.
    Barriers: none.
    """

    @T.inline
    def phase(s, io, step, pack):
        if s.lane < e.pack and pack * e.pack + s.sample < e.batch:
            for u in T.unroll(e.units):
                for g in T.unroll(e.gates):
                    s.next_x[u * e.gates + g] = element_bits(
                        e.dtype, io.x_projected[step, pack * e.pack + s.sample, g * e.hidden + s.unit[u]])
            if e.resets:
                s.next_reset[0] = io.resets[step, pack * e.pack + s.sample]

    return phase


def take_inputs(e: Extents) -> Phase:
    """What was loaded is this step's; the phase is (s).

    Reads: `next_x`, `next_reset`. Writes: `x`, `reset`. Barriers: none.
    """

    @T.inline
    def phase(s):
        for i in T.unroll(e.rows):
            s.x[i] = value_in(e.dtype, s.next_x[i], 0)
        s.reset[0] = s.next_reset[0]

    return phase


def fetch(e: Extents) -> Phase:
    """Begin the gather of a column's states; the phase is (s, i, place).

    Reads: `stages` at `front`, or the exchange at `source`. Writes: `vectors`, its `i`-th. Barriers: none.
    """
    load = load_shared[e.column_bytes] if e.stages else load_exchanged[e.column_bytes]
    words = e.column_words

    @T.inline
    def phase(s, i, place):
        at = T.meta_var(s.front[0] + place if e.stages > 0 else s.source[0] + T.Cast("uint64", place))
        if e.column_bytes == 2:
            load(s.small[0], at)
            s.vectors[i] = T.Cast("uint32", s.small[0])
        else:
            load(*[s.vectors[i * words + w] for w in range(words)], at)

    return phase


def multiply(e: Extents) -> Phase:
    """Add an entry's products with the states that its gather brought; the phase is (s, g, i, value).

    Reads: `vectors`. Writes: `sums` of a gate. Barriers: none.
    """

    @T.inline
    def phase(s, g, i, value):
        for j in T.unroll(e.pack):
            s.sums[g * e.pack + j] = s.sums[g * e.pack + j] + value * value_at(
                e.dtype, s.vectors, i * e.column_words, j)

    return phase


def gather_held(e: Extents) -> Phase:
    """Add up the products of a unit's entries in registers, with states in shared memory; the phase is (s, u).

    Rounds that no lane of the warp has are left out, by the batch.

    Reads: `weights`, `rounds`, `stages`. Writes: `sums`. Barriers: none.
    """
    bring, add = fetch(e), multiply(e)
    batch = e.gathered

    @T.inline
    def phase(s, u):
        for g in T.unroll(e.gates):
            for b in T.unroll(ceildiv(e.registers, batch)):
                if b == 0 or s.rounds[u * e.gates + g] > b * batch:
                    for i in T.unroll(batch):
                        if b * batch + i < e.registers:
                            bring(s, i, place_of(e, s.weights, (
                                (u * e.gates + g) * e.registers + b * batch + i) * e.words))
                    for i in T.unroll(batch):
                        if b * batch + i < e.registers:
                            add(s, g, i, value_of(e, s.weights, (
                                (u * e.gates + g) * e.registers + b * batch + i) * e.words))

    return phase


def gather_direct(e: Extents) -> Phase:
    """`gather_held` with states from the exchange, all in flight before the first is looked at; the phase is (s, u).

    Reads: `weights`, the exchange. Writes: `sums`. Barriers: none.
    """
    bring, add, many = fetch(e), multiply(e), e.gates * e.registers

    @T.inline
    def phase(s, u):
        for i in T.unroll(many):
            bring(s, i, place_of(e, s.weights, (u * many + i) * e.words))
        s.waiting[0] = 1
        while s.waiting[0] != 0:
            s.waiting[0] = 0
            for i in T.unroll(many):
                if missing(e, s.vectors, i * e.column_words, e.column_words):
                    bring(s, i, place_of(e, s.weights, (u * many + i) * e.words))
                    s.waiting[0] = 1
        for i in T.unroll(many):
            add(s, i // e.registers, i, value_of(e, s.weights, (u * many + i) * e.words))

    return phase


def gather_rest(e: Extents) -> Phase:
    """Add up the products of a row's other entries; the phase is (s, io, u, g).

    Reads: `kept`, the entries, `rounds`, and the states. Writes: `sums`. Barriers: none.
    """
    bring, add, find, read = fetch(e), multiply(e), find_row(e), read_entry(e)
    on_chip = e.registers + e.shared

    @T.inline
    def wait(s):
        if e.stages == 0:
            s.waiting[0] = 1
            while s.waiting[0] != 0:
                s.waiting[0] = 0
                for i in T.unroll(BATCHED):
                    if missing(e, s.vectors, i * e.column_words, e.column_words):
                        bring(s, i, s.places[i])
                        s.waiting[0] = 1

    @T.inline
    def gather(s, g):
        for i in T.unroll(BATCHED):
            bring(s, i, s.places[i])
        wait(s)
        for i in T.unroll(BATCHED):
            add(s, g, i, s.values[i])

    @T.inline
    def from_shared(s, u, g):
        if u * e.groups + s.group < s.count[0]:
            for b in T.serial(T.min(
                    (s.rounds[u * e.gates + g] - e.registers + (BATCHED - 1)) // BATCHED, e.shared // BATCHED)):
                for i in T.unroll(BATCHED):
                    for w in T.unroll(e.words):
                        s.word[w] = s.kept[kept_at(e, s, u, g, b * BATCHED + i) + w]
                    s.places[i] = place_of(e, s.word, 0)
                    s.values[i] = value_of(e, s.word, 0)
                gather(s, g)

    @T.inline
    def from_memory(s, io, u, g):
        find(s, io, u, g)
        for b in T.serial((s.rounds[u * e.gates + g] - on_chip + (BATCHED - 1)) // BATCHED):
            for i in T.unroll(BATCHED):
                read(s, io, on_chip + b * BATCHED + i)
                s.places[i] = place_of(e, s.word, 0)
                s.values[i] = value_of(e, s.word, 0)
            gather(s, g)

    @T.inline
    def phase(s, io, u, g):
        if e.shared > 0:
            if s.rounds[u * e.gates + g] > e.registers:
                from_shared(s, u, g)
        if s.rounds[u * e.gates + g] > on_chip:
            from_memory(s, io, u, g)

    return phase


def gather(e: Extents) -> Phase:
    """The recurrent sums of a unit, each lane its part; the phase is (s, io, u).

    Reads: weights, and the states before the step. Writes: `sums`. Barriers: none.
    """
    held, rest = gather_held(e) if e.stages else gather_direct(e), gather_rest(e)

    @T.inline
    def phase(s, io, u):
        for i in T.unroll(e.gates * e.pack):
            s.sums[i] = T.float32(0)
        if e.registers > 0:
            held(s, u)
        for g in T.unroll(e.gates):
            rest(s, io, u, g)

    return phase


def reduce_lanes(e: Extents) -> Phase:
    """Add up the sums of a group's lanes; the phase is (s).

    Halving: in a step of the first kind two lanes exchange half of their samples each, so that a lane has half as many
    left. When a lane has one sample left, that of its number modulo `pack`, lanes of the same sample are added.

    Reads and writes: `sums`. Barriers: none, but all lanes of a warp take part.
    After: `sums[g * pack]` is the sum of gate g for the sample `sample`, in all lanes.
    """
    halvings, rest = e.pack.bit_length() - 1, (e.lanes // e.pack).bit_length() - 1

    @T.inline
    def phase(s):
        for h in T.unroll(halvings):
            half = T.meta_var(e.pack >> (h + 1))
            for g in T.unroll(e.gates):
                for j in T.unroll(e.pack // 2):
                    if j < half:
                        s.passed[0] = T.tvm_warp_shuffle_xor(
                            T.uint32(FULL_WARP),
                            T.Select((s.t & half) != 0, s.sums[g * e.pack + j], s.sums[g * e.pack + j + half]),
                            half, 32, 32)
                        s.sums[g * e.pack + j] = s.passed[0] + T.Select(
                            (s.t & half) != 0, s.sums[g * e.pack + j + half], s.sums[g * e.pack + j])
        for h in T.unroll(rest):
            for g in T.unroll(e.gates):
                s.sums[g * e.pack] = s.sums[g * e.pack] + T.tvm_warp_shuffle_xor(
                    T.uint32(FULL_WARP), s.sums[g * e.pack], e.pack << h, 32, 32)

    return phase


def finish(e: Extents) -> Phase:
    """A unit's new state, to all who need it; the phase is (s, io, step, pack, u, slot).

    `slot`: of the exchange, that of the next step. The exchange comes first: all others wait for it.

    Reads: `sums`, `x`, `reset`, `zeros`, `steps_of`, `cells`, `owns`.
    Writes: the exchange, the outputs, `cells`, `owns`.
    Barriers: none, but all lanes of a warp take part.
    """
    compute, send = gates(e), put(e)

    @T.inline
    def load(s, io, u, at):
        if e.has_cell:
            s.cell[0] = s.cells[at]
        if e.has_own:
            s.own[0] = s.owns[at]
        if e.ragged:
            s.last_cell[0] = s.cell[0]
            s.last_own[0] = s.own[0]
        if e.resets:
            if s.reset[0] != 0:
                for g in T.unroll(e.gates):
                    s.sums[g * e.pack] = s.zeros[u * e.gates + g]
                s.cell[0] = T.float32(0)
                s.own[0] = T.float32(0)

    @T.inline
    def phase(s, io, step, pack, u, slot):
        b = T.meta_var(pack * e.pack + s.sample)
        at = T.meta_var((u * e.groups + s.group) * (e.packs * e.pack) + b)
        mine = T.meta_var(u * e.groups + s.group < s.count[0])
        s.bits[0] = T.uint32(0)
        if s.lane < e.pack and mine and b < e.batch:
            load(s, io, u, at)
            compute(s, io, u)
            s.bits[0] = state_bits(e, s.result[0])
            s.result[0] = value_in(e.dtype, s.bits[0], 0)
            if e.ragged:
                if step >= s.steps_of[0]:
                    s.result[0] = s.last_own[0]
                    s.bits[0] = state_bits(e, s.last_own[0])
                    s.cell[0] = s.last_cell[0]
        if step + 1 < io.steps:
            send(s, slot, pack, s.unit[u], mine)
        if s.lane < e.pack and mine and b < e.batch:
            if e.ragged:
                io.output[step, b, s.unit[u]] = T.Cast(
                    e.dtype, T.Select(step < s.steps_of[0], s.result[0], T.float32(0)))
            else:
                io.output[step, b, s.unit[u]] = T.Cast(e.dtype, s.result[0])
            if e.has_cell:
                s.cells[at] = s.cell[0]
            if e.has_own:
                s.owns[at] = s.result[0]
            if step + 1 == io.steps:
                io.h_n[b, s.unit[u]] = T.Cast(e.dtype, s.result[0])
                if e.has_cell:
                    io.c_n[b, s.unit[u]] = T.Cast(e.dtype, s.cell[0])

    return phase
# fmt: on
