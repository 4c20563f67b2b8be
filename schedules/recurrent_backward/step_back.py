"""The gradient of a recurrent layer on a CPU, step by step: vectors run along the batch.

In each step threads share the units, a thread `chunk` of them at a time; TVM's parallel loop is the barrier between
steps. Gradients d of the step after are kept as float32, `(gates * hidden, batch)`, in two buffers that take turns.
With the reset before the product a second loop follows in each step, from the candidate's gradients to the reset
gate's.
"""

from __future__ import annotations

from types import SimpleNamespace

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, Workspace, ceildiv
from tvm_sparse.operators.recurrent_backward.problem import RecurrentBackward

from ..recurrent.step_rows import WORK, chunks
from ..sparse_recurrent.step_rows import DEPTHS, SIMD, EntrySums


def space(problem: RecurrentBackward, machine: Machine) -> Table:
    return {
        "chunk": chunks(problem),
        "simd": tuple(s for s in SIMD if s < 2 * problem.batch),
        "depth": tuple(c for c in DEPTHS if c == 1 or c <= problem.row_entries),
    }


def default(problem: RecurrentBackward, machine: Machine) -> Decisions:
    table, each = space(problem, machine), problem.row_entries * problem.batch
    return {
        "chunk": min((c for c in table["chunk"] if c * each >= WORK), default=max(table["chunk"])),
        "simd": max(table["simd"]),
        "depth": min(2, max(table["depth"])),
    }


