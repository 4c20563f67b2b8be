"""Equations 5 and 7 in TVMScript, for definitions and CPU functions. Loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.formats.wta import index_bits


def hash_code(k: int, units: int, element: Callable[..., tirx.PrimExpr]) -> Callable[..., Any]:
    """Compute a band code; called with (io, row, band, s). `element(io, row, column)` is an element of the row.

    Reads: the row, the band's permutations.
    Writes: `code`; as scratch `place`, `best` and `value`.

    A comparison with NaN is false, and the first value is -inf: NaN counts as -inf.
    """
    bits = index_bits(k)

    # fmt: off
    @T.inline
    def phase(io, row, band, s):
        s.code[0] = 0
        for u in range(units):
            s.best[0] = T.float32("-inf")
            s.place[0] = 0
            for j in range(k):
                s.value[0] = T.Cast("float32", element(io, row, T.Cast("int32", io.permutations[band, u, j])))
                if s.value[0] > s.best[0]:
                    s.best[0] = s.value[0]
                    s.place[0] = j
            s.code[0] = (s.code[0] << bits) | s.place[0]
    # fmt: on
    return phase
