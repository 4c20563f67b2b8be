"""The values that logs hold: trials, their sessions, and the best candidate of a problem.

`records.log` describes the files. This module imports neither TVM nor NumPy: records are read where nothing can be
compiled.
"""

from __future__ import annotations

import functools
import math
import re
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from operator import index
from typing import Any, ClassVar

from ..core.candidate import Candidate

OUTCOMES = ("ok", "wrong", "build-error", "run-error", "crash", "timeout", "rejected", "environment")
"""How a trial can end; `rejected` ones were refused before they were built. `environment` ones tell nothing of their
candidate, and are tried again: memory, disk or processors were wanting, or something else ended the process."""
MEASURED = "measured"
"""`Session.strategy` of the few candidates of look-up that were timed before they ran (`tvm_sparse.warmup`)."""
REASON_LENGTH = 500
"""Characters kept of an error: enough for its head, and a log of crashes stays readable."""


@dataclass(frozen=True)
class Trial:
    """One candidate tried on one problem, whether or not it worked.

    Parameters
    ----------
    problem : str
        Text key, e.g. ``softmax_topk/batch=10,vocab=25000,k=5,dtype=float32``.
    arch : str
        The architecture it ran on, e.g. ``sm_90a`` or ``x86-64-v4``.
    candidate : Candidate
        The candidate that was tried.
    outcome : str
        One of `OUTCOMES`.
    reason : str
        Empty when `outcome` is ``ok``; else the head of the error (cut to `REASON_LENGTH`).
    seconds : tuple of float
        Time of one call for each repeat; empty unless ``ok``.
    build_seconds : float or None
        Time of the build; None if nothing was built.
    session : str
        `Session.id` of the tuning session.
    order : int
        Position within the session, from 0.
    resources : mapping of str to int, optional
        Registers, bytes of shared memory and so on, where known.
    predicted : float, optional
        Score of the search's cost model before the trial, if it had one; larger means faster.

    Raises
    ------
    ValueError
        For a time that is not finite and positive, an unknown outcome, times of a failed trial,
        a failure without a reason.
    """

    kind: ClassVar[str] = "trial"

    problem: str
    arch: str
    candidate: Candidate
    outcome: str
    reason: str
    seconds: tuple[float, ...]
    build_seconds: float | None
    session: str
    order: int
    # Excluded from the hash, not from the comparison: a dict has no hash.
    resources: Mapping[str, int] | None = field(default=None, hash=False)
    predicted: float | None = None

    def __post_init__(self) -> None:
        _check_texts(self, "problem", "arch", "outcome", "session")
        _check_candidate(self.candidate)
        operator_of(self.problem)
        if self.outcome not in OUTCOMES:
            raise ValueError(f"unknown outcome {self.outcome!r}; known: {', '.join(OUTCOMES)}")
        if not isinstance(self.reason, str):
            raise TypeError(f"reason is a text, not {self.reason!r}")
        seconds = tuple(_time(value, "seconds") for value in self.seconds)
        if self.outcome == "ok" and (not seconds or self.reason):
            raise ValueError("a trial that is ok has times and no reason")
        if self.outcome != "ok" and (seconds or not self.reason):
            raise ValueError(f"a trial that ended as {self.outcome!r} has a reason and no times")
        object.__setattr__(self, "reason", self.reason[:REASON_LENGTH])
        object.__setattr__(self, "seconds", seconds)
        object.__setattr__(self, "order", index(self.order))
        if self.build_seconds is not None:
            object.__setattr__(self, "build_seconds", _time(self.build_seconds, "build_seconds"))
        if self.resources is not None:
            resources = {name: index(value) for name, value in dict(self.resources).items()}
            object.__setattr__(self, "resources", resources)
        if self.predicted is not None:
            object.__setattr__(self, "predicted", float(self.predicted))

    @property
    def median(self) -> float:
        """Median of `seconds`.

        Raises
        ------
        ValueError
            If the trial is not ok.
        """
        if not self.seconds:
            raise ValueError(f"{self.candidate} ended as {self.outcome!r} and has no time")
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Best:
    """The winner of a final ranking, in which winner and fallback were measured in turn.

    Parameters
    ----------
    problem, arch : str
        As in `Trial`.
    candidate : Candidate
        The winner; it may be the fallback itself.
    seconds : float
        Median time of one call in the final ranking.
    fallback : Candidate
        The candidate that would run without tuning.
    fallback_seconds : float
        The fallback's median time in the same ranking.
    rounds : int
        Number of rounds of the ranking.
    session : str
        `Session.id` of the tuning session.
    trials : int, optional
        Number of trials that the session had recorded by then. If the log has fewer, it was cut.
    seconds_all, fallback_all : tuple of float, optional
        Times of one call in each round, of winner and fallback. Empty in old rankings, which did not keep them.
    ways : mapping, optional
        Median time of a call by each of the operator's ways to its result, such as a kernel or a library, if
        `tvm-sparse bench --record` has timed them in turn.
    """

    kind: ClassVar[str] = "best"

    problem: str
    arch: str
    candidate: Candidate
    seconds: float
    fallback: Candidate
    fallback_seconds: float
    rounds: int
    session: str
    trials: int | None = None
    # Excluded from the hash, not from the comparison: a dict has no hash.
    ways: Mapping[str, float] | None = field(default=None, hash=False)
    seconds_all: tuple[float, ...] = ()
    fallback_all: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        _check_texts(self, "problem", "arch", "session")
        for name in ("seconds_all", "fallback_all"):
            object.__setattr__(self, name, tuple(_time(value, name) for value in getattr(self, name)))
        _check_candidate(self.candidate)
        _check_candidate(self.fallback)
        operator_of(self.problem)
        object.__setattr__(self, "seconds", _time(self.seconds, "seconds"))
        fallback_seconds = _time(self.fallback_seconds, "fallback_seconds")
        object.__setattr__(self, "fallback_seconds", fallback_seconds)
        object.__setattr__(self, "rounds", index(self.rounds))
        if self.rounds < 1:
            raise ValueError(f"a ranking has at least one round, not {self.rounds}")
        if self.trials is not None:
            object.__setattr__(self, "trials", index(self.trials))
        if self.ways is not None:
            ways = {name: _time(seconds, "ways") for name, seconds in dict(self.ways).items()}
            if not ways or not all(isinstance(name, str) and name for name in ways):
                raise ValueError(f"ways: expected times by name, got {self.ways!r}")
            object.__setattr__(self, "ways", ways)


