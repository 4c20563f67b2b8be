"""The decisions of the templates made by schedule primitives."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Launch, NotApplicable, Table, powers

from ..problems import RowProblem

WARP = 32
# Terms that one thread adds up one after the other in float32. The sum's rounding grows with their number: of 25,000
# ascending logits it is 4e-5, twice what the operators allow.
MAX_TERMS = 8192


def thread_space(problem: RowProblem, machine: Machine) -> Table:
    """The values of `threads`: threads of a block, each with a row of its own."""
    if problem.vocab > MAX_TERMS:
        raise NotApplicable(f"one sum of vocab={problem.vocab} terms rounds too much: more than {MAX_TERMS} are shared")
    return {"threads": powers(32, 256)}


def thread_default(problem: RowProblem, machine: Machine) -> Decisions:
    return {"threads": 64}


def block_space(problem: RowProblem, machine: Machine) -> Table:
    """The values of `reduce_threads`: threads of a block, which share a row."""
    counts = tuple(count for count in powers(64, 1024) if count <= min(problem.vocab, machine.max_threads))
    if not counts:
        raise NotApplicable(f"a row of vocab={problem.vocab} has no work for 64 threads")
    return {"reduce_threads": counts}


def block_default(problem: RowProblem, machine: Machine) -> Decisions:
    return {"reduce_threads": max(count for count in block_space(problem, machine)["reduce_threads"] if count <= 256)}


def warp_space(problem: RowProblem, machine: Machine) -> Table:
    """The values of `rows`: rows of a block, each with a warp of its own."""
    if problem.vocab < WARP:
        raise NotApplicable(f"a row of vocab={problem.vocab} has no work for {WARP} threads")
    return {"rows": powers(1, 16)}


def warp_default(problem: RowProblem, machine: Machine) -> Decisions:
    return {"rows": 4}


def block_launch(problem: RowProblem, decisions: Decisions) -> Launch:
    return Launch(decisions["reduce_threads"])


def warp_launch(problem: RowProblem, decisions: Decisions) -> Launch:
    return Launch(WARP * decisions["rows"])
