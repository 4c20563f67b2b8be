"""Loading shared libraries into this process: their runtime libraries, the check of their bytes, and the call.

Nothing here imports the compiler: a kernel needs tvm-ffi, TVM's small runtime library (threads, workspaces) and, for
CUDA, its CUDA part. These are taken from the installed apache-tvm, without importing it, or from the folder of kernels
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

# Largest size in bytes of a library, and of a workspace.
MOST_LIBRARY = 1 << 32
MOST_WORKSPACE = 1 << 40

# Texts of errors with which a GPU refuses a kernel before any thread block has run: refused launches, by the driver's
# code, or refused settings before one; and code for another GPU.
_REFUSED = re.compile(
    r"(?<=CUDALaunch Error: )CUDA_ERROR_(INVALID_VALUE|INVALID_CLUSTER_SIZE|LAUNCH_OUT_OF_RESOURCES|NOT_SUPPORTED"
    r"|COOPERATIVE_LAUNCH_TOO_LARGE)\b"
    r"|Failed to set the allowed dynamic shared memory size to \d+"
    r"|Failed to allow non-portable CUDA cluster size"
    r"|CUDA_ERROR_(NO_BINARY_FOR_GPU|INVALID_PTX|UNSUPPORTED_PTX_VERSION|JIT_COMPILER_NOT_FOUND|JIT_COMPILATION_DISABLED)"
)


class LoadError(RuntimeError):
    """A library may not or cannot be loaded; the message gives the reason and what to do."""


class Miss(LoadError):
    """No kernel for a problem: none is available and none can or may be compiled, or the policy forbids it."""


@functools.cache
def prepare(kind: str, beside: Path | None = None, signed: Reader | None = None) -> None:
    """Load the runtime libraries that kernels of this kind ("llvm" or "cuda") call.

    `beside` is a folder of kernels that may contain them, and `signed` reads its files if it is signed.
    """
    import tvm_ffi  # noqa: F401  (loads the library that the others are linked to)

    if kind == "cuda":
        from ..artifacts import cuda

        try:
            cuda.load_runtime(beside=beside, signed=signed)
        except cuda.ToolchainError as error:
            raise LoadError(str(error)) from error
        return
    # TVM's runtime assumes one core for two logical processors. It reads this variable when the first parallel loop
    # starts; a value set by the user is kept.
    os.environ.setdefault("TVM_NUM_THREADS", str(machine.cpu().cores))
    # Threads bound to a core would wait there for another thread that occupies it, such as a spinning thread of
    # PyTorch's. Unbound, the scheduler moves them to another core.
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    if runtime_loading.load("libtvm_runtime.so", beside, signed) is None:
        raise LoadError(
            "TVM's runtime library is missing, which kernels call: install a package of prebuilt kernels, which carries"
            f" it, or the compiler: {commands.install('compiler')}"
        )


def load_function(path: Path, kind: str, sha256: str | None, symbol: str = "main") -> Any:
    """Load a function of a library after checking its bytes against `sha256` (None: no check).

    Raises
    ------
    LoadError
        If the file is missing or not trusted (`artifacts.trust`), its hash differs, it does not load, or it lacks the
        function.
    """
    return function_of(load_library(path, kind, sha256), path, symbol)


def function_of(library: Any, path: Path, symbol: str) -> Any:
    """A function of a loaded library; raises `LoadError` if it has none of this name."""
    try:
        return library[symbol]
    except Exception as error:  # of any type; in each case the library cannot be used
        raise LoadError(
            f"{path}: holds no kernel {symbol}, which is that of its manifest's entry: it was built for something else;"
            f" export it again ({error})"
        ) from error


def load_library(path: Path, kind: str, sha256: str | None, signed: Reader | None = None) -> Any:
    """Load a library, which stays in the process; see `load_function` for the errors.

    With a hash the file is read once, and exactly the checked bytes are loaded, so later changes of the file have no
    effect. If its folder is signed, `signed` reads the file: the signature then covers the hash, and the file's owner
    does not matter.
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
    """Load the library at `path`, which the dynamic loader opens as `name`."""
    try:
        prepare(kind, path.parent, signed)
    except (trust.Refused, SignatureError) as error:
        raise LoadError(str(error)) from error
    import tvm_ffi

    try:
        # By format, as `tvm_ffi.load_module` would choose from the name's suffix.
        module = tvm_ffi.get_global_func("ffi.Module.load_from_file.so")(name, "so")
    except Exception as error:  # of any type; in each case the library cannot be used
        raise LoadError(f"{path}: {error}") from error
    # Not in every version does a function keep its module alive.
    _MODULES.append(module)
    return module


