"""The manifest of a folder of exported libraries: the content and the hash of each.

manifest.json
    format      version of this layout, and of what kernels take
    versions    of tvm_sparse, apache-tvm, apache-tvm-ffi and NumPy that exported it
    runtime     sha256 of each file in the folder `runtime` (`runtime_libraries`), by its name
    kernels     one entry a library, see `Entry`

Every field is checked before use. A kernel's name in its library is a hash of its entry, `symbol_of`: a library that
was made for another problem lacks this name, whatever the manifest says.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from ..core import commands, scratch
from ..core.candidate import Candidate
from ..core.template import Resident, Workspace
from . import runtime_libraries, trust

FORMAT = 7
NAME = "manifest.json"
# Origins of decisions, best first: the problem's own record, that of a larger batch, a model of the measurements, the
# record of the most similar problem, a record of another architecture, a template's default.
HOW = ("exact", "bucket", "predicted", "nearby", "borrowed", "fallback")
MOST_BYTES = 1 << 26  # of a manifest: enough for some 50,000 kernels
_LIBRARY = re.compile(r"\w[\w.\-]{0,199}", re.ASCII)  # a bare file name: without a folder, and neither . nor ..
_WORD = re.compile(r"\w[\w.+\-]{0,99}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DTYPE = re.compile(r"bfloat16|(float|int|uint)(8|16|32|64)")
_MOST_TEXT = 2000
_MOST_EXTENT = 1 << 48


class ManifestError(ValueError):
    """A manifest that is missing or invalid; the message names the file and the defect."""


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
        Origin of the decisions: "exact" (a record of this problem), "predicted" (by a model), "nearby", "borrowed" (of
        another architecture) or "fallback".
    library, sha256
        File name beside the manifest, and the hash of its bytes. One file may contain several kernels.
    workspaces
        Buffers that the runtime passes after the outputs (`core.template.Workspace` as dicts).
    figures
        Measurements from the tuning of the decisions: problem, arch, seconds, fallback_seconds, session, machine and
        date; or empty.
    resources
        CUDA: registers, shared and local bytes and spills, the maximum over its kernels; and, if declared,
        `dynamic_shared_bytes` and the thread blocks of a `cluster` (`core.template.Template.needs`). CPU: 1 for each
        instruction set used beyond its level (`core.template.Program.instructions`), or None.
    resident
        For a cooperative kernel `core.template.Resident` as a dict; else None.
    symbol
        Name of the library's function; it must be `symbol_of` this entry, which is the default.
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
    symbol: str = ""

    def __post_init__(self) -> None:
        if not self.symbol:
            symbol = symbol_of(self.problem, self.arch, self.candidate, self.workspaces, self.resident)
            object.__setattr__(self, "symbol", symbol)


def symbol_of(
    problem: str,
    arch: str,
    candidate: Candidate,
    workspaces: Sequence[Mapping[str, Any]],
    resident: Mapping[str, int] | None,
) -> str:
    """The name of a kernel in its library: a hash of everything that its callers rely on."""
    said = json.dumps([problem, arch, str(candidate), list(map(dict, workspaces)), resident], sort_keys=True)
    return "k" + hashlib.sha256(said.encode()).hexdigest()[:32]


def versions() -> dict[str, str]:
    """The installed versions on which it depends whether a library can be called."""
    return {name: _version(name) for name in ("tvm_sparse", "apache-tvm", "apache-tvm-ffi", "numpy")}


# Kept: a look-up in the user's cache asks for each kernel, and reading metadata takes a millisecond.
_version = functools.cache(importlib.metadata.version)


def digest(path: Path) -> str:
    """sha256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write(folder: Path, entries: Iterable[Entry]) -> None:
    """Write the manifest of `folder`, with the hashes of its runtime libraries, replacing an earlier one."""
    kernels = [{**asdict(entry), "candidate": str(entry.candidate)} for entry in entries]
    trust.make_folder(folder, trust.SHARED)
    content = {
        "format": FORMAT,
        "versions": versions(),
        "runtime": runtime_libraries.hashes(folder),
        "kernels": kernels,
    }
    text = json.dumps(content, indent=1, sort_keys=True)
    with scratch.written(folder / NAME) as unfinished:
        unfinished.write_text(text + "\n")


def runtime(folder: Path, content: bytes | None = None) -> dict[str, str]:
    """The sha256 of each file of the runtime libraries that came with a folder, by its name; `content` is as in `read`.

    Raises
    ------
    ManifestError
        As in `read`, for the file as a whole.
    """
    path, found = folder / NAME, _document(folder, content).get("runtime")
    if (
        not isinstance(found, dict)
        or not set(found) <= set(runtime_libraries.FILES)
        or not all(isinstance(value, str) and _SHA256.fullmatch(value) for value in found.values())
    ):
        raise ManifestError(
            f"{path}: runtime must have hashes of {', '.join(runtime_libraries.FILES)}, got {_shown(found)}; export"
            " again with this version"
        )
    return found


