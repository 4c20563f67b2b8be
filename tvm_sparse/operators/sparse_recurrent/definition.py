"""The recurrence in TVMScript, with parts that schedules use too.

This module loads the compiler: it is imported when a definition is built.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.arguments import function


class Rows(Protocol):
    """Access to a weight in a program: rows by slot (the order of units) and gate, and a row's entries one by one.

    All methods take the arguments of the kernel, `io`, and run-time integers.
    """

    def unit(self, io: Any, slot: Any) -> Any:
        """The unit at a slot."""

    def start(self, io: Any, slot: Any, gate: Any) -> Any:
        """The first entry of a row."""

    def stop(self, io: Any, slot: Any, gate: Any) -> Any:
        """The end of a row's entries. Slots beyond the last one have empty rows."""

    def column(self, io: Any, slot: Any, gate: Any, entry: Any) -> Any:
        """The column of an entry, int32."""

    def value(self, io: Any, slot: Any, gate: Any, entry: Any) -> Any:
        """The value of an entry, float32."""


class EntryRows:
    """`Rows` of a weight whose entries are pairs of column and value."""

    def __init__(self, problem: Any) -> None:
        self.problem = problem
        self.beyond = problem.hidden * problem.gates

    def unit(self, io: Any, slot: Any) -> Any:
        return io.units[slot]

    def start(self, io: Any, slot: Any, gate: Any) -> Any:
        return io.row_start[T.min(slot * self.problem.gates + gate, self.beyond)]

    def stop(self, io: Any, slot: Any, gate: Any) -> Any:
        return io.row_start[T.min(slot * self.problem.gates + gate + 1, self.beyond)]

    def column(self, io: Any, slot: Any, gate: Any, entry: Any) -> Any:
        return io.entries[entry, 0] & 0xFFFF if self.problem.words == 1 else io.entries[entry, 1]

    def value(self, io: Any, slot: Any, gate: Any, entry: Any) -> Any:
        if self.problem.words == 2:
            return T.reinterpret("float32", io.entries[entry, 0])
        if self.problem.dtype == "bfloat16":
            return T.reinterpret("float32", io.entries[entry, 0] & -65536)
        high = T.Cast("uint16", T.Cast("uint32", io.entries[entry, 0]) >> 16)
        return T.Cast("float32", T.reinterpret("float16", high))


def next_state(
    cell: str, samples: int = 1, sigmoid: Callable[..., Any] = T.sigmoid, tanh: Callable[..., Any] = T.tanh
) -> Callable[..., Any]:
    """The gates of one unit; the phase is (s, v), for sample v of `samples` that are stored side by side.

    `sigmoid` and `tanh` replace the compiler's, where these are not accurate enough.

    Reads, all float32: `s.sums[gate * samples + v]`, U h of each gate; `s.x`, likewise, the projected input; of an LSTM
    `s.c[v]`; of a GRU `s.h[v]`, the state before, and `s.bias[v]`, or, after `reset_state`, `s.c[v]`; of a clipped relu
    `s.limit`. Writes: `s.h[v]`, and of an LSTM `s.c[v]`.
    """
    if cell in ("tanh", "relu", "clipped_relu"):

        @T.inline
        def phase(s, v):
            s.h[v] = s.x[v] + s.sums[v]
            if cell == "tanh":
                s.h[v] = tanh(s.h[v])
            else:
                s.h[v] = T.if_then_else(s.h[v] < T.float32(0), T.float32(0), s.h[v])
            if cell == "clipped_relu":
                s.h[v] = T.if_then_else(s.h[v] > s.limit, s.limit, s.h[v])

    elif cell == "lstm":

        @T.inline
        def phase(s, v):
            s.c[v] = sigmoid(s.x[samples + v] + s.sums[samples + v]) * s.c[v] + sigmoid(s.x[v] + s.sums[v]) * tanh(
                s.x[2 * samples + v] + s.sums[2 * samples + v]
            )
            s.h[v] = sigmoid(s.x[3 * samples + v] + s.sums[3 * samples + v]) * tanh(s.c[v])

    elif cell == "gru_reset_before":

        @T.inline
        def phase(s, v):
            s.h[v] = (T.float32(1) - s.c[v]) * tanh(s.x[2 * samples + v] + s.sums[2 * samples + v]) + s.c[v] * s.h[v]

    else:

        @T.inline
        def phase(s, v):
            # The gates overwrite their sums.
            s.sums[samples + v] = sigmoid(s.x[samples + v] + s.sums[samples + v])
            s.sums[v] = tanh(s.x[2 * samples + v] + sigmoid(s.x[v] + s.sums[v]) * (s.sums[2 * samples + v] + s.bias[v]))
            s.h[v] = (T.float32(1) - s.sums[samples + v]) * s.sums[v] + s.sums[samples + v] * s.h[v]

    return phase


def reset_state(samples: int = 1, sigmoid: Callable[..., Any] = T.sigmoid) -> Callable[..., Any]:
    """The first half of a step of `gru_reset_before`; the phase is (s, v), as for `next_state`.

    Reads: `s.sums`, `s.x` of r and z; `s.h[v]`, the state before. Writes: `s.h[v]`, the state times r; `s.c[v]`, z.
    """

    @T.inline
    def phase(s, v):
        s.h[v] = sigmoid(s.x[v] + s.sums[v]) * s.h[v]
        s.c[v] = sigmoid(s.x[samples + v] + s.sums[samples + v])

    return phase