def with_workspaces(function: Any, workspaces: Sequence[Mapping[str, Any]], problem: Problem, kind: str) -> Any:
    """Wrap `function` so that a library's workspaces are passed after the outputs, for calls of one problem.

    They are allocated and filled at the first call on a CUDA stream, or in a CPU thread, and kept: calls on different
    streams share no workspaces. CUDA graphs captured on one stream share its workspaces, and must not be replayed at
    the same time. On a GPU they are allocated by PyTorch, and scratch (a fill of None) is part of a buffer that all
    kernels on a stream share.
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
            owner = index, torch._C._cuda_getCurrentRawStream(index)  # takes a tenth of the time of current_stream
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
    """The driver's message, if an error is a launch that the GPU refused before any thread block ran; else None.

    After such a refusal nothing was written, and the process can continue. After other errors of the driver, such as an
    illegal address, it cannot.
    """
    found = _REFUSED.search(str(error))
    return None if found is None else found[0].strip()


class Retreating:
    """A kernel's function that is replaced by another one as soon as the GPU refuses to launch it.

    Errors of the kernel are raised, except a refusal (`refusal`): then `other(driver's message)`, called once, returns
    the function that runs in this and all later calls.

    Parameters
    ----------
    always
        Whether a launch may be refused after an earlier one has run, as cooperative launches are when other processes
        occupy the GPU. Otherwise the first launch decides, and `settled` is then the kernel's own function.

    Attributes
    ----------
    settled
        The function that calls run; None until the first call has run.
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
    """The function to use in further calls, without the check for refused launches if none can occur."""
    return getattr(function, "settled", None) or function


def allocated(
    workspaces: Iterable[Mapping[str, Any]], problem: Problem, allocate: Callable[[tuple[int, ...], str, int], Any]
) -> list[Any]:
    """A library's workspaces for calls of one problem, each made by `allocate(shape, dtype, fill byte)`.

    Raises
    ------
    LoadError
        If the problem lacks an extent that a workspace names, or a workspace would exceed `MOST_WORKSPACE` bytes.
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
    """A workspace's shape for a problem, and its size in bytes."""
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
    """As `allocated`, on a device and for a stream; scratch is part of the stream's buffer."""
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
    """The stream's scratch buffer, of at least `count` bytes. Kernels that use a smaller, earlier buffer keep it, since
    graphs hold its address; sizes double, so all buffers together are at most twice as large as the last.
    """
    there = _SCRATCH.get(owner)
    if there is None or there.numel() < count:
        least = 0 if there is None else 2 * there.numel()
        there = _SCRATCH[owner] = _on_gpu((max(count, least),), "uint8", _POISON, owner[0])
    return there


# Byte with which new scratch is filled. Kernels must not rely on it.
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
    """A new array on a device, for its current stream, all of whose bytes are `fill`."""
    torch = sys.modules["torch"]
    kind = getattr(torch, dtype)
    count = math.prod(shape) * kind.itemsize
    filled = arrays.kept(lambda: torch.full((count,), fill, dtype=torch.uint8, device=f"cuda:{index}"), index)
    return filled.view(kind).view(shape)


# Modules are never unloaded: a kernel may still be running on a stream when Python drops its last reference.
_MODULES: list[Any] = []
