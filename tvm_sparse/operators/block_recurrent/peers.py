"""Peers of `block_recurrent`, and the public call. All return the output alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import Call
from tvm_sparse.core.problem import Problem
from tvm_sparse.formats.block_recurrent import BlockRecurrentWeights
from tvm_sparse.operators.sparse_recurrent.peers import DENSE_PEERS, called

from .call import block_recurrent, problem_of
from .problem import BlockRecurrent


def ours(problem: BlockRecurrent, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    weights = BlockRecurrentWeights(problem.hidden, problem.gates, problem.dtype, *inputs[:3])
    asked = problem_of(weights, problem.steps, problem.batch, problem.cell, problem.ragged, problem.resets)
    return called(problem, inputs, convert, block_recurrent, weights), asked


PEERS = DENSE_PEERS
