"""CUDA code generation from pip packages alone, with or without a GPU.

What TVM does silently
----------------------
TVM loads ``libtvm_runtime_cuda.so`` when ``tvm`` is imported and swallows the error when that
fails. The library needs ``libcuda.so.1`` (the driver) and ``libcudart.so.13``. Without it
``tvm.compile`` still succeeds for a CUDA target, but never calls the CUDA compiler: the module,
and the library exported from it, carry CUDA *source*, which is compiled wherever the library is
loaded, if it can be loaded there at all. `activate` makes that impossible (it fails instead) and
`cubins` shows what a library really carries.

Why a stub driver
-----------------
A build machine has no driver, and the driver cannot be installed without a GPU. The CUDA runtime
library of TVM refers to nine driver functions; none of them is called while compiling. When there
is no driver, a stub ``libcuda.so.1`` with these nine is built once with the C compiler (which
``export_library`` needs anyway) and loaded by its SONAME. Each of its functions fails with
``CUDA_ERROR_STUB_LIBRARY``, so a kernel launched by mistake says so.

Nothing here needs ``LD_LIBRARY_PATH``: a library that is already in the process satisfies the
dynamic loader by its SONAME.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

__all__ = [
    "KernelResources",
    "Runtime",
    "Toolchain",
    "ToolchainError",
    "activate",
    "cubin_arch",
    "cubins",
    "load_runtime",
    "resource_usage",
]

# The TVM wheel's CUDA runtime is linked to libcudart.so.13: no other major can be loaded.
CUDA_MAJOR = 13
_INSTALL = 'pip install "tvm_sparse[cuda]"'
_LOADER_FUNCTION = "ffi.Module.load_from_bytes.cuda"

# cuGetErrorName and cuGetErrorString succeed: TVM prints what they return without looking.
_STUB_SOURCE = """\
#define FAIL(name) int name(void) { return 34; } /* CUDA_ERROR_STUB_LIBRARY */
FAIL(cuDeviceGetName) FAIL(cuFuncSetAttribute) FAIL(cuLaunchKernelEx) FAIL(cuModuleGetFunction)
FAIL(cuModuleLoadData) FAIL(cuModuleUnload) FAIL(cuTensorMapEncodeTiled)
int cuGetErrorName(int error, const char **text) {
  *text = "CUDA_ERROR_STUB_LIBRARY"; (void)error; return 0; }
int cuGetErrorString(int error, const char **text) {
  *text = "tvm_sparse's stub driver: this process has no NVIDIA driver"; (void)error; return 0; }
