"""Shared libraries into this process: the runtime libraries they need, the check of their bytes, the call.

Nothing here imports the compiler: a kernel needs tvm-ffi, TVM's small runtime library (threads, workspaces) and, for
CUDA, its CUDA part: those of the installed apache-tvm, which is not imported, or those that came with the kernels
(`artifacts.runtime_libraries`).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifacts import runtime_loading, trust
from ..artifacts.runtime_loading import Reader
from ..artifacts.signing import SignatureError
from ..core import commands, machine
from ..core.problem import Problem, numpy_dtype
from . import arrays

if TYPE_CHECKING:
    import numpy as np


logger = logging.getLogger("tvm_sparse")

# Bytes of a library, and of a workspace.
MOST_LIBRARY = 1 << 32
MOST_WORKSPACE = 1 << 40

# In the text of errors, what a GPU refuses before any thread block has run: a launch, by the driver's code, or what TVM
# asks for before it; and code that is none for this GPU.
_REFUSED = re.compile(
    r"(?<=CUDALaunch Error: )CUDA_ERROR_(INVALID_VALUE|INVALID_CLUSTER_SIZE|LAUNCH_OUT_OF_RESOURCES|NOT_SUPPORTED"
    r"|COOPERATIVE_LAUNCH_TOO_LARGE)\b"
    r"|Failed to set the allowed dynamic shared memory size to \d+"
    r"|Failed to allow non-portable CUDA cluster size"
    r"|CUDA_ERROR_(NO_BINARY_FOR_GPU|INVALID_PTX|UNSUPPORTED_PTX_VERSION|JIT_COMPILER_NOT_FOUND|JIT_COMPILATION_DISABLED)"
)


class LoadError(RuntimeError):
    """A library may not be loaded, or cannot be; the message says why and what to do."""


class Miss(LoadError):
    """No kernel for a problem: none is at hand and none can or may be compiled, or the policy forbids it."""


@functools.cache
def prepare(kind: str, beside: Path | None = None, signed: Reader | None = None) -> None:
    """Load what libraries of this kind ("llvm" or "cuda") call at run time.

    `beside` is a folder that may carry it, and `signed` reads a file of that if it is signed.
    """
    import tvm_ffi  # noqa: F401  (loads the library that the others are linked to)

    if kind == "cuda":
        from ..artifacts import cuda

        try:
            cuda.load_runtime(beside=beside, signed=signed)
        except cuda.ToolchainError as error:
            raise LoadError(str(error)) from error
        return
    # The runtime takes half of the logical processors for the number of cores. It reads this when the first parallel
    # loop starts, and a value that the user has set stands.
    os.environ.setdefault("TVM_NUM_THREADS", str(machine.cpu().cores))
    # Threads that are bound to a core wait there for whoever has it, such as a thread of PyTorch's that still spins,
    # where the scheduler would find them another one.
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    if runtime_loading.load("libtvm_runtime.so", beside, signed) is None:
        raise LoadError(
            "TVM's runtime library is missing, which kernels call: install a package of prebuilt kernels, which carries"
            f" it, or the compiler: {commands.install('compiler')}"
        )


def load_function(path: Path, kind: str, sha256: str | None, symbol: str = "main") -> Any:
    """A function of a library, after its bytes were compared with `sha256` (None: nothing is checked).

    Raises
    ------
    LoadError
        If the file is missing, is not trusted (`artifacts.trust`), its hash differs, it does not load, or it has no
        such function.
    """
    return function_of(load_library(path, kind, sha256), path, symbol)


def function_of(library: Any, path: Path, symbol: str) -> Any:
    """A function of a loaded library; `LoadError` if it has none of this name."""
    try:
        return library[symbol]
    except Exception as error:  # whatever the loader raises, the library cannot be used
        raise LoadError(
            f"{path}: holds no kernel {symbol}, which is that of its manifest's entry: it was built for something else;"
            f" export it again ({error})"
        ) from error


def load_library(path: Path, kind: str, sha256: str | None, signed: Reader | None = None) -> Any:
    """A library, which stays in the process; see `load_function`.

    With a hash the bytes that were compared are those that are loaded: the file is read once, and nothing that becomes
    of it afterwards matters. `signed` reads a file of its folder, if that is signed: then so is the hash, and whose
    the file is does not matter.
    """
    if not path.is_file():
        raise LoadError(f"{path}: no such library; export it again")
    if sha256 is None:
        return _opened(path, kind, str(path.resolve()))
    try:
        content = trust.read(path, MOST_LIBRARY, owned=signed is None)
    except trust.Refused as error:
        raise LoadError(str(error)) from error
    except OSError as error:
        raise LoadError(f"{path}: {error.strerror or error}") from error
    if hashlib.sha256(content).hexdigest() != sha256:
        raise LoadError(
            f"{path}: the file is not the one that its manifest describes (sha256 differs); export it again"
        )
    with trust.loadable(path.name, content) as place:
        return _opened(path, kind, place, signed)


def _opened(path: Path, kind: str, name: str, signed: Reader | None = None) -> Any:
    """The library at `path`, as the loader finds it under `name`."""
    try:
        prepare(kind, path.parent, signed)
    except (trust.Refused, SignatureError) as error:
        raise LoadError(str(error)) from error
    import tvm_ffi

    try:
        # By format, as `tvm_ffi.load_module` would after a look at the name's ending.
        module = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(name, "so")
    except Exception as error:  # whatever the loader raises, the library cannot be used
        raise LoadError(f"{path}: {error}") from error
    # A function does not keep its module alive in every version.
    _MODULES.append(module)
    return module


def with_workspaces(function: Any, workspaces: Sequence[Mapping[str, Any]], problem: Problem, kind: str) -> Any:
    """`function` with a library's workspaces passed after the outputs, for calls of one problem.

    They are allocated and filled at the first call on a CUDA stream, or in a CPU thread, and kept: calls on different
    streams share nothing. CUDA graphs that were captured on one stream share that stream's, and must not be replayed at
    the same time. On a GPU PyTorch allocates them, and scratch (a fill of None) is a part of a buffer that all kernels
    on a stream share.
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
            owner = index, torch._C._cuda_getCurrentRawStream(index)  # in a tenth of the time of current_stream
        else:
            owner = 0, threading.get_ident()
        buffers = held.get(owner)
        if buffers is None:
            found = (
                _on_stream(workspaces, problem, owner) if kind == "cuda" else allocated(workspaces, problem, _on_cpu)
            )
            buffers = held[owner] = tuple(found)
        function(*arguments, *buffers)

    return call


