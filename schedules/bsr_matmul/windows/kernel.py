"""The kernel of `windows`, in phases; the package's docstring says what it does, and why.

    begin           mbarriers

The producer warps, after the others of a thread block,

    find_rows       where block rows begin and end
    agree           the next panel
    bring_x         copies of x
    take_row        which blocks of a block row come, and the list of them
    bring_row       copies of these blocks

the warpgroups,

    multiply_row    the products of a block row's blocks

and after a barrier those of `warpgroups` that store a tile of y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import Program
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from ...device import operands
from ...device.loops import rolled
from ...device.mbarriers import arrive_copied, arrive_expecting, await_phase
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.selection import FULL_WARP
from ...device.stages import begin_stages, hand_back, next_stage
from ...device.state import Buffers, local, pooled, scalar
from ...device.tensor_maps import copy_box, describe, tensor_map
from ...device.words import held_address
from ..block_row import load_int
from ..interface import gpu_program
from ..warpgroups.kernel import FAR, pass_tile, store_tile
from .space import BOX, STEP, STEP_BYTES, Extents

# The number of a hardware barrier, of the producer warps; that of the thread block is 0.
PRODUCERS = 1
copy_vector = T.ptx.cp.async_.cg.shared.global_


@dataclass
class State(Buffers):
    """What the phases share.

    Attributes
    ----------
    t, lane, warp
        The thread, its place in its warp, and that in the thread block.
    part
        The warpgroup, or that of the producer warp.
    tile, top
        The tile of block rows, and the first row of x.
    x_map
        Address of the tensor map.
    slot, turn, left
        As `device.stages` says.
    done
        Whether a phase is over.
    at, stop
        A block row's next block, and the one after its last.
    ahead
        The block column of the lane's one of a row's next 32 blocks; FAR if there is none.
    before
        That of the lane before.
    base, limit
        The first column of the panel in hand, in boxes of x; and the first block column after the panel.
    parity
        Which half of `nearest` the next panel uses.
    used, fit
        Blocks of a warp in a stage; and the lanes whose block comes next, a bit each.
    many
        Blocks of each of the part's block rows in the stage in hand; at first the block rows themselves.
    sums
        Sums of the warpgroup's tile: a thread has `rows // 2` for each block row.
    more
        Whether there is another stage.
    place, next
        Where a block stands in the stage's list, and its entry.
    panel_of, panel_at, block_at, a
        Low halves of descriptors: of x in the first stage and in the stage in hand, of the block, and of its columns of
        x.
    words
        A vector of y.
    ring
        Shared: the stages, each a panel of x, and room for blocks of each part.
    stored
        Shared, in the same place: a tile of y.
    full, empty
        Shared: mbarriers of stages that have come, and that all warps have multiplied.
    counts, listed
        Shared: of each stage how many blocks each row has, -1 after the last panel; and for each part's blocks where
        their columns of x lie, in units of operands.
    nearest
        Shared: each part's next block column, of two panels in turn.
    row_of
        Shared: the thread block's block rows, -1 beyond the last.
    """

    t: Any
    lane: Any
    warp: Any
    tile: Any
    top: Any
    x_map: Any
    part: Any = scalar()
    slot: Any = scalar()
    turn: Any = scalar("uint32")
    left: Any = scalar()
    done: Any = local("uint32")
    at: Any = local("int32", lambda e: e.rows_each)
    stop: Any = local("int32", lambda e: e.rows_each)
    ahead: Any = local("int32", lambda e: e.rows_each)
    before: Any = scalar()
    base: Any = scalar()
    limit: Any = scalar()
    parity: Any = scalar()
    used: Any = scalar()
    fit: Any = scalar("uint32")
    more: Any = scalar()
    many: Any = local("int32", lambda e: e.rows_each)
    sums: Any = local("float32", lambda e: e.tile_n // 2)
    place: Any = scalar()
    next: Any = scalar("uint32")
    panel_of: Any = local("uint32")
    panel_at: Any = scalar("uint32")
    block_at: Any = scalar("uint32")
    a: Any = scalar("uint32")
    words: Any = local("uint32", 4)
    ring: Any = pooled("uint32", lambda e: e.barriers_at // 4, 0)
    stored: Any = pooled("uint32", lambda e: e.stored_bytes // 4, 0)
    full: Any = pooled("uint64", lambda e: e.stages, lambda e: e.barriers_at // 8)
    empty: Any = pooled("uint64", lambda e: e.stages, lambda e: e.barriers_at // 8 + e.stages)
    counts: Any = pooled("int32", lambda e: e.stages * e.block_rows_each, lambda e: e.words_at // 4)
    listed: Any = pooled("uint32", lambda e: e.stages * e.tiles * e.list_words, lambda e: e.listed_at // 4)
    nearest: Any = pooled("int32", lambda e: 2 * e.tiles, lambda e: e.nearest_at // 4)
    row_of: Any = pooled("int32", lambda e: e.block_rows_each, lambda e: e.nearest_at // 4 + 2 * e.tiles)


# fmt: off
def begin(e: Extents) -> Callable[..., Any]:
    """Make the mbarriers; the phase is (s).

    Reads: nothing. Writes: `full`, `empty`, `slot`, `turn`. Barriers: of the thread block, at the end.
    """
    make = begin_stages(e.stages, 4 * e.tiles, e.arrivals)

    @T.inline
    def phase(s):
        if s.t == 0:
            T.ptx.prefetch.tensormap(s.x_map)
            make(s)
        s.slot = 0
        s.turn = T.uint32(0)
        T.cuda.cta_sync()

    return phase


def look_ahead(e: Extents) -> Callable[..., Any]:
    """Load the columns of a row's next 32 blocks; the phase is (io, s, u). Reads: `indices`. Writes: `ahead`."""

    @T.inline
    def phase(io, s, u):
        s.ahead[u] = FAR
        if s.at[u] + s.lane < s.stop[u]:
            load_int(s.ahead[u], io.indices.ptr_to([s.at[u] + s.lane]))

    return phase


