"""The space of `norm_block`. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Table, powers

from ...problem import RowNorm

WARP = 32
THREADS = powers(WARP, 1024)
# The widest load of a thread.
LOAD_BYTES = 16


def space(problem: RowNorm, machine: Machine) -> Table:
    widest = LOAD_BYTES // numpy_dtype(problem.dtype).itemsize
    vec = tuple(vec for vec in powers(1, widest) if problem.width % vec == 0)
    return {"threads": tuple(t for t in THREADS if t <= machine.max_threads), "vec": vec}


def allowed(problem: RowNorm, machine: Machine, decisions: Decisions) -> str | None:
    if decisions["threads"] > WARP and decisions["threads"] // 2 * decisions["vec"] >= problem.width:
        return f"half of {decisions['threads']} threads have no work in a row of {problem.width}"
    return None


def default(problem: RowNorm, machine: Machine) -> Decisions:
    table = space(problem, machine)
    vec = table["vec"][-1]
    return {"threads": next((t for t in (32, 64, 128) if t * vec >= problem.width), 256), "vec": vec}
