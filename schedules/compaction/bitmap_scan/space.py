"""The space of `bitmap_scan`. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table
from tvm_sparse.operators.compaction.problem import Compaction

from ...lsh.extents import SLICES, THREADS, WARP, WARP_SUMS, CompactExtents, Room, shared_limit

# Words of a slice's bitmap, at least: with fewer, most threads of its block have nothing to write.
LEAST_SHARE = WARP
# Default threads of a thread block, and threads for which a multiprocessor finds work by default.
THREADS_EACH, BUSY_THREADS = 384, 2560
# Words of the vocabulary that a slice writes by default, at least: with fewer its thread block waits for the most part.
LEAST_WRITTEN = 230
SOME_SLICES = tuple(n for n in SLICES if n <= 32)


def extents(problem: Compaction, decisions: Decisions) -> CompactExtents:
    """The sizes of one point's kernel."""
    return CompactExtents(problem.vocab, decisions["threads"], decisions["slices"])


def space(problem: Compaction, machine: Machine) -> Table:
    if machine.capability < WARP_SUMS:
        raise NotApplicable("sums over a warp need compute capability 8.0")
    size, limit = Room.of(compact=CompactExtents(problem.vocab, THREADS[0], 1)).bytes, shared_limit(machine)
    if size > limit:
        raise NotApplicable(f"a bitmap of {size} bytes exceeds shared memory of {limit}")
    return {
        "threads": THREADS,
        "slices": SOME_SLICES,
        "overlap": (0, 1, 2) if machine.has_clusters else (0,),
    }


def allowed(problem: Compaction, machine: Machine, decisions: Decisions) -> str | None:
    e = extents(problem, decisions)
    if e.shares > 1 and e.share < LEAST_SHARE:
        return f"{e.shares} slices of {e.share} words of the bitmap are too small"
    return None


def default(problem: Compaction, machine: Machine) -> Decisions:
    """As many slices as there are multiprocessors for: where candidates lie side by side, as frequent words do, few
    thread blocks have all of them. With a slice for each multiprocessor 38 lists of 29,505 words took twice as long on
    an H200 as with 16 slices each (`scripts/regret.py`, seed 10); 46 lists of 460 of 21,408 words took 1.8 times as
    long with 16 slices as with 2 (seed 18).
    """
    fitting = [n for n in SOME_SLICES if n == 1 or CompactExtents(problem.vocab, THREADS[0], n).share >= LEAST_SHARE]
    room = min(machine.cores * BUSY_THREADS // THREADS_EACH // problem.lists, problem.capacity // LEAST_WRITTEN)
    slices = max((n for n in fitting if n <= room), default=1)
    return {"threads": THREADS_EACH, "slices": slices, "overlap": 1 if machine.has_clusters else 0}
