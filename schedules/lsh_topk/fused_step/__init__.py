"""A step of an LSH head on a GPU in three kernels that overlap: look-up, product, and the best words.

With the paper's settings nine in ten of some 6,000 candidates are frequent words, which are known when the head is
built: their product need not wait for the hash. What hits add is small, and few words reach the threshold in two rows
of a beam. So the second kernel starts beside the first, multiplies the frequent words, and only then waits for the
list of the others.

**look_up.** A cluster of thread blocks has a row of hidden states. Each thread block hashes some bands and goes through
their buckets; it counts, in shared memory, the hits of a part of the vocabulary, and the others tell it what they have
found of that. Votes of warps tell what reaches the threshold, 64 words at a time. Bits are set in the list's bitmap,
and words whose bits were not there before, nor in `always`, go to the list: each list has a place for every word, so
that nothing is left out. A vocabulary that a cluster's shared memory has no room for is cut into `slices`, each with a
cluster of its own.

**product.** A thread block a multiprocessor, for each group of up to 16 rows; or some for each of the `row_groups` into
which a wide beam is cut. Or, of a wide beam, as many `blocks` as the first kernel leaves multiprocessors: side by side
on one, each kernel takes the other's time. Hidden states are in shared memory (`staged`); or a warp has the same part
of columns of all its words, and keeps that of the hidden states in registers. The thread block's share of the frequent
words comes from memory into registers, and goes to tensor cores: a warp has a tile of 16 words and a part of their
columns, and as soon as a piece is multiplied the next word's takes its place. Words are the operand with 16 rows,
hidden states the one with eight columns: so hidden states that were loaded once serve 16 words, and need not be moved
from register to register. Parts of a score are added up from shared memory. Then the same code does the same with its
share of the list. Each score becomes a key (ordered bits, word) in global memory, those of a thread block side by side;
each thread block also says which key of a row is its best one, and its sum of exponentials. Up to `late_words` frequent
words of a thread block that are beyond whole tiles come with its share of the list, which mostly has room for them.

**merge.** A thread block a row: the n-th best of the thread blocks' best keys is a bound that few keys reach. Those of
the thread blocks that reach it are read and ranked. Other thread blocks clear bitmaps for the next step.

The order of the list differs from run to run; results do not (`device.powers`). Shi, Xu & Knight 2018, Figures 2, 4 and
5, do these steps one after another.

**overlap** is programmatic dependent launch. With 1 the first kernel reads `permutations`, which no kernel may write
that itself starts its consumer kernel early, waits for its producer kernel, and then lets the second start. So whatever
the second reads before it waits itself was there before the first went on: all but the list. The third waits at once.
With **beside** 1 the first kernel leaves room for the second on its multiprocessors; with 0 the second has only those
that the first does not take. Thread blocks of the third are there before the second has ended, and may come to the same
multiprocessor by twos and threes, where there is room, while others have none. With **apart** 1 there is none for two.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

fused_step = in_phases(
    space,
    name="fused_step",
    version=16,
    operator="lsh_topk",
    summary="look-up beside the product of the frequent words, that of what is found, the best words: three kernels",
)
