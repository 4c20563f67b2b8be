"""The space of `argmax_block`. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Table, powers
from tvm_sparse.schedules.rows.cut import Extents

from ...problem import RowArgmaxLogsumexp

WARP = 32
THREADS = powers(WARP, 1024)
# Vectors that a thread loads before it uses the first of them.
VECTORS = powers(1, 4)


def extents(problem: RowArgmaxLogsumexp, decisions: Decisions) -> Extents:
    """How the row is cut: one part, read once, whose elements are kept nowhere."""
    return Extents(
        writes=False,
        algorithm="online",
        dtype=problem.dtype,
        vocab=problem.vocab,
        keep="nowhere",
        cluster=1,
        threads=decisions["threads"],
        rows=1,
        vectors=decisions["vectors"],
    )


def space(problem: RowArgmaxLogsumexp, machine: Machine) -> Table:
    return {"threads": tuple(t for t in THREADS if t <= machine.max_threads), "vectors": VECTORS}


def allowed(problem: RowArgmaxLogsumexp, machine: Machine, decisions: Decisions) -> str | None:
    ext = extents(problem, decisions)
    if ext.threads > WARP and ext.threads >= 2 * ext.part:
        return f"half of {ext.threads} threads have no vector of a row of {problem.vocab}"
    if ext.vectors > 1 and ext.tile >= 2 * ext.part:
        return f"half of a tile of {ext.vectors} vectors a thread lies beyond the row"
    return None


def default(problem: RowArgmaxLogsumexp, machine: Machine) -> Decisions:
    wanted = ({"threads": t, "vectors": v} for t in (512, 256, 128, 64, WARP) for v in (4, 2, 1))
    return next(point for point in wanted if allowed(problem, machine, point) is None)
