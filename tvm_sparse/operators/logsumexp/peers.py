"""Peers of `logsumexp`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, CUDA, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem

from .call import logsumexp
from .problem import LogSumExp


def _torch_logsumexp(problem: LogSumExp, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = torch_tensor(inputs[0], device)
    return lambda: torch.logsumexp(x, -1)


def _torch_compiled_logsumexp(problem: LogSumExp, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = torch_tensor(inputs[0], device)
    compiled = torch.compile(lambda logits: torch.logsumexp(logits, -1), fullgraph=True, dynamic=False)
    compiled(x)
    return lambda: compiled(x)


def _numpy_logsumexp(problem: LogSumExp, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    x = inputs[0]

    def call() -> Any:
        top = x.max(axis=1, keepdims=True)
        return np.log(np.exp((x - top).astype(np.float32, copy=False)).sum(axis=1)) + top[:, 0].astype(np.float32)

    return call


def ours(problem: LogSumExp, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    x = convert(inputs[0])
    return lambda: logsumexp(x), problem


PEERS = (
    Peer("torch logsumexp", "torch", BOTH, _torch_logsumexp),
    Peer("torch.compile logsumexp", "triton", CUDA, _torch_compiled_logsumexp),
    Peer("NumPy exp", "numpy", CPU, _numpy_logsumexp),
)
