"""Candidate words on a GPU, from hidden states to lists in one kernel: a thread block a row, a cluster a list.

The work is small, and latency is all. A row of 500 bands has 24,000 elements to compare, 500 buckets to find and some
8,000 words to count; the counts of 40,000 words take 80 kB. One multiprocessor can do all of it, in its own shared
memory, and rows meet once, when all of that is done. (`row_clusters` divides a row, which then meets at every step.)

1.  **Hash.** A thread block has its row in shared memory. A thread finds the places of some units, whose columns it has
    loaded while the row was on its way. Of each row there may be copies in banks of their own (`copies`).
2.  **Look up.** A thread a bucket; where each of them is goes to shared memory.
3.  **Count.** A group of `bucket_lanes` lanes goes through `loads` buckets together. Two counts of 16 bits share a cell
    of shared memory. The lane whose addition makes a count reach the threshold sets the word's bit in the bitmap of the
    thread block: nobody goes through the counts afterwards.
4.  **Combine.** At a barrier of the cluster all bitmaps are complete. Each thread block combines its share of all of
    them, which it reads over distributed shared memory, with the words that are candidates anyway, and tells the others
    how many words its share has.
5.  **Compact.** After one more barrier each thread block knows where its share of the list begins, and writes it.

Nothing goes through global memory but inputs and outputs. Thread blocks without a row do their share of 4 and 5. Where
there are more rows than thread blocks, these take several, `cluster` rows apart: `pack` of them are hashed together, so
that columns are loaded once, and counted one after the other.

Shared memory has to hold the counts of all words: some 100,000 words.

**overlap** is programmatic dependent launch. With 1 the kernel waits for its producer kernel, and then lets its
consumer kernel start; with 2 it lets the consumer start before it waits. In both counts are cleared before the wait,
and nothing is read.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Template
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from .space import allowed, default, extents, space


def build(problem: LshCandidates, decisions: Decisions) -> Program:
    from ...interface import gpu_program
    from .kernel import kernel_body

    overlap = decisions["overlap"]
    return gpu_program(problem, kernel_body(*extents(problem, decisions), overlap), (), overlapped=overlap > 0)


beam_blocks = Template(
    name="beam_blocks",
    version=1,
    operator="lsh_candidates",
    kind="cuda",
    summary="a block a row and a cluster a list, from hash to list in one kernel",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
