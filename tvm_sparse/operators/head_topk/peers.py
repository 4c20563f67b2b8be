"""Peers of `head_topk`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, CUDA, Call, Peer, torch_tensor
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.operators.softmax_topk.call import softmax_topk
from tvm_sparse.runtime.dispatch import dispatcher

from .call import KERNEL, PRODUCT, head_topk
from .problem import HeadTopk


def _tensors(problem: HeadTopk, inputs: Sequence[Any], device: str) -> tuple[Any, Any, Any]:
    """Hidden states, embedding, and bias or None, on the device."""
    if problem.ids or problem.per_row or problem.capped:
        raise TypeError("words beside the best, temperatures of rows and soft caps are not compared")
    bias, _ = problem.extras(inputs)
    return (*(torch_tensor(a, device) for a in inputs[:2]), None if bias is None else torch_tensor(bias, device))


def _torch_head(problem: HeadTopk, inputs: Sequence[Any], device: str) -> Call:
    import torch

    hidden, embedding, bias = _tensors(problem, inputs, device)

    def call() -> Any:
        logits = torch.nn.functional.linear(hidden, embedding)
        if bias is not None:
            logits = logits + bias
        return torch.topk(torch.softmax(logits, -1, dtype=torch.float32), problem.k)

    return call


def _torch_product_ours(problem: HeadTopk, inputs: Sequence[Any], device: str) -> Call:
    import torch

    hidden, embedding, bias = _tensors(problem, inputs, device)
    return lambda: softmax_topk(torch.nn.functional.linear(hidden, embedding), problem.k, bias=bias)


def _torch_compiled_head(problem: HeadTopk, inputs: Sequence[Any], device: str) -> Call:
    import torch

    compiled = torch.compile(_torch_head(problem, inputs, device), fullgraph=True, dynamic=False)
    compiled()
    return compiled


def _numpy_head(problem: HeadTopk, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    hidden, embedding = (a.astype(np.float32) for a in inputs[:2])
    bias, _ = problem.extras(inputs)

    def call() -> Any:
        logits = hidden @ embedding.T
        if bias is not None:
            logits = logits + bias
        best = np.argpartition(-logits, problem.k - 1, axis=1)[:, : problem.k]
        order = np.argsort(-np.take_along_axis(logits, best, axis=1), axis=1, kind="stable")
        best = np.take_along_axis(best, order, axis=1)
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        return np.take_along_axis(weights, best, axis=1) / weights.sum(axis=1, keepdims=True), best

    return call


def ours(problem: HeadTopk, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    hidden, embedding = map(convert, inputs[:2])
    bias, ids = (None if a is None else convert(a) for a in problem.extras(inputs))
    options: dict[str, Any] = {"bias": bias, "ids": ids, "normaliser": True, "constant": bool(inputs[4])}
    options |= {"soft_cap": problem.cap(inputs)}
    return lambda: head_topk(hidden, embedding, problem.k, **options), problem


def ways(problem: HeadTopk, inputs: Sequence[Any], machine: Machine) -> dict[str, Call]:
    """The public function by each of its ways, for torch tensors."""
    hidden, embedding = (torch_tensor(array, machine.device) for array in inputs[:2])
    bias, ids = (None if a is None else torch_tensor(a, machine.device) for a in problem.extras(inputs))
    options: dict[str, Any] = {"bias": bias, "ids": ids, "constant": bool(inputs[4])}

    def by(way: str) -> Call:
        launchers: dict[tuple, Any] = {}

        def call() -> Any:
            with dispatcher.taking(problem, machine, way, launchers):
                return head_topk(hidden, embedding, problem.k, **options)

        return call

    return {way: by(way) for way in (KERNEL, PRODUCT)}


PEERS = (
    Peer("torch linear + softmax + topk", "torch", BOTH, _torch_head),
    Peer("torch linear + softmax_topk", "torch", BOTH, _torch_product_ours),
    Peer("torch.compile linear + softmax + topk", "triton", CUDA, _torch_compiled_head),
    Peer("NumPy", "numpy", CPU, _numpy_head),
)
