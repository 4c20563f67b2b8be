"""Finding the fastest settings of an LSH head that reach a recall, on sample hidden states, by measurement.

Recall can be computed without a head or a kernel: the hits of every sample with every word, counted once, band by band,
determine which words each number of bands, threshold and number of frequent words would keep. So only the few of
thousands of settings that read least are built and timed.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..bench.timing import time_cpu, time_cuda
from ..core.given import integer
from ..core.problem import numpy_dtype
from ..formats import wta
from ..runtime import arrays, dispatch
from ..runtime.calls import machine_of
from .codes import codes_of
from .frontier import Frontier, Point
from .libraries import library, to_host
from .settings import Hashing, Measured, Settings, hash_words, settings
from .survey import Survey

# (k, units). The paper's grid search found (8, 3) and (16, 3); for models in which hidden states are far from the
# embeddings of their words, small codes with many hits discriminate better.
HASHES = ((2, 3), (2, 4), (3, 3), (3, 4), (4, 3), (8, 2), (8, 3), (16, 3))
BANDS = (125, 250, 500, 1000)
# Numbers of frequent words, as shares of the vocabulary.
SHARES = (0.0, 1 / 64, 1 / 32, 1 / 16, 1 / 8)
# Recalls beside the target that the frontier shows.
LEVELS = (0.9, 0.95, 0.99, 0.999)
# Share of the vocabulary above which settings are left to the exact head.
MOST_SHARE = 0.5
# Samples in a call of the exact head: few enough that on a GPU its scores are sums in float32.
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
    progress: bool | None = None,
) -> tuple[Any, Frontier]:
    """The fastest measured head whose candidates contain at least a share `recall` of the true n most probable words.

    Thresholds are chosen on one half of the samples, so that the recall there exceeds the target by its standard error;
    settings that miss the target on the other, held-out half are rejected. The exact head is timed as well; if it is
    faster, the returned head takes the exact path (`path="auto"`, by the measurement), and the frontier's `verdict`
    says so.

    Settings whose lists hold more than half of the vocabulary are not considered. An interrupt (Ctrl-C) while hits are
    counted ends the search: the hashes that were counted by then are measured, and the verdict says how many.

    Parameters
    ----------
    embedding, bias, seed
        As in `LshHead`.
    hidden_samples
        `(samples, hidden)`: hidden states like those in use, or `(lists, rows, hidden)`: groups that share a candidate
        list, such as the hypotheses of a sentence at one step. In the library and on the device of the embedding. Use
        hundreds: a recall of 0.99 for 12 words has a standard error of about 0.1 / sqrt(12 samples).
    recall
        0 < recall <= 1.
    n
        Number of words that must be found, 1 <= n <= vocab.
    rows
        Number of rows that share a list, for samples that are not grouped: consecutive rows then form a step. Since
        they are not a beam, their recall is computed from each row's own candidates, a lower bound. Default: n.
    sentences
        Number of lists in a timed step, which has rows * sentences rows.
    order
        `(vocab,)` word ids by decreasing frequency; default: ascending ids.
    hashes
        Pairs (k, units) to try; default: those of `HASHES` with k <= hidden.
    bands
        Numbers of bands to try; all are prefixes of the largest.
    frequent
        Numbers of frequent words to try; default: 0, 1/64, 1/32, 1/16 and 1/8 of the vocab.
    trials
        Number of settings that are measured: those that read least and reach the recall, with different hashes or
        numbers of bands. In addition one is measured for each of the recalls 0.9, 0.95, 0.99 and 0.999 in the frontier.
    progress
        Whether to show a progress bar of the hashes on standard error; None: if that is a terminal.

    Returns
    -------
    head
        An `LshHead`. If no setting reaches the recall, its threshold is 0, which makes it exact.
    frontier
        A `Frontier`, with `csv()` and `plot()`; it can be printed.

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
    pairs = [pair for pair in HASHES if pair[0] <= hidden] if hashes is None else list(hashes)
    counted = 0
    try:
        for k, units in _shown(pairs, progress):
            permutations = wta.permutations(hidden, k, units, steps[-1], seed)
            codes, of_samples = (codes_of(array, permutations) for array in (embedding, samples))
            found += survey.points(codes, of_samples, k, units, steps)
            counted += 1
    except KeyboardInterrupt:
        if not counted:
            raise
    itemsize = numpy_dtype(known.dtype).itemsize

    def work(point: Point) -> float:
        """Approximate bytes of a step: embeddings of candidates, hashing and hits of all rows."""
        hashed = rows * point.bands * (point.units * point.k + vocab / point.k**point.units)
        return point.candidates * hidden * itemsize + 4.0 * hashed

    found.sort(key=work)
    eligible = _reaching(found, recall)[:trials]
    points = list(dict.fromkeys([*eligible, *(p for level in LEVELS for p in _reaching(found, level)[:1])]))
    heads = _heads(head_class, points, embedding, bias, (vocab, hidden), ranking, seed)
    machine = machine_of("embedding", known)
    step = samples[len(samples) - rows * sentences :]
    if known.device == "cuda":  # where a kernel compiles for seconds
        shapes = [head.explain(rows * sentences, n, sentences=sentences, path="lsh").kernels for head in heads.values()]
        dispatch.warmup([kernel.problem for kernels in shapes for kernel in kernels], target="cuda")
    timed, exact_seconds = _timed(heads, exact, step, n, sentences, known.device)
    where = f"{machine.name}, {vocab} words of {hidden}, {rows * sentences} rows"
    if counted < len(pairs):
        where += f"; interrupted after {counted} of {len(pairs)} hashes"
    head, winner = exact, None
    if not eligible:
        verdict = f"no setting reaches a recall of {recall} by reading at most half of the vocabulary: the exact head"
    else:
        point = min(eligible, key=lambda p: timed[p])
        # Copies of its bands: views would keep the tables of all bands alive.
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


def _shown(pairs: Sequence[tuple[int, int]], progress: bool | None) -> Iterable[tuple[int, int]]:
    """The pairs, with a progress bar on standard error if it is wanted."""
    if not (sys.stderr.isatty() if progress is None else progress):
        return pairs
    from rich.console import Console
    from rich.progress import track

    return track(pairs, "hits of LSH settings", console=Console(stderr=True), transient=True)


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
    """A head for each setting; those of one hash share the tables of the one with most bands."""
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
    """Median seconds of a step of each head, and of the exact head, measured in turn."""
    calls = {
        str(number): functools.partial(head.topk, hidden, n, sentences=sentences, path="lsh")
        for number, head in enumerate(heads.values())
    }
    calls["exact"] = functools.partial(exact.topk, hidden, n)
    rounds = (time_cuda if device == "cuda" else time_cpu)(calls, ROUNDS[device])
    seconds = {name: statistics.median(times) for name, (_, times) in rounds.items()}
    return {point: seconds[str(number)] for number, point in enumerate(heads)}, seconds["exact"]


def _samples(hidden_samples: Any, hidden: int, n: int, rows: int | None) -> tuple[Any, int, bool]:
    """The samples as `(lists * rows, hidden)`, the rows of a list, and whether those of a list belong together."""
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
    """Word ids by decreasing frequency."""
    if order is None:
        return np.arange(vocab)
    ids = np.asarray(order)
    if ids.shape != (vocab,) or not np.array_equal(np.sort(ids), np.arange(vocab)):
        raise ValueError(f"order: expected every id of [0, {vocab}) once, got shape {ids.shape} of {ids.dtype}")
    return ids
