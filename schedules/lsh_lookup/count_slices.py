"""Look-up on a CPU: threads take lists, and slices of the vocabulary, whose counts stay in a core's cache.

Each slice goes through all buckets of the list, so that several threads can work for one list.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, ceildiv
from tvm_sparse.formats.bitmap import BITS
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

SLICES = (1, 2, 4, 8, 16, 32)


def _chunk(problem: LshLookup, slices: int) -> int:
    """Words of a slice: whole words of the bitmap."""
    return ceildiv(ceildiv(problem.vocab, slices), BITS) * BITS


def space(problem: LshLookup, machine: Machine) -> Table:
    return {"chunk": tuple(sorted({_chunk(problem, slices) for slices in SLICES}))}


def default(problem: LshLookup, machine: Machine) -> Decisions:
    """A task for each core."""
    needed = max(n for n in SLICES if n == 1 or n * problem.lists <= machine.cores)
    return {"chunk": _chunk(problem, needed)}


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
    space=space,
    default=default,
    program=build,
)
