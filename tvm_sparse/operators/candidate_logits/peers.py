"""Peers of `candidate_logits`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem

from .call import candidate_logits
from .problem import CandidateLogits


def _torch_gathered(problem: CandidateLogits, inputs: Sequence[Any], device: str) -> Call:
    import torch

    if problem.bias:
        raise TypeError("biases are not compared")
    hidden, embedding, candidates, counts = (torch_tensor(a, device) for a in inputs[:4])
    lists, rows = candidates.long(), torch.arange(problem.m, device=device)

    def call() -> Any:
        logits = torch.bmm(hidden, embedding[lists].transpose(1, 2)).float()
        return logits.masked_fill((rows >= counts[:, None])[:, None], -torch.inf)

    return call


def _numpy_gathered(problem: CandidateLogits, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    if problem.bias:
        raise TypeError("biases are not compared")
    hidden, embedding = (a.astype(np.float32) for a in inputs[:2])
    candidates, counts = inputs[2:4]

    def call() -> Any:
        logits = hidden @ embedding[candidates].transpose(0, 2, 1)
        return np.where(np.arange(problem.m) < counts[:, None, None], logits, np.float32(-np.inf))

    return call


def ours(problem: CandidateLogits, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    hidden, embedding, candidates, counts, *bias = map(convert, inputs)
    flat = hidden.reshape(problem.lists * problem.beam, problem.hidden)
    extras = {"bias": bias[0]} if bias else {}

    def call() -> Any:
        found = candidate_logits(flat, embedding, candidates, counts=counts, **extras)
        return found.reshape(problem.lists, problem.beam, problem.m)

    return call, problem


PEERS = (
    Peer("torch gather + bmm", "torch", BOTH, _torch_gathered),
    Peer("NumPy", "numpy", CPU, _numpy_gathered),
)
