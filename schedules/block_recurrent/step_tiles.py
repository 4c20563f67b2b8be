"""The block recurrent layer on a GPU, one kernel per step: `recurrent.step_kernels` with a weight in tiles."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Template
from tvm_sparse.operators.block_recurrent.problem import BlockRecurrent

from ..recurrent.step_kernels import LANES, THREADS, build, space


def default(problem: BlockRecurrent, machine: Machine) -> Decisions:
    """A warp for each unit. With 8 lanes, a step of two layers took 1.3 and 1.5 times as long on an H200
    (`scripts/regret.py`, seed 1).
    """
    return {"threads": min(THREADS), "reduce_threads": max(LANES)}


step_tiles = Template(
    name="step_tiles",
    version=2,
    operator="block_recurrent",
    kind="cuda",
    summary="a kernel a step; lanes of a warp share the rows of a unit",
    space=space,
    default=default,
    program=build,
    explicit_threads=True,
)
