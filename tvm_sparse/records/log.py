"""Append-only logs of measurements: JSON lines with a checksum on each line.

Layout, one folder per architecture and operator::

    <root>/<arch>/<operator>/trials.jsonl    every candidate that was measured, and its session
    <root>/<arch>/<operator>/best.jsonl      final rankings; the last line of a problem wins

A line is canonical JSON (sorted keys, no spaces, ASCII) with a ``kind``, a ``schema`` and a ``sum``: the first 16 hex
digits of the SHA-256 of the line's canonical JSON without ``sum``. Lines are independent: a damaged one does not affect
others, and `cat` merges two logs. This module imports neither TVM nor NumPy: records are read where nothing can be
compiled.
"""

from __future__ import annotations

import errno
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.locking import held
from .codec import UNREADABLE, decode, encode
from .values import FOLDER_NAME, REASON_LENGTH, Best, Record, Session, Trial, operator_of

logger = logging.getLogger("tvm_sparse")

LOCK_SECONDS = 60.0
"""How long an append waits for another one. An append takes milliseconds: a longer wait means that
the holder is stopped, and waiting for ever would hide it."""

_PROBLEM = re.compile(rb'"problem"\s*:\s*"([^"\\]{1,500})"')
# What lines of sessions contain, and no others: quotes inside a JSON string are escaped.
_OF_A_SESSION = b'"kind":"%s"' % Session.kind.encode()


@dataclass(frozen=True)
class Skipped:
    """A line that could not be used: its number (from 1), the reason, and its problem if that can be read."""

    line: int
    reason: str
    problem: str = ""


