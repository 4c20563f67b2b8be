"""The sparse recurrent layer on a CPU, step by step: `recurrent.step_rows` with a weight of entries."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from ..recurrent.step_rows import build, default, space


def program(problem: SparseRecurrent, decisions: Decisions) -> Program:
    from .interface import cpu_program

    return build(problem, decisions, cpu_program)


step_rows = Template(
    name="step_rows",
    version=2,
    operator="sparse_recurrent",
    kind="llvm",
    summary="step by step; threads share the units, vectors run along the batch",
    space=space,
    default=default,
    program=program,
)
