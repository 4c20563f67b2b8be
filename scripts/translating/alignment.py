"""Words that translate a word, learned from pairs of sentences: IBM's model 1 (Brown et al. 1993)."""

from __future__ import annotations

import numpy as np
import torch

from .vocabulary import Sentences

ROUNDS = 4


def translations(
    sources: Sentences, targets: Sentences, vocab: tuple[int, int], most: int, device: str
) -> tuple[np.ndarray, np.ndarray]:
    """For every source word the `most` target words with the largest probability t(target | source), the largest first.

    t maximises the likelihood of all targets when each of their words is drawn from t of a source word by chance; a
    few rounds of expectation and maximisation from a uniform t.

    Returns
    -------
    words
        `(sources, most)` int32, -1 where a word has fewer.
    probabilities
        `(sources, most)` float32.
    """
    places, starts = _places(sources, targets, device)
    keys, at = torch.unique(places[0] * vocab[1] + places[1], return_inverse=True)
    of_source = keys // vocab[1]
    t = torch.ones(len(keys), device=device)
    for _ in range(ROUNDS):
        chosen = t[at]
        total = torch.zeros(starts, device=device).index_add_(0, places[2], chosen)
        counts = torch.zeros_like(t).index_add_(0, at, chosen / total[places[2]])
        t = counts / torch.zeros(vocab[0], device=device).index_add_(0, of_source, counts)[of_source]
    order = torch.argsort(t, descending=True, stable=True)
    order = order[torch.argsort(of_source[order], stable=True)]
    sources_, targets_ = of_source[order], keys[order] % vocab[1]
    first = torch.searchsorted(sources_, torch.arange(vocab[0], device=device))
    rank = torch.arange(len(order), device=device) - first[sources_]
    kept = rank < most
    words = torch.full((vocab[0], most), -1, dtype=torch.int32, device=device)
    values = torch.zeros((vocab[0], most), device=device)
    words[sources_[kept], rank[kept]] = targets_[kept].int()
    values[sources_[kept], rank[kept]] = t[order][kept]
    return words.cpu().numpy(), values.cpu().numpy()


def _places(sources: Sentences, targets: Sentences, device: str) -> tuple[torch.Tensor, int]:
    """`(3, pairs)`: source word, target word and the number of the target's place, of all pairs of places of all
    sentences; and the number of places.
    """
    ours, theirs = (torch.from_numpy(side.lengths).to(device) for side in (sources, targets))
    flat = [torch.from_numpy(side.flat.astype(np.int64)).to(device) for side in (sources, targets)]
    starts = [torch.cumsum(lengths, 0) - lengths for lengths in (ours, theirs)]
    # One row for every target place, repeated for every source place of its sentence.
    sentence = torch.repeat_interleave(torch.arange(len(theirs), device=device), theirs)
    place = torch.repeat_interleave(torch.arange(len(sentence), device=device), ours[sentence])
    of = sentence[place]
    before = torch.cumsum(ours[sentence], 0) - ours[sentence]
    within = torch.arange(len(place), device=device) - before[place]
    return torch.stack([flat[0][starts[0][of] + within], flat[1][place], place]), len(sentence)


def lists(
    sources: Sentences, numbers: np.ndarray, words: np.ndarray, always: int, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    """For each of these sentences the first `always` words and those that translate one of its words: `(sentences,
    capacity)` int32, ascending, then -1, and their counts. Words that do not fit are left out, those with the largest
    ids first.
    """
    rows = np.full((len(numbers), capacity), -1, np.int32)
    counts = np.zeros(len(numbers), np.int32)
    for row, number in enumerate(numbers):
        found = np.unique(words[sources.of(number)])
        chosen = np.concatenate([np.arange(always), found[found >= always]])[:capacity]
        rows[row, : len(chosen)], counts[row] = chosen, len(chosen)
    return rows, counts
