"""Peers of the sampled product, and the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem

from .call import bsr_sddmm
from .problem import BsrSddmm


def _torch_dense(problem: BsrSddmm, inputs: Sequence[Any], device: str) -> Call:
    """The whole product, and then its blocks."""
    import torch

    left, right, indices, indptr = (torch_tensor(array, device) for array in inputs)
    rows, cols = problem.block_shape
    at = torch.arange(problem.grid[0], device=left.device).repeat_interleave(indptr.diff())

    def call() -> Any:
        whole = (left.T @ right).view(problem.grid[0], rows, problem.grid[1], cols)
        return whole.transpose(1, 2)[at, indices].contiguous()

    return call


def _torch_gathered(problem: BsrSddmm, inputs: Sequence[Any], device: str) -> Call:
    """A batched product of gathered columns."""
    import torch

    left, right, indices, indptr = (torch_tensor(array, device) for array in inputs)
    rows, cols = problem.block_shape
    at = torch.arange(problem.grid[0], device=left.device).repeat_interleave(indptr.diff())
    left, right = left.view(problem.m, -1, rows), right.view(problem.m, -1, cols)
    return lambda: left[:, at].permute(1, 2, 0) @ right[:, indices.long()].permute(1, 0, 2)


def ours(problem: BsrSddmm, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    left, right, indices, indptr = map(convert, inputs)
    return lambda: bsr_sddmm(left, right, indices, indptr, problem.block_shape, problem.pattern), problem


PEERS = (
    Peer("torch dense product, then blocks", "torch", BOTH, _torch_dense),
    Peer("torch bmm of gathered columns", "torch", BOTH, _torch_gathered),
)
