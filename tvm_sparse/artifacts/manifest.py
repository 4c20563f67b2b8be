"""The manifest of a folder of exported libraries: what each is, and what its bytes must be.

manifest.json
    format      version of this layout, and of what kernels take
    versions    of tvm_sparse, apache-tvm, apache-tvm-ffi and NumPy that exported it
    kernels     one entry a library, see `Entry`
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..core.candidate import Candidate
from ..core.template import Resident
from . import runtime_libraries

FORMAT = 5
NAME = "manifest.json"
_LIBRARY = re.compile(r"\w[\w.\-]*", re.ASCII)  # a bare file name: no folder, and neither . nor ..


class ManifestError(ValueError):
    """A manifest that cannot be believed; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Entry:
    """One kernel of an exported folder.

    Attributes
    ----------
    problem
        Key of the problem it was compiled for. It serves every extent of that problem's batch axis.
    arch, kind
        `sm_90a`, "cuda"; `x86-64-v4`, "llvm".
    candidate
        Template, version and decisions.
    chosen
        How the decisions were come by: "exact" (a record of this problem), "predicted" (by a model), "nearby",
        "borrowed" (of another architecture) or "fallback".
    library, sha256
        File name beside the manifest, and the hash of its bytes. Several kernels may lie in one file.
    workspaces
        Buffers that the runtime passes after the outputs (`core.template.Workspace` as dicts).
    figures
        What was measured when the decisions were tuned: problem, arch, seconds, fallback_seconds, session, machine and
        date; or empty.
    resources
        CUDA: registers, shared and local bytes and spills, the most of any kernel; else None.
    resident
        Of a cooperative kernel `core.template.Resident` as a dict: what has to run at the same time; else None.
    symbol
        The library's function.
    """

    problem: str
    arch: str
    kind: str
    candidate: Candidate
    chosen: str
    library: str
    sha256: str
    workspaces: tuple[dict[str, Any], ...]
    figures: dict[str, Any]
    resources: dict[str, int] | None
    resident: dict[str, int] | None = None
    symbol: str = "main"


def versions() -> dict[str, str]:
    """The installed versions that decide whether a library can be called."""
    return {name: importlib.metadata.version(name) for name in ("tvm_sparse", "apache-tvm", "apache-tvm-ffi", "numpy")}


def digest(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(folder: Path, entries: Iterable[Entry]) -> None:
    """Write the manifest of `folder`, by a temporary file and a rename."""
    kernels = [{**asdict(entry), "candidate": str(entry.candidate)} for entry in entries]
    text = json.dumps({"format": FORMAT, "versions": versions(), "kernels": kernels}, indent=1, sort_keys=True)
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=folder, prefix=NAME)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text + "\n")
        os.chmod(name, 0o644)  # mkstemp's own mode would keep a shared folder's other users out
        os.replace(name, folder / NAME)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(folder: Path) -> tuple[Entry, ...]:
    """The entries of a folder's manifest, checked; the libraries themselves are checked when they are loaded.

    Raises
    ------
    ManifestError
        If the file is missing, is not JSON, lacks a field or has one of the wrong type, has another format, names a
        library outside its folder, or was exported by a compiler version that this one's runtime cannot load.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file; export kernels into this folder first") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: {error}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ManifestError(f"{path}: format is {found!r}, expected {FORMAT}; export again with this version")
    exported = content.get("versions", {})
    exported = exported if isinstance(exported, dict) else {}
    present = runtime_libraries.version(folder)
    if present is None:
        raise ManifestError(
            f"{path}: neither apache-tvm nor its runtime libraries are here, which kernels call: install a package of"
            ' prebuilt kernels or the compiler: pip install "tvm_sparse[compiler]"'
        )
    if exported.get("apache-tvm") != present:
        raise ManifestError(
            f"{path}: exported with apache-tvm {exported.get('apache-tvm')!r}, but {present} is installed; export again"
        )
    kernels = content.get("kernels")
    if not isinstance(kernels, list):
        raise ManifestError(f"{path}: kernels must be a list, got {type(kernels).__name__}")
    return tuple(_entry(path, number, kernel) for number, kernel in enumerate(kernels))


def _entry(path: Path, number: int, kernel: Any) -> Entry:
    where = f"{path}: kernel {number}"
    if not isinstance(kernel, dict):
        raise ManifestError(f"{where}: expected an object, got {type(kernel).__name__}")
    missing = [field.name for field in fields(Entry) if field.name not in kernel]
    if missing:
        raise ManifestError(f"{where}: missing {', '.join(missing)}")
    for name in ("problem", "arch", "kind", "candidate", "chosen", "library", "sha256", "symbol"):
        if not isinstance(kernel[name], str):
            raise ManifestError(f"{where}: {name} must be text, got {kernel[name]!r}")
    if not _LIBRARY.fullmatch(kernel["library"]):
        raise ManifestError(f"{where}: library must be a file name in the same folder, got {kernel['library']!r}")
    if not isinstance(kernel["workspaces"], list) or not isinstance(kernel["figures"], dict):
        raise ManifestError(f"{where}: workspaces must be a list and figures an object")
    if not isinstance(kernel["resources"], dict | None):
        raise ManifestError(f"{where}: resources must be an object or null, got {kernel['resources']!r}")
    if not _is_resident(kernel["resident"]):
        names = ", ".join(field.name for field in fields(Resident))
        raise ManifestError(f"{where}: resident must be null or have {names}, got {kernel['resident']!r}")
    try:
        candidate = Candidate.parse(kernel["candidate"])
    except ValueError as error:
        raise ManifestError(f"{where}: {error}") from None
    known = {field.name: kernel[field.name] for field in fields(Entry)}
    return Entry(**{**known, "candidate": candidate, "workspaces": tuple(kernel["workspaces"])})


def _is_resident(value: Any) -> bool:
    if value is None:
        return True
    wanted = [field.name for field in fields(Resident)]
    return isinstance(value, dict) and sorted(value) == sorted(wanted) and all(type(n) is int for n in value.values())
