"""Stream compaction on a CPU: threads take lists."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.compaction.problem import Compaction


def build(problem: Compaction, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": problem.definition()}))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("list"))[0])
    return Program(schedule.mod)


compact_rows = Template(
    name="compact_rows",
    version=1,
    operator="compaction",
    kind="llvm",
    summary="threads take lists",
    space=lambda problem, machine: {},
    default=lambda problem, machine: {},
    program=build,
)
