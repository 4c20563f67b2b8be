"""The user's cache: a folder for each architecture, of the libraries that calls have compiled and their manifest.

Processes that need the same library wait for each other, and one of them compiles it; others compile side by side. For
that, every library's name gives it one of `PARTS` parts. Whoever builds libraries holds the locks of their parts, and
builds in the folder of one of these; then moves them into the cache and writes the manifest, under a lock of all.
Nobody waits for a part while holding that one.
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
# How long whoever holds a lock may take for what takes milliseconds; for one library, beside a build worker's limit.
LOCK_SECONDS = 60.0


@contextlib.contextmanager
def building(folder: Path, libraries: Iterable[str]) -> Iterator[Path]:
    """For the time of the block nobody else builds these libraries: an empty folder to build them in.

    Raises
    ------
    LoadError
        If the cache is not trusted or cannot be written, or a lock is not to be had.
    """
    parts = [_part(folder, number) for number in sorted({_number(name) for name in libraries})]
    with contextlib.ExitStack() as stack:
        with _explained(folder):
            for path in (folder, *parts):
                trust.make_folder(path)
                trust.check_folder(path)
            _hold(stack, folder, parts)
            for part in parts:
                _empty(part)  # nobody writes here but who holds the lock: a killed process's
        yield parts[0]


def add(folder: Path, built: Sequence[Entry], where: Path) -> None:
    """Move libraries that were built in the folder of `building` into the cache, and into its manifest.

    Raises
    ------
    LoadError
        If the cache cannot be written, or its lock is not to be had.
    """
    with _explained(folder), locking.held(_lock(folder), LOCK_SECONDS):
        for entry in built:
            os.replace(where / entry.library, folder / entry.library)
        names = {entry.library for entry in built}
        with contextlib.suppress(manifest.ManifestError):  # one that cannot be read is begun anew
            built = [*(entry for entry in manifest.read(folder) if entry.library not in names), *built]
        manifest.write(folder, built)


def clean(folder: Path) -> None:
    """Remove everything but the locks, once nobody compiles.

    Raises
    ------
    LockTimeout
        If a lock is not to be had.
    """
    with contextlib.ExitStack() as stack:
        parts = [part for part in (_part(folder, number) for number in range(PARTS)) if part.is_dir()]
        _hold(stack, folder, parts)
        stack.enter_context(locking.held(_lock(folder), LOCK_SECONDS))
        for path in (*parts, folder):
            _empty(path)


def _hold(stack: contextlib.ExitStack, folder: Path, parts: Sequence[Path]) -> None:
    """The locks of some parts, in their order, which is one for all: no two processes wait for each other."""

    from ..workers.building import BUILD_TIMEOUT

    def progress() -> list[Any]:
        """Whoever holds them compiles: each library is a change of the folder of one of them."""
        return [locking.stamp(_part(folder, number)) for number in range(PARTS)]

    for part in parts:
        stack.enter_context(locking.held(_lock(part), BUILD_TIMEOUT + LOCK_SECONDS, progress))


def _number(library: str) -> int:
    """Of the part that a library belongs to."""
    return int.from_bytes(hashlib.sha256(library.encode()).digest()[:4]) % PARTS


def _part(folder: Path, number: int) -> Path:
    return folder / ".parts" / f"{number:02}"


def _lock(folder: Path) -> Path:
    return folder / ".lock"


def _empty(folder: Path) -> None:
    """Remove the files of a folder, but for its lock, and what killed processes were writing there."""
    scratch.sweep(folder)
    for path in folder.iterdir():
        if path.is_file() and path != _lock(folder):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """What keeps a process from writing into the cache, as the error of a call."""
    try:
        yield
    except (trust.Refused, locking.LockTimeout) as error:
        raise loading.LoadError(str(error)) from error
    except OSError as error:
        raise loading.LoadError(
            f"the kernel has to be compiled, and the user's cache {folder} cannot be written:"
            f" {error.strerror or error}; name another folder by XDG_CACHE_HOME, or load kernels that were exported"
        ) from error
