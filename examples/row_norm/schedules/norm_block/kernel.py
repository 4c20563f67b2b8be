"""The kernel of `norm_block`, in phases.

Each thread sums the squares of its elements (`sum_squares`); the block's threads join their sums by shuffles and
through shared memory (`join`); then each divides its elements by the root of the mean (`scale_row`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tvm
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program, ceildiv
from tvm_sparse.schedules.device.state import named, register

from ...problem import RowNorm
from .space import WARP


@dataclass
class RowState:
    """What the phases share.

    `x`: a thread's elements in hand; `total`: a register, its sum; `sums`: one a warp, in shared memory.
    """

    x: Any
    total: Any
    sums: Any

    @classmethod
    def alloc(cls, dtype: str, vec: int, warps: int) -> RowState:
        return named(cls(T.alloc_local([vec], dtype), register("float32"), T.alloc_shared([warps], "float32")))


@phase
def sum_squares(width, threads, vec, /, s, X, row, t):
    """Reads: the row. Writes: `total`. Barriers: none. After: `total` is the sum of the thread's own squares."""
    s.total = T.float32(0)
    for i in T.serial((width // vec - t + (threads - 1)) // threads):
        for v in T.vectorized(vec):
            s.x[v] = X[row, (i * threads + t) * vec + v]
        for v in T.unroll(vec):
            s.total = s.total + T.Cast("float32", s.x[v]) * T.Cast("float32", s.x[v])


@phase
def join(warps, /, s, t):
    """Reads: `total`. Writes: `total`, `sums`. Barriers: one. After: `total` is the sum of the row, in every thread."""
    s.total = T.cuda.warp_sum(s.total)
    if warps > 1:
        if t % WARP == 0:
            s.sums[t // WARP] = s.total
        T.cuda.cta_sync()
        s.total = T.float32(0)
        for w in T.serial(warps):
            s.total = s.total + s.sums[w]


@phase
def scale_row(dtype, width, threads, vec, /, s, X, Y, eps, row, t):
    """Reads: the row, `total`. Writes: `total`, the output. Barriers: none."""
    s.total = T.sqrt(s.total * T.float32(1.0 / width) + eps)
    for i in T.serial((width // vec - t + (threads - 1)) // threads):
        for v in T.vectorized(vec):
            s.x[v] = X[row, (i * threads + t) * vec + v]
        for v in T.unroll(vec):
            s.x[v] = T.Cast(dtype, T.Cast("float32", s.x[v]) / s.total)
        for v in T.vectorized(vec):
            Y[row, (i * threads + t) * vec + v] = s.x[v]


def program(problem: RowNorm, decisions: Decisions) -> Program:
    """The program of a point."""
    width, dtype, threads, vec = problem.width, problem.dtype, decisions["threads"], decisions["vec"]
    warps = ceildiv(threads, WARP)

    @T.prim_func
    def main(x_h: T.handle, eps: T.float32, out_h: T.handle):
        rows = T.int32()
        X = T.match_buffer(x_h, (rows, width), dtype)
        Y = T.match_buffer(out_h, (rows, width), dtype)
        T.device_entry()
        block = T.cta_id([rows])
        t = T.thread_id([threads])
        # Offsets into the array pass 2^31.
        row: T.int64 = T.Cast("int64", block)
        s = T.meta_var(RowState.alloc(dtype, vec, warps))
        sum_squares(width, threads, vec)(s, X, row, t)
        join(warps)(s, t)
        scale_row(dtype, width, threads, vec)(s, X, Y, eps, row, t)

    return Program(tvm.IRModule({"main": main.with_attr("global_symbol", "main")}), pipeline="tirx")
