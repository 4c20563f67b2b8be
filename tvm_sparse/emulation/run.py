"""Run the CUDA kernels that TVM generates on a machine without a GPU, and check how they behave.

`run_on_cpu` builds a module for CUDA as `tvm.compile` does, up to the CUDA C++ text. g++ compiles that text after
`cuda_on_cpu.h`, which makes every CUDA thread a fiber; LLVM compiles the host function, so that launch extents, launch
order and workspaces are the real ones. Both run in a child process (`child`), which turns crashes, hangs and
misbehaviour into an `EmulationError`:

* results that depend on the order of threads or blocks (the order is drawn from `seed`);
* data races between threads of a block, in shared and global memory, and between those of a cluster
  in shared memory (`check_races`);
* barriers and warp collectives that not all participants reach;
* thread blocks that exit while others of their cluster may still access their shared memory;
* mbarriers used before their initialisation, beyond their count, or with another number of bytes than arrives; and use
  of data written by bulk copies and `st.async` by threads that have not awaited them (they are written at a moment
  drawn from `seed`);
* accesses out of the bounds of global, shared and local arrays, and misaligned vectors;
* reads of shared memory and workspaces before anything was written (they hold NaN or -1);
* in a launch that overlaps its producer kernel, use of data read before `griddepcontrol.wait`: some threads then find
  the content from before the producer's writes. For the first kernel this content is given by `stale`. If a kernel lets
  its consumer start before its own wait, or never waits, the consumer may also find the content from before the writes
  of that kernel's producer.

It cannot detect: performance; the weak memory model between thread blocks (a relaxed arrival at a cluster's barrier
orders as a release does, the scope of mbarrier operations and fences between proxies are ignored, products of
warpgroups complete at once) and stale caches; contraction of a * b + c to fma, flushed denormals, approximate
intrinsics (`__expf` is exact here); the order and rounding of sums in tensor cores; registers or shared memory beyond a
GPU's limits. Races through global memory between blocks show only as different results under different seeds.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import json
import mmap
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, StringImm
from tvm.tirx.build import split_host_device_mods

from ..core import scratch
from ..core.scratch import Scratch
from . import translation
from .child import (
    CLUSTER_DIMS,
    COOPERATIVE,
    DIMS,
    DYNAMIC_SHARED,
    FLAGS,
    PAGE,
    TENSOR_MAP,
    Kernel,
    Placed,
    receive,
    send,
)

__all__ = ["EmulationError", "cuda_source", "run_on_cpu"]

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
CHILD = Path(__file__).with_name("child.py")
CANARY = 0xA5
GXX = ["g++", "-x", "c++", "-std=c++17", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
# Host functions check arguments and launch: optimising one takes longer than all its runs.
QUICK_LLVM = {"kind": "llvm", "opt-level": 0}
MACHINE_FLAGS = ["-O2", "-DCOC_MACHINE"]
# -Og, because most kernels run for less time than g++ takes to optimise them. No guards around static variables: shared
# arrays are static here, and their locks would be instrumented. Registers that nothing was written to hold a pattern:
# on a GPU they may hold anything.
KERNEL_FLAGS = [
    "-Og", "-g1", "-fno-threadsafe-statics", "-fno-strict-aliasing", "-ffp-contract=off", "-fwrapv",
    "-ftrivial-auto-var-init=pattern",
    "-fsanitize=bounds,alignment", "-fno-sanitize-recover=all", "-fsanitize=thread",
]  # fmt: skip


class EmulationError(RuntimeError):
    """A kernel did something that CUDA does not allow, crashed or did not end."""


def run_on_cpu(
    mod: tvm.IRModule,
    target: tvm.target.Target,
    args: Sequence[np.ndarray | int | float],
    *,
    pipeline: str | None = None,
    seed: int = 0,
    timeout: float = 60,
    check_races: bool = True,
    stale: Mapping[int, np.ndarray] | None = None,
) -> None:
    """Build `mod` for CUDA and run its host function with the kernels emulated.

    Parameters
    ----------
    mod
        A module with one public PrimFunc, with thread bindings or as a TIRx kernel.
    target
        The CUDA target.
    args
        Arrays (updated in place; C-contiguous; float16, and bfloat16 through ml_dtypes) and scalars, in the order of
        the PrimFunc's parameters.
    pipeline
        "tirx" for TIRx kernels, as `tir_pipeline` of `tvm.compile`.
    seed
        Seed of the order of threads and blocks. Try several, since an order may hide an error.
    timeout
        Seconds for the run, without the build.
    check_races
        Also report races that did no harm in this order. Switch it off only for code that synchronises threads of a
        thread block by other means than barriers and warp collectives.
    stale
        Content of arrays while the producer kernel still runs, by their index in `args`. It is replaced by the content
        in `args`, outputs included, at a moment drawn from `seed`, before any `griddepcontrol.wait` returns. Only for
        kernels launched to overlap (programmatic dependent launch).

    Raises
    ------
    EmulationError
        If a kernel misbehaved; the message says which, where and in which thread.
    NotImplementedError
        If the kernel uses a feature that is not emulated (TMA of more than two dimensions, ...).
    ValueError
        If an array is not C-contiguous, or its stale content has another shape or dtype.
    ValueError, TypeError, ...
        As from `tvm.compile` and from the host function's own checks.
    """
    built = _built(_Lowering(mod, target, pipeline))
    with scratch.folder() as folder:
        library = folder / "kernel.so"
        library.write_bytes(_compiled(built.source, built.kernels, built.host))
        placed: list[Any] = [
            _GuardedArray(a, f"argument {i}") if isinstance(a, np.ndarray) else a for i, a in enumerate(args)
        ]
        arrays = [a for a in args if isinstance(a, np.ndarray)]
        copies = [p for p in placed if isinstance(p, _GuardedArray)]
        try:
            for i, before in (stale or {}).items():
                placed[i].hold_until_awaited(before)
            error = _run_in_child(library, built, placed, seed, timeout, check_races)
        finally:
            for copy in copies:
                copy.file.close()
        if error is not None:
            if isinstance(error, str):
                error = EmulationError(_with_source_lines(error, built.source, library))
            raise error
    for array, copy in zip(arrays, copies, strict=True):
        copy.check_canary()
        array[...] = copy.array


def cuda_source(mod: tvm.IRModule, target: tvm.target.Target, *, pipeline: str | None = None) -> str:
    """The CUDA C++ text that `run_on_cpu` would emulate, before translation."""
    _, device, target = _lower(_Lowering(mod, target, pipeline))
    return _device_source(device, target)


def launches(mod: tvm.IRModule, target: tvm.target.Target, *, pipeline: str | None = None) -> list[str]:
    """The launch parameters of each kernel, one line each: extents and attributes, without names."""
    host, device, _ = _lower(_Lowering(mod, target, pipeline))
    named = {str(gv.name_hint): f for gv, f in device.functions.items()}
    lines: list[str] = []
    passed: dict[int, str] = {}  # by index, the last value stored as an argument

    def look(call: Call) -> object:
        name = getattr(call.op, "name", "")
        if name == "tirx.tvm_struct_set" and getattr(call.args[2], "value", None) == 15:
            passed[int(call.args[1].value)] = str(call.args[3])
        elif name == "tirx.tvm_call_packed_lowered" and (kernel := named.get(str(call.args[0].value))) is not None:
            how = " ".join(map(str, kernel.attrs["tirx.kernel_launch_params"]))
            lines.append(f"{how}: {', '.join(passed[i] for i in sorted(passed) if i >= len(kernel.params))}")
            passed.clear()
        return call

    for function in host.functions.values():
        tvm_ffi.structural_map(function.body, (Call, look))
    return lines


# ---- build -------------------------------------------------------------------------------------


class _Lowering:
    """The input of a lowering, as a key: equal for the same functions, which do not change once they are shared."""

    def __init__(self, mod: tvm.IRModule, target: tvm.target.Target, pipeline: str | None) -> None:
        self.mod, self.target, self.pipeline = mod, tvm.target.Target(target), pipeline or "default"
        functions = sorted(((str(gv.name_hint), f) for gv, f in mod.functions.items()), key=lambda named: named[0])
        self._key = (tuple(functions), mod.attrs, str(self.target), self.pipeline)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Lowering) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


@dataclass(frozen=True)
class _Built:
    """The sources of a library, and its entry point."""

    source: str  # translated
    kernels: tuple[Kernel, ...]
    host: bytes  # an object file
    entry: str


# Cached, as are the libraries: a test runs a kernel on several inputs and seeds, and building takes longer than
# running.
@functools.lru_cache(maxsize=8)
def _built(key: _Lowering) -> _Built:
    made_of = [key.mod.script(show_meta=True), str(key.target), key.pipeline, *_lowered_by()]
    content = json.loads(zlib.decompress(_once(made_of, "json.zlib", lambda: _packed(_build(key)))))
    kernels = tuple(Kernel(k["name"], tuple(k["dtypes"]), tuple(k["launch_params"])) for k in content["kernels"])
    return _Built(content["source"], kernels, base64.b64decode(content["host"]), content["entry"])


@functools.cache
def _lowered_by() -> list[str]:
    """What makes sources of programs: the compiler, and the files that translate what it emits."""
    return [tvm.__version__, *(Path(path).read_text() for path in (__file__, translation.__file__, CHILD))]


def _packed(built: _Built) -> bytes:
    """What `_built` reads."""
    content = {**asdict(built), "host": base64.b64encode(built.host).decode()}
    return zlib.compress(json.dumps(content).encode(), level=1)


def _build(key: _Lowering) -> _Built:
    host, device, target = _lower(key)
    entries = [str(f.attrs["global_symbol"]) for f in host.functions.values()]
    entries = [e.removeprefix("__tvm_ffi_") for e in entries if e.startswith("__tvm_ffi_")]
    if len(entries) != 1:
        raise ValueError(f"expected a module with one public function, got {entries}")
    kernels = tuple(_kernel(str(gv.name_hint), f) for gv, f in device.functions.items())
    source = translation.translate(_device_source(device, target))
    runtime = tvm.get_global_func("target.build.llvm")(host, tvm.target.Target(QUICK_LLVM))
    with scratch.folder() as folder:
        compiled = folder / "host.o"
        runtime.write_to_file(str(compiled))
        return _Built(source, kernels, compiled.read_bytes(), entries[0])


@functools.lru_cache(maxsize=8)
def _lower(key: _Lowering) -> tuple[tvm.IRModule, tvm.IRModule, tvm.target.Target]:
    """The steps of tvm.tirx.build, with the host function freed from the CUDA runtime."""
    mod, target = key.mod, key.target
    bound = tirx.transform.BindTarget(target.with_host(tvm.target.Target("llvm")))(mod)
    passes, finalize_host, finalize_device = tirx.get_tir_pipeline(key.pipeline)
    with target:
        host, devices = split_host_device_mods(passes(bound))
        if len(devices) != 1:
            raise NotImplementedError(f"expected kernels for one device target, got {len(devices)}")
        ((device_target, device),) = devices.items()
        host = finalize_host()(host)
        device = finalize_device()(device)
    host = tvm.IRModule({gv: _without_cuda_runtime(f) for gv, f in host.functions.items()})
    return host, device, device_target


def _without_cuda_runtime(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """Let the host function take CPU tensors, and workspaces from the emulator."""

    def rewrite(call: Call) -> object:
        name = getattr(call.op, "name", "")
        if name == "tirx.tvm_struct_get" and getattr(call.args[2], "value", None) == 10:
            return tirx.IntImm("int32", 2)  # the tensor's device type, checked by the host function: CUDA
        if name == "tirx.TVMBackendAllocWorkspace":
            return Call(
                tvm.ir.Op.get("tirx.call_extern"),
                [StringImm("cuda_on_cpu_alloc"), call.args[2]], ret_ty=call.ty,
            )  # fmt: skip
        if name == "tirx.TVMBackendFreeWorkspace":
            return tirx.IntImm("int32", 0)
        return call

    return func.with_body(tvm_ffi.structural_map(func.body, (Call, rewrite)))


def _kernel(name: str, func: tirx.PrimFunc) -> Kernel:
    params = tuple(str(p) for p in func.attrs["tirx.kernel_launch_params"])
    if unknown := [p for p in params if p not in {*DIMS, *CLUSTER_DIMS, *FLAGS, DYNAMIC_SHARED}]:
        raise NotImplementedError(f"kernel {name}: launch parameter {unknown[0]} is not emulated")
    if COOPERATIVE in params and {*CLUSTER_DIMS} & {*params}:
        raise NotImplementedError(f"kernel {name}: a cooperative launch of clusters is not emulated")
    dtypes = tuple(_dtype(p.ty) for p in func.params)
    return Kernel(name, dtypes, params)


def _dtype(kind: Any) -> str:
    """What `Kernel.dtypes` says of a parameter's type."""
    if not isinstance(kind, tvm.ir.PointerType):
        return str(kind)
    return TENSOR_MAP if isinstance(kind.element_type, tirx.type.TensorMapType) else "handle"


