"""Turns of test processes that share a GPU: those that need most of it have it alone."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def turn(folder: Path, alone: bool) -> Iterator[None]:
    """Wait until the GPU is free, and hold it, alone or beside others; `folder` is the same for all processes.

    While a process waits to have the GPU alone, later ones wait for that process, so that its turn does come.
    """
    with (folder / "door").open("a") as door, (folder / "gpu").open("a") as gpu:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(gpu, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


def once(folder: Path, make: Callable[[], None]) -> None:
    """Fill a cache that processes share: `make` runs in one of them first, alone, and then in the others, which find
    what it made.
    """
    if not (made := folder / "made").exists():
        with turn(folder, alone=True):
            if not made.exists():
                make()
                made.touch()
                return
    make()