def recurrence(problem: Any) -> Callable[..., Any]:
    """All steps, one unit of one sequence at a time: the body (io) of a definition."""
    batch, hidden, gates, cell, dtype = problem.batch, problem.hidden, problem.gates, problem.cell, problem.dtype
    lstm, gru, ragged, resetting = cell == "lstm", cell == "gru", bool(problem.ragged), bool(problem.resets)
    update, reset, rows, twice = next_state(cell), reset_state(), problem.rows(), problem.exchanges == 2

    # fmt: off
    @T.inline
    def load_state(io, s, t, b, column):
        """`s.before`: the state of a unit before step t."""
        if resetting:
            if io.resets[t, b] != 0:
                s.before[0] = T.float32(0)
            elif t == 0:
                s.before[0] = T.Cast("float32", io.h0[b, column])
            else:
                s.before[0] = T.Cast("float32", io.output[t - 1, b, column])
        else:
            if t == 0:
                s.before[0] = T.Cast("float32", io.h0[b, column])
            else:
                s.before[0] = T.Cast("float32", io.output[t - 1, b, column])

    @T.inline
    def load_scaled(io, s, t, b, column):
        """`s.before`: the state of a unit before step t, times its reset gate."""
        s.before[0] = T.Cast("float32", s.scaled[b, column])

    @T.inline
    def add_up(io, s, t, b, slot, gate, load):
        s.x[gate] = T.Cast("float32", io.x_projected[t, b, gate * hidden + rows.unit(io, slot)])
        s.sums[gate] = T.float32(0)
        for e in range(rows.stop(io, slot, gate) - rows.start(io, slot, gate)):
            entry = T.meta_var(rows.start(io, slot, gate) + e)
            load(io, s, t, b, rows.column(io, slot, gate, entry))
            s.sums[gate] = s.sums[gate] + rows.value(io, slot, gate, entry) * s.before[0]

    @T.inline
    def scale_state(io, s, cells, t, b, slot):
        """`scaled` and `cells` of a unit: its state before step t times r, and z."""
        unit = T.meta_var(rows.unit(io, slot))
        for gate in range(2):
            add_up(io, s, t, b, slot, gate, load_state)
        load_state(io, s, t, b, unit)
        s.h[0] = s.before[0]
        reset(s, 0)
        s.scaled[b, unit] = T.Cast(dtype, s.h[0])
        cells[b, unit] = s.c[0]

    @T.inline
    def take_step(io, s, cells, t, b, slot):
        unit = T.meta_var(rows.unit(io, slot))
        if twice:
            add_up(io, s, t, b, slot, 2, load_scaled)
            load_state(io, s, t, b, unit)
            s.h[0] = s.before[0]
            s.c[0] = cells[b, unit]
        else:
            for gate in range(gates):
                add_up(io, s, t, b, slot, gate, load_state)
        if gru:
            load_state(io, s, t, b, unit)
            s.h[0] = s.before[0]
            s.bias[0] = T.Cast("float32", io.hidden_bias[unit])
        if lstm:
            s.c[0] = cells[b, unit]
            if t == 0:
                s.c[0] = T.Cast("float32", io.c0[b, unit])
            if resetting:
                if io.resets[t, b] != 0:
                    s.c[0] = T.float32(0)
        update(s, 0)
        io.output[t, b, unit] = T.Cast(dtype, s.h[0])
        io.h_n[b, unit] = T.Cast(dtype, s.h[0])
        if lstm:
            cells[b, unit] = s.c[0]
            io.c_n[b, unit] = T.Cast(dtype, s.c[0])

    @T.inline
    def pass_over(io, t, b, unit):
        """A step after the end of its sequence."""
        io.output[t, b, unit] = T.Cast(dtype, T.float32(0))
        if t == 0:
            io.h_n[b, unit] = io.h0[b, unit]
            if lstm:
                io.c_n[b, unit] = io.c0[b, unit]

    def state(io, scaled):
        return SimpleNamespace(
            x=T.sblock_alloc_buffer((gates,), "float32"),
            sums=T.sblock_alloc_buffer((gates,), "float32"),
            before=T.sblock_alloc_buffer((1,), "float32"),
            h=T.sblock_alloc_buffer((1,), "float32"),
            c=T.sblock_alloc_buffer((1,), "float32"),
            bias=T.sblock_alloc_buffer((1,), "float32"),
            limit=getattr(io, "limit", None),
            scaled=scaled)

    @T.inline
    def scale_states(io, cells, scaled, step):
        for place in range(hidden):
            for sample in range(batch):
                with T.sblock("reset"):
                    t = T.axis.opaque(io.steps, step)
                    slot = T.axis.opaque(hidden, place)
                    b = T.axis.opaque(batch, sample)
                    s = T.meta_var(state(io, scaled))
                    scale_state(io, s, cells, t, b, slot)

    @T.inline
    def all_steps(io):
        cells = T.sblock_alloc_buffer((batch, hidden), "float32")
        scaled = T.sblock_alloc_buffer((batch if twice else 1, hidden), dtype)
        for step in range(io.steps):
            if twice:
                scale_states(io, cells, scaled, step)
            for place in range(hidden):
                for sample in range(batch):
                    with T.sblock("unit"):
                        # A step reads what the previous one wrote.
                        t = T.axis.opaque(io.steps, step)
                        slot = T.axis.opaque(hidden, place)
                        b = T.axis.opaque(batch, sample)
                        s = T.meta_var(state(io, scaled))
                        if ragged:
                            if t < io.lengths[b]:
                                take_step(io, s, cells, t, b, slot)
                            else:
                                pass_over(io, t, b, rows.unit(io, slot))
                        else:
                            take_step(io, s, cells, t, b, slot)
    # fmt: on
    return all_steps


def scan(problem: Any) -> tirx.PrimFunc:
    """The definition of the operator."""
    return function(problem, recurrence(problem), blocks=True, packed=True)
