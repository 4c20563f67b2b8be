"""Block-sparse matmul on a CPU: a thread a block row, vectors along the columns of a block.

Each step of the inner loop multiplies a vector of one block row's elements with the same columns of several rows of
x, so that the block is read once for `tile_m` rows of x and each vector of x serves `tile_n` rows of the block; the
sums stay in registers, one vector an output element, and are folded once at the end of the block row.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers

# Rows of x and rows of a block that one pass computes: their product is the number of vector accumulators, and
# beyond the 32 registers of AVX-512 they spill.
TILE_M = powers(1, 16)
TILE_N = powers(1, 16)
MAX_ACCUMULATORS = 32
LANES = powers(1, 64)


def space(problem: Problem, machine: Machine) -> Table:
    rows, cols = problem.block_shape
    fitting = tuple(tile for tile in TILE_M if tile < 2 * problem.m)
    return {
        "tile_m": fitting,
        "tile_n": tuple(tile for tile in TILE_N if rows % tile == 0),
        "simd": tuple(lanes for lanes in LANES if cols % lanes == 0),
    }


def allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    # Lanes beyond 16 take several registers each.
    registers = decisions["tile_m"] * decisions["tile_n"] * max(1, decisions["simd"] // 16)
    return f"{registers} accumulators exceed {MAX_ACCUMULATORS}" if registers > MAX_ACCUMULATORS else None


def default(problem: Problem, machine: Machine) -> Decisions:
    table = space(problem, machine)
    return {
        "tile_m": max(tile for tile in table["tile_m"] if tile <= 8),
        "tile_n": max(tile for tile in table["tile_n"] if tile <= 2),
        "simd": max(lanes for lanes in table["simd"] if lanes <= 16),
    }


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from tvm_sparse.operators.bsr_matmul.epilogue import finish

    rows, cols = problem.block_shape
    block_rows, _ = problem.grid
    n, k, dtype = problem.n, problem.k, problem.dtype
    biased, activation = bool(problem.bias), problem.activation
    tile_m, tile_n, lanes = decisions["tile_m"], decisions["tile_n"], decisions["simd"]
    outputs = tile_m * tile_n
    halvings = lanes.bit_length() - 1

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(
        x_h: T.handle, data_h: T.handle, indices_h: T.handle, indptr_h: T.handle, order_h: T.handle, long: T.int32,
        constant: T.int32, bias_h: T.handle, y_h: T.handle
    ):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        m = T.int32()
        nnzb = T.int32()
        # Arrays of other libraries are aligned to their elements, no more.
        x = T.match_buffer(x_h, (m, k), dtype, align=2)
        data = T.match_buffer(data_h, (nnzb, rows, cols), dtype, align=2)
        indices = T.match_buffer(indices_h, (nnzb,), "int32", align=4)
        indptr = T.match_buffer(indptr_h, (block_rows + 1,), "int32", align=4)
        bias = T.match_buffer(bias_h, (n,), dtype, align=2)
        y = T.match_buffer(y_h, (m, n), dtype, align=2)
        for r in T.parallel(block_rows):
            with T.sblock("block_row"):
                row = T.axis.spatial(block_rows, r)
                if biased:
                    T.reads(x[0:m, 0:k], data[0:nnzb, 0:rows, 0:cols], indices[0:nnzb], indptr[row : row + 2],
                            bias[row * rows : row * rows + rows])
                else:
                    T.reads(x[0:m, 0:k], data[0:nnzb, 0:rows, 0:cols], indices[0:nnzb], indptr[row : row + 2])
                T.writes(y[0:m, row * rows : row * rows + rows])
                part = T.sblock_alloc_buffer((outputs, lanes), "float32")
                for i, j in T.grid((m + (tile_m - 1)) // tile_m, rows // tile_n):
                    for o in T.unroll(outputs):
                        for lane in T.vectorized(lanes):
                            part[o, lane] = T.float32(0)
                    for b in range(indptr[row + 1] - indptr[row]):
                        for c in range(cols // lanes):
                            for o in T.unroll(outputs):
                                for lane in T.vectorized(lanes):
                                    # Rows beyond m repeat the last one and are not stored.
                                    part[o, lane] = part[o, lane] + T.Cast(
                                        "float32", data[indptr[row] + b, j * tile_n + o // tile_m, c * lanes + lane]
                                    ) * T.Cast(
                                        "float32",
                                        x[
                                            T.min(i * tile_m + o % tile_m, m - 1),
                                            indices[indptr[row] + b] * cols + c * lanes + lane,
                                        ],
                                    )
                    for h in T.unroll(halvings):
                        for o in T.unroll(outputs):
                            for lane in T.vectorized(T.max(lanes // 2, 1)):
                                # Lanes past the half add up again what is no longer looked at.
                                part[o, lane] = part[o, lane] + part[o, lane + (lanes >> (h + 1))]
                    for o in T.unroll(outputs):
                        if i * tile_m + o % tile_m < m:
                            if biased:
                                y[i * tile_m + o % tile_m, row * rows + j * tile_n + o // tile_m] = finish(
                                    part[o, 0], bias[row * rows + j * tile_n + o // tile_m], activation, dtype)
                            else:
                                y[i * tile_m + o % tile_m, row * rows + j * tile_n + o // tile_m] = finish(
                                    part[o, 0], None, activation, dtype)
    # fmt: on
    return Program(tvm.IRModule({"main": problem.trimmed(main)}))


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
