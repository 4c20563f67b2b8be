"""Templates for CPUs that cut the vocabulary into slices, with which threads work side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template

from .extents import cpu_chunk_each, cpu_chunks


def space(problem: Any, machine: Machine) -> Table:
    return {"chunk": cpu_chunks(problem.vocab)}


def default(problem: Any, machine: Machine) -> Decisions:
    return {"chunk": cpu_chunk_each(problem.vocab, problem.lists, machine)}


def schedule(problem: Any, decisions: Decisions) -> Program:
    """The operator's definition by slices of `chunk` words, with a thread for each slice of a list."""
    import tvm
    from tvm.s_tir import Schedule

    schedule = Schedule(tvm.IRModule({"main": problem.by_slices(decisions["chunk"])}))
    schedule.parallel(schedule.get_loops(schedule.get_sblock("slice"))[0])
    return Program(schedule.mod)


# A template whose decision is the size of a slice; `program` says what it runs.
sliced = partial(Template, kind="llvm", space=space, default=default)
