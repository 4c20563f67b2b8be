"""The decisions of the vector templates: their values, the points that are left out, and the defaults."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, Launch, NotApplicable, Table, ceildiv, powers

from ...rows.cut import Extents, Keep, vector_width
from ..problems import RowProblem, algorithm, extents

# Threads of a block that share a row, or its part. Not only powers of two: what counts is how many blocks, with the row
# in their registers, fit on a multiprocessor.
THREADS = (32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
# Thread blocks that share a row: sizes of clusters, up to the GPU's limit (`Machine.most_cluster`).
CLUSTERS = powers(1, 16)
# Rows of a block, where each has a warp.
ROWS = powers(1, 16)
# Vectors that a thread loads before it uses the first of them.
VECTORS = (1, 2, 4, 8)
# Bytes of shared memory that are left to the pairs of (m, d).
PAIRS = 5 * 1024
# Vectors of a row that a warp takes alone by default, where there are more rows than multiprocessors, and where there
# are not; rows of up to the first number then have thread blocks of FEW_ROWS threads.
WARP_ROW, WARP_ROW_ALONE, FEW_ROWS = 512, 128, 128
# The fewest bytes of a row of 16 bits that has a thread block of one warp by default: an H200 starts some 1.6 of these
# in a nanosecond, in which it reads and writes rows of 1.4 KB each.
ROW_ALONE = 1536
# Threads of a block by default, where a row has one and there are more rows than multiprocessors: the smallest of these
# numbers that leaves a thread at most CROWDED_EACH vectors.
CROWDED, CROWDED_EACH = (192, 256, 384), 4
# Threads of a multiprocessor among which, by default, reading a logsumexp's long rows of 16 bits overlaps their
# exponentials, and the thread blocks that are tried for this.
OVERLAPPING, OVERLAPPED = 1900, (256, 512)
# Bytes of a thread block's part of a row: the fewest that are worth a thread block by default, and the most of a
# logsumexp; and into how many parts a row of one is cut before.
LEAST_PART, MOST_PART, FEW_PARTS = 16 << 10, 128 << 10, 4
# The fewest bytes of a part of a softmax in clusters of up to SMALL_CLUSTER thread blocks, which find room together
# more easily: two rows of 24,280 elements in float16 took 1.2 times as long in parts of 24 KB as in parts of 6 KB.
SMALL_PART, SMALL_CLUSTER = 5 << 10, 8
# Threads of a block that holds a row or its part in registers, by default the first number that leaves a thread at most
# HELD_EACH vectors. With 24 vectors each, rows are read faster without being held.
HOLDING, HELD_EACH = (256, 384, 512), 12

Allowed = Callable[[RowProblem, Machine, Decisions], str | None]


# ---- tables --------------------------------------------------------------------------------------


def base_space(problem: RowProblem, machine: Machine) -> Table:
    return {"threads": THREADS, "cluster": machine.clusters(CLUSTERS)}


def held_space(problem: RowProblem, machine: Machine) -> Table:
    _require_online(problem)
    return _with_points(problem, machine, {**base_space(problem, machine), "rows": ROWS}, held_allowed)


def staged_space(problem: RowProblem, machine: Machine) -> Table:
    _require_online(problem)
    return _with_points(problem, machine, base_space(problem, machine), staged_allowed)


def streamed_space(problem: RowProblem, machine: Machine) -> Table:
    return {**base_space(problem, machine), "rows": ROWS, "vectors": VECTORS}


def _require_online(problem: RowProblem) -> None:
    if algorithm(problem) != "online":
        raise NotApplicable(f"the {algorithm(problem)} algorithm reads a row more than once, by definition")


def _with_points(problem: RowProblem, machine: Machine, table: Table, allowed: Allowed) -> Table:
    """The table, if it has a point that is allowed."""
    if all(allowed(problem, machine, decisions) is not None for decisions in _points(table)):
        raise NotApplicable(f"a cluster does not hold a row of vocab={problem.vocab}, or it is too short to share")
    return table


def _points(table: Table) -> Iterable[Decisions]:
    return (dict(zip(table, values, strict=True)) for values in itertools.product(*table.values()))


# ---- points that are left out --------------------------------------------------------------------


def held_allowed(problem: RowProblem, machine: Machine, decisions: Decisions) -> str | None:
    ext = extents(problem, decisions, "registers")
    if reason := _idle(ext):
        return reason
    limit = ext.available(1)
    return f"{ext.registers} registers a thread exceed {limit}" if ext.registers > limit else None


def staged_allowed(problem: RowProblem, machine: Machine, decisions: Decisions) -> str | None:
    ext = extents(problem, decisions, "shared")
    if reason := _idle(ext):
        return reason
    if ext.threads < 64 or not ext.fewest:
        return "one warp holds its rows in registers"
    size, limit = ext.part * 16, machine.block_shared_bytes - PAIRS
    return f"{size} bytes of shared memory exceed {limit}" if size > limit else None


def streamed_allowed(problem: RowProblem, machine: Machine, decisions: Decisions) -> str | None:
    ext = extents(problem, decisions, "nowhere")
    if reason := _idle(ext):
        return reason
    if ext.vectors > 1 and ext.tile >= 2 * ext.part:
        return f"half of a tile of {ext.vectors} vectors a thread lies beyond a part"
    if ext.vectors * ext.width > 32 and ext.threads * ext.rows > 512:
        return "more than 32 elements in registers of more than 512 threads"
    return None


def _idle(ext: Extents) -> str | None:
    """Why a division of the row leaves threads without work, if it does."""
    if ext.rows > 1 and (ext.threads > 32 or ext.cluster > 1):
        return "a block has several rows only where each has one warp"
    if ext.cluster > 1 and ext.part_fewest == 0:
        return f"the last of {ext.cluster} parts of vocab={ext.vocab} has no vector"
    if ext.threads > 32 and ext.threads >= 2 * ext.part:
        return f"half of {ext.threads} threads have no vector of a part"
    return None


# ---- defaults ------------------------------------------------------------------------------------


def held_default(problem: RowProblem, machine: Machine) -> Decisions:
    """A warp a row if it is short, else a block of few threads with at most `HELD_EACH` vectors each, in clusters where
    multiprocessors would be idle. Of 16 bits a block has one row of at least `ROW_ALONE` bytes: on an H200 11,965 rows
    of 908 elements took 0.82 times as long so as in blocks of four, but 65,536 of 512 elements 1.3 times.
    """
    one = numpy_dtype(problem.dtype).itemsize == 2 and problem.vocab * 2 >= ROW_ALONE
    rows_of = (1, 4) if one else (4, 1)
    wanted = [{"threads": 32, "cluster": 1, "rows": rows} for rows in rows_of if _for_a_warp(problem, machine)]
    wanted += [{"threads": FEW_ROWS, "cluster": 1, "rows": 1}] if _short(problem) else []
    wanted += [
        {"threads": threads, "cluster": cluster, "rows": 1}
        for cluster in _clusters_to_fill(problem, machine)
        for threads in (_holding(problem, cluster) or HOLDING[0], 256, 128, 512, 64, 384, 32, 1024)
    ]
    return _first(problem, machine, held_allowed, (*wanted, *_points(held_space(problem, machine))))


def staged_default(problem: RowProblem, machine: Machine) -> Decisions:
    wanted = [
        {"threads": threads, "cluster": cluster}
        for cluster in _clusters_to_fill(problem, machine)
        for threads in (512, 256, 128, 64)
    ]
    return _first(problem, machine, staged_allowed, (*wanted, *_points(staged_space(problem, machine))))


def streamed_default(problem: RowProblem, machine: Machine) -> Decisions:
    wanted: list[Decisions] = [
        {"threads": 32, "cluster": 1, "rows": 4, "vectors": vectors}
        for vectors in (4, 1)
        if _for_a_warp(problem, machine)
    ]
    wanted += [{"threads": FEW_ROWS, "cluster": 1, "rows": 1, "vectors": 1}] if _short(problem) else []
    wanted += _overlapping(problem, machine)
    most = 640 if problem.operator == "logsumexp" else 512
    if problem.batch > machine.cores:
        vectors = ceildiv(problem.vocab, vector_width(problem.dtype))
        most = next((t for t in CROWDED if t * CROWDED_EACH >= vectors), most)
    wanted += [
        {"threads": threads, "cluster": cluster, "rows": 1, "vectors": vectors}
        for cluster in _clusters_to_fill(problem, machine)
        for threads in (most, 512, 256, 128, 64, 32)
        for vectors in (2, 1, 4)
    ]
    return _first(problem, machine, streamed_allowed, wanted)


def _overlapping(problem: RowProblem, machine: Machine) -> list[Decisions]:
    """Points for a logsumexp of many long rows of 16 bits, the best one first.

    A multiprocessor computes 16 exponentials a clock, which takes 0.6 of the time in which an H200 reads the elements.
    Both overlap if there are enough warps in several thread blocks. A thread has one vector at a time: with two, the
    idle places of a row's last tile cost exponentials.
    """
    width = vector_width(problem.dtype)
    if problem.operator != "logsumexp" or width < 8 or problem.vocab // width <= CROWDED[-1] * CROWDED_EACH:
        return []
    return [
        {"threads": threads, "cluster": 1, "rows": 1, "vectors": 1}
        for threads in OVERLAPPED
        if threads * problem.batch >= OVERLAPPING * machine.cores
    ]


def _first(problem: RowProblem, machine: Machine, allowed: Allowed, wanted: Iterable[Decisions]) -> Decisions:
    return next(decisions for decisions in wanted if allowed(problem, machine, decisions) is None)


def _short(problem: RowProblem) -> bool:
    return problem.vocab // vector_width(problem.dtype) <= WARP_ROW


def _for_a_warp(problem: RowProblem, machine: Machine) -> bool:
    most = WARP_ROW if problem.batch > machine.cores else WARP_ROW_ALONE
    return problem.vocab // vector_width(problem.dtype) <= most


def _holding(problem: RowProblem, cluster: int) -> int | None:
    """Threads of `HOLDING` that hold a row or its part; None if it is too long for them."""
    vectors = ceildiv(problem.vocab, vector_width(problem.dtype) * cluster)
    return next((threads for threads in HOLDING if threads * HELD_EACH >= vectors), None)


def held_declines(problem: RowProblem, machine: Machine) -> bool:
    """Whether `held_default` leaves the problem to another template: rows of which a thread would hold more than
    `HELD_EACH` vectors. Others are read faster so, by 5 to 40 % on an H200.
    """
    return not _short(problem) and _holding(problem, held_default(problem, machine)["cluster"]) is None


def _clusters_to_fill(problem: RowProblem, machine: Machine) -> list[int]:
    """Sizes of clusters: first the largest whose thread blocks run at the same time and have `LEAST_PART` bytes each,
    then smaller ones, then larger ones. A softmax that reads a row once has clusters of up to `SMALL_CLUSTER` also if
    their thread blocks have `SMALL_PART` bytes each. A logsumexp has four thread blocks, if none of them has more than
    `MOST_PART` bytes: what more of them gain, they lose in joining their sums.
    """
    sizes = base_space(problem, machine)["cluster"]
    row = problem.vocab * numpy_dtype(problem.dtype).itemsize
    at_once = [size for size in sizes if size == 1 or 4 * size * problem.batch <= 5 * machine.cores]
    small = SMALL_CLUSTER if problem.operator == "softmax" and algorithm(problem) == "online" else 0
    enough = max(s for s in at_once if s == 1 or row >= (SMALL_PART if s <= small else LEAST_PART) * s)
    if problem.operator == "logsumexp":
        enough = min(enough, max(FEW_PARTS, next((size for size in sizes if row <= MOST_PART * size), sizes[-1])))
    return sorted((size for size in sizes if size <= enough), reverse=True) + [s for s in sizes if s > enough]


Space = Callable[[RowProblem, Machine], Table]
Default = Callable[[RowProblem, Machine], Decisions]
# Table, default and left-out points of the template that keeps a row so.
BY_KEEP: Mapping[Keep, tuple[Space, Default, Allowed]] = {
    "registers": (held_space, held_default, held_allowed),
    "shared": (staged_space, staged_default, staged_allowed),
    "nowhere": (streamed_space, streamed_default, streamed_allowed),
}


# ---- launches and features -----------------------------------------------------------------------


def launch(keep: Keep, problem: RowProblem, decisions: Decisions) -> Launch:
    ext = extents(problem, decisions, keep)
    vectors = ext.part if keep == "shared" else 1
    return Launch(ext.threads * ext.rows, 16 * vectors)


def features(keep: Keep, problem: RowProblem, machine: Machine, decisions: Decisions) -> Features:
    ext = extents(problem, decisions, keep)
    threads, each = ext.threads * ext.rows, ceildiv(problem.batch, ext.rows) * ext.cluster / machine.cores
    tiles = ext.full_tiles + ext.other_tiles
    return {
        "blocks_each": each,
        "waves": each / (2048 // threads),
        "threads_each": min(each, 2048 // threads) * threads,
        "thread_vectors": ext.part / ext.threads,
        "tiles": tiles,
        "used": ext.part / max(tiles * ext.tile, 1),
        "total_vectors": problem.batch * problem.vocab / ext.width,
    }
