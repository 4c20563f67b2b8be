"""Other libraries' ways to compute `row_argmax_logsumexp`, and ours as its user calls it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem

from .call import row_argmax_logsumexp
from .problem import RowArgmaxLogsumexp


def _torch(problem: RowArgmaxLogsumexp, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = torch_tensor(inputs[0], device)
    return lambda: (torch.logsumexp(x.float(), -1), torch.argmax(x, -1))


def _numpy(problem: RowArgmaxLogsumexp, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    def call() -> Any:
        x = inputs[0].astype(np.float32, copy=False)
        top = np.clip(x.max(axis=1, keepdims=True), np.finfo(np.float32).min, np.finfo(np.float32).max)
        return top[:, 0] + np.log(np.exp(x - top).sum(axis=1)), np.argmax(x, axis=1)

    return call


def ours(problem: RowArgmaxLogsumexp, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    logits = convert(inputs[0])
    return lambda: row_argmax_logsumexp(logits), problem


PEERS = (
    Peer("torch argmax + logsumexp", "torch", BOTH, _torch),
    Peer("NumPy", "numpy", CPU, _numpy),
)
