"""The user's cache: for each architecture a folder with the libraries that calls have compiled, and their manifest.

If several processes need the same library, one compiles it and the others wait; different libraries are compiled at the
same time. To this end a hash of each library's name selects one of `PARTS` parts. A process that builds libraries holds
the locks of their parts, builds in the folder of one of them, and then moves the libraries into the cache and writes
the manifest, under one lock for the whole cache. No process waits for a part while it holds that lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..artifacts import manifest, trust
from ..artifacts.manifest import Entry
from ..core import locking, scratch
from . import loading

PARTS = 64
# Seconds to wait for a lock whose holder needs milliseconds, and, beside a build's time limit, for one whose holder
# compiles one library.
LOCK_SECONDS = 60.0


@contextlib.contextmanager
def building(folder: Path, libraries: Iterable[str]) -> Iterator[Path]:
    """Keep other processes from building these libraries during the block; yields an empty folder to build them in.

    Raises
    ------
    LoadError
        If the cache is not trusted or cannot be written, or a lock cannot be taken in time.
    """
    parts = [_part(folder, number) for number in sorted({_number(name) for name in libraries})]
    with contextlib.ExitStack() as stack:
        with _explained(folder):
            for path in (folder, *parts):
                trust.make_folder(path)
                trust.check_folder(path)
            _hold(stack, folder, parts)
            for part in parts:
                _empty(part)  # only the lock's holder writes here: left by a killed process
        yield parts[0]


def add(folder: Path, built: Sequence[Entry], where: Path) -> None:
    """Move libraries that were built in the folder of `building` into the cache, and into its manifest.

    Raises
    ------
    LoadError
        If the cache cannot be written, or its lock cannot be taken in time.
    """
    with _explained(folder), locking.held(_lock(folder), LOCK_SECONDS):
        for entry in built:
            os.replace(where / entry.library, folder / entry.library)
        names = {entry.library for entry in built}
        with contextlib.suppress(manifest.ManifestError):  # an unreadable one is started anew
            built = [*(entry for entry in manifest.read(folder) if entry.library not in names), *built]
        manifest.write(folder, built)


def clean(folder: Path) -> None:
    """Wait until no process compiles, and remove everything but the locks.

    Raises
    ------
    LockTimeout
        If a lock cannot be taken in time.
    """
    with contextlib.ExitStack() as stack:
        parts = [part for part in (_part(folder, number) for number in range(PARTS)) if part.is_dir()]
        _hold(stack, folder, parts)
        stack.enter_context(locking.held(_lock(folder), LOCK_SECONDS))
        for path in (*parts, folder):
            _empty(path)


def _hold(stack: contextlib.ExitStack, folder: Path, parts: Sequence[Path]) -> None:
    """Take the locks of some parts in ascending order, the same in all processes, so that no two wait for
    each other.
    """

    from ..workers.building import BUILD_TIMEOUT

    def progress() -> list[Any]:
        """A value that changes with each library that the holder compiles into the folder of one of the parts."""
        return [locking.stamp(_part(folder, number)) for number in range(PARTS)]

    for part in parts:
        stack.enter_context(locking.held(_lock(part), BUILD_TIMEOUT + LOCK_SECONDS, progress))


def _number(library: str) -> int:
    """Number of the part that a library belongs to."""
    return int.from_bytes(hashlib.sha256(library.encode()).digest()[:4]) % PARTS


def _part(folder: Path, number: int) -> Path:
    return folder / ".parts" / f"{number:02}"


def _lock(folder: Path) -> Path:
    return folder / ".lock"


def _empty(folder: Path) -> None:
    """Remove the files of a folder except its lock, and temporary files of killed processes."""
    scratch.sweep(folder)
    for path in folder.iterdir():
        if path.is_file() and path != _lock(folder):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Raise whatever prevents writing to the cache as a `LoadError`."""
    try:
        yield
    except (trust.Refused, locking.LockTimeout) as error:
        raise loading.LoadError(str(error)) from error
    except OSError as error:
        raise loading.LoadError(
            f"the kernel has to be compiled, and the user's cache {folder} cannot be written:"
            f" {error.strerror or error}; name another folder by XDG_CACHE_HOME, or load kernels that were exported"
        ) from error
