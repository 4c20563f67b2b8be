"""Shared libraries into this process: the runtime libraries they need, the check of their bytes, the call.

Nothing here imports the compiler: a kernel needs tvm-ffi, TVM's small runtime library (threads, workspaces) and, for
CUDA, its CUDA part. All are loaded from the installed `tvm` package's folder without importing the package.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

from .. import machine
from ..artifacts.manifest import digest


class LoadError(RuntimeError):
    """A library may not be loaded, or cannot be; the message says why and what to do."""


@functools.cache
def prepare(kind: str) -> None:
    """Load what libraries of this kind ("llvm" or "cuda") call at run time. Once a process."""
    import tvm_ffi  # noqa: F401  (loads the library that the others are linked to)

    if kind == "cuda":
        from ..artifacts import cuda_toolchain

        try:
            cuda_toolchain.load_runtime()
        except cuda_toolchain.ToolchainError as error:
            raise LoadError(str(error)) from error
        return
    # The runtime takes half of the logical processors for the number of cores. It reads this when the first parallel
    # loop starts, and a value that the user has set stands.
    os.environ.setdefault("TVM_NUM_THREADS", str(machine.cpu().cores))
    spec = importlib.util.find_spec("tvm")
    if spec is None or spec.origin is None:
        raise LoadError("the package apache-tvm is not installed: its runtime library is needed to call kernels")
    ctypes.CDLL(str(Path(spec.origin).parent / "lib" / "libtvm_runtime.so"), ctypes.RTLD_GLOBAL)


def load_function(path: Path, kind: str, sha256: str | None) -> Any:
    """The `main` function of a library, after its bytes were compared with `sha256` (None: not compared).

    Raises
    ------
    LoadError
        If the file is missing, its hash differs, or it does not load.
    """
    if not path.is_file():
        raise LoadError(f"{path}: no such library; export it again")
    try:
        same = sha256 is None or digest(path) == sha256
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror}") from error
    if not same:
        raise LoadError(
            f"{path}: the file is not the one that its manifest describes (sha256 differs); export it again"
        )
    prepare(kind)
    import tvm_ffi

    try:
        module = tvm_ffi.load_module(str(path.resolve()))
        # The function does not keep its module alive in every version: hold both.
        function = module["main"]
    except Exception as error:  # whatever the loader raises, the library cannot be used
        raise LoadError(f"{path}: {error}") from error
    _MODULES.append(module)
    return function


# Modules are never unloaded: a kernel may be running on a stream when Python drops its last reference.
_MODULES: list[Any] = []
