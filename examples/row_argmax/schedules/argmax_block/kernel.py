"""The kernel of `argmax_block`: the phases of `tvm_sparse.schedules.rows`, and three of its own.

The engine cuts the row into vectors of 16 bytes (`rows.cut`), loads them tile by tile (`rows.hold`), sums exponentials
online (`rows.sum`) and joins the sums of all threads (`rows.join`). The kernel adds three phases:

    take_best     the best element of a tile in hand
    join_best     the best key of all threads
    write_row     logsumexp and column

A key is a uint64: the bits of an element in an order (`device.selection`), above the complement of its column. So the
largest key is that of the largest element, and of equals that of the first column.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.schedules.device.selection import FULL_WARP, MINUS_INFINITY, join_key, key_index, order_bits
from tvm_sparse.schedules.interface import gpu_program
from tvm_sparse.schedules.rows import hold, join
from tvm_sparse.schedules.rows import sum as sums
from tvm_sparse.schedules.rows.cut import Extents
from tvm_sparse.schedules.rows.state import BlockState, RowState, Views

from ...problem import RowArgmaxLogsumexp
from .space import WARP, extents


@dataclass
class Best:
    """The row's largest element, as far as a thread knows it.

    `bits`, `at`: ordered bits of the thread's best element so far, and its column, counted from the first whole vector.
    `key`: a key. `keys`: the best key of each warp, in shared memory.
    """

    bits: Any
    at: Any
    key: Any
    keys: Any

    @classmethod
    def alloc(cls, ext: Extents) -> Best:
        keys = T.alloc_shared([ext.warps], "uint64")
        return cls(T.alloc_local([1], "uint32"), T.alloc_local([1], "int32"), T.alloc_local([1], "uint64"), keys)


@phase
def take_best(ext, /, s, best, base):
    """Reads: `raw`, the tile that begins with the part's vector `base`. Writes: `bits`, `at`. Barriers: none.

    After: they cover the tile. Places beyond the part hold minus infinity, which is never taken.
    """
    for e in T.unroll(ext.vectors * ext.width):
        bits: T.uint32 = order_bits(hold.value(ext, s.raw, e))
        if bits > best.bits[0]:
            best.bits[0] = bits
            best.at[0] = (base + e // ext.width * ext.threads + s.t) * ext.width + e % ext.width


@phase
def join_best(ext, /, s, best):
    """Reads: `bits`, `at`; `edge`, `edge_at`. Writes: `key`, `keys`. Barriers: of the warp.

    After: `keys` has the best key of each warp. A row of minus infinity alone has the key of column 0.
    """
    # Columns of the row that are before its first whole vector.
    before: T.int32 = T.Cast("int32", s.first * T.int64(ext.width) - s.row * T.int64(ext.vocab))
    best.key[0] = T.Select(
        best.bits[0] == T.uint32(MINUS_INFINITY),
        join_key(best.bits[0], 0),
        join_key(best.bits[0], before + best.at[0]),
    )
    if ext.ragged:
        if s.edge_at >= 0 and order_bits(s.edge) > T.uint32(MINUS_INFINITY):
            best.key[0] = T.max(best.key[0], join_key(order_bits(s.edge), s.edge_at))
    for b in T.unroll(5):
        best.key[0] = T.max(best.key[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), best.key[0], 1 << b, WARP, WARP))
    if s.t % WARP == 0:
        best.keys[s.t // WARP] = best.key[0]


@phase
def write_row(ext, /, s, best, io):
    """Reads: (top, d), the row's pair; `keys`. Writes: the outputs, by one thread. Barriers: none."""
    if s.t == 0:
        for w in T.serial(ext.warps):
            best.key[0] = T.max(best.key[0], best.keys[w])
        io.indices[s.row] = T.Cast("int64", key_index(best.key[0]))
        io.values[s.row] = s.top + T.log(s.d)


def program(problem: RowArgmaxLogsumexp, decisions: Decisions) -> Program:
    """The program of a point."""
    ext = extents(problem, decisions)
    load, take, absorb = hold.load_tile(ext), take_best(ext), sums.absorb(ext)

    # fmt: off
    @T.inline
    def body(io):
        T.device_entry()
        row = T.cta_id([io.batch])
        t = T.thread_id([ext.threads])
        block = BlockState(ext)
        views = Views(ext, io)
        s = RowState(ext, T.Cast("int64", row), 0, t)
        best = T.meta_var(Best.alloc(ext))

        hold.locate(ext)(s, io.logits)
        sums.begin_pair(ext)(s)
        best.bits[0] = T.uint32(MINUS_INFINITY)
        best.at[0] = 0
        for i in T.serial(ext.full_tiles):
            load(s, views.words, i * ext.tile, ext.vectors)
            take(s, best, i * ext.tile)
            absorb(s, None)
        for i in T.serial(ext.other_tiles):
            load(s, views.words, (ext.full_tiles + i) * ext.tile, 0)
            take(s, best, (ext.full_tiles + i) * ext.tile)
            absorb(s, None)
        sums.add_edge(ext)(s)

        join_best(ext)(s, best)
        join.join_warp(s)
        if ext.warps > 1:
            # Its barrier makes `keys` visible, too.
            join.join_block(ext)(s, block)
        write_row(ext)(s, best, io)
    # fmt: on
    return gpu_program(problem, body)
