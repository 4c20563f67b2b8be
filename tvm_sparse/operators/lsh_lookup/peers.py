"""Peers of `lsh_lookup`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem, ProblemError
from tvm_sparse.formats import bitmap

from .call import lsh_lookup
from .problem import LshLookup


def torch_buckets(words: Any, starts: Any, always: Any, threshold: int) -> Callable[[Any], Any]:
    """Words of codes `(lists, beam, bands)` as booleans `(lists, vocab)` by torch, from direct tables.

    All buckets are joined to one list of (row, word), and counted by `scatter_add_`. The host needs the length of that
    list, so it waits for the GPU.
    """
    import torch

    bands, vocab = words.shape
    band = torch.arange(bands, device=words.device)

    def chosen(codes: Any) -> Any:
        rows = codes.view(-1, bands).long()
        first = starts[band, rows].long()
        lengths = (starts[band, rows + 1] - first).view(-1)
        offsets = lengths.cumsum(0)
        source = torch.arange(int(offsets[-1]), device=words.device)
        bucket = torch.repeat_interleave(lengths)
        place = (band * vocab + first).view(-1)[bucket] + source - (offsets - lengths)[bucket]
        hits = torch.zeros((len(rows), vocab), dtype=torch.int32, device=words.device)
        target = bucket // bands * vocab + words.view(-1)[place]
        hits.view(-1).scatter_add_(0, target, torch.ones_like(target, dtype=torch.int32))
        return (hits >= threshold).view(*codes.shape[:2], vocab).any(1) | always

    return chosen


def _tensors(problem: LshLookup, inputs: Sequence[Any], device: str) -> tuple[Any, Any, Any]:
    """Codes, words, and booleans of the words that are always candidates."""
    always = bitmap.unpack_bits(inputs[-2], problem.vocab)
    return (*(torch_tensor(a, device) for a in inputs[:2]), torch_tensor(always, device))


def _torch_scatter(problem: LshLookup, inputs: Sequence[Any], device: str) -> Call:
    if problem.table != "direct":
        raise ProblemError("torch has no cuckoo tables")
    codes, words, always = _tensors(problem, inputs, device)
    chosen = torch_buckets(words, torch_tensor(inputs[2], device), always, inputs[-1])
    return lambda: chosen(codes)


def _torch_dense(problem: LshLookup, inputs: Sequence[Any], device: str) -> Call:
    """Equation 9 taken literally: every code of every word is compared, row by row."""
    import numpy as np
    import torch

    codes, words, always = _tensors(problem, inputs, device)
    table, bands = inputs[2], problem.bands
    of_words = np.empty((problem.vocab, bands), np.int32)
    for band in range(bands):
        if problem.table == "direct":
            ordered = np.repeat(np.arange(table.shape[1] - 1), np.diff(table[band]))
        else:
            entries = table[band].reshape(-1, 4)
            entries = entries[entries[:, 0] >= 0]
            entries = entries[entries[:, 1].argsort()]
            ordered = np.repeat(entries[:, 0], entries[:, 2])
        of_words[inputs[1][band], band] = ordered
    every, rows = torch_tensor(of_words, device), codes.view(-1, bands)
    lists, beam, threshold = problem.lists, problem.beam, inputs[-1]

    def call() -> Any:
        hits = torch.stack([(every == row).sum(1) for row in rows])
        return (hits >= threshold).view(lists, beam, -1).any(1) | always

    return call


def ours(problem: LshLookup, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    codes, words, table, *multipliers, always = map(convert, inputs[:-1])
    hashed, threshold = multipliers[0] if multipliers else None, inputs[-1]
    return lambda: lsh_lookup(codes, words, table, always, threshold, multipliers=hashed), problem


def _as_bitmaps(problem: LshLookup, masks: Sequence[Any]) -> list[Any]:
    return [bitmap.pack_bits(mask) for mask in masks]


PEERS = (
    Peer("torch scatter_add", "torch", BOTH, _torch_scatter, _as_bitmaps),
    Peer("torch comparison of all codes", "torch", BOTH, _torch_dense, _as_bitmaps),
)
