"""Where the blocks of a block row begin and end: the first phase of kernels with explicit threads.

The state `s` of these phases has three registers: `row`, the block row; `first`, its first stored block; `count`, what
it holds, in blocks or in parts of them. `w` is the thread block's work (`device.balance`).

Loads are `ld.global`, not declared read-only: a kernel whose launch overlaps its producer kernel may read what that
has written, and the assembler keeps these loads in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

load_int = T.ptx.ld.global_.s32


def listed_row(slices: int, parts: int) -> Callable[..., Any]:
    """Reads: `order`. Writes: `row`, `first` and `count`. Barriers: none.

    After: they are those of the work's unit, of `slices` units a block row, by the list that the host made when it
    looked at the pattern; `count` in parts, `parts` a block. Nobody writes that list or the structure any more, so that
    both may be read before the producer kernel is done.
    """

    # fmt: off
    @T.inline
    def phase(s, io, w):
        load_int(s.row, io.order.ptr_to([w.unit // slices, 0]))
        load_int(s.first, io.order.ptr_to([w.unit // slices, 1]))
        load_int(s.count, io.order.ptr_to([w.unit // slices, 2]))
        s.count = (s.count - s.first) * parts
    # fmt: on
    return phase


def unlisted_row(slices: int, parts: int) -> Callable[..., Any]:
    """As `listed_row`, of a pattern that nobody has looked at: reads `indptr`, which a producer kernel may write."""

    # fmt: off
    @T.inline
    def phase(s, io, w):
        s.row = w.unit // slices
        load_int(s.first, io.indptr.ptr_to([w.unit // slices]))
        load_int(s.count, io.indptr.ptr_to([w.unit // slices + 1]))
        s.count = (s.count - s.first) * parts
    # fmt: on
    return phase
