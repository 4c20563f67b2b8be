"""What was measured, on disk: append-only JSON lines with a checksum on each line.

Layout, one folder per architecture and operator::

    <root>/<arch>/<operator>/trials.jsonl    every candidate that was measured, and its session
    <root>/<arch>/<operator>/best.jsonl      final rankings; the last line of a problem wins

A line is canonical JSON (sorted keys, no spaces, ASCII) with a ``kind`` and a ``sum``: the first
16 hex digits of the SHA-256 of the line's canonical JSON without ``sum``. Each line stands alone,
so a damaged one costs itself and nothing else, and `cat` merges two logs. This module imports
neither TVM nor NumPy: records are read where nothing can be compiled.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields
from datetime import datetime, timedelta
from operator import index
from pathlib import Path
from typing import Any, ClassVar

from filelock import FileLock

OUTCOMES = ("ok", "wrong", "build-error", "run-error", "crash", "timeout", "rejected")
"""How a trial can end; `rejected` ones were refused before they were built."""

REASON_LENGTH = 500
"""Characters kept of an error: enough for its head, and a log of crashes stays readable."""

LOCK_SECONDS = 60.0
"""How long an append waits for another one. An append takes milliseconds: a longer wait means that
the holder is stopped, and waiting for ever would hide it."""

_NAME = r"[A-Za-z_][A-Za-z0-9_.\-]*"
_CANDIDATE = re.compile(rf"(?P<template>{_NAME})@(?P<version>\d+)\((?P<decisions>.*)\)")
_DECISION = re.compile(rf"({_NAME})=(-?\d+)")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\-]*")

_UNREADABLE = (ValueError, TypeError, OverflowError, RecursionError)


# ---------------------------------------------------------------------------------------------
# The records


@dataclass(frozen=True)
class Candidate:
    """A tuned choice: a schedule template, its version, and a value for each of its decisions.

    Parameters
    ----------
    template : str
        Name of the schedule template.
    version : int
        Version of the template; raised when old decisions would mean something else.
    decisions : tuple of (str, int)
        Name and value of each decision, in the template's order.

    Examples
    --------
    >>> print(Candidate("warp_shuffle", 1, (("rows", 4), ("lanes", 32))))
    warp_shuffle@1(rows=4, lanes=32)
    """

    template: str
    version: int
    decisions: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        # `index` turns NumPy's and TVM's integers into plain ones, and refuses 4.0 and "4".
        decisions = tuple((name, index(value)) for name, value in self.decisions)
        object.__setattr__(self, "version", index(self.version))
        object.__setattr__(self, "decisions", decisions)
        names = [name for name, _ in decisions]
        for name in (self.template, *names):
            if not isinstance(name, str) or not re.fullmatch(_NAME, name):
                raise ValueError(f"not a name of a template or a decision: {name!r}")
        if len(set(names)) != len(names):
            raise ValueError(f"a decision is named twice: {', '.join(names)}")
        if self.version < 0:
            raise ValueError(f"a template's version is not negative: {self.version}")

    def __str__(self) -> str:
        decisions = ", ".join(f"{name}={value}" for name, value in self.decisions)
        return f"{self.template}@{self.version}({decisions})"

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Read what `str` writes.

        Raises
        ------
        ValueError
            If `text` is not of the form ``template@version(name=value, ...)``.
        """
        match = _CANDIDATE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not a candidate (expected 'template@1(name=value, ...)'): {text!r}")
        decisions = []
        for item in match["decisions"].split(",") if match["decisions"].strip() else ():
            decision = _DECISION.fullmatch(item.strip())
            if decision is None:
                raise ValueError(f"not a decision (expected 'name=4'): {item!r} in {text!r}")
            decisions.append((decision[1], int(decision[2])))
        return cls(match["template"], int(match["version"]), tuple(decisions))

    @property
    def values(self) -> dict[str, int]:
        """The decisions by name."""
        return dict(self.decisions)


