"""The program of `tiles`: its workspaces, and its kernels, each a list of phases.

product     the scores of tiles of words                            (`product`, `ring`, or `dynamic`)
best        the best words of the rows, from the best of the tiles  (`best`),
            or from all scores of a short list                      (`best_of_all`)
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.template import Program, Workspace

from ..interface import gpu_program, rows_shape
from ..words import OutputLayer
from .best import best, best_of_all
from .dynamic import dynamic_product
from .product import product
from .ring import ring_product
from .space import Extents


def program(problem: OutputLayer, e: Extents) -> Program:
    """The program of one point of the space."""
    multiply = dynamic_product(e) if e.dynamic else ring_product(e) if e.stages else product(e)
    if not e.k:
        # fmt: off
        @T.inline
        def alone(io):
            multiply(io, io.logits, None, None)
        # fmt: on

        return gpu_program(problem, alone, overlapped=e.overlap > 0)

    if e.direct:
        search = best_of_all(e)

        # fmt: off
        @T.inline
        def both(io):
            multiply(io, io.workspaces["scores"], None, None)
            search(io)
        # fmt: on

        scores = (Workspace("scores", rows_shape(problem, e.row_pitch), "float32"),)
        return gpu_program(problem, both, scores, overlapped=e.overlap > 0)

    find = best(e)
    own: tuple[Workspace, ...] = (
        Workspace("scores", rows_shape(problem, e.row_pitch), "float32"),
        Workspace("tops", rows_shape(problem, e.list_tiles), "uint32"),
        Workspace("sums", rows_shape(problem, e.blocks, 2), e.sum_dtype),
    )
    if e.dynamic:
        own += (Workspace("tickets", rows_shape(problem), "int32"),)  # tiles that were taken; of each strip's first row

    # fmt: off
    @T.inline
    def body(io):
        multiply(io, io.workspaces["scores"], io.workspaces["tops"], io.workspaces["sums"])
        find(io)
    # fmt: on
    return gpu_program(problem, body, own, overlapped=e.overlap > 0)
