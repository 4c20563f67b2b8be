"""The sparse recurrent layer on a GPU, a kernel a step: `recurrent.step_kernels` with a weight of entries."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from ..recurrent.step_kernels import build, default, space


def program(problem: SparseRecurrent, decisions: Decisions) -> Program:
    from .interface import gpu_program

    return build(problem, decisions, gpu_program)


step_kernels = Template(
    name="step_kernels",
    version=2,
    operator="sparse_recurrent",
    kind="cuda",
    summary="a kernel a step; lanes of a warp share the rows of a unit",
    space=space,
    default=default,
    program=program,
    explicit_threads=True,
)
