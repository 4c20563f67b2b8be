"""TVM's runtime libraries: 4 MB that kernels call, from the installed compiler or shipped with prebuilt kernels.

A folder of kernels may have, beside its manifest, a folder `runtime` with the libraries and a file `VERSION` with their
apache-tvm version. Then apache-tvm need not be installed. The manifest has the sha256 of each (`manifest.runtime`),
which is checked when they are loaded (`runtime_loading`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

from ..core import scratch
from . import trust
from .packages import kernel_packages

FOLDER, VERSION = "runtime", "VERSION"
LIBRARIES = {"llvm": ("libtvm_runtime.so",), "cuda": ("libtvm_runtime.so", "libtvm_runtime_cuda.so")}
_LICENCES = ("LICENSE", "NOTICE")
FILES = (*LIBRARIES["cuda"], *_LICENCES, VERSION)
_MOST_VERSION = 1000


@functools.cache
def compiler() -> Path | None:
    """The folder of the installed apache-tvm, found without importing it."""
    spec = importlib.util.find_spec("tvm")
    for place in (spec.submodule_search_locations or []) if spec else []:
        if Path(place, "lib", LIBRARIES["llvm"][0]).exists():
            return Path(place)
    return None


def version(beside: Path | None = None) -> str | None:
    """The apache-tvm version of this process's runtime libraries, which load kernels of that version alone."""
    if compiler() is not None:
        return importlib.metadata.version("apache-tvm")
    found = carried(VERSION, beside)
    # Its owner does not matter: it is only compared with the manifest.
    return trust.read(found, _MOST_VERSION, owned=False).decode(errors="replace").strip() if found else None


def carried(name: str, beside: Path | None) -> Path | None:
    """Path of a file shipped with kernels: with an installed package of them, or in the folder `beside`; None if
    absent.
    """
    folders = (*kernel_packages(), *([beside] if beside else []))
    return next((path for folder in folders if (path := folder / FOLDER / name).exists()), None)


def carry(folder: Path, kind: str) -> None:
    """Copy the libraries that kernels of a kind need from the installed compiler into a folder of kernels.

    Call it before the manifest, which describes them, is written. Existing files are replaced only if they differ,
    since processes may have them mapped.
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
    """The sha256 of each runtime library in a folder of kernels, by its name."""
    paths = (folder / FOLDER / name for name in FILES)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
