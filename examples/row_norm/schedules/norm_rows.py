"""RMS norm on a CPU, by schedule primitives: a thread a row, sums of squares in several vectors at once."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers

from ..problem import RowNorm

# Elements of a vector. Beyond the width of a register a vector is several, as `depth` says it too.
SIMD = powers(1, 16)
# Vectors of sums: as many as an addition has cycles of latency keep its unit busy.
DEPTH = powers(1, 8)


def space(problem: RowNorm, machine: Machine) -> Table:
    return {"simd": SIMD, "depth": DEPTH}


def allowed(problem: RowNorm, machine: Machine, decisions: Decisions) -> str | None:
    parts = decisions["simd"] * decisions["depth"]
    return f"a row of {problem.width} is not dealt out evenly to {parts} sums" if problem.width % parts else None


def default(problem: RowNorm, machine: Machine) -> Decisions:
    simd = max(simd for simd in SIMD if problem.width % simd == 0)
    return {"simd": simd, "depth": max(depth for depth in (1, 2, 4) if problem.width % (simd * depth) == 0)}


def build(problem: RowNorm, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    simd, depth = decisions["simd"], decisions["depth"]
    schedule = Schedule(tvm.IRModule({"main": problem.stages(simd * depth)}))
    part, squares, out = (schedule.get_sblock(name) for name in ("part", "squares", "out"))

    # a thread a row, which computes the row's sums before it writes the row
    row, column = schedule.get_loops(out)
    schedule.parallel(row)
    schedule.compute_at(squares, row)
    schedule.compute_at(part, row, preserve_unit_loops=True)
    _, lane = schedule.split(column, [None, simd])
    schedule.vectorize(lane)

    # the sums of a row side by side, and along the row one after another
    *_, sums, along = schedule.get_loops(part)
    vectors, lane = schedule.split(sums, [depth, simd])
    schedule.reorder(along, vectors, lane)
    schedule.vectorize(lane)
    schedule.unroll(vectors)
    schedule.decompose_reduction(part, along)
    return Program(schedule.mod)


norm_rows = Template(
    name="norm_rows",
    version=1,
    operator="row_norm",
    kind="llvm",
    summary="a thread a row, sums of squares in vectors",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
)
