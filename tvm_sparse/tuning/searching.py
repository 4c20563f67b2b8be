"""The child that searches: `python -m tvm_sparse.tuning.searching`, started by `Searcher`.

A search takes a core for a few hundredths of a second a trial. With a process for each session the driver has its own
core for what all sessions share, and a fault of the compiler's search costs no more than the search it happens in.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.registry import add_plugins, parse, plugins
from ..core.template import Table
from ..workers.processes import Reply, Worker, serve
from .search import Search

SEARCH_WORKER = (sys.executable, "-m", "tvm_sparse.tuning.searching")
# Far beyond the seconds that a proposal takes, also where other processes take the cores.
TIMEOUT = 600.0


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
        self._worker = Worker(SEARCH_WORKER, name="search")
        self._abandoned = abandoned
        self._begin: dict[str, Any] = {}
        self._known: dict[Candidate, float | None] = {}
        self._results: Mapping[Candidate, float | None] = {}

    def __enter__(self) -> Searcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.close()

    def begin(
        self,
        problem: Problem,
        machine: Machine,
        named: tuple[str, ...],
        fixed: Table,
        *,
        known: Mapping[Candidate, float | None],
        trials: int,
        batch: int,
        seed: int,
    ) -> None:
        """Make a `Search` of the space that `spaces.searched` gives; what it did before is forgotten."""
        self._known, self._results = dict(known), {}
        self._begin = {
            "problem": problem.key,
            "machine": asdict(machine),
            "named": named,
            "fixed": dict(fixed),
            "plugins": plugins(),
            "trials": trials,
            "batch": batch,
            "seed": seed,
        }
        self._call(self._begin | {"known": _texts(self._known)})  # a failure shows at the first proposal

    def propose(self) -> list[Candidate]:
        """As `Search.propose`, after `Search.report` of what was measured of the last proposal.

        Raises
        ------
        SearchError
            If the process fails at that, and a new one that learns all anew does, too.
        """
        reply = self._call({"results": _texts(self._results)})
        if not reply.ok and (reply := self._call(self._begin | {"known": _texts(self._known)})).ok:
            reply = self._call({"results": {}})
        if not reply.ok:
            raise SearchError(f"the search failed: {reply.message}")
        return [Candidate.parse(text) for text in reply.value]

    def report(self, results: Mapping[Candidate, float | None]) -> None:
        """As `Search.report`."""
        self._results = results
        self._known.update(results)

    def _call(self, request: Mapping[str, Any]) -> Reply:
        return self._worker.call(request, timeout=TIMEOUT, abandoned=self._abandoned)


def _texts(results: Mapping[Candidate, float | None]) -> dict[str, float | None]:
    return {str(candidate): seconds for candidate, seconds in results.items()}


def _candidates(texts: Mapping[str, float | None]) -> dict[Candidate, float | None]:
    return {Candidate.parse(text): seconds for text, seconds in texts.items()}


def handle(message: dict[str, Any]) -> list[str]:
    """Begin a search, or go on with it: report the results of the last proposal, and propose."""
    global _search
    if "problem" in message:
        add_plugins(message["plugins"])
        problem, machine = parse(message["problem"]), Machine(**message["machine"])
        fixed = {name: tuple(values) for name, values in message["fixed"].items()}
        _search = Search(
            problem,
            machine,
            spaces.searched(problem, machine, message["named"], fixed)[0],
            known=_candidates(message["known"]),
            trials=message["trials"],
            batch=message["batch"],
            seed=message["seed"],
        )
        return []
    if _search is None:
        raise RuntimeError("this process has begun no search")
    if message["results"]:
        _search.report(_candidates(message["results"]))
    return [str(candidate) for candidate in _search.propose()]


_search: Search | None = None

if __name__ == "__main__":
    # The search needs no PyTorch, which tvm_ffi imports where it is installed. SciPy looks for it here.
    sys.modules["torch"] = None  # type: ignore[assignment]
    import tvm_ffi  # noqa: F401

    del sys.modules["torch"]
    serve(handle)