def find_rows(e: Extents) -> Callable[..., Any]:
    """Find the part's block rows; the phase is (io, s).

    Block rows in the order of their lengths are cut into stretches. A thread block takes the n-th from the front of one
    and from the back of the next, and each of its parts takes every `tiles`-th: all have about as many blocks.

    Reads: `order`, or `indptr` where the host has not looked at the pattern; `indices`.
    Writes: `at`, `stop`, `ahead`; `row_of`. Barriers: none.
    """
    look = look_ahead(e)

    @T.inline
    def phase(io, s):
        for u in T.unroll(e.rows_each):
            stretch: T.int32 = u * e.tiles + s.part
            row: T.int32 = stretch * e.tiles_n + T.Select(stretch % 2 == 0, s.tile, e.tiles_n - 1 - s.tile)
            s.many[u] = -1
            s.at[u] = 0
            s.stop[u] = 0
            if row < e.block_rows:
                if io.long >= 0:
                    load_int(s.many[u], io.order.ptr_to([row, 0]))
                    load_int(s.at[u], io.order.ptr_to([row, 1]))
                    load_int(s.stop[u], io.order.ptr_to([row, 2]))
                else:
                    s.many[u] = row
                    load_int(s.at[u], io.indptr.ptr_to([row]))
                    load_int(s.stop[u], io.indptr.ptr_to([row + 1]))
        for u in T.unroll(e.rows_each):
            look(io, s, u)
        if s.lane == 0:
            for u in T.unroll(e.rows_each):
                s.row_of[s.part * e.rows_each + u] = s.many[u]

    return phase


