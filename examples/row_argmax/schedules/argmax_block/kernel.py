"""A thread block a row on a GPU, one read: the phases of `tvm_sparse.schedules.rows`, and three of its own.

The engine cuts the row into vectors of 16 bytes (`rows.cut`), loads them tile by tile (`rows.hold`), sums exponentials
online (`rows.sum`) and joins the sums of all threads (`rows.join`). The kernel adds three phases:

    take_best     the best element of a tile in hand
    join_best     the best key of all threads
    write_row     logsumexp and column

A key is a uint64: the bits of an element in an order (`device.selection`), above the complement of its column. So the
largest key is that of the largest element, and of equals that of the first column.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers
from tvm_sparse.schedules.rows.cut import Extents

from ..problem import RowArgmaxLogsumexp

WARP = 32
THREADS = powers(WARP, 1024)
# Vectors that a thread loads before it uses the first of them.
VECTORS = powers(1, 4)


def extents(problem: RowArgmaxLogsumexp, decisions: Decisions) -> Extents:
    """How the row is cut: one part, read once, whose elements are kept nowhere."""
    return Extents(
        writes=False,
        algorithm="online",
        dtype=problem.dtype,
        vocab=problem.vocab,
        keep="nowhere",
        cluster=1,
        threads=decisions["threads"],
        rows=1,
        vectors=decisions["vectors"],
    )


def space(problem: RowArgmaxLogsumexp, machine: Machine) -> Table:
    return {"threads": tuple(t for t in THREADS if t <= machine.max_threads), "vectors": VECTORS}


def allowed(problem: RowArgmaxLogsumexp, machine: Machine, decisions: Decisions) -> str | None:
    ext = extents(problem, decisions)
    if ext.threads > WARP and ext.threads >= 2 * ext.part:
        return f"half of {ext.threads} threads have no vector of a row of {problem.vocab}"
    if ext.vectors > 1 and ext.tile >= 2 * ext.part:
        return f"half of a tile of {ext.vectors} vectors a thread lies beyond the row"
    return None


def default(problem: RowArgmaxLogsumexp, machine: Machine) -> Decisions:
    wanted = ({"threads": t, "vectors": v} for t in (512, 256, 128, 64, WARP) for v in (4, 2, 1))
    return next(point for point in wanted if allowed(problem, machine, point) is None)


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
        from tvm.script import tirx as T

        keys = T.alloc_shared([ext.warps], "uint64")
        return cls(T.alloc_local([1], "uint32"), T.alloc_local([1], "int32"), T.alloc_local([1], "uint64"), keys)


def take_best(ext: Extents) -> Callable[..., Any]:
    """Reads: `raw`, the tile that begins with the part's vector `base`. Writes: `bits`, `at`. Barriers: none.

    After: they cover the tile. Places beyond the part hold minus infinity, which is never taken (`begin_best`).
    """
    from tvm.script import tirx as T

    from tvm_sparse.schedules.device.selection import order_bits
    from tvm_sparse.schedules.rows.hold import value

    @T.inline
    def phase(s, best, base):
        for e in T.unroll(ext.vectors * ext.width):
            bits: T.uint32 = order_bits(value(ext, s.raw, e))
            if bits > best.bits[0]:
                best.bits[0] = bits
                best.at[0] = (base + e // ext.width * ext.threads + s.t) * ext.width + e % ext.width

    return phase


def join_best(ext: Extents) -> Callable[..., Any]:
    """Reads: `bits`, `at`; `edge`, `edge_at`. Writes: `key`, `keys`. Barriers: of the warp.

    After: `keys` has the best key of each warp. A row of minus infinity alone has the key of column 0.
    """
    from tvm.script import tirx as T

    from tvm_sparse.schedules.device.selection import FULL_WARP, MINUS_INFINITY, join_key, order_bits

    @T.inline
    def phase(s, best):
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
            best.key[0] = T.max(
                best.key[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), best.key[0], 1 << b, WARP, WARP)
            )
        if s.t % WARP == 0:
            best.keys[s.t // WARP] = best.key[0]

    return phase


def write_row(ext: Extents) -> Callable[..., Any]:
    """Reads: (top, d), the row's pair; `keys`. Writes: the outputs, by one thread. Barriers: none."""
    from tvm.script import tirx as T

    from tvm_sparse.schedules.device.selection import key_index

    @T.inline
    def phase(s, best, io):
        if s.t == 0:
            for w in T.serial(ext.warps):
                best.key[0] = T.max(best.key[0], best.keys[w])
            io.indices[s.row] = T.Cast("int64", key_index(best.key[0]))
            io.values[s.row] = s.top + T.log(s.d)

    return phase


def build(problem: RowArgmaxLogsumexp, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from tvm_sparse.schedules.device.selection import MINUS_INFINITY
    from tvm_sparse.schedules.interface import gpu_program
    from tvm_sparse.schedules.rows import hold, join
    from tvm_sparse.schedules.rows import sum as sums
    from tvm_sparse.schedules.rows.state import BlockState, RowState, Views

    ext = extents(problem, decisions)
    locate, load, absorb = hold.locate(ext), hold.load_tile(ext), sums.absorb(ext)
    begin_pair, add_edge = sums.begin_pair(ext), sums.add_edge(ext)
    join_warp, join_block = join.join_warp(), join.join_block(ext)
    take, join_keys, write = take_best(ext), join_best(ext), write_row(ext)

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

        locate(s, io.logits)
        begin_pair(s)
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
        add_edge(s)

        join_keys(s, best)
        join_warp(s)
        if ext.warps > 1:
            # Its barrier makes `keys` visible, too.
            join_block(s, block)
        write(s, best, io)
    # fmt: on
    return gpu_program(problem, body)


argmax_block = Template(
    name="argmax_block",
    version=1,
    operator="row_argmax_logsumexp",
    kind="cuda",
    summary="a thread block a row, one read, by the phases of schedules/rows",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
