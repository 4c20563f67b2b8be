"""A recurrent layer on a CPU: in each step threads share the units, SIMD vectors run along the batch.

A thread takes `chunk` units at a time. States are kept as float32 `(hidden, batch)`, so that an entry's value meets
`simd` sequences in one load; two such buffers take turns. A step ends when all threads have: TVM's parallel loop is the
barrier.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, ceildiv, powers
from tvm_sparse.operators.sparse_recurrent.problem import RecurrentLayer

# Sequences whose sums are held at once, a vector a gate: up to one register of AVX-512.
SIMD = powers(1, 16)
# Units that a thread takes at a time; all of them: there is one thread, and no barrier.
CHUNK = powers(16, 8192)
# Products for which it pays to ask another thread, some ten microseconds of work.
WORK = 1 << 15


def space(problem: RecurrentLayer, machine: Machine) -> Table:
    return {
        "chunk": tuple(c for c in CHUNK if c == CHUNK[0] or c < 2 * problem.hidden),
        "simd": tuple(s for s in SIMD if s < 2 * problem.batch),
    }


def default(problem: RecurrentLayer, machine: Machine) -> Decisions:
    table = space(problem, machine)
    each = problem.gates * problem.row_entries * problem.batch
    enough = [c for c in table["chunk"] if c * each >= WORK]
    return {"chunk": min(enough, default=max(table["chunk"])), "simd": max(table["simd"])}


def build(problem: RecurrentLayer, decisions: Decisions, finish: Callable[..., Program]) -> Program:
    """The program of one point; `finish` is `cpu_program` of the operator's interface."""
    from types import SimpleNamespace

    from tvm.script import tirx as T

    from tvm_sparse.operators.sparse_recurrent.definition import next_state

    batch, hidden, gates, cell, dtype = problem.batch, problem.hidden, problem.gates, problem.cell, problem.dtype
    lstm, gru, ragged, resetting = cell == "lstm", cell == "gru", bool(problem.ragged), bool(problem.resets)
    simd, chunk = decisions["simd"], decisions["chunk"]
    chunks = ceildiv(hidden, chunk)
    loop = T.parallel if chunks > 1 else T.serial
    parts, padded = ceildiv(batch, simd), ceildiv(batch, simd) * simd
    whole = batch == padded
    rows = problem.rows()
    update = next_state(cell, simd)

    # fmt: off
    @T.inline
    def begin(io, states, cells):
        """The states before the first step; zeros in the places that pad the batch."""
        for unit_of in range(hidden):
            with T.sblock("begin"):
                unit = T.axis.spatial(hidden, unit_of)
                for b in range(padded):
                    states[0, unit, b] = T.float32(0)
                    states[1, unit, b] = T.float32(0)
                    cells[unit, b] = T.float32(0)
                for b in range(batch):
                    io.h_n[b, unit] = io.h0[b, unit]
                    states[0, unit, b] = T.Cast("float32", io.h0[b, unit])
                    if lstm:
                        cells[unit, b] = T.Cast("float32", io.c0[b, unit])
                        io.c_n[b, unit] = io.c0[b, unit]
                    if resetting:
                        if io.resets[0, b] != 0:
                            states[0, unit, b] = T.float32(0)

    @T.inline
    def sum_rows(io, s, states, t, slot, base):
        """`s.sums`: U h of each gate, for the sequences from `base` on."""
        for gate in range(gates):
            for v in T.vectorized(simd):
                s.sums[gate * simd + v] = T.float32(0)
            for e in range(rows.stop(io, slot, gate) - rows.start(io, slot, gate)):
                entry = T.meta_var(rows.start(io, slot, gate) + e)
                for v in T.vectorized(simd):
                    s.sums[gate * simd + v] = s.sums[gate * simd + v] + rows.value(
                        io, slot, gate, entry) * states[t % 2, rows.column(io, slot, gate, entry), base + v]

    @T.inline
    def write_state(io, s, states, cells, t, unit, b, v):
        """One sequence: its output, and what the next step starts from."""
        io.output[t, b, unit] = T.Cast(dtype, s.h[v])
        io.h_n[b, unit] = T.Cast(dtype, s.h[v])
        # Read back: of two casts, to bfloat16 and from it, TVM makes none.
        states[(t + 1) % 2, unit, b] = T.Cast("float32", io.output[t, b, unit])
        if lstm:
            io.c_n[b, unit] = T.Cast(dtype, s.c[v])
            cells[unit, b] = s.c[v]
        if resetting:
            if t + 1 < io.steps:
                if io.resets[t + 1, b] != 0:
                    states[(t + 1) % 2, unit, b] = T.float32(0)

    @T.inline
    def one_sequence(io, s, states, cells, t, unit, b, v):
        if ragged:
            if t < io.lengths[b]:
                write_state(io, s, states, cells, t, unit, b, v)
            else:
                io.output[t, b, unit] = T.Cast(dtype, T.float32(0))
        else:
            write_state(io, s, states, cells, t, unit, b, v)

    @T.inline
    def load_rest(io, s, states, cells, t, unit, b, v):
        """Beside the sums: what one sequence's gates need."""
        for gate in range(gates):
            s.x[gate * simd + v] = T.Cast("float32", io.x_projected[t, b, gate * hidden + unit])
        if gru:
            s.h[v] = states[t % 2, unit, b]
        if lstm:
            s.c[v] = cells[unit, b]
            if resetting:
                if io.resets[t, b] != 0:
                    s.c[v] = T.float32(0)

    @T.inline
    def one_unit(io, s, states, cells, t, slot):
        unit = T.meta_var(rows.unit(io, slot))
        if gru:
            s.bias[0] = T.Cast("float32", io.hidden_bias[unit])
        for part in range(parts):
            sum_rows(io, s, states, t, slot, part * simd)
            for v in range(simd):
                if whole:
                    load_rest(io, s, states, cells, t, unit, part * simd + v, v)
                    update(s, v)
                    one_sequence(io, s, states, cells, t, unit, part * simd + v, v)
                else:
                    if part * simd + v < batch:
                        load_rest(io, s, states, cells, t, unit, part * simd + v, v)
                        update(s, v)
                        one_sequence(io, s, states, cells, t, unit, part * simd + v, v)

    @T.inline
    def all_steps(io, states, cells):
        for step in range(io.steps):
            for part_of in loop(chunks):
                with T.sblock("chunk"):
                    t = T.axis.opaque(io.steps, step)
                    n = T.axis.spatial(chunks, part_of)
                    s = T.meta_var(SimpleNamespace(
                        x=T.sblock_alloc_buffer((gates * simd,), "float32"),
                        sums=T.sblock_alloc_buffer((gates * simd,), "float32"),
                        h=T.sblock_alloc_buffer((simd,), "float32"),
                        c=T.sblock_alloc_buffer((simd,), "float32"),
                        bias=T.sblock_alloc_buffer((1,), "float32")))
                    for i in range(T.min(chunk, hidden - n * chunk)):
                        one_unit(io, s, states, cells, t, n * chunk + i)

    @T.inline
    def body(io):
        states = T.sblock_alloc_buffer((2, hidden, padded), "float32")
        cells = T.sblock_alloc_buffer((hidden, padded), "float32")
        begin(io, states, cells)
        all_steps(io, states, cells)
    # fmt: on
    return finish(problem, body)
