"""Where the blocks of a block row begin and end: the first phase of kernels with explicit threads.

The phases fill `row`, a register of the state `s`, with the block row, and two registers that they are given: `first`
with its first stored block, `stop` with the block after its last. `w` is the thread block's work (`device.balance`).

Loads are `ld.global`, not declared read-only: a kernel whose launch overlaps its producer kernel may read what that
has written, and the assembler keeps these loads in their order.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

load_int = T.ptx.ld.global_.s32


# fmt: off
@phase
def listed_row(slices, /, s, io, w, first, stop):
    """Find the block row of the work's unit by the list that the host made when it looked at the pattern.

    Reads: `order`.
    Writes: `row`, `first` and `stop`.
    Barriers: none.
    After: nobody writes that list or the structure any more: both may be read before the producer kernel is done.

    `slices`: units of a block row.
    """
    load_int(s.row, io.order.ptr_to([w.unit // slices, 0]))
    load_int(first, io.order.ptr_to([w.unit // slices, 1]))
    load_int(stop, io.order.ptr_to([w.unit // slices, 2]))


@phase
def unlisted_row(slices, /, s, io, w, first, stop):
    """The same for a pattern that the host has not looked at. Reads: `indptr`, which a producer kernel may write."""
    s.row = w.unit // slices
    load_int(first, io.indptr.ptr_to([w.unit // slices]))
    load_int(stop, io.indptr.ptr_to([w.unit // slices + 1]))
# fmt: on
