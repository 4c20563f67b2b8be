"""Peers of `compaction`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, CPU, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem
from tvm_sparse.formats import bitmap

from .call import compaction
from .problem import Compaction, compacted


def torch_scan(capacity: int) -> Callable[[Any], Any]:
    """Lists of the words that are set in booleans `(lists, vocab)`, by torch, without a host round trip."""
    import torch

    def call(mask: Any) -> Any:
        lists, vocab = mask.shape
        place = mask.cumsum(1)
        counts = place[:, -1].to(torch.int32)
        # Words without room go to an extra position after the list.
        place = torch.where(mask & (place <= capacity), place - 1, capacity)
        candidates = torch.full((lists, capacity + 1), -1, dtype=torch.int32, device=mask.device)
        words = torch.arange(vocab, dtype=torch.int32, device=mask.device).expand(lists, -1)
        candidates.scatter_(1, place, words)
        return candidates[:, :capacity], counts

    return call


def _mask(problem: Compaction, inputs: Sequence[Any], device: str) -> Any:
    return torch_tensor(bitmap.unpack_bits(inputs[0], problem.vocab), device)


def _torch_scan(problem: Compaction, inputs: Sequence[Any], device: str) -> Call:
    mask, scan = _mask(problem, inputs, device), torch_scan(problem.capacity)
    return lambda: scan(mask)


def _torch_nonzero(problem: Compaction, inputs: Sequence[Any], device: str) -> Call:
    mask = _mask(problem, inputs, device)
    return lambda: [row.nonzero() for row in mask]


def _numpy_flatnonzero(problem: Compaction, inputs: Sequence[Any], device: str) -> Call:
    import numpy as np

    mask = bitmap.unpack_bits(inputs[0], problem.vocab)
    return lambda: [np.flatnonzero(row) for row in mask]


def ours(problem: Compaction, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    chosen = convert(inputs[0])
    return lambda: compaction(chosen, problem.vocab, problem.capacity), problem


def _as_lists(problem: Compaction, rows: Sequence[Any]) -> list[Any]:
    """Candidates and counts from the words of each list."""
    import numpy as np

    mask = np.zeros((len(rows), problem.vocab), bool)
    for chosen, words in zip(mask, rows, strict=True):
        chosen[words.reshape(-1)] = True
    return compacted(mask, problem.capacity)


# The peers start from booleans, ours from a bitmap.
PEERS = (
    Peer("torch cumsum + scatter", "torch", BOTH, _torch_scan),
    Peer("torch nonzero", "torch", BOTH, _torch_nonzero, _as_lists),
    Peer("NumPy flatnonzero", "numpy", CPU, _numpy_flatnonzero, _as_lists),
)