@dataclass(frozen=True)
class Trial:
    """One candidate tried on one problem, whether or not it worked.

    Parameters
    ----------
    problem : str
        Text key, e.g. ``softmax_topk/batch=10,vocab=25000,k=5,dtype=float32``.
    arch : str
        What it ran on, e.g. ``sm_90a`` or ``x86-64-v4``.
    candidate : Candidate
        What was tried.
    outcome : str
        One of `OUTCOMES`.
    reason : str
        Empty when `outcome` is ``ok``; else the head of the error (cut to `REASON_LENGTH`).
    seconds : tuple of float
        Time of one call, one entry a repeat; empty unless ``ok``.
    build_seconds : float or None
        Time of the build; None if nothing was built.
    session : str
        `Session.id` of the tuning session.
    order : int
        Place within the session, from 0.
    resources : mapping of str to int, optional
        Registers, bytes of shared memory and so on, where known.

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
    # Left out of the hash, not of the comparison: a dict has no hash.
    resources: Mapping[str, int] | None = field(default=None, hash=False)

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

    @property
    def median(self) -> float:
        """Median of `seconds`.

        Raises
        ------
        ValueError
            If the trial is not ok: it has no time, not an infinite one.
        """
        if not self.seconds:
            raise ValueError(f"{self.candidate} ended as {self.outcome!r} and has no time")
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Best:
    """The winner of a final ranking, measured in turn with the fallback.

    Parameters
    ----------
    problem, arch : str
        As in `Trial`.
    candidate : Candidate
        The winner; it may be the fallback itself.
    seconds : float
        Median time of one call in the final ranking.
    fallback : Candidate
        What would run without tuning.
    fallback_seconds : float
        Its median in the same ranking.
    rounds : int
        How many rounds the ranking had.
    session : str
        `Session.id` of the tuning session.
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

    def __post_init__(self) -> None:
        _check_texts(self, "problem", "arch", "session")
        _check_candidate(self.candidate)
        _check_candidate(self.fallback)
        operator_of(self.problem)
        object.__setattr__(self, "seconds", _time(self.seconds, "seconds"))
        fallback_seconds = _time(self.fallback_seconds, "fallback_seconds")
        object.__setattr__(self, "fallback_seconds", fallback_seconds)
        object.__setattr__(self, "rounds", index(self.rounds))
        if self.rounds < 1:
            raise ValueError(f"a ranking has at least one round, not {self.rounds}")


@dataclass(frozen=True)
class Session:
    """Where the trials of one tuning run come from: one line a run.

    Parameters
    ----------
    id : str
        What `Trial.session` and `Best.session` refer to.
    date : str
        Start of the session: ISO 8601 in UTC, as `utc_now` writes it.
    machine : mapping
        Device name, driver, clocks, cores and so on.
    versions : mapping
        Versions of the software.
    timer : str
        How times were taken.
    inputs : mapping
        Seed and structure of the inputs.
    """

    kind: ClassVar[str] = "session"

    id: str
    date: str
    machine: Mapping[str, Any] = field(hash=False)
    versions: Mapping[str, Any] = field(hash=False)
    timer: str
    inputs: Mapping[str, Any] = field(hash=False)

    def __post_init__(self) -> None:
        _check_texts(self, "id", "date", "timer")
        # Python 3.10 does not read the Z.
        date = datetime.fromisoformat(re.sub("Z$", "+00:00", self.date))
        if date.utcoffset() != timedelta(0):
            raise ValueError(f"the date of a session is in UTC and says so, unlike {self.date!r}")
        for name in ("machine", "versions", "inputs"):
            object.__setattr__(self, name, dict(getattr(self, name)))


Record = Trial | Session | Best


@dataclass(frozen=True)
class Skipped:
    """A line that could not be used: its number, from 1, and why."""

    line: int
    reason: str


