"""The space of `radix_select`. Loads no compiler."""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, Table
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

THREADS = (256, 512, 1024)


def space(problem: SoftmaxTopk, machine: Machine) -> Table:
    return {"threads": THREADS}


def default(problem: SoftmaxTopk, machine: Machine) -> Decisions:
    return {"threads": 512}


def features(problem: SoftmaxTopk, machine: Machine, decisions: Decisions) -> Features:
    threads, each = decisions["threads"], problem.batch / machine.cores
    return {
        "blocks_each": each,
        "waves": each / (2048 // threads),
        "threads_each": min(each, 2048 // threads) * threads,
        "thread_vectors": problem.vocab * numpy_dtype(problem.dtype).itemsize / 16 / threads,
        "k_share": problem.k / problem.vocab,
        "k_each": problem.k / threads,
    }