def _document(folder: Path, content: bytes | None) -> dict[str, Any]:
    """The manifest as a JSON object, checked for its format."""
    path = folder / NAME
    try:
        found = json.loads(trust.read(path, MOST_BYTES) if content is None else content)
    except FileNotFoundError:
        raise ManifestError(f"{path}: no such file; export kernels into this folder first") from None
    except trust.Refused as error:
        raise ManifestError(str(error)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ManifestError(f"{path}: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        what = found.get("format") if isinstance(found, dict) else type(found).__name__
        raise ManifestError(f"{path}: format is {what!r}, expected {FORMAT}; export again with this version")
    return found


def read(folder: Path, content: bytes | None = None) -> tuple[Entry, ...]:
    """Read and check the entries of a folder's manifest; the libraries are checked when they are loaded.

    `content` is the file's content, if the caller has read it; then the file's owner is not checked.

    Raises
    ------
    ManifestError
        If the file is missing or not trusted (`trust`), is not JSON, lacks a field or has one of the wrong type or out
        of range, has another format, names a library outside its folder, describes a kernel differently from the
        kernel's name, or was exported by a compiler version whose libraries the installed runtime cannot load.
    """
    path, found = folder / NAME, _document(folder, content)
    exported = found.get("versions", {})
    exported = exported if isinstance(exported, dict) else {}
    try:
        present = runtime_libraries.version(folder)
    except OSError as error:
        raise ManifestError(f"{folder / runtime_libraries.FOLDER / runtime_libraries.VERSION}: {error}") from None
    if present is None:
        raise ManifestError(
            f"{path}: neither apache-tvm nor its runtime libraries are here, which kernels call: install a package of"
            f" prebuilt kernels or the compiler: {commands.install('compiler')}"
        )
    if exported.get("apache-tvm") != present:
        raise ManifestError(
            f"{path}: exported with apache-tvm {exported.get('apache-tvm')!r}, but {present} is installed; export again"
        )
    kernels = found.get("kernels")
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
        if not isinstance(kernel[name], str) or len(kernel[name]) > _MOST_TEXT:
            raise ManifestError(f"{where}: {name} must be text, got {_shown(kernel[name])}")
    if not _LIBRARY.fullmatch(kernel["library"]):
        raise ManifestError(f"{where}: library must be a file name in the same folder, got {kernel['library']!r}")
    for name, valid, expected in (
        ("arch", _WORD.fullmatch(kernel["arch"]), "the name of an architecture"),
        ("kind", kernel["kind"] in ("llvm", "cuda"), "llvm or cuda"),
        ("chosen", kernel["chosen"] in HOW, f"one of {', '.join(HOW)}"),
        ("sha256", _SHA256.fullmatch(kernel["sha256"]), "64 hexadecimal digits"),
        ("workspaces", are_workspaces(kernel["workspaces"]), "a list of name, shape, dtype and fill"),
        ("figures", _are_figures(kernel["figures"]), "an object of times and texts, or empty"),
        ("resources", kernel["resources"] is None or are_counts(kernel["resources"]), "an object of numbers, or null"),
        ("resident", is_resident(kernel["resident"]), f"null or have {', '.join(f.name for f in fields(Resident))}"),
    ):
        if not valid:
            raise ManifestError(f"{where}: {name} must be {expected}, got {_shown(kernel[name])}")
    try:
        candidate = Candidate.parse(kernel["candidate"])
    except ValueError as error:
        raise ManifestError(f"{where}: {error}") from None
    known = {field.name: kernel[field.name] for field in fields(Entry)}
    entry = Entry(**{**known, "candidate": candidate, "workspaces": tuple(kernel["workspaces"])})
    if entry.symbol != symbol_of(entry.problem, entry.arch, candidate, entry.workspaces, entry.resident):
        raise ManifestError(
            f"{where}: symbol must be the hash of problem, arch, candidate, workspaces and resident, one of which was"
            " changed; export again"
        )
    return entry


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def are_workspaces(value: Any) -> bool:
    """Whether a value of JSON is a list of `core.template.Workspace` as dicts."""
    return isinstance(value, list) and len(value) <= 100 and all(map(_is_workspace, value))


def _is_workspace(value: Any) -> bool:
    if not isinstance(value, dict) or sorted(value) != sorted(field.name for field in fields(Workspace)):
        return False
    name, shape, dtype, fill = value["name"], value["shape"], value["dtype"], value["fill"]
    return (
        isinstance(name, str)
        and _WORD.fullmatch(name) is not None
        and isinstance(shape, list)
        and len(shape) <= 10
        and all((isinstance(n, str) and _WORD.fullmatch(n)) or _is_count(n, _MOST_EXTENT) for n in shape)
        and isinstance(dtype, str)
        and _DTYPE.fullmatch(dtype) is not None
        and (fill is None or _is_count(fill, 255))
    )


def _are_figures(value: Any) -> bool:
    """Whether a value of JSON is an empty object, or valid figures: two times, perhaps a third, and texts."""
    if not isinstance(value, dict) or len(value) > 20:
        return False
    times = ("seconds", "fallback_seconds", *(["way_seconds"] if "way_seconds" in value else []))
    return not value or (
        all(type(value.get(name)) in (int, float) and 0 < value[name] < math.inf for name in times)
        and all(isinstance(value.get(name), str) for name in ("machine", "date"))
        and all(isinstance(text, str) and len(text) <= _MOST_TEXT for name, text in value.items() if name not in times)
    )


def _is_count(value: Any, most: int) -> bool:
    return type(value) is int and 0 <= value <= most


def are_counts(value: Any) -> bool:
    """Whether a value of JSON is an object of non-negative integers."""
    return isinstance(value, dict) and len(value) <= 20 and all(_is_count(n, _MOST_EXTENT) for n in value.values())


def is_resident(value: Any) -> bool:
    """Whether a value of JSON is None, or `core.template.Resident` as a dict."""
    if value is None:
        return True
    wanted = [field.name for field in fields(Resident)]
    return are_counts(value) and sorted(value) == sorted(wanted)
