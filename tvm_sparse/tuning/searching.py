"""The child that searches: `python -m tvm_sparse.tuning.searching`, started by `Searcher`.

A search takes a core for a few hundredths of a second a trial. With a process for each session the driver has its own
core for what all sessions share, and a fault of the compiler's search costs no more than the search it happens in.
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
# Far beyond the seconds that a proposal takes, also where other processes take the cores.
TIMEOUT = 600.0
# Of the fastest points that are known the neighbours are listed where not all points are.
AROUND = 8


class SearchError(RuntimeError):
    """The search ended twice without a proposal."""


class Searcher:
    """Searches, one after another, in a process of its own. Not thread-safe.

    Parameters
    ----------
    abandoned
        As in `Worker.call`.
    """

    def __init__(self, abandoned: Callable[[], bool] = lambda: False) -> None:
        # Many search at the same time.
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
        """Make a strategy (`strategies.make`) of the space that `spaces.searched` gives, with the log's model.

        What this searched before is forgotten. A `fresh` search goes without the model, which knows no times with
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
        """Start the process unless it runs, and wait for nothing: it imports for seconds what a search needs."""
        self._worker.spawn()

    def propose(self) -> list[Candidate]:
        """As `Strategy.propose`, after `Strategy.report` of what was reported since.

        Raises
        ------
        SearchError
            If the process fails at that, and a new one that learns all anew does, too.
        """
        reply = self._call({"results": _texts(self._results)})
        self._results = {}
        if not reply.ok:
            # A new process is not to propose again what is being measured: to it that has failed.
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
    """Begin a search, or go on with it: report results, and propose.

    The reply holds the candidates, and what the strategy predicts of them.
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


# What no search needs, and imports of a search take wherever it is installed: half of the seconds that it begins with.
UNNEEDED = ("torch", "sklearn", "tvm.runtime.disco")


def load() -> None:
    """Import what most searches need, without what they do not."""
    from . import search

    # Problems and strategies from outside may need them later; the first search that needs what is missing tells of it.
    with without(*UNNEEDED), contextlib.suppress(ImportError):
        search.load()


if __name__ == "__main__":
    serve(handle, begin=load)
