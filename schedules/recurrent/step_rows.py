"""A recurrent layer on a CPU, step by step: what does not depend on how the weight is kept.

In each step threads share the units, a thread `chunk` of them at a time. Of these the units of a *tile*, and some
`sequences` of the batch, are worked on together: a `Weight` makes their sums, gates follow in SIMD vectors, then states
and outputs are written. States are kept as float32 in two buffers that take turns. A step ends when all threads have:
TVM's parallel loop is the barrier. A cell whose step has two exchanges has two such loops: a third buffer has the
states times their reset gates.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Protocol

from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import Program, ceildiv, powers
from tvm_sparse.operators.sparse_recurrent.problem import RecurrentLayer

# Units that a thread takes at a time. If that is all of them, there is one thread, and no barrier.
CHUNK = powers(16, 8192)
# Products from which on waking another thread pays, some ten microseconds of work.
WORK = 1 << 15


class Weight(Protocol):
    """How a template goes through its weight.

    Attributes
    ----------
    units
        Units of a tile: 1, or what divides 16.
    sequences
        Of the batch, worked on together.
    """

    @property
    def units(self) -> int: ...

    @property
    def sequences(self) -> int: ...

    def shape(self, padded: int) -> tuple[int, int]:
        """The shape of a buffer of states, the batch being `padded` to whole `sequences`."""

    def place(self, unit: Any, b: Any) -> tuple[Any, Any]:
        """The index of a state in such a buffer."""

    def alloc(self) -> dict[str, Any]:
        """Buffers that `sums` works with, for the attributes of its `s`."""

    def sums(self, begin: int = 0, end: int | None = None) -> Phase:
        """The phase (io, s, states, turn, tile, base): U h of each gate (or of those from `begin` to `end`) and unit of
        a tile, for the sequences from `base` on, to `s.sums[(gate * units + unit) * sequences + sequence]`. `turn`:
        which of the buffers."""


def chunks(problem: RecurrentLayer) -> tuple[int, ...]:
    """The values that `chunk` may have."""
    return tuple(c for c in CHUNK if c == CHUNK[0] or c < 2 * problem.hidden)


def default_chunk(problem: RecurrentLayer) -> int:
    """The fewest units that are enough work for a thread."""
    each = problem.gates * problem.row_entries * problem.batch
    table = chunks(problem)
    return min((c for c in table if c * each >= WORK), default=max(table))


def build(problem: RecurrentLayer, chunk: int, weight: Weight) -> Program:
    """The program of one point."""
    from tvm.script import tirx as T

    from tvm_sparse.operators.sparse_recurrent.definition import next_state, reset_state

    from ..device.arithmetic import sigmoid, tanh
    from ..interface import cpu_program

    batch, hidden, gates, cell, dtype = problem.batch, problem.hidden, problem.gates, problem.cell, problem.dtype
    lstm, gru, ragged, resetting = cell == "lstm", cell == "gru", bool(problem.ragged), bool(problem.resets)
    units, sequences = weight.units, weight.sequences
    samples, tiles = units * sequences, ceildiv(hidden, units)
    each = max(1, chunk // units)
    parts = ceildiv(tiles, each)
    loop = T.parallel if parts > 1 else T.serial
    padded = ceildiv(batch, sequences) * sequences
    shape = weight.shape(padded)
    rows, twice = problem.rows(), problem.exchanges == 2
    update = next_state(cell, samples, sigmoid, tanh)
    add_up = weight.sums(2, 3) if twice else weight.sums()
    add_up_gates, reset = weight.sums(0, 2), reset_state(samples, sigmoid)
    alone = units == 1 and batch == padded  # whether every place of a tile is a sequence of a unit that exists

    # fmt: off
    @T.inline
    def begin(io, states, cells):
        """Write the states before the first step; zeros where the batch and the units are padded."""
        for row in range(shape[0]):
            with T.sblock("clear"):
                i = T.axis.spatial(shape[0], row)
                for j in range(shape[1]):
                    states[0, i, j] = T.float32(0)
                    states[1, i, j] = T.float32(0)
                    if twice:
                        states[2, i, j] = T.float32(0)
        for unit_of in range(hidden):
            with T.sblock("begin"):
                unit = T.axis.spatial(hidden, unit_of)
                for b in range(batch):
                    io.h_n[b, unit] = io.h0[b, unit]
                    T.buffer_store(states, T.Cast("float32", io.h0[b, unit]), [0, *weight.place(unit, b)])
                    if lstm:
                        cells[unit, b] = T.Cast("float32", io.c0[b, unit])
                        io.c_n[b, unit] = io.c0[b, unit]
                    if resetting:
                        if io.resets[0, b] != 0:
                            T.buffer_store(states, T.float32(0), [0, *weight.place(unit, b)])

    @T.inline
    def write_state(io, s, states, cells, t, unit, b, at):
        """One sequence of a unit: its output, and what the next step starts from."""
        io.output[t, b, unit] = T.Cast(dtype, s.h[at])
        # Read back from memory: TVM removes a pair of casts, to bfloat16 and from it.
        T.buffer_store(states, T.Cast("float32", io.output[t, b, unit]), [(t + 1) % 2, *weight.place(unit, b)])
        if lstm:
            cells[unit, b] = s.c[at]
        if t + 1 == (io.lengths[b] if ragged else io.steps):
            io.h_n[b, unit] = T.Cast(dtype, s.h[at])
            if lstm:
                io.c_n[b, unit] = T.Cast(dtype, s.c[at])
        if resetting:
            if t + 1 < io.steps:
                if io.resets[t + 1, b] != 0:
                    T.buffer_store(states, T.float32(0), [(t + 1) % 2, *weight.place(unit, b)])

    @T.inline
    def one_sequence(io, s, states, cells, t, unit, b, at):
        if ragged:
            if t < io.lengths[b]:
                write_state(io, s, states, cells, t, unit, b, at)
            else:
                io.output[t, b, unit] = T.Cast(dtype, T.float32(0))
        else:
            write_state(io, s, states, cells, t, unit, b, at)

    @T.inline
    def load_rest(io, s, states, cells, t, unit, b, at):
        """Load what the gates of one sequence of a unit need beside the sums."""
        for gate in range(gates):
            s.x[gate * samples + at] = T.Cast("float32", io.x_projected[t, b, gate * hidden + unit])
        if gru or twice:
            s.h[at] = T.BufferLoad(states, [t % 2, *weight.place(unit, b)])
        if twice:
            s.c[at] = cells[unit, b]
        if gru:
            s.bias[at] = T.Cast("float32", io.hidden_bias[unit])
        if lstm:
            s.c[at] = cells[unit, b]
            if resetting:
                if io.resets[t, b] != 0:
                    s.c[at] = T.float32(0)

    @T.inline
    def of_all(do, io, s, states, cells, t, tile, base):
        """Call `do` for each sequence of each unit of a tile."""
        for u in range(units):
            for v in range(sequences):
                slot = T.meta_var(tile * units + u)
                if alone:
                    do(io, s, states, cells, t, rows.unit(io, slot), base + v, u * sequences + v)
                else:
                    if slot < hidden and base + v < batch:
                        do(io, s, states, cells, t, rows.unit(io, slot), base + v, u * sequences + v)

    @T.inline
    def write_scaled(io, s, states, cells, t, unit, b, at):
        """One sequence of a unit: its state times the reset gate, and z."""
        # Through memory, as the state itself.
        s.rounded[at] = T.Cast(dtype, s.h[at])
        T.buffer_store(states, T.Cast("float32", s.rounded[at]), [2, *weight.place(unit, b)])
        cells[unit, b] = s.c[at]

    @T.inline
    def scale_tile(io, s, states, cells, t, tile):
        for part in range(padded // sequences):
            add_up_gates(io, s, states, t % 2, tile, part * sequences)
            of_all(load_rest, io, s, states, cells, t, tile, part * sequences)
            for v in T.vectorized(samples):
                reset(s, v)
            of_all(write_scaled, io, s, states, cells, t, tile, part * sequences)

    @T.inline
    def one_tile(io, s, states, cells, t, tile):
        for part in range(padded // sequences):
            add_up(io, s, states, 2 if twice else t % 2, tile, part * sequences)
            of_all(load_rest, io, s, states, cells, t, tile, part * sequences)
            for v in T.vectorized(samples):
                update(s, v)
            of_all(one_sequence, io, s, states, cells, t, tile, part * sequences)

    def unit_buffers(io):
        rounded = {"rounded": T.sblock_alloc_buffer((samples,), dtype)} if twice else {}
        return SimpleNamespace(
            x=T.sblock_alloc_buffer((gates * samples,), "float32"),
            sums=T.sblock_alloc_buffer((gates * samples,), "float32"),
            h=T.sblock_alloc_buffer((samples,), "float32"),
            c=T.sblock_alloc_buffer((samples,), "float32"),
            bias=T.sblock_alloc_buffer((samples,), "float32"),
            limit=getattr(io, "limit", None), **rounded, **weight.alloc())

    @T.inline
    def for_tiles(io, states, cells, step, take):
        for part_of in loop(parts):
            with T.sblock("chunk"):
                t = T.axis.opaque(io.steps, step)
                n = T.axis.spatial(parts, part_of)
                s = T.meta_var(unit_buffers(io))
                for i in range(T.min(each, tiles - n * each)):
                    take(io, s, states, cells, t, n * each + i)

    @T.inline
    def all_steps(io, states, cells):
        for step in range(io.steps):
            if twice:
                for_tiles(io, states, cells, step, scale_tile)
            for_tiles(io, states, cells, step, one_tile)

    @T.inline
    def body(io):
        states = T.sblock_alloc_buffer((3 if twice else 2, *shape), "float32")
        cells = T.sblock_alloc_buffer((hidden, padded), "float32")
        begin(io, states, cells)
        all_steps(io, states, cells)
    # fmt: on
    return cpu_program(problem, body, index="int32")
