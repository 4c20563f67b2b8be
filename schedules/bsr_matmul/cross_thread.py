"""Block-sparse matmul, threads share a dot product: reduction over or within blocks (Gu 2020, section 4.4).

The stored elements of a block row, laid end to end, are dealt out to `lanes` threads: in whole blocks, each thread
going through its own (4.4.1, the `over_blocks` template), or in vectors of `vec`, so that neighbouring threads read
neighbouring vectors (4.4.2). Each keeps partial sums for `tile_m` rows of x and `tile_n` rows of the weight, so that a
vector of either serves several products. The partial sums are a stage of their own, reduced across threads: up to 32
lanes by warp shuffles (4.4.3, the `warp_shuffle` template), beyond that through shared memory (`cross_thread`).
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, powers

TILE_M = powers(1, 16)
TILE_N = powers(1, 8)
# Dot products (of tile_n rows each) that share a block of threads.
ROWS = powers(1, 32)
# Elements a load: 16 bytes of float32 or of float16.
VECTOR = powers(1, 8)
# Values a thread holds at once: its partial sums and the vectors that they are made of. Beyond these the compiler
# spills; the sums of more than a warp are reduced with barriers, and it unrolls fewer of them, which would leave the
# rest in local memory. Both were found by compiling the space.
MAX_HELD, MAX_HELD_SHARED = 96, 64


def space(lanes: tuple[int, ...], problem: Problem) -> Table:
    rows, cols = problem.block_shape
    itemsize = 4 if problem.dtype == "float32" else 2
    return {
        "reduce_threads": lanes,
        "rows": ROWS,
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * problem.m),
        "tile_n": tuple(tile for tile in TILE_N if rows % tile == 0),
        "vec": tuple(vec for vec in VECTOR if cols % vec == 0 and vec * itemsize <= 16),
    }


def blocks_space(problem: Problem, machine: Machine) -> Table:
    _, block_cols = problem.grid
    # More threads than a row could have blocks would never have work.
    lanes = tuple(lanes for lanes in powers(2, 256) if lanes < 2 * block_cols)
    if block_cols < 2 or lanes[-1] * max(rows for rows in ROWS if problem.n % rows == 0) < 32:
        raise NotApplicable(f"rows of {block_cols} blocks have no work for the 32 threads of a warp")
    return space(lanes, problem)


def shuffle_space(problem: Problem, machine: Machine) -> Table:
    return space(powers(2, 32), problem)


def shared_space(problem: Problem, machine: Machine) -> Table:
    if problem.k < 64:
        raise NotApplicable(f"a dot product of k={problem.k} has no work for 64 threads")
    return space(tuple(lanes for lanes in powers(64, 256) if lanes <= problem.k), problem)


def allowed(problem: Problem, machine: Machine, decisions: Decisions, most: int = MAX_HELD) -> str | None:
    threads = decisions["reduce_threads"] * decisions["rows"]
    if not 32 <= threads <= min(machine.max_threads, 512):
        return f"{threads} threads a block are not within 32 and 512"
    if (problem.n // decisions["tile_n"]) % decisions["rows"]:
        return f"{decisions['rows']} rows of {decisions['tile_n']} do not divide n={problem.n}"
    held = decisions["tile_m"] * decisions["tile_n"] + (decisions["tile_n"] + 1) * decisions["vec"]
    return f"{held} sums and elements in registers exceed {most}" if held > most else None


def shared_allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    return allowed(problem, machine, decisions, MAX_HELD_SHARED)


def blocks_allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    return allowed(problem, machine, decisions, MAX_HELD if decisions["reduce_threads"] <= 32 else MAX_HELD_SHARED)


def default(problem: Problem, machine: Machine) -> Decisions:
    """The middle of the space: a warp a row (or two warps), four rows a block of threads, all of a small m at once."""
    table = shuffle_space(problem, machine)
    rows = max((r for r in ROWS if r <= 4 and problem.n % r == 0), default=1)
    tile_m = max(tile for tile in table["tile_m"] if tile <= 8)
    return {"reduce_threads": 32, "rows": rows, "tile_m": tile_m, "tile_n": 1, "vec": 1}


def shared_default(problem: Problem, machine: Machine) -> Decisions:
    return {**default(problem, machine), "reduce_threads": 64}


def blocks_default(problem: Problem, machine: Machine) -> Decisions:
    """Up to 32 lanes, as many as a row can have blocks, and as many rows beside each other as make a warp of them."""
    lanes = max(lanes for lanes in blocks_space(problem, machine)["reduce_threads"] if lanes <= 32)
    fitting = [rows for rows in ROWS if problem.n % rows == 0 and rows * lanes >= 32]
    rows = next((rows for rows in fitting if rows >= 4), fitting[-1])
    return {**default(problem, machine), "reduce_threads": lanes, "rows": rows}


def definition(problem: Problem, tile_m: int, tile_n: int, lanes: int, vec: int, over_blocks: bool = False):
    """The product in three stages: partial sums by lane, their sum, and the output in its dtype.

    Each stage is a block of its own so that a schedule can place it; `part` names the lane that owns each sum.
    """
    from tvm.script import tirx as T

    from tvm_sparse.operators.bsr_matmul.epilogue import finish

    rows, cols = problem.block_shape
    block_rows, _ = problem.grid
    n, k, dtype = problem.n, problem.k, problem.dtype
    biased, activation = bool(problem.bias), problem.activation
    row_tiles = n // tile_n
    step = lanes * vec
    across = cols // vec

    def position(q, lane):
        """Where the q-th vector of a lane begins among the stored elements of a row of a block row."""
        if over_blocks:
            return (q // across * lanes + lane) * cols + q % across * vec
        return (q * lanes + lane) * vec

    def steps(elements):
        """Vectors of a lane that has most of them."""
        if over_blocks:
            return (elements // cols + (lanes - 1)) // lanes * across
        return (elements + (step - 1)) // step

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(
        x_h: T.handle, data_h: T.handle, indices_h: T.handle, indptr_h: T.handle, order_h: T.handle, long: T.int32,
        constant: T.int32, bias_h: T.handle, y_h: T.handle
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        m = T.int32()
        nnzb = T.int32()
        x = T.match_buffer(x_h, (m, k), dtype)
        data = T.match_buffer(data_h, (nnzb, rows, cols), dtype)
        indices = T.match_buffer(indices_h, (nnzb,), "int32")
        indptr = T.match_buffer(indptr_h, (block_rows + 1,), "int32")
        bias = T.match_buffer(bias_h, (n,), dtype)
        y = T.match_buffer(y_h, (m, n), dtype)
        part = T.sblock_alloc_buffer(((m + (tile_m - 1)) // tile_m, row_tiles, tile_n, tile_m, lanes), "float32")
        total = T.sblock_alloc_buffer(((m + (tile_m - 1)) // tile_m, row_tiles, tile_n, tile_m), "float32")
        for i, j, t in T.grid((m + (tile_m - 1)) // tile_m, row_tiles, lanes):
            with T.sblock("part"):
                vi, vj, lane = T.axis.remap("SSS", [i, j, t])
                T.reads(x[0:m, 0:k], data[0:nnzb, 0:rows, 0:cols], indices[0:nnzb], indptr[0 : block_rows + 1])
                T.writes(part[vi, vj, 0:tile_n, 0:tile_m, lane])
                w = T.sblock_alloc_buffer((tile_n, vec), dtype, scope="local")
                a = T.sblock_alloc_buffer((vec,), dtype, scope="local")
                for jj, ii in T.grid(tile_n, tile_m):
                    part[vi, vj, jj, ii, lane] = T.float32(0)
                # A row with no blocks takes one step in which every lane finds nothing to do.
                for q in range(steps(
                    (indptr[vj * tile_n // rows + 1] - indptr[vj * tile_n // rows]) * cols
                )):
                    if position(q, lane) < (
                        indptr[vj * tile_n // rows + 1] - indptr[vj * tile_n // rows]
                    ) * cols:
                        for jj in T.unroll(tile_n):
                            for v in T.vectorized(vec):
                                w[jj, v] = data[
                                    indptr[vj * tile_n // rows] + position(q, lane) // cols,
                                    vj * tile_n % rows + jj,
                                    position(q, lane) % cols + v,
                                ]
                        for ii in T.unroll(tile_m):
                            # Rows beyond m repeat the last one and are not stored.
                            for v in T.vectorized(vec):
                                a[v] = x[
                                    T.min(vi * tile_m + ii, m - 1),
                                    indices[indptr[vj * tile_n // rows] + position(q, lane) // cols] * cols
                                    + position(q, lane) % cols + v,
                                ]
                            for jj in T.unroll(tile_n):
                                for v in T.unroll(vec):
                                    part[vi, vj, jj, ii, lane] = part[vi, vj, jj, ii, lane] + T.Cast(
                                        "float32", w[jj, v]) * T.Cast("float32", a[v])
        for i, j, jj, ii, t in T.grid((m + (tile_m - 1)) // tile_m, row_tiles, tile_n, tile_m, lanes):
            with T.sblock("total"):
                vi, vj, vjj, vii, lane = T.axis.remap("SSSSR", [i, j, jj, ii, t])
                with T.init():
                    total[vi, vj, vjj, vii] = T.float32(0)
                total[vi, vj, vjj, vii] = total[vi, vj, vjj, vii] + part[vi, vj, vjj, vii, lane]
        for i, j, jj, ii in T.grid((m + (tile_m - 1)) // tile_m, row_tiles, tile_n, tile_m):
            with T.sblock("y"):
                vi, vj, vjj, vii = T.axis.remap("SSSS", [i, j, jj, ii])
                if biased:
                    T.reads(total[vi, vj, vjj, vii], bias[vj * tile_n + vjj])
                else:
                    T.reads(total[vi, vj, vjj, vii])
                T.writes(y[vi * tile_m + vii, vj * tile_n + vjj])
                if vi * tile_m + vii < m:
                    if biased:
                        y[vi * tile_m + vii, vj * tile_n + vjj] = finish(
                            total[vi, vj, vjj, vii], bias[vj * tile_n + vjj], activation, dtype)
                    else:
                        y[vi * tile_m + vii, vj * tile_n + vjj] = finish(
                            total[vi, vj, vjj, vii], None, activation, dtype)
    # fmt: on
    return problem.trimmed(main)


def build(problem: Problem, decisions: Decisions, over_blocks: bool = False) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    tile_m, tile_n, lanes = decisions["tile_m"], decisions["tile_n"], decisions["reduce_threads"]
    func = definition(problem, tile_m, tile_n, lanes, decisions["vec"], over_blocks)
    schedule = Schedule(tvm.IRModule({"main": func}))
    part, total, y = (schedule.get_sblock(name) for name in ("part", "total", "y"))

    # tiles of the output on blocks of threads, `rows` of them on one
    i, j, lane = schedule.get_loops(part)
    j, row = schedule.split(j, [None, decisions["rows"]])
    schedule.bind(i, "blockIdx.y")
    schedule.bind(j, "blockIdx.x")
    schedule.bind(row, "threadIdx.y")
    schedule.bind(lane, "threadIdx.x")
    schedule.set_scope(part, 0, "local")

    # the reduction over lanes, on the same threads
    schedule.reverse_compute_at(total, row)
    schedule.set_scope(total, 0, "local")
    schedule.bind(schedule.get_loops(total)[-1], "threadIdx.x")

    # the output: every lane has the sum, the first one stores it
    schedule.reverse_compute_at(y, row)
    return Program(schedule.mod)


def blocks_build(problem: Problem, decisions: Decisions) -> Program:
    return build(problem, decisions, over_blocks=True)


over_blocks = Template(
    name="over_blocks",
    version=1,
    operator="bsr_matmul",
    kind="cuda",
    summary="threads share a dot product, each with blocks of its own (Gu 2020, 4.4.1)",
    space=blocks_space,
    default=blocks_default,
    program=blocks_build,
    allowed=blocks_allowed,
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
)
