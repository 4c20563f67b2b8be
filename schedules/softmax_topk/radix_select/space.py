"""The space of `radix_select`. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Table
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

THREADS = (256, 512, 1024)


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    return {"threads": THREADS}


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    return {"threads": 512}
