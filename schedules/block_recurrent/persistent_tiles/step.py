"""One step: states from the exchange, products on tensor cores, sums over the warps, gates."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device.words import value_in
from ...recurrent.exchange import collect, element_bits, load_vector, missing, put, sent_words, state_bits
from ...recurrent.gates import gates, reset_gates
from .space import BATCHED, SAMPLES, Extents
from .weights import find_tile, load_shared, read_round

STORE_GLOBAL = {16: T.ptx.st.global_.v4.u32, 8: T.ptx.st.global_.v2.u32}


def item(e: Extents, s: Any, j: Any, of_batch: bool = False, following: bool = False) -> tuple[Any, Any]:
    """The thread's j-th item: its unit, counted within the thread block, and its sample, counted within the pass, or
    within the batch: in the pass in hand, or in the one `following` it.
    """
    number = j * e.threads + s.t
    unit, sample = number % e.units, number // e.units
    if e.passes > 1 and of_batch:
        sample += s.next_first[0] if following else s.first[0]
    return unit, sample


def is_item(e: Extents, s: Any, j: Any, following: bool = False) -> tirx.PrimExpr:
    """Whether the thread has a j-th item."""
    unit, sample = item(e, s, j, of_batch=True, following=following)
    found = tirx.all(unit < s.count[0], sample < e.batch)
    return found if e.passes == 1 else tirx.all(found, item(e, s, j)[1] < e.samples)


def stores(e: Extents, s: Any, j: Any) -> tirx.PrimExpr:
    """Whether the thread stores the output of its j-th item and of the units next to it."""
    return tirx.all(s.t % e.at_once == 0, is_item(e, s, j))


def sends(e: Extents, s: Any, j: Any) -> tirx.PrimExpr:
    """Whether the thread stores the states of its j-th item and of the units next to it in the exchange. If there are
    several passes, samples beyond the batch are sent too, since all samples of a pass are waited for.
    """
    if e.passes == 1:
        return stores(e, s, j)
    unit, sample = item(e, s, j)
    return tirx.all(s.t % e.at_once == 0, unit < s.count[0], sample < e.samples)


# fmt: off
@phase
def restore(e, /, s, io):
    """The states of the pass in hand.

    Reads: `kept`, `lengths`, `first`. Writes: `owns`, `cells`, `length`. Barriers: none: a thread reads what it wrote.
    """
    for j in T.unroll(e.items):
        s.owns[j] = s.kept[kept_at(e, s, j, 0)]
        if e.has_cell:
            s.cells[j] = s.kept[kept_at(e, s, j, 1)]
        if e.ragged:
            s.length[j] = io.lengths[T.min(item(e, s, j, of_batch=True)[1], e.batch - 1)]


@phase
def save(e, /, s):
    """Keep the states of the pass in hand.

    Reads: `owns`, `cells`, `first`. Writes: `kept`. Barriers: none.
    """
    for j in T.unroll(e.items):
        s.kept[kept_at(e, s, j, 0)] = s.owns[j]
        if e.has_cell:
            s.kept[kept_at(e, s, j, 1)] = s.cells[j]


def load_inputs(e: Extents) -> Phase:
    """Begin the loads of what the products of a slot of the exchange meet; the phase is (s, io, slot), a slot ahead of
    their use.

    Reads: `x_projected`, `resets`. Writes: `next_x`, `next_reset`, `next_fresh`. Barriers: none.
    """

    def projections(begin: int, end: int) -> Phase:
        @T.inline
        def load(s, io, step, b, j):
            for g in T.unroll(begin, end):
                s.next_x[j * e.gates + g] = element_bits(
                    e.dtype, io.x_projected[step, b, g * e.hidden + s.unit[j]])

        return load

    every, of_gates, of_candidate = projections(0, e.gates), projections(0, 2), projections(2, e.gates)

    @T.inline
    def of_half(s, io, slot, b, j):
        if slot % 2 == 0:
            of_gates(s, io, slot // 2, b, j)
        else:
            of_candidate(s, io, slot // 2, b, j)

    @T.inline
    def phase(s, io, slot):
        step = T.meta_var(slot // e.exchanges)
        for j in T.unroll(e.items):
            b = T.meta_var(item(e, s, j, of_batch=True, following=True)[1])
            if is_item(e, s, j, following=True):
                if e.exchanges == 2:
                    of_half(s, io, slot, b, j)
                else:
                    every(s, io, step, b, j)
                if e.resets:
                    s.next_reset[j] = io.resets[step, b]
        if e.resets:
            for f in T.unroll(e.fragments):
                s.next_fresh[f] = io.resets[step, T.min(next_row(e, s, f), e.batch - 1)]
                if e.exchanges == 2:  # scaled states are those of the new sequence
                    if slot % 2 != 0:
                        s.next_fresh[f] = 0

    return phase


@phase
def take_inputs(e, /, s):
    """Make the loaded inputs those of this step.

    Reads: `next_x`, `next_reset`, `next_fresh`. Writes: `x`, `reset`, `fresh`. Barriers: none.
    """
    for i in T.unroll(e.items * e.gates):
        s.x[i] = value_in(e.dtype, s.next_x[i], 0)
    if e.resets:
        for j in T.unroll(e.items):
            s.reset[j] = s.next_reset[j]
        for f in T.unroll(e.fragments):
            s.fresh[f] = s.next_fresh[f]


@phase
def bring(e, /, s, i, f, place):
    """Begin to fetch the states that a round's weights are multiplied with.

    Reads: the copy at `front`, or the exchange at `source`. Writes: `vectors`, those of fragment f and the i-th round
    in hand: zeros where there is no group. Barriers: none.
    """
    at = T.meta_var((i * e.fragments + f) * 4)
    if place >= 0:
        if e.stages > 0:
            load_shared(
                s.vectors[at], s.vectors[at + 1], s.vectors[at + 2], s.vectors[at + 3],
                s.front[0] + s.samples[f] + T.Cast("uint32", place))
        else:
            load_vector(
                s.vectors[at], s.vectors[at + 1], s.vectors[at + 2], s.vectors[at + 3],
                s.source[0] + T.Cast("uint64", s.samples[f] + T.Cast("uint32", place)))
    else:
        for v in T.unroll(4):
            s.vectors[at + v] = T.uint32(0)


@phase
def fetch(e, count, /, s, places, first):
    """Fetch the states for `count` rounds, all in flight before one is looked at.

    Reads: `places` from `first` on, and what `bring` reads. Writes: `vectors`. Barriers: of the warp, where lanes have
    waited for states.
    """
    get = T.meta_var(bring(e))
    for i in T.unroll(count):
        for f in T.unroll(e.fragments):
            get(s, i, f, places[first + i])
    if e.stages == 0:
        s.waiting[0] = 1
        while s.waiting[0] != 0:
            s.waiting[0] = 0
            for i in T.unroll(count):
                for f in T.unroll(e.fragments):
                    if missing(e, s.vectors, (i * e.fragments + f) * 4):
                        get(s, i, f, places[first + i])
                        s.waiting[0] = 1
        T.cuda.warp_sync()


@phase
def multiply(e, /, s, i, words, w):
    """Multiply a round's weights with the states that were fetched.

    Reads: `vectors` of the i-th round in hand, and `words` from `w` on. Writes: adds to `products`.
    Barriers: none, but all lanes of a warp take part.
    """
    kind = T.meta_var({"float16": "f16", "bfloat16": "bf16"}[e.dtype])
    mma = T.meta_var(getattr(getattr(T.ptx.mma.sync.aligned.m16n8k16.row.col.f32, kind), kind).f32)
    for f in T.unroll(e.fragments):
        at = T.meta_var((i * e.fragments + f) * 4)
        p = T.meta_var(f * 4)
        if e.resets:
            if s.fresh[f] != 0:
                for v in T.unroll(4):
                    s.vectors[at + v] = T.uint32(0)
        for h in T.unroll(2):
            mma(s.products[p], s.products[p + 1], s.products[p + 2], s.products[p + 3],
                words[w + h * 2], words[w + 4 + h * 2], words[w + h * 2 + 1], words[w + 4 + h * 2 + 1],
                s.vectors[at + h * 2], s.vectors[at + h * 2 + 1],
                s.products[p], s.products[p + 1], s.products[p + 2], s.products[p + 3])


@phase
def from_copy(e, /, s, k):
    """Add the products of a tile's rounds on chip with the copy of the states."""
    for c in T.unroll(ceildiv(e.registers, BATCHED)):
        if c * BATCHED < s.rounds[k]:
            for i in T.unroll(BATCHED):
                if c * BATCHED + i < e.registers:
                    for f in T.unroll(e.fragments):
                        bring(e)(s, i, f, s.places[k * e.registers + c * BATCHED + i])
            for i in T.unroll(BATCHED):
                if c * BATCHED + i < e.registers:
                    multiply(e)(s, i, s.weights, (k * e.registers + c * BATCHED + i) * 8)


