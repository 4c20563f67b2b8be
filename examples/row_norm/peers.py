"""Other libraries' ways to compute `row_norm`, and ours as its user calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem

from .call import row_norm
from .problem import RowNorm


def _torch_rms_norm(problem: RowNorm, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x, eps = torch_tensor(inputs[0], device), inputs[1]
    return lambda: torch.nn.functional.rms_norm(x, (problem.width,), eps=eps)


def _numpy(problem: RowNorm, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    x, eps = inputs

    def call() -> Any:
        wide = x.astype(np.float32, copy=False)
        return (wide / np.sqrt(np.mean(wide * wide, axis=1, keepdims=True) + np.float32(eps))).astype(x.dtype)

    return call


def ours(problem: RowNorm, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    x, eps = convert(inputs[0]), inputs[1]
    return lambda: row_norm(x, eps), problem


PEERS = (
    Peer("torch rms_norm", "torch", BOTH, _torch_rms_norm),
    Peer("NumPy", "numpy", CPU, _numpy),
)
