"""The output layer on a GPU for what the other templates do not fit: any hidden size and any k.

Each warp computes the score of one token and one row, element by element. Then a thread block for each row finds the
k-th largest score by radix passes: its phases are those of `softmax_topk.radix_select`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Launch, Program, Table, Template

# Threads of a block of the second kernel.
THREADS = (256, 512, 1024)
# Warps of a block of the first kernel, each with a score of its own.
WARPS = 8


def space(problem: Any, machine: Machine) -> Table:
    return {"threads": THREADS}


def default(problem: Any, machine: Machine) -> Decisions:
    return {"threads": 512}


def build(problem: Any, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, decisions["threads"])


def launch(problem: Any, decisions: Decisions) -> Launch:
    """The launch of the first kernel."""
    return Launch(32 * WARPS)


dots = partial(
    Template,
    kind="cuda",
    summary="a warp a score, then radix passes over a row: any hidden size, any k",
    space=space,
    default=default,
    program=build,
    launch=launch,
    explicit_threads=True,
)
