"""The program of `registers`, `rings` and `warp_rings`: workspaces, and two kernels, each a list of phases.

product     the scores of tiles of tokens, given by the template
best        the best tokens of the rows, from the best of the tiles  (`best.kernel`),
            or from all scores of a short list                       (`best_of_all`)
draw        or a token drawn, from the sums of tiles                 (`draw`)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import Program, Workspace

from ...interface import gpu_program
from ..best.kernel import best, best_of_all
from ..draw import draw_token, slices_of
from ..words import OutputLayer, rows_shape, with_scores, writes_scores
from .sizes import Extents


# fmt: off
def program(problem: OutputLayer, e: Extents, product: Callable[[Extents], Callable[..., Any]]) -> Program:
    """The program of one point, whose first kernel is `product(e)`, called with (io, scores, tops, sums)."""
    multiply = product(e)
    if not e.k:
        @T.inline
        def alone(io):
            multiply(io, io.logits, None, None)

        return gpu_program(problem, alone, overlapped=e.overlap > 0)

    # How many tiles of a strip of rows were taken: of each strip's first row.
    tickets = (Workspace("tickets", rows_shape(problem), "int32"),) if e.dynamic else ()
    if e.draws:
        draw = draw_token(problem, e)

        @T.inline
        def and_draw(io):
            multiply(io, None, io.slices, None)
            draw(io)
        return gpu_program(problem, and_draw, (slices_of(e), *tickets), overlapped=e.overlap > 0)

    shown = writes_scores(problem)
    own: tuple[Workspace, ...] = ()
    if not shown:
        own += (Workspace("scores", rows_shape(problem, e.row_pitch), "float32"),)
    find = best_of_all(e) if e.direct else best(e)
    if e.summed:
        own += (
            Workspace("tops", rows_shape(problem, e.list_tiles), "uint32"),
            Workspace("sums", rows_shape(problem, e.blocks, 2), e.sum_dtype),
        )
    own += tickets

    @T.inline
    def both(given):
        io = T.meta_var(with_scores(given))
        multiply(io, io.scores, getattr(io, "tops", None), getattr(io, "sums", None))
        find(io)
    return gpu_program(problem, both, own, overlapped=e.overlap > 0)
# fmt: on
