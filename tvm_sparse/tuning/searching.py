"""The child that searches: `python -m tvm_sparse.tuning.searching`, started by `Searcher`.

A search needs a few hundredths of a second of a core for each trial. With one process for each session the driver's
core stays free for the work that all sessions share, and a crash in the compiler's search affects only one search.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.registry import add_plugins, parse, plugins
from ..core.template import Table
from ..records import Log
from ..records.queries import predictor
from ..workers.absent import without
from ..workers.processes import Reply, Worker, few_threads
from ..workers.serving import serve
from . import strategies
from .domain import Domain

SEARCH_WORKER = (sys.executable, "-m", "tvm_sparse.tuning.searching")
# Time limit in seconds of a proposal, far beyond its usual time, even on a busy machine.
TIMEOUT = 600.0
# Number of fastest known points whose neighbours are listed, if not all points are.
AROUND = 8


class SearchError(RuntimeError):
    """The search failed twice to make a proposal."""


class Searcher:
    """A process that runs searches, one after another. Not thread-safe.

    Parameters
    ----------
    abandoned
        As in `Worker.call`.
    """

    def __init__(self, abandoned: Callable[[], bool] = lambda: False) -> None:
        # Single-threaded, since many search at the same time.
        self._worker = Worker(SEARCH_WORKER, env=few_threads(1), name="search")
        self._abandoned = abandoned
        self._begin: dict[str, Any] = {}
        self._known: dict[Candidate, float | None] = {}
        self._results: dict[Candidate, float | None] = {}  # not sent yet
        self._asked: set[Candidate] = set()  # proposed, and not reported
        self.predicted: Mapping[Candidate, float] = {}

    def __enter__(self) -> Searcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def begin(
        self,
        problem: Problem,
        machine: Machine,
        strategy: str,
        log: Log,
        *,
        named: tuple[str, ...],
        fixed: Table,
        fresh: bool,
        known: Mapping[Candidate, float | None],
        trials: int,
        batch: int,
        seed: int,
    ) -> None:
        """Make a strategy (`strategies.make`) for the space of `spaces.searched`, with the log's model.

        An earlier search is forgotten. A `fresh` search does not use the model, which was not trained on times with
        fresh inputs.
        """
        self._known, self._results, self._asked = dict(known), {}, set()
        self.predicted = {}
        self._begin = {
            "problem": problem.key,
            "machine": asdict(machine),
            "named": named,
            "fixed": dict(fixed),
            "fresh": fresh,
            "strategy": strategy,
            "root": str(log.root),
            "plugins": plugins(),
            "trials": trials,
            "batch": batch,
            "seed": seed,
        }
        self._call(self._begin | {"known": _texts(self._known)})  # a failure shows at the first proposal

    def spawn(self) -> None:
        """Start the process if it is not running, without waiting: it spends seconds on imports."""
        self._worker.spawn()

    def propose(self) -> list[Candidate]:
        """As `Strategy.propose`, after sending the results reported since.

        Raises
        ------
        SearchError
            If the process fails, and a new one, to which all results are sent again, fails too.
        """
        reply = self._call({"results": _texts(self._results)})
        self._results = {}
        if not reply.ok:
            # A new process must not propose candidates that are being measured: they are sent as failures.
            known = dict.fromkeys(self._asked) | self._known
            reply = self._call(self._begin | {"known": _texts(known)})
            if reply.ok:
                reply = self._call({"results": {}})
        if not reply.ok:
            raise SearchError(f"the search failed: {reply.message}")
        candidates, predicted = reply.value
        self.predicted = {Candidate.parse(text): score for text, score in predicted.items()}
        proposed = [Candidate.parse(text) for text in candidates]
        self._asked.update(proposed)
        return proposed

    def report(self, results: Mapping[Candidate, float | None]) -> None:
        """As `Strategy.report`."""
        self._results.update(results)
        self._known.update(results)
        self._asked.difference_update(results)

    def _call(self, request: Mapping[str, Any]) -> Reply:
        return self._worker.call(request, timeout=TIMEOUT, abandoned=self._abandoned)


def _texts(results: Mapping[Candidate, float | None]) -> dict[str, float | None]:
    return {str(candidate): seconds for candidate, seconds in results.items()}


def _candidates(texts: Mapping[str, float | None]) -> dict[Candidate, float | None]:
    return {Candidate.parse(text): seconds for text, seconds in texts.items()}


def handle(message: dict[str, Any]) -> Any:
    """Begin a search, or continue it: report results, and propose.

    The reply contains the candidates, and the strategy's predictions for them.
    """
    global _search
    if "problem" in message:
        add_plugins(message["plugins"])
        problem, machine = parse(message["problem"]), Machine(**message["machine"])
        fixed = {name: tuple(values) for name, values in message["fixed"].items()}
        tables, _ = spaces.searched(problem, machine, message["named"], fixed)
        model = None if message["fresh"] else predictor((Path(message["root"]),), machine.arch, problem.operator)
        known = _candidates(message["known"])
        fastest = sorted((c for c, seconds in known.items() if seconds), key=lambda c: known[c] or 0.0)[:AROUND]
        _search = strategies.make(
            message["strategy"],
            Domain.of(problem, machine, tables, trees=model.trees if model else None, around=fastest),
            known=known,
            trials=message["trials"],
            batch=message["batch"],
            seed=message["seed"],
        )
        return []
    if _search is None:
        raise RuntimeError("this process has begun no search")
    if message["results"]:
        _search.report(_candidates(message["results"]))
    candidates = [str(candidate) for candidate in _search.propose()]
    return candidates, {str(candidate): float(score) for candidate, score in _search.predicted.items()}


_search: strategies.Strategy | None = None


# Modules that searches import if they are installed, without needing them: half of the import time.
UNNEEDED = ("torch", "sklearn", "tvm.runtime.disco")


def load() -> None:
    """Import the modules that most searches need, without those that they do not."""
    from . import search

    # Plugins' problems and strategies may need them: the first search with an import error restores them.
    with without(*UNNEEDED), contextlib.suppress(ImportError):
        search.load()


if __name__ == "__main__":
    serve(handle, begin=load)