def refusal(error: BaseException) -> str | None:
    """What the driver said, if an error is a launch that the GPU refused before any thread block ran; else None.

    Then nothing was written, and the process can go on. After all other errors of the driver, as an illegal address, it
    cannot: they are none of these.
    """
    found = _REFUSED.search(str(error))
    return None if found is None else found[0].strip()


class Retreating:
    """A kernel's function in whose place another runs from the moment that the GPU refuses to launch it.

    Calls raise what the kernel raises, but for a refusal (`refusal`): then `other(what the driver said)` gives the
    function that runs instead, now and from then on. It is asked for once.

    Parameters
    ----------
    always
        Whether a later launch may be refused after one has run: a cooperative one is, where other processes take the
        room. Of all others the first launch tells, and `settled` is the kernel's own function from then on.

    Attributes
    ----------
    settled
        What calls run; None until the first one has.
    """

    def __init__(self, function: Any, other: Callable[[str], Any], *, always: bool = False) -> None:
        self.settled: Any = None
        self._function, self._other, self._always = function, other, always

    def __call__(self, *arguments: Any) -> None:
        if self.settled is not None:
            self.settled(*arguments)
            return
        try:
            self._function(*arguments)
        except Exception as error:
            reason = refusal(error)
            if reason is None:
                raise
            self.settled = self._other(reason)
            self.settled(*arguments)
        else:
            if not self._always:
                self.settled = self._function