def _device_source(device: tvm.IRModule, target: tvm.target.Target) -> str:
    """CUDA C++ text; runs only the code generator, also on machines where TVM could call NVRTC."""
    hook = tvm.get_global_func("tvm_callback_cuda_compile", allow_missing=True)
    tvm_ffi.register_global_func("tvm_callback_cuda_compile", _keep_text, override=True)
    try:
        with target:
            built = tvm.get_global_func("target.build.cuda")(device, target)
    finally:
        if hook is None:
            tvm_ffi.remove_global_func("tvm_callback_cuda_compile")
        else:
            tvm_ffi.register_global_func("tvm_callback_cuda_compile", hook, override=True)
    return built.inspect_source("cuda")


def _keep_text(code: str, *_: object) -> bytes:
    return code.encode()  # once TVM's CUDA runtime is loaded, it requires bytes


def keep_objects(folder: Path | None) -> None:
    """Keep what is lowered and compiled in `folder`, where every process that names it finds it; None: keep nothing, as
    at first.

    Both take most of the time of a short run. A file is named after all that it is made of: the program's text, or
    source, header, options and compiler. So none is ever stale, and any may be removed; its time of modification is
    that of its last use.
    """
    global _kept
    _kept = folder


_kept: Path | None = None


@functools.lru_cache(maxsize=8)
def _compiled(source: str, kernels: tuple[Kernel, ...], host: bytes) -> bytes:
    with scratch.folder() as folder:
        return _compile(source, kernels, host, folder).read_bytes()


