"""The block recurrent layer on a CPU, step by step: `recurrent.step_rows` with a weight in tiles."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.block_recurrent.problem import BlockRecurrent

from ..recurrent.step_rows import build, default, space


def program(problem: BlockRecurrent, decisions: Decisions) -> Program:
    from .interface import cpu_program

    return build(problem, decisions, cpu_program)


tile_rows = Template(
    name="tile_rows",
    version=1,
    operator="block_recurrent",
    kind="llvm",
    summary="step by step; threads share the units, vectors run along the batch",
    space=space,
    default=default,
    program=program,
)
