"""Recall and lengths of candidate lists at every threshold and number of frequent words, from one count of hits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..core import parts
from ..formats import wta
from .frontier import Point

# Most hits that a thread counts at once: as many as stay in its cache.
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
        bits = wta.code_bits(k, units)
        at_once = max(1, AT_ONCE // (self.vocab * self.rows)) * self.rows
        begins = range(0, len(samples), at_once)
        own = {bands: [np.empty(0)] * len(begins) for bands in steps}
        lengths = {bands: [np.empty(0)] * len(begins) for bands in steps}
        tables = wta.tables(words, self.vocab, "direct" if bits <= wta.MOST_DIRECT_BITS else "cuckoo", bits=bits)

        def count(number: int, start: int) -> None:
            part = slice(start, start + at_once)
            for bands, hits in hits_by_band(tables, samples[part], steps):
                lists = hits.reshape(-1, self.rows, self.vocab).max(axis=1).astype(np.int64)
                of_rows = np.repeat(lists, self.rows, axis=0) if self.grouped else hits
                own[bands][number] = np.take_along_axis(of_rows, self.truth[part], axis=1).astype(np.int64)
                lengths[bands][number] = self._lengths(lists, uncovered, bands)

        parts.of_each(count, range(len(begins)), begins)
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


def hits_by_band(tables: wta.Tables, samples: np.ndarray, steps: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
    """Equation 9 after each number of bands, `(samples, vocab)`, from the tables of the words' codes."""
    vocab = tables.words.shape[1]
    hits = np.zeros((len(samples), vocab), np.uint16)
    flat, rows = hits.reshape(-1), np.arange(len(samples)) * vocab
    starts, counts = wta.find_buckets(samples[:, : steps[-1]], tables.table, tables.multipliers)
    for band in range(steps[-1]):
        length = counts[:, band]
        ends = length.cumsum()
        # The positions of all buckets, one bucket after the other.
        places = np.arange(ends[-1]) + np.repeat(starts[:, band] + length - ends, length)
        # No word occurs twice in a bucket.
        flat[tables.words[band, places] + np.repeat(rows, length)] += 1
        if band + 1 in steps:
            yield band + 1, hits
