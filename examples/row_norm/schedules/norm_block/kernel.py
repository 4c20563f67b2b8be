"""RMS norm on a GPU, a kernel in phases: a thread block a row, read twice, the second time from a cache.

Each thread sums the squares of its elements (`sum_squares`); the block's threads join their sums by shuffles and
through shared memory (`join`); then each divides its elements by the root of the mean (`scale_row`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Program, Table, Template, ceildiv, powers

from ..problem import RowNorm

WARP = 32
THREADS = powers(WARP, 1024)
# The widest load of a thread.
LOAD_BYTES = 16


def space(problem: RowNorm, machine: Machine) -> Table:
    widest = LOAD_BYTES // numpy_dtype(problem.dtype).itemsize
    vec = tuple(vec for vec in powers(1, widest) if problem.width % vec == 0)
    return {"threads": tuple(t for t in THREADS if t <= machine.max_threads), "vec": vec}


def allowed(problem: RowNorm, machine: Machine, decisions: Decisions) -> str | None:
    if decisions["threads"] > WARP and decisions["threads"] // 2 * decisions["vec"] >= problem.width:
        return f"half of {decisions['threads']} threads have no work in a row of {problem.width}"
    return None


def default(problem: RowNorm, machine: Machine) -> Decisions:
    table = space(problem, machine)
    vec = table["vec"][-1]
    return {"threads": next((t for t in (32, 64, 128) if t * vec >= problem.width), 256), "vec": vec}


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
        from tvm.script import tirx as T

        from tvm_sparse.schedules.device.state import named, register

        return named(cls(T.alloc_local([vec], dtype), register("float32"), T.alloc_shared([warps], "float32")))


def sum_squares(width: int, threads: int, vec: int) -> Callable[..., Any]:
    """Reads: the row. Writes: `total`. Barriers: none. After: `total` is the sum of the thread's own squares."""
    from tvm.script import tirx as T

    @T.inline
    def phase(s, X, row, t):
        s.total = T.float32(0)
        for i in T.serial((width // vec - t + (threads - 1)) // threads):
            for v in T.vectorized(vec):
                s.x[v] = X[row, (i * threads + t) * vec + v]
            for v in T.unroll(vec):
                s.total = s.total + T.Cast("float32", s.x[v]) * T.Cast("float32", s.x[v])

    return phase


def join(warps: int) -> Callable[..., Any]:
    """Reads: `total`. Writes: `total`, `sums`. Barriers: one. After: `total` is the sum of the row, in every thread."""
    from tvm.script import tirx as T

    @T.inline
    def phase(s, t):
        s.total = T.cuda.warp_sum(s.total)
        if warps > 1:
            if t % WARP == 0:
                s.sums[t // WARP] = s.total
            T.cuda.cta_sync()
            s.total = T.float32(0)
            for w in T.serial(warps):
                s.total = s.total + s.sums[w]

    return phase


def scale_row(dtype: str, width: int, threads: int, vec: int) -> Callable[..., Any]:
    """Reads: the row, `total`. Writes: `total`, the output. Barriers: none."""
    from tvm.script import tirx as T

    @T.inline
    def phase(s, X, Y, eps, row, t):
        s.total = T.sqrt(s.total * T.float32(1.0 / width) + eps)
        for i in T.serial((width // vec - t + (threads - 1)) // threads):
            for v in T.vectorized(vec):
                s.x[v] = X[row, (i * threads + t) * vec + v]
            for v in T.unroll(vec):
                s.x[v] = T.Cast(dtype, T.Cast("float32", s.x[v]) / s.total)
            for v in T.vectorized(vec):
                Y[row, (i * threads + t) * vec + v] = s.x[v]

    return phase


def build(problem: RowNorm, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    width, dtype = problem.width, problem.dtype
    threads, vec = decisions["threads"], decisions["vec"]
    warps = ceildiv(threads, WARP)
    summed, joined, scaled = sum_squares(width, threads, vec), join(warps), scale_row(dtype, width, threads, vec)

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
        summed(s, X, row, t)
        joined(s, t)
        scaled(s, X, Y, eps, row, t)

    return Program(tvm.IRModule({"main": main.with_attr("global_symbol", "main")}), pipeline="tirx")


norm_block = Template(
    name="norm_block",
    version=1,
    operator="row_norm",
    kind="cuda",
    summary="a thread block a row, two reads, the second from a cache",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