@dataclass(frozen=True)
class Contents:
    """What a file holds, in its order, and the lines that were skipped."""

    trials: tuple[Trial, ...] = ()
    sessions: tuple[Session, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    bests: tuple[Best, ...] = ()


def operator_of(problem: str) -> str:
    """Return the operator of a problem key: what stands before the first ``/``."""
    operator, slash, _ = problem.partition("/")
    if not slash or not _FOLDER.fullmatch(operator):
        raise ValueError(f"not a problem key (expected 'operator/axis=4,...'): {problem!r}")
    return operator


def utc_now() -> str:
    """Return the present time as `Session.date` holds it: ISO 8601, UTC, whole seconds."""
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
    if isinstance(value, bool | str):  # float() would take both
        raise TypeError(f"{name}: not a number: {value!r}")
    seconds = float(value)
    if not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"{name}: a time is finite and positive, unlike {seconds!r}")
    return seconds


# ---------------------------------------------------------------------------------------------
# Lines


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _checksum(fields_of_line: Mapping[str, Any]) -> str:
    return hashlib.sha256(_canonical(fields_of_line).encode()).hexdigest()[:16]


def _encode(record: Record) -> bytes:
    # Through JSON and back first: a key that is a number sorts otherwise once it is a text, and
    # the reader sees texts only.
    line = json.loads(json.dumps({"kind": record.kind, **asdict(record)}, allow_nan=False))
    line["sum"] = _checksum(line)
    return _canonical(line).encode() + b"\n"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _decode(data: bytes, kinds: Mapping[str, type[Record]]) -> Record:
    """Read one line; any exception of `_UNREADABLE` says why it cannot be used."""
    if not data.strip():
        raise ValueError("blank line")
    try:
        line = json.loads(data.decode(), parse_constant=_refuse_constant)
    except _UNREADABLE as error:
        raise ValueError(f"bad JSON: {error}") from error
    if not isinstance(line, dict):
        raise ValueError(f"bad JSON: an object was expected, not a {type(line).__name__}")
    expected = line.pop("sum", None)
    if expected is None:
        raise ValueError("missing field: sum")
    if _checksum(line) != expected:
        raise ValueError("checksum does not match")
    kind = line.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"unknown kind: {kind!r}")

    # Fields of a later version are dropped; those with a default may be missing.
    cls = kinds[kind]
    given = {f.name: line[f.name] for f in fields(cls) if f.name in line}
    missing = [f.name for f in fields(cls) if f.default is MISSING and f.name not in given]
    if missing:
        raise ValueError(f"missing field: {', '.join(missing)}")
    try:
        for name in {"candidate", "fallback"} & given.keys():
            given[name] = Candidate(**_only(given[name], "template", "version", "decisions"))
        return cls(**given)
    except _UNREADABLE as error:
        raise ValueError(f"invalid value: {error}") from error


