"""How several runs of one problem share a log: each candidate is measured by one run, and the others learn its result.

A run claims a candidate before it measures it, and releases it after its trial is in the log. Candidates claimed by
another run are left to it. After a claim is granted the log is read once more, since another run may have finished the
candidate just before; from then on no other run writes about it.
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

# File of the claims, beside the trials; its suffix is that of other lock files, which repositories ignore.
NAME = "claims.jsonl.lock"


class Sharing:
    """The candidates that a run has claimed, and those that other runs measure or have measured since it began.

    Parameters
    ----------
    fresh
        Whether this run's trials have fresh inputs; trials with the other kind of inputs are ignored.

    Attributes
    ----------
    count
        Number of candidates that other runs measure, or have measured since this one began.
    """

    def __init__(self, log: Log, problem: Problem, *, fresh: bool = False) -> None:
        self._log, self._problem, self._fresh = log, problem, fresh
        self._claims: locking.Claims | None = None  # once the log's folder exists
        self._mark = json.dumps(problem.key).encode()
        self._end, self._file = _place(log.trials_path)
        self._sessions: dict[str, Session | None] = {}
        self._measured: set[Candidate] = set()
        self._elsewhere: set[Candidate] = set()
        self._found: set[Candidate] = set()

    @property
    def count(self) -> int:
        """See the class's docstring."""
        return len(self._elsewhere | self._found)

    def claim(self, candidates: Iterable[Candidate]) -> tuple[list[Candidate], dict[Candidate, float | None]]:
        """Claim candidates; returns those that this run now has to measure, and results of others found in the log."""
        wanted = list(candidates)
        taken = [one for one in wanted if self._take(one)]
        found = self._read()
        for one in wanted:
            if one not in taken and one not in self._found:
                self._elsewhere.add(one)
        return self._kept(taken), found

    def learn(self) -> tuple[list[Candidate], dict[Candidate, float | None]]:
        """Returns candidates that others gave up, which this run has now claimed, and new results of others."""
        taken = [one for one in sorted(self._elsewhere, key=str) if self._take(one)]
        found = self._read()
        self._elsewhere.difference_update(taken)
        return self._kept(taken), found

    def done(self, candidates: Iterable[Candidate]) -> None:
        """Release candidates whose trials are in the log."""
        measured = list(candidates)
        self._measured.update(measured)
        self.release(measured)

    def release(self, candidates: Iterable[Candidate]) -> None:
        """Release candidates that were not measured."""
        for one in candidates:
            if self._claims is not None:
                self._claims.release(self._name(one))

    def close(self) -> None:
        """Release all. May be called again."""
        if self._claims is not None:
            self._claims.close()

    def _kept(self, taken: list[Candidate]) -> list[Candidate]:
        """Those of the claimed candidates that nobody has measured; the others are released."""
        self.release(one for one in taken if one in self._found)
        return [one for one in taken if one not in self._found]

    def _take(self, candidate: Candidate) -> bool:
        if self._claims is None:
            self._claims = locking.Claims(self._log.trials_path.with_name(NAME))
        return self._claims.take(self._name(candidate))

    def _name(self, candidate: Candidate) -> str:
        return json.dumps([self._problem.key, str(candidate), self._fresh])

    def _read(self) -> dict[Candidate, float | None]:
        """Median seconds of other runs' trials added to the log since the last read; None for a failure."""
        path, end = self._log.trials_path, self._end
        size, file = _place(path)
        if (size, file) == (end, self._file):
            return {}
        begin = end if file == self._file and size >= end else 0  # otherwise the file was rewritten
        with path.open("rb") as opened:
            opened.seek(begin)
            data = opened.read()
        whole = data.rfind(b"\n") + 1  # the rest is being written
        self._end, self._file = begin + whole, file
        found: dict[Candidate, float | None] = {}
        for line in data[:whole].splitlines():
            if self._mark in line and (trial := _trial(line)) is not None and self._counts(trial):
                found[trial.candidate] = trial.median if trial.outcome == "ok" else None
        self._found.update(found)
        self._elsewhere.difference_update(found)
        return found

    def _counts(self, trial: Trial) -> bool:
        """Whether a trial is another run's of this problem, at the template's present version, with the same kind of
        inputs.
        """
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
    """A file's size, and its inode."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return 0, 0
    return found.st_size, found.st_ino
