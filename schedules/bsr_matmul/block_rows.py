"""Block-sparse matmul on a CPU: one thread per block row, SIMD vectors along the columns of a block.

The inner loop takes `simd` neighbouring columns of a stored block: `tile_n` of its rows, each multiplied with the same
columns of `tile_m` rows of x. A vector of the block serves `tile_m` products, a vector of x serves `tile_n`. Each of
these `tile_m` x `tile_n` elements of y has a vector of partial sums in a register, whose elements are added up once, at
the end of the block row.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

# Rows of x and rows of a block that are multiplied together.
TILE_M = powers(1, 16)
TILE_N = powers(1, 16)
# Their product is the number of vectors of partial sums. AVX-512 has 32 vector registers: beyond them the sums spill.
MAX_ACCUMULATORS = 32
# How many the default takes, in vectors of half a register: with more of them sums spill, with fewer the loads limit.
SUMS = 16
# Elements of a vector: up to four registers of AVX-512 in float32.
SIMD = powers(1, 64)
# Float32 elements of a vector register of AVX-512.
REGISTER = 16


def space(problem: BsrMatmul, machine: Machine) -> Table:
    rows, cols = problem.block_shape
    fitting = tuple(tile for tile in TILE_M if tile < 2 * problem.m)
    return {
        "tile_m": fitting,
        "tile_n": tuple(tile for tile in TILE_N if rows % tile == 0),
        "simd": tuple(simd for simd in SIMD if cols % simd == 0),
    }


def allowed(problem: BsrMatmul, machine: Machine, decisions: Decisions) -> str | None:
    registers = decisions["tile_m"] * decisions["tile_n"] * max(1, decisions["simd"] // REGISTER)
    return f"{registers} accumulators exceed {MAX_ACCUMULATORS}" if registers > MAX_ACCUMULATORS else None


def default(problem: BsrMatmul, machine: Machine) -> Decisions:
    table = space(problem, machine)
    tile_m = max(tile for tile in table["tile_m"] if tile <= 4)
    return {
        "tile_m": tile_m,
        "tile_n": max(tile for tile in table["tile_n"] if tile <= min(8, SUMS // tile_m)),
        "simd": max(simd for simd in table["simd"] if simd <= REGISTER // 2),
    }


def build(problem: BsrMatmul, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from .interface import output, scheduled

    rows, cols = problem.block_shape
    block_rows, _ = problem.grid
    k, biased, turned = problem.k, bool(problem.bias), bool(problem.turned)
    tile_m, tile_n, simd = decisions["tile_m"], decisions["tile_n"], decisions["simd"]
    outputs = tile_m * tile_n
    halvings = simd.bit_length() - 1

    # fmt: off
    def stored(io, block, row, column):
        return io.data[io.places[block], column, row] if turned else io.data[block, row, column]

    def regions(io, row):
        """What a block row reads."""
        shape = (cols, rows) if turned else (rows, cols)
        return [
            io.x[0:io.m, 0:k], io.data[0:io.nnzb, 0:shape[0], 0:shape[1]], io.indices[0:io.nnzb],
            io.indptr[row : row + 2],
            *([io.places[0:io.nnzb]] if turned else []),
            *([io.bias[row * rows : row * rows + rows]] if biased else []),
        ]

    @T.inline
    def body(io):
        for r in T.parallel(block_rows):
            with T.sblock("block_row"):
                row = T.axis.spatial(block_rows, r)
                T.reads(*regions(io, row))
                T.writes(io.y[0:io.m, row * rows : row * rows + rows])
                part = T.sblock_alloc_buffer((outputs, simd), "float32")
                for i, j in T.grid((io.m + (tile_m - 1)) // tile_m, rows // tile_n):
                    for o in T.unroll(outputs):
                        for lane in T.vectorized(simd):
                            part[o, lane] = T.float32(0)
                    for b in range(io.indptr[row + 1] - io.indptr[row]):
                        for c in range(cols // simd):
                            for o in T.unroll(outputs):
                                for lane in T.vectorized(simd):
                                    # Rows beyond m repeat the last one and are not stored.
                                    part[o, lane] = part[o, lane] + T.Cast(
                                        "float32",
                                        stored(
                                            io, io.indptr[row] + b, j * tile_n + o // tile_m, c * simd + lane),
                                    ) * T.Cast(
                                        "float32",
                                        io.x[
                                            T.min(i * tile_m + o % tile_m, io.m - 1),
                                            io.indices[io.indptr[row] + b] * cols + c * simd + lane,
                                        ],
                                    )
                    # The sum of a vector's elements: its upper half is added to the lower half until one element is
                    # left.
                    for h in T.unroll(halvings):
                        for o in T.unroll(outputs):
                            for lane in T.vectorized(T.max(simd // 2, 1)):
                                # Elements of the upper half keep values that are not used any more.
                                part[o, lane] = part[o, lane] + part[o, lane + (simd >> (h + 1))]
                    for o in T.unroll(outputs):
                        if i * tile_m + o % tile_m < io.m:
                            io.y[i * tile_m + o % tile_m, row * rows + j * tile_n + o // tile_m] = output(
                                io, row * rows + j * tile_n + o // tile_m, part[o, 0], plain=True)
    # fmt: on
    return Program(tvm.IRModule({"main": scheduled(problem, body, packed=True)}))


block_rows = Template(
    name="block_rows",
    version=1,
    operator="bsr_matmul",
    kind="llvm",
    summary="a thread a block row, vectors along the columns of a block",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
)
