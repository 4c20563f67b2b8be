"""Softmax + top-k on a GPU: one read of the row, a threshold, and the few survivors ranked.

A thread block (or a cluster of blocks) has a row of logits. Insertion of every element into a running top k, as in
Algorithm 4 of Milakov & Gimelshein, costs more the larger k is, and makes the lanes of a warp wait for each other. Here
an element is only compared with a threshold, which little more than k elements of a row reach. What does, a *survivor*,
goes into a buffer in shared memory, by an atomic. `kernel.build` reads as this does:

1.  **Locate the row** (`tiles.locate_row`), and do what needs nothing of the producer kernel, the one launched before.
    With programmatic dependent launch (`overlap`) both run side by side until `stream.await_producer` waits for it, and
    lets the consumer kernel, the one launched after it, start in the same way.
2.  **Stream the row** (`stream.stream_row`), tile after tile: asynchronous copies bring 16-byte vectors to shared
    memory, `stages` tiles at once, and a thread takes `vectors` of them into registers. It adds up their exponentials
    and compares the largest element with the threshold; or each element, where k is so large that nearly every warp has
    a survivor in every tile (`Layout.dense`).
    -   The *first threshold* comes from a sample (`sample`): the first tile, whose vectors are spread over all of the
        row. The sample's maximum is the reference of the exponentials, so that the sum is never rescaled. A threshold
        is a value and a column, so that rows of few distinct elements pass it no more often than others.
    -   Survivors are pushed (`survivors.push_survivors`), or their tile is only marked (`deferred.mark_tile`, by the
        decision `deferred`) and searched when the row is through, which holds up no warp in the midst of the stream.
    -   If the buffer is full, all warps meet for a *compaction* (`survivors.compact`): radix selection cuts the buffer
        to the k best, and the k-th becomes the threshold.
3.  **Add up** the block's sum. For small k **one warp** may now find the k best in the marked tiles alone, and write
    them (`deferred.finish_by_one_warp`); else the block **searches the marked tiles** (`deferred.search_marked`).
4.  **Share the parts** of a cluster (`cluster.share_parts`): every block pushes its sum and its survivors into the
    first one's shared memory, which unites them. So there is one launch and no workspace.
5.  **Settle** (`kernel.settle`): if fewer than k survived (`thresholds.MISS` of rows in random order) or the sum
    overflows (elements that exceed the sample's maximum by 69 and more), steps 2 to 4 are taken once more, with the
    row's true maximum; with the threshold that the row has if k survived, else with a lower one, and then with none.
6.  **Complete** with elements at minus infinity, if fewer than k are above it (`finishing.complete`).
7.  **Rank the survivors** (`rank.rank_survivors`): a few by counting, every one against every other; more in bins that
    are linear in the value, where each is compared with the others of its bin, which lie side by side; where ties crowd
    a bin, in its parts by the index; and by radix selection and a bitonic sort where many share a bin even so. Values
    and indices are written as they are ranked.
8.  **Write the given columns** (`finishing.write_given_columns`), if the problem has any.

Without `unroll` loops that mostly run once are left as they are (`device.loops`), those of counting apart.

With `prefetch` a block that is through with its row has the first tile of the row that will come into its place brought
into the L2 cache, so that memory is busy while survivors are ranked.

`threshold_gate` gives a row to a block, which may be a single warp. `cluster_gate` gives it to a cluster of blocks, for
batches too small to fill the GPU with one block a row.

Where to find what:

=============  ===============================================================================================
file           holds
=============  ===============================================================================================
``space``      values of the decisions with their reasons, points that are left out, defaults; loads no compiler
``layout``     the static extents of a point; loads no compiler
``state``      the buffers that phases share, each explained
``tiles``      where a row lies, and how its tiles come into registers
``sample``     the first threshold
``survivors``  marking, pushing and compaction
``deferred``   marked tiles, and their search
``stream``     the pass over the row that puts these together
``cluster``    what blocks of a cluster tell each other
``rank``       the survivors in order, and the values and indices
``kernel``     the kernel: the steps above
=============  ===============================================================================================

To change a phase, say the first threshold:

1.  Edit its file (`sample`). The head of a phase says what it reads and writes, which barriers it holds and what is
    true after it: keep to that, or say otherwise there and look at those that come after.
2.  ``pytest -n 0 tests/test_gate_phases.py -k threshold`` runs the phase alone, thread by thread on the CPU, on state
    that the test makes, and compares it with NumPy; ``tests/test_gates.py`` runs whole kernels.
3.  ``python -m golden check threshold_gate cluster_gate``, in ``tests/``, names the points whose code is another.
4.  If it is meant to be another program, raise `version` below, so that what was measured with the old one is not taken
    for the new one's; then ``python -m golden update threshold_gate cluster_gate`` shows how the CUDA source differs.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from . import space
from .layout import Layout

__all__ = ["Layout", "cluster_gate", "threshold_gate"]


def program(problem: SoftmaxTopk, decisions: Decisions) -> Program:
    """The program of a point of either template. The compiler is loaded only here."""
    from .kernel import build

    return build(problem, decisions)


threshold_gate = Template(
    name="threshold_gate",
    version=11,
    operator="softmax_topk",
    kind="cuda",
    summary="a block or a warp a row, one read, survivors of a sampled threshold ranked in bins",
    space=space.space,
    default=space.default,
    program=program,
    allowed=space.allowed,
    features=space.features,
    explicit_threads=True,
)

cluster_gate = Template(
    name="cluster_gate",
    version=12,
    operator="softmax_topk",
    kind="cuda",
    summary="a cluster of blocks a row, joined over distributed shared memory",
    space=space.cluster_space,
    default=space.cluster_default,
    program=program,
    allowed=space.cluster_allowed,
    features=space.features,
    explicit_threads=True,
    declines=space.cluster_declines,
)
