"""The recurrence of gradients in TVMScript, with parts that schedules use too.

This module loads the compiler: it is imported when a definition is built.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.arguments import function
from tvm_sparse.operators.sparse_recurrent.definition import EntryRows


def transposed_rows(problem: Any) -> EntryRows:
    """Access to the transposed weight, which has one row for each unit, or a part of it for each gate."""
    sizes = {"hidden": problem.hidden, "gates": problem.parts, "words": problem.words, "dtype": problem.dtype}
    return EntryRows(SimpleNamespace(**sizes))


def next_cell(samples: int = 1, sigmoid: Callable[..., Any] = T.sigmoid, tanh: Callable[..., Any] = T.tanh) -> Any:
    """The cell state of an LSTM after a step; the phase is (s, v), as for `through_cell`.

    Reads: `s.kept`, `s.c[v]`. Writes: `s.c[v]`.
    """

    @T.inline
    def phase(s, v):
        s.c[v] = sigmoid(s.kept[samples + v]) * s.c[v] + sigmoid(s.kept[v]) * tanh(s.kept[2 * samples + v])

    return phase


def through_cell(
    cell: str, samples: int = 1, sigmoid: Callable[..., Any] = T.sigmoid, tanh: Callable[..., Any] = T.tanh
) -> Callable[..., Any]:
    """The gradients of one unit's step; the phase is (s, v), for sample v of `samples` that are stored side by side.

    `sigmoid` and `tanh` replace the compiler's, where these are not accurate enough.

    Reads, all float32: `s.kept[k * samples + v]`; `s.dh[v]`; of an LSTM `s.c[v]`, the cell state before the step, and
    `s.dc[v]`; of a GRU `s.h[v]`, the state before the step. Writes: `s.d[gate * samples + v]`, with the reset before
    the product those of z and n alone; `s.own[v]`, what passes the state before the step by; of an LSTM `s.dc[v]`; of a
    GRU `s.fresh[v]`, dn. Gates overwrite what was kept of them.
    """
    one = T.float32(1)
    if cell in ("tanh", "relu"):

        @T.inline
        def phase(s, v):
            if cell == "tanh":
                s.d[v] = s.dh[v] * (one - s.kept[v] * s.kept[v])
            elif cell == "relu":
                s.d[v] = T.if_then_else(s.kept[v] <= T.float32(0), T.float32(0), s.dh[v])
            s.own[v] = T.float32(0)

    elif cell == "lstm":

        @T.inline
        def phase(s, v):
            s.kept[v] = sigmoid(s.kept[v])
            s.kept[samples + v] = sigmoid(s.kept[samples + v])
            s.kept[2 * samples + v] = tanh(s.kept[2 * samples + v])
            s.kept[3 * samples + v] = sigmoid(s.kept[3 * samples + v])
            s.own[v] = tanh(s.kept[samples + v] * s.c[v] + s.kept[v] * s.kept[2 * samples + v])
            s.dc[v] = s.dc[v] + s.dh[v] * s.kept[3 * samples + v] * (one - s.own[v] * s.own[v])
            s.d[3 * samples + v] = s.dh[v] * s.own[v] * (s.kept[3 * samples + v] * (one - s.kept[3 * samples + v]))
            s.d[v] = s.dc[v] * s.kept[2 * samples + v] * (s.kept[v] * (one - s.kept[v]))
            s.d[samples + v] = s.dc[v] * s.c[v] * (s.kept[samples + v] * (one - s.kept[samples + v]))
            s.d[2 * samples + v] = s.dc[v] * s.kept[v] * (one - s.kept[2 * samples + v] * s.kept[2 * samples + v])
            s.dc[v] = s.dc[v] * s.kept[samples + v]
            s.own[v] = T.float32(0)

    elif cell == "gru_reset_before":

        @T.inline
        def phase(s, v):
            s.kept[samples + v] = sigmoid(s.kept[samples + v])
            s.kept[2 * samples + v] = tanh(s.kept[2 * samples + v])
            s.d[samples + v] = (
                s.dh[v] * (s.h[v] - s.kept[2 * samples + v]) * (s.kept[samples + v] * (one - s.kept[samples + v]))
            )
            s.d[2 * samples + v] = (
                s.dh[v] * (one - s.kept[samples + v]) * (one - s.kept[2 * samples + v] * s.kept[2 * samples + v])
            )
            s.own[v] = s.dh[v] * s.kept[samples + v]

    else:

        @T.inline
        def phase(s, v):
            s.kept[v] = sigmoid(s.kept[v])
            s.kept[samples + v] = sigmoid(s.kept[samples + v])
            s.kept[2 * samples + v] = tanh(s.kept[2 * samples + v] + s.kept[v] * s.kept[3 * samples + v])
            s.fresh[v] = (
                s.dh[v] * (one - s.kept[samples + v]) * (one - s.kept[2 * samples + v] * s.kept[2 * samples + v])
            )
            s.d[v] = s.fresh[v] * s.kept[3 * samples + v] * (s.kept[v] * (one - s.kept[v]))
            s.d[samples + v] = (
                s.dh[v] * (s.h[v] - s.kept[2 * samples + v]) * (s.kept[samples + v] * (one - s.kept[samples + v]))
            )
            s.d[2 * samples + v] = s.fresh[v] * s.kept[v]
            s.own[v] = s.dh[v] * s.kept[samples + v]

    return phase


def through_reset(samples: int = 1, sigmoid: Callable[..., Any] = T.sigmoid) -> Callable[..., Any]:
    """The gradients of a reset gate before the product; the phase is (s, v), as for `through_cell`.

    Reads: `s.kept[v]`, the sum of r; `s.h[v]`; `s.dh[v]`, the gradient of r * h. Writes: `s.d[v]`; `s.own[v]`, what
    reaches the state before the step through r * h.
    """

    @T.inline
    def phase(s, v):
        s.kept[v] = sigmoid(s.kept[v])
        s.d[v] = s.dh[v] * s.h[v] * (s.kept[v] * (T.float32(1) - s.kept[v]))
        s.own[v] = s.dh[v] * s.kept[v]

    return phase


def unit_buffers(problem: Any, alloc: Callable[[int], Any], samples: int = 1) -> dict[str, Any]:
    """The buffers of `through_cell` and `next_cell`, made by `alloc(extent)`, for the attributes of their `s`."""
    extents = {"kept": problem.kept, "d": problem.gates}
    extents |= dict.fromkeys(("dh", "dc", "c", "h", "own", "fresh"), 1)
    return {name: alloc(extent * samples) for name, extent in extents.items()}


def scan_back(problem: Any) -> tirx.PrimFunc:
    """The definition of the operator."""
    batch, hidden, gates, cell, dtype = problem.batch, problem.hidden, problem.gates, problem.cell, problem.dtype
    lstm, gru, ragged, resetting = cell == "lstm", cell == "gru", bool(problem.ragged), bool(problem.resets)
    through, advance, rows, twice = through_cell(cell), next_cell(), problem.rows(), problem.exchanges == 2
    own, of_reset = int(twice), through_reset()  # `own`: the first gate whose gradient needs no product
    mixed = gru or twice

    # fmt: off
    @T.inline
    def load_kept(io, s, t, b, unit):
        for k in range(problem.kept):
            s.kept[k] = T.Cast("float32", io.kept[t, b, k * hidden + unit])

    @T.inline
    def scan_cells(io, cells):
        """The cell state before each step of an LSTM."""
        for sample in range(batch):
            for place in range(hidden):
                for step in range(io.steps):
                    with T.sblock("cells"):
                        b = T.axis.opaque(batch, sample)
                        unit = T.axis.opaque(hidden, place)
                        t = T.axis.opaque(io.steps, step)
                        s = T.meta_var(SimpleNamespace(
                            kept=T.sblock_alloc_buffer((4,), "float32"), c=T.sblock_alloc_buffer((1,), "float32")))
                        if t == 0:
                            cells[t, b, unit] = T.Cast("float32", io.c0[b, unit])
                        if resetting:
                            if io.resets[t, b] != 0:
                                cells[t, b, unit] = T.float32(0)
                        if t + 1 < io.steps:
                            load_kept(io, s, t, b, unit)
                            s.c[0] = cells[t, b, unit]
                            advance(s, 0)
                            cells[t + 1, b, unit] = s.c[0]

    @T.inline
    def add_up(io, s, t, b, slot, part):
        """To `s.dh`, the products of a part of the row."""
        for e in range(rows.stop(io, slot, part) - rows.start(io, slot, part)):
            entry = T.meta_var(rows.start(io, slot, part) + e)
            s.dh[0] = s.dh[0] + rows.value(io, slot, part, entry) * T.Cast(
                "float32", io.d_sums[t, b, rows.column(io, slot, part, entry)])

    @T.inline
    def gather(io, s, t, b, slot):
        """`s.dh`: the gradient of a unit's state after step t - 1, before that of its output is added."""
        s.dh[0] = s.passed[b, rows.unit(io, slot)]
        for part in range(2 if twice else 1):
            add_up(io, s, t, b, slot, part)
        unit = T.meta_var(rows.unit(io, slot))
        if resetting:
            if io.resets[t, b] != 0:
                s.dh[0] = T.float32(0)
                s.dcs[b, unit] = T.float32(0)

    @T.inline
    def take_step(io, s, t, b, slot):
        unit = T.meta_var(rows.unit(io, slot))
        load_kept(io, s, t, b, unit)
        s.dh[0] = s.dh[0] + T.Cast("float32", io.d_output[t, b, unit])
        if mixed:
            s.h[0] = T.Cast("float32", io.before[t, b, unit])
        if lstm:
            s.c[0] = s.cells[t, b, unit]
            s.dc[0] = s.dcs[b, unit]
        through(s, 0)
        for gate in range(own, gates):
            io.d_sums[t, b, gate * hidden + unit] = T.Cast(dtype, s.d[gate])
        if gru:
            io.d_new[t, b, unit] = T.Cast(dtype, s.fresh[0])
        if lstm:
            s.dcs[b, unit] = s.dc[0]
        s.passed[b, unit] = s.own[0]

    @T.inline
    def pass_over(io, s, t, b, unit):
        """A step after the end of its sequence."""
        for gate in range(gates):
            io.d_sums[t, b, gate * hidden + unit] = T.Cast(dtype, T.float32(0))
        if gru:
            io.d_new[t, b, unit] = T.Cast(dtype, T.float32(0))

    @T.inline
    def one_unit(io, s, t, b, slot):
        unit = T.meta_var(rows.unit(io, slot))
        if t + 1 == io.steps:
            s.passed[b, unit] = T.Cast("float32", io.d_h_n[b, unit])
            if lstm:
                s.dcs[b, unit] = T.Cast("float32", io.d_c_n[b, unit])
            s.dh[0] = s.passed[b, unit]
        elif ragged:
            s.dh[0] = s.passed[b, unit]
            if t + 1 < io.lengths[b]:
                gather(io, s, t + 1, b, slot)
        else:
            gather(io, s, t + 1, b, slot)
        if ragged:
            if t < io.lengths[b]:
                take_step(io, s, t, b, slot)
            else:
                pass_over(io, s, t, b, unit)
        else:
            take_step(io, s, t, b, slot)

    @T.inline
    def reset_unit(io, s, t, b, slot):
        """The gradients of a step's reset gate, once those of its candidate are known."""
        unit = T.meta_var(rows.unit(io, slot))
        s.dh[0] = T.float32(0)
        add_up(io, s, t, b, slot, 2)
        s.kept[0] = T.Cast("float32", io.kept[t, b, unit])
        s.h[0] = T.Cast("float32", io.before[t, b, unit])
        of_reset(s, 0)
        io.d_sums[t, b, unit] = T.Cast(dtype, s.d[0])
        s.passed[b, unit] = s.passed[b, unit] + s.own[0]

    @T.inline
    def last_unit(io, s, b, slot):
        """The gradients of the states before the first step."""
        unit = T.meta_var(rows.unit(io, slot))
        if ragged:
            s.dh[0] = s.passed[b, unit]
            if 0 < io.lengths[b]:
                gather(io, s, 0, b, slot)
        else:
            gather(io, s, 0, b, slot)
        io.d_h0[b, unit] = T.Cast(dtype, s.dh[0])
        if lstm:
            io.d_c0[b, unit] = T.Cast(dtype, s.dcs[b, unit])

    def state(passed, dcs, cells):
        buffers = unit_buffers(problem, lambda n: T.sblock_alloc_buffer((n,), "float32"))
        return SimpleNamespace(passed=passed, dcs=dcs, cells=cells, **buffers)

    @T.inline
    def reset_units(io, passed, dcs, cells, step):
        for place in range(hidden):
            for sample in range(batch):
                with T.sblock("reset"):
                    back = T.axis.opaque(io.steps + 1, step)
                    slot = T.axis.opaque(hidden, place)
                    b = T.axis.opaque(batch, sample)
                    s = T.meta_var(state(passed, dcs, cells))
                    if back < io.steps:
                        if ragged:
                            if io.steps - 1 - back < io.lengths[b]:
                                reset_unit(io, s, io.steps - 1 - back, b, slot)
                        else:
                            reset_unit(io, s, io.steps - 1 - back, b, slot)

    @T.inline
    def body(io):
        passed = T.sblock_alloc_buffer((batch, hidden), "float32")
        dcs = T.sblock_alloc_buffer((batch, hidden), "float32")
        cells = T.sblock_alloc_buffer((io.steps if lstm else 1, batch, hidden), "float32")
        if lstm:
            scan_cells(io, cells)
        for step in range(io.steps + 1):
            for place in range(hidden):
                for sample in range(batch):
                    with T.sblock("unit"):
                        # A step reads what the one after it wrote.
                        back = T.axis.opaque(io.steps + 1, step)
                        slot = T.axis.opaque(hidden, place)
                        b = T.axis.opaque(batch, sample)
                        s = T.meta_var(state(passed, dcs, cells))
                        if back < io.steps:
                            one_unit(io, s, io.steps - 1 - back, b, slot)
                        else:
                            last_unit(io, s, b, slot)
            if twice:
                reset_units(io, passed, dcs, cells, step)
    # fmt: on
    return function(problem, body, blocks=True, packed=True)
