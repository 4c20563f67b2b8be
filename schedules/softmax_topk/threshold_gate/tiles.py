"""Where a row lies, and how its tiles come into registers: asynchronous copies to shared memory, words, elements."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.arithmetic import LOG2_E
from ...device.overlap import CACHE_LINE, multiprocessors
from ...device.words import held_address, load_element, value_in
from ..elements import cap_elements, mask_vectors
from .layout import Layout, Tiling
from .state import address_of, column_of, folded, vector_address

# Bytes of a vector.
VECTOR = 16


def inside(tiling: Tiling, s: Any, at: Any) -> tirx.PrimExpr | bool:
    """Whether all of a thread's tile at `at` lies in the row and in this block's share of it."""
    if tiling.whole:
        return True
    last = column_of(tiling, at, (tiling.vectors - 1) * tiling.width)
    # A row that begins within a vector also ends within one.
    behind = last + (tiling.width if tiling.aligned else 2 * tiling.width) <= s.end[0]
    return behind if tiling.aligned else T.And(behind, at[0] >= 0)


def rows_beside(layout: Layout) -> tirx.PrimExpr:
    """How many rows the GPU works on at a time: the row that takes a row's place comes as many rows later."""
    return multiprocessors() * layout.beside


# fmt: off
@phase
def locate_row(layout, /, s):
    """The columns and the address of this block's share.

    Reads: the arguments. Writes: `row`, `lead`, `start`, `end`, `address`, `factor`. Barriers: none.
    """
    tiling = T.meta_var(layout.tiling)
    width = T.meta_var(tiling.width)
    s.row[0] = T.Cast("int64", s.block)
    s.lead[0] = 0 if tiling.aligned else T.Cast("int32", (s.row[0] * tiling.vocab) % width)
    s.start[0] = s.part * tiling.share * width - s.lead[0]
    s.end[0] = T.min(
        s.start[0] + tiling.share * width, (tiling.vocab + s.lead[0] + (width - 1)) // width * width - s.lead[0])
    s.factor[0] = s.io.scale * T.float32(LOG2_E)
    s.address[0] = held_address("u64", s.io.logits.ptr_to([s.row[0], 0]))


@phase
def place_tile(tiling, /, s, at, i, t):
    """Where thread t's i-th tile lies.

    Reads: `start`.
    Writes: at[0], the column of its first vector, and at[1], which serves the later ones (`column_of`).
    Barriers: none.

    The first tile takes the first chunk of a slot, but in the upper half of the slots the last one: the sample then
    holds both ends of a row that ascends or descends.
    """
    at[0] = s.start[0] + ((t // 32 * tiling.tiles + i) * 32 + t % 32) * tiling.width
    at[1] = s.start[0] + ((t // 32 * tiling.tiles + (tiling.tiles - 1) - i) * 32 + t % 32) * tiling.width
    if tiling.vectors == 1:
        if t // 32 >= (tiling.warps + 1) // 2:
            at[0] = at[1]


@phase
def start_tile(tiling, /, s, i):
    """Have the i-th tile copied into this thread's part of the ring.

    Reads: `address`, `start`, `end`.
    Writes: `ring`, asynchronously; `ahead`.
    Barriers: none; a thread reads only what it had copied itself.
    After: one more group of copies is in flight, an empty one if there is no such tile.
    """
    vectors, width = T.meta_var(tiling.vectors), T.meta_var(tiling.width)
    vocab = T.meta_var(tiling.vocab)
    if i < tiling.tiles:
        place_tile(tiling)(s, s.ahead, i, s.t)
        if tiling.aligned:
            for u in T.unroll(vectors):
                # Beyond the share: its last vector again.
                T.ptx.cp.async_.cg.shared.global_(
                    s.ring.ptr_to([(((i % tiling.stages) * vectors + u) * tiling.threads + s.t) * 4]),
                    T.Select(
                        u < tiling.inner,
                        vector_address(tiling, s.address, s.ahead, u),
                        address_of(
                            tiling, s.address, T.min(column_of(tiling, s.ahead, u * width), s.end[0] - width))),
                    VECTOR)
        elif inside(tiling, s, s.ahead):
            for u in T.unroll(vectors):
                T.ptx.cp.async_.cg.shared.global_(
                    s.ring.ptr_to([(((i % tiling.stages) * vectors + u) * tiling.threads + s.t) * 4]),
                    vector_address(tiling, s.address, s.ahead, u), VECTOR)
        else:
            for u in T.unroll(vectors):
                # Beyond the row: its last vector again, and of that only the row's elements, because the array may
                # end there.
                T.ptx.cp.async_.cg.shared.global_(
                    s.ring.ptr_to([(((i % tiling.stages) * vectors + u) * tiling.threads + s.t) * 4]),
                    address_of(
                        tiling, s.address, T.min(column_of(tiling, s.ahead, u * width), s.end[0] - width)), VECTOR,
                    T.Cast("uint32", T.min(
                        (vocab - T.min(column_of(tiling, s.ahead, u * width), s.end[0] - width)) * tiling.itemsize,
                        VECTOR)))
    T.ptx.cp.async_.commit_group()


@phase
def prefetch_tile(tiling, /, s, address):
    """Have a row's first tile brought into the L2 cache.

    Each thread asks for a line of its own and its neighbours' vectors. The row at `address` may begin at another place
    within a vector than the row that `start` and `end` belong to.

    Reads: `start`, `end`. Writes: `ahead`. Barriers: none.
    """
    place_tile(tiling)(s, s.ahead, 0, s.t)
    for u in T.unroll(tiling.vectors):
        if s.t % (CACHE_LINE // VECTOR) == u:
            T.ptx.prefetch.global_.L2(address_of(
                tiling, address, T.min(column_of(tiling, s.ahead, u * tiling.width), s.end[0] - tiling.width)))


def take_tile(layout: Layout) -> Phase:
    """The elements of the tile in hand, once it has arrived. The phase is (s, i).

    Reads: `ring`, the bias, the bitmap, `start`, `end`.
    Writes: `at`, `raw`, `x`; `top`, unless only the sample's is wanted (`Layout.dense`).
    Barriers: none.
    After: `x` is minus infinity for what is not of this block's share.
    """
    tiling, dtype = layout.tiling, layout.dtype
    vectors, stages, threads, held = tiling.vectors, tiling.stages, tiling.threads, tiling.held
    vocab, per_word = tiling.vocab, tiling.per_word
    placed, mask = place_tile(tiling), mask_vectors(vocab, tiling.width, vectors, tiling.aligned)
    cap = cap_elements(held)

    @T.inline
    def phase(s, i):
        placed(s, s.at, i, s.t)
        T.ptx.cp.async_.wait_group(stages - 1)
        for u in T.unroll(vectors):
            for v in T.vectorized(4):
                s.raw[u * 4 + v] = s.ring[(((i % stages) * vectors + u) * threads + s.t) * 4 + v]
        for e in T.unroll(held):
            s.x[e] = value_in(dtype, s.raw[e // per_word], e % per_word)
        if layout.capped:
            cap(s.io, s.x)
        if layout.bias:
            for e in T.unroll(held):
                s.x[e] = s.x[e] + load_element(
                    "float32", s.io.bias.ptr_to([T.max(T.min(column_of(tiling, s.at, e), vocab - 1), 0)]))
        if layout.masked:
            mask(s.io, s.row[0], s.x, lambda e: column_of(tiling, s.at, e))
        if not tiling.whole:
            if not inside(tiling, s, s.at):
                for e in T.unroll(held):
                    if column_of(tiling, s.at, e) >= T.min(s.end[0], vocab) or column_of(tiling, s.at, e) < 0:
                        s.x[e] = -T.infinity("float32")
        if not layout.dense:
            find_top(s, held)

    return phase


@T.inline
def find_top(s, held):
    """The largest of the tile's elements; NaN is left out.

    Reads: `x`. Writes: `top`. Barriers: none.
    """
    s.top[0] = folded(T.max, s.x, 0, held)
# fmt: on