def _only(value: Any, *names: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value.keys() >= set(names):
        raise ValueError(f"expected an object with {', '.join(names)}: {value!r}")
    return {name: value[name] for name in names}


# ---------------------------------------------------------------------------------------------
# Files


class Log:
    """The records of one operator on one architecture.

    Any number of processes may append and read at the same time. Nothing is created before the
    first append, and reading takes no lock, so a log in a read-only folder can be read.

    Parameters
    ----------
    root : Path
        Folder of all logs.
    arch, operator : str
        Names of the two folders below it.
    """

    def __init__(self, root: Path, arch: str, operator: str) -> None:
        for name in (arch, operator):
            if not _FOLDER.fullmatch(name):
                raise ValueError(f"cannot be the name of a folder of records: {name!r}")
        self.root = Path(root)
        self.arch = arch
        self.operator = operator

    def __repr__(self) -> str:
        return f"Log({str(self.root)!r}, {self.arch!r}, {self.operator!r})"

    @property
    def trials_path(self) -> Path:
        """Path of the file that `append` writes."""
        return self.root / self.arch / self.operator / "trials.jsonl"

    @property
    def best_path(self) -> Path:
        """Path of the file that `append_best` writes."""
        return self.root / self.arch / self.operator / "best.jsonl"

    def append(self, *records: Trial | Session) -> None:
        """Append to ``trials.jsonl``; when this returns, the lines are on the disk.

        Raises
        ------
        ValueError
            If a record belongs to another architecture or operator, or holds what JSON does not
            (NaN, infinity). Nothing is written.
        OSError
            If the lines could not be written, e.g. on a full disk. The file is as before.
        filelock.Timeout
            If another process kept the lock for `LOCK_SECONDS`.
        """
        self._append(self.trials_path, records, (Trial, Session))

    def append_best(self, *bests: Best) -> None:
        """Append to ``best.jsonl``; as `append`."""
        self._append(self.best_path, bests, (Best,))

    def read(self) -> Contents:
        """Read ``trials.jsonl``; a bad line is skipped and named, and never raises."""
        return self._read(self.trials_path, (Trial, Session))

    def read_best(self) -> Contents:
        """Read ``best.jsonl``: every ranking in `Contents.bests`, and the lines skipped."""
        return self._read(self.best_path, (Best,))

    def best(self) -> dict[str, Best]:
        """Return the last ranking of each problem, by problem key."""
        return {best.problem: best for best in self.read_best().bests}

    def _append(self, path: Path, records: Iterable[Record], types: tuple[type[Record], ...]) -> None:
        records = tuple(records)
        for record in records:
            if not isinstance(record, types):
                raise TypeError(f"{path.name} does not hold a {type(record).__name__}")
            self._check_place(record)
        if records:
            _append_lines(path, [_encode(record) for record in records])

    def _read(self, path: Path, types: tuple[type[Record], ...]) -> Contents:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return Contents()
        lines = data.split(b"\n")
        # What follows the last newline: nothing, or a line that a crash has torn, or one that is
        # being written at this moment. If its checksum holds, only the newline is missing.
        torn = len(lines) if lines[-1] else 0
        if not torn:
            lines.pop()

        kinds = {cls.kind: cls for cls in types}
        records: list[Record] = []
        skipped: list[Skipped] = []
        for number, line in enumerate(lines, start=1):
            try:
                record = _decode(line, kinds)
                self._check_place(record)
            except _UNREADABLE as error:
                reason = f"torn last line: {error}" if number == torn else str(error)
                skipped.append(Skipped(number, reason[:REASON_LENGTH]))
            else:
                records.append(record)
        return Contents(
            trials=tuple(r for r in records if isinstance(r, Trial)),
            sessions=tuple(r for r in records if isinstance(r, Session)),
            skipped=tuple(skipped),
            bests=tuple(r for r in records if isinstance(r, Best)),
        )

    def _check_place(self, record: Record) -> None:
        """Refuse a record of another folder: a copied file must not speak for another GPU."""
        if isinstance(record, Session):  # holds for all that it refers to, wherever that stands
            return
        if record.arch != self.arch:
            raise ValueError(f"arch {record.arch!r} in the folder of {self.arch!r}")
        if operator_of(record.problem) != self.operator:
            raise ValueError(f"problem {record.problem!r} in the folder of {self.operator!r}")


def _append_lines(path: Path, lines: list[bytes]) -> None:
    """Append all of `lines` durably, or none."""
    _make_folder(path.parent)
    with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            # A writer that was killed can leave half a line. Ours must not be glued to it.
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            try:
                _write_all(fd, (b"\n" if torn else b"") + b"".join(lines))
                os.fsync(fd)
                if size == 0:
                    _sync_folder(path.parent)
            except BaseException as error:  # Ctrl-C too: the caller will not think it is written
                undone = _truncate(fd, size)
                if isinstance(error, OSError):
                    cause = os.strerror(error.errno or errno.EIO)
                    message = f"{cause}: {len(lines)} record(s) were not written, and {undone}"
                    raise OSError(error.errno, message, str(path)) from error
                raise
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    # Nearly always one write. A full disk makes it a short one; it is the next that says why.
    while data:
        data = data[os.write(fd, data) :]


def _truncate(fd: int, size: int) -> str:
    """Undo a failed append, under the lock; say in words what the file holds now."""
    try:
        os.ftruncate(fd, size)
        os.fsync(fd)
    except OSError as error:
        return f"the file may end in a torn line, which readers skip ({error})"
    return "the file is as it was before"


def _make_folder(folder: Path) -> None:
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in new:
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    # A new name is durable only once its folder is.
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
