"""A step of an LSH head on a GPU in two kernels: hash, look-up and product side by side, then the best words.

Of some 6,000 candidates of the paper's settings nine in ten are the frequent words, which are known when the head is
built: their product need not wait for the hash. What hits add is small, and few words reach the threshold in two rows
of a beam: so a word is multiplied as soon as one row has hits enough, by the thread block that found the last of them.
No list of candidates is made, nobody scans counts, and thread blocks meet only between the two kernels.

**First kernel,** a thread block a multiprocessor, with two kinds of warps:

1.  *Product.* Hidden states are in shared memory. The thread block's share of the frequent words comes from memory into
    registers, and goes to tensor cores: a warp has a tile of 8 words and a part of their columns. Parts of a score
    are added up from shared memory.
2.  *Hash and look up.* A warp has some bands of one row: it finds their places and buckets, and goes through the words
    of all of these as one list, a lane a word, so that long buckets cost nothing extra. Counts are in global memory,
    two of 16 bits in a word, added to by atomics that return what was there. The lane whose addition reaches the
    threshold sets the word's bit in the list's bitmap, and if it was the first to do so, the word is the block's.
3.  Then all warps multiply the words that their block has won. There may be any number: what the block's list has no
    room for waits in memory until the list has been multiplied.

**row_blocks** gives rows thread blocks of their own instead: some blocks hash, look up and count, the others multiply
frequent words. A row is a block's, or a cluster's, and its counts are in shared memory: at beams of 36 and 48 global
atomics took longer than all else. Which words reach the threshold is decided in the end, 64 counts of a warp at a time,
and their bits are set in the bitmap 32 at a time. At smaller beams this leaves too much of the look-up to too few
multiprocessors.

Which block finds a word differs from run to run; results do not (`powers`).

Each score becomes a key (ordered bits, word) at a place of its own in global memory: a frequent word's place is fixed,
others are given out by a counter. Each block also says which key is the best one that it has made.

**Second kernel,** a thread block a row of hidden states: the n-th best of the blocks' best keys is a bound that few
keys reach. All are read once, exponentials are added up, and those that reach the bound are ranked. Other thread blocks
set counts and bitmaps to zero for the next step.

Shi, Xu & Knight 2018, Figures 2, 4 and 5, do these steps one after another.

**overlap** is programmatic dependent launch. With 1 the first kernel waits for its producer kernel, then lets its
consumer kernel start. With 2 it lets it start at once, and reads `permutations` and `ids` before it waits, which no
kernel may write that itself starts its consumer kernel early. The second kernel waits for the first in any case.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.lsh_topk.problem import LshTopk

from .space import Extents, allowed, default, space


def build(problem: LshTopk, decisions: Decisions) -> Program:
    from .kernel import program

    return program(problem, Extents.of(problem, decisions))


fused_step = Template(
    name="fused_step",
    version=4,
    operator="lsh_topk",
    kind="cuda",
    summary="hash, look-up and product side by side, then the best words: two kernels, no list",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