def agree(e: Extents) -> Callable[..., Any]:
    """Find the first panel in which any block row has its next block; the phase is (s).

    Reads: `ahead` of lane 0, of all parts. Writes: `nearest`; `base`, `limit`, `parity`.
    Barriers: of the producer warps.
    After: `base` is FAR if there are no more blocks.
    """

    @T.inline
    def phase(s):
        s.base = s.ahead[0]
        for u in T.unroll(e.rows_each - 1):
            s.base = T.min(s.base, s.ahead[u + 1])
        if s.lane == 0:
            s.nearest[s.parity * e.tiles + s.part] = s.base
        T.ptx.bar.sync(T.uint32(PRODUCERS), T.uint32(32 * e.tiles))
        s.base = s.nearest[s.parity * e.tiles]
        for q in T.unroll(e.tiles - 1):
            s.base = T.min(s.base, s.nearest[s.parity * e.tiles + q + 1])
        s.parity = 1 - s.parity
        if s.base != FAR:
            s.base = s.base * e.cols // BOX
            s.limit = (s.base * BOX + e.panel) // e.cols

    return phase


def bring_x(e: Extents) -> Callable[..., Any]:
    """Have a panel of x brought, a box after the other; the phase is (s), for one thread.

    Reads: `base`. Writes: `ring`, by and by: zeros beyond k and m. Barriers: has copies arrive at `full`.
    """

    @T.inline
    def phase(s):
        full = T.meta_var(s.full.ptr_to([s.slot]))
        arrive_expecting(full, T.uint32(e.x_bytes))
        for i in T.unroll(e.panel // BOX):
            copy_box(
                s.ring.ptr_to([s.slot * (e.stage_bytes // 4) + i * (e.box_bytes // 4)]), s.x_map,
                (s.base + i) * BOX, s.top, full)

    return phase


def take_row(e: Extents) -> Callable[..., Any]:
    """Take the blocks of a row that come next and lie in the panel, as far as there is room; the phase is (io, s, u).

    Reads: `ahead`, `limit`. Writes: `many`, `counts`, `listed`, `used`; moves `at` and `ahead` on.
    Barriers: none, but all lanes of the warp take part.
    """
    look = look_ahead(e)

    def unit_of(s: Any, u: Any) -> Any:
        """Where a block's columns of x lie in the panel, in units."""
        column = s.ahead[u] * e.cols - s.base * BOX
        return T.Cast("uint32", column // BOX * (e.box_bytes // operands.UNIT) + column % BOX * 2 // operands.UNIT)

    @T.inline
    def phase(io, s, u):
        s.before = T.tvm_warp_shuffle_up(T.uint32(FULL_WARP), s.ahead[u], 1, 32, 32)
        s.fit = T.cuda.ballot_sync(
            T.uint32(FULL_WARP),
            T.And(s.ahead[u] < s.limit, T.Or(s.lane == 0, s.ahead[u] > s.before)))
        # Lanes before the first that does not.
        s.many[u] = T.min(
            T.Cast("int32", T.popcount(s.fit & T.bitwise_not(s.fit + T.uint32(1)))), e.room - s.used)
        if s.lane < s.many[u]:
            s.listed[(s.slot * e.tiles + s.part) * e.list_words + s.used + s.lane] = unit_of(s, u)
        if s.lane == 0:
            s.counts[s.slot * e.block_rows_each + s.part * e.rows_each + u] = s.many[u]
        s.used = s.used + s.many[u]
        if s.many[u] > 0:
            s.at[u] = s.at[u] + s.many[u]
            look(io, s, u)

    return phase


def bring_row(e: Extents) -> Callable[..., Any]:
    """Have the blocks of a row brought that were taken; the phase is (io, s, u).

    Reads: `many`, `at`. Writes: `ring`, by and by; moves `used` on. Barriers: none.
    """
    vectors = e.cols // 8  # of a row of a block

    def place_of(row: Any, vector: Any) -> Any:
        """The byte at which a vector of a block's row lies: steps of 16 columns one after another, of which every
        eight rows are swizzled by their 32 bytes."""
        half = T.bitwise_xor(vector % 2, row // 4 % 2)
        return vector // 2 * (e.rows * STEP_BYTES) + row * STEP_BYTES + half * operands.UNIT

    @T.inline
    def copy_block(io, s, block):
        for i in T.unroll((e.rows * vectors + 31) // 32):
            v: T.int32 = i * 32 + s.lane
            if v < e.rows * vectors:
                copy_vector(
                    s.ring.ptr_to([
                        s.slot * (e.stage_bytes // 4) + e.x_bytes // 4
                        + (s.part * e.room + s.used) * (e.block_bytes // 4)
                        + place_of(v // vectors, v % vectors) // 4]),
                    io.data.ptr_to([block, v // vectors, v % vectors * 8]), operands.UNIT, T.uint32(operands.UNIT))

    @T.inline
    def phase(io, s, u):
        for b in rolled(s.many[u]):
            copy_block(io, s, s.at[u] - s.many[u] + b)
            s.used = s.used + 1

    return phase


def produce(e: Extents) -> Callable[..., Any]:
    """A producer warp's work; the phase is (io, s).

    Reads: the structure.
    Writes: `ring`, `counts` and `listed`, stage after stage.
    Barriers: those of `agree`; awaits `empty`, and arrives at `full`, as its copies do.
    """
    do = SimpleNamespace(
        find_rows=find_rows(e), agree=agree(e), bring_x=bring_x(e), take_row=take_row(e),
        bring_row=bring_row(e), next_stage=next_stage(e.stages))

    @T.inline
    def hand_over(s):
        arrive_copied(s.full.ptr_to([s.slot]))
        T.cuda.warp_sync()
        if s.lane == 0:
            arrive_expecting(s.full.ptr_to([s.slot]), T.uint32(0))

    @T.inline
    def phase(io, s):
        s.parity = 0
        do.find_rows(io, s)
        do.agree(s)
        while s.base != FAR:
            await_phase(s.done, s.empty.ptr_to([s.slot]), s.turn ^ T.uint32(1))
            if s.part == 0:
                if s.lane == 0:
                    do.bring_x(s)
            s.used = 0
            for u in T.unroll(e.rows_each):
                do.take_row(io, s, u)
            s.used = 0
            # The columns of later blocks come meanwhile.
            for u in T.unroll(e.rows_each):
                do.bring_row(io, s, u)
            hand_over(s)
            do.next_stage(s)
            do.agree(s)
        await_phase(s.done, s.empty.ptr_to([s.slot]), s.turn ^ T.uint32(1))
        if s.lane == 0:
            s.counts[s.slot * e.block_rows_each + s.part * e.rows_each] = -1
            if s.part == 0:
                arrive_expecting(s.full.ptr_to([s.slot]), T.uint32(0))
        hand_over(s)

    return phase


def multiply_row(e: Extents) -> Callable[..., Any]:
    """The products of a block row's blocks in the stage in hand; the phase is (s, u).

    Reads: `many`, `listed`; `ring`, until the products are awaited.
    Writes: adds the products to `sums`, by and by; moves `place`, `next` and `block_at` on.
    Barriers: none, but all warps of a warpgroup take part.
    """
    mma, sums = operands.product(e.dtype, e.rows), e.rows // 2

    def of_step(s: Any, u: Any, step: Any) -> Any:
        a = step * STEP // BOX * (e.box_bytes // operands.UNIT) + step * STEP % BOX * 2 // operands.UNIT
        b = step * (e.rows * STEP_BYTES // operands.UNIT)
        return mma(
            *(s.sums[u * sums + j] for j in range(sums)),
            operands.swizzled(s.a + T.Cast("uint32", a), BOX * 2),
            operands.swizzled(s.block_at + T.Cast("uint32", b), STEP_BYTES), T.bool(True), 1, 1, 0, 0)

    @T.inline
    def phase(s, u):
        for _ in rolled(s.many[u]):
            s.a = s.panel_at + s.next
            s.place = s.place + 1
            s.next = s.listed[s.place]
            # A group for each block: a loop within a group would make the assembler wait for each instruction.
            operands.fence()
            for step in T.unroll(e.cols // STEP):
                of_step(s, u, step)
            operands.commit()
            s.block_at = s.block_at + T.uint32(e.block_bytes // operands.UNIT)

    return phase


def consume(e: Extents) -> Callable[..., Any]:
    """The work of a warpgroup, the phase is (s).

    Reads: `ring`, `counts`, `listed`.
    Writes: `sums`.
    Barriers: of the warp; awaits `full`, and arrives at `empty`.
    After: all products are in `sums`.
    """
    multiply, give, advance = multiply_row(e), hand_back(), next_stage(e.stages)

    @T.inline
    def phase(s):
        start = T.meta_var(held_address("u32", T.cuda.cvta_generic_to_shared(s.ring.ptr_to([0]))))
        s.panel_of[0] = operands.place_of(start)
        for j in T.unroll(e.tile_n // 2):
            s.sums[j] = T.float32(0)
        s.left = -1
        s.more = 1
        while s.more != 0:
            await_phase(s.done, s.full.ptr_to([s.slot]), s.turn)
            # Blocks were written by threads, and tensor cores read them.
            T.ptx.fence.proxy.async_.shared__cta()
            for u in T.unroll(e.rows_each):
                s.many[u] = s.counts[s.slot * e.block_rows_each + s.part * e.rows_each + u]
            if s.many[0] < 0:
                s.more = 0
            else:
                s.panel_at = s.panel_of[0] + T.Cast("uint32", s.slot * (e.stage_bytes // operands.UNIT))
                s.block_at = s.panel_at + T.Cast(
                    "uint32", e.x_bytes // operands.UNIT + s.part * (e.room * e.block_bytes // operands.UNIT))
                s.place = (s.slot * e.tiles + s.part) * e.list_words
                s.next = s.listed[s.place]
                s.used = s.place
                multiply(s, 0)
                # The products of one block may be in flight, which has to be one of this stage.
                if s.place == s.used:
                    operands.wait(0)
                else:
                    operands.wait(1)
                if s.left >= 0:
                    give(s)
                s.left = s.slot
                for u in T.unroll(e.rows_each - 1):
                    multiply(s, u + 1)
                advance(s)
        operands.wait(0)

    return phase


def kernel(problem: BsrMatmul, e: Extents) -> Program:
    """The program of a point."""

    def corner(s: Any) -> tuple[Any, Any]:
        return s.warp % 4 * 16, s.warp // 4 * e.rows_each

    do = SimpleNamespace(
        begin=begin(e), produce=produce(e), consume=consume(e), pass_tile=pass_tile(e, corner),
        store_tile=store_tile(e, corner))

    @T.inline
    def body(io):
        x_map = T.meta_var(tensor_map("x_map"))
        T.evaluate(describe(x_map, io.x.ptr_to([0, 0]), e.dtype, (io.m, e.k), (e.tile_m, BOX)))
        with device_region():
            strips = T.meta_var((io.m + (e.tile_m - 1)) // e.tile_m)
            place = T.cta_id([e.tiles_n * strips])
            t = T.thread_id([e.threads])
            s = T.meta_var(State.alloc(
                e, e.pool_bytes, t=t, lane=t % 32, warp=t // 32, tile=place % e.tiles_n,
                top=place // e.tiles_n * e.tile_m, x_map=T.address_of(x_map)))
            do.begin(s)
            if e.overlap > 0:
                wait_then_start_consumer()
            if s.warp >= e.tiles * 4:
                s.part = s.warp - e.tiles * 4
                do.produce(io, s)
            else:
                s.part = s.warp // 4
                do.consume(s)
            # All stages have been multiplied, and `row_of` is there.
            T.cuda.cta_sync()
            if s.warp < e.tiles * 4:
                do.pass_tile(io, s)
                do.store_tile(io, s)

    return gpu_program(problem, body, overlapped=e.overlap > 0)
# fmt: on
