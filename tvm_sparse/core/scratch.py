"""Temporary folders that do not outlive their process for long: what a killed one has left, the next one removes.

A folder is held by a lock on itself, which the kernel lets go when the process ends, however it ends. So neither a
process id that was given out again nor another container's with the same temporary folder is mistaken for a dead one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

PREFIX = "tvm_sparse_scratch-"
# A folder is locked a moment after it was made: one as young as this is left alone.
YOUNG_SECONDS = 60.0


class Scratch:
    """A temporary folder of this process, mode 0700, until `close` or the end of the process."""

    def __init__(self) -> None:
        _sweep_once()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_EX)
        self._remove = weakref.finalize(self, _remove, self.path, held, os.getpid())

    def close(self) -> None:
        """Remove the folder and all that is in it. May be called again."""
        self._remove()


def _remove(path: Path, held: int, owner: int) -> None:
    if os.getpid() == owner:  # a process that was forked from it has the folder in common
        shutil.rmtree(path, ignore_errors=True)
    os.close(held)


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """A temporary folder for the time of the block."""
    scratch = Scratch()
    try:
        yield scratch.path
    finally:
        scratch.close()


def sweep() -> list[Path]:
    """Remove the folders that dead processes of this user have left; returns which."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            found = path.lstat()
            if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
                continue
            if time.time() - found.st_mtime < YOUNG_SECONDS:
                continue
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:  # it has gone, or cannot be looked at
            continue
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path)
        except BlockingIOError:  # its process lives
            pass
        finally:
            os.close(held)
    return removed


@functools.cache
def _sweep_once() -> None:
    sweep()