def settled(function: Any) -> Any:
    """The function that further calls run, without the look at refused launches where none can come."""
    return getattr(function, "settled", None) or function


def allocated(
    workspaces: Iterable[Mapping[str, Any]], problem: Problem, allocate: Callable[[tuple[int, ...], str, int], Any]
) -> list[Any]:
    """A library's workspaces for calls of one problem, each by `allocate(shape, dtype, the byte that fills it)`.

    Raises
    ------
    LoadError
        If the problem does not have an extent that a workspace names, or one would take more than `MOST_WORKSPACE`.
    """
    return [
        allocate(
            _shape(workspace, problem)[0],
            workspace["dtype"],
            _POISON if workspace["fill"] is None else workspace["fill"],
        )
        for workspace in workspaces
    ]


def _shape(workspace: Mapping[str, Any], problem: Problem) -> tuple[tuple[int, ...], int]:
    """A workspace's shape for a problem, and its bytes."""
    try:
        shape = tuple(map(problem.extent, workspace["shape"]))
    except (KeyError, AttributeError) as error:
        raise LoadError(f"{problem}: workspace {workspace['name']}: no such extent: {error}") from error
    size = math.prod(shape) * numpy_dtype(workspace["dtype"]).itemsize
    if size > MOST_WORKSPACE:
        raise LoadError(
            f"{problem}: workspace {workspace['name']} would take {size} bytes; expected at most {MOST_WORKSPACE}"
        )
    return shape, size


def _on_stream(workspaces: Sequence[Mapping[str, Any]], problem: Problem, owner: tuple[int, int]) -> list[Any]:
    """As `allocated`, on a device and for a stream; scratch is a part of the stream's."""
    torch = sys.modules["torch"]
    places, end = {}, 0
    for workspace in workspaces:
        if workspace["fill"] is None:
            shape, size = _shape(workspace, problem)
            begin = -(-end // _ALIGNED) * _ALIGNED
            end = begin + size
            places[workspace["name"]] = (slice(begin, end), getattr(torch, workspace["dtype"]), shape)
    scratch: Any = _scratch(owner, end) if places else None
    found: list[Any] = []
    for workspace in workspaces:
        if workspace["fill"] is None:
            place, kind, shape = places[workspace["name"]]
            found.append(scratch[place].view(kind).view(shape))
        else:
            found += allocated([workspace], problem, functools.partial(_on_gpu, index=owner[0]))
    return found


def _scratch(owner: tuple[int, int], count: int) -> Any:
    """The stream's bytes, at least so many. Kernels with a part of a smaller buffer keep that: graphs hold its address.
    So it doubles, and all of them together are at most twice as large as the last."""
    there = _SCRATCH.get(owner)
    if there is None or there.numel() < count:
        least = 0 if there is None else 2 * there.numel()
        there = _SCRATCH[owner] = _on_gpu((max(count, least),), "uint8", _POISON, owner[0])
    return there


# What scratch holds at first. No kernel may count on it.
_POISON = 0x7F
_ALIGNED = 256
_SCRATCH: dict[tuple[int, int], Any] = {}


def on_host(shape: tuple[int, ...], dtype: str, fill: int) -> np.ndarray:
    """A new array all of whose bytes are `fill`."""
    import numpy as np

    kind = numpy_dtype(dtype)
    return np.full(math.prod(shape) * kind.itemsize, fill, np.uint8).view(kind).reshape(shape)


def _on_cpu(shape: tuple[int, ...], dtype: str, fill: int) -> Any:
    return arrays.argument(on_host(shape, dtype, fill))


def _on_gpu(shape: tuple[int, ...], dtype: str, fill: int, index: int) -> Any:
    torch = sys.modules["torch"]
    kind = getattr(torch, dtype)
    filled = torch.full((math.prod(shape) * kind.itemsize,), fill, dtype=torch.uint8, device=f"cuda:{index}")
    return filled.view(kind).view(shape)


# Modules are never unloaded: a kernel may be running on a stream when Python drops its last reference.
_MODULES: list[Any] = []
