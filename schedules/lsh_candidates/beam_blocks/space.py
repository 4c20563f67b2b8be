"""The space of `beam_blocks`. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table, ceildiv
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from ...lsh.extents import (
    BUCKET_LANES,
    LOADS,
    STATIC_SHARED,
    THREADS,
    CompactExtents,
    CountExtents,
    HashExtents,
    Room,
)

CLUSTERS = (1, 2, 4, 8, 16)  # of thread blocks
PACKS = (1, 2, 3, 4)  # rows that a thread block hashes together
COPIES = (1, 8, 16)  # of a row in shared memory: all lanes share one, or four or two
USUAL_LANES = 16  # for buckets of some ten words
# Columns of all units whose columns a thread holds together, if it holds those of several: 16 registers.
MOST_AHEAD = 32


@dataclass(frozen=True)
class BlockExtents(CountExtents):
    """How a thread block counts the hits of its rows: of all words, one row after another.

    Of `CountExtents` a single thread block counts (`cluster`), and all of the vocabulary (`slices`).
    """

    pack: int = 1  # rows that are hashed together
    peers: int = 1  # thread blocks of the cluster, which share the rows of a list's beam

    @property
    def spans(self) -> int:
        """Buckets of the rows that are hashed together, as many as there are bands in a tile for each."""
        return self.pack * self.tile

    @property
    def share(self) -> int:
        """Words of the bitmap that a thread block combines; the last one may have fewer."""
        return ceildiv(self.bitmap, self.peers)

    @property
    def shares(self) -> int:
        """Of them, those of a thread."""
        return ceildiv(self.share, self.threads)

    @property
    def finds(self) -> int:
        """Buckets that a thread looks for together."""
        return min(self.loads, ceildiv(self.spans, self.threads))


def extents(problem: LshCandidates, decisions: Decisions) -> tuple[HashExtents, BlockExtents, CompactExtents]:
    """The sizes of one point's kernel."""
    threads, pack, peers = decisions["threads"], decisions["pack"], decisions["cluster"]
    count = BlockExtents(
        vocab=problem.vocab,
        cuckoo=problem.table == "cuckoo",
        threads=threads,
        cluster=1,
        slices=1,
        lanes=decisions["bucket_lanes"],
        loads=decisions["loads"],
        exchange=0,
        finishers=1,
        bands=problem.bands,
        pack=pack,
        peers=peers,
    )
    each = ceildiv(count.tile * problem.units, threads)  # units of a thread
    ahead = max(1, min(each, MOST_AHEAD // problem.k))
    return (
        HashExtents(problem.hidden, problem.k, problem.units, problem.dtype, threads, pack, ahead, decisions["copies"]),
        count,
        CompactExtents(problem.vocab, threads, peers),
    )


def space(problem: LshCandidates, machine: Machine) -> Table:
    if not machine.has_clusters:
        raise NotApplicable("clusters of thread blocks need compute capability 9.0")
    default(problem, machine)
    return {
        "threads": THREADS,
        "cluster": machine.clusters(CLUSTERS),
        "bucket_lanes": BUCKET_LANES,
        "loads": LOADS,
        "pack": PACKS,
        "copies": COPIES,
        "overlap": (0, 1, 2),
    }


def allowed(problem: LshCandidates, machine: Machine, decisions: Decisions) -> str | None:
    cluster, pack = decisions["cluster"], decisions["pack"]
    if cluster >= 2 * problem.beam:
        return f"of {cluster} thread blocks half and more have none of beam={problem.beam} rows"
    if pack > (most := ceildiv(problem.beam, cluster)):
        return f"{pack} rows together are more than the {most} that a thread block has of beam={problem.beam}"
    if (room := Room.of(*extents(problem, decisions)).bytes) > (limit := machine.block_shared_bytes - STATIC_SHARED):
        return f"{room} bytes exceed shared memory of {limit}"
    return None


def default(problem: LshCandidates, machine: Machine) -> Decisions:
    """A thread block a row, as far as clusters go; large ones, with all of a row's buckets in flight. As many rows as
    possible are hashed together, of which there are copies if they fit.

    Raises `NotApplicable` if the counts of all words do not fit a thread block's shared memory.
    """
    threads, lanes, clusters = THREADS[-1], USUAL_LANES, machine.clusters(CLUSTERS)
    point = {
        "threads": threads,
        "cluster": next((n for n in clusters if n >= problem.beam), clusters[-1]),
        "bucket_lanes": lanes,
        "loads": next((n for n in LOADS if n * (threads // lanes) >= problem.bands), LOADS[-1]),
        "pack": 1,
        "copies": 1,
        "overlap": 1,
    }
    if reason := allowed(problem, machine, point):
        raise NotApplicable(f"counts of vocab={problem.vocab} words and rows of hidden={problem.hidden}: {reason}")
    points = ({**point, "pack": pack, "copies": copies} for pack in reversed(PACKS) for copies in (COPIES[-1], 1))
    return next(p for p in points if allowed(problem, machine, p) is None)
