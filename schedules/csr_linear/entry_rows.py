"""Sparse linear layer on a CPU: one thread per row of the weight, several rows of x at a time.

An entry is loaded once for `tile_m` rows of x, each of which has a sum in a register.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers
from tvm_sparse.operators.csr_linear.problem import CsrLinear

# Rows of x: as many sums as registers hold.
TILE_M = powers(1, 16)


def space(problem: CsrLinear, machine: Machine) -> Table:
    return {"tile_m": tuple(tile for tile in TILE_M if tile < 2 * problem.m)}


def build(problem: CsrLinear, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..interface import cpu_program

    n, k, tile_m = problem.n, problem.k, decisions["tile_m"]

    # fmt: off
    @T.inline
    def body(io):
        for r in T.parallel(n):
            with T.sblock("row"):
                row = T.axis.spatial(n, r)
                T.reads(io.x[0:io.m, 0:k], io.indptr[row : row + 2], io.indices[0:io.nnz], io.values[0:io.nnz])
                T.writes(io.y[0:io.m, row])
                part = T.sblock_alloc_buffer((tile_m,), "float32")
                for i in range((io.m + (tile_m - 1)) // tile_m):
                    for o in T.unroll(tile_m):
                        part[o] = T.float32(0)
                    for e in range(io.indptr[row + 1] - io.indptr[row]):
                        for o in T.unroll(tile_m):
                            # Rows beyond m repeat the last one and are not stored.
                            part[o] = part[o] + T.Cast("float32", io.values[io.indptr[row] + e]) * T.Cast(
                                "float32", io.x[T.min(i * tile_m + o, io.m - 1), io.indices[io.indptr[row] + e]])
                    for o in T.unroll(tile_m):
                        if i * tile_m + o < io.m:
                            io.y[i * tile_m + o, row] = T.Cast(problem.dtype, part[o])
    # fmt: on
    return cpu_program(problem, body)


entry_rows = Template(
    name="entry_rows",
    version=1,
    operator="csr_linear",
    kind="llvm",
    summary="a thread a row of the weight, several rows of x at a time",
    space=space,
    default=lambda problem, machine: {"tile_m": max(tile for tile in space(problem, machine)["tile_m"] if tile <= 8)},
    program=build,
)
