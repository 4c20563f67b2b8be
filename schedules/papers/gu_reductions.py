"""Block-sparse matmul, several threads a dot product: reduction over or within blocks (Gu 2020, section 4.4).

The stored elements of one row of a block row, laid end to end, are dealt out to `reduce_threads` threads: in whole
blocks, each thread going through its own (4.4.1, the `over_blocks` template), or in vectors of `vec` elements, so that
neighbouring threads read neighbouring vectors (4.4.2). A thread keeps partial sums for `tile_m` rows of x and `tile_n`
rows of the weight, so that each vector that it loads serves several of them.

The partial sums are a stage of their own, and their sum across threads is another: TVM lowers that to warp shuffles for
up to 32 threads (4.4.3, the `warp_shuffle` template), and to shared memory and barriers for more (`cross_thread`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import (
    Decisions,
    Features,
    Launch,
    NotApplicable,
    Program,
    Table,
    Template,
    ceildiv,
    powers,
)
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

# Rows of x and rows of the weight of a thread's partial sums.
TILE_M = powers(1, 16)
TILE_N = powers(1, 8)
# Dot products (of tile_n rows each) of a thread block, each with threads of its own.
ROWS = powers(1, 32)
# Stored elements of a row for each thread of a dot product, by default.
STORED_EACH = 12
# Outputs of each multiprocessor up to which rows are few, steps of a warp from which on they are long, and threads for
# each such row.
WARP, FEW_ROWS, MOST_STEPS, MANY_THREADS = 32, 2, 16, 256
# Elements of a load: up to 16 bytes, of float32 or of 16-bit elements.
VECTOR = powers(1, 8)
# Values that a thread holds at once: its partial sums, and the vectors that they are made of. Beyond MAX_HELD the
# compiler spills. Sums of more than a warp are reduced with barriers, in a loop that it unrolls less: beyond
# MAX_HELD_SHARED it indexes the rest dynamically, which puts them into local memory. Both were found by compiling the
# space.
MAX_HELD, MAX_HELD_SHARED = 96, 64


def space(threads: tuple[int, ...], problem: BsrMatmul) -> Table:
    from ..bsr_matmul.stored import refuse_turned

    refuse_turned(problem)
    rows, cols = problem.block_shape
    itemsize = 4 if problem.dtype == "float32" else 2
    return {
        "reduce_threads": threads,
        "rows": ROWS,
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * problem.m),
        "tile_n": tuple(tile for tile in TILE_N if rows % tile == 0),
        "vec": tuple(vec for vec in VECTOR if cols % vec == 0 and vec * itemsize <= 16),
    }


def blocks_space(problem: BsrMatmul, machine: Machine) -> Table:
    _, block_cols = problem.grid
    # More threads than a row could have blocks would never have work.
    threads = tuple(count for count in powers(2, 256) if count < 2 * block_cols)
    if block_cols < 2 or threads[-1] * max(rows for rows in ROWS if problem.n % rows == 0) < 32:
        raise NotApplicable(f"rows of {block_cols} blocks have no work for the 32 threads of a warp")
    return space(threads, problem)


def shuffle_space(problem: BsrMatmul, machine: Machine) -> Table:
    return space(powers(2, 32), problem)


def shared_space(problem: BsrMatmul, machine: Machine) -> Table:
    if problem.k < 64:
        raise NotApplicable(f"a dot product of k={problem.k} has no work for 64 threads")
    return space(tuple(count for count in powers(64, 256) if count <= problem.k), problem)


def allowed(problem: BsrMatmul, machine: Machine, decisions: Decisions, most: int = MAX_HELD) -> str | None:
    threads = decisions["reduce_threads"] * decisions["rows"]
    if not 32 <= threads <= min(machine.max_threads, 512):
        return f"{threads} threads a block are not within 32 and 512"
    if (problem.n // decisions["tile_n"]) % decisions["rows"]:
        return f"{decisions['rows']} rows of {decisions['tile_n']} do not divide n={problem.n}"
    held = decisions["tile_m"] * decisions["tile_n"] + (decisions["tile_n"] + 1) * decisions["vec"]
    return f"{held} sums and elements in registers exceed {most}" if held > most else None


def shared_allowed(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> str | None:
    return allowed(problem, machine, decisions, MAX_HELD_SHARED)


def blocks_allowed(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> str | None:
    return allowed(problem, machine, decisions, MAX_HELD if decisions["reduce_threads"] <= 32 else MAX_HELD_SHARED)


def default(problem: BsrMatmul, machine: Machine) -> Decisions:
    """Four rows a thread block, each of up to a warp, with a thread for each twelve stored elements. Threads take two
    rows of a block and four of x, in loads of four elements, where blocks have them; else one row, and eight of x.
    """
    table = shuffle_space(problem, machine)
    tile_n = max(tile for tile in table["tile_n"] if tile <= 2)
    rows = max((r for r in ROWS if r <= 4 and problem.n // tile_n % r == 0), default=1)
    tile_m = max(tile for tile in table["tile_m"] if tile <= 8 // tile_n)
    vec = max(count for count in table["vec"] if count <= 4)
    each = problem.k * (1 - problem.sparsity) / STORED_EACH
    threads = next((n for n in table["reduce_threads"] if n >= max(each, 32 // rows)), 32)
    return {"reduce_threads": threads, "rows": rows, "tile_m": tile_m, "tile_n": tile_n, "vec": vec}


def shared_default(problem: BsrMatmul, machine: Machine) -> Decisions:
    return {**default(problem, machine), "reduce_threads": 64}


def blocks_declines(problem: BsrMatmul, machine: Machine) -> bool:
    """Whether a warp for each row is enough, of as many steps as it takes: 256 rows of 943 single elements took 10.9 us
    by `warp_shuffle` on an H200, and 2.4 with 256 threads each (`scripts/regret.py`, seed 19).
    """
    rows, cols = problem.block_shape
    steps = problem.k * (1 - problem.sparsity) / (WARP * min(cols, 4))
    few = problem.grid[0] * problem.m <= FEW_ROWS * machine.cores
    return not (few and rows * cols < WARP and steps >= MOST_STEPS)


def blocks_default(problem: BsrMatmul, machine: Machine) -> Decisions:
    """Up to 32 threads, as many as a row can have blocks, and as many rows beside each other as make a warp of them.

    Few long rows have 256 threads each.
    """
    point = default(problem, machine)
    if not blocks_declines(problem, machine):
        most = max(count for count in blocks_space(problem, machine)["reduce_threads"] if count <= MANY_THREADS)
        wide = {**point, "reduce_threads": most, "rows": 1, "tile_n": 1}
        if blocks_allowed(problem, machine, wide) is None:
            return wide
    threads = max(count for count in blocks_space(problem, machine)["reduce_threads"] if count <= 32)
    for tile_n in (point["tile_n"], 1):
        fitting = [rows for rows in ROWS if problem.n // tile_n % rows == 0 and rows * threads >= 32]
        if fitting:
            break
    rows = next((rows for rows in fitting if rows >= 4), fitting[-1])
    return {**point, "reduce_threads": threads, "rows": rows, "tile_n": tile_n}


def features(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> Features:
    """The features of the templates whose threads take vectors in turn."""
    _, cols = problem.block_shape
    return _features(problem, machine, decisions, cols / decisions["vec"])


def blocks_features(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> Features:
    """The features of the template whose threads take blocks in turn."""
    return _features(problem, machine, decisions, 1)


def _features(problem: BsrMatmul, machine: Machine, decisions: Decisions, work_each: float) -> Features:
    from ..bsr_matmul.features import features as product_features

    tile_m, tile_n, rows, vec = (decisions[name] for name in ("tile_m", "tile_n", "rows", "vec"))
    return product_features(
        problem,
        machine,
        tile_m=tile_m,
        outputs=tile_m * tile_n * rows,
        threads=launch(problem, decisions).threads,
        blocks=ceildiv(problem.m, tile_m) * (problem.n // (tile_n * rows)),
        work_each=work_each,
        at_once=decisions["reduce_threads"],
        held=tile_m * tile_n + (tile_n + 1) * vec,
    )


def launch(problem: BsrMatmul, decisions: Decisions) -> Launch:
    return Launch(decisions["reduce_threads"] * decisions["rows"])


@dataclass(frozen=True)
class Sizes:
    """How a product is cut into partial sums."""

    # Shape of a weight block.
    rows: int
    cols: int
    # As the decisions of these names. A *row tile* is `tile_n` rows of the weight, within a block row.
    tile_m: int
    tile_n: int
    vec: int
    # Threads that share a dot product.
    threads: int
    # Whether a thread takes every `threads`-th block of the block row, instead of every `threads`-th vector.
    whole_blocks: bool

    def position(self, q: Any, thread: Any) -> Any:
        """Where the q-th vector of a thread begins among the elements of a row of the block row, laid end to end."""
        if self.whole_blocks:
            across = self.cols // self.vec
            return (q // across * self.threads + thread) * self.cols + q % across * self.vec
        return (q * self.threads + thread) * self.vec

    def steps(self, elements: Any) -> Any:
        """Vectors of the thread that has most of them, for `elements` stored elements in a row of the block row."""
        if self.whole_blocks:
            return (elements // self.cols + (self.threads - 1)) // self.threads * (self.cols // self.vec)
        step = self.threads * self.vec
        return (elements + (step - 1)) // step

    def first(self, io: Any, tile: Any) -> Any:
        """The first block of the block row that a row tile lies in."""
        return io.indptr[tile * self.tile_n // self.rows]

    def elements(self, io: Any, tile: Any) -> Any:
        """Elements in a row of the block row that a row tile lies in."""
        return (io.indptr[tile * self.tile_n // self.rows + 1] - self.first(io, tile)) * self.cols


# fmt: off
def partial_sums(sizes: Sizes, row_tiles: int) -> Phase:
    """The block `part` of a schedule: each thread's part of each sum.

    Reads: x and the weight. Writes: `part`. After: every thread has its part of each sum, zero if that is nothing.
    """
    from tvm.script import tirx as T

    rows, cols, tile_m, tile_n, vec, threads = (
        sizes.rows, sizes.cols, sizes.tile_m, sizes.tile_n, sizes.vec, sizes.threads,
    )  # fmt: skip
    position, steps, first, elements = sizes.position, sizes.steps, sizes.first, sizes.elements

    @T.inline
    def stage(io, part):
        for i, j, t in T.grid((io.m + (tile_m - 1)) // tile_m, row_tiles, threads):
            with T.sblock("part"):
                vi, vj, thread = T.axis.remap("SSS", [i, j, t])
                T.reads(
                    io.x[0:io.m, 0:io.problem.k], io.data[0:io.nnzb, 0:rows, 0:cols], io.indices[0:io.nnzb],
                    io.indptr[0 : io.problem.n // rows + 1])
                T.writes(part[vi, vj, 0:tile_n, 0:tile_m, thread])
                w = T.sblock_alloc_buffer((tile_n, vec), io.problem.dtype, scope="local")
                a = T.sblock_alloc_buffer((vec,), io.problem.dtype, scope="local")
                for jj, ii in T.grid(tile_n, tile_m):
                    part[vi, vj, jj, ii, thread] = T.float32(0)
                for q in range(steps(elements(io, vj))):
                    if position(q, thread) < elements(io, vj):
                        for jj in T.unroll(tile_n):
                            for v in T.vectorized(vec):
                                w[jj, v] = io.data[
                                    first(io, vj) + position(q, thread) // cols,
                                    vj * tile_n % rows + jj,
                                    position(q, thread) % cols + v,
                                ]
                        for ii in T.unroll(tile_m):
                            # Rows beyond m repeat the last one and are not stored.
                            for v in T.vectorized(vec):
                                a[v] = io.x[
                                    T.min(vi * tile_m + ii, io.m - 1),
                                    io.indices[first(io, vj) + position(q, thread) // cols] * cols
                                    + position(q, thread) % cols + v,
                                ]
                            for jj in T.unroll(tile_n):
                                for v in T.unroll(vec):
                                    part[vi, vj, jj, ii, thread] = part[vi, vj, jj, ii, thread] + T.Cast(
                                        "float32", w[jj, v]) * T.Cast("float32", a[v])
    return stage


def totals(sizes: Sizes, row_tiles: int) -> Phase:
    """The block `total` of a schedule: the sum over the threads.

    Reads: `part`. Writes: `total`. After: each sum is whole.
    """
    from tvm.script import tirx as T

    tile_m, tile_n, threads = sizes.tile_m, sizes.tile_n, sizes.threads

    @T.inline
    def stage(io, part, total):
        for i, j, jj, ii, t in T.grid((io.m + (tile_m - 1)) // tile_m, row_tiles, tile_n, tile_m, threads):
            with T.sblock("total"):
                vi, vj, vjj, vii, thread = T.axis.remap("SSSSR", [i, j, jj, ii, t])
                with T.init():
                    total[vi, vj, vjj, vii] = T.float32(0)
                total[vi, vj, vjj, vii] = total[vi, vj, vjj, vii] + part[vi, vj, vjj, vii, thread]
    return stage


def outputs(sizes: Sizes, row_tiles: int, biased: bool) -> Phase:
    """The block `y` of a schedule: bias, activation, and the store.

    Reads: `total` and the bias. Writes: y, but for rows beyond m.
    """
    from tvm.script import tirx as T

    from ..bsr_matmul.interface import output

    tile_m, tile_n = sizes.tile_m, sizes.tile_n

    @T.inline
    def stage(io, total):
        for i, j, jj, ii in T.grid((io.m + (tile_m - 1)) // tile_m, row_tiles, tile_n, tile_m):
            with T.sblock("y"):
                vi, vj, vjj, vii = T.axis.remap("SSSS", [i, j, jj, ii])
                if biased:
                    T.reads(total[vi, vj, vjj, vii], io.bias[vj * tile_n + vjj])
                else:
                    T.reads(total[vi, vj, vjj, vii])
                T.writes(io.y[vi * tile_m + vii, vj * tile_n + vjj])
                if vi * tile_m + vii < io.m:
                    io.y[vi * tile_m + vii, vj * tile_n + vjj] = output(
                        io, vj * tile_n + vjj, total[vi, vj, vjj, vii], plain=True)
    return stage


def definition(problem: BsrMatmul, tile_m: int, tile_n: int, threads: int, vec: int, whole_blocks: bool = False):
    """The product in three stages: partial sums by thread, their sum, and the output in its dtype.

    Each stage is a block of its own so that a schedule can place it; the last axis of `part` is the thread that owns a
    partial sum.
    """
    from tvm.script import tirx as T

    from ..bsr_matmul.interface import scheduled

    sizes = Sizes(*problem.block_shape, tile_m, tile_n, vec, threads, whole_blocks)
    row_tiles = problem.n // tile_n
    sum_parts, add_up, store = (
        partial_sums(sizes, row_tiles), totals(sizes, row_tiles), outputs(sizes, row_tiles, bool(problem.bias)),
    )  # fmt: skip

    @T.inline
    def body(io):
        part = T.sblock_alloc_buffer(((io.m + (tile_m - 1)) // tile_m, row_tiles, tile_n, tile_m, threads), "float32")
        total = T.sblock_alloc_buffer(((io.m + (tile_m - 1)) // tile_m, row_tiles, tile_n, tile_m), "float32")
        sum_parts(io, part)
        add_up(io, part, total)
        store(io, total)
    return scheduled(problem, body)
# fmt: on


def build(problem: BsrMatmul, decisions: Decisions, whole_blocks: bool = False) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    tile_m, tile_n, threads = decisions["tile_m"], decisions["tile_n"], decisions["reduce_threads"]
    func = definition(problem, tile_m, tile_n, threads, decisions["vec"], whole_blocks)
    schedule = Schedule(tvm.IRModule({"main": func}))
    part, total, y = (schedule.get_sblock(name) for name in ("part", "total", "y"))

    # tiles of the output on thread blocks, `rows` of them on one
    i, j, thread = schedule.get_loops(part)
    j, row = schedule.split(j, [None, decisions["rows"]])
    schedule.bind(i, "blockIdx.y")
    schedule.bind(j, "blockIdx.x")
    schedule.bind(row, "threadIdx.y")
    schedule.bind(thread, "threadIdx.x")
    schedule.set_scope(part, 0, "local")

    # the reduction, on the same threads
    schedule.reverse_compute_at(total, row)
    schedule.set_scope(total, 0, "local")
    schedule.bind(schedule.get_loops(total)[-1], "threadIdx.x")

    # the output: every thread has the sum, the first one stores it
    schedule.reverse_compute_at(y, row)
    return Program(schedule.mod)


def blocks_build(problem: BsrMatmul, decisions: Decisions) -> Program:
    return build(problem, decisions, whole_blocks=True)


over_blocks = Template(
    name="over_blocks",
    version=1,
    operator="bsr_matmul",
    kind="cuda",
    summary="threads share a dot product, each with blocks of its own (Gu 2020, 4.4.1)",
    space=blocks_space,
    default=blocks_default,
    declines=blocks_declines,
    program=blocks_build,
    allowed=blocks_allowed,
    features=blocks_features,
    launch=launch,
)

warp_shuffle = Template(
    name="warp_shuffle",
    version=1,
    operator="bsr_matmul",
    kind="cuda",
    summary="up to 32 threads share a dot product, summed by shuffles (Gu 2020, 4.4.3)",
    space=shuffle_space,
    default=default,
    program=build,
    allowed=allowed,
    features=features,
    launch=launch,
)

cross_thread = Template(
    name="cross_thread",
    version=1,
    operator="bsr_matmul",
    kind="cuda",
    summary="64 threads or more share a dot product, summed through shared memory (Gu 2020, 4.4.2)",
    space=shared_space,
    default=shared_default,
    program=build,
    allowed=shared_allowed,
    features=features,
    launch=launch,
)
