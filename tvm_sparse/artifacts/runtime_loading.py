"""Loading TVM's runtime libraries into this process, from the installed compiler or from a folder of kernels.

The latter are read once and compared with the manifest of their folder, or with its signature. Exactly the checked
bytes are loaded, so later changes of the file have no effect.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from . import manifest, runtime_libraries, trust

MOST_BYTES = 1 << 30

# Reads a file of a folder, by its path there, up to a maximal number of bytes.
Reader = Callable[[str, int], bytes]


def load(name: str, beside: Path | None = None, signed: Reader | None = None) -> str | None:
    """Load one of the libraries unless the process has it; returns its path, or None if there is none.

    `beside` is a folder of kernels that may contain it. If that is signed, `signed` reads its files, and raises for a
    file that differs from the signed one.

    Raises
    ------
    OSError
        If a library that it is linked to is missing. `trust.Refused` if it comes with kernels and is not trusted, or
        differs from their manifest.
    """
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        return name
    except OSError:
        pass
    installed = runtime_libraries.compiler()
    path = runtime_libraries.carried(name, beside) if installed is None else installed / "lib" / name
    if path is None or not path.exists():
        return None
    if installed is not None:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return str(path)
    folder = path.parent.parent
    content = (
        signed(f"{runtime_libraries.FOLDER}/{name}", MOST_BYTES)
        if signed and folder == beside
        else _described(folder, name)
    )
    with trust.loadable(name, content) as place:
        ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
    return str(path)


def _described(folder: Path, name: str) -> bytes:
    """The bytes of a library in a folder of kernels, checked against the manifest."""
    path = folder / runtime_libraries.FOLDER / name
    try:
        expected = manifest.runtime(folder).get(name)
    except manifest.ManifestError as error:
        raise trust.Refused(str(error)) from None
    content = trust.read(path, MOST_BYTES)
    if hashlib.sha256(content).hexdigest() != expected:
        raise trust.Refused(
            f"{path}: the file is not the one that {folder / manifest.NAME} describes (sha256 differs); export the"
            " kernels again"
        )
    return content
