"""The gradient of a recurrent layer on a GPU, one kernel per step: for problems that no persistent kernel fits.

The host loops over the steps from the last one back. `reduce_threads` lanes of a warp hold a unit, as in
`recurrent.step_kernels`; they read d of the step after from the output. For an LSTM a kernel before the first step
computes the cell states again. With the reset before the product there is a second kernel per step, for the reset gate.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template, Workspace, ceildiv
from tvm_sparse.operators.recurrent_backward.problem import RecurrentBackward

from ..recurrent.step_kernels import SAMPLES, default, space

# Threads of a thread block of the kernel before the first step.
SCAN_THREADS = 128


def build(problem: RecurrentBackward, decisions: Decisions) -> Program:
    from types import SimpleNamespace

    from tvm.script import tirx as T

    from tvm_sparse.operators.recurrent_backward.definition import through_cell, through_reset, unit_buffers

    from ..device.region import device_region
    from ..interface import gpu_program
    from ..recurrent.gates import sigmoid, tanh
    from ..recurrent.step_kernels import sum_rows
    from .cells import cells_of

    batch, hidden, gates, cell, dtype = problem.batch, problem.hidden, problem.gates, problem.cell, problem.dtype
    lstm, gru, ragged, resetting = cell == "lstm", cell == "gru", bool(problem.ragged), bool(problem.resets)
    threads, lanes = decisions["threads"], decisions["reduce_threads"]
    samples = min(batch, SAMPLES)
    rows, through, scan = problem.rows(), through_cell(cell, 1, sigmoid, tanh), cells_of(problem)
    twice, of_reset = problem.exchanges == 2, through_reset(1, sigmoid)

    # fmt: off
    @T.inline
    def load_gradient(io, t, b, column, into, at):
        into[at] = T.Cast("float32", io.d_sums[t, b, column])

    add_up = sum_rows(rows, 2 if twice else 1, batch, samples, lanes, load_gradient, 0)
    add_up_candidates = sum_rows(rows, 3, batch, samples, lanes, load_gradient, 2)

    @T.inline
    def come(io, s, t, b, unit, v):
        """`dh`, `dc`: the gradients of the states after step t, without that of its output."""
        if t + 1 == io.steps:
            s.one.dh[0] = T.Cast("float32", io.d_h_n[b, unit])
            s.one.dc[0] = T.Cast("float32", io.d_c_n[b, unit]) if lstm else T.float32(0)
        else:
            s.one.dh[0] = io.passed[b, unit]
            s.one.dc[0] = io.dcs[b, unit] if lstm else T.float32(0)
        if t + 1 < (T.min(io.lengths[b], io.steps) if ragged else io.steps):
            for part in T.unroll(2 if twice else 1):
                s.one.dh[0] = s.one.dh[0] + s.sums[part * samples + v]
            if resetting:
                if io.resets[t + 1, b] != 0:
                    s.one.dh[0] = T.float32(0)
                    s.one.dc[0] = T.float32(0)

    @T.inline
    def take_step(io, s, t, b, unit):
        for k in T.unroll(problem.kept):
            s.one.kept[k] = T.Cast("float32", io.kept[t, b, k * hidden + unit])
        s.one.dh[0] = s.one.dh[0] + T.Cast("float32", io.d_output[t, b, unit])
        if gru or twice:
            s.one.h[0] = T.Cast("float32", io.before[t, b, unit])
        if lstm:
            s.one.c[0] = io.cells[t, b, unit]
        through(s.one, 0)
        for gate in T.unroll(int(twice), gates):
            io.d_sums[t, b, gate * hidden + unit] = T.Cast(dtype, s.one.d[gate])
        if gru:
            io.d_new[t, b, unit] = T.Cast(dtype, s.one.fresh[0])
        io.passed[b, unit] = s.one.own[0]
        if lstm:
            io.dcs[b, unit] = s.one.dc[0]

    @T.inline
    def pass_over(io, s, t, b, unit):
        """A step after the end of its sequence."""
        for gate in T.unroll(gates):
            io.d_sums[t, b, gate * hidden + unit] = T.Cast(dtype, T.float32(0))
        if gru:
            io.d_new[t, b, unit] = T.Cast(dtype, T.float32(0))
        io.passed[b, unit] = s.one.dh[0]
        if lstm:
            io.dcs[b, unit] = s.one.dc[0]

    @T.inline
    def reset_gate(io, s, t, b, unit, v):
        if t < (io.lengths[b] if ragged else io.steps):
            s.one.dh[0] = s.sums[2 * samples + v]
            s.one.kept[0] = T.Cast("float32", io.kept[t, b, unit])
            s.one.h[0] = T.Cast("float32", io.before[t, b, unit])
            of_reset(s.one, 0)
            io.d_sums[t, b, unit] = T.Cast(dtype, s.one.d[0])
            io.passed[b, unit] = io.passed[b, unit] + s.one.own[0]

    @T.inline
    def one_sequence(io, s, t, b, unit, v):
        come(io, s, t, b, unit, v)
        if t < 0:
            io.d_h0[b, unit] = T.Cast(dtype, s.one.dh[0])
            if lstm:
                io.d_c0[b, unit] = T.Cast(dtype, s.one.dc[0])
        elif ragged:
            if t < io.lengths[b]:
                take_step(io, s, t, b, unit)
            else:
                pass_over(io, s, t, b, unit)
        else:
            take_step(io, s, t, b, unit)

    @T.inline
    def for_units(io, t, source, add_up, take):
        block = T.cta_id([ceildiv(hidden, threads // lanes)])
        thread = T.thread_id([threads])
        s = T.meta_var(SimpleNamespace(
            sums=T.alloc_local([problem.parts * samples], "float32"),
            h=T.alloc_local([1], "float32"),
            one=SimpleNamespace(**unit_buffers(problem, lambda extent: T.alloc_local([extent], "float32")))))
        slot: T.let = block * (threads // lanes) + thread // lanes
        lane: T.let = thread % lanes
        for part in T.serial(ceildiv(batch, samples)):
            if source < io.steps:
                add_up(io, s, source, slot, part * samples, lane)
            if slot < hidden:
                # Lanes share the sequences.
                for v in T.unroll(samples):
                    if v % lanes == lane and part * samples + v < batch:
                        take(io, s, t, part * samples + v, rows.unit(io, slot), v)

    @T.inline
    def body(io):
        if lstm:
            with device_region():
                block = T.cta_id([ceildiv(batch * hidden, SCAN_THREADS)])
                thread = T.thread_id([SCAN_THREADS])
                scan(io, block * SCAN_THREADS + thread, ceildiv(batch * hidden, SCAN_THREADS) * SCAN_THREADS)
        for back in T.serial(io.steps + 1):
            with device_region():
                for_units(io, io.steps - 1 - back, io.steps - back, add_up, one_sequence)
            if twice:
                if back < io.steps:
                    with device_region():
                        for_units(io, io.steps - 1 - back, io.steps - 1 - back, add_up_candidates, reset_gate)
    # fmt: on
    own = [Workspace("passed", (batch, hidden), "float32", fill=None)]
    if lstm:
        own.append(Workspace("dcs", (batch, hidden), "float32", fill=None))
        own.append(Workspace("cells", ("steps", batch, hidden), "float32", fill=None))
    return gpu_program(problem, body, own)


back_kernels = Template(
    name="back_kernels",
    version=2,
    operator="recurrent_backward",
    kind="cuda",
    summary="a kernel a step, from the last one back; lanes of a warp share the row of a unit",
    space=space,
    default=default,
    program=build,
    explicit_threads=True,
)
