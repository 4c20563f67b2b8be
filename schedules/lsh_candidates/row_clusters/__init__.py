"""Candidate words on a GPU, from hidden states to lists in one kernel: one cluster of thread blocks per row.

There is little work; the time is latency. A row of 500 bands has 24,000 elements to compare, 500 buckets to find and
some 8,000 words to count, and each step waits for the one before. So a row is divided among the thread blocks of a
cluster, on neighbouring multiprocessors:

1.  **Hash.** A thread block has the row in shared memory, and a share of the bands: a thread finds the place of one
    unit, whose columns it has loaded while the row was in flight.
2.  **Look up.** The buckets of its bands, several in flight for each group of `bucket_lanes` lanes.
3.  **Count.** Each thread block counts the hits of its part of the vocabulary, two counts of 16 bits in a word of
    shared memory. With `exchange` 0 a hit goes to the thread block that counts the word, over distributed shared
    memory; with 1 the thread blocks tell each other where the buckets are, and each goes through all of them.
4.  **Threshold.** A warp compares 64 counts at a time; votes give two words of the bitmap, which are combined with
    those of the beam's other rows by atomics in global memory.
5.  **Compact.** The cluster that comes last for its list reads the bitmap, combines it with the words that are
    candidates anyway, and writes the list, each thread block a share of it. With `finishers` 1 that is the last thread
    block alone, for which those of a cluster need not meet twice more.

Vocabularies whose counts exceed the shared memory of a cluster are divided into `slices`, with a cluster for each.

**overlap** is programmatic dependent launch. With 1 the kernel waits for its producer kernel, and then lets its
consumer kernel start; with 2 it lets the consumer start before it waits. In both nothing is read before the wait:
permutations and row, which are needed together, are loaded together.

The phases are in `schedules.lsh`: `hashing`, `buckets`, `rows` and `compact`.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

row_clusters = in_phases(
    space,
    name="row_clusters",
    version=2,
    operator="lsh_candidates",
    summary="a cluster of blocks a row, from hash to list in one kernel",
)
