"""Softmax + top-k on a GPU for few rows: a cluster of thread blocks has a row, which registers or shared memory hold.

The gates (`threshold_gate`) stream a row through a threshold that they guess from a sample. Here a row is read at once,
every element stays where it is until all that is asked of it has been answered, and nothing is guessed:

1.  **Load** (`row.load_row`). A block has a share of the row, and each thread of it some vectors of 16 bytes, whose
    loads are all in flight together. Meanwhile the blocks of the cluster meet at a barrier. With `staged` the vectors
    are copied to shared memory (`staged.stage_row`), and looked at as they arrive (`staged.take_row`).
2.  **Bound** (`bound`). A thread knows its largest element. Threads with the same number modulo `Layout.groups` are a
    group, so that neighbours, which a row in order would have alike, are in different ones; shared memory has the
    largest element of each group. The k-th best of these is a bound that at least k of the block's elements reach, and
    in most rows few others do: 32 groups have 31 such elements for k = 20.
3.  **Keys** (`find.find_keys`). What reaches the bound goes into a list in shared memory, value and column in one key.
    In rows with many equal elements, more reach it than there is room for. Then the bound gets a column, up to which
    its equals are wanted; if that is not enough, the block selects its k best by radix passes. So a block always has
    all elements of its share that can be among the row's k best.
4.  **Share** (`cluster.share_parts`). Each block sends its keys to the first one, by stores that tell an mbarrier there
    how many bytes have come: there is neither a fence nor a cluster barrier to wait for.
5.  **Sum** (`sums`). The exponentials are added up while the keys are in flight. The largest element of a warp, its
    reference, is known by then, so that no sum is rescaled. With `staged` they were added up as they came, relative to
    the largest one of a thread so far. The block's sum follows the keys to an mbarrier of its own.
6.  **Unite** (`cluster.unite_parts`). The first block finds a bound for all of the keys, as in 2, and those that reach
    it; with a column, as in 3, where many are equal.
7.  **Rank** (`rank.finish_row`). Each key is counted against all others by a few threads, in one step, and written with
    its probability.

With `row_bound` the blocks of a row agree on one bound in step 2, by a warp more that has no vectors (`agreement`): few
more than k elements of the row reach it. So in 3 most threads have nothing, and others one element
(`keys.put_single`); and in 6 there are seldom more keys than are ranked at once, so that the blocks' keys are only
concatenated (`cluster.gather_parts`). Among many equal keys, those that follow k keys of the first block are left out
(`cluster.filter_parts`).

For a row in registers that bound comes from all of the row (a *late* bound), and exponentials are computed while blocks
agree (`held`). For a staged row blocks agree while the last vectors are still being copied (an *early* bound). In 1 its
warps keep step with each other, and few exponentials remain after the last vector (`paced`); in 3 any thread looks
at what a vector has (`listed`).

=============  ===============================================================================================
file           holds
=============  ===============================================================================================
``space``      the decisions, points that are left out, and the extents that follow; loads no compiler
``state``      the buffers that phases share, each explained
``words``      elements as they are held in registers, two of a 16-bit dtype in a word
``row``        where a share lies, and its loads
``staged``     the share in shared memory: its copies, and exponentials as they come
``paced``      the same by steps, of a row with an early bound
``held``       a share in registers, looked at as it comes, of a row with a late bound
``bound``      the best element of each group, and the k-th best of these
``agreement``  a bound on which the blocks of a cluster agree
``keys``       what of its own each thread finds to reach the bound, and the selection
``listed``     what reaches the bound where any thread looks at any vector
``find``       from the bound to the block's keys, whatever the row
``sums``       sums of exponentials, of warps and of blocks
``cluster``    what blocks send each other
``rank``       the k best in order, and the outputs
``kernel``     the kernel: the steps above
=============  ===============================================================================================
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space
from .space import Layout

__all__ = ["Layout", "held_rows"]

held_rows = in_phases(
    space,
    name="held_rows",
    version=3,
    operator="softmax_topk",
    summary="a cluster of blocks a row, held in registers or shared memory; each finds its own k best and little more",
)
