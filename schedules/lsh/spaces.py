"""What the spaces of templates that count hits in shared memory have in common. Loads no compiler."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Table, ceildiv
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from .extents import (
    BUCKET_LANES,
    CLUSTERS,
    LOADS,
    MOST_SHARED,
    PER_CELL,
    PER_WARP,
    SLICES,
    THREADS,
    CountExtents,
    Room,
    shared_limit,
)

# For few rows: whole warps for a bucket, two buckets in flight, in the largest thread blocks. Lists of as many words as
# the last are finished by all thread blocks of a cluster.
FEW_THREADS, FEW_LANES, FEW_LOADS = 1024, 32, 2
LONG_LIST = 32768
# Words of a bucket from which on thread blocks of a cluster gain by exchanging buckets instead of hits, where they are
# more than multiprocessors: 19 rows in 256 buckets took 1.3 times as long on an H200 without.
LONG_BUCKET = 16
# For many rows: threads of a multiprocessor, which thread blocks share, those that keep it busy, and the fewest of a
# thread block.
MOST_THREADS, BUSY_THREADS, FEWEST_THREADS = 2048, 1536, 256
CROWDED_LOADS = 2
TableProblem = LshLookup | LshCandidates


def count_extents(problem: TableProblem, decisions: Decisions) -> CountExtents:
    """How hits are counted at a point."""
    return CountExtents(
        vocab=problem.vocab,
        cuckoo=problem.table == "cuckoo",
        threads=decisions["threads"],
        cluster=decisions["cluster"],
        slices=decisions["slices"],
        lanes=decisions["bucket_lanes"],
        loads=decisions["loads"],
        exchange=decisions["exchange"],
        finishers=decisions["finishers"],
        bands=problem.bands,
    )


def count_table(machine: Machine) -> Table:
    return {
        "threads": THREADS,
        "cluster": CLUSTERS if machine.has_clusters else (1,),
        "slices": SLICES,
        "bucket_lanes": BUCKET_LANES,
        "loads": LOADS,
        "exchange": (0, 1) if machine.has_clusters else (0,),
        "finishers": CLUSTERS if machine.has_clusters else (1,),
        "overlap": (0, 1, 2) if machine.has_clusters else (0,),
    }


def count_refusal(problem: TableProblem, machine: Machine, e: CountExtents, room: Room) -> str | None:
    """The reason why a point is left out, or None."""
    parts = e.slices * e.cluster
    if parts > 1 and e.part * (parts - 1) >= problem.vocab:
        return f"of {parts} parts of at least {PER_WARP} words some have none of vocab={problem.vocab}"
    if e.exchange and e.cluster == 1:
        return "a single thread block has nobody to exchange buckets with"
    if e.finishers not in (1, e.cluster):
        return f"{e.finishers} thread blocks cannot finish a list of clusters of {e.cluster}: one can, or all"
    if e.cluster > problem.bands:
        return f"{e.cluster} thread blocks have no bands each of bands={problem.bands}"
    limit = shared_limit(machine)
    if room.bytes > limit:
        return f"{room.bytes} bytes exceed shared memory of {limit}"
    if e.slices > 1 and 4 * room.bytes <= limit:
        return f"{room.bytes} bytes of shared memory call for fewer slices than {e.slices}"
    return None


def usual_point(
    problem: TableProblem, machine: Machine, table: Table, allowed: Callable[[Decisions], str | None]
) -> Decisions | None:
    """The point to start with; None if there is none in the table.

    As few slices as there may be. For few rows as many thread blocks a cluster as possible. Where these would be more
    than two a multiprocessor, or more than one and buckets are long, as many a row as each have a multiprocessor, else
    one; several thread blocks exchange buckets, and one of them finishes. On an H200 319 rows took 8 times as long with
    the clusters that suit few rows, 875 rows twice (`scripts/regret.py`, seeds 1 and 7).
    """
    rows = problem.lists * problem.beam
    for slices in table["slices"]:
        points = [
            point
            for cluster in table["cluster"][::-1]
            if allowed(point := _of_few_rows(problem, table, slices, cluster)) is None
        ]
        if not points:
            continue
        most = 1 if problem.vocab >= LONG_BUCKET * problem.buckets else 2
        if rows * points[0]["cluster"] <= most * machine.cores:
            return points[0]
        fitting = [point for point in points if rows * point["cluster"] <= machine.cores]
        for point in [*fitting, *points[::-1]]:
            found = {**point, "finishers": 1}
            if point["cluster"] > 1:  # the next launch's clusters would take the room of this one's
                found |= {"exchange": 1, "overlap": min(1, point["overlap"])}
            if point in fitting:
                found["bucket_lanes"] = min(found["bucket_lanes"], max(_lanes(problem), LEAST_LANES))
            else:
                found |= _crowded(problem, machine, found)
            if allowed(found) is None:
                return found
        return points[-1]
    return None


def _of_few_rows(problem: TableProblem, table: Table, slices: int, cluster: int) -> Decisions:
    return {
        "threads": FEW_THREADS,
        "cluster": cluster,
        "slices": slices,
        "bucket_lanes": FEW_LANES,
        "loads": FEW_LOADS,
        "exchange": 0,
        "finishers": cluster if problem.vocab >= LONG_LIST else 1,
        "overlap": max(table["overlap"]),
    }


# Words of the vocabulary for each lane of those that share a bucket, on an H200; and the fewest lanes of a thread block
# that has a multiprocessor.
WORDS_A_LANE, LEAST_LANES = 600, 8


def _lanes(problem: TableProblem) -> int:
    """Lanes that share a bucket: each has up to two words of a mean bucket, or more lanes share a row's few long
    buckets, which have a share of the vocabulary.
    """
    mean, long = problem.vocab / (2 * problem.buckets), problem.vocab / WORDS_A_LANE
    return next((n for n in BUCKET_LANES if n >= mean and n * math.sqrt(2) >= long), BUCKET_LANES[-1])


def _crowded(problem: TableProblem, machine: Machine, point: Decisions) -> Decisions:
    """Decisions for one of several thread blocks on a multiprocessor: as many threads as let all of them run at the
    same time, and more where shared memory has room for few of them.
    """
    room = max(1, MOST_SHARED // (4 // PER_CELL * count_extents(problem, point).part))
    wanted = max(
        FEWEST_THREADS,
        min(MOST_THREADS // ceildiv(problem.lists * problem.beam, machine.cores), THREADS[-1]),
        min(BUSY_THREADS // room, THREADS[-1]),
    )
    return {"threads": max(n for n in THREADS if n <= wanted), "bucket_lanes": _lanes(problem), "loads": CROWDED_LOADS}
