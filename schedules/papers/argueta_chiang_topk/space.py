"""The space of `packed_insertion`. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, NotApplicable, Table, powers
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

THREADS = powers(256, 1024)
# The paper goes to 400.
MAX_K = 1024


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    if problem.per_row or problem.capped:
        raise NotApplicable("the paper has neither soft caps nor temperatures, and the kernel one for all rows")
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: every element is compared with k others")
    return {"threads": THREADS, "skip": (0, 1)}


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    """The paper's."""
    return {"threads": 256, "skip": 0}
