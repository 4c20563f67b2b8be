"""Peers of `lsh_candidates`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem, ProblemError
from tvm_sparse.formats import bitmap
from tvm_sparse.operators.compaction.peers import torch_scan
from tvm_sparse.operators.lsh_lookup.peers import torch_buckets
from tvm_sparse.operators.wta_hash.peers import torch_hash

from .call import lsh_candidates
from .problem import LshCandidates


def _torch_composition(problem: LshCandidates, inputs: Sequence[Any], device: str) -> Call:
    if problem.table != "direct":
        raise ProblemError("torch has no cuckoo tables")
    hidden, permutations, words, starts = (torch_tensor(a, device) for a in inputs[:4])
    always = torch_tensor(bitmap.unpack_bits(inputs[-2], problem.vocab), device)
    hashed, scan = torch_hash(permutations), torch_scan(problem.capacity)
    chosen = torch_buckets(words, starts, always, inputs[-1])
    rows = hidden.view(-1, problem.hidden)
    return lambda: scan(chosen(hashed(rows).view(problem.lists, problem.beam, -1)))


def ours(problem: LshCandidates, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    hidden, permutations, words, table, *multipliers, always = map(convert, inputs[:-1])
    hashed, threshold, capacity = multipliers[0] if multipliers else None, inputs[-1], problem.capacity
    return (
        lambda: lsh_candidates(hidden, permutations, words, table, always, threshold, capacity, multipliers=hashed),
        problem,
    )


PEERS = (Peer("torch argmax + scatter_add + cumsum", "torch", BOTH, _torch_composition),)
