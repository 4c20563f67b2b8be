"""PyTorch's product of hidden states and an embedding: the scores of all words, for a limited number of rows."""

from __future__ import annotations

import sys
from typing import Any

from tvm_sparse.core import registry
from tvm_sparse.core.libraries import library
from tvm_sparse.formats.quantized import AT_ONCE, QuantizedEmbedding, as_float32
from tvm_sparse.runtime import arrays, dispatch
from tvm_sparse.runtime.calls import most_rows

# Bytes of the float32 scores of all words that a call holds at once, by device: with the workspaces of the kernels that
# read them, less than 256 MB. On a CPU a whole chunk and the rest of the rows have a workspace each.
SCORE_BYTES = {"cuda": 240_000_000, "cpu": 120_000_000}
# Rows of the product's tiles, and rows at which kernels' vector loads may begin: chunks are a multiple of these.
TILE, ALIGNED = 128, 16
# Bytes of the embedding that are converted to float32 at once, where PyTorch has no product of 16-bit numbers with
# float32 results.
CONVERTED_BYTES = 8_000_000
# Elements of a quantised embedding that are converted at once on a GPU, where each part costs several launches.
CONVERTED_ELEMENTS = 1 << 23


def rows_at_once(vocab: int, hidden: int, device: str) -> int:
    """Rows whose float32 scores fit into the `SCORE_BYTES` of a device, a multiple of `TILE` or `ALIGNED` if possible;
    at least 1.
    """
    most = min(most_rows(vocab, hidden), max(1, SCORE_BYTES[device] // (4 * vocab)))
    multiple = next((rows for rows in (TILE, ALIGNED) if most >= rows), 1)
    return most // multiple * multiple


def float_scores(hidden: Any, embedding: Any) -> Any:
    """`hidden @ embedding.T` of torch tensors of one dtype, `(batch, vocab)` float32; 16-bit numbers are multiplied
    exactly and summed in float32. A quantised embedding is converted in parts; it may be NumPy's, with hidden states of
    NumPy.

    The product of float32 tensors follows `torch.set_float32_matmul_precision`.
    """
    if isinstance(embedding, QuantizedEmbedding):
        return _stored_scores(hidden, embedding)
    torch = sys.modules["torch"]
    hidden, embedding = hidden.detach(), embedding.detach()
    rows, vocab = hidden.shape[0], embedding.shape[0]
    scores = torch.empty((rows, vocab), dtype=torch.float32, device=hidden.device)
    if hidden.dtype is torch.float32:
        return torch.mm(hidden, embedding.t(), out=scores)
    if hidden.is_cuda and hasattr(torch.ops.aten.mm, "dtype_out"):
        return torch.mm(hidden, embedding.t(), out_dtype=torch.float32, out=scores)
    states, words = hidden.float(), max(1, CONVERTED_BYTES // (4 * hidden.shape[1]))
    for first in range(0, vocab, words):
        part = slice(first, first + words)
        torch.mm(states, embedding[part].float().t(), out=scores[:, part])
    return scores


def all_scores(hidden: Any, embedding: Any) -> Any:
    """`hidden @ embedding.T` in float32: by PyTorch's product, or, where there is none or it depends on the batch, by a
    kernel.
    """
    space, invariant = library(hidden), dispatch.dispatcher.batch_invariant
    if isinstance(embedding, QuantizedEmbedding):
        rows = [hidden[row : row + 1] for row in range(len(hidden))] if invariant else [hidden]
        found = [float_scores(some, embedding) for some in rows]
        return space.concatenate(found) if len(found) != 1 else found[0]
    if arrays.is_torch(hidden) and not invariant:
        return float_scores(hidden, embedding)
    where = {"device": hidden.device} if arrays.is_torch(hidden) else {}
    words = space.arange(embedding.shape[0], dtype=space.int32, **where)
    return registry.operators()["candidate_logits"].call.candidate_logits(hidden, embedding, words)


def _stored_scores(hidden: Any, embedding: QuantizedEmbedding) -> Any:
    """`float_scores` of a quantised embedding: its stored values are exact in every dtype of hidden states, so that
    the sums of a row with one scale need not know it.
    """
    if not arrays.is_torch(hidden):
        states = as_float32(hidden)
        parts = [states @ part.dequantized().T for _, part in embedding.parts()]
        return sys.modules["numpy"].concatenate(parts, axis=1)
    torch = sys.modules["torch"]
    scores = torch.empty((len(hidden), len(embedding.values)), dtype=torch.float32, device=hidden.device)
    for rows, part in embedding.parts(CONVERTED_ELEMENTS if hidden.is_cuda else AT_ONCE):
        if part.groups == 1:
            scores[:, rows] = float_scores(hidden, part.values.to(hidden.dtype)).mul_(part.scales[:, 0])
        else:
            scores[:, rows] = hidden.detach().float() @ part.dequantized().t()
    return scores


def rounded_scores(hidden: Any, embedding: Any) -> Any:
    """`hidden @ embedding.T` of torch tensors, in their dtype, also under autocast."""
    torch = sys.modules["torch"]
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return torch.nn.functional.linear(hidden, embedding)
    return torch.nn.functional.linear(hidden, embedding)
