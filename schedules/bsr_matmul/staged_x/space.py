"""The space of `staged_x`, and the extents that its kernel is built from. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, NotApplicable, Table, ceildiv, powers
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from ..features import features as product_features
from ..stored import refuse_turned

WARP = 32
# Whole warps, up to 512 threads, so that each can have 128 registers.
THREADS = powers(32, 512)
# Rows of x of a tile.
TILE_M = powers(1, 16)
# Vectors of the longest row of a skewed pattern for each block row, from which on a warp is too slow for it.
HEAVY = 2
# Blocks that a thread has a vector of in a chunk: what is in flight at once.
DEPTH = powers(1, 8)
# Thread blocks that share a long row. 8 is the largest cluster that every GPU with clusters runs.
CLUSTER = powers(1, 8)
# Bytes that an asynchronous copy moves, and so those of a vector.
COPY_BYTES = (4, 16)
# Sums, and elements of the weight in flight, that a thread holds; copies of x that it issues for a chunk, each with an
# address in a register.
MAX_HELD, MAX_COPIES = 96, 16
# Threads by default, the first guess first, and the entries of a long row.
USUAL_THREADS, LONG = (128, 256, 64, 512, 32), 1024
# Block rows of each multiprocessor beyond which they are many.
MANY_ROWS = 8
# Bytes of static shared memory of a thread block.
MAX_SHARED = 48 * 1024


def space(problem: BsrMatmul, machine: Machine) -> Table:
    refuse_turned(problem)
    rows, cols = problem.block_shape
    itemsize = numpy_dtype(problem.dtype).itemsize
    if machine.capability < 80:
        raise NotApplicable(f"{machine.arch} has no asynchronous copies")
    if rows & (rows - 1) or cols & (cols - 1):
        raise NotApplicable(f"blocks of {rows}x{cols} do not divide evenly among threads")
    least, most = COPY_BYTES
    # Threads that share a row of a block are lanes of one warp, which add up by shuffles.
    vecs = tuple(v for v in powers(1, 8) if cols % v == 0 and least <= v * itemsize <= most and cols // v <= 32)
    if not vecs:
        raise NotApplicable(f"rows of {cols} elements are no copies of {least} to {most} bytes for up to 32 threads")
    table = {
        "threads": THREADS,
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * problem.m),
        "vec": vecs[-2:],
        "depth": DEPTH,
        "cluster": CLUSTER if machine.has_clusters and problem.pattern == "skewed" else (1,),
        "overlap": (0, 1) if machine.has_clusters else (0,),
    }
    if not fitting(problem, machine, table):
        raise NotApplicable(f"blocks of {rows}x{cols} exceed the registers of {THREADS[-1]} threads")
    return table


def wanted(problem: BsrMatmul, machine: Machine, tile_m: int) -> int:
    """The threads of a thread block that are likely to be the best.

    At (371, 4352, 256), 16x16, 66 %, 256 took 0.73 times as long as 128 on an H200; at (1, 2944, 128), 4x4, 65 %, 512
    took 0.76 times as long.
    """
    long = problem.k * (1 - problem.sparsity) >= LONG
    alone = problem.grid[0] * ceildiv(problem.m, tile_m) <= machine.cores
    return (128, 256, 512)[long + alone]


def fitting(problem: BsrMatmul, machine: Machine, table: Table) -> list[Decisions]:
    """Points to begin with, the best guess first: four rows of x at once, widest loads, deep, and more threads where
    rows are long or a multiprocessor has a thread block at most.
    """
    vec, overlap = table["vec"][-1], int(machine.has_clusters)
    # With several strips of x, or many block rows, there is enough to do beside a long row; else it is shared. With
    # many block rows the deepest point took 1.2 times as long as one of depth 2, and 1.7 times with clusters (seed 18).
    many = problem.grid[0] > MANY_ROWS * machine.cores
    clusters = (4, 1) if 4 in table["cluster"] and problem.m <= 8 and not many else (1,)
    choices = [
        {"threads": threads, "tile_m": tile_m, "vec": vec, "depth": depth, "cluster": cluster, "overlap": overlap}
        for tile_m in (4, 8, 2, 1)
        if tile_m in table["tile_m"]
        for threads in sorted(USUAL_THREADS, key=lambda threads: threads != wanted(problem, machine, tile_m))
        for depth in ((2, 4, 8, 1) if many else (8, 4, 2, 1))
        for cluster in clusters
    ]
    return [point for point in choices if allowed(problem, machine, point) is None]


extent = Derived["Extents", int]


@dataclass(frozen=True)
class Extents:
    """What a kernel's phases know before it runs."""

    # Extents of a block of the weight.
    rows: int
    cols: int
    # Block rows of the weight: units of work.
    block_rows: int
    # The decisions of these names.
    threads: int
    tile_m: int
    vec: int
    depth: int
    cluster: int
    overlap: int
    # The dtype of x, the weight and y, and bytes of an element.
    dtype: str
    itemsize: int
    # Vectors in a row of a block.
    across: int
    # Vectors of a block.
    block_vectors: int
    # Blocks that the threads have a vector of at once.
    groups: int
    # Rows of a block that a thread has a vector of, `row_step` rows apart: 1, unless a block has more vectors than
    # there are threads.
    passes: int
    # See `passes`.
    row_step: int
    # Blocks of a block row that a thread block has in flight at once, `depth` of each group.
    chunk: int
    # Copies of x that a thread issues for a chunk.
    copies: int
    # 32-bit words of a vector.
    words: int

    @classmethod
    def of(cls, problem: BsrMatmul, decisions: Decisions) -> Extents:
        rows, cols = problem.block_shape
        threads, vec, depth = decisions["threads"], decisions["vec"], decisions["depth"]
        itemsize = numpy_dtype(problem.dtype).itemsize
        across = cols // vec
        groups = max(1, threads // (rows * across))
        return cls(
            **decisions,
            rows=rows,
            cols=cols,
            block_rows=problem.grid[0],
            dtype=problem.dtype,
            itemsize=itemsize,
            across=across,
            block_vectors=rows * across,
            groups=groups,
            passes=max(1, rows * across // threads),
            row_step=threads // across,
            chunk=depth * groups,
            copies=ceildiv(depth * groups * decisions["tile_m"] * across, threads),
            words=vec * itemsize // 4,
        )

    # Blocks that the lanes of a warp have a vector of at once; 1 if a block is a warp's work or more.
    warp_blocks = extent(lambda e: max(1, 32 // e.block_vectors))
    # Sets of sums that no shuffle joins: one for every warp, or warps, that work on blocks of their own.
    sets = extent(lambda e: e.groups // min(e.groups, e.warp_blocks))
    # Elements of y that a thread block computes.
    outputs = extent(lambda e: e.rows * e.tile_m)
    # Sums, and elements of the weight in flight, that a thread holds.
    held = extent(lambda e: e.passes * (e.tile_m + e.depth * e.vec))

    @property
    def shared_bytes(self) -> int:
        """At most: of x as it is staged, of the sums of all groups, and of what rank 0 gets from the other ranks."""
        staged = self.chunk * (self.tile_m + 1) * self.cols * self.itemsize
        return staged + (self.groups + self.cluster - 1) * self.outputs * 4


def allowed(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> str | None:
    e, block_cols = Extents.of(problem, decisions), problem.grid[1]
    if e.held > MAX_HELD:
        return f"{e.held} sums and elements in registers exceed {MAX_HELD}"
    if e.copies > MAX_COPIES:
        return f"{e.copies} copies a thread and chunk exceed {MAX_COPIES}"
    if e.shared_bytes > MAX_SHARED:
        return f"{e.shared_bytes} bytes exceed shared memory of {MAX_SHARED}"
    # The smallest point stays, so that every shape has one.
    if e.chunk >= 2 * block_cols and (e.threads, e.depth) != (32, 1):
        return f"half of a chunk of {e.chunk} blocks lies beyond the {block_cols} of a row"
    if e.cluster > 1 and e.chunk * e.cluster >= 2 * block_cols:
        return f"half of {e.cluster} thread blocks have no part of a row of {block_cols} blocks"
    return None


def declines(problem: BsrMatmul, machine: Machine) -> bool:
    """Whether `default` leaves the problem to another template: a block has fewer elements than a warp has lanes, so
    that a thread block computes few outputs. Blocks of 4x4 took 1.7 times as long as in `warp_shuffle` on an H200
    (`scripts/regret.py`, seed 10), but 32 long block rows, each with a multiprocessor, 0.36 times as long.

    In a skewed pattern a block row may have nearly all of its blocks, and is one warp's work there: where 3,936 rows of
    up to 3,264 such blocks took 58 us, thread blocks took 23 (seed 18).
    """
    rows, cols = problem.block_shape
    block_rows, block_cols = problem.grid
    heavy = problem.pattern == "skewed" and block_cols * rows > HEAVY * block_rows
    return rows * cols < WARP and not heavy and wanted(problem, machine, TILE_M[-1]) < THREADS[-1]


def default(problem: BsrMatmul, machine: Machine) -> Decisions:
    return fitting(problem, machine, space(problem, machine))[0]


def features(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> Features:
    e = Extents.of(problem, decisions)
    return product_features(
        problem,
        machine,
        tile_m=e.tile_m,
        outputs=e.outputs,
        threads=e.threads,
        blocks=e.block_rows * ceildiv(problem.m, e.tile_m) * e.cluster,
        work_each=1,
        at_once=e.chunk,
        sharing=e.cluster,
        held=e.held,
    )