def _compile(source: str, kernels: Sequence[Kernel], host: bytes, folder: Path) -> Path:
    entries = "".join(
        f'extern "C" void emulated_{k.name}(void** args) {{\n  cuda_on_cpu::call(&{k.name}, args);\n}}\n'
        for k in kernels
    )
    library = folder / "kernel.so"
    objects = {"kernel.o": _kernel_object(f"{source}\n{entries}"), "host.o": host, "machine.o": _machine_object()}
    for name, content in objects.items():
        (folder / name).write_bytes(content)
    # Linked without -fsanitize: the emulator provides the sanitizers' functions.
    linker = ["-fuse-ld=gold"] if _has_gold() else []
    _gxx(["g++", "-shared", *linker, "-Wl,-Bsymbolic", "-o", str(library), *(str(folder / name) for name in objects)])
    return library


def _kernel_object(source: str) -> bytes:
    def compile_to(out: Path) -> None:
        text = out.with_suffix(".cu")
        text.write_text(f'#include "{_precompiled_header()}"\n#line 1 "kernel.cu"\n{source}')
        _gxx([*GXX, *KERNEL_FLAGS, "-c", str(text), "-o", str(out)])

    return _object(source, KERNEL_FLAGS, compile_to)


@functools.cache
def _machine_object() -> bytes:
    return _object("", MACHINE_FLAGS, lambda out: _gxx([*GXX, *MACHINE_FLAGS, "-c", str(HEADER), "-o", str(out)]))


