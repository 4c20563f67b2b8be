"""The decisions of `sample_slices`: their values, the points that are left out, and the defaults. Loads no compiler."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Launch, NotApplicable, Table, powers
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ..device.pool import MOST_STATIC
from ..rows.cut import Keep
from .blocks import Blocks

# Threads of a thread block, whose warps each have a slice: with more than 512 the search has too few registers.
THREADS = (128, 256, 512)
# Thread blocks that share a row, as far as the GPU launches clusters of so many.
CLUSTERS = powers(1, 16)
# Vectors that a thread loads before it uses the first of them.
VECTORS = (1, 2, 4)
# Threads for which a multiprocessor has room at once, in whole thread blocks: with more, registers spill.
RESIDENT = 512
# The same of the kernel whose thread blocks take tickets, which searches nothing.
RESIDENT_TICKETS = 1024
# Thread blocks of a row that take tickets. 0: rows that no filter cuts have clusters, too.
TICKETS = (0, 2, 4, 8, 16)
# Bytes of logits from which they do by default on GPUs with clusters; with fewer where there are more rows than
# multiprocessors, at most one thread block for each LEAST_SHARE bytes of a row, or two.
LEAST_TICKETED, LEAST_SHARE = 15 << 20, 10_000
# Thread blocks with tickets also share each of at most FEW_ROWS rows with at least LONG_ROW bytes; beyond ALONE rows
# several of them share a multiprocessor, and have fewer vectors in hand.
FEW_ROWS, LONG_ROW, ALONE = 16, 240 << 10, 8
# Most bytes of a row that a thread block keeps by default.
KEPT = 160 * 1024


def space(problem: SoftmaxSample, machine: Machine) -> Table:
    if not problem.alone:
        raise NotApplicable("sums of slices tell the best word alone, for a draw from the whole row")
    if next(_likely_points(problem, machine), None) is None:
        raise NotApplicable(f"the sums of slices of vocab={problem.vocab} exceed shared memory")
    return {
        "cluster": machine.clusters(CLUSTERS),
        "threads": THREADS,
        "vectors": VECTORS,
        "staged": (0, 1),
        "tickets": TICKETS,
        "overlap": (0, 1) if machine.has_clusters else (0,),
    }


def blocks_of(problem: SoftmaxSample, decisions: Decisions) -> Blocks:
    """The thread blocks of a point."""
    keep: Keep = "shared" if decisions["staged"] else "nowhere"
    return Blocks(problem, decisions["threads"], decisions["cluster"], keep, decisions["vectors"], joined=True)


def ticketed(problem: SoftmaxSample, decisions: Decisions) -> Blocks:
    """The thread blocks of a point that take tickets."""
    return Blocks(
        problem, decisions["threads"], decisions["tickets"], "nowhere", decisions["vectors"], joined=True, ticketed=True
    )


def allowed(problem: SoftmaxSample, machine: Machine, decisions: Decisions) -> str | None:
    blocks = blocks_of(problem, decisions)
    ext = blocks.ext
    if decisions["staged"] and not ext.fewest:
        return "a row of no whole vector has nothing to keep"
    size, limit = blocks.bytes, machine.block_shared_bytes - MOST_STATIC
    if size > limit:
        return f"{size} bytes of shared memory exceed {limit}"
    if 2 * ext.part <= ext.threads and (blocks.cluster > 1 or blocks.threads > THREADS[0]):
        return f"half of a warp's lanes have no vector of a slice of {ext.part}"
    if ext.vectors > 1 and ext.tile >= 2 * ext.part:
        return f"half of a tile of {ext.vectors} vectors a lane lies beyond a slice"
    if decisions["overlap"] and not decisions["tickets"]:
        return "a single kernel has no consumer kernel to overlap with"
    if decisions["tickets"]:
        singles = ticketed(problem, decisions)
        part = singles.ext.part
        if (size := singles.listing.bytes) > limit:
            return f"{size} bytes of shared memory exceed {limit}"
        if 2 * part <= ext.threads:
            return f"half of a warp's lanes have no vector of a slice of {part}"
        if ext.vectors > 1 and ext.tile >= 2 * part:
            return f"half of a tile of {ext.vectors} vectors a lane lies beyond a slice"
    return None


def default(problem: SoftmaxSample, machine: Machine) -> Decisions:
    return next(_likely_points(problem, machine))


def _likely_points(problem: SoftmaxSample, machine: Machine) -> Iterator[Decisions]:
    """Allowed points, the best guess first: the fewest thread blocks of a row that give almost every multiprocessor
    one, and hold the row in shared memory.

    On an H200, with 128,256 words in 16 bits, two large thread blocks for each row were 1.3 to 1.6 times as fast as
    four smaller ones, of which each multiprocessor ran two (`scripts/probes/sampling.py`). Thread blocks with tickets,
    eight small ones for each row, were faster from 64 rows on, but for min_p, and sixteen large ones for one row; two
    for each of 359 rows of 20 KB took 0.23 times as long as one that searches, of which each multiprocessor has one.
    Without clusters nothing else shares a row.
    """
    clusters, rows = machine.clusters(CLUSTERS), problem.batch_extent
    fill = next((size for size in clusters if size * rows >= machine.cores * 9 // 10), clusters[-1])
    keep = next((size for size in clusters if Blocks(problem, THREADS[-1], size, "shared").staged <= KEPT), None)
    row = problem.vocab * numpy_dtype(problem.dtype).itemsize
    few = machine.has_clusters and rows <= FEW_ROWS and row >= LONG_ROW
    crowded = rows > machine.cores and rows * row < LEAST_TICKETED and row >= LEAST_SHARE
    ticketed = few or crowded or not machine.has_clusters or rows * row >= LEAST_TICKETED
    threads_in_order = (128, 256, 512) if crowded else (256, 512, 128) if ticketed and not few else (512, 256, 128)
    busy = machine.cores * RESIDENT_TICKETS // threads_in_order[0] * 9 // 10
    most = max(2, row // LEAST_SHARE) if crowded else 8 if 8 * rows >= busy else TICKETS[-1]
    if few:
        vectors_in_order = (2, 4, 1) if rows <= ALONE else (1, 2, 4)
    else:
        vectors_in_order = (1, 2, 4) if crowded else (4, 2, 1)
    for cluster, threads, vectors, staged, tickets in itertools.product(
        sorted((size for size in clusters if size <= max(0 if few else fill, keep or 1)), reverse=True),
        threads_in_order,
        vectors_in_order,
        (1, 0),
        [one for one in reversed(TICKETS) if one <= most] if ticketed else [0],
    ):
        point = {
            "cluster": cluster,
            "threads": threads,
            "vectors": vectors,
            "staged": staged,
            "tickets": tickets,
            "overlap": int(machine.has_clusters and tickets > 0),
        }
        if allowed(problem, machine, point) is None:
            yield point


def launch(problem: SoftmaxSample, decisions: Decisions) -> Launch:
    return Launch(decisions["threads"], blocks_of(problem, decisions).bytes)
