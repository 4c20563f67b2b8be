"""The output layer on a GPU: words are streamed through tensor cores, and the best of a row found by its tiles' best.

**First kernel: the product.** A tile is `tile_n` words by `tile_m` rows of hidden states. Tiles are dealt out to the
thread blocks in turn, so that at any time all of them read neighbouring words. The `reduce_warps` warps of a block
share the columns of a row: each multiplies its part of all words of a tile, and the parts are added through shared
memory. What a warp needs of the hidden states it keeps in registers from beginning to end, or all of them lie in shared
memory (`staged`). Words come straight from global memory into registers, 16 bytes a lane, where they are operands of
`mma` as they are (see `bsr_matmul.tensor_core`: columns are permuted alike in both operands). Lanes load whole cache
lines, each for its neighbour too, and part them by shuffles. A vocabulary larger than the L2 cache is marked to leave
it first (`evict_first`), so that scores stay. As soon as a step is multiplied, the one `depth` steps later is asked
for, be it of the next tile, so that as many are in flight at any time. Word ids of candidates are read one tile
further ahead. Of a vocabulary that the caller says is constant the first steps are asked for before the producer kernel
has ended.

Where a tile is shared by one warp alone (`reduce_warps` of 1) a block has `tiles` of them in hand at a time. Its warps
then meet at no barrier.

**With `stages`** words do not go to registers first: each warp has a ring in shared memory, which bulk copies fill, one
a row of a tile (see `ring`). As many bytes are on their way as shared memory holds, and no shuffles part them. Where
hidden states are in registers, warps that share a tile then read nothing but words. Or, with a `depth` of 0, the warps
of a block have one ring for whole rows: neighbouring words are one run of memory, wherever their rows start, and one
bulk copy brings a tile. Where two tiles of 16 words exceed shared memory, as of 4096 columns, a tile has eight, which
are the other operand: `mma` then has 16 rows of hidden states and eight words. Where neither registers nor shared
memory hold 16 hidden states, as of 8192 columns, each holds half of them (a `staged` of 2), beside rings of parts of
rows. With `dynamic` the last of the tiles of whole rows are taken as thread blocks come to them, so that all blocks end
together (see `tiles.dynamic`). The first tiles of a vocabulary may be on their way to the L2 cache before the producer
kernel is done (`prefetch`): in a graph of calls, while the second kernel of the call before has little to read. And
some of a vocabulary that is too large for the L2 cache may stay there for the next call (`cached`), if all other words
leave it first. A multiprocessor waits longer for what lies in the other half of that cache. So what stays are tiles
that the same thread block reads in every call, never those that are taken.

float32 is multiplied by three products of tf32: with x = h + l, h the upper 11 bits of the fraction, x y is
h h' + h l' + l h', which leaves out some 2^-22 of it.

A tile's scores go to a workspace, with the largest score of each of its rows, as an integer that orders like it. Sums
of exponentials relative to a maximum (Milakov & Gimelshein 2018, Algorithm 3) stay in registers until a block ends.

**Second kernel: the best.** The k best words of a row lie in the k tiles whose best words are the best: if a word is
among the k best and its tile is not among these, there are k better words. So a thread block a row finds the best
tiles, reads their scores again, and finds the k best words. The k-th largest of the maxima of groups of threads is a
bound that k tiles reach at least, and with them k words: what is below it counts neither among tiles nor among words.
The words that reach it, few more than k, are ranked by counting. Where more tiles or words reach it, as of many equal
scores, the k best tiles are found by counting first, and then a bound for words of their own. Keys are unique (see
`device.selection`), so that the result does not depend on who comes first, and no input makes the selection fail. Where
each thread has the largest scores of all its tiles in registers, as of the exact head, tiles are found by these alone,
without keys (`collect_bits`): the bound is the k-th best of the groups' tops (`device.tops`). With `direct` all scores
of a short list are searched in this way, which saves a trip to memory, and the first kernel has nothing to tell but
scores.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template

from ..words import OutputLayer
from .space import Extents, allowed, default, launch, space


def build(problem: OutputLayer, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, Extents.of(problem, decisions))


def tiles(operator: str, name: str, version: int) -> Template:
    """The template for one of the operators of the output layer."""
    return Template(
        name=name,
        version=version,
        operator=operator,
        kind="cuda",
        summary="words streamed through tensor cores; the best words of the best tiles",
        space=space,
        default=default,
        program=build,
        allowed=allowed,
        launch=launch,
        explicit_threads=True,
    )
