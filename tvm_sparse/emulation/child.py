"""The process that runs emulated kernels: `python child.py SOCKET RUNTIME`, started once by `run`, which sends it
requests.

It forks for every run, since kernels may crash, hang and overwrite memory. A fork copies the page tables of the
process, which with a loaded compiler takes longer than most kernels; so this process loads only NumPy, tvm_ffi and
TVM's runtime library. It also keeps the registration of kernel names and of "__tvm_set_device" as global functions out
of the caller's process.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]  # tvm_ffi imports it wherever it is

import numpy as np
import tvm_ffi

PAGE = mmap.PAGESIZE
DIMS = ["blockIdx.x", "blockIdx.y", "blockIdx.z", "threadIdx.x", "threadIdx.y", "threadIdx.z"]
CLUSTER_DIMS = ["clusterCtaIdx.x", "clusterCtaIdx.y", "clusterCtaIdx.z"]
COOPERATIVE = "tirx.use_cooperative_launch"
# Programmatic dependent launch: kernels run one after another here, which CUDA permits; `stale` contents stand for the
# overlap.
OVERLAPPING = "tirx.use_programtic_dependent_launch"
FLAGS = {COOPERATIVE, OVERLAPPING}
DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"
# The function by which host code makes a tensor map; the dtype that says of a parameter that it is one; and its bytes.
ENCODE, TENSOR_MAP, MAP_BYTES = "runtime.cuTensorMapEncodeTiled", "tensormap", 128
MOST_BOX = 256  # rows or columns
# File descriptors sent with a request: for errors, stdout, stderr, and the memory of each array.
FIRST_ARRAY = 3
MOST_FILES = 253  # that a message may carry


@dataclass(frozen=True)
class Kernel:
    """The data needed to launch one `__global__` function."""

    name: str
    dtypes: tuple[str, ...]  # of the parameters; "handle" for pointers, "tensormap" for a tensor map
    launch_params: tuple[str, ...]


@dataclass(frozen=True)
class Placed:
    """An array in memory shared with the child, between two inaccessible pages; its end is directly before
    the second.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int  # offset of the array's `nbytes` in that memory
    nbytes: int
    size: int  # size of that memory
    stale: bytes | None = None


class Mapped:
    """A placed array, mapped into this process."""

    def __init__(self, placed: Placed, file: int) -> None:
        self.placed = placed
        self._memory = np.frombuffer(mmap.mmap(file, placed.size), np.uint8)
        first = self._memory.ctypes.data
        self.address = first + placed.start
        self.guards = [first, first + placed.size - PAGE]

    def tensor(self) -> Any:
        placed = self.placed
        start = placed.start if placed.nbytes else placed.start - PAGE
        room = self._memory[start : start + max(placed.nbytes, 16)]
        flat = tvm_ffi.from_dlpack(room, require_alignment=16)
        view = tvm_ffi.get_global_func("runtime.TVMTensorCreateView")
        return view(flat, tvm_ffi.Shape(placed.shape), tvm_ffi.dtype(placed.dtype), 0)


def receive(connection: socket.socket) -> tuple[Any, list[int]]:
    """The next message and the file descriptors sent with it; raises EOFError at the end of the connection."""
    size, files, _, _ = socket.recv_fds(connection, 8, MOST_FILES)
    if len(size) < 8:
        raise EOFError("the other process has ended")
    return pickle.loads(connection.recv(struct.unpack("<Q", size)[0], socket.MSG_WAITALL)), files


def send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    data = pickle.dumps(message)
    socket.send_fds(connection, [struct.pack("<Q", len(data))], files)
    connection.sendall(data)


