"""Temporary folders that do not outlive their process, however it ends, nor do the processes that work in them.

All temporary files of this package lie in such a folder: in the temporary folder of the system, or beside the file that
it becomes (`written`). A folder is held by a lock on itself, which the kernel releases when its process ends. So a
reused process id, or a process of another container with the same temporary folder, is not mistaken for a dead one.
Folders that nobody holds are removed (`sweep`): by a small process that waits for the end of this one, or, where that
was killed as well, by the next process that needs such a folder.

This file is that small process, too: `python -I -S scratch.py`. It imports the standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

PREFIX = "tvm_sparse_scratch-"
# Names of a folder beside the file that it is for, and of plain files that earlier versions of this package left.
UNFINISHED = "unfinished-"
# How long a folder counts as held where the file system has no locks on folders (NFS).
UNLOCKED_SECONDS = 3600.0
# How long to wait for killed processes, and for what they were writing, to disappear.
_END_SECONDS = 5.0
_LOOK_SECONDS = 0.02
# Delay until the process that waits for the end of this one looks a second time for leftovers.
_LATER_SECONDS = (0.1, 1.0, 0.0)


class Scratch:
    """A temporary folder of this process, mode 0700, until `close` or the end of the process.

    Parameters
    ----------
    within
        The parent folder; leftovers of dead processes in it are removed now. Default: the system's temporary folder.
    """

    def __init__(self, within: Path | None = None) -> None:
        if within is None:
            _watch()
        else:
            sweep(within)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX if within is None else UNFINISHED, dir=within))
            try:
                held = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # it was swept before it was locked
            with contextlib.suppress(OSError):  # a file system without such locks
                fcntl.flock(held, fcntl.LOCK_EX)
            if _is_at(self.path, held):
                break
            os.close(held)
        self._processes: list[int] = []
        self._remove = weakref.finalize(self, _remove, self.path, held, os.getpid(), self._processes)

    def lend(self, process: int) -> None:
        """Give the folder to a child process as its TMPDIR: with the folder that process and all its
        descendants end.
        """
        self._processes.append(process)

    def close(self) -> None:
        """End the processes that have the folder, and remove it with all that is in it. May be called again."""
        self._remove()


def _remove(path: Path, held: int, owner: int, processes: list[int]) -> None:
    if os.getpid() == owner:  # a forked process shares the folder, but does not own it
        if processes:
            end_processes(path, processes)
        _clear(path)
    os.close(held)


def _clear(path: Path) -> None:
    """Remove a folder, including files that processes just killed may still be writing."""
    until = time.monotonic() + _END_SECONDS
    while path.exists():
        shutil.rmtree(path, ignore_errors=True)
        if time.monotonic() > until:
            return
        if path.exists():
            time.sleep(_LOOK_SECONDS)


@contextlib.contextmanager
def folder(within: Path | None = None) -> Iterator[Path]:
    """A temporary folder for the time of the block."""
    scratch = Scratch(within)
    try:
        yield scratch.path
    finally:
        scratch.close()


@contextlib.contextmanager
def written(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """A temporary path for a new file, which replaces `path`, with this mode, once the block has ended without an
    error. If the block writes no file, `path` stays as it is.

    A process that has the old file open or mapped keeps it: the file is replaced, never overwritten.
    """
    with folder(path.parent) as place:
        unfinished = place / path.name
        yield unfinished
        if unfinished.exists():
            unfinished.chmod(mode)
            os.replace(unfinished, path)


def sweep(within: Path | None = None) -> list[Path]:
    """Remove all scratch folders below `within`, by default the system's temporary folder, that no process of this user
    holds.

    Processes that work in them are killed. Returns the removed paths.
    """
    place, prefix = (Path(tempfile.gettempdir()), PREFIX) if within is None else (within, UNFINISHED)
    removed = []
    for path in sorted(place.glob(f"{prefix}*")):
        try:
            found = path.lstat()
            if found.st_uid != os.geteuid():
                continue
            if stat.S_ISDIR(found.st_mode):
                if not _sweep_folder(path):
                    continue
            elif within is not None and path.suffix == ".so" and stat.S_ISREG(found.st_mode):
                path.unlink()
            else:
                continue
        except OSError:  # it has gone, or cannot be looked at
            continue
        removed.append(path)
    return removed


def _sweep_folder(path: Path) -> bool:
    """Remove a folder and end its processes, unless its owner lives; returns whether it was removed."""
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            if time.time() - os.fstat(held).st_mtime < UNLOCKED_SECONDS:
                return False
        if not _is_at(path, held):
            return False
        end_processes(path)
        _clear(path)
        return True
    finally:
        os.close(held)


def _is_at(path: Path, held: int) -> bool:
    """Whether an open folder is still the one at a path."""
    try:
        return os.path.samestat(path.stat(), os.fstat(held))
    except FileNotFoundError:
        return False


# ---- processes -----------------------------------------------------------------------------------


def end_processes(place: Path, of: Iterable[int] = ()) -> None:
    """Kill the processes that use a folder, whatever their group and session, and wait until they are gone.

    Parameters
    ----------
    place
        The folder: it is used by all processes with this value of TMPDIR, which processes inherit.
    of
        Child processes of this one that use it. While they live they adopt descendants whose parents have ended
        (`workers.serving`).
    """
    if not os.path.isdir("/proc/self"):  # not Linux
        return
    own = os.getpid()

    def all_of_them() -> set[int]:
        # The id of a process that is no longer a child may have been reused.
        trees = [descendants(one) | {one} for one in of if (status := _status(one)) and int(status[1]) == own]
        return _working_in(place).union(*trees) - {own}

    # Stop all first, so that none starts another one while the list is made.
    stopped: set[int] = set()
    while new := all_of_them() - stopped:
        for process in new:
            _send(process, signal.SIGSTOP)
        stopped |= new
    until = time.monotonic() + _END_SECONDS
    while left := {process for process in stopped if _is_alive(process)}:
        for process in left:
            _send(process, signal.SIGKILL)
        if time.monotonic() > until:
            return
        time.sleep(_LOOK_SECONDS / 10)


def descendants(process: int) -> set[int]:
    """Ids of the processes started by a process, by those, and so on."""
    children: dict[int, list[int]] = {}
    for number in _processes():
        if (status := _status(number)) is not None:
            children.setdefault(int(status[1]), []).append(number)
    found: set[int] = set()
    waiting = [process]
    while waiting:
        new = [number for number in children.get(waiting.pop(), ()) if number not in found]
        found.update(new)
        waiting += new
    return found


def _working_in(place: Path) -> set[int]:
    """Ids of the processes whose TMPDIR is this folder."""
    wanted, found = f"TMPDIR={place}".encode(), set()
    for number in _processes():
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if wanted in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
                found.add(number)
    return found


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _status(process: int) -> list[str] | None:
    """The fields of `/proc/PID/stat` from the state on; None if the process has ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def _is_alive(process: int) -> bool:
    status = _status(process)
    return status is not None and status[0] not in "ZX"


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


