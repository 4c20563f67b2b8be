"""Peers of `wta_hash`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, CUDA, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem
from tvm_sparse.formats import wta

from .call import wta_hash
from .problem import WtaHash


def torch_hash(permutations: Any) -> Callable[[Any], Any]:
    """Codes of rows `(batch, hidden)` by torch: gather, arg max, shifts."""
    import torch

    bands, units, k = permutations.shape
    columns = permutations.long().reshape(-1)
    steps = torch.arange(units - 1, -1, -1, device=permutations.device)
    shifts = (wta.index_bits(k) * steps).to(torch.int32)

    def hashed(x: Any) -> Any:
        places = x[:, columns].view(-1, bands, units, k).argmax(-1).to(torch.int32)
        return (places << shifts).sum(-1, dtype=torch.int32)

    return hashed


def _torch_argmax(problem: WtaHash, inputs: Sequence[Any], device: str) -> Call:
    x, permutations = (torch_tensor(a, device) for a in inputs)
    hashed = torch_hash(permutations)
    return lambda: hashed(x)


def _torch_compiled_argmax(problem: WtaHash, inputs: Sequence[Any], device: str) -> Call:
    import torch

    x, permutations = (torch_tensor(a, device) for a in inputs)
    compiled = torch.compile(torch_hash(permutations), fullgraph=True, dynamic=False)
    compiled(x)
    return lambda: compiled(x)


def _numpy_hash(problem: WtaHash, inputs: Sequence[Any], device: str) -> Call:
    return lambda: wta.hash_rows(*inputs)


def ours(problem: WtaHash, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    x, permutations = map(convert, inputs)
    return lambda: wta_hash(x, permutations), problem


PEERS = (
    Peer("torch gather + argmax", "torch", BOTH, _torch_argmax),
    Peer("torch.compile gather + argmax", "triton", CUDA, _torch_compiled_argmax),
    Peer("NumPy gather + maximum", "numpy", CPU, _numpy_hash),
)
