"""The space of `row_clusters`. Loads no compiler."""

from __future__ import annotations

from collections.abc import Iterator

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from ...lsh.extents import (
    BUCKET_LANES,
    CLUSTERS,
    LOADS,
    PER_WARP,
    SLICES,
    THREADS,
    CompactExtents,
    CountExtents,
    HashExtents,
    Room,
    shared_limit,
)


def extents(problem: LshCandidates, decisions: Decisions) -> tuple[HashExtents, CountExtents, CompactExtents]:
    """The sizes of one point's kernel."""
    threads, cluster = decisions["threads"], decisions["cluster"]
    hashing = HashExtents(problem.hidden, problem.k, problem.units, problem.dtype, threads)
    count = CountExtents(
        vocab=problem.vocab,
        cuckoo=problem.table == "cuckoo",
        threads=threads,
        cluster=cluster,
        slices=decisions["slices"],
        lanes=decisions["bucket_lanes"],
        loads=decisions["loads"],
        exchange=decisions["exchange"],
        bands=problem.bands,
    )
    return hashing, count, CompactExtents(problem.vocab, threads, cluster)


def space(problem: LshCandidates, machine: Machine) -> Table:
    table = {
        "threads": THREADS,
        "cluster": CLUSTERS if machine.has_clusters else (1,),
        "slices": SLICES,
        "bucket_lanes": BUCKET_LANES,
        "loads": LOADS,
        "exchange": (0, 1) if machine.has_clusters else (0,),
        "overlap": (0, 1, 2) if machine.has_clusters else (0,),
    }
    if next(points(problem, machine, table), None) is None:
        raise NotApplicable(f"hidden={problem.hidden} and vocab={problem.vocab} exceed shared memory, however divided")
    return table


def allowed(problem: LshCandidates, machine: Machine, decisions: Decisions) -> str | None:
    hashing, count, compact = extents(problem, decisions)
    parts = count.slices * count.cluster
    if parts > 1 and count.part * (parts - 1) >= problem.vocab:
        return f"of {parts} parts of at least {PER_WARP} words some have none of vocab={problem.vocab}"
    if count.exchange and count.cluster == 1:
        return "a single thread block has nobody to exchange buckets with"
    if count.cluster > problem.bands:
        return f"{count.cluster} thread blocks have no bands each of bands={problem.bands}"
    size, limit = Room.of(*extents(problem, decisions)).bytes, shared_limit(machine)
    if size > limit:
        return f"{size} bytes exceed shared memory of {limit}"
    if count.slices > 1 and 4 * size <= limit:
        return f"{size} bytes of shared memory call for fewer slices than {count.slices}"
    return None


def default(problem: LshCandidates, machine: Machine) -> Decisions:
    """A cluster of as many thread blocks as there may be for a row, and as few slices."""
    table = space(problem, machine)
    return next(points(problem, machine, table))


def points(problem: LshCandidates, machine: Machine, table: Table) -> Iterator[Decisions]:
    """Points from which the default is taken, the best first."""
    for slices in table["slices"]:
        for cluster in table["cluster"][::-1]:
            point = {
                "threads": 512,
                "cluster": cluster,
                "slices": slices,
                "bucket_lanes": 16,
                "loads": 2,
                "exchange": 0,
                "overlap": 0,
            }
            if allowed(problem, machine, point) is None:
                yield point
