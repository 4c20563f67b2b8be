"""A row's band codes: the row into shared memory, and the places of its units.

A thread may hold the columns of some units (`ahead`), `threads` units apart, so that it waits for memory once for all
of them.

32 lanes that read elements at random from the 32 banks of shared memory mostly wait for three or four of them that want
the same bank. Elements may have copies in different banks (`copies`): with 16 of them only two lanes share banks.

Phases are called with a state that has the buffers which their heads name: `row` (`hidden * copies` float32, shared),
`places` (one int32 a unit, shared), and in registers `raw` (`vectors * vector_words` uint32), `columns` (`ahead *
column_loads * column_words` uint32), `vector` (`vec` float32), `small` (one uint16), `unit` (int32), `place` (`ahead`
int32), `best` (as many float32), `value` (float32).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ..device.arithmetic import is_nan
from ..device.state import in_vectors
from ..device.words import load_words, value_at
from .extents import BANKS, HashExtents

Phase = Callable[..., Any]


# fmt: off
@phase
def stage_row(e, /, s, hidden, first, t):
    """A row into shared memory, NaN as -inf, `hidden` being a flat buffer of rows.

    Reads: `e.hidden` elements from `hidden[first]` on. Writes: `row`; as scratch `raw`, `small`, `value`, `vector`.
    Barriers: none; one has to follow.
    """
    wide, apart = T.meta_var(min(e.vec, 4)), T.meta_var(max(1, BANKS // e.copies))
    for n in T.serial(ceildiv(e.hidden // e.vec, e.threads * e.vectors)):
        for u in T.unroll(e.vectors):
            if ((n * e.vectors + u) * e.threads + t) * e.vec < e.hidden:
                load_words(e.vector_bytes, s.raw, u * e.vector_words, s.small, hidden.ptr_to(
                    [first + ((n * e.vectors + u) * e.threads + t) * e.vec]))
        for u in T.unroll(e.vectors):
            if ((n * e.vectors + u) * e.threads + t) * e.vec < e.hidden:
                for v in T.unroll(e.vec):
                    s.value = value_at(e.dtype, s.raw, u * e.vector_words, v)
                    s.vector[v] = T.Select(is_nan(s.value), T.float32("-inf"), s.value)
                if e.copies > 1:
                    for v in T.unroll(e.vec):
                        element: T.let = ((n * e.vectors + u) * e.threads + t) * e.vec + v
                        # In turn, so that the lanes of a warp write to different banks.
                        for q in T.unroll(e.copies):
                            s.row[element * e.copies + (q + element // apart) % e.copies] = s.vector[v]
                else:
                    row = T.meta_var(in_vectors(s.row, wide))
                    for q in T.unroll(e.vec // wide):
                        for v in T.vectorized(wide):
                            row[((n * e.vectors + u) * e.threads + t) * e.vec + q * wide + v] = (
                                s.vector[q * wide + v])


@phase
def load_columns(e, /, s, permutations, at, a):
    """The next columns of a unit: from element `at` of the flat buffer on, as those of
    the `a`-th unit that the thread holds.

    Reads: permutations. Writes: `columns`, `small`. Barriers: none.
    """
    for u in T.unroll(e.column_loads):
        load_words(e.column_bytes, s.columns, (a * e.column_loads + u) * e.column_words, s.small,
                   permutations.ptr_to([at + u * (e.column_bytes // 2)]))


@phase
def load_further_columns(e, /, s, permutations, at, unit, count):
    """The next columns of the thread's further units, of `count` units in all, `at` and `unit` being those of the first
    unit.
    """
    if e.ahead > 1:
        for a in T.unroll(e.ahead - 1):
            if unit + (a + 1) * e.threads < count:
                load_columns(e)(s, permutations, at + (a + 1) * e.threads * e.k, a + 1)


def column(e: HashExtents, s: Any, c: Any) -> tirx.PrimExpr:
    """The `c`-th of the columns that a thread holds; each unit has `held`."""
    if e.column_bytes == 2:
        return T.Cast("int32", s.columns[c])
    return T.Cast("int32", (s.columns[c // 2] >> T.Cast("uint32", c % 2 * 16)) & T.uint32(0xFFFF))


@phase
def compare(e, /, s, step, a, t):
    """Take the larger of the best element so far and those in hand of unit `a`, with its place."""
    for c in T.unroll(e.held):
        s.value = s.row[column(e, s, a * e.held + c) * e.copies + t % e.copies]
        if s.value > s.best[a]:
            s.best[a] = s.value
            s.place[a] = step * e.held + c


@phase
def find_places(e, /, s, permutations, first, count, t):
    """The places of some units.

    The columns of a thread's first units are in `columns` already (`load_first_columns`).

    Reads: `row`, `columns`, the permutations of `count` units from `first` on.
    Writes: `places[0]` to `places[count - 1]`; as scratch `columns`, `unit`, `place`, `best`, `value`.
    Barriers: none; one has to come before and one has to follow.
    """
    load, load_further = T.meta_var(load_columns(e)), T.meta_var(load_further_columns(e))
    s.unit = t
    while s.unit < count:
        for q in T.unroll(e.ahead):
            s.best[q] = T.float32("-inf")
            s.place[q] = 0
        for step in T.serial(e.k // e.held):
            if step > 0:
                load(s, permutations, (first + s.unit) * e.k + step * e.held, 0)
                load_further(s, permutations, (first + s.unit) * e.k + step * e.held, s.unit, count)
            compare(e)(s, step, 0, t)
            if e.ahead > 1:
                for a in T.unroll(e.ahead - 1):
                    if s.unit + (a + 1) * e.threads < count:
                        compare(e)(s, step, a + 1, t)
        s.places[s.unit] = s.place[0]
        if e.ahead > 1:
            for a in T.unroll(e.ahead - 1):
                if s.unit + (a + 1) * e.threads < count:
                    s.places[s.unit + (a + 1) * e.threads] = s.place[a + 1]
        s.unit = s.unit + e.ahead * e.threads
        if s.unit < count:
            load(s, permutations, (first + s.unit) * e.k, 0)
            load_further(s, permutations, (first + s.unit) * e.k, s.unit, count)


@phase
def load_first_columns(e, /, s, permutations, first, count, t):
    """The columns of a thread's first units, which need nothing of the row as `find_places` is.

    Reads: permutations. Writes: `columns`. Barriers: none.
    """
    if t < count:
        load_columns(e)(s, permutations, (first + t) * e.k, 0)
        load_further_columns(e)(s, permutations, (first + t) * e.k, t, count)
# fmt: on


def code_of_places(e: HashExtents, s: Any, band: Any) -> tirx.PrimExpr:
    """Equation 7: the code of the `band`-th of the bands whose places are in shared memory."""
    code: Any = s.places[band * e.units]
    for unit in range(1, e.units):
        code = (code << e.bits) | s.places[band * e.units + unit]
    return code
