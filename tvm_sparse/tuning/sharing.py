"""How runs of one problem share a log: who measures a candidate, and what the others learn of it.

A run claims a candidate before it measures it, and releases it once the trial stands in the log. What another run has
claimed is left to it. So is what stands in the log by then: that is looked at once more after a claim was granted, when
nobody else can be writing of this candidate any more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from ..core import locking, spaces
from ..core.candidate import Candidate
from ..core.problem import Problem
from ..records import Log, Session, Trial, codec

# Beside the trials; the name ends as those of other locks do, which no repository keeps.
NAME = "claims.jsonl.lock"


class Sharing:
    """What a run has claimed, and what other runs measure or have measured since this one began.

    Parameters
    ----------
    fresh
        Whether this run's trials have fresh inputs: those of others are other trials.

    Attributes
    ----------
    count
        Number of candidates that other runs measure, or have measured since this one began.
    """

    def __init__(self, log: Log, problem: Problem, *, fresh: bool = False) -> None:
        self._log, self._problem, self._fresh = log, problem, fresh
        self._claims: locking.Claims | None = None  # once the log's folder is there
        self._mark = json.dumps(problem.key).encode()
        self._end, self._file = _place(log.trials_path)
        self._sessions: dict[str, Session | None] = {}
        self._measured: set[Candidate] = set()
        self._elsewhere: set[Candidate] = set()
        self._found: set[Candidate] = set()

    @property
    def count(self) -> int:
        """As the class says."""
        return len(self._elsewhere | self._found)

    def claim(self, candidates: Iterable[Candidate]) -> tuple[list[Candidate], dict[Candidate, float | None]]:
        """Those that are this run's from now on, and what others have measured meanwhile."""
        wanted = list(candidates)
        taken = [one for one in wanted if self._take(one)]
        found = self._read()
        for one in wanted:
            if one not in taken and one not in self._found:
                self._elsewhere.add(one)
        return self._kept(taken), found

    def learn(self) -> tuple[list[Candidate], dict[Candidate, float | None]]:
        """What others have begun and given up, which is this run's from now on, and what they have measured."""
        taken = [one for one in sorted(self._elsewhere, key=str) if self._take(one)]
        found = self._read()
        self._elsewhere.difference_update(taken)
        return self._kept(taken), found

    def done(self, candidates: Iterable[Candidate]) -> None:
        """These are measured, and stand in the log."""
        measured = list(candidates)
        self._measured.update(measured)
        self.release(measured)

    def release(self, candidates: Iterable[Candidate]) -> None:
        """Leave these to others."""
        for one in candidates:
            if self._claims is not None:
                self._claims.release(self._name(one))

    def close(self) -> None:
        """Release all. May be called again."""
        if self._claims is not None:
            self._claims.close()

    def _kept(self, taken: list[Candidate]) -> list[Candidate]:
        """Those that nobody has measured; the others are released."""
        self.release(one for one in taken if one in self._found)
        return [one for one in taken if one not in self._found]

    def _take(self, candidate: Candidate) -> bool:
        if self._claims is None:
            self._claims = locking.Claims(self._log.trials_path.with_name(NAME))
        return self._claims.take(self._name(candidate))

    def _name(self, candidate: Candidate) -> str:
        return json.dumps([self._problem.key, str(candidate), self._fresh])

    def _read(self) -> dict[Candidate, float | None]:
        """Median seconds of what others have added to the log since it was read last, None for a failure."""
        path, end = self._log.trials_path, self._end
        size, file = _place(path)
        if (size, file) == (end, self._file):
            return {}
        begin = end if file == self._file and size >= end else 0  # else it was rewritten
        with path.open("rb") as opened:
            opened.seek(begin)
            data = opened.read()
        whole = data.rfind(b"\n") + 1  # what follows is being written
        self._end, self._file = begin + whole, file
        found: dict[Candidate, float | None] = {}
        for line in data[:whole].splitlines():
            if self._mark in line and (trial := _trial(line)) is not None and self._counts(trial):
                found[trial.candidate] = trial.median if trial.outcome == "ok" else None
        self._found.update(found)
        self._elsewhere.difference_update(found)
        return found

    def _counts(self, trial: Trial) -> bool:
        """Whether a trial is another run's of this problem, at the template's present version, with such inputs."""
        if trial.problem != self._problem.key or trial.outcome == "environment" or trial.candidate in self._measured:
            return False
        try:
            if spaces.find(trial.candidate.template).version != trial.candidate.version:
                return False
        except KeyError:
            return False
        if trial.session not in self._sessions:
            self._sessions = {trial.session: None, **self._log.sessions()}
        session = self._sessions[trial.session]
        return session is not None and session.fresh == self._fresh


def _trial(line: bytes) -> Trial | None:
    try:
        found = codec.decode(line, {Trial.kind: Trial})
    except codec.UNREADABLE:
        return None
    return found if isinstance(found, Trial) else None


def _place(path: Path) -> tuple[int, int]:
    """Bytes of a file, and which one it is."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_ino
