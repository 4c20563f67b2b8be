"""Peers of `csr_linear`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, Call, Peer, torch_tensor
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.operators.nhot_lookup.rows import CsrRows
from tvm_sparse.runtime.dense import DENSE, KERNEL

from .call import csr_linear, problem_of
from .problem import CsrLinear


def _scipy_weight(problem: CsrLinear, inputs: Sequence[Any]) -> Any:
    import numpy as np
    import scipy.sparse

    _, indptr, indices, values = inputs
    return scipy.sparse.csr_array((values.astype(np.float32), indices, indptr), shape=(problem.n, problem.k))


def _torch_dense(problem: CsrLinear, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x = torch_tensor(inputs[0], device)
    weight = torch_tensor(_scipy_weight(problem, inputs).toarray(), device).to(x.dtype)
    return lambda: torch.nn.functional.linear(x, weight)


def _torch_csr(problem: CsrLinear, inputs: Sequence[Any], device: str) -> Call:
    """cuSPARSE's product on a GPU."""
    import warnings

    import torch

    x, indptr, indices, values = (torch_tensor(array, device) for array in inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that sparse tensors are in beta
        weight = torch.sparse_csr_tensor(indptr, indices, values, size=(problem.n, problem.k))
    return lambda: (weight @ x.T).T


def _scipy_csr(problem: CsrLinear, inputs: Sequence[Any], device: str) -> Call:
    if problem.dtype != "float32":
        raise TypeError(f"SciPy has no {problem.dtype}")
    x, weight = inputs[0], _scipy_weight(problem, inputs)
    return lambda: (weight @ x.T).T


def ours(problem: CsrLinear, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    x, indptr, indices, values = map(convert, inputs)
    rows = CsrRows((indptr, indices, values), columns=problem.k)
    return lambda: csr_linear(x, rows), problem_of(rows, problem.m)


def ways(problem: CsrLinear, inputs: Sequence[Any], machine: Machine) -> dict[str, Call]:
    """The public function by each of its ways, for torch tensors and a constant weight."""
    x, *parts = (torch_tensor(array, machine.device) for array in inputs)
    rows = CsrRows(tuple(parts), columns=problem.k, constant=True)

    def by(way: str) -> Call:
        return lambda: csr_linear(x, rows, dense=way == DENSE)

    return {way: by(way) for way in (KERNEL, DENSE)}


PEERS = (
    Peer("torch dense linear", "torch", BOTH, _torch_dense),
    Peer("torch CSR @ dense", "torch", BOTH, _torch_csr),
    Peer("SciPy CSR @ dense", "scipy", CPU, _scipy_csr),
)
