"""Stream compaction on a CPU: threads take slices of lists, and each counts the words before its slice itself."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.compaction.problem import Compaction

from ..lsh.extents import cpu_chunk_each, cpu_chunks


def build(problem: Compaction, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": problem.by_slices(decisions["chunk"])}))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("slice"))[0])
    return Program(schedule.mod)


compact_slices = Template(
    name="compact_slices",
    version=2,
    operator="compaction",
    kind="llvm",
    summary="threads take slices of lists",
    space=lambda problem, machine: {"chunk": cpu_chunks(problem.vocab)},
    default=lambda problem, machine: {"chunk": cpu_chunk_each(problem.vocab, problem.lists, machine)},
    program=build,
)
