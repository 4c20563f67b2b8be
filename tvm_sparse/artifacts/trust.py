"""Files that decide which code runs: checks of their owners and writers, and reading them once.

A folder or file is trusted if it belongs to this user or to root, and nobody else may write to it: by its mode, and by
its POSIX access control list, which may name users and groups. A group may have write access if its only members are
this user and root. If that cannot be determined, the file is not trusted.

Files beside this package's own code are trusted too, whoever installed both, as are folders in the environment variable
TVM_SPARSE_TRUST, separated by colons.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import grp
import itertools
import os
import pwd
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from ..core import plain_files, scratch
from .packages import kernel_packages

# The environment variable with folders that are trusted whoever owns them.
TRUST = "TVM_SPARSE_TRUST"
PRIVATE, SHARED = 0o700, 0o755  # modes of folders: for this user alone, and readable by others
# Extended attributes that hold access control lists: POSIX's (version, then tag, permissions and id of each entry),
# which most file systems have, and NFS 4's, which have other rules.
_ACL, _NFS_ACL = "system.posix_acl_access", "system.nfs4_acl"
_ACL_HEAD, _ACL_VERSION, _ACL_ENTRY = struct.Struct("<I"), 2, struct.Struct("<HHI")
_OWNER, _USER, _OWNING_GROUP, _GROUP, _MASK, _OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_MAY_WRITE = 0o2
# Numbers of loaded libraries.
_LOADED = itertools.count(1)


class Refused(PermissionError):
    """A file that is missing or not trusted; the message names it, the reason and what to do."""


def make_folder(path: Path, mode: int = PRIVATE) -> None:
    """Make a folder and its missing parents with this mode, whatever the umask is."""
    for folder in reversed([one for one in (path, *path.parents) if not one.exists()]):
        try:
            folder.mkdir(mode)
        except FileExistsError:  # another process made it, with the same mode
            continue
        folder.chmod(mode)
    path.mkdir(exist_ok=True)  # raises if it is not a folder


def check_folder(path: Path) -> None:
    """Raise `Refused` unless a folder is trusted."""
    _check(path, path.stat(), path)


def check_file(path: Path) -> None:
    """Raise `Refused` unless a file and its folder are trusted."""
    check_folder(path.parent)
    _check(path, path.stat(), path)


def read(path: Path, most: int, *, owned: bool = True) -> bytes:
    """Read a trusted plain file of at most `most` bytes in a trusted folder.

    With `owned=False` the owner is not checked, for bytes that are then compared with a signature.

    Raises
    ------
    Refused
        If it is not trusted, is not a plain file, or is larger.
    OSError
        If it cannot be read.
    """
    if owned:
        check_folder(path.parent)
    try:
        file = plain_files.opened(path, most)
    except plain_files.NotPlain as error:
        raise Refused(str(error)) from None
    with file:
        if owned:
            _check(path, os.fstat(file.fileno()), file.fileno())
        return file.read(most)


@contextlib.contextmanager
def loadable(name: str, content: bytes) -> Iterator[str]:
    """A path from which the dynamic loader loads exactly these bytes, which have been checked."""
    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError):  # not Linux, or not permitted
        with scratch.folder() as private:
            copy = private / name
            copy.write_bytes(content)
            yield str(copy)
        return
    with os.fdopen(os.dup(file), "wb") as writable:
        writable.write(content)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    # Other processes of this user can open this one's descriptors: from here on nobody can change these bytes.
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    try:
        # The loader identifies libraries by name, and the number of a closed descriptor is given again: so each name is
        # spelt in a way of its own, by the digits of a number.
        spelling = "".join("./" if digit == "0" else ".//" for digit in f"{next(_LOADED):b}")
        yield f"/proc/self/fd/{spelling}{file}"
    finally:
        os.close(file)


def _check(path: Path, found: os.stat_result, opened: int | Path) -> None:
    """Raise `Refused` unless a file with this status is trusted; `opened` is where its access control list is read."""
    if found.st_uid not in (0, os.geteuid()):
        reason = f"belongs to user {found.st_uid}"
    elif writers := _others_who_write(found, opened):
        mode = f"{stat.S_IMODE(found.st_mode):o}"
        reason = f"may be written by others: {writers} (mode {mode}; chmod go-w takes that away)"
    else:
        return
    whole = path.resolve()
    if any(whole.is_relative_to(folder) for folder in (*_code(), *_named())):
        return
    raise Refused(f"{path}: {reason}, and what lies there is run as code; if you trust it, name its folder in {TRUST}")


def _others_who_write(found: os.stat_result, opened: int | Path) -> str:
    """Who besides this user and root may write to a file, in words; empty if nobody."""
    if found.st_mode & stat.S_IWOTH:
        return "everybody"
    # With an access control list these bits are its mask, the upper bound of all its permissions.
    if not found.st_mode & stat.S_IWGRP:
        return ""
    entries = _access_list(opened)
    if entries is None:
        return "whom its access control list names, which cannot be read here"
    for tag, permissions, number in entries or [(_OWNING_GROUP, _MAY_WRITE, 0)]:
        if not permissions & _MAY_WRITE:
            continue
        if tag == _USER and number not in (0, os.geteuid()):
            return f"user {number}, whom its access control list names"
        if tag == _GROUP and not _own_group(number):
            return f"group {number}, which its access control list names"
        if tag == _OWNING_GROUP and not _own_group(found.st_gid):
            return f"group {found.st_gid}"
    return ""


def _access_list(opened: int | Path) -> list[tuple[int, int, int]] | None:
    """The entries (tag, permissions, id) of a file's access control list; None if they cannot be determined.

    A file without a list, or on a file system without such lists, has no entries.
    """
    if not hasattr(os, "getxattr"):  # not Linux
        return None
    absent = (errno.ENODATA, errno.EOPNOTSUPP)
    try:
        content = os.getxattr(opened, _ACL)
    except OSError as error:
        if error.errno not in absent:
            return None
        try:
            os.getxattr(opened, _NFS_ACL)
        except OSError as other:
            return [] if other.errno in absent else None
        return None
    body = content[_ACL_HEAD.size :]
    if content[: _ACL_HEAD.size] != _ACL_HEAD.pack(_ACL_VERSION) or len(body) % _ACL_ENTRY.size:
        return None
    entries = list(_ACL_ENTRY.iter_unpack(body))
    known = (_OWNER, _USER, _OWNING_GROUP, _GROUP, _MASK, _OTHERS)
    return entries if entries and all(tag in known for tag, _, _ in entries) else None


@functools.cache
def _own_group(group: int) -> bool:
    """Whether a group is the user's private one, as many systems create for each user: it has the user's name, and no
    other members but root.

    Its members are those in its list, and the users whose primary group it is, found by listing all users. A directory
    service may hide users from that list; if it lacks this user, the answer is no.
    """
    try:
        user, found = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
        listed = [pwd.getpwnam(name) for name in found.gr_mem]
        everybody = pwd.getpwall()
    except KeyError:  # also for an unknown member: anybody could get that name
        return False
    members = {one.pw_uid for one in (*listed, *(one for one in everybody if one.pw_gid == group))}
    is_private = user.pw_gid == group and found.gr_name == user.pw_name
    return is_private and user.pw_uid in {one.pw_uid for one in everybody} and members <= {0, user.pw_uid}


def _code() -> tuple[Path, ...]:
    """Folders of this package's code, and of packages of kernels that are installed beside it."""
    return (Path(__file__).resolve().parents[1], *(folder.resolve() for folder in kernel_packages()))


def _named() -> list[Path]:
    return [Path(name).resolve() for name in os.environ.get(TRUST, "").split(os.pathsep) if name]
