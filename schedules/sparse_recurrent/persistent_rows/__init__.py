"""template"""
from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from .space import Extents, allowed, default, space


def build(problem: SparseRecurrent, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, Extents.of(problem, decisions))


persistent_rows = Template(
    name="persistent_rows",
    version=1,
    operator="sparse_recurrent",
    kind="cuda",
    summary="all steps in one cooperative launch, weights on chip, states exchanged through the L2 cache",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