int tvm_sparse_stub_driver = 1;
"""

# TVM's preamble includes <cuda/std/type_traits> and <cuda/std/limits>, which cost NVRTC 0.6 s
# (CCCL 13.0) to 1.1 s (13.2 on) a kernel, against 0.03 s for the kernel itself. This gives the
# names that generated code uses from the small headers they live in, and marks the two large
# ones as already included. Seen to give the same machine code.
_LEAN_HEADER = """\
#pragma once
#include <cuda/std/__type_traits/conditional.h>
#include <cuda/std/__type_traits/enable_if.h>
#include <cuda/std/__type_traits/is_floating_point.h>
#include <cuda/std/__type_traits/is_integral.h>
#include <cuda/std/__type_traits/is_same.h>
#include <cuda/std/__type_traits/is_signed.h>
#include <cuda/std/__type_traits/is_unsigned.h>
#define _CUDA_STD_TYPE_TRAITS
#define _CUDA_STD_LIMITS
#define INFINITY (__builtin_huge_valf())
"""
# Headers that need nothing of the two: with any other (cooperative_groups.h, cuda/barrier) the
# code is compiled the long way at once.
_LEAN_INCLUDES = frozenset(
    [
        *("cstdint", "type_traits", "cuda/std/cstdint", "cuda/std/type_traits", "cuda.h"),
        *("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuda_fp6.h", "cuda_fp4.h"),
        *("mma.h", "math_constants.h", "sm_61_intrinsics.h"),
    ]
)


class ToolchainError(RuntimeError):
    """Something that building or loading CUDA code needs is missing; the message says what."""


@dataclass(frozen=True)
class Runtime:
    """The libraries under TVM's CUDA runtime in this process.

    Attributes
    ----------
    driver
        Path of ``libcuda.so.1``.
    driver_is_stub
        Whether that is the stub: code can be built, not run.
    cudart
        Path of ``libcudart.so.13``.
    tvm_runtime
        Path of ``libtvm_runtime_cuda.so``.
    """

    driver: str
    driver_is_stub: bool
    cudart: str
    tvm_runtime: str


@dataclass(frozen=True)
class Toolchain:
    """What CUDA code is built with in this process.

    Attributes
    ----------
    nvrtc_version
        Major and minor version of the compiler.
    nvrtc
        Path of ``libnvrtc.so``.
    headers
        CUDA root folder whose ``include`` is used (``CUDA_PATH``).
    headers_version
        Major and minor version of these headers.
    cccl
        Include folder of the CUDA C++ core libraries.
    runtime
        The loaded runtime libraries.
    """

    nvrtc_version: tuple[int, int]
    nvrtc: str
    headers: Path
    headers_version: tuple[int, int]
    cccl: Path
    runtime: Runtime


@dataclass(frozen=True)
class KernelResources:
    """What one kernel takes of a multiprocessor, as the assembler wrote it into the cubin.

    Attributes
    ----------
    registers
        Registers a thread.
    shared_bytes
        Static shared memory a block, without the 1 KiB that the system keeps on sm_90 and later.
    local_bytes
        Stack frame a thread: spills and arrays that are indexed dynamically. Zero means neither;
        2**32 - 1 that it depends on a recursion's depth.
    spill_instructions
        Loads and stores of spilled registers in the machine code, each counted once however often
        it runs. Undocumented in the format (attribute 0x55); equal to the number of such machine
        instructions in what NVRTC 13.0 and 13.5 were seen to write.
    max_threads
        The block size declared by ``__launch_bounds__``, or None.
    """

    registers: int
    shared_bytes: int
    local_bytes: int
    spill_instructions: int
    max_threads: int | None


# --------------------------------------------------------------------------------- the libraries


def _mapped_path(name: str) -> str:
    """Path of a library loaded in this process; its bare name when that cannot be told."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return name
    return next((m[0] for m in re.finditer(rf"/\S*/{re.escape(name)}\S*", maps)), name)


def _pip_roots() -> list[Path]:
    # `nvidia` is a namespace package, which may be spread over several site-packages.
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations or []) if spec else []
    return [p for p in (Path(place) / f"cu{CUDA_MAJOR}" for place in places) if p.is_dir()]