def program(problem: RecurrentBackward, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from tvm_sparse.operators.recurrent_backward.definition import next_cell, through_cell, through_reset, unit_buffers

    from ..device.arithmetic import sigmoid, tanh
    from ..interface import cpu_program

    batch, hidden, gates, cell, dtype = problem.batch, problem.hidden, problem.gates, problem.cell, problem.dtype
    lstm, gru, ragged, resetting = cell == "lstm", cell == "gru", bool(problem.ragged), bool(problem.resets)
    chunk, simd = decisions["chunk"], decisions["simd"]
    parts, padded = ceildiv(hidden, chunk), ceildiv(batch, simd) * simd
    loop, rows, width = T.parallel if parts > 1 else T.serial, problem.rows(), problem.width
    twice, of_reset = problem.exchanges == 2, through_reset(simd, sigmoid)
    sums = EntrySums(width, problem.parts, rows, simd, decisions["depth"])
    before, through, advance = 2 if twice else 1, through_cell(cell, simd, sigmoid, tanh), next_cell(1, sigmoid, tanh)
    add_up, add_up_candidates = sums.sums(0, before), sums.sums(2)

    # fmt: off
    @T.inline
    def scan_cells(io):
        """The cell state before each step of an LSTM."""
        for unit_of in loop(hidden):
            with T.sblock("cells"):
                unit = T.axis.spatial(hidden, unit_of)
                s = T.meta_var(SimpleNamespace(
                    kept=T.sblock_alloc_buffer((4,), "float32"), c=T.sblock_alloc_buffer((1,), "float32")))
                for b in range(batch):
                    s.c[0] = T.Cast("float32", io.c0[b, unit])
                    for t in range(io.steps):
                        if resetting:
                            if io.resets[t, b] != 0:
                                s.c[0] = T.float32(0)
                        io.cells[t, b, unit] = s.c[0]
                        for k in range(4):
                            s.kept[k] = T.Cast("float32", io.kept[t, b, k * hidden + unit])
                        advance(s, 0)

    @T.inline
    def begin(io, turns, passed, dcs):
        """What the last step starts from; zeros where the batch is padded."""
        for row in range(width):
            with T.sblock("clear"):
                i = T.axis.spatial(width, row)
                for j in range(padded):
                    turns[0, i, j] = T.float32(0)
                    turns[1, i, j] = T.float32(0)
        for unit_of in range(hidden):
            with T.sblock("begin"):
                unit = T.axis.spatial(hidden, unit_of)
                for b in range(batch):
                    passed[unit, b] = T.Cast("float32", io.d_h_n[b, unit])
                    if lstm:
                        dcs[unit, b] = T.Cast("float32", io.d_c_n[b, unit])

    @T.inline
    def come(io, s, passed, dcs, t, unit, b, v):
        """`s.dh`, `s.dc`: the gradients of the states after step t, without that of its output."""
        s.dh[v] = passed[unit, b]
        s.dc[v] = dcs[unit, b] if lstm else T.float32(0)
        if t + 1 < (T.min(io.lengths[b], io.steps) if ragged else io.steps):
            for gate in range(before):
                s.dh[v] = s.dh[v] + s.sums[gate * simd + v]
            if resetting:
                if io.resets[t + 1, b] != 0:
                    s.dh[v] = T.float32(0)
                    s.dc[v] = T.float32(0)
                    # For sequences that have no step t, and for the states before the first one.
                    if lstm:
                        dcs[unit, b] = T.float32(0)

    @T.inline
    def load(io, s, passed, dcs, t, unit, b, v):
        come(io, s, passed, dcs, t, unit, b, v)
        s.dh[v] = s.dh[v] + T.Cast("float32", io.d_output[t, b, unit])
        for k in range(problem.kept):
            s.kept[k * simd + v] = T.Cast("float32", io.kept[t, b, k * hidden + unit])
        if gru or twice:
            s.h[v] = T.Cast("float32", io.before[t, b, unit])
        if lstm:
            s.c[v] = io.cells[t, b, unit]

    @T.inline
    def keep(io, s, turns, turn, t, gate, unit, b, v):
        io.d_sums[t, b, gate * hidden + unit] = T.Cast(dtype, s.d[gate * simd + v])
        # Read back from memory: TVM removes a pair of casts, to bfloat16 and from it.
        turns[turn, gate * hidden + unit, b] = T.Cast("float32", io.d_sums[t, b, gate * hidden + unit])

    @T.inline
    def load_reset(io, s, t, unit, b, v):
        s.dh[v] = s.sums[2 * simd + v]
        s.kept[v] = T.Cast("float32", io.kept[t, b, unit])
        s.h[v] = T.Cast("float32", io.before[t, b, unit])

    @T.inline
    def write_reset(io, s, turns, passed, t, unit, b, v):
        if t < (io.lengths[b] if ragged else io.steps):
            keep(io, s, turns, t % 2, t, 0, unit, b, v)
            passed[unit, b] = passed[unit, b] + s.own[v]

    @T.inline
    def write(io, s, turns, passed, dcs, t, unit, b, v):
        for gate in range(int(twice), gates):
            keep(io, s, turns, t % 2, t, gate, unit, b, v)
        if gru:
            io.d_new[t, b, unit] = T.Cast(dtype, s.fresh[v])
        if lstm:
            dcs[unit, b] = s.dc[v]
        passed[unit, b] = s.own[v]

    @T.inline
    def pass_over(io, t, unit, b):
        """A step after the end of its sequence."""
        for gate in range(gates):
            io.d_sums[t, b, gate * hidden + unit] = T.Cast(dtype, T.float32(0))
        if gru:
            io.d_new[t, b, unit] = T.Cast(dtype, T.float32(0))

    @T.inline
    def write_or_pass(io, s, turns, passed, dcs, t, unit, b, v):
        if ragged:
            if t < io.lengths[b]:
                write(io, s, turns, passed, dcs, t, unit, b, v)
            else:
                pass_over(io, t, unit, b)
        else:
            write(io, s, turns, passed, dcs, t, unit, b, v)

    @T.inline
    def write_first(io, s, passed, dcs, unit, b, v):
        """The gradients of the states before the first step."""
        come(io, s, passed, dcs, -1, unit, b, v)
        io.d_h0[b, unit] = T.Cast(dtype, s.dh[v])
        if lstm:
            io.d_c0[b, unit] = T.Cast(dtype, s.dc[v])

    @T.inline
    def one_unit(io, s, turns, passed, dcs, t, slot):
        unit = T.meta_var(rows.unit(io, slot))
        for part in range(padded // simd):
            if t + 1 < io.steps:
                add_up(io, s, turns, (t + 1) % 2, slot, part * simd)
            if t >= 0:
                for v in range(simd):
                    if part * simd + v < batch:
                        load(io, s, passed, dcs, t, unit, part * simd + v, v)
                for v in T.vectorized(simd):
                    through(s, v)
                for v in range(simd):
                    if part * simd + v < batch:
                        write_or_pass(io, s, turns, passed, dcs, t, unit, part * simd + v, v)
            else:
                for v in range(simd):
                    if part * simd + v < batch:
                        write_first(io, s, passed, dcs, unit, part * simd + v, v)

    @T.inline
    def reset_unit(io, s, turns, passed, dcs, t, slot):
        """The gradients of a step's reset gates, once those of its candidates are known."""
        unit = T.meta_var(rows.unit(io, slot))
        if t >= 0:
            for part in range(padded // simd):
                add_up_candidates(io, s, turns, t % 2, slot, part * simd)
                for v in range(simd):
                    if part * simd + v < batch:
                        load_reset(io, s, t, unit, part * simd + v, v)
                for v in T.vectorized(simd):
                    of_reset(s, v)
                for v in range(simd):
                    if part * simd + v < batch:
                        write_reset(io, s, turns, passed, t, unit, part * simd + v, v)

    def buffers():
        return SimpleNamespace(
            sums=T.sblock_alloc_buffer((problem.parts * simd,), "float32"), **sums.alloc(),
            **unit_buffers(problem, lambda n: T.sblock_alloc_buffer((n,), "float32"), simd))

    @T.inline
    def for_units(io, turns, passed, dcs, step, take):
        for part_of in loop(parts):
            with T.sblock("chunk"):
                back = T.axis.opaque(io.steps + 1, step)
                n = T.axis.spatial(parts, part_of)
                s = T.meta_var(buffers())
                for i in range(T.min(chunk, hidden - n * chunk)):
                    take(io, s, turns, passed, dcs, io.steps - 1 - back, n * chunk + i)

    @T.inline
    def body(io):
        turns = T.sblock_alloc_buffer((2, width, padded), "float32")
        passed = T.sblock_alloc_buffer((hidden, padded), "float32")
        dcs = T.sblock_alloc_buffer((hidden, padded), "float32")
        if lstm:
            scan_cells(io)
        begin(io, turns, passed, dcs)
        for step in range(io.steps + 1):
            for_units(io, turns, passed, dcs, step, one_unit)
            if twice:
                for_units(io, turns, passed, dcs, step, reset_unit)
    # fmt: on
    cells = (Workspace("cells", ("steps", batch, hidden), "float32", fill=None),) if lstm else ()
    return cpu_program(problem, body, cells, index="int32")


step_back = Template(
    name="step_back",
    version=2,
    operator="recurrent_backward",
    kind="llvm",
    summary="step by step from the last one back; threads share the units, vectors run along the batch",
    space=space,
    default=default,
    program=program,
)
