"""Stream compaction in TVMScript, for definitions and CPU functions. Loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.formats.bitmap import BITS


def compact(vocab: int) -> Callable[..., Any]:
    """The words of a row of a bitmap; called with (io, bitmap, at, row, s): the row `at` of `bitmap` is list `row`'s.

    Reads: the bitmap's bits below `vocab`. Writes: the list's `candidates` and `counts`; as scratch `count`.
    """

    # fmt: off
    @T.inline
    def phase(io, bitmap, at, row, s):
        s.count[0] = 0
        for j in range(vocab):
            if (T.reinterpret("uint32", bitmap[at, j // BITS]) >> T.Cast("uint32", j % BITS)) & T.uint32(1) != 0:
                if s.count[0] < io.capacity:
                    io.candidates[row, s.count[0]] = j
                s.count[0] = s.count[0] + 1
        io.counts[row] = s.count[0]
        for j in range(io.capacity):
            if j >= s.count[0]:
                io.candidates[row, j] = -1
    # fmt: on
    return phase
