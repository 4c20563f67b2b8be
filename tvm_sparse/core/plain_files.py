"""Opening files that somebody else may have made without blocking: plain files only, up to a given size."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotPlain(OSError):
    """The path holds no plain file, or one that is too large; the message names it and the limit."""


def opened(path: Path, most: int) -> BinaryIO:
    """Open a plain file of at most `most` bytes for reading.

    Raises
    ------
    NotPlain
        If it is another kind of file (a pipe, a device), or larger.
    OSError
        If it cannot be opened, or is a folder.
    """
    # Non-blocking: opening a pipe without a writer would block this process.
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        found = os.fstat(number)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(f"{path}: is a directory")
        if not stat.S_ISREG(found.st_mode):
            raise NotPlain(f"{path}: is not a plain file")
        if found.st_size > most:
            raise NotPlain(f"{path}: has {found.st_size} bytes; expected at most {most}")
    except BaseException:
        os.close(number)
        raise
    return os.fdopen(number, "rb")
