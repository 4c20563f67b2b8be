"""The program of `warpgroups`: its workspaces and kernels, each a list of phases.

arrange     the hidden states as operand B, part by part of the columns; with `gated` no bounds, and no tiles yet
product     the scores of tiles of words  (`product`)
best        the best words of the rows    (`best`); or a word drawn (`draw`)
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program, Workspace

from ...device.overlap import start_consumer, wait_for_producer
from ...device.region import device_region
from ...interface import gpu_program
from ..best.kernel import best
from ..best.sizes import VECTOR
from ..draw import draw_token, slices_of
from ..tiles.product import load_vector
from ..words import OutputLayer, rows_shape
from .gate import clear_tops, store_vector
from .product import product
from .space import Extents


# fmt: off
@phase
def arrange(e, /, io, matrices):
    """The kernel that transposes vectors of the hidden states.

    It writes each strip of `tile_m` rows into `matrices`: the first vector of all its rows, then the second, and so on.
    """
    elements, vectors = T.meta_var(e.hidden // e.vectors), T.meta_var(e.parts * e.part_vectors)
    with device_region():
        vector, y = T.cta_id([vectors, (io.beam + (e.tile_m - 1)) // e.tile_m])
        t = T.thread_id([e.tile_m])
        words = T.alloc_local([4], "uint32")
        # Until it waits for this kernel to end, the consumer reads no more than a constant embedding.
        start_consumer()
        wait_for_producer()
        top: T.int32 = y * e.tile_m
        rows: T.int32 = T.min(io.beam - top, e.tile_m)
        if t < rows:
            for v in T.unroll(4):
                words[v] = T.uint32(0)
            if vector < e.vectors:
                load_vector(
                    words[0], words[1], words[2], words[3], io.hidden.ptr_to([top + t, vector * elements]))
            store_vector(
                matrices.ptr_to([top, (vector * rows + t) * 4]), words[0], words[1], words[2], words[3])
        if e.gated > 0:
            clear_tops(e, vectors * e.tile_m)(io, top, rows, vector * e.tile_m + t)
# fmt: on


def program(problem: OutputLayer, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)
    told = (
        Workspace("scores", rows_shape(problem, e.row_pitch), "float32"),
        Workspace("tops", rows_shape(problem, e.tops_pitch), "uint32"),
        Workspace("sums", rows_shape(problem, e.blocks, 2), "float32"),
    )
    own = (
        *((slices_of(e),) if e.draws else told),
        Workspace("matrices", rows_shape(problem, e.parts * e.part_vectors * (VECTOR // 4)), "uint32"),
    )
    put_in_order, multiply, find = arrange(e), product(e), draw_token(problem, e) if e.draws else best(e)

    # fmt: off
    @T.inline
    def body(io):
        put_in_order(io, io.matrices)
        multiply(io)
        find(io)
    # fmt: on
    return gpu_program(problem, body, own, overlapped=True)
