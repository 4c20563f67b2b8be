"""What the phases of `tensor_core` share: a thread's part of its warp's tile, and the sums in shared memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ...device.balance import Work
from ...device.state import named, register
from .space import Extents


@dataclass
class TileState:
    """What a thread has of its warp's tile."""

    # Sums of all pairs of fragments, four a pair: rows `group` and `group + 8` of operand A, two columns of each.
    sums: Any
    # Operands of the steps in hand: for each step and each 8 rows of the tile the four words of one octet.
    weight: Any
    x: Any
    # The same two, as operands A and B of the instruction.
    a: Any
    b: Any
    # Block columns of the octets in hand.
    columns: Any
    # The rows of x that this lane loads.
    x_rows: Any
    # A lane loads row `group` of every 8 rows of a tile, and of every step the octet `member`, of four.
    group: Any
    member: Any
    # The tile's first row of x, and of y.
    top: Any
    # The block row, its first block, and its octets.
    row: Any
    first: Any
    count: Any
    # This lane's octet of the first step in hand, counted from the block row's begin.
    octet: Any
    # 1 if the operands of the steps in hand are loaded already.
    loaded: Any

    @classmethod
    def alloc(cls, e: Extents) -> TileState:
        # In this order measured kernels declare them: the compiler's choice of registers depends on it.
        sums = T.alloc_local([e.a_fragments * e.b_fragments * 4], "float32")
        a = T.alloc_local([e.depth * e.a_fragments * 8], "uint32")
        b = T.alloc_local([e.depth * e.b_fragments * 4], "uint32")
        weight, x = (a, b) if e.weight_is_a else (b, a)
        columns = T.alloc_local([e.depth], "int32")
        x_rows = T.alloc_local([e.tile_m // 8], "int32")
        count, first, row, loaded = (register() for _ in range(4))
        group, member, top, octet = (register() for _ in range(4))
        return named(cls(sums, weight, x, a, b, columns, x_rows, group, member, top, row, first, count, octet, loaded))


@dataclass
class SharedSums:
    """Sums in shared memory. `parts`: one tile per warp. `others`: what rank 0 of a cluster gets
    from the other ranks.
    """

    parts: Any
    others: Any

    @classmethod
    def alloc(cls, e: Extents) -> SharedSums:
        parts = T.alloc_shared([e.warps_m * e.reduce_warps, e.tile_m, e.pitch], "float32")
        others = T.alloc_shared([e.cluster - 1, e.warps_m * e.pairs, 2], "float32") if e.cluster > 1 else None
        return named(cls(parts, others))


def x_row(e: Extents, s: TileState, f: Any, g: Any, i: Any) -> Any:
    """The row in the tile, of x and of y, of the i-th sum of A's fragment f and B's fragment g."""
    return g * 8 + s.member * 2 + i % 2 if e.weight_is_a else f * 16 + i // 2 * 8 + s.group


def weight_row(e: Extents, s: TileState, f: Any, g: Any, i: Any) -> Any:
    """The row of the weight in the tile, which is the column of y, of that sum."""
    return f * 16 + i // 2 * 8 + s.group if e.weight_is_a else g * 8 + s.member * 2 + i % 2


def first_column(e: Extents, s: TileState, w: Work) -> Any:
    """The tile's first column of y."""
    return s.row * (e.slices * e.tile_n) + w.unit % e.slices * e.tile_n
