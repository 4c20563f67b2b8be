"""A step of an LSH head on a GPU in three kernels that overlap: look-up, product, and the best words.

Of some 6,000 candidates of the paper's settings nine in ten are the frequent words, which are known when the head is
built: their product need not wait for the hash. What hits add is small, and few words reach the threshold in two rows
of a beam. So the second kernel starts beside the first, multiplies the frequent words, and only then waits for the
list of the others.

**look_up.** A cluster of thread blocks has a row of hidden states. Each thread block hashes some bands, goes through
their buckets, `bucket_lanes` lanes a bucket and 16 bytes a lane, and counts hits of all words in shared memory, in 8
bits. Then each has a part of the vocabulary, whose counts it adds up over the cluster; votes of warps tell what reaches
the threshold, 32 words at a time. Bits are set in the list's bitmap, and words whose bits were not there before, nor in
`always`, go to the list: each list has a place for every word, so that nothing is left out. A vocabulary that shared
memory has no room for is cut into `slices`, each with thread blocks of its own.

**product.** A thread block a multiprocessor, for each group of up to 16 rows. Hidden states are in shared memory. The
thread block's share of the frequent words comes from memory into registers, and goes to tensor cores: a warp has a tile
of 8 words and a part of their columns, and as soon as a piece is multiplied the next word's takes its place. Parts of a
score are added up from shared memory. Then the same with its share of the list. Each score becomes a key (ordered bits,
word) in global memory; each thread block also says which key of a row is its best one, and its sum of exponentials.

**merge.** A thread block a row: the n-th best of the thread blocks' best keys is a bound that few keys reach. Those of
the thread blocks that reach it are read and ranked. Other thread blocks clear bitmaps for the next step.

The order of the list differs from run to run; results do not (`powers`). Shi, Xu & Knight 2018, Figures 2, 4 and 5, do
these steps one after another.

**overlap** is programmatic dependent launch. With 1 the first kernel reads `permutations`, which no kernel may write
that itself starts its consumer kernel early, waits for its producer kernel, and then lets the second start. So whatever
the second reads before it waits itself was there before the first went on: all but the list. The third waits at once.
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
    version=5,
    operator="lsh_topk",
    kind="cuda",
    summary="look-up beside the product of the frequent words, that of what is found, the best words: three kernels",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
