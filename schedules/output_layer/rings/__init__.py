"""The exact output layer through tensor cores, with a ring of whole tiles in each thread block: from Hopper on.

Read `tiles` first. Bulk copies fill the ring in shared memory. A stage of it is a tile of whole rows, which is one run
of memory, so that a single bulk copy brings it. Loads row by row would read more than the row where its ends are not
those of cache lines, as with 1000 columns of 16 bits. As many bytes are in flight as shared memory holds, no register
waits for memory, and no shuffles take rows apart. The warps' sums meet at a barrier. After it all warps have read the
tile, and the tile `STAGES` later is requested into its stage.

Above 4096 columns two tiles of 16 tokens exceed shared memory. Then a tile has eight tokens, which are operand B of
`mma`, beside 16 rows of hidden states as operand A.

With `dynamic` the last tiles are taken by thread blocks as they become free, so that all end together (`taken`); with 0
all tiles are dealt out (`dealt`). A part of a vocabulary larger than the L2 cache may stay in it for the next call
(`cached`): all other tokens are marked to leave it first. A multiprocessor waits longer for data in the other half of
that cache. Therefore the tiles that stay are those that the same thread block reads in every call, never those that are
taken.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import Decisions, Program, in_phases

from ..words import OutputLayer
from . import space


def build(problem: OutputLayer, decisions: Decisions) -> Program:
    from ..tiles.program import program
    from . import dealt, taken

    e = space.extents(problem, decisions)
    return program(problem, e, taken.product if e.dynamic else dealt.product)


rings = partial(
    in_phases,
    space,
    summary="whole rows to a ring in shared memory and through tensor cores; the best tokens of the best tiles",
    program=build,
)
