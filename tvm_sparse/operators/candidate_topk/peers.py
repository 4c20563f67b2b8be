"""Peers of `candidate_topk`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem

from .call import candidate_topk
from .problem import CandidateTopk


def _torch_gathered(problem: CandidateTopk, inputs: Sequence[Any], device: str) -> Call:
    import torch

    if problem.block > 1 or problem.bias:
        raise TypeError("blocks and biases are not compared")
    hidden, embedding, candidates, counts = (torch_tensor(a, device) for a in inputs[:4])
    lists, rows = candidates.long(), torch.arange(problem.m, device=device)

    def call() -> Any:
        logits = torch.bmm(hidden, embedding[lists].transpose(1, 2)).float()
        logits = logits.masked_fill((rows >= counts[:, None])[:, None], -torch.inf)
        values, at = torch.topk(torch.softmax(logits, -1), problem.k)
        return values, torch.gather(lists[:, None].expand(-1, problem.beam, -1), 2, at)

    return call


def _numpy_gathered(problem: CandidateTopk, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    if problem.block > 1 or problem.bias:
        raise TypeError("blocks and biases are not compared")
    hidden, embedding = (a.astype(np.float32) for a in inputs[:2])
    candidates, counts = inputs[2:4]

    def call() -> Any:
        logits = hidden @ embedding[candidates].transpose(0, 2, 1)
        logits = np.where(np.arange(problem.m) < counts[:, None, None], logits, np.float32(-np.inf))
        best = np.argsort(-logits, axis=2, kind="stable")[..., : problem.k]
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        chosen = np.take_along_axis(np.broadcast_to(candidates[:, None], logits.shape), best, axis=2)
        return np.take_along_axis(weights, best, axis=2) / weights.sum(axis=2, keepdims=True), chosen

    return call


def ours(problem: CandidateTopk, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    hidden, embedding, candidates, counts = map(convert, inputs[:4])
    extras = {"bias": convert(inputs[6])} if problem.bias else {}
    flat = hidden.reshape(problem.lists * problem.beam, problem.hidden)
    shape = (problem.lists, problem.beam)

    def call() -> Any:
        found = candidate_topk(
            flat, embedding, candidates, problem.k, counts=counts, block=problem.block, normaliser=True, **extras
        )
        return tuple(array.reshape(*shape, *array.shape[1:]) for array in found)

    return call, problem


PEERS = (
    Peer("torch gather + bmm + softmax + topk", "torch", BOTH, _torch_gathered),
    Peer("NumPy", "numpy", CPU, _numpy_gathered),
)
