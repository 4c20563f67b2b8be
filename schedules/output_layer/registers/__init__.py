"""The output layer through tensor cores, tokens straight from global memory to registers: before Hopper, and for beams.

See `tiles` first. 16 bytes a lane are loaded, whole cache lines, each lane for its neighbour too, and parted by
shuffles. As soon as a step is multiplied, the one `depth` steps later is loaded, be it of the next tile, so that as
many are in flight at any time. Token ids of candidates are read one tile further ahead. The first steps of a vocabulary
that the caller says is constant are loaded before the producer kernel has ended.

With `reduce_warps` 1 a thread block has as many tiles in hand, each with a warp of its own, as registers have room for.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import Decisions, Program, Template

from ..tiles.sizes import launch
from ..words import OutputLayer
from .space import allowed, default, extents, space


def build(problem: OutputLayer, decisions: Decisions) -> Program:
    from ..tiles.program import program
    from .kernel import product

    return program(problem, extents(problem, decisions), product)


registers = partial(
    Template,
    kind="cuda",
    summary="tokens to registers and through tensor cores; the best tokens of the best tiles",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    launch=launch(extents),
    explicit_threads=True,
)