def main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    ctypes.CDLL(sys.argv[2], mode=ctypes.RTLD_GLOBAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the requesting process, which ends this one
    gc.freeze()
    while True:
        try:
            request, files = receive(connection)
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            connection.close()
            forked(request, files)
        for file in files:
            os.close(file)
        send(connection, child)
        send(connection, os.waitpid(child, 0)[1])


def forked(request: dict[str, Any], files: Sequence[int]) -> None:
    error_fd = files[0]
    try:
        for number in (1, 2):
            os.dup2(files[number], number)
        run(error_fd=error_fd, files=files[FIRST_ARRAY:], **request)
        os._exit(0)
    except BaseException as error:
        os.write(error_fd, f"\0{type(error).__name__}\0{error}".encode())
        os._exit(4)


def run(
    library: str,
    entry: str,
    kernels: Sequence[Sequence[Any]],
    arguments: Sequence[Any],
    seed: int,
    timeout: float,
    check_races: bool,
    error_fd: int,
    files: Sequence[int],
) -> None:
    """Call a library's host function with its kernels emulated. Arrays are tuples, each of which takes the next of
    `files`.
    """
    lib = ctypes.CDLL(library)
    lib.cuda_on_cpu_init.argtypes = [
        ctypes.c_int, ctypes.c_uint64, ctypes.c_bool, ctypes.c_double,
    ]  # fmt: skip
    lib.cuda_on_cpu_region.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    lib.cuda_on_cpu_stale.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    lib.cuda_on_cpu_init(error_fd, seed, check_races, timeout)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    left = iter(files)
    mapped = [Mapped(Placed(*a), next(left)) if isinstance(a, tuple) else a for a in arguments]
    for arg in mapped:
        if isinstance(arg, Mapped):
            lib.cuda_on_cpu_region(arg.address, arg.placed.nbytes, arg.placed.name.encode())
            if arg.placed.stale is not None:
                lib.cuda_on_cpu_stale(arg.address, arg.placed.stale, arg.placed.nbytes)
            for guard in arg.guards:
                libc.mprotect(guard, PAGE, 0)
    tvm_ffi.register_global_func("__tvm_set_device", lambda *_: None, override=True)
    tvm_ffi.register_global_func(ENCODE, encode, override=True)
    for kernel in (Kernel(*one) for one in kernels):
        tvm_ffi.register_global_func(kernel.name, _launcher(lib, kernel), override=True)
    main = tvm_ffi.load_module(library)[entry]
    main(*(a.tensor() if isinstance(a, Mapped) else a for a in mapped))
    libc.fflush(None)  # what kernels have printed


def encode(place: Any, dtype: Any, rank: int, base: Any, *numbers: int) -> None:
    """Write a tensor map of a matrix to `place`, as `Matrix` of cuda_on_cpu.h has it; raises ValueError for one that
    the driver refuses, NotImplementedError for other kinds.

    `numbers`: columns and rows, bytes of a row, columns and rows of a box, two strides of its elements, interleaving,
    swizzle, promotion in L2, filling.
    """
    if rank != 2:
        raise NotImplementedError(f"a tensor map of {rank} dimensions is not emulated")
    cols, rows, pitch, box_cols, box_rows, *strides, interleaved, swizzle, _, fill = numbers
    if strides != [1, 1] or interleaved or fill or not 1 <= swizzle <= 3:
        raise NotImplementedError("a tensor map with strides, interleaving, NaN or no swizzle is not emulated")
    size, start = np.dtype(_itemsize(dtype)).itemsize, int(getattr(base, "value", base) or 0)
    if not start or start % 16 or pitch % 16 or pitch < cols * size or min(cols, rows) < 1:
        raise ValueError(f"tensor map: base {start:#x}, {rows} rows of {cols} columns and {pitch} bytes")
    if not 1 <= box_rows <= MOST_BOX or box_cols * size != 16 << swizzle:
        raise ValueError(f"tensor map: a box of {box_rows}x{box_cols} with swizzle {swizzle}")
    packed = struct.pack("<QQQQIIII", start, cols, rows, pitch, box_cols, box_rows, size, swizzle)
    ctypes.memmove(int(getattr(place, "value", place)), packed.ljust(MAP_BYTES, b"\0"), MAP_BYTES)


def _itemsize(dtype: Any) -> str:
    """A NumPy dtype of as many bytes as one of TVM's."""
    return f"V{tvm_ffi.dtype(str(dtype)).itemsize}"


def _launcher(lib: ctypes.CDLL, kernel: Kernel) -> Callable[..., None]:
    """A packed function with the arguments of the CUDA runtime's kernel functions."""
    formats = {"float32": "f", "float64": "d", "bool": "?", "handle": "Q"}
    formats |= {f"int{8 << i}": c for i, c in enumerate("bhiq")}
    formats |= {f"uint{8 << i}": c.upper() for i, c in enumerate("bhiq")}
    extents = [p for p in kernel.launch_params if p not in FLAGS]

    def launch(*values: Any) -> None:
        count = len(kernel.dtypes)
        slots = (ctypes.c_char * (8 * max(count, 1)))()
        maps = {}
        for i, (dtype, value) in enumerate(zip(kernel.dtypes, values[:count], strict=True)):
            if dtype in ("handle", TENSOR_MAP):
                value = getattr(value, "value", value) or 0
            if dtype == TENSOR_MAP:  # passed by value
                maps[i] = value
                continue
            struct.pack_into(formats[dtype], slots, 8 * i, value)
        base = ctypes.addressof(slots)
        pointers = (ctypes.c_void_p * max(count, 1))(*(maps.get(i, base + 8 * i) for i in range(count)))
        sizes = dict(zip(extents, (int(v) for v in values[count:]), strict=True))
        dims = (ctypes.c_uint * 9)(*(sizes.get(d, 1) for d in [*DIMS, *CLUSTER_DIMS]))
        lib.cuda_on_cpu_run(
            kernel.name.encode(),
            ctypes.cast(lib[f"emulated_{kernel.name}"], ctypes.c_void_p),
            pointers, dims, ctypes.c_size_t(sizes.get(DYNAMIC_SHARED, 0)),
            COOPERATIVE in kernel.launch_params, OVERLAPPING in kernel.launch_params,
        )  # fmt: skip

    return launch


if __name__ == "__main__":
    main()
