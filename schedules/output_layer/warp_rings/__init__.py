"""The output layer through tensor cores, parts of rows to a ring of each warp: lists of one row each, and wide rows.

See `tiles` first. Each warp has a ring in shared memory, whose stages are `depth` cache lines of each row of a
tile. Every lane asks for its row's part by one bulk copy, whose bytes the stage's mbarrier counts. No register waits
for memory, rows are read in runs as long as a stage, wherever they start, and what lies between them in shared memory
keeps lanes off each other's banks. A warp that has multiplied a stage asks for the one `stages` later, be it of another
tile: so the warps meet at no barrier of the ring, and what is in flight depends on nothing but shared memory.

| problem | warps | hidden states |
| --- | --- | --- |
| lists of one row each | each has tiles of its own (`tiles`), and meets no other | in shared memory |
| a vocabulary | eight share a tile | in registers, or a half in each (`staged` 2) where these hold no more |
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import Decisions, Program, Template

from ..tiles.sizes import launch
from ..words import OutputLayer
from .space import allowed, declines, default, extents, space


def build(problem: OutputLayer, decisions: Decisions) -> Program:
    from ..tiles.program import program
    from .kernel import product

    return program(problem, extents(problem, decisions), product)


warp_rings = partial(
    Template,
    kind="cuda",
    summary="parts of rows to rings of warps and through tensor cores; the best tokens of all or of the best tiles",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    launch=launch(extents),
    explicit_threads=True,
    declines=declines,
)
