"""Peers of `softmax_topk`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, CUDA, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem

from .call import softmax_topk
from .problem import SoftmaxTopk


def _plain_logits(problem: SoftmaxTopk, inputs: Sequence[Any]) -> Any:
    """Logits with the temperature already applied, so that peers do not pay for it."""
    if problem.bias or problem.ids or problem.per_row or problem.capped:
        raise NotImplementedError("compared without bias, ids, soft cap and temperatures of rows only")
    logits, scale = inputs[:2]
    return logits if scale == 1 else (logits * scale).astype(logits.dtype)


def _torch_softmax_topk(problem: SoftmaxTopk, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = torch_tensor(_plain_logits(problem, inputs), device)
    return lambda: torch.topk(torch.softmax(x, -1, dtype=torch.float32), problem.k)


def _torch_topk_logsumexp(problem: SoftmaxTopk, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = torch_tensor(_plain_logits(problem, inputs), device)

    def call() -> Any:
        values, indices = torch.topk(x, problem.k)
        return torch.exp(values.float() - torch.logsumexp(x, -1, keepdim=True).float()), indices

    return call


def _flashinfer_topk(problem: SoftmaxTopk, inputs: Sequence[Any], device: str) -> Call:
    import torch
    from flashinfer import topk

    x = torch_tensor(_plain_logits(problem, inputs), device)

    def call() -> Any:
        values, indices = topk.top_k(x, problem.k, sorted=True, deterministic=True)
        return torch.exp(values.float() - torch.logsumexp(x, -1, keepdim=True).float()), indices

    return call


def _cub_topk(problem: SoftmaxTopk, inputs: Sequence[Any], device: str) -> Call:
    """By a module `cub_batched_topk` with `topk(x, k) -> (values, indices)`, which wraps `cub::DeviceBatchedTopK`: the
    best in any order.
    """
    import torch
    from cub_batched_topk import topk  # type: ignore[import-not-found]

    x = torch_tensor(_plain_logits(problem, inputs), device)

    def call() -> Any:
        values, indices = topk(x, problem.k)
        return torch.exp(values.float() - torch.logsumexp(x, -1, keepdim=True).float()), indices

    return call


def _sorted(problem: SoftmaxTopk, outputs: list[Any]) -> list[Any]:
    """The best in order."""
    import numpy as np

    values, indices = outputs
    order = np.lexsort((indices, -values.astype(np.float64)), axis=-1)
    return [np.take_along_axis(values, order, 1), np.take_along_axis(indices, order, 1).astype(np.int64)]


def _numpy_softmax_topk(problem: SoftmaxTopk, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    x, k = _plain_logits(problem, inputs), problem.k

    def call() -> Any:
        e = np.exp(x.astype(np.float32, copy=False) - x.max(axis=1, keepdims=True).astype(np.float32))
        total = e.sum(axis=1, keepdims=True)
        some = np.argpartition(e, -k, axis=1)[:, -k:]
        order = np.argsort(-np.take_along_axis(e, some, axis=1), axis=1, kind="stable")
        indices = np.take_along_axis(some, order, axis=1)
        return np.take_along_axis(e, indices, axis=1) / total, indices

    return call


def ours(problem: SoftmaxTopk, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    logits, scale, log, *rest = inputs
    extras = {"soft_cap": rest.pop(0)} if problem.capped else {}
    names = [argument.name for argument in problem.kernel_inputs[3 + problem.capped :]]
    x, extras = convert(logits), extras | dict(zip(names, map(convert, rest), strict=True))
    temperature = convert(scale) if problem.per_row else 1 / scale
    return lambda: softmax_topk(x, problem.k, log=bool(log), temperature=temperature, **extras), problem


PEERS = (
    Peer("torch softmax, topk", "torch", BOTH, _torch_softmax_topk),
    Peer("torch topk, logsumexp", "torch", BOTH, _torch_topk_logsumexp),
    Peer("FlashInfer top_k, torch logsumexp", "flashinfer", CUDA, _flashinfer_topk, _sorted),
    Peer("CUB batched top-k (unsorted), torch logsumexp", "cub_batched_topk", CUDA, _cub_topk, _sorted),
    Peer("NumPy exp, argpartition", "numpy", CPU, _numpy_softmax_topk),
)
