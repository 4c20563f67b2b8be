"""Winner-take-all hashing on a CPU: threads take some bands of a row at a time."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers
from tvm_sparse.operators.wta_hash.problem import WtaHash

# Bands of a task: fewer cost more to hand out than to hash.
CHUNK = powers(16, 512)


def space(problem: WtaHash, machine: Machine) -> Table:
    return {"chunk": tuple(c for c in CHUNK if c == CHUNK[0] or c <= problem.bands)}


def default(problem: WtaHash, machine: Machine) -> Decisions:
    return {"chunk": max(c for c in space(problem, machine)["chunk"] if c <= 128)}


def build(problem: WtaHash, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": problem.definition()}))
    row, band = schedule.get_loops(schedule.get_sblock("codes"))
    chunk, _ = schedule.split(band, [None, decisions["chunk"]])
    schedule.parallel(schedule.fuse(row, chunk))
    return Program(schedule.mod)


hash_rows = Template(
    name="hash_rows",
    version=1,
    operator="wta_hash",
    kind="llvm",
    summary="threads take some bands of a row at a time",
    space=space,
    default=default,
    program=build,
)
