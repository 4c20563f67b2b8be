"""Folders of kernels as a repository of Hugging Face's `kernels` library: `build/<variant>/`, with digests.

    build/tvm-ffi01-cu130-x86_64-linux/     or ...-cpu-...: of all GPUs, or CPUs, the kernels lie in one folder
        __init__.py       loads the folder into tvm_sparse and shows the functions that the kernels are of
        metadata.json     name, version, architectures, and the SHA-256 of every other file
        manifest.json     as `export` writes it, with libraries and TVM's runtime libraries beside it

The package tvm_sparse must be installed, since it checks arguments and looks kernels up, but not the compiler.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import json
import platform
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..artifacts import manifest, runtime_libraries, signing, trust
from ..artifacts.cuda.toolchain import CUDA_MAJOR
from ..artifacts.manifest import Entry
from ..core import registry
from ..core.registry import parse

NAME = "tvm-sparse"
METADATA = "metadata.json"
_MODULE = "__init__.py"

_INIT = '''"""Kernels of tvm_sparse built ahead for {archs}."""

from pathlib import Path

try:
    import tvm_sparse
except ImportError as error:
    raise ImportError("these kernels are called through the package tvm_sparse, version {version}") from error

tvm_sparse.load(str(Path(__file__).parent))

{imports}
'''


def variant(kind: str) -> str:
    """The name of the folder for kernels of a kind, "llvm" or "cuda", in the `kernels` library's notation."""
    major, minor = importlib.metadata.version("apache-tvm-ffi").split(".")[:2]
    backend = f"cu{CUDA_MAJOR}0" if kind == "cuda" else "cpu"
    return f"tvm-ffi{major}{minor}-{backend}-{platform.machine()}-linux"


def arrange(folders: Sequence[Path], output: Path, version: int = 1, key: Any = None) -> list[Path]:
    """Arrange folders of kernels, written by `export` or `prebuild`, below `output`; returns the variants' folders.

    An existing folder of a variant is replaced. `version` is the repository's, by which callers of the library select
    it. With a private `key` (`artifacts.signing`) each folder is signed, except its `metadata.json`, which contains the
    signature's digest.
    """
    by_kind: dict[str, list[tuple[Path, Entry]]] = {}
    for folder in folders:
        for entry in manifest.read(folder):
            by_kind.setdefault(entry.kind, []).append((folder, entry))
    written = []
    for kind, kernels in by_kind.items():
        target = output / "build" / variant(kind)
        shutil.rmtree(target, ignore_errors=True)
        trust.make_folder(target, trust.SHARED)
        for folder, entry in kernels:
            if not (target / entry.library).exists():
                shutil.copyfile(folder / entry.library, target / entry.library)
        entries = [entry for _, entry in kernels]
        runtime_libraries.carry(target, kind)
        manifest.write(target, entries)
        (target / _MODULE).write_text(_init(entries))
        if key is not None:
            signing.sign(target, key, also=[_MODULE])
        (target / METADATA).write_text(json.dumps(_metadata(target, kind, entries, version), indent=2) + "\n")
        written.append(target)
    return written


def _init(entries: Sequence[Entry]) -> str:
    operators = {parse(entry.problem).operator for entry in entries}
    names = sorted(name for one in operators for name in registry.find(one).public)
    imports = "\n".join(f"from tvm_sparse import {name} as {name}  # noqa: E402" for name in names)
    archs = ", ".join(sorted({entry.arch for entry in entries}))
    return _INIT.format(archs=archs, version=importlib.metadata.version("tvm_sparse"), imports=imports)


def _metadata(folder: Path, kind: str, entries: Sequence[Entry], version: int) -> dict[str, object]:
    files = {
        path.relative_to(folder).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != METADATA
    }
    backend: dict[str, object] = {"type": "cuda" if kind == "cuda" else "cpu"}
    if kind == "cuda":
        backend["archs"] = sorted({_capability(entry.arch) for entry in entries})
    # The library names the module after it: another build needs another name.
    build = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:8]
    return {
        "id": f"_{NAME.replace('-', '_')}_{backend['type']}_{build}",
        "name": NAME,
        "version": version,
        "license": "Apache-2.0",
        "python-depends": ["tvm-ffi"],
        "backend": backend,
        "digest": {"algorithm": "sha256", "files": files},
    }


def _capability(arch: str) -> str:
    """The architecture in the library's notation: `sm_90a` as `9.0a`, `compute_80` as `8.0+PTX`."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)(a?)", arch)
    assert found, arch
    code, major, minor, specific = found.groups()
    return f"{major}.{minor}{specific}{'+PTX' if code == 'compute' else ''}"
