"""Recall and lengths of candidate lists at every threshold and number of frequent words, from one count of hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..core import parts
from ..formats import wta
from ..runtime import arrays
from .codes import ON_GPU, hits_by_band, narrow
from .frontier import Point
from .libraries import tensor, to_host

# Most hits that a thread of the host counts at once.
AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Survey:
    """The effect of settings on sample hidden states whose best words are known.

    Lists with even indices are used to choose settings, those with odd indices are held out.

    Attributes
    ----------
    truth
        `(samples, n)`: the best words of each sample; `rows` consecutive samples form a list.
    grouped
        Whether the rows of a list belong together, so that a word counts as kept if any of them keeps it.
    ranking
        `(vocab,)` word ids by decreasing frequency.
    frequents
        Numbers of frequent words, ascending.
    levels
        Recalls for which thresholds are determined.
    """

    truth: np.ndarray
    rows: int
    grouped: bool
    ranking: np.ndarray
    frequents: tuple[int, ...]
    levels: tuple[float, ...]

    @property
    def vocab(self) -> int:
        return len(self.ranking)

    def points(self, words: Any, samples: Any, k: int, units: int, steps: Sequence[int]) -> Iterator[Point]:
        """For each level, number of bands and number of frequent words, the setting with the largest threshold that
        reaches the level.

        Its recall on the lists for the choice exceeds the level by a standard error.

        `words` `(bands, vocab)` and `samples` `(bands, samples)` are codes, both NumPy arrays or both torch tensors;
        `steps` are ascending numbers of bands.
        """
        # How many of the numbers of frequent words are too small to cover a word: they come first.
        rank = np.empty(self.vocab, np.int64)
        rank[self.ranking] = np.arange(self.vocab)
        uncovered = np.searchsorted(self.frequents, rank, side="right")
        words, samples = (narrow(codes, wta.code_bits(k, units)) for codes in (words, samples))
        of_torch = arrays.is_torch(words)
        at_once = max(1, (ON_GPU if of_torch else AT_ONCE) // (self.vocab * self.rows)) * self.rows
        begins = range(0, samples.shape[1], at_once)
        own = {bands: [np.empty(0)] * len(begins) for bands in steps}
        lengths = {bands: [np.empty(0)] * len(begins) for bands in steps}

        def count(number: int, start: int) -> None:
            part = slice(start, start + at_once)
            for bands, hits in hits_by_band(words, samples[:, part], steps):
                lists, kept = self._of_lists(hits, self.truth[part])
                own[bands][number] = kept
                lengths[bands][number] = self._lengths(lists, uncovered, bands)

        if of_torch:  # a GPU takes one part at a time
            for number, start in enumerate(begins):
                count(number, start)
        else:
            parts.of_each(count, range(len(begins)), begins)
        for bands in steps:
            found = np.concatenate(own[bands]), np.concatenate(lengths[bands])
            yield from self._settings(*found, uncovered[self.truth], (k, units, bands))

    def _of_lists(self, hits: Any, truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The most hits of a list's rows `(lists, vocab)`, and those of the best words `(samples, n)`, on the host."""
        of_rows = hits.reshape(-1, self.rows, self.vocab)
        if arrays.is_torch(hits):
            lists = of_rows.amax(1)
            chosen = lists.repeat_interleave(self.rows, 0) if self.grouped else hits
            kept = to_host(chosen.gather(1, tensor(truth.astype(np.int64), hits.device)))
        else:
            lists = of_rows.max(axis=1)
            chosen = np.repeat(lists, self.rows, axis=0) if self.grouped else hits
            kept = np.take_along_axis(chosen, truth, axis=1)
        return to_host(lists).astype(np.int64), kept.astype(np.int64)

    def _lengths(self, lists: np.ndarray, uncovered: np.ndarray, bands: int) -> np.ndarray:
        """Length of each list by number of frequent words and threshold: `(lists, frequents, bands + 1)`."""
        kinds = len(self.frequents) + 1
        at = (np.arange(len(lists))[:, None] * kinds + uncovered) * (bands + 1) + lists
        counts = np.bincount(at.reshape(-1), minlength=len(lists) * kinds * (bands + 1))
        counts = counts.reshape(len(lists), kinds, bands + 1)
        # For words not covered by more than i of the numbers, count those with at least a number of hits.
        reached = counts[:, ::-1, ::-1].cumsum(axis=2).cumsum(axis=1)[:, ::-1, ::-1]
        return reached[:, 1:] + np.asarray(self.frequents)[None, :, None]

    def _settings(
        self, own: np.ndarray, lengths: np.ndarray, uncovered: np.ndarray, hashed: tuple[int, int, int]
    ) -> Iterator[Point]:
        bands = hashed[2]
        search = np.arange(len(own)) // self.rows % 2 == 0
        for i, count in enumerate(self.frequents):
            needed = np.where(uncovered <= i, bands, own)  # the largest threshold that keeps a word
            of_rows = kept(needed[search], bands)
            found, error = of_rows.mean(axis=0), of_rows.std(axis=0) / len(of_rows) ** 0.5
            held, first = (kept(part, bands).mean(axis=0) for part in (needed[~search], needed[~search, :1]))
            reached = {int(np.flatnonzero(found - error >= level)[-1]): level for level in self.levels}
            for threshold, level in reached.items():
                if not threshold:
                    continue  # every word is a candidate
                searched, others = lengths[::2, i, threshold], lengths[1::2, i, threshold]
                # An eighth more than any list for the choice needed.
                wanted = max(self.truth.shape[1], int(searched.max() * 1.125))
                capacity = min(self.vocab, -(-wanted // 256) * 256)
                yield Point(
                    *hashed,
                    threshold,
                    count,
                    capacity,
                    search_recall=float(found[threshold]),
                    recall=float(held[threshold]),
                    recall_1=float(first[threshold]),
                    candidates=float(others.mean()),
                    share=float(others.mean() / self.vocab),
                    overflowed=float((others > capacity).mean()),
                    level=level,
                )


def kept(needed: np.ndarray, bands: int) -> np.ndarray:
    """The share of each row's words kept by each threshold from 0 to `bands`: `(rows, bands + 1)`.

    A word is kept by thresholds up to its `needed`.
    """
    rows, n = needed.shape
    at = np.arange(rows)[:, None] * (bands + 1) + needed
    counts = np.bincount(at.reshape(-1), minlength=rows * (bands + 1)).reshape(rows, -1)
    return counts[:, ::-1].cumsum(axis=1)[:, ::-1] / n
