"""The space of `insertion`, and the extents of its points. Loads no compiler."""

from __future__ import annotations

from dataclasses import dataclass

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table, ceildiv, powers
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

THREADS = powers(128, 512)
# Elements that a thread loads before it looks at the first.
LOADS = (1, 4)
# A thread's list takes two registers a key.
MAX_K = 32


extent = Derived["Layout", int]


@dataclass(frozen=True)
class Layout:
    """The extents of one point's kernel or kernels."""

    form: str  # "unfused", "safe" or "online"
    vocab: int
    k: int
    ids: int  # given columns of a row
    threads: int  # of a thread block
    loads: int  # elements of a thread that are loaded together

    # Warps of a thread block.
    warps = extent(lambda e: e.threads // 32)
    # Elements of a row that a thread block loads together.
    tile = extent(lambda e: e.threads * e.loads)
    # Tiles of a row.
    tiles = extent(lambda e: ceildiv(e.vocab, e.tile))
    # Keys of a list. One more than k shows whether the k-th probability is above all that are left out.
    kept = extent(lambda e: min(e.k + 1, e.vocab) if e.form == "unfused" else e.k)


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    if problem.per_row or problem.capped:
        raise NotApplicable("the paper has neither soft caps nor temperatures, and the kernel one for all rows")
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: every thread keeps k keys in registers")
    return {"threads": THREADS, "loads": LOADS}


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    return {"threads": 256, "loads": 4}
