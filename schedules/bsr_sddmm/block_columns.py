"""Sampled product on a CPU: one thread per block row, SIMD vectors along the columns of a block.

A thread keeps `tile_n` x `simd` sums of a stored block in registers while it walks the rows of `left` and `right`: a
vector of `right` serves `tile_n` products.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers
from tvm_sparse.operators.bsr_sddmm.problem import BsrSddmm

# Rows of a block that are multiplied with one vector, and elements of a vector: up to four registers of AVX-512.
TILE_N = powers(1, 16)
SIMD = powers(1, 64)
# Registers of AVX-512, and float32 elements of each. More sums than registers spill.
MOST_SUMS, REGISTER = 32, 16


def space(problem: BsrSddmm, machine: Machine) -> Table:
    rows, cols = problem.block_shape
    return {
        "tile_n": tuple(tile for tile in TILE_N if rows % tile == 0),
        "simd": tuple(simd for simd in SIMD if cols % simd == 0),
    }


def allowed(problem: BsrSddmm, machine: Machine, decisions: Decisions) -> str | None:
    registers = decisions["tile_n"] * max(1, decisions["simd"] // REGISTER)
    return f"{registers} registers of sums exceed {MOST_SUMS}" if registers > MOST_SUMS else None


def default(problem: BsrSddmm, machine: Machine) -> Decisions:
    table = space(problem, machine)
    return {
        "tile_n": max(tile for tile in table["tile_n"] if tile <= 8),
        "simd": max(simd for simd in table["simd"] if simd <= REGISTER),
    }


def build(problem: BsrSddmm, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..interface import cpu_program

    (rows, cols), (block_rows, _) = problem.block_shape, problem.grid
    tile_n, simd = decisions["tile_n"], decisions["simd"]

    # fmt: off
    @T.inline
    def body(io):
        for r in T.parallel(block_rows):
            with T.sblock("block_row"):
                row = T.axis.spatial(block_rows, r)
                T.reads(
                    io.left[0:io.m, row * rows : row * rows + rows], io.right[0:io.m, 0:problem.k],
                    io.indices[0:io.nnzb], io.indptr[row : row + 2])
                T.writes(io.data[0:io.nnzb, 0:rows, 0:cols])
                part = T.sblock_alloc_buffer((tile_n, simd), "float32")
                for b in range(io.indptr[row + 1] - io.indptr[row]):
                    for j, c in T.grid(rows // tile_n, cols // simd):
                        for o in T.unroll(tile_n):
                            for lane in T.vectorized(simd):
                                part[o, lane] = T.float32(0)
                        for i in range(io.m):
                            for o in T.unroll(tile_n):
                                for lane in T.vectorized(simd):
                                    part[o, lane] = part[o, lane] + T.Cast(
                                        "float32", io.left[i, row * rows + j * tile_n + o]
                                    ) * T.Cast(
                                        "float32",
                                        io.right[i, io.indices[io.indptr[row] + b] * cols + c * simd + lane],
                                    )
                        for o in T.unroll(tile_n):
                            for lane in T.vectorized(simd):
                                io.data[io.indptr[row] + b, j * tile_n + o, c * simd + lane] = T.Cast(
                                    problem.dtype, part[o, lane])
    # fmt: on
    return cpu_program(problem, body)


block_columns = Template(
    name="block_columns",
    version=1,
    operator="bsr_sddmm",
    kind="llvm",
    summary="a thread a block row, vectors along the columns of a block",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
)
