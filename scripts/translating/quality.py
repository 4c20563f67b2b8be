"""BLEU and chrF of translations by sacrebleu, with intervals and p-values of a paired bootstrap."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, NamedTuple

SAMPLES = 500
# Processes that compute intervals while the next head translates.
PROCESSES = 4


class Quality(NamedTuple):
    """Scores of a system; `bleu_interval` is half of the 95 % interval of BLEU, `p` the p-value of its difference from
    the first system. Empty without sacrebleu.
    """

    bleu: float | None = None
    bleu_interval: float | None = None
    chrf: float | None = None
    chrf_interval: float | None = None
    p: float | None = None


def has_sacrebleu() -> bool:
    return importlib.util.find_spec("sacrebleu") is not None


def scores(translated: Sequence[str], references: Sequence[str]) -> Quality:
    """BLEU and chrF alone, which takes a second."""
    if not has_sacrebleu():
        return Quality()
    from sacrebleu.metrics import BLEU, CHRF

    found = [metric.corpus_score(list(translated), [list(references)]).score for metric in (BLEU(), CHRF())]
    return Quality(bleu=found[0], chrf=found[1])


def quality(translated: Sequence[str], references: Sequence[str], first: Sequence[str] | None = None) -> Quality:
    """Scores of translations, compared with those of the `first` system; without one, with themselves."""
    if not has_sacrebleu():
        return Quality()
    from sacrebleu.metrics import BLEU, CHRF
    from sacrebleu.significance import PairedTest

    systems = [("first", list(translated if first is None else first)), ("this", list(translated))]
    metrics = {"BLEU": BLEU(), "chrF2": CHRF()}
    test = PairedTest(systems, metrics, [list(references)], test_type="bs", n_samples=SAMPLES)
    found = test()[1]
    bleu, chrf = found["BLEU"][1], found["chrF2"][1]
    return Quality(bleu.score, bleu.ci, chrf.score, chrf.ci, None if first is None else bleu.p_value)


class Judge:
    """Intervals of systems' scores, computed in other processes; the first system is what p-values compare with."""

    def __init__(self, references: Sequence[str]) -> None:
        self._references = references
        self._first: Sequence[str] | None = None
        self._pool: ProcessPoolExecutor | None = None
        self._found: dict[Any, Future[Quality]] = {}

    def add(self, key: Any, translated: Sequence[str]) -> None:
        if not has_sacrebleu():
            return
        if self._pool is None:
            self._pool = ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn"))
        self._found[key] = self._pool.submit(quality, translated, self._references, self._first)
        self._first = translated if self._first is None else self._first

    def results(self) -> Iterator[tuple[Any, Quality]]:
        """Each system's scores, in their order, when they are known; nothing may be added afterwards."""
        for key, found in self._found.items():
            yield key, found.result()
        if self._pool is not None:
            self._pool.shutdown()
