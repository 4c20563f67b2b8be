"""The definition on a CPU, with a thread for each row."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template

from ..problem import RowArgmaxLogsumexp


def build(problem: RowArgmaxLogsumexp, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": problem.definition()}))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("row"))[0])
    return Program(schedule.mod)


argmax_rows = Template(
    name="argmax_rows",
    version=1,
    operator="row_argmax_logsumexp",
    kind="llvm",
    summary="a thread a row, in two passes",
    space=lambda problem, machine: {},
    default=lambda problem, machine: {},
    program=build,
)