# ---- the end of this process ---------------------------------------------------------------------


def _watch() -> None:
    """Make sure that folders left by processes are removed: those of dead processes now, those of this one
    at its end.
    """
    place = tempfile.gettempdir()
    if not Path(place).name.startswith(PREFIX):  # a worker's folder is removed as a whole
        _watcher(place, os.getpid())


@functools.cache
def _watcher(place: str, process: int) -> None:
    """Sweep the temporary folder, and start the process that sweeps it again when this one has ended.

    It reads a pipe whose other end stays open as long as this process and processes forked from it live.
    """
    sweep()
    reader, writer = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", __file__, str(process)],
            os.environ | {"TMPDIR": place},
            file_actions=[
                (os.POSIX_SPAWN_DUP2, reader, 0),
                (os.POSIX_SPAWN_DUP2, nothing, 1),
                (os.POSIX_SPAWN_DUP2, nothing, 2),
            ],
            setpgroup=0,
        )
    except OSError:  # then the next process sweeps
        os.close(writer)
    finally:
        os.close(reader)
        os.close(nothing)


def _main(parent: int) -> None:
    """Wait until a process and those forked from it have ended, and remove what they left."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # signals are meant for the watched process: it ends first
    os.chdir("/")
    while os.read(0, 1 << 16):
        pass
    # An ending process closes its files one by one: the pipe, and then the folders that it holds. When this process has
    # another parent, that is done; for a process forked from the parent there is no such sign.
    until = time.monotonic() + _END_SECONDS
    while os.getppid() == parent and time.monotonic() < until:
        time.sleep(_LOOK_SECONDS)
    for pause in _LATER_SECONDS:
        sweep()
        time.sleep(pause)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
