"""The kernel of `sampled_warpgroups`, in phases; the package's docstring says what it does, and why.

    find_blocks     the thread block's block row, and its blocks
    begin           mbarriers

The producer warp, after the others of a thread block,

    produce         copies of both matrices' columns, step by step

the warpgroups,

    consume         products of each stage

and after a barrier,

    store_sums      blocks from registers to global memory, or
    join_sums       through shared memory of a cluster
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.bsr_sddmm.problem import BsrSddmm

from ...bsr_matmul.block_row import load_int
from ...bsr_matmul.warpgroups.space import GROUP_M, MOST_N, WARPGROUP
from ...device import operands
from ...device.cluster import cluster_barrier, peer_load
from ...device.mbarriers import arrive_expecting, await_phase
from ...device.region import device_region
from ...device.selection import FULL_WARP, scan_lanes
from ...device.stages import begin_stages, hand_back, next_stage
from ...device.state import Buffers, local, pooled, scalar
from ...device.tensor_maps import copy_box, describe, tensor_map
from ...device.words import held_address
from ...interface import gpu_program
from .space import Extents

assert MOST_N == 256

passed_sum = peer_load("passed_sum", "float", "float32")


@dataclass
class State(Buffers):
    """What the phases share."""

    # The thread, its place in its warp, and that in the thread block.
    t: Any
    lane: Any
    warp: Any
    # Which of the parts of all block rows the thread block has, and its place in the cluster.
    unit: Any
    rank: Any
    # Addresses of the tensor maps.
    left_map: Any
    right_map: Any
    # As `device.stages` says.
    slot: Any = scalar()
    turn: Any = scalar("uint32")
    left: Any = scalar()
    # Whether a phase is over.
    done: Any = local("uint32")
    # The block row, its first block of this thread block, and how many there are; a row of -1 if there is none.
    row: Any = scalar()
    first: Any = scalar()
    count: Any = scalar()
    # The first row of both matrices, and the number of steps.
    top: Any = scalar()
    steps: Any = scalar()

    chunk: Any = scalar()
    behind: Any = scalar()
    start: Any = local("int32")
    stop: Any = local("int32")
    upto: Any = local("int32")
    other: Any = local("int32")
    column: Any = local("int32")
    place: Any = scalar()
    # Sums of the warpgroup's 64 rows: of eight columns a thread has two neighbours, in two rows.
    sums: Any = local("float32", lambda e: e.sums)

    both: Any = local("float32", 2)
    # Low halves of descriptors of the operands in the first stage.
    left_of: Any = local("uint32")
    right_of: Any = local("uint32")

    left_at: Any = scalar("uint32")
    right_at: Any = scalar("uint32")
    # Shared: the stages, boxes of the left and of the right matrix each.
    ring: Any = pooled("uint32", lambda e: e.stages * e.stage_bytes // 4, 0)
    # Shared, in the same place: the sums of all threads.
    passed: Any = pooled("float32", lambda e: e.passed_bytes // 4, 0, when=lambda e: e.cluster > 1)
    # Shared: mbarriers of stages that have come, and that all warps have multiplied.
    full: Any = pooled("uint64", lambda e: e.stages, lambda e: e.stages * e.stage_bytes // 8)
    empty: Any = pooled("uint64", lambda e: e.stages, lambda e: e.stages * e.stage_bytes // 8 + e.stages)


# fmt: off
def units(e: Extents, s: Any) -> Any:
    return (s.stop[0] - s.start[0] + (e.each - 1)) // e.each


@phase
def find_blocks(e, /, io, s):
    """Find the unit's block row, whose blocks are shared out evenly over its units.

    Reads: `indptr`, 32 block rows at a time. Writes: `row`, `first`, `count`. Barriers: none.
    After: all warps know them. `row` is -1 where there are fewer units.
    """
    s.row = -1
    s.behind = s.unit  # units between the first of the next rows and this one
    s.chunk = 0
    while T.And(s.row < 0, s.chunk < e.block_rows):
        s.start[0] = 0
        s.stop[0] = 0
        if s.chunk + s.lane < e.block_rows:
            load_int(s.start[0], io.indptr.ptr_to([s.chunk + s.lane]))
            load_int(s.stop[0], io.indptr.ptr_to([s.chunk + s.lane + 1]))
        s.upto[0] = units(e, s)
        scan_lanes(s.lane, s.upto, s.other)
        which: T.int32 = T.Cast(
            "int32", T.popcount(T.cuda.ballot_sync(T.uint32(FULL_WARP), s.upto[0] <= s.behind)))
        if which < 32:
            s.behind = s.behind - T.tvm_warp_shuffle(
                T.uint32(FULL_WARP), s.upto[0] - units(e, s), which, 32, 32)
            s.start[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.start[0], which, 32, 32)
            s.stop[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.stop[0], which, 32, 32)
            s.row = s.chunk + which
        else:
            s.behind = s.behind - T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.upto[0], 31, 32, 32)
        s.chunk = s.chunk + 32
    if s.row >= 0:
        stored: T.int32 = s.stop[0] - s.start[0]
        many: T.int32 = units(e, s)
        s.first = stored // many * s.behind + T.min(stored % many, s.behind)
        s.count = stored // many + T.Select(s.behind < stored % many, 1, 0)
        s.first = s.start[0] + s.first


@phase
def begin(e, /, io, s):
    """Make the mbarriers, and share out the rows over the cluster.

    Reads: `rank`. Writes: `full`, `empty`, `slot`, `turn`, `top`, `steps`. Barriers: of the thread block, at the end.
    """
    if s.t == 0:
        T.ptx.prefetch.tensormap(s.left_map)
        T.ptx.prefetch.tensormap(s.right_map)
        begin_stages(e.stages, 4 * e.groups)(s)
    s.slot = 0
    s.turn = T.uint32(0)
    all_steps: T.int32 = (io.m + (e.tile_m - 1)) // e.tile_m
    s.top = all_steps * s.rank // e.cluster
    s.steps = all_steps * (s.rank + 1) // e.cluster - s.top
    s.top = s.top * e.tile_m
    T.cuda.cta_sync()


@phase
def produce(e, /, io, s):
    """The producer warp's work: a lane copies a box of each step.

    Reads: the thread block's blocks.
    Writes: `ring`, stage after stage.
    Barriers: of the warp; awaits `empty`, and has copies arrive at `full`.
    """
    stage = T.meta_var(e.stage_bytes // 4)
    boxes: T.int32 = e.halves + s.count * e.parts
    if s.lane < e.halves:
        s.column[0] = s.row * e.rows + s.lane * GROUP_M
        s.place = s.lane * (e.left_bytes // 4)
    elif s.lane < boxes:
        load_int(s.column[0], io.indices.ptr_to([s.first + (s.lane - e.halves) // e.parts]))
        s.column[0] = s.column[0] * e.cols + (s.lane - e.halves) % e.parts * e.box
        s.place = e.halves * (e.left_bytes // 4) + (s.lane - e.halves) * (e.right_bytes // 4)
    for i in T.serial(s.steps):
        await_phase(s.done, s.empty.ptr_to([s.slot]), s.turn ^ T.uint32(1))
        if s.lane == 0:
            arrive_expecting(
                s.full.ptr_to([s.slot]),
                T.Cast("uint32", e.halves * e.left_bytes + s.count * (e.parts * e.right_bytes)))
        T.cuda.warp_sync()
        if s.lane < e.halves:
            copy_box(
                s.ring.ptr_to([s.slot * stage + s.place]), s.left_map, s.column[0], s.top + i * e.tile_m,
                s.full.ptr_to([s.slot]))
        elif s.lane < boxes:
            copy_box(
                s.ring.ptr_to([s.slot * stage + s.place]), s.right_map, s.column[0], s.top + i * e.tile_m,
                s.full.ptr_to([s.slot]))
        next_stage(e.stages)(s)


def multiply(e: Extents) -> Phase:
    """The products of the stage in hand; the phase is (s).

    Reads: `ring`, until the products are awaited. Writes: adds the products to `sums`, by and by.
    Barriers: none, but all warps of a warpgroup take part.
    """
    mma, stage = operands.product(e.dtype, e.wide), e.stage_bytes // operands.UNIT
    # 16 rows of a box.
    left_step, right_step = (16 * columns * 2 // operands.UNIT for columns in (GROUP_M, e.box))

    def of_rows(s: Any, step: Any) -> Any:
        return mma(
            *(s.sums[j] for j in range(e.sums)),
            operands.swizzled(s.left_at + T.Cast("uint32", step * left_step), GROUP_M * 2),
            operands.swizzled(s.right_at + T.Cast("uint32", step * right_step), e.box * 2), T.bool(True), 1, 1, 1, 1)

    @T.inline
    def phase(s):
        s.left_at = s.left_of[0] + T.Cast("uint32", s.slot * stage)
        s.right_at = s.right_of[0] + T.Cast("uint32", s.slot * stage)
        operands.fence()
        for step in T.unroll(e.tile_m // 16):
            of_rows(s, step)
        operands.commit()

    return phase


@phase
def consume(e, /, s):
    """The work of a warpgroup.

    Reads: `ring`. Writes: `sums`. Barriers: of the warp; awaits `full`, and arrives at `empty`.
    After: all products are in `sums`.
    """
    boxes_each = T.meta_var(e.wide // e.box)
    start = T.meta_var(held_address("u32", T.cuda.cvta_generic_to_shared(s.ring.ptr_to([0]))))
    s.left_of[0] = operands.place_of(
        start + T.Cast("uint32", s.warp // 4 % e.halves * e.left_bytes), e.left_bytes // operands.UNIT)
    s.right_of[0] = operands.place_of(
        start + T.Cast("uint32", e.halves * e.left_bytes + s.warp // 4 // e.halves * (boxes_each * e.right_bytes)),
        e.right_bytes // operands.UNIT)
    for j in T.unroll(e.sums):
        s.sums[j] = T.float32(0)
    s.left = -1
    for _ in T.serial(s.steps):
        await_phase(s.done, s.full.ptr_to([s.slot]), s.turn)
        multiply(e)(s)
        operands.wait(1)
        if s.left >= 0:
            hand_back(s)
        s.left = s.slot
        next_stage(e.stages)(s)
    operands.wait(0)


def bits(e: Extents, value: Any) -> Any:
    return T.Cast("uint32", T.reinterpret("uint16", T.Cast(e.dtype, value)))


def stored(e: Extents, s: Any, row: Any, column: Any) -> Any:
    there = column // e.cols < s.count
    return T.And(there, row < e.rows) if e.rows % GROUP_M else there


@phase
def store_pair(e, /, io, s, j, one, other):
    """Store the sums j and j + 1 of a thread, if they are a block's."""
    column = T.meta_var(s.warp // 4 // e.halves * e.wide + j // 4 * 8)  # the first of eight
    row = T.meta_var(s.warp // 4 % e.halves * GROUP_M + s.warp % 4 * 16 + j // 2 % 2 * 8 + s.lane // 4)
    if stored(e, s, row, column):
        T.ptx.st.global_.u32(
            io.data.ptr_to([s.first + column // e.cols, row, column % e.cols + s.lane % 4 * 2]),
            bits(e, one) | (bits(e, other) << T.uint32(16)))


@phase
def store_sums(e, /, io, s):
    """Store a warpgroup's sums. Reads: `sums`. Writes: the blocks. Barriers: none."""
    for pair in T.unroll(e.sums // 2):
        store_pair(e)(io, s, pair * 2, s.sums[pair * 2], s.sums[pair * 2 + 1])


@phase
def join_sums(e, /, io, s):
    """Add up the sums of the cluster's thread blocks, each a share of every thread's, and store them.

    Reads: `sums`, and `passed` of all ranks. Writes: `passed`; the blocks. Barriers: two of the cluster.
    """
    threads, share = T.meta_var(e.groups * WARPGROUP), T.meta_var(e.sums // e.cluster)
    if s.t < threads:
        for j in T.unroll(e.sums):
            s.passed[j * threads + s.t] = s.sums[j]
    cluster_barrier()
    if s.t < threads:
        for pair in T.serial(share // 2):
            j: T.int32 = s.rank * share + pair * 2
            for v in T.unroll(2):
                s.both[v] = T.float32(0)
                for r in T.unroll(e.cluster):
                    s.both[v] = s.both[v] + passed_sum(s.passed.ptr_to([(j + v) * threads + s.t]), r)
            store_pair(e)(io, s, j, s.both[0], s.both[1])
    # No thread block ends while others may still read its sums.
    cluster_barrier()


def program(problem: BsrSddmm, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)
    find, begin_, produce_, consume_ = find_blocks(e), begin(e), produce(e), consume(e)
    end = join_sums(e) if e.cluster > 1 else store_sums(e)

    def places(io: Any) -> tuple[Any, Any]:
        """The unit, and the rank in the cluster. A row may have a unit that is not full."""
        units = io.nnzb // e.each + e.block_rows
        if e.cluster > 1:
            return T.cluster_id([units]), T.cta_id_in_cluster([e.cluster])
        return T.cta_id([units]), 0

    @T.inline
    def body(io):
        left_map = T.meta_var(tensor_map("left_map"))
        right_map = T.meta_var(tensor_map("right_map"))
        T.evaluate(describe(left_map, io.left.ptr_to([0, 0]), e.dtype, (io.m, e.n), (e.tile_m, GROUP_M)))
        T.evaluate(describe(right_map, io.right.ptr_to([0, 0]), e.dtype, (io.m, e.k), (e.tile_m, e.box)))
        with device_region():
            place = T.meta_var(places(io))
            t = T.thread_id([e.threads])
            s = T.meta_var(State.alloc(
                e, e.pool_bytes, t=t, lane=t % 32, warp=t // 32, unit=place[0], rank=place[1],
                left_map=T.address_of(left_map), right_map=T.address_of(right_map)))
            find(io, s)
            if s.row < 0:
                T.thread_return()
            begin_(io, s)
            if s.warp == e.groups * 4:
                produce_(io, s)
            else:
                consume_(s)
            if e.cluster > 1:
                # All stages have been multiplied: sums take their place.
                T.cuda.cta_sync()
                end(io, s)
            else:
                if s.warp < e.groups * 4:
                    end(io, s)

    return gpu_program(problem, body)
# fmt: on
