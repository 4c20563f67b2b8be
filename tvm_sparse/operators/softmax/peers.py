"""Peers of `softmax`, and the public call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, CUDA, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem, numpy_dtype

from .call import log_softmax, softmax
from .problem import Softmax


def _result(problem: Softmax) -> Any:
    """PyTorch's argument `dtype`: None for that of the logits."""
    import torch

    return getattr(torch, problem.result) if problem.result else None


def _torch_softmax(problem: Softmax, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x, function = torch_tensor(inputs[0], device), torch.log_softmax if inputs[1] else torch.softmax
    return lambda: function(x, -1, dtype=_result(problem))


def _torch_compiled_softmax(problem: Softmax, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x, function = torch_tensor(inputs[0], device), torch.log_softmax if inputs[1] else torch.softmax
    dtype = _result(problem)
    compiled = torch.compile(lambda logits: function(logits, -1, dtype=dtype), fullgraph=True, dynamic=False)
    compiled(x)
    return lambda: compiled(x)


def _numpy_softmax(problem: Softmax, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    x, log = inputs
    written = numpy_dtype(problem.out_dtype)

    def call() -> Any:
        shifted = (x - x.max(axis=1, keepdims=True)).astype(np.float32, copy=False)
        e = np.exp(shifted)
        total = e.sum(axis=1, keepdims=True)
        return (shifted - np.log(total) if log else e / total).astype(written, copy=False)

    return call


def ours(problem: Softmax, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    logits, log = inputs
    x, dtype = convert(logits), problem.result or None
    if log:
        return lambda: log_softmax(x, dtype=dtype), dataclasses.replace(problem, algorithm="online")
    return lambda: softmax(x, algorithm=problem.algorithm, dtype=dtype), problem


PEERS = (
    Peer("torch softmax", "torch", BOTH, _torch_softmax),
    Peer("torch.compile softmax", "triton", CUDA, _torch_compiled_softmax),
    Peer("NumPy exp", "numpy", CPU, _numpy_softmax),
)
