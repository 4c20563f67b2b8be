"""Files that somebody else may have made, opened without being kept: plain ones alone, of a bounded size."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotPlain(OSError):
    """What is at a path is no plain file, or one that is too large; the message names it and the bound."""


def opened(path: Path, most: int) -> BinaryIO:
    """A plain file of at most `most` bytes, opened for reading.

    Raises
    ------
    NotPlain
        If it is another kind of file (a pipe, a device), or larger.
    OSError
        If it cannot be opened, or is a folder.
    """
    # Without waiting: a pipe without a writer would keep this process.
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
