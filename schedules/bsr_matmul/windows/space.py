"""The space of `windows`, and the extents that its kernel is built from. Loads no compiler."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Features, Launch, NotApplicable, Table, ceildiv
from tvm_sparse.operators.bsr_matmul.dense import time_of_warpgroups, time_of_warps, time_of_windows
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from ...device.pool import RESERVED, SHARED
from ..features import features as product_features
from ..warpgroups.space import ALIGNED, GROUP_M, L2_BYTES, LAUNCH, REGISTERS, VECTOR, WARPGROUP, multiplied

# Warpgroups of a thread block, and rows of the weight of each: a thread has half as many sums.
TILES = (2, 4)
TILE_N = (32, 64, 128)
# Columns of x in a stage, in boxes of as many columns as a row of 128 bytes has; columns of an instruction, and bytes
# of a row of a block that it reads.
PANEL, BOX, STEP, STEP_BYTES = (64, 128, 256, 512), 64, 16, 32
STAGES = (2, 3, 4, 6)
# Rows of x from which on the template is offered; most rows and columns of a block, and block rows of a warpgroup.
LEAST_M, MOST_ROWS, MOST_COLS, MOST_EACH = 33, 64, 128, 16
# Registers of a thread beside sums.
BESIDES = 32
# Figures of `estimate`, taken from counts and not fitted to times: clocks of an instruction that reads x, clocks of a
# microsecond, and bytes that a multiprocessor's shared memory delivers in a clock; microseconds that a warp takes for a
# stage, for a block row in it and for a block; those before the first stage has come; how many standard deviations of
# blocks find room; and the latency of a stage, which the others hide.
OF_X, CLOCKS, SHARED_BYTES = 16, 1700, 128
OF_STAGE, OF_ROW, OF_BLOCK, BEGIN, DEVIATIONS, ON_ITS_WAY = 0.2, 0.03, 0.015, 1.0, 2, 0.125


def space(problem: BsrMatmul, machine: Machine) -> Table:
    rows, cols = problem.block_shape
    multiplied(problem, machine, MOST_ROWS)
    if cols > MOST_COLS or cols & (cols - 1):
        raise NotApplicable(f"blocks of {rows}x{cols} have other columns than 16, 32, 64 or {MOST_COLS}")
    if problem.m < LEAST_M:
        raise NotApplicable(f"m={problem.m} fills too little of the {GROUP_M} rows of a warpgroup")
    return {
        "tiles": TILES,
        "tile_n": tuple(sorted({tile // rows * rows for tile in TILE_N if tile >= rows})),
        "panel": tuple(panel for panel in PANEL if panel % cols == 0 and (panel == BOX or panel < 2 * problem.k)),
        "stages": STAGES,
        "overlap": (0, 1),
    }


def allowed(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> str | None:
    e = Extents.of(problem, decisions)
    if e.rows_each > MOST_EACH:
        return f"{e.rows_each} block rows of a warpgroup exceed {MOST_EACH}"
    if not machine.blocks_at_once(e.threads, e.tile_n // 2 + BESIDES, 0):
        return f"{e.tile_n // 2} sums in each of {e.threads} threads exceed the registers"
    if e.room < 1:
        return f"{e.stages} stages of {e.panel} columns of x leave no room for blocks"
    if e.stages > 2 and e.stages * e.panel > 2 * max(problem.k, e.panel):
        return f"{e.stages} stages of {e.panel} columns are twice a row of k={problem.k}"
    return None


def declines(problem: BsrMatmul, machine: Machine) -> bool:
    return time_of_windows(problem) >= min(time_of_warps(problem), time_of_warpgroups(problem))


def default(problem: BsrMatmul, machine: Machine) -> Decisions:
    """The point that `estimate` takes to be the fastest."""
    table = space(problem, machine)
    found = [dict(zip(table, choices, strict=True)) for choices in itertools.product(*table.values())]
    found = [point for point in found if point["overlap"] and allowed(problem, machine, point) is None]
    return min(found, key=lambda point: estimate(problem, machine, Extents.of(problem, point)))


def estimate(problem: BsrMatmul, machine: Machine, e: Extents) -> float:
    """About how many microseconds the kernel takes: its rounds of thread blocks, bound by what the L2 cache delivers,
    by what instructions read from shared memory, or by the steps of a warp. Panels of which not all blocks find room
    come again.
    """
    density = 1 - problem.sparsity
    expected = density * e.rows_each * e.panel / e.cols  # blocks of a warpgroup in a panel
    again = max(1.0, (expected + DEVIATIONS * (expected * (1 - density)) ** 0.5) / e.room)
    panels = ceildiv(e.k, e.panel) * again
    brought = panels * e.x_bytes + density * e.n_each * e.k * 2
    clocks = density * e.n_each / e.rows * e.k / STEP * max(e.rows / 2, OF_X + e.rows / 4) + brought / SHARED_BYTES
    shared = max((brought + e.tile_m * e.n_each * 2) / L2_BYTES, clocks / CLOCKS)
    alone = panels * (OF_STAGE + OF_ROW * e.rows_each + OF_BLOCK * expected)
    latency = BEGIN + ON_ITS_WAY * panels / (e.stages - 1) ** 2
    each, thread_blocks = e.thread_blocks_each, e.tiles_n * ceildiv(problem.m, e.tile_m)
    of_one = thread_blocks / machine.cores  # of a multiprocessor
    if of_one <= each:
        return LAUNCH + latency + max(shared * max(of_one, 1.0), alone)
    rounds = (of_one / each + ceildiv(thread_blocks, machine.cores * each)) / 2
    return LAUNCH + rounds * (latency + max(shared * each, alone))


@dataclass(frozen=True)
class Extents:
    """What the kernel's phases know before it runs.

    Attributes
    ----------
    rows, cols
        Extents of a block of the weight.
    block_rows, k, n
        Block rows of the weight, its columns and its rows.
    dtype
        The dtype of x, the weight and y.
    tiles, tile_n, panel, stages, overlap
        The decisions of these names.
    """

    rows: int
    cols: int
    block_rows: int
    k: int
    n: int
    dtype: str
    tiles: int
    tile_n: int
    panel: int
    stages: int
    overlap: int

    @classmethod
    def of(cls, problem: BsrMatmul, decisions: Decisions) -> Extents:
        rows, cols = problem.block_shape
        return cls(rows, cols, problem.grid[0], problem.k, problem.n, problem.dtype, **decisions)

    @property
    def tile_m(self) -> int:
        """Rows of x of a thread block."""
        return GROUP_M

    @property
    def threads(self) -> int:
        """Threads of a thread block: warpgroups, and a producer warp for each."""
        return self.tiles * (WARPGROUP + 32)

    @property
    def arrivals(self) -> int:
        """Arrivals that make a stage full: of producer threads' copies, of producer warps, and with x."""
        return self.tiles * 33 + 1

    @property
    def rows_each(self) -> int:
        """Block rows of a warpgroup."""
        return self.tile_n // self.rows

    @property
    def block_rows_each(self) -> int:
        """Block rows of a thread block."""
        return self.tiles * self.rows_each

    @property
    def n_each(self) -> int:
        """Rows of the weight of a thread block."""
        return self.tiles * self.tile_n

    @property
    def tiles_n(self) -> int:
        """Thread blocks that have all block rows."""
        return ceildiv(self.block_rows, self.block_rows_each)

    @property
    def box_bytes(self) -> int:
        """Bytes of a box of x."""
        return self.tile_m * BOX * 2

    @property
    def x_bytes(self) -> int:
        """Bytes of a panel of x."""
        return self.panel // BOX * self.box_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.rows * self.cols * 2

    @property
    def thread_blocks_each(self) -> int:
        """Thread blocks of a multiprocessor, 1 or 2, as registers allow."""
        return 2 if 2 * self.threads * (self.tile_n // 2 + BESIDES) <= REGISTERS else 1

    @property
    def all_bytes(self) -> int:
        """Dynamic shared memory that a thread block may take."""
        return SHARED // self.thread_blocks_each - RESERVED

    @property
    def room(self) -> int:
        """Blocks of a warpgroup for which a stage has room: as shared memory allows, or all of a panel."""
        kept = self.stages * (16 + 4 * self.block_rows_each + 4 * self.tiles) + 12 * self.block_rows_each + 64
        left = (self.all_bytes - kept) // self.stages - self.x_bytes - ALIGNED
        return min(left // (self.tiles * (self.block_bytes + 4)), self.rows_each * (self.panel // self.cols))

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage: a panel of x, and room for blocks."""
        return ceildiv(self.x_bytes + self.tiles * self.room * self.block_bytes, ALIGNED) * ALIGNED

    @property
    def list_words(self) -> int:
        """Entries of a part's list of a stage: one more than blocks, as the next one is always read."""
        return self.room + 1

    @property
    def pitch(self) -> int:
        """Elements from one row of y to the next, in shared memory."""
        return self.n_each + VECTOR

    @property
    def stored_bytes(self) -> int:
        """Bytes of a tile of y in shared memory, where the stages have been: they take as much, as `room` is that of a
        panel or that of all shared memory.
        """
        return self.tile_m * self.pitch * 2

    @property
    def barriers_at(self) -> int:
        """Bytes of all stages, after which mbarriers stand."""
        return self.stages * self.stage_bytes

    @property
    def words_at(self) -> int:
        """Bytes of stages and mbarriers, after which the rows' numbers of blocks stand."""
        return self.barriers_at + 2 * 8 * self.stages

    @property
    def listed_at(self) -> int:
        """Bytes before the lists."""
        return self.words_at + 4 * self.stages * self.block_rows_each

    @property
    def nearest_at(self) -> int:
        """Bytes before the parts' next block columns, and the block rows."""
        return self.listed_at + 4 * self.stages * self.tiles * self.list_words

    @property
    def pool_bytes(self) -> int:
        """Dynamic shared memory."""
        return ceildiv(self.nearest_at + 4 * (2 * self.tiles + self.block_rows_each), 16) * 16


def launch(problem: BsrMatmul, decisions: Decisions) -> Launch:
    e = Extents.of(problem, decisions)
    return Launch(e.threads, e.pool_bytes)


def features(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> Features:
    e = Extents.of(problem, decisions)
    return product_features(
        problem,
        machine,
        tile_m=e.tile_m,
        outputs=e.tile_m * e.n_each,
        threads=e.threads,
        blocks=e.tiles_n * ceildiv(problem.m, e.tile_m),
        work_each=e.block_rows_each,
        at_once=1,
        held=e.tile_n // 2,
    )
