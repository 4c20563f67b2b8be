"""The space of `staged_hash`. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table
from tvm_sparse.operators.wta_hash.problem import WtaHash

from ...lsh.extents import HashExtents, Room, shared_limit

THREADS = (64, 96, 128, 192, 256, 384, 512, 768, 1024)


def extents(problem: WtaHash, decisions: Decisions) -> HashExtents:
    """The sizes of one point's kernel."""
    return HashExtents(problem.hidden, problem.k, problem.units, problem.dtype, decisions["threads"])


def space(problem: WtaHash, machine: Machine) -> Table:
    table = {"threads": THREADS, "overlap": (0, 1, 2) if machine.has_clusters else (0,)}
    if all(allowed(problem, machine, {"threads": threads, "overlap": 0}) for threads in THREADS):
        raise NotApplicable(f"a row of hidden={problem.hidden} exceeds shared memory")
    return table


def allowed(problem: WtaHash, machine: Machine, decisions: Decisions) -> str | None:
    e = extents(problem, decisions)
    size, limit = Room.of(e).bytes, shared_limit(machine)
    if size > limit:
        return f"{size} bytes exceed shared memory of {limit}"
    if e.threads < problem.units:
        return f"{e.threads} threads have less than one each of units={problem.units}"
    if e.threads > THREADS[0] and e.threads >= 2 * problem.bands * problem.units:
        return f"half of {e.threads} threads have no unit of bands={problem.bands}"
    return None


# Default threads, where all units together have room on the multiprocessors at once, and where they have not: there
# each thread block copies a row again, and larger ones copy it less often.
USUAL_THREADS, CROWDED_THREADS = 192, 512
RESIDENT_THREADS = 2048
# Units of a multiprocessor up to which smaller thread blocks end sooner, and up to which those of the next launch find
# room beside them.
FEW_UNITS, FEW_THREADS, BESIDE_UNITS = 32, 128, 128


def default(problem: WtaHash, machine: Machine) -> Decisions:
    """192 threads, or 512 where there are more units than resident threads: with 192 of them 2,502 rows of 324 bands
    took 1.7 times as long on an H200 (`scripts/regret.py`, seed 10). The launch overlaps the producer kernel's, and
    that of the consumer kernel if there are few units.
    """
    each = problem.batch * problem.bands * problem.units / machine.cores
    overlap = (2 if each <= BESIDE_UNITS else 1) if machine.has_clusters else 0
    usual = CROWDED_THREADS if each > RESIDENT_THREADS else FEW_THREADS if each <= FEW_UNITS else USUAL_THREADS
    fitting = [t for t in THREADS if allowed(problem, machine, {"threads": t, "overlap": overlap}) is None]
    return {"threads": max((t for t in fitting if t <= usual), default=fitting[0]), "overlap": overlap}
