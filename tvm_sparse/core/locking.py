"""Locks between processes, with a time limit."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# How long to wait for a lock whose holder is stopped, as by a debugger's breakpoint or Ctrl-Z.
STOPPED_SECONDS = 10.0
_LOOK_SECONDS = 0.5


class LockTimeout(TimeoutError):
    """A lock could not be taken in time; the message names it, and its holder where that is known."""


@contextlib.contextmanager
def held(path: Path, seconds: float, progress: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """Hold the lock of a file for the time of the block.

    Parameters
    ----------
    seconds
        How long to wait while the value of `progress` does not change. A change shows that the holder is working.

    Raises
    ------
    LockTimeout
        If its holder took longer, or is stopped.
    OSError
        If the file cannot be opened.
    """
    import filelock

    lock = filelock.FileLock(path)
    last, since = progress(), time.monotonic()
    stopped_since: float | None = None
    while True:
        try:
            lock.acquire(timeout=_LOOK_SECONDS)
            break
        except filelock.Timeout:
            now = time.monotonic()
            if (state := progress()) != last:
                last, since = state, now
            holder = _holder(path)
            stopped = holder is not None and _is_stopped(holder)
            stopped_since = (stopped_since or now) if stopped else None
            if stopped_since is not None and now - stopped_since >= STOPPED_SECONDS:
                raise LockTimeout(
                    f"{path}: process {holder} holds this lock and is stopped; continue it (kill -CONT {holder}) or end"
                    " it"
                ) from None
            if now - since >= seconds:
                who = "another process" if holder is None else f"process {holder}"
                raise LockTimeout(f"{path}: {who} has held this lock for {seconds:.0f} s; end it, or wait") from None
    try:
        yield
    finally:
        lock.release()


# `struct flock` of 64-bit Linux: type, whence, start, length, and a process id that is 0 for locks of open files.
_FLOCK = "hhqqi0q"


class Claims:
    """Claims on named things, so that holders in this process and others do not work on the same one.

    A claim is a lock of one byte of a file at an offset that is a hash of the thing's name. The kernel releases it when
    the holder's process ends, however it ends, so nothing has to be cleaned up. Where such locks do not exist (systems
    other than Linux, some network file systems) every claim is granted.

    Raises
    ------
    OSError
        If the file cannot be opened for writing.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def take(self, name: str) -> bool:
        """Claim a thing; False if another holder has it. Claiming it a second time changes nothing."""
        try:
            self._set(name, fcntl.F_WRLCK)
        except OSError as error:
            return error.errno not in (errno.EAGAIN, errno.EACCES)
        return True

    def release(self, name: str) -> None:
        """Release the claim on a thing."""
        with contextlib.suppress(OSError):
            self._set(name, fcntl.F_UNLCK)

    def close(self) -> None:
        """Release all claims. May be called again."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def _set(self, name: str, kind: int) -> None:
        if not hasattr(fcntl, "F_OFD_SETLK"):
            return
        place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) >> 2  # offsets are signed
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, place, 1, 0))


def stamp(path: Path) -> tuple[int, int, int] | None:
    """A value that changes when a file is rewritten or a folder gets another file; None if the path does not exist."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _holder(path: Path) -> int | None:
    """The id of the process that holds a file's lock, from the kernel; None if it runs on another machine or is not
    known.
    """
    try:
        found = path.stat()
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in lines:
        words = line.split()
        if "->" not in words and place in words:
            return int(words[4]) if int(words[4]) > 0 else None
    return None


def _is_stopped(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except (OSError, IndexError):
        return False
