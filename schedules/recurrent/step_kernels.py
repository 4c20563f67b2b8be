"""A recurrent layer on a GPU, one kernel per step: for problems that no persistent kernel fits.

A cell whose step has two exchanges takes two kernels per step. The host loops over the steps, and the end of a kernel
is the barrier between them. `reduce_threads` lanes of a warp hold a unit: they go through the rows of its gates
together, for some sequences at a time, and read the states from the output of the step before. Every step reads the
weight again, from the L2 cache if it fits there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import Decisions, Program, Table, Workspace, ceildiv, powers
from tvm_sparse.operators.sparse_recurrent.problem import RecurrentLayer

THREADS = powers(64, 512)
LANES = powers(1, 32)
# Entries of a row per lane that decide how many lanes are taken without tuning.
EACH = 4
# Sequences whose sums are held together: an entry is read once for all of them.
SAMPLES = 4


def space(problem: RecurrentLayer, machine: Machine) -> Table:
    return {"threads": THREADS, "reduce_threads": LANES}


def default(problem: RecurrentLayer, machine: Machine) -> Decisions:
    return {
        "threads": 256,
        "reduce_threads": max(lanes for lanes in LANES if lanes == 1 or EACH * lanes <= problem.row_entries),
    }


# fmt: off
def sum_rows(
    rows: Any, gates: int, batch: int, samples: int, lanes: int, load: Callable[..., Any], begin: int
) -> Phase:
    """The products of a unit's rows with what the step before wrote; the phase is (io, s, t, slot, first, lane).

    `rows`: access to the weight (`sparse_recurrent.definition.Rows`), of whose gates those from `begin` to `gates` are
    summed. `load`: an inline (io, t, b, column, into, at)
    that loads the factor of a column and sequence for step t.

    Writes: `s.sums[gate * samples + v]`, for the sequences from `first` on, in every lane of a group; `s.h`.
    Barriers: none, but all lanes of a warp take part.
    """
    from tvm.script import tirx as T

    from ..device.selection import FULL_WARP

    @T.inline
    def phase(io, s, t, slot, first, lane):
        for gate in T.unroll(begin, gates):
            for v in T.unroll(samples):
                s.sums[gate * samples + v] = T.float32(0)
            # Groups beyond the last slot only take part in the shuffles: their row is empty.
            start: T.int32 = rows.start(io, slot, gate)
            stop: T.int32 = rows.stop(io, slot, gate)
            for i in T.serial((stop - start - lane + (lanes - 1)) // lanes):
                column: T.int32 = rows.column(io, slot, gate, start + lane + i * lanes)
                value: T.float32 = rows.value(io, slot, gate, start + lane + i * lanes)
                for v in T.unroll(samples):
                    if first + v < batch:
                        load(io, t, first + v, column, s.h, 0)
                        s.sums[gate * samples + v] = s.sums[gate * samples + v] + value * s.h[0]
            for v in T.unroll(samples):
                for bit in T.unroll(lanes.bit_length() - 1):
                    s.sums[gate * samples + v] = s.sums[gate * samples + v] + T.tvm_warp_shuffle_xor(
                        T.uint32(FULL_WARP), s.sums[gate * samples + v], 1 << bit, 32, 32)
    return phase


def build(problem: RecurrentLayer, decisions: Decisions) -> Program:
    from types import SimpleNamespace

    from tvm.script import tirx as T

    from tvm_sparse.operators.sparse_recurrent.definition import next_state, reset_state

    from ..device.region import device_region
    from ..interface import gpu_program
    from .gates import sigmoid, tanh

    batch, hidden, gates, cell, dtype = problem.batch, problem.hidden, problem.gates, problem.cell, problem.dtype
    lstm, gru, ragged, resetting = cell == "lstm", cell == "gru", bool(problem.ragged), bool(problem.resets)
    threads, lanes = decisions["threads"], decisions["reduce_threads"]
    samples = min(batch, SAMPLES)
    rows, twice = problem.rows(), problem.exchanges == 2
    update, reset = next_state(cell, 1, sigmoid, tanh), reset_state(1, sigmoid)

    @T.inline
    def load_state(io, t, b, unit, into, at):
        """`into[at]`: the state of a unit before step t."""
        if t == 0:
            into[at] = T.Cast("float32", io.h0[b, unit])
        else:
            into[at] = T.Cast("float32", io.output[t - 1, b, unit])
        if resetting:
            if io.resets[t, b] != 0:
                into[at] = T.float32(0)

    @T.inline
    def load_scaled(io, t, b, unit, into, at):
        """`into[at]`: the state of a unit before step t, times its reset gate."""
        into[at] = T.Cast("float32", io.scaled[b, unit])

    if twice:
        add_up_gates = sum_rows(rows, 2, batch, samples, lanes, load_state, 0)
        add_up = sum_rows(rows, 3, batch, samples, lanes, load_scaled, 2)
    else:
        add_up = sum_rows(rows, gates, batch, samples, lanes, load_state, 0)

    @T.inline
    def load_sums(io, s, t, b, unit, v, gate):
        s.one.sums[gate] = s.sums[gate * samples + v]
        s.one.x[gate] = T.Cast("float32", io.x_projected[t, b, gate * hidden + unit])

    @T.inline
    def scale_state(io, s, t, b, unit, v):
        """The first half of a step for one sequence."""
        for gate in T.unroll(2):
            load_sums(io, s, t, b, unit, v, gate)
        load_state(io, t, b, unit, s.one.h, 0)
        reset(s.one, 0)
        io.scaled[b, unit] = T.Cast(dtype, s.one.h[0])
        io.cells[b, unit] = s.one.c[0]

    @T.inline
    def take_step(io, s, t, b, unit, v):
        """Compute one unit's step for one sequence, from its sums."""
        for gate in T.unroll(2 if twice else 0, gates):
            load_sums(io, s, t, b, unit, v, gate)
        if twice:
            load_state(io, t, b, unit, s.one.h, 0)
            s.one.c[0] = io.cells[b, unit]
        if gru:
            s.one.bias[0] = T.Cast("float32", io.hidden_bias[unit])
            load_state(io, t, b, unit, s.one.h, 0)
        if lstm:
            s.one.c[0] = io.cells[b, unit]
            if t == 0:
                s.one.c[0] = T.Cast("float32", io.c0[b, unit])
            if resetting:
                if io.resets[t, b] != 0:
                    s.one.c[0] = T.float32(0)
        update(s.one, 0)
        io.output[t, b, unit] = T.Cast(dtype, s.one.h[0])
        io.h_n[b, unit] = T.Cast(dtype, s.one.h[0])
        if lstm:
            io.cells[b, unit] = s.one.c[0]
            io.c_n[b, unit] = T.Cast(dtype, s.one.c[0])

    @T.inline
    def pass_over(io, t, b, unit):
        """Write the result of a step after the sequence's last one."""
        io.output[t, b, unit] = T.Cast(dtype, T.float32(0))
        if t == 0:
            io.h_n[b, unit] = io.h0[b, unit]
            if lstm:
                io.c_n[b, unit] = io.c0[b, unit]

    @T.inline
    def one_sequence(io, s, t, b, unit, v):
        if ragged:
            if t < io.lengths[b]:
                take_step(io, s, t, b, unit, v)
            else:
                pass_over(io, t, b, unit)
        else:
            take_step(io, s, t, b, unit, v)

    @T.inline
    def for_units(io, t, add_up, take):
        block = T.cta_id([ceildiv(hidden, threads // lanes)])
        thread = T.thread_id([threads])
        s = T.meta_var(SimpleNamespace(
            sums=T.alloc_local([gates * samples], "float32"),
            h=T.alloc_local([1], "float32"),
            one=SimpleNamespace(limit=getattr(io, "limit", None), **{
                name: T.alloc_local([extent], "float32")
                for name, extent in {"x": gates, "sums": gates, "h": 1, "c": 1, "bias": 1}.items()})))
        slot: T.let = block * (threads // lanes) + thread // lanes
        lane: T.let = thread % lanes
        for part in T.serial(ceildiv(batch, samples)):
            add_up(io, s, t, slot, part * samples, lane)
            if slot < hidden:
                # Lanes share the sequences.
                for v in T.unroll(samples):
                    if v % lanes == lane and part * samples + v < batch:
                        take(io, s, t, part * samples + v, rows.unit(io, slot), v)

    @T.inline
    def body(io):
        for t in T.serial(io.steps):
            if twice:
                with device_region():
                    for_units(io, t, add_up_gates, scale_state)
            with device_region():
                for_units(io, t, add_up, one_sequence)
    own = [Workspace("cells", (batch, hidden), "float32")] if lstm or twice else []
    if twice:
        own.append(Workspace("scaled", (batch, hidden), dtype))
    return gpu_program(problem, body, own)
# fmt: on
