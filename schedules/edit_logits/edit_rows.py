"""Edits of logits on a CPU: a thread takes rows, and edits one word after another."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template
from tvm_sparse.operators.edit_logits.problem import EditLogits

# Rows that the calling thread edits alone; 0: other threads are woken for any number of rows.
ALONE = (0, 1, 4, 16, 64)
# Edits that one thread makes in the time in which others would wake up: each takes some ten nanoseconds.
FEW_EDITS = 1024


def space(problem: EditLogits, machine: Machine) -> Table:
    return {"alone": ALONE}


def default(problem: EditLogits, machine: Machine) -> Decisions:
    """As for calls in place, which copy nothing."""
    few = FEW_EDITS // problem.words
    return {"alone": max(rows for rows in ALONE if rows <= max(1, few))}


def build(problem: EditLogits, decisions: Decisions) -> Program:
    from tvm_sparse.operators.edit_logits.definition import edit_row

    from ..device.loops import in_parallel
    from ..interface import cpu_program

    return cpu_program(problem, in_parallel(edit_row(problem), lambda io: io.batch, decisions["alone"]))


edit_rows = Template(
    name="edit_rows",
    version=2,
    operator="edit_logits",
    kind="llvm",
    summary="a thread a row, one word after another",
    space=space,
    default=default,
    program=build,
)
