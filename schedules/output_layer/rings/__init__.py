"""The exact output layer through tensor cores, whole rows to a ring of each thread block: from Hopper on.

See `tiles` first. Bulk copies fill the ring, whose stages are tiles of whole rows. A tile is one run of memory,
which one bulk copy brings, whatever a row's length is: loads by row ask for more than the row has where its ends are
not those of cache lines, as of 1000 columns of 16 bits. As many bytes are in flight as shared memory holds, no register
waits for memory, and no shuffles part rows. The barrier at which the warps' sums meet tells that all have read a tile;
then the one `STAGES` later is requested into its place.

Where two tiles of 16 tokens exceed shared memory, as of 4096 columns, a tile has eight, which are the other operand:
`mma` then has 16 rows of hidden states and eight tokens.

With `dynamic` the last of the tiles are taken as thread blocks come to them, so that all end together (`taken`); with 0
all are dealt out (`dealt`). Some of a vocabulary that is too large for the L2 cache may stay there for the next call
(`cached`), as all other tokens leave it first. A multiprocessor waits longer for what lies in the other half of that
cache. So what stays are tiles that the same thread block reads in every call, never those that are taken.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import Decisions, Program, Template

from ..tiles.sizes import launch
from ..words import OutputLayer
from .space import allowed, declines, default, extents, space


def build(problem: OutputLayer, decisions: Decisions) -> Program:
    from ..tiles.program import program
    from . import dealt, taken

    e = extents(problem, decisions)
    return program(problem, e, taken.product if e.dynamic else dealt.product)


rings = partial(
    Template,
    kind="cuda",
    summary="whole rows to a ring in shared memory and through tensor cores; the best tokens of the best tiles",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    launch=launch(extents),
    explicit_threads=True,
    declines=declines,
)
