"""The space of `warpgroups`, and the extents that its kernel is built from. Loads no compiler."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Self

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, Launch, NotApplicable, Table, ceildiv
from tvm_sparse.operators.bsr_matmul.dense import time_of_warpgroups, time_of_warps
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from ..features import features as product_features

# Rows of x of a thread block: 64 for each warpgroup that multiplies.
GROUP_M = 64
TILE_M = (64, 128, 192, 256)
# Rows of the weight of a thread block: some block rows. A warpgroup's sums take half as many registers of a thread.
TILE_N = (64, 96, 128, 160, 192, 256)
# Bytes of a row of a panel in shared memory: those that have a swizzle. Bytes of columns that an instruction takes.
PANEL_BYTES, STEP_BYTES = (32, 64, 128), 32
STAGES = (2, 3, 4, 6, 8, 12)
# Warps that bring panels. If they were more than the stages, one would take a stage's phase before last, which has the
# same parity, for the last.
PRODUCERS = (1, 2)
# Rows of x from which on the template is offered; and below which it takes longer for small blocks of float32 than
# products without tensor cores: on an H200 100 rows and blocks of 16 took 40 microseconds, and 36 without.
LEAST_M, MANY_ROWS = 33, 128
# Most block rows of a thread block; each has a lane of the producer warp.
MOST_ROWS = 16
# Columns of a box of a transposed block, as bytes of a row in shared memory: those that have a swizzle.
BOXES = (64, 32, 16)
# Registers of a thread beside sums: at most, and mostly; and of a multiprocessor.
BESIDES, HELD, REGISTERS = 40, 26, 65536
# Most columns of operand B.
MOST_N = 256
# Bytes of a vector, and those between rows of a tile of y in shared memory beyond its width.
VECTOR_BYTES = 16
# Where swizzled rows begin: at multiples of the bytes of eight rows of the widest.
ALIGNED = 1024
WARPGROUP = 128
# Bytes of a multiprocessor's shared memory that the system takes of each thread block.
RESERVED = 1024
# Figures for `estimate`, fitted to times of an H200 (scripts/block_products.py): bytes that a multiprocessor
# gets from the L2 cache in a microsecond while all do, and bytes that a thread block stores; the latency of a stage in
# microseconds, the time that the producer warp needs for a copy, that of a launch, and that of a thread block's
# beginning and end; clocks of a microsecond; how many standard deviations the fullest block row is above the mean; and
# how many times as long the bytes take where a multiprocessor has room for one thread block.
L2_BYTES, STORED_BYTES, CLOCKS = 68e3, 21e3, 1700
ON_ITS_WAY, OF_COPY, LAUNCH, BEGIN, FULLEST, SINGLE = 0.8, 0.1, 3.8, 2.3, 1.5, 1.15
# Tiles of the default, rows of x by those of the weight, for blocks of fewer rows than `WIDE` and for others, and how
# many times as long as estimated they take; stages below which two thread blocks of a multiprocessor wait for memory.
WIDE, NARROW, FEWEST_STAGES = 64, 32, 3
USUAL_TILES = (
    {(64, 64): 1.0, (192, 64): 1.0, (128, 64): 1.05},
    {(64, 64): 1.0, (128, 128): 1.0, (128, 64): 1.0, (128, 256): 1.0},
)


def space(problem: BsrMatmul, machine: Machine) -> Table:
    rows, cols = problem.block_shape
    if not machine.has_warpgroups:
        raise NotApplicable(f"{machine.arch} has no products of warpgroups (wgmma)")
    size = numpy_dtype(problem.dtype).itemsize
    if size != 2 and not problem.precision:
        raise NotApplicable(f"{problem.dtype} is not of 16 bits, and tf32 is not asked for")
    least = STEP_BYTES // size
    if rows % 8 or cols % least or rows > MOST_N:
        raise NotApplicable(
            f"blocks of {rows}x{cols} are not of multiples of 8 rows up to {MOST_N}, and {least} columns"
        )
    if problem.turned and (rows % BOXES[-1] or size != 2):
        raise NotApplicable(
            f"transposed blocks of {rows} columns in {problem.dtype} are not of multiples of {BOXES[-1]} of 16 bits"
        )
    if problem.m < LEAST_M:
        raise NotApplicable(f"m={problem.m} fills too little of the {GROUP_M} rows of a warpgroup")
    wide = [width // size for width in PANEL_BYTES]
    panels = tuple(panel for panel in wide if (cols % panel == 0 or panel % cols == 0) and problem.k % panel == 0)
    return {
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * max(problem.m, GROUP_M)),
        "tile_n": tuple(sorted({tile // rows * rows for tile in TILE_N if tile >= rows} or {rows})),
        "panel": panels,
        "stages": STAGES,
        "producers": PRODUCERS,
        "overlap": (0, 1),
    }


def allowed(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    if e.rows_each > MOST_ROWS:
        return f"{e.rows_each} block rows in a thread block exceed {MOST_ROWS}"
    if not machine.blocks_at_once(e.threads, e.tile_n // 2 + BESIDES, 0):
        return f"{e.tile_n // 2} sums in each of {e.threads} threads exceed the registers"
    if e.pool_bytes > machine.block_shared_bytes:
        return f"{e.stages} stages of {e.stage_bytes} bytes exceed a multiprocessor's shared memory"
    if e.stored_bytes > e.stages * e.stage_bytes:
        return f"{e.stages} stages of {e.stage_bytes} bytes have no room for a tile of y, of {e.stored_bytes}"
    if e.stages > 2 and e.stages * e.panel > 2 * max(problem.k, e.panel):
        return f"{e.stages} stages of {e.panel} columns are twice a row of k={problem.k}"
    return None


def declines(problem: BsrMatmul, machine: Machine) -> bool:
    # No other template reads transposed blocks, or float32, by tensor cores.
    if problem.turned:
        return False
    if problem.precision:
        return min(problem.block_shape) < NARROW and problem.m < MANY_ROWS
    return time_of_warpgroups(problem) >= time_of_warps(problem)


def default(problem: BsrMatmul, machine: Machine) -> Decisions:
    """Of `USUAL_TILES` the one that `estimate` takes to be the fastest, with the widest panels of which a
    multiprocessor has room for two thread blocks and enough stages; where none has, with what there is room for.

    For small blocks a panel is hardly wider than one: of wider ones more is brought that no block needs.
    """
    table, (rows, cols) = space(problem, machine), problem.block_shape
    if rows < WIDE:
        narrow = tuple(panel for panel in table["panel"] if panel <= max(cols, NARROW))
        table = {**table, "panel": narrow or table["panel"][:1]}

    def preferred(among: Table) -> Decisions:
        points = (dict(zip(among, choices, strict=True)) for choices in itertools.product(*among.values()))
        return max(points, key=lambda point: preference(problem, machine, point))

    found: list[tuple[float, Decisions]] = []
    table = {**table, "overlap": table["overlap"][-1:]}
    table = {**table, "producers": PRODUCERS[-1:]}
    for (tile_m, tile_n), longer in USUAL_TILES[rows >= WIDE].items():
        if tile_m in table["tile_m"] and (tile_n >= rows or not found):
            point = preferred({**table, "tile_m": (tile_m,), "tile_n": (max(tile_n // rows, 1) * rows,)})
            if allowed(problem, machine, point) is None:
                # A last tile that x does not fill takes as long as others.
                spare = ceildiv(problem.m, tile_m) * tile_m / problem.m
                time = estimate(problem, machine, Extents.of(problem, point)) * longer * spare
                found.append((time, point))
    return min(found, key=lambda one: one[0])[1] if found else preferred(table)


def preference(problem: BsrMatmul, machine: Machine, point: Decisions) -> tuple[bool, bool, bool, int, int]:
    """What the default prefers: points, two thread blocks, enough stages, wide panels, many stages."""
    e = Extents.of(problem, point)
    is_point = allowed(problem, machine, point) is None
    enough = point["stages"] >= FEWEST_STAGES
    return is_point, is_point and resident(e, machine) == 2, enough, point["panel"], point["stages"]


def resident(e: Extents, machine: Machine) -> int:
    """Thread blocks that a multiprocessor runs at the same time, 1 or 2.

    Registers are those of all warps. `Machine.blocks_at_once` rounds nine warps up to twelve, but two such thread
    blocks run at the same time: on an H200 two tiles took as long as their bytes from the L2 cache take.
    """
    registers = ceildiv(e.tile_n // 2 + HELD, 8) * 8 * e.threads
    fits = 2 * (e.pool_bytes + RESERVED) <= machine.block_shared_bytes + RESERVED
    return 2 if fits and 2 * registers <= REGISTERS else 1


def estimate(problem: BsrMatmul, machine: Machine, e: Extents) -> float:
    """About how many microseconds the kernel takes: its rounds of thread blocks, bound by what
    the L2 cache delivers or tensor cores multiply, or by how long one takes by itself.
    """
    density = 1 - problem.sparsity
    each = resident(e, machine)
    stored = e.tile_m * e.tile_n * e.size

    def panels(density: float) -> float:
        return (1 - (1 - density) ** (e.beside * e.rows_each)) * e.k / e.panel

    def brought(density: float) -> float:
        return panels(density) * e.x_bytes + density * e.tile_n * e.k * e.size

    def alone(density: float) -> float:
        copies = panels(density) + density * e.rows_each * e.k / e.width
        return (
            max(panels(density) * ON_ITS_WAY / e.stages, copies * OF_COPY / e.producers) + BEGIN + stored / STORED_BYTES
        )

    # An instruction reads 64 rows of x by 32 bytes, and as many of each of a block's rows.
    products = e.groups * density * e.rows_each * e.k * e.size / STEP_BYTES * max(e.rows / 2, 16 + e.rows / 4) / CLOCKS
    shared = max((brought(density) + stored) / L2_BYTES, products)
    longer = SINGLE if each == 1 else 1.0
    thread_blocks = e.tiles_n * ceildiv(problem.m, e.tile_m) / machine.cores  # of a multiprocessor
    if thread_blocks <= each:
        deviation = (density * (1 - density) / (e.k / e.cols) / e.rows_each) ** 0.5
        return LAUNCH + max(alone(min(density + FULLEST * deviation, 1)), shared * max(thread_blocks, 1)) * longer
    rounds = (thread_blocks / each + ceildiv(e.tiles_n * ceildiv(problem.m, e.tile_m), machine.cores * each)) / 2
    return LAUNCH + rounds * max(alone(density), shared * each) * longer


@dataclass(frozen=True)
class OfMatrix:
    """Extents of a matrix in blocks."""

    # Extents of a block.
    rows: int
    cols: int
    # Block rows of the matrix, its columns and its rows.
    block_rows: int
    k: int
    n: int
    # The dtype of all arrays of elements.
    dtype: str

    @classmethod
    def of(cls, problem: Any, decisions: Decisions) -> Self:
        rows, cols = problem.block_shape
        return cls(rows, cols, problem.grid[0], problem.k, problem.n, problem.dtype, **decisions)


extent = Derived["Extents", int]


@dataclass(frozen=True)
class Extents(OfMatrix):
    """What the kernel's phases know before it runs: the weight, and the decisions of these names."""

    tile_m: int
    tile_n: int
    panel: int
    stages: int
    producers: int
    overlap: int
    turned: int

    @classmethod
    def of(cls, problem: BsrMatmul, decisions: Decisions) -> Self:
        return super().of(problem, {**decisions, "turned": problem.turned})

    # Bytes of an element; elements of a vector, and of a 32-bit word.
    size = extent(lambda e: numpy_dtype(e.dtype).itemsize)
    vector = extent(lambda e: VECTOR_BYTES // e.size)
    of_word = extent(lambda e: 4 // e.size)
    # Warpgroups that multiply.
    groups = extent(lambda e: e.tile_m // GROUP_M)
    # Threads of a thread block: with those of the producer warps.
    threads = extent(lambda e: e.groups * WARPGROUP + 32 * e.producers)
    # Block rows of a thread block.
    rows_each = extent(lambda e: e.tile_n // e.rows)
    # Thread blocks that have all block rows.
    tiles_n = extent(lambda e: ceildiv(e.block_rows, e.rows_each))
    # Block columns of a panel.
    beside = extent(lambda e: max(e.panel // e.cols, 1))
    # Panels of a block column.
    parts = extent(lambda e: max(e.cols // e.panel, 1))
    # Columns of a block that a step takes.
    width = extent(lambda e: min(e.cols, e.panel))
    # Instructions along these.
    steps = extent(lambda e: e.width * e.size // STEP_BYTES)
    # Bytes of a panel of x.
    x_bytes = extent(lambda e: e.tile_m * e.panel * e.size)
    # Bytes of a block's part that a step takes.
    block_bytes = extent(lambda e: e.rows * e.width * e.size)
    # Columns of a box of a transposed block, each a row of the weight; boxes of a block; and bytes of one.
    box = extent(lambda e: next(box for box in BOXES if e.rows % box == 0))
    boxes = extent(lambda e: e.rows // e.box)
    box_bytes = extent(lambda e: e.block_bytes // e.boxes)
    # Bytes of a stage: a panel of x, and room for each block that may be in it.
    stage_bytes = extent(lambda e: ceildiv(e.x_bytes + e.rows_each * e.beside * e.block_bytes, ALIGNED) * ALIGNED)
    # Elements from one row of y to the next, in shared memory.
    pitch = extent(lambda e: e.tile_n + e.vector)
    # Bytes of a tile of y in shared memory, where the stages have been.
    stored_bytes = extent(lambda e: e.tile_m * e.pitch * e.size)
    # Bytes of all stages, after which mbarriers and words stand.
    barriers_at = extent(lambda e: e.stages * e.stage_bytes)
    # Bytes of stages and mbarriers, after which there are words: what each stage has, and the block rows.
    told_at = extent(lambda e: e.barriers_at + 2 * 8 * e.stages)
    # Dynamic shared memory.
    pool_bytes = extent(lambda e: e.told_at + ceildiv(4 * (e.stages * e.beside + e.rows_each), 16) * 16)


def launch(problem: BsrMatmul, decisions: Decisions) -> Launch:
    e = Extents.of(problem, decisions)
    return Launch(e.threads, e.pool_bytes)


def features(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> Features:
    e = Extents.of(problem, decisions)
    density = (1 - problem.sparsity) * e.beside
    found = 1 - max(1 - density, 0) ** e.rows_each
    return product_features(
        problem,
        machine,
        tile_m=e.tile_m,
        outputs=e.tile_m * e.tile_n,
        threads=e.threads,
        blocks=e.tiles_n * ceildiv(problem.m, e.tile_m),
        work_each=found * e.rows_each * e.parts,
        at_once=1,
        held=e.tile_n // 2,
    )
