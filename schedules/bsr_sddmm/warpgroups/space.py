"""The space of `sampled_warpgroups`, and the extents that its kernel is built from. Loads no compiler."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, Launch, NotApplicable, Table, ceildiv
from tvm_sparse.operators.bsr_sddmm.problem import BsrSddmm

from ...bsr_matmul.warpgroups.space import ALIGNED, GROUP_M, MOST_N, WARPGROUP, OfMatrix

# Rows of both matrices of a step.
TILE_M = (16, 32, 64, 128)
# Columns of the blocks of a thread block.
TILE_K = (16, 32, 64, 96, 128, 192, 256, 384, 512)
STAGES = (2, 3, 4, 5, 6, 8)
CLUSTER = (1, 2, 4, 8)
# Columns of a box, as bytes of a row in shared memory: those that have a swizzle.
BOXES = (64, 32, 16)
# Rows of a block are a multiple of them. A warpgroup multiplies 64 rows, and stores those of the block.
LEAST_ROWS = 8
# Registers of a thread beside sums, at most; lanes of the producer warp, which copy a box each.
BESIDES, LANES = 40, 32
# The default's step.
USUAL_M = 64


def space(problem: BsrSddmm, machine: Machine) -> Table:
    rows, cols = problem.block_shape
    if not machine.has_warpgroups:
        raise NotApplicable(f"{machine.arch} has no products of warpgroups (wgmma)")
    if numpy_dtype(problem.dtype).itemsize != 2:
        raise NotApplicable(f"{problem.dtype} is not of 16 bits")
    if rows % LEAST_ROWS or cols % BOXES[-1] or cols > MOST_N:
        raise NotApplicable(
            f"blocks of {rows}x{cols} are not of multiples of {LEAST_ROWS} rows, and of {BOXES[-1]} columns, "
            f"at most {MOST_N}"
        )
    return {
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * max(problem.m, TILE_M[0])),
        "tile_k": tuple(sorted({tile // cols * cols for tile in TILE_K if cols <= tile} or {cols})),
        "stages": STAGES,
        "cluster": CLUSTER,
    }


def allowed(problem: BsrSddmm, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    if e.tile_k % e.along or e.wide % e.cols:
        return f"{e.tile_k} columns are not shared by {e.along} warpgroups in whole blocks of {e.cols}"
    if e.halves + e.boxes > LANES:
        return f"{e.halves + e.boxes} boxes of a step exceed the {LANES} lanes of a warp"
    if not machine.blocks_at_once(e.threads, e.wide // 2 + BESIDES, 0):
        return f"{e.wide // 2} sums in each of {e.threads} threads exceed the registers"
    if e.pool_bytes > machine.block_shared_bytes:
        return f"{e.stages} stages of {e.stage_bytes} bytes exceed a multiprocessor's shared memory"
    if e.cluster > 1 and e.sums % (2 * e.cluster):
        return f"{e.sums} sums of a thread are not shared by {e.cluster} thread blocks in pairs"
    if e.cluster > 1 and e.passed_bytes > e.stages * e.stage_bytes:
        return f"{e.stages} stages of {e.stage_bytes} bytes have no room for sums, of {e.passed_bytes}"
    if e.cluster > 1 and e.cluster * e.tile_m > problem.m:
        return f"{e.cluster} thread blocks of {e.tile_m} rows exceed m={problem.m}"
    return None


def default(problem: BsrSddmm, machine: Machine) -> Decisions:
    """Enough columns for a block row's blocks, as far as one instruction has them, as many stages as there is room
    for, and clusters where half of the multiprocessors would have no thread block. On an H200 that was within 12 % of
    the best of 15 points at blocks of 64 and 128 (`scripts/block_products.py --sampled`); clusters where all
    have one took 1.3 to 2 times as long.
    """
    table, cols = space(problem, machine), problem.block_shape[1]
    wanted = min(math.ceil(stored_of_a_row(problem)) * cols, MOST_N)
    fitting = [tile for tile in table["tile_k"] if tile <= MOST_N]
    tile_k = int(min((tile for tile in fitting if tile >= wanted), default=max(fitting)))
    tile_m = max(tile for tile in table["tile_m"] if tile <= USUAL_M)
    units = problem.grid[0] * max(ceildiv(int(stored_of_a_row(problem)), tile_k // cols), 1)
    least = next((c for c in CLUSTER if 2 * units * c >= machine.cores), CLUSTER[-1])
    points = [
        {"tile_m": tile_m, "tile_k": tile_k, "stages": stages, "cluster": cluster}
        for stages, cluster in itertools.product(STAGES, CLUSTER)
        if cluster <= least
    ]
    points = [point for point in points if allowed(problem, machine, point) is None]
    return max(points, key=lambda point: (point["cluster"], point["stages"]))


def stored_of_a_row(problem: BsrSddmm) -> float:
    """Blocks of a block row, on average."""
    return (1 - problem.sparsity) * problem.grid[1]


extent = Derived["Extents", int]


@dataclass(frozen=True)
class Extents(OfMatrix):
    """What the kernel's phases know before it runs: the matrix in blocks, and the decisions of these names."""

    tile_m: int
    tile_k: int
    stages: int
    cluster: int

    # Parts of a block's rows, the last of which may be shorter; a warpgroup has one.
    halves = extent(lambda e: ceildiv(e.rows, GROUP_M))
    # Warpgroups beside each other along the columns.
    along = extent(lambda e: ceildiv(e.tile_k, MOST_N))
    # Warpgroups that multiply.
    groups = extent(lambda e: e.halves * e.along)
    # Threads of a thread block: with those of the producer warp.
    threads = extent(lambda e: e.groups * WARPGROUP + 32)
    # Columns of a warpgroup.
    wide = extent(lambda e: e.tile_k // e.along)
    # Sums of a thread.
    sums = extent(lambda e: e.wide // 2)
    # Blocks of a thread block, at most.
    each = extent(lambda e: e.tile_k // e.cols)
    # Columns of a box of the right matrix.
    box = extent(lambda e: next(box for box in BOXES if e.cols % box == 0))
    # Boxes of a block.
    parts = extent(lambda e: e.cols // e.box)
    # Boxes of the right matrix in a step, at most.
    boxes = extent(lambda e: e.each * e.parts)
    # Bytes of a box of the left matrix.
    left_bytes = extent(lambda e: e.tile_m * GROUP_M * 2)
    # Bytes of a box of the right matrix.
    right_bytes = extent(lambda e: e.tile_m * e.box * 2)
    # Bytes of a stage: the boxes of the left matrix, then those of the right one.
    stage_bytes = extent(lambda e: ceildiv(e.halves * e.left_bytes + e.boxes * e.right_bytes, ALIGNED) * ALIGNED)
    # Bytes of all threads' sums, which the thread blocks of a cluster pass on.
    passed_bytes = extent(lambda e: e.sums * e.groups * WARPGROUP * 4)
    # Dynamic shared memory: stages, then mbarriers.
    pool_bytes = extent(lambda e: e.stages * e.stage_bytes + 2 * 8 * e.stages)


def launch(problem: BsrSddmm, decisions: Decisions) -> Launch:
    e = Extents.of(problem, decisions)
    return Launch(e.threads, e.pool_bytes)


def features(problem: BsrSddmm, machine: Machine, decisions: Decisions) -> Features:
    e = Extents.of(problem, decisions)
    stored = stored_of_a_row(problem)
    units = e.block_rows * max(ceildiv(int(stored), e.each), 1)
    steps = ceildiv(ceildiv(problem.m, e.tile_m), e.cluster)
    brought = e.halves * e.left_bytes + min(stored, e.each) * e.parts * e.right_bytes
    return {
        "blocks_each": units * e.cluster / machine.cores,
        "steps": steps,
        "step_bytes": brought,
        "stage_bytes": e.stages * e.stage_bytes,
        "held": e.sums,
        "used": min(stored / (ceildiv(max(int(stored), 1), e.each) * e.each), 1),
    }
