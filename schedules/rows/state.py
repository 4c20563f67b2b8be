"""What the phases of the row kernels share: a thread's registers, a block's shared memory, the arrays as vectors."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from .cut import Extents


@T.meta_class
class RowState:
    """What one thread holds of its row, in registers.

    (m, d) is the paper's pair: a maximum, and the sum of the exponentials of the elements less that maximum.

    Attributes
    ----------
    row, part, t
        The row's number (int64), which part of it is this block's, and which of the part's threads this is.
    raw
        A tile's vectors of this thread, as words. In a kernel that keeps the row in registers: all that it has.
    first, count
        The part's first vector, counted from the beginning of the logits (int64), and how many the part has.
    edge, edge_at
        The ragged element of this thread and its place in the row; -1 if it has none, and `edge` is minus infinity.
    m, d
        The pair of this thread's own elements. From the joins on `d` is the row's, and then what it turns into.
    top
        A maximum that is joined already: the warp's, then the row's.
    power
        The exponential or the result that has just been computed.
    scale, shift, offset
        `(raw - shift) * scale + offset` is the result, where exponentials took the place of the logits.
    factor
        What exponents of e are multiplied by to be exponents of 2, where rows have temperatures.
    tile, top_tile
        Where rows have temperatures: the number of the tile in hand, and of the tile that last raised `m`; the number
        of tiles if `m` is still the ragged element or the least finite number.
    out
        A vector of results.
    """

    def __init__(self, ext: Extents, row: Any, part: Any, t: Any) -> None:
        self.row, self.part, self.t = row, part, t
        self.raw = T.alloc_local([ext.vectors * 4], ext.word)
        self.first, self.count = T.local_scalar("int64"), T.local_scalar("int32")
        self.edge, self.edge_at = T.local_scalar("float32"), T.local_scalar("int32")
        self.m, self.d, self.top, self.power = (T.local_scalar("float32") for _ in range(4))
        if ext.writes:
            self.out = T.alloc_local([ext.width], ext.out_dtype)
        if ext.tempered:
            self.factor = T.local_scalar("float32")
            self.tile, self.top_tile = T.local_scalar("int32"), T.local_scalar("int32")
        if ext.in_place:
            self.scale, self.shift, self.offset = (T.local_scalar("float32") for _ in range(3))


@T.meta_class
class BlockState:
    """What the threads of a block share.

    Attributes
    ----------
    stage
        The words of a part's vectors, in a kernel that keeps the row in shared memory. In others it is one vector that
        nobody uses: it is launched with, so it belongs to what was measured.
    pair_m, pair_d
        The pairs of all warps of the row; those of a cluster's other blocks are put here by these blocks.
    """

    def __init__(self, ext: Extents) -> None:
        staged = ext.slices * ext.part * 4 if ext.keep == "shared" else 4
        self.stage = T.alloc_buffer([staged], ext.word, scope="shared.dyn")
        if ext.pairs > 1:
            self.pair_m = T.alloc_shared([ext.pairs], "float32")
            self.pair_d = T.alloc_shared([ext.pairs], "float32")


@T.meta_class
class Views:
    """The arrays without rows: `words` of the logits' vectors; `elements` of the probabilities."""

    def __init__(self, ext: Extents, io: Any) -> None:
        batch = T.Cast("int64", io.batch)
        words = batch * T.int64(ext.vocab) * T.int64(4) // T.int64(ext.width)
        self.words = T.decl_buffer([words], ext.word, data=io.logits.data)
        if ext.writes:
            self.elements = T.decl_buffer([T.int64(ext.vocab) * batch], ext.out_dtype, data=io.probabilities.data)
