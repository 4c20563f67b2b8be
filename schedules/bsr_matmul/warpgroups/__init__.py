"""Block-sparse matmul by products of warpgroups (`wgmma`), for tens of rows of x and more."""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from .space import Extents, allowed, default, features, launch, space


def build(problem: BsrMatmul, decisions: Decisions) -> Program:
    from .kernel import kernel

    return kernel(problem, Extents.of(problem, decisions))


warpgroups = Template(
    name="block_warpgroups",
    version=1,
    operator="bsr_matmul",
    kind="cuda",
    summary="panels of x and 16-bit blocks in shared memory, products of warpgroups, clusters share x",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    features=features,
    launch=launch,
    explicit_threads=True,
)
