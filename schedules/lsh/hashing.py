"""A row's band codes: the row into shared memory, and the places of its units.

Phases are called with a state that has the buffers which their heads name: `row` (hidden float32, shared), `places`
(an int32 a unit, shared), and in registers `raw` (`vectors * vector_words` uint32), `columns` (`column_loads *
column_words` uint32), `vector` (`vec` float32), `small` (one uint16), `unit`, `place` (int32), `best`, `value`
(float32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ..device.arithmetic import is_nan
from ..device.words import load_words, value_at
from .extents import HashExtents

Phase = Callable[..., Any]


def stage_row(e: HashExtents) -> Phase:
    """The row into shared memory, NaN as -inf; called with (s, row, first, t), `row` being a flat buffer of rows.

    Reads: `hidden` elements from `row[first]` on. Writes: `row`; as scratch `raw`, `small`, `value`, `vector`.
    Barriers: none; one has to follow.
    """
    rounds = ceildiv(e.hidden // e.vec, e.threads * e.vectors)
    wide = min(e.vec, 4)  # floats of one access to shared memory

    # fmt: off
    @T.inline
    def phase(s, hidden, first, t):
        for n in T.serial(rounds):
            for u in T.unroll(e.vectors):
                if ((n * e.vectors + u) * e.threads + t) * e.vec < e.hidden:
                    load_words(e.vector_bytes, s.raw, u * e.vector_words, s.small, hidden.ptr_to(
                        [first + ((n * e.vectors + u) * e.threads + t) * e.vec]))
            for u in T.unroll(e.vectors):
                if ((n * e.vectors + u) * e.threads + t) * e.vec < e.hidden:
                    for v in T.unroll(e.vec):
                        s.value = value_at(e.dtype, s.raw, u * e.vector_words, v)
                        s.vector[v] = T.Select(is_nan(s.value), T.float32("-inf"), s.value)
                    for q in T.unroll(e.vec // wide):
                        for v in T.vectorized(wide):
                            s.row[((n * e.vectors + u) * e.threads + t) * e.vec + q * wide + v] = s.vector[q * wide + v]
    # fmt: on
    return phase


def load_columns(e: HashExtents) -> Phase:
    """The next columns of a unit; called with (s, columns, at): from element `at` of the flat buffer on.

    Reads: permutations. Writes: `columns`, `small`. Barriers: none.
    """

    # fmt: off
    @T.inline
    def phase(s, permutations, at):
        for u in T.unroll(e.column_loads):
            load_words(e.column_bytes, s.columns, u * e.column_words, s.small, permutations.ptr_to(
                [at + u * (e.column_bytes // 2)]))
    # fmt: on
    return phase


def column(e: HashExtents, s: Any, c: Any) -> tirx.PrimExpr:
    """The `c`-th of the columns that a thread holds."""
    if e.column_bytes == 2:
        return T.Cast("int32", s.columns[c])
    return T.Cast("int32", (s.columns[c // 2] >> T.Cast("uint32", c % 2 * 16)) & T.uint32(0xFFFF))


def find_places(e: HashExtents) -> Phase:
    """The places of some units; called with (s, permutations, first, count, t).

    The columns of a thread's first unit are in `columns` already (`load_first_columns`).

    Reads: `row`, `columns`, the permutations of `count` units from `first` on.
    Writes: `places[0]` to `places[count - 1]`; as scratch `columns`, `unit`, `place`, `best`, `value`.
    Barriers: none; one has to come before and one has to follow.
    """
    load = load_columns(e)
    steps = e.k // e.held

    # fmt: off
    @T.inline
    def phase(s, permutations, first, count, t):
        s.unit = t
        while s.unit < count:
            s.best = T.float32("-inf")
            s.place = 0
            for step in T.serial(steps):
                if step > 0:
                    load(s, permutations, (first + s.unit) * e.k + step * e.held)
                for c in T.unroll(e.held):
                    s.value = s.row[column(e, s, c)]
                    if s.value > s.best:
                        s.best = s.value
                        s.place = step * e.held + c
            s.places[s.unit] = s.place
            s.unit = s.unit + e.threads
            if s.unit < count:
                load(s, permutations, (first + s.unit) * e.k)
    # fmt: on
    return phase


def load_first_columns(e: HashExtents) -> Phase:
    """The columns of a thread's first unit, which need nothing of the row; called with (s, permutations, first, count,
    t) as `find_places` is.

    Reads: permutations. Writes: `columns`. Barriers: none.
    """
    load = load_columns(e)

    # fmt: off
    @T.inline
    def phase(s, permutations, first, count, t):
        if t < count:
            load(s, permutations, (first + t) * e.k)
    # fmt: on
    return phase


def code_of_places(e: HashExtents, s: Any, band: Any) -> tirx.PrimExpr:
    """Equation 7: the code of the `band`-th of the bands whose places are in shared memory."""
    code: Any = s.places[band * e.units]
    for unit in range(1, e.units):
        code = (code << e.bits) | s.places[band * e.units + unit]
    return code