def _toolkit_roots() -> list[Path]:
    roots = [os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    nvcc = shutil.which("nvcc")
    if nvcc:
        roots.append(str(Path(nvcc).resolve().parent.parent))
    found = (Path(root) for root in roots if root)
    return list(dict.fromkeys(root for root in found if root.is_dir()))


def _load(soname: str) -> str | None:
    """Load a CUDA library, pip's before the system's; return its path."""
    # One that is already in the process (torch's, say) comes first: two copies of one library
    # would each keep their own state.
    try:
        ctypes.CDLL(soname, mode=os.RTLD_NOLOAD)
        return _mapped_path(soname)
    except OSError:
        pass
    files = [str(root / "lib" / soname) for root in _pip_roots()]
    files.append(soname)
    files += [str(root / lib / soname) for root in _toolkit_roots() for lib in ("lib64", "lib")]
    for file in files:
        try:
            ctypes.CDLL(file)
            return _mapped_path(soname)
        except OSError:
            continue
    return None


def _cached(name: str, content: str) -> Path:
    """Folder of the user's cache that belongs to this content and this processor."""
    key = hashlib.sha256(f"{platform.machine()}\n{content}".encode()).hexdigest()[:16]
    folder = platformdirs.user_cache_path("tvm_sparse") / f"{name}-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ToolchainError(f"cannot write the cache folder {folder}: {error}") from error
    return folder


def _stub_driver() -> Path:
    folder = _cached("stub-driver", _STUB_SOURCE)
    library = folder / "libcuda.so.1"
    if library.exists():
        return library
    compilers = (os.environ.get("CC"), "cc", "gcc", "clang")
    cc = next((path for c in compilers if c and (path := shutil.which(c))), None)
    if cc is None:
        raise ToolchainError(
            "there is no NVIDIA driver (libcuda.so.1), and no C compiler (cc, gcc or clang) to "
            "build a stub of it with; install one (Debian: apt-get install gcc)"
        )
    # Built aside and renamed: another process may be loading or building it just now.
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        built = Path(scratch, "libcuda.so.1")
        command = [cc, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-"]
        command += ["-o", str(built)]
        done = subprocess.run(command, input=_STUB_SOURCE, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ToolchainError(f"{cc} could not build the stub driver:\n{done.stderr}")
        built.replace(library)
    return library


def _load_driver(allow_stub: bool) -> tuple[str, bool]:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        if not allow_stub:
            raise ToolchainError(f"there is no NVIDIA driver on this machine: {error}") from error
        stub = _stub_driver()
        ctypes.CDLL(str(stub))
        return str(stub), True
    # An earlier call may have left the stub in the process under that name.
    is_stub = hasattr(driver, "tvm_sparse_stub_driver")
    if is_stub and not allow_stub:
        raise ToolchainError("there is no NVIDIA driver on this machine, only the stub")
    return _mapped_path("libcuda.so"), is_stub


def load_runtime(*, allow_stub: bool = False) -> Runtime:
    """Load what an exported CUDA library needs to be loaded and called, without importing tvm.

    After this ``tvm_ffi.load_module`` takes such a library. It works as well after ``import tvm``,
    when TVM failed to load its CUDA runtime by itself.

    Parameters
    ----------
    allow_stub
        Put a stub in the place of a driver that is missing. Libraries can then be loaded and
        built; a kernel cannot run.

    Returns
    -------
    Runtime
        The libraries that were loaded.

    Raises
    ------
    ToolchainError
        If the driver, ``libcudart.so.13`` or TVM's runtime is missing.
    """
    if sys.platform != "linux":
        raise ToolchainError(f"CUDA libraries are built and loaded on Linux, not {sys.platform}")
    import tvm_ffi  # its library has to be in the process before TVM's

    spec = importlib.util.find_spec("tvm")
    places = (spec.submodule_search_locations or []) if spec else []
    libraries = [Path(place, "lib", "libtvm_runtime_cuda.so") for place in places]
    library = next((path for path in libraries if path.exists()), None)
    if library is None:
        raise ToolchainError("libtvm_runtime_cuda.so is missing: install apache-tvm for Linux")
    driver, is_stub = _load_driver(allow_stub)
    cudart = _load(f"libcudart.so.{CUDA_MAJOR}")
    if cudart is None:
        raise ToolchainError(f"libcudart.so.{CUDA_MAJOR} is missing: {_INSTALL}")
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        raise ToolchainError(f"TVM's CUDA runtime cannot be loaded: {error}") from error
    if tvm_ffi.get_global_func(_LOADER_FUNCTION, allow_missing=True) is None:
        raise ToolchainError(f"{library} does not register {_LOADER_FUNCTION}")
    return Runtime(driver, is_stub, cudart, str(library))


def _nvrtc() -> tuple[tuple[int, int], str]:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(f"cuda-bindings is missing ({error}): {_INSTALL}") from error

    def version() -> tuple[int, int] | None:
        # cuda-bindings looks for the library: pip's, then the system's, then CUDA_PATH's. It also
        # loads libnvrtc-builtins, which pip's NVRTC 13.0 does not find beside itself.
        try:
            status, major, minor = nvrtc.nvrtcVersion()
        except Exception:  # of a type of its own, which varies by version
            return None
        return None if int(status) else (int(major), int(minor))

    found = version()
    for root in () if found else _toolkit_roots():
        files = root.glob(f"lib*/libnvrtc-builtins.so.{CUDA_MAJOR}*")
        try:
            for file in [*files, *root.glob(f"lib*/libnvrtc.so.{CUDA_MAJOR}")]:
                ctypes.CDLL(str(file))
        except OSError:
            continue
        if found := version():
            break
    if found is None:
        raise ToolchainError(f"NVRTC (package nvidia-cuda-nvrtc) is missing: {_INSTALL}")
    if found[0] != CUDA_MAJOR:
        raise ToolchainError(
            f"cuda-bindings loads NVRTC {found[0]}.{found[1]}, but TVM needs CUDA {CUDA_MAJOR}: {_INSTALL}"
        )
    return found, _mapped_path("libnvrtc.so")


def _header_candidates() -> Iterator[tuple[Path, tuple[int, int], Path | None, list[str]]]:
    """Folders with CUDA headers: root, version, CCCL's include folder and what is missing."""
    for root in dict.fromkeys([*_pip_roots(), *_toolkit_roots()]):
        include = root / "include"
        try:
            text = (include / "cuda_runtime_api.h").read_text(errors="replace")
        except OSError:
            continue
        found = re.search(r"#define\s+CUDART_VERSION\s+(\d+)", text)
        number = int(found[1]) if found else 0
        folders = (include / "cccl", include)
        cccl = next((f for f in folders if (f / "cuda" / "std" / "cstdint").exists()), None)
        missing = [] if cccl else ["nvidia-cuda-cccl"]
        if not (include / "crt" / "mma.h").exists():  # for tensor cores; a package of its own
            missing.append("nvidia-cuda-crt")
        yield root, (number // 1000, number % 1000 // 10), cccl, missing


def _headers(nvrtc: tuple[int, int]) -> tuple[Path, tuple[int, int], Path]:
    chosen = os.environ.get("CUDA_PATH")
    usable = []
    seen = []
    for root, version, cccl, missing in _header_candidates():
        if version[0] == CUDA_MAJOR and cccl is not None and not missing:
            # What the user named comes first, then the compiler's own version, then pip's.
            rank = 0 if chosen and root == Path(chosen) else 1 if version == nvrtc else 2
            usable.append((rank, root, version, cccl))
        else:
            lacks = f", without {' and '.join(missing)}" if missing else ""
            seen.append(f"{root} (CUDA {version[0]}.{version[1]}{lacks})")
    if not usable:
        raise ToolchainError(
            f"no complete CUDA {CUDA_MAJOR} headers (packages nvidia-cuda-runtime, "
            f"nvidia-cuda-cccl, nvidia-cuda-crt): {_INSTALL}; "
            f"found: {', '.join(seen) or 'none at all'}"
        )
    _, root, version, cccl = min(usable, key=lambda item: item[0])
    return root, version, cccl


def _install_lean_compiler(cccl: Path) -> None:
    """Replace TVM's compile callback by one that reads fewer headers where that is enough."""
    import tvm_ffi
    from tvm.support import nvcc

    if not (cccl / "cuda" / "std" / "__type_traits" / "is_same.h").exists():
        return
    header = _cached("lean", _LEAN_HEADER) / "tvm_sparse_lean.h"
    if not header.exists():
        with tempfile.NamedTemporaryFile("w", dir=header.parent, delete=False) as file:
            file.write(_LEAN_HEADER)
        Path(file.name).replace(header)
    original = nvcc.tvm_callback_cuda_compile
    options = [f"--pre-include={header}"]

    def compile_cuda(code: str) -> Any:  # bytes-like, whatever TVM's own returns
        used = set(re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)", code, re.MULTILINE))
        mode = os.environ.get("TVM_CUDA_COMPILE_MODE", "nvrtc").lower()
        if mode == "nvrtc" and used <= _LEAN_INCLUDES:
            try:
                return nvcc.compile_cuda(code, "cubin", options=options, compiler="nvrtc")
            except RuntimeError:
                pass  # the full headers decide, and word the error
        return original(code)

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_cuda, override=True)


@functools.cache
def activate() -> Toolchain:
    """Make ``tvm.compile`` produce real CUDA machine code in this process, or raise.

    Loads NVRTC, the CUDA runtime and the driver (a stub where there is none), points TVM to the
    headers (``CUDA_PATH`` and ``TVM_CUDA_NVRTC_EXTRA_OPTS`` in ``os.environ``), imports tvm and
    shortens its compile step. May be called before or after ``import tvm``, any number of times.
    Every process that compiles has to call it: worker processes inherit the environment, not the
    loaded libraries.

    The target needs an ``arch``, and ``tvm.compile`` has to run inside ``with target:``. With
    ``TVM_CUDA_COMPILE_MODE=nvcc`` TVM uses nvcc's compressed fat binaries, which `cubins` cannot
    read.

    Returns
    -------
    Toolchain
        What was found.

    Raises
    ------
    ToolchainError
        If something is missing; the message names it and the command that installs it.
    """
    runtime = load_runtime(allow_stub=True)
    version, nvrtc = _nvrtc()
    headers, headers_version, cccl = _headers(version)
    os.environ["CUDA_PATH"] = str(headers)
    include = f"-I{cccl}"
    options = os.environ.get("TVM_CUDA_NVRTC_EXTRA_OPTS", "")
    if include not in shlex.split(options):
        os.environ["TVM_CUDA_NVRTC_EXTRA_OPTS"] = f"{options} {shlex.quote(include)}".strip()
    _install_lean_compiler(cccl)
    return Toolchain(version, nvrtc, headers, headers_version, cccl, runtime)


# ------------------------------------------------------------------------------------ the cubins

_EM_CUDA = 190
_ELF64_LITTLE = b"\x7fELF\x02\x01"
_MIN_STACK, _MAX_THREADS, _FRAME_SIZE, _REGISTERS, _SPILLS = 0x12, 0x05, 0x11, 0x2F, 0x55


@dataclass(frozen=True)
class _Section:
    name: str
    kind: int
    data: memoryview
    size: int
    link: int


def _header(elf: memoryview) -> tuple[int, int, int, int]:
    """Machine, and offset, entry size and number of the section headers."""
    (machine,) = struct.unpack_from("<H", elf, 0x12)
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    entry, number = struct.unpack_from("<HH", elf, 0x3A)
    return machine, offset, entry, number


def _length(elf: memoryview) -> int:
    """Size of an ELF file from its own tables."""
    _, offset, entry, number = _header(elf)
    end: int = offset + entry * number
    (programs,) = struct.unpack_from("<Q", elf, 0x20)
    size, count = struct.unpack_from("<HH", elf, 0x36)
    end = max(end, programs + size * count)
    for i in range(number):
        _, kind, _, _, at, length = struct.unpack_from("<IIQQQQ", elf, offset + i * entry)
        if kind != 8:  # SHT_NOBITS takes no room in the file
            end = max(end, at + length)
    return end


def cubins(library: Path) -> list[bytes]:
    """Find the CUDA machine code in a library that TVM exported.

    Parameters
    ----------
    library
        The shared library.

    Returns
    -------
    list of bytes
        Each cubin, an ELF file of its own. Empty when the library has none: it then has no device
        code at all or carries CUDA source.
    """
    data = Path(library).read_bytes()
    found: list[bytes] = []
    at = data.find(_ELF64_LITTLE, 1)  # at 0 is the library itself
    while at >= 0:
        elf = memoryview(data)[at:]
        step = 1
        try:
            if _header(elf)[0] == _EM_CUDA and (length := _length(elf)) <= len(elf):
                found.append(bytes(elf[:length]))
                step = length
        except struct.error:  # these bytes only looked like a header
            pass
        at = data.find(_ELF64_LITTLE, at + step)
    return found


def cubin_arch(cubin: bytes) -> int:
    """Return the compute capability a cubin is for: 90 for both sm_90 and sm_90a."""
    flags = int.from_bytes(cubin[0x30:0x34], "little")
    # The number moved up by a byte with version 8 of the ABI (CUDA 13).
    return (flags >> 8 if cubin[8] >= 8 else flags) & 0xFF


def _sections(cubin: bytes) -> list[_Section]:
    elf = memoryview(cubin)
    machine, offset, entry, number = _header(elf)
    if not cubin.startswith(_ELF64_LITTLE) or machine != _EM_CUDA:
        raise ValueError("not a cubin")
    rows = [struct.unpack_from("<IIQQQQI", elf, offset + i * entry) for i in range(number)]
    (names,) = struct.unpack_from("<H", elf, 0x3E)
    strings = cubin[rows[names][4] : rows[names][4] + rows[names][5]]
    return [
        _Section(_text(strings, name), kind, elf[at : at + (0 if kind == 8 else size)], size, link)
        for name, kind, _, _, at, size, link in rows
    ]


def code_sections(cubin: bytes) -> dict[str, bytes]:
    """What a cubin's kernels execute, by section name: instructions, constants, initial values, and sizes of shared memory.

    Two cubins that agree in these compute the same in the same way, whatever their symbols are called.
    """
    found = {}
    for section in _sections(cubin):
        if section.name.startswith((".text.", ".nv.constant", ".nv.global.init")):
            found[section.name] = bytes(section.data)
        elif section.name.startswith(".nv.shared."):
            found[section.name] = str(section.size).encode()
    return found


def _text(strings: bytes | memoryview, at: int) -> str:
    raw = bytes(strings)
    return raw[at : raw.index(b"\0", at)].decode()


def _attributes(info: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Attributes of a ``.nv.info`` section: those with a payload, which are all we need."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, value = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == 4:  # EIFMT_SVAL: the value is the payload's size
            yield attribute, info[at : at + value]
            at += value


def resource_usage(cubin: bytes) -> dict[str, KernelResources]:
    """Read from a cubin what its kernels take; no CUDA toolkit is needed.

    Parameters
    ----------
    cubin
        One of `cubins`.

    Returns
    -------
    dict
        By kernel name.
    """
    sections = {section.name: section for section in _sections(cubin)}
    symbols = sections[".symtab"]
    strings = _sections(cubin)[symbols.link].data
    per_function: dict[int, dict[str, int]] = {_REGISTERS: {}, _FRAME_SIZE: {}, _MIN_STACK: {}}
    for attribute, data in _attributes(sections[".nv.info"].data):
        if attribute in per_function:
            symbol, value = struct.unpack("<II", data)
            (name,) = struct.unpack_from("<I", symbols.data, symbol * 24)
            per_function[attribute][_text(strings, name)] = value
    # From sm_90 on, a kernel's shared memory begins with 1 KiB of the system's.
    reserved = 1024 if ".nv.shared.reserved.0" in sections else 0
    usage = {}
    prefix = ".nv.info."
    for name in (key.removeprefix(prefix) for key in sections if key.startswith(prefix)):
        if f".text.{name}" not in sections:
            continue
        attributes = list(_attributes(sections[prefix + name].data))
        own = dict(attributes)
        threads = struct.unpack("<III", own[_MAX_THREADS]) if _MAX_THREADS in own else None
        shared = sections.get(f".nv.shared.{name}")
        # Pairs (kind, offset), kind 1 being a spill; split over several where they are many.
        notes = b"".join(data for attribute, data in attributes if attribute == _SPILLS)
        usage[name] = KernelResources(
            registers=per_function[_REGISTERS][name],
            shared_bytes=max(shared.size - reserved, 0) if shared else 0,
            # The stack of what the kernel calls counts too, hence the larger of the two.
            local_bytes=max(per_function[a].get(name, 0) for a in (_FRAME_SIZE, _MIN_STACK)),
            spill_instructions=sum(kind == 1 for kind, _ in struct.iter_unpack("<II", notes)),
            max_threads=threads[0] * threads[1] * threads[2] if threads else None,
        )
    return usage
