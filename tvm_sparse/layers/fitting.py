"""The fastest settings of an LSH head that reach a recall, found on sample hidden states and measured.

Recall needs no head and no kernel: the hits of every sample with every word, counted once for the largest number of
bands, tell what each threshold and each number of frequent words would keep, and on the way there what fewer bands
would. So of thousands of settings only the few that read least are built and timed.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bench.timing import time_cpu, time_cuda
from ..core.problem import numpy_dtype
from ..formats import wta
from ..runtime import arrays
from ..runtime.calls import machine_of
from .frontier import Frontier, Point
from .libraries import library, to_host
from .settings import Hashing, Measured, Settings, hash_words, integer, settings

# (k, units): codes of 8 to 15 bits. The paper's grid search ends at (8, 3) and (16, 3).
HASHES = ((8, 3), (16, 2), (16, 3), (8, 5))
BANDS = (64, 125, 250, 500)
# Numbers of frequent words, as shares of the vocabulary.
SHARES = (0.0, 1 / 64, 1 / 16, 1 / 8, 1 / 4)
# Recalls beside the wanted one that the frontier shows.
LEVELS = (0.9, 0.95, 0.99, 0.999)
# Hits above this count as this: no threshold is larger.
MOST_HITS = 64
# Hits that are held at once.
_AT_ONCE = 1 << 25
# Samples of a call of the exact head.
ROWS_AT_ONCE = 64
ROUNDS = {"cpu": 5, "cuda": 20}


def fit(
    head_class: Any,
    embedding: Any,
    hidden_samples: Any,
    recall: float = 0.99,
    n: int = 12,
    *,
    rows: int | None = None,
    bias: Any = None,
    order: Any = None,
    hashes: Iterable[tuple[int, int]] | None = None,
    bands: Iterable[int] = BANDS,
    frequent: Iterable[int] | None = None,
    trials: int = 6,
    seed: int = 0,
) -> tuple[Any, Frontier]:
    """The fastest measured head whose candidates hold at least a share `recall` of the true n most probable words.

    Settings are found on one half of the samples, and passed over if they miss the recall on the other half, which is
    held out. The exact head is timed beside them; where it is faster, the head that is returned takes the exact path
    (`path="auto"`, from what was measured), and the frontier's `verdict` says so.

    Parameters
    ----------
    embedding, bias, seed
        As of `LshHead`.
    hidden_samples
        `(samples, hidden)`: hidden states as the head will see them, or `(lists, rows, hidden)`: those that share a
        candidate list, as the hypotheses of a sentence at one step. In the library and on the device of the embedding.
        Hundreds of them: a recall of 0.99 of 12 words has a standard error of about 0.1 / sqrt(12 samples).
    recall
        0 < recall <= 1.
    n
        Words that matter, 1 <= n <= vocab.
    rows
        Rows that share a list, where the samples do not say: so many consecutive ones are taken for a step. Their
        recall is then counted by each row's own candidates, since neighbours are no beam: a lower bound. Default: n.
    order
        `(vocab,)` word ids by falling frequency; default: ascending ids.
    hashes
        Pairs (k, units) to try; default: those of `HASHES` with k <= hidden.
    bands
        Numbers of bands to try; all are prefixes of the largest.
    frequent
        Numbers of frequent words to try; default: 0, 1/64, 1/16, 1/8 and 1/4 of the vocab.
    trials
        How many of the settings that read least and reach the recall are measured, no two of one hash and number of
        bands; and one for each recall that the frontier shows.

    Returns
    -------
    head
        An `LshHead`. With threshold 0, that is exact, if no setting reaches the recall.
    frontier
        A `Frontier`: print it, or see its `csv()` and `plot()`.

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit, naming them with the numbers.
    """
    known = arrays.facts("embedding", embedding)
    if len(known.shape) != 2:
        raise ValueError(f"embedding: expected 2 dimensions, got shape {known.shape}")
    vocab, hidden = known.shape
    n, trials = integer("n", n), integer("trials", trials)
    if not 1 <= n <= vocab:
        raise ValueError(f"n: expected 1 <= n <= vocab ({vocab}), got {n}")
    if not 0 < recall <= 1:
        raise ValueError(f"recall: expected 0 < recall <= 1, got {recall}")
    if trials < 1:
        raise ValueError(f"trials: expected at least 1, got {trials}")
    samples, rows, grouped = _samples(hidden_samples, hidden, n, rows)
    ranking = _ranking(order, vocab)
    frequents = sorted({round(share * vocab) for share in SHARES} if frequent is None else set(frequent))
    if not frequents or not 0 <= frequents[0] <= frequents[-1] <= vocab:
        raise ValueError(f"frequent: expected counts between 0 and the vocab ({vocab}), got {frequents}")
    steps = sorted(set(bands))
    if not steps or steps[0] < 1:
        raise ValueError(f"bands: expected numbers of at least 1, got {steps}")

    exact = head_class(embedding, threshold=0, bias=bias)
    parts = [exact.topk(samples[start : start + ROWS_AT_ONCE], n)[1] for start in range(0, len(samples), ROWS_AT_ONCE)]
    truth = np.concatenate([to_host(part) for part in parts])
    survey = _Survey(vocab, n, rows, grouped, ranking, tuple(frequents))
    hashings: dict[tuple[int, int], tuple[Hashing, str]] = {}
    found: list[Point] = []
    for k, units in [pair for pair in HASHES if pair[0] <= hidden] if hashes is None else hashes:
        kind = settings(vocab, hidden, k=k, units=units, bands=steps[-1], threshold=1, frequent=0).table
        permutations = wta.permutations(hidden, k, units, steps[-1], seed)
        hashing = hash_words(embedding, permutations, kind, seed)
        hashings[k, units] = hashing, kind
        found += survey.points(wta.hash_rows(to_host(samples), permutations), hashing, k, units, steps, truth)

    itemsize = numpy_dtype(known.dtype).itemsize

    def work(point: Point) -> float:
        """About the bytes of a step: embeddings of candidates, hashing and hits of all rows."""
        hashed = rows * point.bands * (point.units * point.k + vocab / (1 << wta.code_bits(point.k, point.units)))
        return point.candidates * hidden * itemsize + 4.0 * hashed

    # Each hash is measured with what suits it best, before the second best of another.
    favourites: dict[tuple[int, int, int], Point] = {}
    for point in sorted((p for p in found if min(p.search_recall, p.recall) >= recall), key=work):
        favourites.setdefault((point.k, point.units, point.bands), point)
    levels = [[p for p in found if p.search_recall >= level] for level in LEVELS]
    eligible = list(favourites.values())[:trials]
    points = list(dict.fromkeys([*eligible, *(min(ps, key=work) for ps in levels if ps)]))

    heads = {}
    for point in points:
        hashing, kind = hashings[point.k, point.units]
        numbers = point.k, point.units, point.bands, point.threshold, point.frequent, point.capacity
        chosen = Settings(vocab, hidden, *numbers, kind)
        ids = ranking[: point.frequent]
        heads[point] = head_class.assembled(embedding, bias, chosen, hashing.first(point.bands), ids)
    machine = machine_of("embedding", known)
    timed, exact_seconds = _timed(heads, exact, samples[len(samples) - rows :], n, known.device)
    where = f"{machine.name}, {vocab} words of {hidden}, {rows} rows"
    head, winner = exact, None
    if not eligible:
        best = max((min(p.search_recall, p.recall) for p in found), default=0.0)
        verdict = f"no setting reaches a recall of {recall}, the best {best:.4f}: exact head"
    else:
        point = min(eligible, key=lambda p: timed[p])
        # Copies of its bands: views would keep the tables of all.
        head = heads[point]
        hashing = head.hashing.mapped(library("embedding", embedding).copy)
        head = head_class.assembled(embedding, bias, head.settings, hashing, head.frequent)
        head.measured[rows, 1] = Measured(machine.arch, timed[point], exact_seconds)
        times = f"{timed[point] * 1e6:.1f} us, the exact head {exact_seconds * 1e6:.1f} us"
        if timed[point] < exact_seconds:
            winner = point
            verdict = f"{point.recall:.4f} of the top {n} from {point.share:.1%} of the vocabulary: {times}"
        else:
            verdict = f"no setting that reaches a recall of {recall} beats the exact head: the fastest {times}"
    shown = sorted(points, key=lambda p: p.share)
    return head, Frontier(
        tuple(dataclasses.replace(p, seconds=timed[p]) for p in shown),
        None if winner is None else dataclasses.replace(winner, seconds=timed[winner]),
        recall,
        n,
        rows,
        exact_seconds,
        machine.name,
        f"{verdict} ({where})",
    )


def _timed(
    heads: Mapping[Point, Any], exact: Any, hidden: Any, n: int, device: str
) -> tuple[dict[Point, float], float]:
    """Median seconds of a step of each head, and of the exact one, measured in turn."""
    calls = {
        str(number): functools.partial(head.topk, hidden, n, path="lsh") for number, head in enumerate(heads.values())
    }
    calls["exact"] = functools.partial(exact.topk, hidden, n)
    rounds = (time_cuda if device == "cuda" else time_cpu)(calls, ROUNDS[device])
    seconds = {name: statistics.median(times) for name, (_, times) in rounds.items()}
    return {point: seconds[str(number)] for number, point in enumerate(heads)}, seconds["exact"]


def _samples(hidden_samples: Any, hidden: int, n: int, rows: int | None) -> tuple[Any, int, bool]:
    """Samples as `(lists * rows, hidden)`, rows, and whether those of a list belong together."""
    known = arrays.facts("hidden_samples", hidden_samples)
    shape = known.shape
    grouped = len(shape) == 3
    if len(shape) not in (2, 3) or shape[-1] != hidden:
        raise ValueError(f"hidden_samples: expected shape (samples, {hidden}) or (lists, rows, {hidden}), got {shape}")
    if grouped and rows not in (None, shape[1]):
        raise ValueError(f"rows: hidden_samples have {shape[1]} rows a list, got {rows}")
    rows = shape[1] if grouped else integer("rows", n if rows is None else rows)
    lists = shape[0] if grouped else shape[0] // max(1, rows)
    if rows < 1 or lists < 2:
        raise ValueError(
            f"hidden_samples: expected at least 2 lists of at least 1 row, one to choose by and one to hold out, got"
            f" {shape} for lists of {rows} rows"
        )
    return hidden_samples.reshape(-1, hidden)[: lists * rows], rows, grouped


def _ranking(order: Any, vocab: int) -> np.ndarray:
    """Word ids by falling frequency."""
    if order is None:
        return np.arange(vocab)
    ids = np.asarray(order)
    if ids.shape != (vocab,) or not np.array_equal(np.sort(ids), np.arange(vocab)):
        raise ValueError(f"order: expected every id of [0, {vocab}) once, got shape {ids.shape} of {ids.dtype}")
    return ids


@dataclass(frozen=True)
class _Survey:
    """Recall and sizes of candidate lists at every threshold and number of frequent words, from hit counts."""

    vocab: int
    n: int
    rows: int
    grouped: bool
    ranking: np.ndarray
    frequents: tuple[int, ...]

    def points(
        self, codes: np.ndarray, hashing: Hashing, k: int, units: int, steps: Sequence[int], truth: np.ndarray
    ) -> Iterator[Point]:
        """The settings of one hash, from the codes of the samples and the words that are theirs in truth."""
        # How many of the numbers of frequent words do not cover a word: the first so many.
        rank = np.empty(self.vocab, np.int64)
        rank[self.ranking] = np.arange(self.vocab)
        uncovered = np.searchsorted(self.frequents, rank, side="right")
        own: dict[int, list[np.ndarray]] = {bands: [] for bands in steps}
        sizes: dict[int, list[np.ndarray]] = {bands: [] for bands in steps}
        at_once = max(1, _AT_ONCE // (self.vocab * self.rows)) * self.rows
        for start in range(0, len(codes), at_once):
            part = slice(start, start + at_once)
            for bands, hits in self._hits(codes[part], hashing, steps):
                lists = hits.reshape(-1, self.rows, self.vocab).max(axis=1)
                of_words = np.repeat(lists, self.rows, axis=0) if self.grouped else hits
                own[bands].append(np.take_along_axis(of_words, truth[part], axis=1))
                sizes[bands].append(self._sizes(lists, uncovered))
        for bands in steps:
            yield from self._settings(
                np.concatenate(own[bands]), np.concatenate(sizes[bands]), uncovered[truth], k, units, bands
            )

    def _hits(self, codes: np.ndarray, hashing: Hashing, steps: Sequence[int]) -> Iterator[tuple[int, np.ndarray]]:
        """Hits of the samples with all words after each number of bands (equation 9): `(samples, vocab)`."""
        table, words = to_host(hashing.table), to_host(hashing.words)
        multipliers = None if hashing.multipliers is None else to_host(hashing.multipliers)
        starts, lengths = wta.find_buckets(codes, table, multipliers)
        hits = np.zeros((len(codes), self.vocab), np.uint8)
        flat, before = hits.reshape(-1), np.arange(len(codes)) * self.vocab
        for band in range(steps[-1]):
            start, length = starts[:, band].astype(np.int64), lengths[:, band].astype(np.int64)
            ends = np.cumsum(length)
            # A bucket's places side by side, bucket after bucket.
            places = np.arange(ends[-1]) + np.repeat(start - (ends - length), length)
            found = words[band, places] + np.repeat(before, length)
            # No word stands twice in a bucket.
            flat[found] = np.minimum(flat[found], MOST_HITS - 1) + 1
            if band + 1 in steps:
                yield band + 1, hits

    def _sizes(self, lists: np.ndarray, uncovered: np.ndarray) -> np.ndarray:
        """Words of each list by number of frequent words and threshold: `(lists, frequents, MOST_HITS + 1)`."""
        kinds = len(self.frequents) + 1
        at = (np.arange(len(lists))[:, None] * kinds + uncovered) * (MOST_HITS + 1) + lists
        counts = np.bincount(at.reshape(-1), minlength=len(lists) * kinds * (MOST_HITS + 1))
        counts = counts.reshape(len(lists), kinds, MOST_HITS + 1)
        # Of words that are covered by fewer than i + 1 numbers, those with at least so many hits.
        from_threshold = counts[:, ::-1, ::-1].cumsum(axis=2).cumsum(axis=1)[:, ::-1, ::-1]
        return from_threshold[:, 1:] + np.asarray(self.frequents)[None, :, None]

    def _settings(
        self, own: np.ndarray, sizes: np.ndarray, uncovered: np.ndarray, k: int, units: int, bands: int
    ) -> Iterator[Point]:
        search = np.arange(len(own)) // self.rows % 2 == 0
        for i, count in enumerate(self.frequents):
            for threshold in range(1, min(MOST_HITS, bands) + 1):
                kept = (own >= threshold) | (uncovered <= i)
                chosen_by, held = sizes[::2, i, threshold], sizes[1::2, i, threshold]
                # An eighth more than any list of the search needed.
                capacity = min(self.vocab, -(-max(self.n, int(chosen_by.max() * 1.125)) // 256) * 256)
                yield Point(
                    k,
                    units,
                    bands,
                    threshold,
                    count,
                    capacity,
                    float(kept[search].mean()),
                    float(kept[~search].mean()),
                    float(kept[~search, 0].mean()),
                    float(held.mean()),
                    float(held.mean() / self.vocab),
                    float((held > capacity).mean()),
                )
                if not (own >= threshold).any():
                    break  # no larger threshold keeps more
