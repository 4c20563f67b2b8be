"""What the spaces of templates that count hits in shared memory have in common. Loads no compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Table
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from .extents import BUCKET_LANES, CLUSTERS, LOADS, PER_WARP, SLICES, THREADS, CountExtents, Room, shared_limit

USUAL_THREADS = 512
# Decisions for many rows: several small thread blocks share a multiprocessor, and hide each other's latency.
CROWDED_THREADS, CROWDED_LOADS, CROWDED_LANES = 256, 2, 8
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


def likely_points(
    problem: TableProblem, table: Table, allowed: Callable[[Decisions], str | None]
) -> Iterator[Decisions]:
    """Points of a table, the best first: as few slices as there may be, and then as many thread blocks a cluster.

    Lanes for buckets of half as many words again as there are on average, and all of a row's buckets in flight.
    """
    lanes = next((n for n in BUCKET_LANES if 2 * n * problem.buckets >= 3 * problem.vocab), BUCKET_LANES[-1])
    for slices in table["slices"]:
        for cluster in table["cluster"][::-1]:
            at_once = USUAL_THREADS // lanes * cluster
            point = {
                "threads": USUAL_THREADS,
                "cluster": cluster,
                "slices": slices,
                "bucket_lanes": lanes,
                "loads": next((n for n in LOADS if n * at_once >= problem.bands), LOADS[-1]),
                "exchange": 0,
                "finishers": cluster,
                "overlap": 0,
            }
            if allowed(point) is None:
                yield point


def crowded_point(
    problem: TableProblem, machine: Machine, points: Sequence[Decisions], allowed: Callable[[Decisions], str | None]
) -> Decisions | None:
    """A point for many rows, made of the likely `points`: with the largest clusters each multiprocessor would have more
    than two thread blocks. None for fewer rows, and if there is no point.

    As many thread blocks a row as each have a multiprocessor, else one; several thread blocks exchange buckets, and one
    of them finishes. On an H200 319 rows took 8 times as long with the clusters that suit few rows, 875 rows twice
    (`scripts/regret.py`, seeds 1 and 7).
    """
    rows = problem.lists * problem.beam
    if rows * points[0]["cluster"] <= 2 * machine.cores:
        return None
    likely = [point for point in points if point["slices"] == points[0]["slices"]]
    fitting = [point for point in likely if rows * point["cluster"] <= machine.cores]
    for point in [*fitting, *likely[::-1]]:
        found = {**point, "exchange": int(point["cluster"] > 1), "finishers": 1}
        if point not in fitting:
            # A lane has up to four words of a bucket.
            wide = [n for n in BUCKET_LANES if n >= CROWDED_LANES]
            lanes = next((n for n in wide if 4 * n * problem.buckets >= problem.vocab), wide[-1])
            loads = min(point["loads"], CROWDED_LOADS)
            found |= {"threads": CROWDED_THREADS, "bucket_lanes": lanes, "loads": loads}
        if allowed(found) is None:
            return found
    return None
