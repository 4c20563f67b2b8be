"""TVM's runtime libraries: 4 MB that kernels call, of the installed compiler or carried along with prebuilt kernels.

Beside the manifest of a folder of kernels may lie a folder `runtime` with the libraries, and a file `VERSION` that says
of which apache-tvm they are. With those nothing of apache-tvm has to be installed.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from . import trust
from .packages import kernel_packages

FOLDER, VERSION = "runtime", "VERSION"
LIBRARIES = {"llvm": ("libtvm_runtime.so",), "cuda": ("libtvm_runtime.so", "libtvm_runtime_cuda.so")}
_LICENCES = ("LICENSE", "NOTICE")
MOST_BYTES = 1 << 30

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
    return found.read_text().strip() if found else None


def load(name: str, beside: Path | None = None, signed: Reader | None = None) -> str | None:
    """Load one of the libraries, unless it is in the process already; its path, or None if there is none.

    `beside` is a folder of kernels that may carry it, and `signed` reads a file of it if the folder is signed: its
    error if the file is not the one that was signed.

    Raises
    ------
    OSError
        If what it is linked to is missing; as `trust.Refused` if it comes with kernels and is not trusted.
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
    if installed is None and signed is not None and beside is not None and path.is_relative_to(beside):
        with trust.loadable(name, signed(f"{FOLDER}/{name}", MOST_BYTES)) as place:
            ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
        return str(path)
    if installed is None:
        trust.check_file(path)
    ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    return str(path)


def _carried(name: str, beside: Path | None) -> Path | None:
    folders = (*kernel_packages(), *([beside] if beside else []))
    return next((path for folder in folders if (path := folder / FOLDER / name).exists()), None)


def carry(folder: Path, kind: str) -> None:
    """Copy the libraries that kernels of a kind need from the installed compiler into a folder of kernels."""
    installed = compiler()
    if installed is None:
        raise FileNotFoundError("apache-tvm is not installed, whose runtime libraries are to be carried along")
    target = folder / FOLDER
    trust.make_folder(target, trust.SHARED)
    for name in LIBRARIES[kind]:
        shutil.copyfile(installed / "lib" / name, target / name)
    for name in _LICENCES:
        shutil.copyfile(installed / name, target / name)
    (target / VERSION).write_text(f"{version()}\n")
