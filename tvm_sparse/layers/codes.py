"""Band codes of many rows, and their hits, on the device where the rows lie.

NumPy computes on all cores of the host. Torch tensors on a GPU stay there: the hits of 128,000 words with a sample are
128 million comparisons.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..core import parts
from ..formats import wta
from ..runtime import arrays
from .libraries import to_host

# Elements that a comparison reads and writes at once on the host: with the sums of the hits they stay in a cache.
COMPARED = 1 << 17
# Elements of the intermediate arrays on a GPU.
ON_GPU = 1 << 26
# The largest number that a byte counts.
MOST_BYTE = 255


def codes_of(rows: Any, permutations: np.ndarray) -> Any:
    """Codes `(bands, rows)` int32 (equations 4 to 8 of the paper) in the library of the rows `(rows, hidden)`, see
    `formats.wta.hash_rows`; those of a torch tensor on a GPU stay there.
    """
    if not arrays.is_torch(rows) or not rows.is_cuda:
        host = to_host(rows)
        return wta.hash_rows(parts.float32_of(host), permutations).T
    wta.check_permutations(permutations, rows.shape[-1])
    return hash_tensor(rows, permutations)


def hash_tensor(rows: Any, permutations: np.ndarray) -> Any:
    """`codes_of` by PyTorch, on the device of the rows."""
    import torch

    bands, units, k = permutations.shape
    columns = torch.from_numpy(permutations.reshape(bands * units, k).astype(np.int64)).to(rows.device)
    shifts = torch.tensor([wta.index_bits(k) * u for u in range(units - 1, -1, -1)], device=rows.device)
    # Columns as rows, so that a gather copies contiguous runs.
    x = rows.detach().float().T.contiguous()
    x = x.masked_fill(x.isnan(), -torch.inf)
    codes = torch.empty((bands, len(rows)), dtype=torch.int32, device=rows.device)
    step = max(1, ON_GPU // (units * max(1, len(rows))))
    for start in range(0, bands, step):
        own = columns[start * units : (start + step) * units]
        best = x[own[:, 0]]
        places = torch.zeros(best.shape, dtype=torch.uint8, device=rows.device)
        for j in range(1, k):
            value = x[own[:, j]]
            places.masked_fill_(value > best, j)
            best = torch.maximum(best, value)
        shifted = places.view(-1, units, len(rows)).int() << shifts[:, None].int()
        codes[start : start + step] = shifted.sum(1)
    return codes


def narrow(codes: Any, bits: int) -> Any:
    """Codes of `bits` bits in the narrowest integers; equal codes stay equal, and others different."""
    if not arrays.is_torch(codes):
        return codes.astype(np.uint8 if bits <= 8 else np.uint16 if bits <= 16 else np.int32)
    import torch

    return codes.to(torch.uint8 if bits <= 8 else torch.int16 if bits <= 16 else torch.int32)


def hits_by_band(words: Any, samples: Any, steps: Sequence[int]) -> Iterator[tuple[int, Any]]:
    """The number of bands in which codes agree (equation 9), `(samples, vocab)`, after each of ascending numbers of
    bands; the same array, which the next one changes.

    `words` `(bands, vocab)` and `samples` `(bands, samples)` are codes of one dtype and library.
    """
    count, vocab = samples.shape[1], words.shape[1]
    on_host, begin = not arrays.is_torch(words), 0
    if on_host:
        hits: Any = np.zeros((count, vocab), np.uint16)
    else:
        import torch

        kind = torch.int16 if steps[-1] < 1 << 15 else torch.int32
        hits = torch.zeros((count, vocab), dtype=kind, device=words.device)
    for step in steps:
        if on_host:
            width = max(1, COMPARED // count)
            for first in range(0, vocab, width):
                part = slice(first, first + width)
                _add_hits(hits[:, part], words[begin:step, part], samples[begin:step])
        else:
            for band in range(begin, step):
                hits += words[band] == samples[band, :, None]
        begin = step
        yield step, hits


def _add_hits(hits: np.ndarray, words: np.ndarray, samples: np.ndarray) -> None:
    """Add the hits of some bands, which bytes count first."""
    few, equal = np.zeros(hits.shape, np.uint8), np.empty(hits.shape, bool)
    for start in range(0, len(words), MOST_BYTE):
        few[:] = 0
        for word, sample in zip(words[start : start + MOST_BYTE], samples[start : start + MOST_BYTE], strict=True):
            np.equal(word, sample[:, None], out=equal)
            np.add(few, equal.view(np.uint8), out=few)
        np.add(hits, few, out=hits)
