"""The exact output layer on compute capability 9.0 for tens of rows, or the longest: products of warpgroups.

Beside such hidden states neither registers nor shared memory have room for all of their columns, and a product of one
warp (`mma`, as in `rings`) reads more of them from shared memory than of words. Here tensor cores read the hidden
states from shared memory themselves (`wgmma`), once for the words of four warps.

**The kernel ahead** puts the hidden states in order: as matrices of eight rows by 16 bytes, which lie one behind the
other, part by part of the columns. With `overlap` 2 it lets the product start at once, and words of a `constant`
embedding are on their way before it has ended.

**First kernel: the product.** A tile is `tile_n` words by `tile_m` rows. `tiles` warps of a thread block have one each,
and go through the columns together, a part of `depth` cache lines after the other. A producer warp brings the hidden
states of a part by one bulk copy; shared memory has those of three parts, and mbarriers hand them over and back. All
thread blocks read them again for each round of tiles, from the L2 cache. Words come by `cp.async` to a ring of `stages`
parts, a warp's own, and go to registers by `ldmatrix`: they are operand A, the hidden states operand B. The ring asks
for the next part as soon as all words of one are in registers.

A warp passes its scores through shared memory, so that a lane has a row's: nobody has to find their largest and to sum
their exponentials up across lanes, and memory gets whole sectors. Sums of exponentials relative to a maximum (Milakov
& Gimelshein 2018, Algorithm 3) stay in registers until a thread block ends.

With `gated` only such scores are written as may be among a row's best (`gate`).

**Second kernel: the best** (`best`).

Tried on an H200 without gain: hidden states that a cluster's thread blocks bring for each other (multicast), which
halves what they read of them; warps of their own for what comes after the product; products of a part that are awaited
in the next one, which the assembler then awaits one by one; bulk copies of words, one a row; warpgroups that begin with
other parts, so that they end their tiles in turn.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import Decisions, Program, Template

from ..words import OutputLayer
from .space import Extents, allowed, default, launch, space


def build(problem: OutputLayer, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, Extents.of(problem, decisions))


warpgroups = partial(
    Template,
    kind="cuda",
    summary="words streamed through products of warpgroups, of tens of rows or long ones; the best of their tiles",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    launch=launch,
    explicit_threads=True,
)