@dataclass(frozen=True)
class Session:
    """The provenance of one tuning run's trials, one line for each run.

    Parameters
    ----------
    id : str
        The id to which `Trial.session` and `Best.session` refer.
    date : str
        Start of the session: ISO 8601 in UTC, as `utc_now` writes it.
    machine : mapping
        Device name, driver, clocks, cores and so on.
    versions : mapping
        Versions of the software.
    timer : str
        How times were taken.
    inputs : mapping
        Seed, structure and settings of the inputs.
    strategy : str, optional
        The strategy that proposed the candidates; empty in old sessions.
    fresh : bool, optional
        Whether every timed call followed a kernel that had just written the inputs of the batch (`bench.producer`).
        Otherwise, and in old sessions, inputs are as the caches held them.
    """

    kind: ClassVar[str] = "session"

    id: str
    date: str
    machine: Mapping[str, Any] = field(hash=False)
    versions: Mapping[str, Any] = field(hash=False)
    timer: str
    inputs: Mapping[str, Any] = field(hash=False)
    strategy: str = "evolutionary"
    fresh: bool = False

    def __post_init__(self) -> None:
        _check_texts(self, "id", "date", "timer", "strategy")
        if not isinstance(self.fresh, bool):
            raise TypeError(f"fresh is true or false, not {self.fresh!r}")
        date = datetime.fromisoformat(self.date)
        if date.utcoffset() != timedelta(0):
            raise ValueError(f"the date of a session is in UTC and says so, unlike {self.date!r}")
        for name in ("machine", "versions", "inputs"):
            object.__setattr__(self, name, dict(getattr(self, name)))

    @property
    def state(self) -> str:
        """State of the inputs, as `tvm-sparse tune --inputs` names it."""
        return "fresh" if self.fresh else "hot"


Record = Trial | Session | Best


FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\-]*")
"""What may be the name of a folder of records: an architecture or an operator."""


@functools.lru_cache(maxsize=1024)  # thousands of lines of a log have the same key
def operator_of(problem: str) -> str:
    """Return the operator of a problem key: the text before the first ``/``."""
    operator, slash, _ = problem.partition("/")
    if not slash or not FOLDER_NAME.fullmatch(operator):
        raise ValueError(f"not a problem key (expected 'operator/axis=4,...'): {problem!r}")
    return operator


def utc_now() -> str:
    """Return the present time in the form of `Session.date`: ISO 8601, UTC, whole seconds."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _check_texts(record: Any, *names: str) -> None:
    for name in names:
        value = getattr(record, name)
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} is a text that is not empty, unlike {value!r}")


def _check_candidate(value: Any) -> None:
    if not isinstance(value, Candidate):
        raise TypeError(f"a Candidate was expected, not {value!r}")


def _time(value: Any, name: str) -> float:
    if type(value) is float and 0.0 < value < math.inf:
        return value
    if isinstance(value, bool | str):  # float() would accept both
        raise TypeError(f"{name}: not a number: {value!r}")
    seconds = float(value)
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"{name}: a time is finite and positive, unlike {seconds!r}")
    return seconds
