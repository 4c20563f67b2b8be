"""Where the blocks of a block row begin and end: the first phase of kernels with explicit threads.

The phases fill three registers that they are given: `row`, the block row; `first`, its first stored block; `stop`, the
block after its last. `w` is the thread block's work (`device.balance`).

Loads are `ld.global`, not declared read-only: a kernel whose launch overlaps its producer kernel may read what that
has written, and the assembler keeps these loads in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

load_int = T.ptx.ld.global_.s32


def listed_row(slices: int) -> Callable[..., Any]:
    """Reads: `order`. Writes: `row`, `first` and `stop`. Barriers: none.

    After: they are those of the work's unit, of `slices` units a block row, by the list that the host made when it
    looked at the pattern. Nobody writes that list or the structure any more: both may be read before the producer
    kernel is done.
    """

    # fmt: off
    @T.inline
    def phase(io, w, row, first, stop):
        load_int(row, io.order.ptr_to([w.unit // slices, 0]))
        load_int(first, io.order.ptr_to([w.unit // slices, 1]))
        load_int(stop, io.order.ptr_to([w.unit // slices, 2]))
    # fmt: on
    return phase


def unlisted_row(slices: int) -> Callable[..., Any]:
    """As `listed_row`, of a pattern that nobody has looked at: reads `indptr`, which a producer kernel may write."""

    # fmt: off
    @T.inline
    def phase(io, w, row, first, stop):
        row = w.unit // slices
        load_int(first, io.indptr.ptr_to([w.unit // slices]))
        load_int(stop, io.indptr.ptr_to([w.unit // slices + 1]))
    # fmt: on
    return phase
