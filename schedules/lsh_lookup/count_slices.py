"""Look-up on a CPU: threads take lists, and slices of the vocabulary, whose counts stay in a core's cache.

Each slice goes through all buckets of the list, so that several threads can work for one list.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from ..lsh.extents import cpu_chunk_each, cpu_chunks


def build(problem: LshLookup, decisions: Decisions) -> Program:
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": problem.by_slices(decisions["chunk"])}))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("slice"))[0])
    return Program(schedule.mod)


count_slices = Template(
    name="count_slices",
    version=1,
    operator="lsh_lookup",
    kind="llvm",
    summary="threads take lists and slices of the vocabulary",
    space=lambda problem, machine: {"chunk": cpu_chunks(problem.vocab)},
    default=lambda problem, machine: {"chunk": cpu_chunk_each(problem.vocab, problem.lists, machine)},
    program=build,
)
