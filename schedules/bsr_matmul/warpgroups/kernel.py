"""The kernel of `warpgroups`, in phases; the package's docstring says what it does, and why.

    begin           mbarriers, and where the tile is

The producer warps, after the others of a thread block,

    find_rows       where a lane's block row begins and ends
    next_panel      the next panel, and which block rows have a block in it
    bring_panel     copies of x and of the blocks
    end_panels      tells the others that there are no more

the warpgroups,

    multiply_panel  the products of a stage, whose room they hand back
    pass_tile       a tile of y, to shared memory

and these after a barrier,

    store_tile      from there to y
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from ...device import operands
from ...device.mbarriers import arrive_expecting, await_phase
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.selection import FULL_WARP
from ...device.stages import begin_stages, hand_back, next_stage
from ...device.state import Buffers, local, pooled, scalar
from ...device.tensor_maps import copy_box, describe, tensor_map
from ...device.words import held_address
from ..block_row import load_int
from ..interface import gpu_program, output
from .space import GROUP_M, Extents

least_of_warp = T.ptx.redux_sync.min.s32
# The column of a lane that has no more blocks; and the word of the stage after the last panel.
FAR, OVER = 0x7FFFFFFF, 0x80000000


@dataclass
class State(Buffers):
    """What the phases share."""

    # The thread, its place in its warp, and that in the thread block.
    t: Any
    lane: Any
    warp: Any
    # The tile of block rows, and the first row of x.
    tile: Any
    top: Any
    # Addresses of the tensor maps.
    x_map: Any
    weight_map: Any
    # The stage in hand, and the parity of its mbarriers' phase.
    slot: Any = scalar()
    turn: Any = scalar("uint32")
    # Whether a phase is over.
    done: Any = local("uint32")
    # The lane's block, and the one after the last of its row.
    at: Any = local("int32")
    stop: Any = local("int32")
    # Block columns of it and of the block after it; FAR if there is none.
    column: Any = local("int32")
    next_column: Any = local("int32")
    # Where `data` has these blocks, and those of the panel, if they are transposed.
    at_place: Any = local("int32", when=lambda e: e.turned)
    next_place: Any = local("int32", when=lambda e: e.turned)
    places: Any = local("int32", lambda e: e.beside, when=lambda e: e.turned)
    # The panel in hand: its first block column, divided by `beside`.
    base: Any = local("int32")
    # The lane's first block in the panel, and which of its block columns it has: a bit each.
    first: Any = scalar()
    mine: Any = scalar("uint32")
    # Whether a lane has a block, and that of all lanes.
    has: Any = scalar("bool")
    word: Any = local("uint32", lambda e: e.beside)
    # Blocks of the thread block in the panel.
    count: Any = scalar("uint32")
    # How many producer warps have their turn before this one.
    whose: Any = scalar(when=lambda e: e.producers > 1)
    # Sums of the warpgroup's 64 rows of x: a thread has `rows // 2` for each block row.
    sums: Any = local("float32", lambda e: e.tile_n // 2)
    # The stage whose products are in flight; -1 if there is none.
    left: Any = scalar()

    more: Any = scalar()
    any: Any = scalar("uint32")
    # Descriptors of the operands in the first stage.
    panel_of: Any = local("uint32")
    weight_of: Any = local("uint32")

    panel_at: Any = scalar("uint32")
    weight_at: Any = scalar("uint32")
    # A vector of y.
    words: Any = local("uint32", 4)
    # Shared: the stages, a panel of x and its blocks each.
    ring: Any = pooled("uint32", lambda e: e.barriers_at // 4, 0)
    # Shared, in the same place: a tile of y.
    stored: Any = pooled("uint32", lambda e: e.stored_bytes // 4, 0)
    # Shared: mbarriers of stages that have come, and that all warps have multiplied.
    full: Any = pooled("uint64", lambda e: e.stages, lambda e: e.barriers_at // 8)
    empty: Any = pooled("uint64", lambda e: e.stages, lambda e: e.barriers_at // 8 + e.stages)
    # Shared: for each stage and block column in it, which block rows have a block: a bit each.
    told: Any = pooled("uint32", lambda e: e.stages * e.beside, lambda e: e.told_at // 4)
    # Shared: the thread block's block rows, -1 beyond the last.
    row_of: Any = pooled("int32", lambda e: e.rows_each, lambda e: e.told_at // 4 + e.stages * e.beside)


# fmt: off
@phase
def begin(e, /, s):
    """Make the mbarriers.

    Reads: nothing. Writes: `full`, `empty`, `slot`, `turn`. Barriers: of the thread block, at the end.
    """
    if s.t == 0:
        T.ptx.prefetch.tensormap(s.x_map)
        T.ptx.prefetch.tensormap(s.weight_map)
        begin_stages(e.stages, 4 * e.groups)(s)
    s.slot = 0
    s.turn = T.uint32(0)
    T.cuda.cta_sync()


@phase
def find_rows(e, /, io, s):
    """Lanes of the producer warp have a block row of the tile each.

    Reads: `order`, or `indptr` where the host has not looked at the pattern; `indices`.
    Writes: `at`, `stop`, `column`, `next_column`; `row_of`.
    Barriers: none.
    """
    row: T.int32 = s.tile * e.rows_each + s.lane
    found: T.int32 = -1
    s.at[0] = 0
    s.stop[0] = 0
    if s.lane < e.rows_each and row < e.block_rows:
        if io.long >= 0:
            load_int(found, io.order.ptr_to([row, 0]))
            load_int(s.at[0], io.order.ptr_to([row, 1]))
            load_int(s.stop[0], io.order.ptr_to([row, 2]))
        else:
            found = row
            load_int(s.at[0], io.indptr.ptr_to([row]))
            load_int(s.stop[0], io.indptr.ptr_to([row + 1]))
    if (e.producers == 1 or s.warp == e.groups * 4) and s.lane < e.rows_each:
        s.row_of[s.lane] = found
    s.column[0] = FAR
    s.next_column[0] = FAR
    if s.at[0] < s.stop[0]:
        load_int(s.column[0], io.indices.ptr_to([s.at[0]]))
        if e.turned > 0:
            load_int(s.at_place[0], io.places.ptr_to([s.at[0]]))
    if s.at[0] + 1 < s.stop[0]:
        load_int(s.next_column[0], io.indices.ptr_to([s.at[0] + 1]))
        if e.turned > 0:
            load_int(s.next_place[0], io.places.ptr_to([s.at[0] + 1]))


@phase
def next_panel(e, /, io, s):
    """Find the first panel in which a block row has its next block, and take all blocks that come next and lie in it.

    Reads: `base`, of the warp's lanes; `indices`.
    Writes: `word`, `first`, `mine`; moves `at`, `column` and `next_column` on.
    Barriers: none, but all lanes of the warp take part.
    After: each block is taken once, in any order of a row's columns. Only where these ascend every panel comes once.
    """
    s.first = s.at[0]
    s.mine = T.uint32(0)
    for i in T.unroll(e.beside):
        s.has = s.column[0] == s.base[0] * e.beside + i
        s.word[i] = T.cuda.ballot_sync(T.uint32(FULL_WARP), s.has)
        if s.has:
            s.mine = s.mine | T.uint32(1 << i)
            s.at[0] = s.at[0] + 1
            s.column[0] = s.next_column[0]
            s.next_column[0] = FAR
            if e.turned > 0:
                s.places[i] = s.at_place[0]
                s.at_place[0] = s.next_place[0]
            if s.at[0] + 1 < s.stop[0]:
                load_int(s.next_column[0], io.indices.ptr_to([s.at[0] + 1]))
                if e.turned > 0:
                    load_int(s.next_place[0], io.places.ptr_to([s.at[0] + 1]))


@phase
def bring_panel(e, /, s, part):
    """Have a panel of x and its blocks brought, for the producer warp.

    Reads: `base`, `word`, `first`, `mine`.
    Writes: `told`; `ring`, by and by.
    Barriers: of the warp; awaits `empty`, and has copies arrive at `full`.
    """
    stage = T.meta_var(e.stage_bytes // 4)
    await_phase(s.done, s.empty.ptr_to([s.slot]), s.turn ^ T.uint32(1))
    full = T.meta_var(s.full.ptr_to([s.slot]))
    if s.lane == 0:
        s.count = T.uint32(0)
        for i in T.unroll(e.beside):
            s.told[s.slot * e.beside + i] = s.word[i]
            s.count = s.count + T.popcount(s.word[i])
        arrive_expecting(full, T.uint32(e.x_bytes) + s.count * T.uint32(e.block_bytes))
    T.cuda.warp_sync()
    if s.lane == 0:
        column = T.meta_var(s.base[0] * (e.cols if e.parts > 1 else e.panel) + part * e.panel)
        copy_box(s.ring.ptr_to([s.slot * stage]), s.x_map, column, s.top, full)
    if s.lane < e.rows_each:
        for i in T.unroll(e.beside):
            if (s.mine >> T.uint32(i)) & T.uint32(1) != T.uint32(0):
                block = T.meta_var(
                    s.first + T.Cast("int32", T.popcount(s.mine & T.uint32((1 << i) - 1))))
                to = T.meta_var(s.slot * stage + e.x_bytes // 4 + (s.lane * e.beside + i) * (e.block_bytes // 4))
                if e.turned > 0:
                    for box in T.unroll(e.boxes):
                        copy_box(
                            s.ring.ptr_to([to + box * (e.box_bytes // 4)]), s.weight_map, box * e.box,
                            s.places[i] * e.cols + part * e.width, full)
                else:
                    copy_box(s.ring.ptr_to([to]), s.weight_map, part * e.width, block * e.rows, full)


@phase
def produce(e, /, io, s):
    """The work of a producer warp: each goes through all panels, and brings every `producers`-th.

    Reads: the structure.
    Writes: `ring` and `told`, stage after stage; the first warp OVER after the last.
    Barriers: those of `bring_panel`.
    """
    find_rows(e)(io, s)
    if e.producers > 1:
        s.whose = s.warp - e.groups * 4
    least_of_warp(s.base[0], s.column[0], T.uint32(FULL_WARP))
    while s.base[0] != FAR:
        s.base[0] = s.base[0] // e.beside
        next_panel(e)(io, s)
        for part in T.serial(e.parts):
            if e.producers == 1 or s.whose == 0:
                bring_panel(e)(s, part)
            if e.producers > 1:
                s.whose = (s.whose + (e.producers - 1)) % e.producers
            next_stage(e.stages)(s)
        least_of_warp(s.base[0], s.column[0], T.uint32(FULL_WARP))
    if e.producers == 1 or s.warp == e.groups * 4:
        await_phase(s.done, s.empty.ptr_to([s.slot]), s.turn ^ T.uint32(1))
        if s.lane == 0:
            s.told[s.slot * e.beside] = T.uint32(OVER)
            arrive_expecting(s.full.ptr_to([s.slot]), T.uint32(0))


def of_block(e: Extents, s: Any, r: Any, i: Any, step: Any) -> Any:
    """A step's columns of a block row's i-th block."""
    sums_each = e.rows // 2
    a = (i * e.steps + step) * operands.STEP_UNITS
    # A step takes 16 rows of a transposed box.
    columns, units = (e.box, 16 * e.box * 2 // operands.UNIT) if e.turned else (e.width, operands.STEP_UNITS)
    b = (r * e.beside + i) * (e.block_bytes // operands.UNIT) + step * units
    return operands.product(e.dtype, e.rows)(
        *(s.sums[r * sums_each + j] for j in range(sums_each)),
        operands.swizzled(s.panel_at + T.Cast("uint32", a), e.panel * e.size),
        operands.swizzled(s.weight_at + T.Cast("uint32", b), columns * e.size), T.bool(True), 1, 1,
        *((0, e.turned) if e.size == 2 else ()))


@phase
def multiply_panel(e, /, s):
    """The products of the stage in hand.

    Reads: `ring`, until the products are awaited; `told`.
    Writes: adds the products to `sums`, by and by.
    Barriers: none, but all warps of a warpgroup take part.
    """
    stage = T.meta_var(e.stage_bytes // operands.UNIT)
    s.panel_at = s.panel_of[0] + T.Cast("uint32", s.slot * stage)
    s.weight_at = s.weight_of[0] + T.Cast("uint32", s.slot * stage)
    for i in T.unroll(e.beside):
        for r in T.unroll(e.rows_each):
            if (s.word[i] >> T.uint32(r)) & T.uint32(1) != T.uint32(0):
                operands.fence()
                for step in T.unroll(e.steps):
                    of_block(e, s, r, i, step)
                operands.commit()


def along_boxes(e: Extents) -> int:
    """Units from one box of a transposed block to the next."""
    return e.box_bytes // operands.UNIT if e.turned else 1


@phase
def consume(e, /, s):
    """The work of a warpgroup.

    Reads: `ring`, `told`.
    Writes: `sums`.
    Barriers: of the warp; awaits `full`, and arrives at `empty`.
    After: all products are in `sums`.
    """
    start = T.meta_var(held_address("u32", T.cuda.cvta_generic_to_shared(s.ring.ptr_to([0]))))
    s.panel_of[0] = operands.place_of(start + T.Cast("uint32", s.warp // 4 * (GROUP_M * e.panel * e.size)))
    s.weight_of[0] = operands.place_of(start + T.uint32(e.x_bytes), along_boxes(e))
    for j in T.unroll(e.tile_n // 2):
        s.sums[j] = T.float32(0)
    s.left = -1
    s.more = 1
    while s.more != 0:
        await_phase(s.done, s.full.ptr_to([s.slot]), s.turn)
        s.any = T.uint32(0)
        for i in T.unroll(e.beside):
            s.word[i] = s.told[s.slot * e.beside + i]
            s.any = s.any | s.word[i]
        if s.word[0] == T.uint32(OVER):
            s.more = 0
        else:
            multiply_panel(e)(s)
            # The products of one block may be in flight, which has to be one of this stage.
            if s.any == T.uint32(0):
                operands.wait(0)
            else:
                operands.wait(1)
            if s.left >= 0:
                hand_back(s)
            s.left = s.slot
            next_stage(e.stages)(s)
    operands.wait(0)


def element(e: Extents, io: Any, s: Any, row: Any, r: Any, g: Any, i: Any, v: int) -> Any:
    """An element of y as bits: of eight columns a lane has two neighbours, in two rows."""
    found = output(io, row * e.rows + g * 8 + s.lane % 4 * 2 + v, s.sums[r * (e.rows // 2) + g * 4 + i * 2 + v])
    return T.Cast("uint32", T.reinterpret("uint16", found)) if e.size == 2 else T.reinterpret("uint32", found)


@phase
def pass_tile(e, /, io, s):
    """A warp's 16 rows of y, to shared memory.

    Reads: `sums`, `row_of`; the bias. Writes: `stored`. Barriers: of the warp, at the end.
    """
    for r in T.unroll(e.rows_each):
        row: T.int32 = s.row_of[r]
        if row >= 0:
            for g in T.unroll(e.rows // 8):
                for i in T.unroll(2):
                    if e.size == 2:
                        s.stored[
                            ((s.warp * 16 + i * 8 + s.lane // 4) * e.pitch + r * e.rows + g * 8) // 2 + s.lane % 4
                        ] = element(e, io, s, row, r, g, i, 0) | (element(e, io, s, row, r, g, i, 1) << T.uint32(16))
                    else:
                        for v in T.unroll(2):
                            s.stored[
                                (s.warp * 16 + i * 8 + s.lane // 4) * e.pitch + r * e.rows + g * 8 + s.lane % 4 * 2 + v
                            ] = element(e, io, s, row, r, g, i, v)
    T.cuda.warp_sync()


@phase
def store_tile(e, /, io, s):
    """A warp's 16 rows of y, from shared memory to global memory, in vectors of 16 bytes.

    Reads: `stored`, `row_of`. Writes: y, but for rows beyond m. Barriers: none.
    """
    vectors = T.meta_var(e.tile_n // e.vector)
    for j in T.serial((16 * vectors + 31) // 32):
        i: T.int32 = j * 32 + s.lane
        if i < 16 * vectors:
            row: T.int32 = s.row_of[i % vectors * e.vector // e.rows]
            if row >= 0 and s.top + s.warp * 16 + i // vectors < io.m:
                T.ptx.ld.shared.v4.u32(
                    s.words[0], s.words[1], s.words[2], s.words[3],
                    s.stored.ptr_to([((s.warp * 16 + i // vectors) * e.pitch + i % vectors * e.vector) // e.of_word]))
                T.ptx.st.global_.v4.u32(
                    io.y.ptr_to([
                        s.top + s.warp * 16 + i // vectors, row * e.rows + i % vectors * e.vector % e.rows]),
                    s.words[0], s.words[1], s.words[2], s.words[3])


def boxes_of(e: Extents, io: Any) -> tuple[tuple[Any, int], tuple[int, int]]:
    """All blocks as one matrix, and a box of it."""
    if e.turned:
        return (io.nnzb * e.cols, e.rows), (e.width, e.box)
    return (io.nnzb * e.rows, e.cols), (e.rows, e.width)


def is_producer(e: Extents, s: Any) -> Any:
    """Whether a warp is a producer warp; a single one is the last warp."""
    first = e.groups * 4
    return s.warp == first if e.producers == 1 else s.warp >= first


def program(problem: BsrMatmul, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)

    @T.inline
    def body(io):
        x_map = T.meta_var(tensor_map("x_map"))
        weight_map = T.meta_var(tensor_map("weight_map"))
        T.evaluate(describe(x_map, io.x.ptr_to([0, 0]), e.dtype, (io.m, e.k), (e.tile_m, e.panel)))
        if io.nnzb > 0:
            T.evaluate(describe(weight_map, io.data.ptr_to([0, 0, 0]), e.dtype, *boxes_of(e, io)))
        else:  # An empty matrix has none; nothing is copied by this one.
            T.evaluate(describe(weight_map, io.x.ptr_to([0, 0]), e.dtype, (io.m, e.k), boxes_of(e, io)[1]))
        with device_region():
            strips = T.meta_var((io.m + (e.tile_m - 1)) // e.tile_m)
            place = T.cta_id([e.tiles_n * strips])
            t = T.thread_id([e.threads])
            s = T.meta_var(State.alloc(
                e, e.pool_bytes, t=t, lane=t % 32, warp=t // 32, tile=place % e.tiles_n,
                top=place // e.tiles_n * e.tile_m, x_map=T.address_of(x_map), weight_map=T.address_of(weight_map)))
            begin(e)(s)
            if e.overlap > 0:
                wait_then_start_consumer()
            if is_producer(e, s):
                produce(e)(io, s)
            else:
                consume(e)(s)
            # All stages have been multiplied, and `row_of` is there.
            T.cuda.cta_sync()
            if s.warp < e.groups * 4:
                pass_tile(e)(io, s)
                store_tile(e)(io, s)

    return gpu_program(problem, body, overlapped=e.overlap > 0)
# fmt: on
