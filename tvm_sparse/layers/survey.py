"""Recall and lengths of candidate lists at every threshold and number of frequent words, from one count of hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..formats import wta
from .frontier import Point

# Most values of a code for which codes are compared by a product of indicators; others are compared by buckets.
MOST_INDICATORS = 32
# Most elements of intermediate arrays.
AT_ONCE = 1 << 24


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

    def points(
        self, words: np.ndarray, samples: np.ndarray, k: int, units: int, steps: Sequence[int]
    ) -> Iterator[Point]:
        """For each level, number of bands and number of frequent words, the setting with the largest threshold that
        reaches the level.

        Its recall on the lists for the choice exceeds the level by a standard error.

        `words` `(vocab, bands)` and `samples` `(samples, bands)` are codes, `steps` ascending numbers of bands.
        """
        # How many of the numbers of frequent words are too small to cover a word: they come first.
        rank = np.empty(self.vocab, np.int64)
        rank[self.ranking] = np.arange(self.vocab)
        uncovered = np.searchsorted(self.frequents, rank, side="right")
        own: dict[int, list[np.ndarray]] = {bands: [] for bands in steps}
        lengths: dict[int, list[np.ndarray]] = {bands: [] for bands in steps}
        at_once = max(1, AT_ONCE // (self.vocab * self.rows)) * self.rows
        bits = wta.code_bits(k, units)
        for start in range(0, len(samples), at_once):
            part = slice(start, start + at_once)
            counted = hits_by_product if 1 << bits <= MOST_INDICATORS else hits_by_bucket
            for bands, hits in counted(words, samples[part], steps, bits):
                lists = hits.reshape(-1, self.rows, self.vocab).max(axis=1).astype(np.int64)
                of_rows = np.repeat(lists, self.rows, axis=0) if self.grouped else hits
                own[bands].append(np.take_along_axis(of_rows, self.truth[part], axis=1).astype(np.int64))
                lengths[bands].append(self._lengths(lists, uncovered, bands))
        for bands in steps:
            found = np.concatenate(own[bands]), np.concatenate(lengths[bands])
            yield from self._settings(*found, uncovered[self.truth], (k, units, bands))

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


def hits_by_product(
    words: np.ndarray, samples: np.ndarray, steps: Sequence[int], bits: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Equation 9 after each number of bands, `(samples, vocab)`, by summing products of indicators of equal codes."""
    values = np.arange(1 << bits)
    hits = np.zeros((len(samples), len(words)), np.float32)
    at_once = max(1, AT_ONCE // (len(words) << bits))
    for begin, end in zip((0, *steps), steps, strict=False):
        for start in range(begin, end, at_once):
            bands = slice(start, min(end, start + at_once))
            ours, theirs = (
                (codes[:, bands, None] == values).reshape(len(codes), -1).astype(np.float32)
                for codes in (samples, words)
            )
            hits += ours @ theirs.T
        yield end, hits


def hits_by_bucket(
    words: np.ndarray, samples: np.ndarray, steps: Sequence[int], bits: int
) -> Iterator[tuple[int, np.ndarray]]:
    """As `hits_by_product`, by sorting the words of each band and visiting only those with a sample's code."""
    hits = np.zeros((len(samples), len(words)), np.uint16)
    flat, rows = hits.reshape(-1), np.arange(len(samples)) * len(words)
    for band in range(steps[-1]):
        order = np.argsort(words[:, band], kind="stable")
        codes = words[order, band]
        start, end = (np.searchsorted(codes, samples[:, band], side=side) for side in ("left", "right"))
        length = end - start
        # The positions of all buckets, one bucket after the other.
        places = np.arange(length.sum()) + np.repeat(end - length.cumsum(), length)
        # No word occurs twice in a bucket.
        flat[order[places] + np.repeat(rows, length)] += 1
        if band + 1 in steps:
            yield band + 1, hits
