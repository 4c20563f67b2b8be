"""Files that decide which code runs: whose they are, who else may change them, and what they hold, read once.

A folder or file is trusted if it belongs to this user or to root, and nobody else may write to it. So is what lies
beside this package's own code, whoever installed both, and what the environment variable TVM_SPARSE_TRUST names:
folders, separated by colons.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from ..core import scratch
from .packages import kernel_packages

# The environment variable with folders that are trusted whoever owns them.
TRUST = "TVM_SPARSE_TRUST"
PRIVATE, SHARED = 0o700, 0o755  # of folders: for this user alone, and for others to read


class Refused(PermissionError):
    """A file that is not trusted, or is none; the message names it, why, and what to do."""


def make_folder(path: Path, mode: int = PRIVATE) -> None:
    """Make a folder and those above it that are missing, with this mode whatever the umask is."""
    for folder in reversed([one for one in (path, *path.parents) if not one.exists()]):
        try:
            folder.mkdir(mode)
        except FileExistsError:  # another process was faster, with the same mode
            continue
        folder.chmod(mode)
    path.mkdir(exist_ok=True)  # raises if something else is in its place


def check_folder(path: Path) -> None:
    """Raise `Refused` unless a folder is trusted."""
    _check(path, path.stat())


def check_file(path: Path) -> None:
    """Raise `Refused` unless a file and its folder are trusted."""
    check_folder(path.parent)
    _check(path, path.stat())


def read(path: Path, most: int, *, owned: bool = True) -> bytes:
    """The content of a trusted plain file of at most `most` bytes, in a trusted folder.

    With `owned=False` whoever it belongs to: for bytes that are compared with a signature before they are believed.

    Raises
    ------
    Refused
        If it is not trusted, not a plain file, or larger.
    OSError
        If it cannot be read.
    """
    if owned:
        check_folder(path.parent)
    # Without waiting: a pipe without a writer would keep this process.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as opened:
        found = os.fstat(file)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(f"{path}: is a directory")
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{path}: is not a plain file")
        if found.st_size > most:
            raise Refused(f"{path}: has {found.st_size} bytes; expected at most {most}")
        if owned:
            _check(path, found)
        return opened.read(most)


@contextlib.contextmanager
def loadable(name: str, content: bytes) -> Iterator[str]:
    """Bytes under a path from which the dynamic loader takes a library: what was checked is what is loaded."""
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # not Linux, or not allowed there
        with scratch.folder() as private:
            copy = private / name
            copy.write_bytes(content)
            yield str(copy)
        return
    with os.fdopen(os.dup(file), "wb") as writable:
        writable.write(content)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    # The descriptor stays open with the library: the loader knows libraries by their names, and must not take the next
    # one that gets this number for this one.
    yield f"/proc/self/fd/{file}"


def _check(path: Path, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        reason = f"belongs to user {found.st_uid}"
    elif found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and not _own_group(found.st_gid)):
        reason = f"may be written by others (mode {stat.S_IMODE(found.st_mode):o}; chmod go-w takes that away)"
    else:
        return
    whole = path.resolve()
    if any(whole.is_relative_to(folder) for folder in (*_code(), *_named())):
        return
    raise Refused(f"{path}: {reason}, and what lies there is run as code; if you trust it, name its folder in {TRUST}")


@functools.cache
def _own_group(group: int) -> bool:
    """Whether a group is the user's private one, as many systems make for each: named like the user, of nobody else."""
    import grp
    import pwd

    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:
        return False
    return user.pw_gid == group and found.gr_name == user.pw_name and set(found.gr_mem) <= {user.pw_name}


def _code() -> tuple[Path, ...]:
    """Folders of this package's code, and of packages of kernels that were installed as it was."""
    return (Path(__file__).resolve().parents[1], *(folder.resolve() for folder in kernel_packages()))


def _named() -> list[Path]:
    return [Path(name).resolve() for name in os.environ.get(TRUST, "").split(os.pathsep) if name]
