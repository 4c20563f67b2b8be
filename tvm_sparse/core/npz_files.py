"""Reading npz files that somebody else may have made: plain arrays, in about as much memory as a file has bytes."""

from __future__ import annotations

import io
import math
import zipfile
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import numpy as np

# Largest expansion of a file, as a multiple of its bytes, and a number of bytes that is always allowed.
MOST_EXPANSION, LEAST_EXPANDED = 16, 1 << 26
MOST_ARRAYS = 10_000


def read(file: BinaryIO) -> dict[str, np.ndarray]:
    """The arrays of an npz file, by name.

    Raises
    ------
    ValueError
        If they would take much more memory than the file has bytes, there are too many, or one is no plain array.
    Exception
        Others, for a file that is no such archive.
    """
    import numpy as np

    _check_expansion(file)
    with np.load(file, allow_pickle=False) as found:
        return {name: found[name] for name in found.files}


def _check_expansion(file: BinaryIO) -> None:
    """Raise if the arrays of the file would take much more memory than the file has bytes."""
    import numpy as np

    size = file.seek(0, io.SEEK_END)
    most = max(LEAST_EXPANDED, MOST_EXPANSION * size)
    with zipfile.ZipFile(file) as archive:
        entries = archive.infolist()
        if len(entries) > MOST_ARRAYS:
            raise ValueError(f"it holds {len(entries):,} arrays; expected at most {MOST_ARRAYS:,}")
        if (expanded := sum(entry.file_size for entry in entries)) > most:
            raise ValueError(f"its {size:,} bytes expand to {expanded:,}; expected at most {most:,}")
        for entry in entries:
            with archive.open(entry) as array:
                if np.lib.format.read_magic(array) != (1, 0):  # later versions are for long headers
                    raise ValueError(f"{entry.filename}: expected an array of version 1.0")
                shape, _, dtype = np.lib.format.read_array_header_1_0(array)
                if (claimed := math.prod(shape) * dtype.itemsize) > entry.file_size:
                    raise ValueError(f"{entry.filename}: claims {claimed:,} bytes of its {entry.file_size:,}")
    file.seek(0)
