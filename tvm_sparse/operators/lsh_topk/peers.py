"""Peers of `lsh_topk`, and the public call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm_sparse.bench.contenders import BOTH, Call, Peer, torch_tensor
from tvm_sparse.core.problem import Problem, ProblemError
from tvm_sparse.formats import bitmap
from tvm_sparse.operators.lsh_lookup.peers import torch_buckets
from tvm_sparse.operators.wta_hash.peers import torch_hash

from .call import lsh_topk
from .problem import LshTopk


def _torch_masked(problem: LshTopk, inputs: Sequence[Any], device: str) -> Call:
    """The product with all words: torch has no gathered product for a number of words that only the device knows."""
    import torch

    if problem.table != "direct" or problem.bias:
        raise ProblemError("cuckoo tables and biases are not compared")
    hidden, embedding, permutations, words, starts = (torch_tensor(a, device) for a in inputs[:5])
    always = torch_tensor(bitmap.unpack_bits(inputs[5], problem.vocab), device)
    hashed, chosen = torch_hash(permutations), torch_buckets(words, starts, always, inputs[6])
    rows = hidden.view(-1, problem.hidden)

    def call() -> Any:
        mask = chosen(hashed(rows).view(problem.lists, problem.beam, -1))
        logits = torch.matmul(hidden, embedding.T).float().masked_fill(~mask[:, None], -torch.inf)
        return torch.topk(torch.softmax(logits, -1), problem.n)

    return call


def ours(problem: LshTopk, inputs: Sequence[Any], convert: Callable[[Any], Any]) -> tuple[Call, Problem]:
    by_name = dict(zip((one.name for one in problem.kernel_inputs), inputs, strict=True))
    threshold, scale, log = (by_name.pop(name) for name in ("threshold", "scale", "log"))
    given = {name: convert(array) for name, array in by_name.items()}
    table = given.pop("starts", None)
    given["table"] = given.pop("entries") if table is None else table
    how = {"temperature": 1 / scale, "log": bool(log)}
    return lambda: lsh_topk(**given, threshold=threshold, n=problem.n, **how), problem


PEERS = (Peer("torch scatter_add + masked product + topk", "torch", BOTH, _torch_masked),)
