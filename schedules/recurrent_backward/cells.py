"""The cell states of an LSTM, computed again on a GPU before the steps back, from the sums of the gates."""

from __future__ import annotations

from types import SimpleNamespace

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.recurrent_backward.definition import next_cell

from ..recurrent.exchange import element_bits, element_of
from ..recurrent.gates import sigmoid, tanh

# Steps whose loads are in flight together: a thread goes through the steps of a sequence's unit one after the other,
# and would wait for memory in each.
AHEAD = 8


# fmt: off
@phase
def some_steps(problem, /, io, s, words, marks, first, b, unit):
    """Cell states of AHEAD steps from `first` on, whose loads are in flight together."""
    resetting = T.meta_var(bool(problem.resets))
    for i in T.unroll(AHEAD):
        if first + i < io.steps:
            for k in T.unroll(4):
                words[i * 4 + k] = element_bits(problem.dtype, io.kept[first + i, b, k * problem.hidden + unit])
            if resetting:
                marks[i] = io.resets[first + i, b]
    for i in T.unroll(AHEAD):
        if first + i < io.steps:
            if resetting:
                if marks[i] != 0:
                    s.c[0] = T.float32(0)
            io.cells[first + i, b, unit] = s.c[0]
            for k in T.unroll(4):
                s.kept[k] = T.Cast("float32", element_of(problem.dtype, words[i * 4 + k]))
            next_cell(1, sigmoid, tanh)(s, 0)


@phase
def cells_of(problem, /, io, number, threads):
    """The cell state before each step, for thread `number` of `threads`.

    Reads: `kept`, `c0`, `resets`. Writes: `io.cells`, `(steps, batch, hidden)` float32. Barriers: none.
    """
    hidden = T.meta_var(problem.hidden)
    s = T.meta_var(SimpleNamespace(kept=T.alloc_local([4], "float32"), c=T.alloc_local([1], "float32")))
    words = T.alloc_local([AHEAD * 4], "uint32")
    marks = T.alloc_local([AHEAD if bool(problem.resets) else 1], "int32")
    for i in T.serial(ceildiv(problem.batch * hidden, threads)):
        if i * threads + number < problem.batch * hidden:
            b: T.int32 = (i * threads + number) // hidden
            unit: T.int32 = (i * threads + number) % hidden
            s.c[0] = T.Cast("float32", io.c0[b, unit])
            for part in T.serial((io.steps + (AHEAD - 1)) // AHEAD):
                some_steps(problem)(io, s, words, marks, part * AHEAD, b, unit)
# fmt: on
