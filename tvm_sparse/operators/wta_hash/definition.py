"""Equations 5 and 7 in TVMScript, for definitions and CPU functions. Loads the compiler."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.formats.wta import index_bits


@phase
def hash_code(k, units, element, /, io, row, band, s):
    """Compute a band code. `element(io, row, column)` is an element of the row.

    Reads: the row, the band's permutations.
    Writes: `code`; as scratch `place`, `best` and `value`.

    A comparison with NaN is false, and the first value is -inf: NaN counts as -inf.
    """
    # fmt: off
    s.code[0] = 0
    for u in range(units):
        s.best[0] = T.float32("-inf")
        s.place[0] = 0
        for j in range(k):
            s.value[0] = T.Cast("float32", element(io, row, T.Cast("int32", io.permutations[band, u, j])))
            if s.value[0] > s.best[0]:
                s.best[0] = s.value[0]
                s.place[0] = j
        s.code[0] = (s.code[0] << index_bits(k)) | s.place[0]
