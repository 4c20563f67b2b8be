"""The block recurrent layer on a GPU, a kernel a step: `recurrent.step_kernels` with a weight in tiles."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.block_recurrent.problem import BlockRecurrent

from ..recurrent.step_kernels import build, default, space


def program(problem: BlockRecurrent, decisions: Decisions) -> Program:
    from .interface import gpu_program

    return build(problem, decisions, gpu_program)


step_tiles = Template(
    name="step_tiles",
    version=2,
    operator="block_recurrent",
    kind="cuda",
    summary="a kernel a step; lanes of a warp share the rows of a unit",
    space=space,
    default=default,
    program=program,
    explicit_threads=True,
)
