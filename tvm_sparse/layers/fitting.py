"""The fastest settings of an LSH head that reach a recall, found on sample hidden states and measured.

Recall needs no head and no kernel: the hits of every sample with every word, counted once for the largest number of
bands, tell what each threshold and each number of frequent words would keep, and on the way there what fewer bands
would. So of thousands of settings only the few that read least are built and timed.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ..bench.timing import time_cpu, time_cuda
from ..core.given import integer
from ..core.problem import numpy_dtype
from ..formats import wta
from ..runtime import arrays
from ..runtime.calls import machine_of
from .frontier import Frontier, Point
from .libraries import library, to_host
from .settings import Hashing, Measured, Settings, hash_words, settings
from .survey import Survey

# (k, units). The paper's grid search ends at (8, 3) and (16, 3); where hidden states are far from their words, as in
# models whose embeddings are not trained to be alike to them, small codes with many hits tell them apart better.
HASHES = ((2, 3), (2, 4), (3, 3), (3, 4), (4, 3), (8, 2), (8, 3), (16, 3))
BANDS = (125, 250, 500, 1000)
# Numbers of frequent words, as shares of the vocabulary.
SHARES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8)
# Recalls beside the wanted one that the frontier shows.
LEVELS = (0.9, 0.95, 0.99, 0.999)
# Of the vocabulary: what reads more is left to the exact head.
MOST_SHARE = 0.5
# Samples of a call of the exact head: few enough that on a GPU its scores are sums in float32.
ROWS_AT_ONCE = 16
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
    sentences: int = 1,
    order: Any = None,
    hashes: Iterable[tuple[int, int]] | None = None,
    bands: Iterable[int] = BANDS,
    frequent: Iterable[int] | None = None,
    trials: int = 6,
    seed: int = 0,
) -> tuple[Any, Frontier]:
    """The fastest measured head whose candidates hold at least a share `recall` of the true n most probable words.

    Thresholds are chosen on one half of the samples, so that the recall there exceeds the one that is wanted by its
    standard error; settings that miss it on the other half, which is held out, are passed over. The exact head is timed
    beside them; where it is faster, the head that is returned takes the exact path (`path="auto"`, from what was
    measured), and the frontier's `verdict` says so.

    Settings whose lists hold more than half of the vocabulary are not considered.

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
    sentences
        Lists of a step that is timed: rows * sentences rows.
    order
        `(vocab,)` word ids by falling frequency; default: ascending ids.
    hashes
        Pairs (k, units) to try; default: those of `HASHES` with k <= hidden.
    bands
        Numbers of bands to try; all are prefixes of the largest.
    frequent
        Numbers of frequent words to try; default: 0, 1/64, 1/32, 1/16 and 1/8 of the vocab.
    trials
        How many of the settings that read least and reach the recall are measured, no two of one hash and number of
        bands; and one for each of the recalls 0.9, 0.95, 0.99 and 0.999 that the frontier shows.

    Returns
    -------
    head
        An `LshHead`. With threshold 0, and so exact, if no setting reaches the recall.
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
    sentences = integer("sentences", sentences)
    samples, rows, grouped = _samples(hidden_samples, hidden, n, rows)
    if not 1 <= sentences * rows <= len(samples):
        raise ValueError(f"sentences: expected between 1 and {len(samples) // rows} lists of samples, got {sentences}")
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
    survey = Survey(truth, rows, grouped, ranking, tuple(frequents), tuple(sorted({*LEVELS, recall})))
    found: list[Point] = []
    for k, units in [pair for pair in HASHES if pair[0] <= hidden] if hashes is None else hashes:
        permutations = wta.permutations(hidden, k, units, steps[-1], seed)
        codes, theirs = (wta.hash_rows(to_host(array), permutations) for array in (embedding, samples))
        found += survey.points(codes, theirs, k, units, steps)
    itemsize = numpy_dtype(known.dtype).itemsize

    def work(point: Point) -> float:
        """About the bytes of a step: embeddings of candidates, hashing and hits of all rows."""
        hashed = rows * point.bands * (point.units * point.k + vocab / point.k**point.units)
        return point.candidates * hidden * itemsize + 4.0 * hashed

    found.sort(key=work)
    eligible = _reaching(found, recall)[:trials]
    points = list(dict.fromkeys([*eligible, *(p for level in LEVELS for p in _reaching(found, level)[:1])]))
    heads = _heads(head_class, points, embedding, bias, (vocab, hidden), ranking, seed)
    machine = machine_of("embedding", known)
    step = samples[len(samples) - rows * sentences :]
    timed, exact_seconds = _timed(heads, exact, step, n, sentences, known.device)
    where = f"{machine.name}, {vocab} words of {hidden}, {rows * sentences} rows"
    head, winner = exact, None
    if not eligible:
        verdict = f"no setting reaches a recall of {recall} by reading at most half of the vocabulary: the exact head"
    else:
        point = min(eligible, key=lambda p: timed[p])
        # Copies of its bands: views would keep the tables of all.
        head = heads[point]
        hashing = head.hashing.mapped(library("embedding", embedding).copy)
        head = head_class.assembled(embedding, bias, head.settings, hashing, head.frequent)
        head.measured[rows * sentences, sentences] = Measured(machine.arch, timed[point], exact_seconds)
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
        rows * sentences,
        exact_seconds,
        machine.name,
        f"{verdict} ({where})",
    )


def _reaching(found: Iterable[Point], level: float) -> list[Point]:
    """The first setting of each hash that reaches a recall, on both halves of the samples."""
    reaching: dict[tuple[int, int, int], Point] = {}
    for point in found:
        if point.level >= level and point.recall >= level and point.share <= MOST_SHARE:
            reaching.setdefault((point.k, point.units, point.bands), point)
    return list(reaching.values())


def _heads(
    head_class: Any,
    points: Iterable[Point],
    embedding: Any,
    bias: Any,
    shape: tuple[int, int],
    ranking: np.ndarray,
    seed: int,
) -> dict[Point, Any]:
    """A head of each setting; those of one hash share the tables of the one that has most bands."""
    vocab, hidden = shape
    hashings: dict[tuple[int, int], Hashing] = {}
    heads = {}
    for point in sorted(points, key=lambda p: -p.bands):
        numbers = point.k, point.units, point.bands, point.threshold, point.frequent, point.capacity
        kind = settings(vocab, hidden, k=point.k, units=point.units, bands=point.bands, threshold=1, frequent=0).table
        if (point.k, point.units) not in hashings:
            permutations = wta.permutations(hidden, point.k, point.units, point.bands, seed)
            hashings[point.k, point.units] = hash_words(embedding, permutations, kind, seed)
        hashing = hashings[point.k, point.units].first(point.bands)
        chosen = Settings(vocab, hidden, *numbers, kind)
        heads[point] = head_class.assembled(embedding, bias, chosen, hashing, ranking[: point.frequent])
    return heads


def _timed(
    heads: Mapping[Point, Any], exact: Any, hidden: Any, n: int, sentences: int, device: str
) -> tuple[dict[Point, float], float]:
    """Median seconds of a step of each head, and of the exact one, measured in turn."""
    calls = {
        str(number): functools.partial(head.topk, hidden, n, sentences=sentences, path="lsh")
        for number, head in enumerate(heads.values())
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
