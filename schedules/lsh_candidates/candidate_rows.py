"""Candidate words on a CPU: threads take lists, from hash to compaction."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates


def build(problem: LshCandidates, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": problem.definition()}))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("list"))[0])
    return Program(schedule.mod)


candidate_rows = Template(
    name="candidate_rows",
    version=1,
    operator="lsh_candidates",
    kind="llvm",
    summary="threads take lists, from hash to compaction",
    space=lambda problem, machine: {},
    default=lambda problem, machine: {},
    program=build,
)
