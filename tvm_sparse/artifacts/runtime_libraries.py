"""TVM's runtime libraries: 4 MB that kernels call, of the installed compiler or carried along with prebuilt kernels.

Beside the manifest of a folder of kernels may lie a folder `runtime` with the libraries, and a file `VERSION` that says
of which apache-tvm they are. With those nothing of apache-tvm has to be installed. The manifest has the sha256 of each
(`manifest.runtime`): they are read once, and the bytes that were compared are those that are loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from ..core import scratch
from . import trust
from .packages import kernel_packages

FOLDER, VERSION = "runtime", "VERSION"
LIBRARIES = {"llvm": ("libtvm_runtime.so",), "cuda": ("libtvm_runtime.so", "libtvm_runtime_cuda.so")}
_LICENCES = ("LICENSE", "NOTICE")
FILES = (*LIBRARIES["cuda"], *_LICENCES, VERSION)
MOST_BYTES = 1 << 30
_MOST_VERSION = 1000

# Reads a file of a folder, by its path there, of at most so many bytes.
Reader = Callable[[str, int], bytes]


@functools.cache
def compiler() -> Path | None:
    """The folder of the installed apache-tvm, found without importing it."""
    spec = importlib.util.find_spec("tvm")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if Path(place, "lib", LIBRARIES["llvm"][0]).exists():
            return Path(place)
    return None


def version(beside: Path | None = None) -> str | None:
    """Of which apache-tvm the libraries are that this process has: they load kernels of that version alone."""
    if compiler() is not None:
        return importlib.metadata.version("apache-tvm")
    found = _carried(VERSION, beside)
    # Whoever owns it: it is compared with what the manifest says, and no more.
    return trust.read(found, _MOST_VERSION, owned=False).decode(errors="replace").strip() if found else None


def load(name: str, beside: Path | None = None, signed: Reader | None = None) -> str | None:
    """Load one of the libraries, unless it is in the process already; its path, or None if there is none.

    `beside` is a folder of kernels that may carry it, and `signed` reads a file of it if the folder is signed: its
    error if the file is not the one that was signed.

    Raises
    ------
    OSError
        If what it is linked to is missing; as `trust.Refused` if it comes with kernels and is not trusted, or is not
        what their manifest describes.
    """
    try:
        ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
        return name
    except OSError:
        pass
    installed = compiler()
    path = _carried(name, beside) if installed is None else installed / "lib" / name
    if path is None or not path.exists():
        return None
    if installed is not None:
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return str(path)
    folder = path.parent.parent
    content = signed(f"{FOLDER}/{name}", MOST_BYTES) if signed and folder == beside else _described(folder, name)
    with trust.loadable(name, content) as place:
        ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
    return str(path)


def _described(folder: Path, name: str) -> bytes:
    """The library that comes with a folder of kernels, which its manifest describes."""
    from . import manifest  # which asks for the version of these libraries

    path = folder / FOLDER / name
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


def _carried(name: str, beside: Path | None) -> Path | None:
    folders = (*kernel_packages(), *([beside] if beside else []))
    return next((path for folder in folders if (path := folder / FOLDER / name).exists()), None)


def carry(folder: Path, kind: str) -> None:
    """Copy the libraries that kernels of a kind need from the installed compiler into a folder of kernels.

    Before its manifest is written, which describes them. A file that is there is replaced, and stays if it is the same:
    processes may have it mapped.
    """
    installed = compiler()
    if installed is None:
        raise FileNotFoundError("apache-tvm is not installed, whose runtime libraries are to be carried along")
    target = folder / FOLDER
    trust.make_folder(target, trust.SHARED)
    contents = {name: (installed / "lib" / name).read_bytes() for name in LIBRARIES[kind]}
    contents |= {name: (installed / name).read_bytes() for name in _LICENCES}
    contents[VERSION] = f"{version()}\n".encode()
    for name, content in contents.items():
        path = target / name
        if not (path.is_file() and path.read_bytes() == content):
            with scratch.written(path) as unfinished:
                unfinished.write_bytes(content)


def hashes(folder: Path) -> dict[str, str]:
    """The sha256 of each file that came with a folder of kernels from the compiler, by its name."""
    paths = (folder / FOLDER / name for name in FILES)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