@dataclass(frozen=True)
class Contents:
    """The records of a file, in its order, and the lines that were skipped."""

    trials: tuple[Trial, ...] = ()
    sessions: tuple[Session, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    bests: tuple[Best, ...] = ()

    def timed(self, fresh: bool) -> Iterator[Trial]:
        """The trials of sessions with fresh inputs, or of all others: their times must not be compared.

        Trials whose session is missing count as others.
        """
        of_fresh = {session.id for session in self.sessions if session.fresh}
        return (trial for trial in self.trials if (trial.session in of_fresh) == fresh)


class Log:
    """The records of one operator on one architecture.

    Unusable lines cause a warning, once a process.

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
            if not FOLDER_NAME.fullmatch(name):
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
        LockTimeout
            If another process kept the lock for `LOCK_SECONDS`, or holds it and is stopped.
        """
        self._append(self.trials_path, records, (Trial, Session))

    def append_best(self, *bests: Best) -> None:
        """Append to ``best.jsonl``, with the guarantees of `append`."""
        self._append(self.best_path, bests, (Best,))

    def read(self) -> Contents:
        """Read ``trials.jsonl``; a bad line is skipped and named, and never raises."""
        return self._read(self.trials_path, (Trial, Session))

    def sessions(self) -> dict[str, Session]:
        """Read the sessions alone, by their ids, without parsing the thousands of lines of trials."""
        return {session.id: session for session in self._read(self.trials_path, (Session,), _OF_A_SESSION).sessions}

    def of_problem(self, problem: str) -> Contents:
        """Read the trials of one problem, by its key, and all sessions, without parsing lines of other problems."""
        own = b'"problem":%s' % json.dumps(problem).encode()
        return self._read(self.trials_path, (Trial, Session), own, _OF_A_SESSION)

    def read_best(self) -> Contents:
        """Read ``best.jsonl``: every ranking in `Contents.bests`, and the lines skipped."""
        return self._read(self.best_path, (Best,))

    def best(self, valid: Callable[[Best], bool] = lambda best: True) -> dict[str, Best]:
        """Return the last ranking of each problem that is `valid`, by problem key.

        A warning names damaged later ones.
        """
        found: dict[str, Best] = {}
        lost: dict[str, Skipped] = {}
        lines = list(self._lines(self.best_path, (Best,)))
        for _, line in lines:
            if isinstance(line, Best):
                if valid(line):
                    found[line.problem] = line
                    lost.pop(line.problem, None)
            elif isinstance(line, Skipped) and line.problem:
                lost[line.problem] = line
        self._report(self.best_path, [line for _, line in lines if isinstance(line, Skipped)])
        for problem, skipped in lost.items():
            instead = "an older one is used" if problem in found else "there is no other"
            _say_once(f"{self.best_path}: the last ranking of {problem}, line {skipped.line}, is damaged: {instead}")
        return found

    def _append(self, path: Path, records: Iterable[Record], types: tuple[type[Record], ...]) -> None:
        records = tuple(records)
        for record in records:
            if not isinstance(record, types):
                raise TypeError(f"{path.name} does not hold a {type(record).__name__}")
            self._check_place(record)
        if records:
            _append_lines(path, [encode(record) for record in records])

    def _read(self, path: Path, types: tuple[type[Record], ...], *only: bytes) -> Contents:
        """The contents of a file; with `only`, of the lines that contain one of these texts."""
        lines = [line for _, line in self._lines(path, types, *only)]
        skipped = [line for line in lines if isinstance(line, Skipped)]
        self._report(path, skipped)
        return Contents(
            trials=tuple(line for line in lines if isinstance(line, Trial)),
            sessions=tuple(line for line in lines if isinstance(line, Session)),
            skipped=tuple(skipped),
            bests=tuple(line for line in lines if isinstance(line, Best)),
        )

    def _lines(
        self, path: Path, types: tuple[type[Record], ...], *only: bytes
    ) -> Iterator[tuple[bytes, Record | Skipped]]:
        """The lines of a file, each with the record that it holds."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        # After the last newline there is nothing, a line that a crash cut off, or one that is being written. If its
        # checksum is right, only the newline is missing.
        end = data.rfind(b"\n") + 1
        kinds = {cls.kind: cls for cls in types}
        for number, start in _starts(data, only):
            stop = data.find(b"\n", start)
            line = data[start : len(data) if stop < 0 else stop]
            try:
                record = decode(line, kinds)
                self._check_place(record)
            except UNREADABLE as error:
                reason = f"torn last line: {error}" if start == end else str(error)
                problem = _PROBLEM.search(line)
                yield (
                    line,
                    Skipped(number, reason[:REASON_LENGTH], problem[1].decode("ascii", "replace") if problem else ""),
                )
            else:
                yield line, record

    def _report(self, path: Path, skipped: list[Skipped]) -> None:
        if skipped:
            first = skipped[0]
            count = "1 line is" if len(skipped) == 1 else f"{len(skipped)} lines are"
            _say_once(
                f"{path}: {count} damaged and passed over, the first is line {first.line}: {first.reason}; to see them:"
                f" tvm-sparse db verify --logs {self.root}"
            )

    def prune(self, keep: Callable[[Record], bool], renew: Callable[[Record], Record] = lambda record: record) -> int:
        """Rewrite both files without damaged lines and records that `keep` refuses, the others as `renew` returns them;
        returns the number of removed lines."""
        gone = 0

        def kept(lines: list[bytes], path: Path, types: tuple[type[Record], ...]) -> list[bytes]:
            nonlocal gone
            found = [
                (line, one) for line, one in self._lines(path, types) if not isinstance(one, Skipped) and keep(one)
            ]
            gone += len(lines) - len(found)
            return [line + b"\n" if renew(record) == record else encode(renew(record)) for line, record in found]

        for path, types in ((self.trials_path, (Trial, Session)), (self.best_path, (Best,))):
            rewrite(path, functools.partial(kept, path=path, types=types))
        return gone

    def _check_place(self, record: Record) -> None:
        """Refuse a record of another folder: a copied file must not speak for another GPU."""
        if isinstance(record, Session):  # applies to all trials that refer to it, wherever they are
            return
        if record.arch != self.arch:
            raise ValueError(f"arch {record.arch!r} in the folder of {self.arch!r}")
        if operator_of(record.problem) != self.operator:
            raise ValueError(f"problem {record.problem!r} in the folder of {self.operator!r}")


def _starts(data: bytes, only: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Numbers of lines, from 1, and their offsets; with `only`, of the lines that contain one of these texts."""
    if not only:
        start, number = 0, 1
        while start < len(data):
            yield number, start
            start = data.find(b"\n", start) + 1 or len(data)
            number += 1
        return
    found = set()
    for text in only:
        at = data.find(text)
        while at >= 0:
            found.add(data.rfind(b"\n", 0, at) + 1)
            stop = data.find(b"\n", at)
            at = data.find(text, stop) if stop >= 0 else -1
    number, before = 1, 0
    for start in sorted(found):
        number += data.count(b"\n", before, start)
        before = start
        yield number, start


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


def rewrite(path: Path, change: Callable[[list[bytes]], list[bytes]]) -> int:
    """Replace the lines of a file, under its lock and by a rename; returns the number of lines removed or changed."""
    if not path.exists():
        return 0
    with held(Path(f"{path}.lock"), LOCK_SECONDS):
        before = path.read_bytes().splitlines(keepends=True)
        after = change(before)
        if after == before:
            return 0
        unfinished = path.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            file.write(b"".join(after))
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
        _sync_folder(path.parent)
    if len(after) != len(before):
        return len(before) - len(after)
    return sum(old != new for old, new in zip(before, after, strict=True))


def _append_lines(path: Path, lines: list[bytes]) -> None:
    """Append all of `lines` durably, or none."""
    try:
        _make_folder(path.parent)
        os.close(_opened(path))
    except OSError as error:
        cause = os.strerror(error.errno or errno.EIO)
        raise OSError(
            error.errno, f"records cannot be written there ({cause}); name another folder", str(path)
        ) from error
    with held(Path(f"{path}.lock"), LOCK_SECONDS):
        fd = _opened(path)
        try:
            size = os.fstat(fd).st_size
            # A killed writer can leave half a line, to which the next must not be appended.
            torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
            try:
                _write_all(fd, (b"\n" if torn else b"") + b"".join(lines))
                os.fsync(fd)
                if size == 0:
                    _sync_folder(path.parent)
            except BaseException as error:  # also Ctrl-C: the caller assumes that nothing was written
                undone = _truncate(fd, size)
                if isinstance(error, OSError):
                    cause = os.strerror(error.errno or errno.EIO)
                    message = f"{cause}: {len(lines)} record(s) were not written, and {undone}"
                    raise OSError(error.errno, message, str(path)) from error
                raise
        finally:
            os.close(fd)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)


def _write_all(fd: int, data: bytes) -> None:
    # In nearly all cases one write. On a full disk it is short, and the next one raises the error.
    while data:
        data = data[os.write(fd, data) :]


def _truncate(fd: int, size: int) -> str:
    """Undo a failed append, under the lock; returns a description of the file's state."""
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
