"""Peers of the screening step, and the call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem
from tvm_sparse.formats.bitmap import BITS

from .call import screen
from .problem import Screen


def _torch(problem: Screen, inputs: Sequence[Any], device: str) -> Call:
    import torch

    scores, best, norms, bounds = (torch_tensor(array, device) for array in inputs[:4])
    powers = (1 << torch.arange(BITS, device=scores.device)).to(torch.int32)

    def call() -> Any:
        highest = torch.addmm(scores, norms, bounds)
        low = (2 * scores.gather(1, best) - highest.gather(1, best)).nan_to_num(nan=-torch.inf, posinf=torch.inf)
        beaten = highest < low.amin(1, keepdim=True) - inputs[4]
        left = torch.nn.functional.pad(~beaten, (0, -problem.vocab % BITS))
        return (left.view(problem.rows, -1, BITS) * powers).sum(2, dtype=torch.int32)

    return call


def ours(problem: Screen, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    scores, best, norms, bounds = (convert(array) for array in inputs[:4])
    return lambda: screen(scores, best, norms, bounds, inputs[4]), problem


PEERS = (Peer("torch addmm and compare", "torch", BOTH, _torch),)
