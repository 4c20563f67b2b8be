"""Peers of `bsr_matmul`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, CUDA, Call, Peer, torch_tensor
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.runtime.dense import DENSE, KERNEL

from .call import bsr_matmul
from .problem import BsrMatmul, activated
from .weight import BsrWeight


def dense_weight(problem: BsrMatmul, inputs: Sequence[Any]) -> Any:
    """The weight in the inputs as a dense `(n, k)` array."""
    import numpy as np

    data, indices, indptr = problem.blocks(inputs), *inputs[2:4]
    rows, cols = problem.block_shape
    block_rows, block_cols = problem.grid
    blocks = np.zeros((block_rows, block_cols, rows, cols), data.dtype)
    at = np.repeat(np.arange(block_rows), np.diff(indptr))
    blocks[at, indices] = data
    return np.ascontiguousarray(blocks.transpose(0, 2, 1, 3).reshape(problem.n, problem.k))


def _torch_finish(problem: BsrMatmul, inputs: Sequence[Any], device: str, product: Call) -> Call:
    """A product by PyTorch, followed by the problem's bias and activation, as its users write it."""
    import torch

    bias = [torch_tensor(array, device) for array in problem.biases(inputs)]
    activation = getattr(torch.nn.functional, problem.activation) if problem.activation else None

    def call() -> Any:
        y = product()
        if bias:
            y = y + bias[0]
        return activation(y) if activation else y

    return call if bias or activation else product


def _numpy_finish(problem: BsrMatmul, inputs: Sequence[Any], product: Call) -> Call:
    """A product by NumPy or SciPy, followed by the problem's bias and activation."""
    bias = problem.biases(inputs)
    if not bias and not problem.activation:
        return product
    return lambda: activated(product() + (bias[0] if bias else 0), problem.activation)


def _torch_dense(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x, weight = torch_tensor(inputs[0], device), torch_tensor(dense_weight(problem, inputs), device)
    return _torch_finish(problem, inputs, device, lambda: torch.nn.functional.linear(x, weight))


def _torch_bsr_tensor(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Any:
    import warnings

    import torch

    data, indices, indptr = (torch_tensor(a, device) for a in (problem.blocks(inputs), *inputs[2:4]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse tensors are in beta
        return torch.sparse_bsr_tensor(indptr, indices, data, size=(problem.n, problem.k))


def _torch_bsr(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    x, weight = torch_tensor(inputs[0], device), _torch_bsr_tensor(problem, inputs, device)
    return _torch_finish(problem, inputs, device, lambda: (weight @ x.T).T)


def _torch_bsr_triton(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    from torch.sparse._triton_ops import bsr_dense_mm

    x, weight = torch_tensor(inputs[0], device), _torch_bsr_tensor(problem, inputs, device)
    return _torch_finish(problem, inputs, device, lambda: bsr_dense_mm(weight, x.T).T)


def _scipy_bsr(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    import scipy.sparse

    x, data, indices, indptr = inputs[0], problem.blocks(inputs), *inputs[2:4]
    if problem.dtype != "float32":
        raise TypeError(f"SciPy has no {problem.dtype}")
    weight = scipy.sparse.bsr_array((data, indices, indptr), shape=(problem.n, problem.k))
    return _numpy_finish(problem, inputs, lambda: (weight @ x.T).T)


def _numpy_dense(problem: BsrMatmul, inputs: Sequence[Any], device: str) -> Call:
    x, weight = inputs[0], dense_weight(problem, inputs)
    return _numpy_finish(problem, inputs, lambda: x @ weight.T)


def ours(problem: BsrMatmul, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    x, data, indices, indptr = map(convert, (inputs[0], problem.blocks(inputs), *inputs[2:4]))
    # As in inference, where weights are not written.
    weight = BsrWeight((data, indices, indptr), columns=problem.k, constant=True)
    [bias] = map(convert, problem.biases(inputs) or [None])
    called = weight.problem(problem.m, problem.bias, problem.activation, problem.precision)
    return lambda: bsr_matmul(x, weight, bias=bias, **_options(problem)), called


def _options(problem: BsrMatmul) -> dict[str, Any]:
    """Options of the public function that a problem says."""
    return {"activation": problem.activation or None, "precision": problem.precision or None}


def ways(problem: BsrMatmul, inputs: Sequence[Any], machine: Machine) -> dict[str, Call]:
    """The public function by each of its ways, for torch tensors and a constant weight."""
    given = inputs[0], problem.blocks(inputs), *inputs[2:4]
    x, data, indices, indptr = (torch_tensor(array, machine.device) for array in given)
    weight = BsrWeight((data, indices, indptr), columns=problem.k, constant=True)
    [bias] = [torch_tensor(array, machine.device) for array in problem.biases(inputs)] or [None]

    def by(way: str) -> Call:
        return lambda: bsr_matmul(x, weight, bias=bias, dense=way == DENSE, **_options(problem))

    return {way: by(way) for way in (KERNEL, DENSE)}


PEERS = (
    Peer("torch dense linear", "torch", BOTH, _torch_dense),
    Peer("torch BSR @ dense", "torch", BOTH, _torch_bsr),
    Peer("torch bsr_dense_mm (Triton)", "triton", CUDA, _torch_bsr_triton),
    Peer("SciPy BSR @ dense", "scipy", CPU, _scipy_bsr),
    Peer("NumPy dense", "numpy", CPU, _numpy_dense),
)