def _object(source: str, flags: Sequence[str], compile_to: Callable[[Path], None]) -> bytes:
    """The object file of a source compiled after the header."""

    def compiled() -> bytes:
        with scratch.folder() as folder:
            out = folder / "object.o"
            compile_to(out)
            return out.read_bytes()

    return _once([source, *GXX, *flags, _compiler(), HEADER.read_text()], "o", compiled)


def _once(made_of: Sequence[str], suffix: str, make: Callable[[], bytes]) -> bytes:
    """The content of the kept file that is made of these texts; where there is none, what `make` returns, kept."""
    kept = None if _kept is None else _kept / f"{hashlib.sha256(chr(0).join(made_of).encode()).hexdigest()}.{suffix}"
    if kept is not None:
        with contextlib.suppress(FileNotFoundError):
            os.utime(kept)
            return kept.read_bytes()
    content = make()
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with scratch.written(kept) as unfinished:
            unfinished.write_bytes(content)
    return content


@functools.cache
def _compiler() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True).stdout


@functools.cache
def _has_gold() -> bool:
    """Whether g++ finds the linker that takes a third of the usual one's time."""
    return shutil.which("ld.gold") is not None


@functools.cache
def _precompiled_header() -> Path:
    """The header that kernels include, beside its precompiled form (".gch"), which g++ reads instead."""
    header = _folder().path / HEADER.name
    shutil.copyfile(HEADER, header)
    precompiled = ["c++-header" if word == "c++" else word for word in GXX]
    _gxx([*precompiled, *KERNEL_FLAGS, str(header), "-o", f"{header}.gch"])
    return header


