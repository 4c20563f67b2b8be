"""Shared libraries into this process: the runtime libraries they need, the check of their bytes, the call.

Nothing here imports the compiler: a kernel needs tvm-ffi, TVM's small runtime library (threads, workspaces) and, for
CUDA, its CUDA part. All are loaded from the installed `tvm` package's folder without importing the package.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..artifacts.manifest import digest
from ..core import machine
from ..core.problem import Problem, numpy_dtype


class LoadError(RuntimeError):
    """A library may not be loaded, or cannot be; the message says why and what to do."""


@functools.cache
def prepare(kind: str) -> None:
    """Load what libraries of this kind ("llvm" or "cuda") call at run time. Once a process."""
    import tvm_ffi  # noqa: F401  (loads the library that the others are linked to)

    if kind == "cuda":
        from ..artifacts import cuda

        try:
            cuda.load_runtime()
        except cuda.ToolchainError as error:
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


def with_workspaces(function: Any, workspaces: Sequence[Mapping[str, Any]], problem: Problem, kind: str) -> Any:
    """`function` with a library's workspaces passed after the outputs, for calls of one problem.

    They are allocated and filled at the first call on a CUDA stream, or in a CPU thread, and kept: calls on different
    streams share nothing. CUDA graphs that were captured on one stream share that stream's, and must not be replayed at
    the same time. On a GPU PyTorch allocates them.
    """
    if not workspaces:
        return function
    held: dict[tuple[int, int], tuple[Any, ...]] = {}

    def call(*arguments: Any) -> None:
        if kind == "cuda":
            torch = sys.modules.get("torch")
            if torch is None:
                raise LoadError(
                    f"{problem}: this kernel needs workspaces on the GPU, which PyTorch allocates; import torch"
                )
            index = next(a.device.index for a in arguments if isinstance(a, torch.Tensor))
            owner = index, torch.cuda.current_stream(index).cuda_stream
        else:
            owner = 0, threading.get_ident()
        buffers = held.get(owner)
        if buffers is None:
            buffers = held[owner] = tuple(_workspace(workspace, problem, kind, owner[0]) for workspace in workspaces)
        function(*arguments, *buffers)

    return call


def _workspace(workspace: Mapping[str, Any], problem: Problem, kind: str, index: int) -> Any:
    import math

    import numpy as np
    import tvm_ffi

    shape = [problem.axes[extent] if isinstance(extent, str) else extent for extent in workspace["shape"]]
    dtype = numpy_dtype(workspace["dtype"])
    size = math.prod(shape) * dtype.itemsize
    if kind == "cuda":
        torch = sys.modules["torch"]
        filled = torch.full((size,), workspace["fill"], dtype=torch.uint8, device=f"cuda:{index}")
        return filled.view(getattr(torch, workspace["dtype"])).view(shape)
    return tvm_ffi.from_dlpack(np.full(size, workspace["fill"], np.uint8).view(dtype).reshape(shape))


# Modules are never unloaded: a kernel may be running on a stream when Python drops its last reference.
_MODULES: list[Any] = []
