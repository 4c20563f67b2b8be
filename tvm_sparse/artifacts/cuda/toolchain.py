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

import contextlib
import contextvars
import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import platformdirs

from ...core import commands, scratch
from .. import runtime_libraries, runtime_loading, trust

# The TVM wheel's CUDA runtime is linked to libcudart.so.13: other major versions cannot be loaded.
CUDA_MAJOR = 13
_LOADER_FUNCTION = "ffi.Module.load_from_bytes.cuda"

# cuGetErrorName and cuGetErrorString succeed: TVM prints their results without checking for errors.
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

# TVM's preamble includes <cuda/std/cstdint>, <cuda/std/type_traits> and <cuda/std/limits>, which cost NVRTC 0.6 s (CCCL
# 13.0) to 1.1 s (from 13.2 on) per kernel, compared with 0.03 s for the kernel itself. This text defines the names that
# generated code uses, and marks the three headers as already included. The resulting instructions are the same.
# INFINITY uses an intrinsic, since NVRTC 13.5 has no __builtin_huge_valf.
_LEAN_HEADER = """\
#pragma once
#define _CUDA_STD_CSTDINT
#define _CUDA_STD_TYPE_TRAITS
#define _CUDA_STD_LIMITS
#define INFINITY (__int_as_float(0x7f800000))
namespace cuda {
namespace std {
using int8_t = signed char;
using int16_t = short;
using int32_t = int;
using int64_t = long long;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using uint32_t = unsigned int;
using uint64_t = unsigned long long;

template <bool value_> struct of_bool { static constexpr bool value = value_; };
template <class T> struct without_cv { using type = T; };
template <class T> struct without_cv<const T> : without_cv<T> {};
template <class T> struct without_cv<volatile T> : without_cv<T> {};
template <class T> struct without_cv<const volatile T> : without_cv<T> {};

template <class T, class U> struct is_same : of_bool<false> {};
template <class T> struct is_same<T, T> : of_bool<true> {};
template <class T, class U> constexpr bool is_same_v = is_same<T, U>::value;
template <bool, class T = void> struct enable_if {};
template <class T> struct enable_if<true, T> { using type = T; };
template <bool, class T, class U> struct conditional { using type = T; };
template <class T, class U> struct conditional<false, T, U> { using type = U; };

template <class T, class... U> constexpr bool is_one_of = (is_same_v<typename without_cv<T>::type, U> || ...);
template <class T> struct is_floating_point : of_bool<is_one_of<T, float, double>> {};
template <class T> struct is_signed
    : of_bool<is_floating_point<T>::value || is_one_of<T, signed char, short, int, long, long long, __int128_t>
              || (is_one_of<T, char> && char(-1) < 0)> {};
template <class T> struct is_unsigned
    : of_bool<is_one_of<T, bool, unsigned char, unsigned short, unsigned, unsigned long, unsigned long long,
                        __uint128_t>
              || (is_one_of<T, char> && !is_signed<T>::value)> {};
template <class T> struct is_integral
    : of_bool<!is_floating_point<T>::value && (is_signed<T>::value || is_unsigned<T>::value)> {};
}  // namespace std
}  // namespace cuda
"""
# Headers that work with these definitions: code with any other (cooperative_groups.h, cuda/barrier) is compiled with
# the full headers at once.
_LEAN_INCLUDES = frozenset(
    [
        *("cstdint", "type_traits", "cuda/std/cstdint", "cuda/std/type_traits", "cuda.h"),
        *("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "cuda_fp6.h", "cuda_fp4.h"),
        *("mma.h", "math_constants.h", "sm_61_intrinsics.h"),
    ]
)


# NVRTC writes its own version into PTX, whatever the code uses, and older drivers refuse it. It is replaced by that of
# CUDA 13.0, whose driver TVM's runtime needs anyway; all code for earlier GPUs works with it.
_PTX_HEAD, _PTX_VERSION = re.compile(rb"^\.version \d+\.\d+", re.MULTILINE), b".version 9.0"

# Output of the compile callback: "cubin", or "ptx" for the virtual architecture of the same number.
_FORMAT = contextvars.ContextVar("device_code", default="cubin")


class ToolchainError(RuntimeError):
    """Something that building or loading CUDA code needs is missing; the message names it."""


@dataclass(frozen=True)
class Runtime:
    """The libraries under TVM's CUDA runtime in this process.

    Attributes
    ----------
    driver
        Path of ``libcuda.so.1``.
    driver_is_stub
        Whether that is the stub, with which code can be built but not run.
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
    """The tools that build CUDA code in this process.

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


# --------------------------------------------------------------------------------- the libraries


def _mapped_path(name: str) -> str:
    """Path of a library loaded in this process, or its bare name if the path is not known."""
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


def disassembled(cubin: bytes) -> str:
    """Machine code as text, by `nvdisasm` from the path, a CUDA toolkit, or pip's package.

    Raises
    ------
    ToolchainError
        If `nvdisasm` is not installed.
    """
    roots = [*_pip_roots(), *_toolkit_roots()]
    places = [str(root / "bin" / "nvdisasm") for root in roots]
    tool = next(filter(None, map(shutil.which, ("nvdisasm", *places))), None)
    if tool is None:
        raise ToolchainError("nvdisasm, which disassembles machine code, is missing: pip install nvidia-cuda-nvdisasm")
    with scratch.folder() as folder:
        (folder / "code.cubin").write_bytes(cubin)
        command = [tool, "-c", str(folder / "code.cubin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if done.returncode:
        raise ToolchainError(f"{tool}: {done.stderr.strip()}")
    return done.stdout


def _load(soname: str) -> str | None:
    """Load a CUDA library, pip's before the system's; returns its path."""
    # One that is already in the process (torch's, for example) has priority: two copies of a library would have
    # separate states.
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
    """Folder of the user's cache for this content and this processor."""
    key = hashlib.sha256(f"{platform.machine()}\n{content}".encode()).hexdigest()[:16]
    folder = platformdirs.user_cache_path("tvm_sparse") / f"{name}-{key}"
    try:
        trust.make_folder(folder)
        trust.check_folder(folder)
    except trust.Refused as error:
        raise ToolchainError(str(error)) from error
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
    # Built aside and renamed, since another process may be loading or building it at the same time.
    with scratch.written(library, 0o755) as built:
        command = [cc, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-"]
        command += ["-o", str(built)]
        done = subprocess.run(command, input=_STUB_SOURCE, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ToolchainError(f"{cc} could not build the stub driver:\n{done.stderr}")
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
    # An earlier call may have loaded the stub into the process under that name.
    is_stub = hasattr(driver, "tvm_sparse_stub_driver")
    if is_stub and not allow_stub:
        raise ToolchainError("there is no NVIDIA driver on this machine, only the stub")
    return _mapped_path("libcuda.so"), is_stub


def load_runtime(
    *, allow_stub: bool = False, beside: Path | None = None, signed: runtime_loading.Reader | None = None
) -> Runtime:
    """Load the libraries that an exported CUDA library needs, without importing tvm.

    After this ``tvm_ffi.load_module`` can load it. This also works after an ``import tvm`` that failed to load TVM's
    CUDA runtime.

    Parameters
    ----------
    allow_stub
        Use a stub if there is no driver. Libraries can then be loaded and built, but kernels cannot run.
    beside
        A folder of kernels that may contain TVM's runtime libraries.
    signed
        Reads a file of that folder, if it is signed.

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
    import tvm_ffi  # its library has to be loaded before TVM's

    driver, is_stub = _load_driver(allow_stub)
    cudart = _load(f"libcudart.so.{CUDA_MAJOR}")
    if cudart is None:
        raise ToolchainError(f"libcudart.so.{CUDA_MAJOR} is missing: {commands.install('cuda')}")
    try:
        libraries = [runtime_loading.load(name, beside, signed) for name in runtime_libraries.LIBRARIES["cuda"]]
    except OSError as error:
        raise ToolchainError(f"TVM's CUDA runtime cannot be loaded: {error}") from error
    library = libraries[-1]
    if library is None:
        raise ToolchainError(
            "libtvm_runtime_cuda.so is missing: install a package of prebuilt kernels, which carries it, or the"
            f" compiler: {commands.install('compiler')}"
        )
    if tvm_ffi.get_global_func(_LOADER_FUNCTION, allow_missing=True) is None:
        raise ToolchainError(f"{library} does not register {_LOADER_FUNCTION}")
    return Runtime(driver, is_stub, cudart, _mapped_path("libtvm_runtime_cuda.so"))


def _nvrtc() -> tuple[tuple[int, int], str]:
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(f"cuda-bindings is missing ({error}): {commands.install('cuda')}") from error

    def version() -> tuple[int, int] | None:
        # cuda-bindings looks for the library: pip's, then the system's, then CUDA_PATH's. It also loads
        # libnvrtc-builtins, which pip's NVRTC 13.0 does not find in its own folder.
        try:
            status, major, minor = nvrtc.nvrtcVersion()
        except Exception:  # its type varies by version
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
        raise ToolchainError(f"NVRTC (package nvidia-cuda-nvrtc) is missing: {commands.install('cuda')}")
    if found[0] != CUDA_MAJOR:
        raise ToolchainError(
            f"cuda-bindings loads NVRTC {found[0]}.{found[1]}, but TVM needs CUDA {CUDA_MAJOR}:"
            f" {commands.install('cuda')}"
        )
    return found, _mapped_path("libnvrtc.so")


def compiled(source: str, arch: str) -> bytes:
    """Compile CUDA C++ without includes to machine code for `arch` (such as ``sm_90``), by NVRTC alone, without TVM.

    Raises
    ------
    ToolchainError
        If NVRTC is missing or fails; the message contains its output.
    """
    _nvrtc()
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...], what: str = "") -> Any:
        if int(result[0]):
            raise ToolchainError(f"NVRTC: {result[0].name}{what}")
        return result[1] if len(result) > 1 else None

    program = checked(nvrtc.nvrtcCreateProgram(source.encode(), b"source.cu", 0, [], []))
    try:
        done = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture={arch}".encode()])
        said = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
        checked(nvrtc.nvrtcGetProgramLog(program, said))
        checked(done, f" for {arch}: {said.decode(errors='replace').strip(chr(0)).strip()}")
        code = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    return bytes(code)


def _header_candidates() -> Iterator[tuple[Path, tuple[int, int], Path | None, list[str]]]:
    """Folders with CUDA headers: root, version, CCCL's include folder, and missing parts."""
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
        if not (include / "crt" / "mma.h").exists():  # for tensor cores; in a package of its own
            missing.append("nvidia-cuda-crt")
        yield root, (number // 1000, number % 1000 // 10), cccl, missing


def _headers(nvrtc: tuple[int, int]) -> tuple[Path, tuple[int, int], Path]:
    chosen = os.environ.get("CUDA_PATH")
    usable = []
    seen = []
    for root, version, cccl, missing in _header_candidates():
        if version[0] == CUDA_MAJOR and cccl is not None and not missing:
            # The user's choice comes first, then the compiler's own version, then pip's.
            rank = 0 if chosen and root == Path(chosen) else 1 if version == nvrtc else 2
            usable.append((rank, root, version, cccl))
        else:
            lacks = f", without {' and '.join(missing)}" if missing else ""
            seen.append(f"{root} (CUDA {version[0]}.{version[1]}{lacks})")
    if not usable:
        raise ToolchainError(
            f"no complete CUDA {CUDA_MAJOR} headers (packages nvidia-cuda-runtime, "
            f"nvidia-cuda-cccl, nvidia-cuda-crt): {commands.install('cuda')}; "
            f"found: {', '.join(seen) or 'none at all'}"
        )
    _, root, version, cccl = min(usable, key=lambda item: item[0])
    return root, version, cccl


def _install_lean_compiler() -> None:
    """Replace TVM's compile callback by one that reads fewer headers where that suffices."""
    import tvm_ffi
    from tvm.support import nvcc

    header = _cached("lean", _LEAN_HEADER) / "tvm_sparse_lean.h"
    if not header.exists():
        with scratch.written(header) as unfinished:
            unfinished.write_text(_LEAN_HEADER)
    original = nvcc.tvm_callback_cuda_compile
    options = [f"--pre-include={header}"]

    def compile_cuda(code: str) -> Any:  # returns bytes-like, as TVM's callback does
        used = set(re.findall(r"^\s*#\s*include\s*[<\"]([^>\"]+)", code, re.MULTILINE))
        mode = os.environ.get("TVM_CUDA_COMPILE_MODE", "nvrtc").lower()
        form = _FORMAT.get()

        def compiled() -> Any:
            if mode == "nvrtc" and used <= _LEAN_INCLUDES:
                try:
                    return nvcc.compile_cuda(code, form, options=options, compiler="nvrtc")
                except RuntimeError:
                    pass  # compile with the full headers, whose errors are reported
            return original(code) if form == "cubin" else nvcc.compile_cuda(code, form, compiler="nvrtc")

        return compiled() if form == "cubin" else _PTX_HEAD.sub(_PTX_VERSION, bytes(compiled()), count=1)

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_cuda, override=True)


@contextlib.contextmanager
def as_ptx() -> Iterator[None]:
    """Within the block, compile to PTX, which a driver translates for its GPU when it loads it."""
    token = _FORMAT.set("ptx")
    try:
        yield
    finally:
        _FORMAT.reset(token)


@functools.cache
def activate() -> Toolchain:
    """Make ``tvm.compile`` produce real CUDA machine code in this process, or raise.

    Loads NVRTC, the CUDA runtime and the driver (a stub where there is none), points TVM to the headers (``CUDA_PATH``
    and ``TVM_CUDA_NVRTC_EXTRA_OPTS`` in ``os.environ``), imports tvm and replaces its compile callback by a faster one.
    May be called before or after ``import tvm``, any number of times. Every process that compiles has to call it:
    worker processes inherit the environment, not the loaded libraries.

    The target needs an ``arch``, and ``tvm.compile`` has to run inside ``with target:``. With
    ``TVM_CUDA_COMPILE_MODE=nvcc`` TVM uses nvcc's compressed fat binaries, which `cubins` cannot
    read.

    Returns
    -------
    Toolchain
        The tools found.

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
    _install_lean_compiler()
    return Toolchain(version, nvrtc, headers, headers_version, cccl, runtime)


# ------------------------------------------------------------------------------------ the cubins