@functools.cache
def _folder() -> Scratch:
    """The folder of files that all libraries share; it is removed with the process."""
    return Scratch()


def _gxx(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotImplementedError(f"g++ rejects the translated CUDA source:\n{done.stderr[:4000]}")


# ---- run ---------------------------------------------------------------------------------------


class _GuardedArray:
    """A copy of an array in memory shared with the child, directly before an inaccessible page.

    The end is rounded up to 16 bytes, the alignment of the widest vector access. The rest of the pages before and after
    the array is filled with a pattern and compared after the run.
    """

    def __init__(self, array: np.ndarray, name: str) -> None:
        if not array.flags.c_contiguous:
            raise ValueError(f"{name} is not C-contiguous")
        self.name, self.nbytes = name, array.nbytes
        room = -(-self.nbytes // 16) * 16
        pages = -(-max(room, 1) // PAGE)
        self.file = open(os.memfd_create("cuda_on_cpu"), "r+b", buffering=0)
        self.file.truncate((pages + 2) * PAGE)
        self._memory = np.frombuffer(mmap.mmap(self.file.fileno(), (pages + 2) * PAGE), np.uint8)
        self._memory[:] = CANARY
        self._start = (pages + 1) * PAGE - room
        self.array = self._inside.view(array.dtype).reshape(array.shape)
        self.array[...] = array
        self.stale: np.ndarray | None = None

    def hold_until_awaited(self, stale: np.ndarray) -> None:
        if (stale.shape, stale.dtype) != (self.array.shape, self.array.dtype):
            raise ValueError(f"{self.name} is {self.array.dtype}{self.array.shape}, its stale contents are "
                             f"{stale.dtype}{stale.shape}")  # fmt: skip
        self.stale = np.ascontiguousarray(stale)

    @property
    def _inside(self) -> np.ndarray:
        return self._memory[self._start : self._start + self.nbytes]

    def placed(self) -> Placed:
        stale = None if self.stale is None else self.stale.tobytes()
        shape, dtype = self.array.shape, str(self.array.dtype)
        return Placed(self.name, shape, dtype, self._start, self.nbytes, len(self._memory), stale)

    def check_canary(self) -> None:
        before = self._memory[PAGE : self._start]
        after = self._memory[self._start + self.nbytes : len(self._memory) - PAGE]
        if (before != CANARY).any() or (after != CANARY).any():
            where = "before its start" if (before != CANARY).any() else "past its end"
            raise EmulationError(f"out-of-bounds write to {self.name}, {where}")


class _Runner:
    """The process that forks the runs, and the connection to it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._connection, theirs = socket.socketpair()
        with theirs:
            runtime = Path(tvm.__file__).with_name("lib") / "libtvm_runtime.so"
            command = [sys.executable, "-P", str(CHILD), str(theirs.fileno()), str(runtime)]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def run(self, request: dict[str, Any], files: Sequence[int], timeout: float) -> str | int:
        """The child's reply, or the status with which it ended."""
        read_end, write_end = os.pipe()
        with open(read_end, "rb", buffering=0) as errors:
            try:
                send(self._connection, request, [write_end, 1, 2, *files])
            finally:
                os.close(write_end)
            child, _ = receive(self._connection)
            text, ended = b"", False
            try:
                while select.select([errors], [], [], timeout + 10)[0]:
                    if ended := not (chunk := errors.read(1 << 16)):
                        break
                    text += chunk
            finally:
                if not ended:
                    os.kill(child, signal.SIGKILL)
            status, _ = receive(self._connection)
        return text.decode(errors="replace") or status if ended else f"timeout: no answer after {timeout + 10} s"

    def close(self) -> None:
        self._connection.close()
        if self.owner == os.getpid():
            self._process.kill()
            self._process.wait()


_runner: _Runner | None = None
_asking = threading.Lock()


def _close_runner() -> None:
    global _runner
    if _runner is not None:
        _runner.close()
        _runner = None


atexit.register(_close_runner)


def _run_in_child(
    library: Path, built: _Built, args: Sequence[Any], seed: int, timeout: float, check_races: bool
) -> str | BaseException | None:
    """Run in the child; returns the emulator's message, an exception of the host function, or None if all went well."""
    global _runner
    request = {
        "library": str(library),
        "entry": built.entry,
        "kernels": [astuple(kernel) for kernel in built.kernels],
        "arguments": [astuple(a.placed()) if isinstance(a, _GuardedArray) else a for a in args],
        "seed": seed,
        "timeout": timeout,
        "check_races": check_races,
    }
    files = [a.file.fileno() for a in args if isinstance(a, _GuardedArray)]
    with _asking:
        if _runner is not None and _runner.owner != os.getpid():  # of the process from which this one was forked
            _close_runner()
        if _runner is None:
            _runner = _Runner()
        try:
            said = _runner.run(request, files, timeout)
        except BaseException:
            _close_runner()
            raise
    if isinstance(said, str) and said.startswith("\0"):
        _, kind, message = said.split("\0", 2)
        known = {c.__name__: c for c in (TypeError, ValueError, IndexError, NotImplementedError)}
        return known.get(kind, EmulationError)(message)
    return f"the child ended with status {said}" if isinstance(said, int) and said else said or None


def _with_source_lines(message: str, source: str, library: Path) -> str:
    """Replace code addresses by lines, and quote the lines of the CUDA source."""

    def locate(match: re.Match[str]) -> str:
        done = subprocess.run(["addr2line", "-i", "-e", str(library), match.group(1)], capture_output=True, text=True)
        lines = re.findall(r"kernel\.cu:(\d+)", done.stdout)
        return f"kernel.cu:{lines[-1]}" if lines else match.group(0)

    message = re.sub(r"code\+(0x[0-9a-f]+)", locate, message)
    text = source.split("\n")
    numbers = sorted({int(n) for n in re.findall(r"kernel\.cu:(\d+)", message)})
    quoted = [f"  kernel.cu:{n}: {text[n - 1].strip()}" for n in numbers if 0 < n <= len(text)]
    return "\n".join([message, *quoted])
