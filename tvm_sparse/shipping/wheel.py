"""Packing folders of prebuilt kernels into a wheel of data only, which is found automatically once it is installed.

The kernels of an architecture become a folder of the namespace package `tvm_sparse_kernels`, to which several wheels
can contribute (`artifacts.packages`). The wheel requires this version of tvm_sparse, from whose templates the kernels
were built, and for CUDA the CUDA runtime library to which TVM's runtime is linked.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

from ..artifacts import manifest, packages, runtime_libraries
from ..core.machine import resolve

_EARLIEST = (1980, 1, 1, 0, 0, 0)  # the earliest date of a ZIP file, so that equal kernels give equal wheels
_GLIBC = re.compile(rb"GLIBC_2\.(\d+)")
_CUDA = "nvidia-cuda-runtime>=13,<14"


def distribution(archs: Sequence[str]) -> str:
    """The name of the package with the kernels of these architectures: `tvm-sparse-kernels-sm90a`."""
    return "-".join(
        ["tvm-sparse-kernels", *(re.sub("[^a-z0-9]+", "-", re.sub("^(sm|compute)_", r"\1", arch)) for arch in archs)]
    )


def pack(folders: Sequence[Path], output: Path, name: str | None = None) -> Path:
    """Pack folders written by `prebuild`, each named after its architecture, into one wheel in `output`; returns its
    path.

    `name` is the package's name, by default `distribution(archs)`.
    """
    archs = [folder.name for folder in folders]
    name = name or distribution(archs)
    version = importlib.metadata.version("tvm_sparse")
    escaped = name.replace("-", "_")
    tag = f"py3-none-{_platform(folders)}"
    about = f"{escaped}-{version}.dist-info"
    requires = [f"tvm_sparse=={version}"]
    if any(resolve(arch).kind == "cuda" for arch in archs):
        requires.append(_CUDA)
    metadata = [
        "Metadata-Version: 2.4",
        f"Name: {name}",
        f"Version: {version}",
        f"Summary: Prebuilt kernels of tvm_sparse for {', '.join(archs)}, with TVM's runtime libraries",
        "License-Expression: Apache-2.0",
        "Requires-Python: >=3.11",
        *(f"Requires-Dist: {one}" for one in requires),
    ]
    wheel = ["Wheel-Version: 1.0", "Generator: tvm_sparse", "Root-Is-Purelib: false", f"Tag: {tag}"]

    output.mkdir(parents=True, exist_ok=True)
    path = output / f"{escaped}-{version}-{tag}.whl"
    lines = []
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:

        def add(place: str, content: bytes) -> None:
            archive.writestr(zipfile.ZipInfo(place, _EARLIEST), content, zipfile.ZIP_DEFLATED, 9)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            lines.append(f"{place},sha256={digest},{len(content)}")

        for folder in folders:
            for file in _files(folder):
                place = file.relative_to(folder).as_posix()
                add(f"{packages.PACKAGES}/{folder.name}/{place}", file.read_bytes())
        add(f"{about}/METADATA", "\n".join([*metadata, ""]).encode())
        add(f"{about}/WHEEL", "\n".join([*wheel, ""]).encode())
        lines.append(f"{about}/RECORD,,")
        archive.writestr(zipfile.ZipInfo(f"{about}/RECORD", _EARLIEST), "\n".join([*lines, ""]).encode())
    return path


def _files(folder: Path) -> list[Path]:
    """The manifest, the files that it names, and the runtime libraries, but no other files of the folder."""
    named = {entry.library for entry in manifest.read(folder)}
    runtime = [folder / runtime_libraries.FOLDER / name for name in sorted(manifest.runtime(folder))]
    return [folder / manifest.NAME, *(folder / library for library in sorted(named)), *runtime]


def _platform(folders: Sequence[Path]) -> str:
    """The platform tag: the oldest glibc that provides what the libraries require."""
    import platform

    newest = 17  # manylinux2014, the oldest tag of this form
    for folder in folders:
        for file in folder.rglob("*.so"):
            newest = max(newest, *map(int, _GLIBC.findall(file.read_bytes())), 17)
    return f"manylinux_2_{newest}_{platform.machine()}"