@phase
def multiply_held(e, /, s, k):
    """A tile's products with the weights in registers.

    Reads: `weights`, `places`, the copy of the states; or, without one, `vectors`, which has them for all rounds of the
        only tile.
    Writes: adds to `products`. Barriers: none, but all lanes of a warp take part.
    """
    if e.stages > 0:
        from_copy(e)(s, k)
    else:
        for r in T.unroll(e.registers):
            if r < s.rounds[k]:
                multiply(e)(s, r, s.weights, r * 8)


@phase
def from_memory(e, /, s, io, k):
    """Add the products of a tile's rounds that are not on chip, from memory."""
    find_tile(e)(s, io, k)
    for c in T.serial((s.rounds[k] - e.registers + (BATCHED - 1)) // BATCHED):
        for i in T.unroll(BATCHED):
            read_round(e)(s, io, e.registers + c * BATCHED + i, s.word, i * 8, s.at, i)
        fetch(e, BATCHED)(s, s.at, 0)
        for i in T.unroll(BATCHED):
            multiply(e)(s, i, s.word, i * 8)


@phase
def multiply_rest(e, /, s, io, k):
    """A tile's products with the other weights.

    Reads: the weights in global memory, and the states. Writes: adds to `products`.
    Barriers: as `fetch`; all lanes of a warp take part.
    """
    if s.rounds[k] > e.registers:
        from_memory(e)(s, io, k)


@phase
def write_parts(e, /, s, k, half):
    """Put this warp's sums of a tile into shared memory, where they are added up.

    Reads: `products`. Writes: `parts`. Barriers: none; one of the thread block has to follow.
    """
    for f in T.unroll(e.fragments):
        for i in T.unroll(4):  # rows `row` and `row + 8`, each with two neighbouring samples
            s.parts[part_at(e, half, s.warp, k, f * SAMPLES + s.member * 2 + i % 2, s.row + i // 2 * 8)] = (
                s.products[f * 4 + i])


@phase
def multiply_tiles(e, /, s, io, half):
    """All products of a step. Reads and writes as the phases that it calls."""
    if e.stages == 0 and e.rounds > 0:
        fetch(e, e.rounds)(s, s.places, 0)
    for k in T.unroll(e.most):
        for i in T.unroll(e.fragments * 4):
            s.products[i] = T.float32(0)
        if e.registers > 0:
            multiply_held(e)(s, k)
        multiply_rest(e)(s, io, k)
        write_parts(e)(s, k, half)


def sum_parts(e: Extents, begin: int = 0, end: int | None = None) -> Phase:
    """Add up what the warps have for an item; the phase is (s, j, half).

    `begin`, `end`: of the gates that are summed; all by default.

    Reads: `parts`. Writes: `sums`. Barriers: none.
    """
    gates = begin, e.gates if end is None else end

    @T.inline
    def phase(s, j, half):
        unit = T.meta_var(item(e, s, j)[0])
        b = T.meta_var(item(e, s, j)[1])
        for g in T.unroll(*gates):
            s.sums[j * e.gates + g] = T.float32(0)
            for w in T.unroll(e.warps):
                s.sums[j * e.gates + g] = s.sums[j * e.gates + g] + s.parts[part_at(
                    e, half, w, unit // e.tile_units, b, g * e.tile_units + unit % e.tile_units)]

    return phase


@phase
def begin_anew(e, /, s, j):
    """Take an item's states, zeros where its sequence begins.

    Reads: `cells`, `owns`, `reset`. Writes: `cell`, `own`. Barriers: none.
    """
    s.cell[0] = s.cells[j]
    s.own[0] = s.owns[j]
    if e.resets:
        if s.reset[j] != 0:
            s.cell[0] = T.float32(0)
            s.own[0] = T.float32(0)


@phase
def send_scaled(e, /, s, j, half, slot):
    """Send an item's state times its reset gate, of a cell with two exchanges.

    Reads: `parts`, `x`, `reset`, `owns`. Writes: the exchange; z, to `cells`.
    Barriers: none, but all lanes of a warp take part.
    """
    b = T.meta_var(item(e, s, j, of_batch=True)[1])
    s.bits[0] = T.uint32(0)
    if is_item(e, s, j):
        sum_parts(e, 0, 2)(s, j, half)
        begin_anew(e)(s, j)
        reset_gates(e)(s, j)
        s.cells[j] = s.passed[0]
        s.bits[0] = state_bits(e, s.result[j])
    collect(e)(s)
    put(e)(s, slot, b, s.unit[j], sends(e, s, j))


@phase
def new_state(e, /, s, io, step, j):
    """The state of the j-th item after the step."""
    begin_anew(e)(s, j)
    if e.exchanges == 2:
        s.passed[0] = s.cells[j]
    gates(e)(s, io, j)
    s.bits[0] = state_bits(e, s.result[j])
    if e.ragged:
        if step >= s.length[j]:
            s.bits[0] = state_bits(e, s.owns[j])
            s.cell[0] = s.cells[j]
    s.owns[j] = value_in(e.dtype, s.bits[0], 0)
    s.cells[j] = s.cell[0]


@phase
def finish(e, /, s, io, step, j, half, slot):
    """Compute an item's new state, and store it where it is needed.

    `slot`: of the exchange, that of the next step. The exchange comes first: all others wait for it.

    Reads: `parts`, `x`, `reset`, `length`, `cells`, `owns`. Writes: the exchange, the outputs, `cells`, `owns`.
    Barriers: none, but all lanes of a warp take part.
    """
    b = T.meta_var(item(e, s, j, of_batch=True)[1])
    s.bits[0] = T.uint32(0)
    if is_item(e, s, j):
        sum_parts(e, 2 if e.exchanges == 2 else 0)(s, j, half)
        new_state(e)(s, io, step, j)
    collect(e)(s)
    if step + 1 < io.steps:
        put(e)(s, slot, b, s.unit[j], sends(e, s, j))
    write_output(e)(s, io, step, j)
    if step + 1 == io.steps:
        if is_item(e, s, j):
            io.h_n[b, s.unit[j]] = T.Cast(e.dtype, s.owns[j])
            if e.cell == "lstm":
                io.c_n[b, s.unit[j]] = T.Cast(e.dtype, s.cells[j])


@phase
def together(e, /, s, io, step, j, b):
    """Store the outputs of neighbouring units, which a lane has, at once."""
    if e.ragged:
        if step >= s.length[j]:
            for w in T.unroll(sent_words(e)):
                s.sent[w] = T.uint32(0)
    STORE_GLOBAL[e.sent_bytes](io.output.ptr_to([step, b, s.unit[j]]), *[s.sent[w] for w in range(sent_words(e))])


@phase
def apart(e, /, s, io, step, j, b):
    """Store the output of one unit."""
    if e.ragged:
        io.output[step, b, s.unit[j]] = T.Cast(
            e.dtype, T.Select(step < s.length[j], s.owns[j], T.float32(0)))
    else:
        io.output[step, b, s.unit[j]] = T.Cast(e.dtype, s.owns[j])


@phase
def write_output(e, /, s, io, step, j):
    """An item's output.

    Where rows of the output are whole stores of the exchange, one lane writes what was sent: stores of 2 bytes delay
    the exchange in the L2 cache.

    Reads: `sent`, `owns`, `length`. Writes: `output`. Barriers: none.
    """
    b = T.meta_var(item(e, s, j, of_batch=True)[1])
    if (e.hidden % e.at_once == 0):
        if stores(e, s, j):
            together(e)(s, io, step, j, b)
    elif is_item(e, s, j):
        apart(e)(s, io, step, j, b)
# fmt: on


def next_row(e: Extents, s: Any, f: Any) -> tirx.PrimExpr:
    """The sample of the thread in fragment f of the next pass, within the batch."""
    row = f * SAMPLES + s.row
    return row if e.passes == 1 else s.next_first[0] + row


def kept_at(e: Extents, s: Any, j: Any, which: int) -> tirx.PrimExpr:
    """Where in `kept` the states of an item of the pass in hand are."""
    number = which * e.passes + s.first[0] // e.samples
    return (number * e.items + j) * e.threads + s.t


def part_at(e: Extents, half: Any, warp: Any, k: Any, sample: Any, row: Any) -> tirx.PrimExpr:
    """Where in `parts` a sum is."""
    return (((half * e.warps + warp) * e.most + k) * (e.fragments * SAMPLES) + sample) * e.part_pitch + row
