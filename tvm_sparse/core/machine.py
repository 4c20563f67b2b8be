"""The machine a kernel is compiled for: back end, architecture, and the limits a template must respect.

An architecture is the name under which records and libraries are kept apart: `sm_90a` for a GPU, and for
a CPU the psABI level that its instruction set reaches (`x86-64-v2`, `-v3`, `-v4`), so that a library built
on one CPU serves all CPUs of the same level. Nothing here imports the compiler.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

# psABI levels of x86-64, highest first, with the /proc/cpuinfo flags that distinguish each from the one below.
X86_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}),
    ("x86-64-v2", {"sse4_2", "ssse3", "popcnt", "cx16"}),
)

# Compute capabilities whose `a` variant carries the instructions special to the chip (wgmma, setmaxnreg).
ARCH_SPECIFIC = {"sm_90", "sm_100", "sm_103", "sm_110", "sm_120"}


class UnknownArch(ValueError):
    """The text names no architecture that kernels can be compiled for."""


@dataclass(frozen=True)
class Machine:
    """What a template may use. `name` is for people; `arch` is what records are filed under."""

    kind: str  # "llvm" or "cuda"
    arch: str
    name: str
    cores: int = 1  # CPU threads, or streaming multiprocessors
    max_threads: int = 1024  # threads a block
    shared_bytes: int = 48 * 1024  # static shared memory a block

    @property
    def bandwidth(self) -> float | None:
        """Read bandwidth of device memory in bytes/s where it was measured (see `READ_BANDWIDTH`), else None."""
        return next((rate for chip, rate in READ_BANDWIDTH if chip in self.name), None)

    @property
    def capability(self) -> int:
        """Ten times the compute capability of a GPU, 0 of a CPU."""
        found = re.fullmatch(r"sm_(\d+)a?", self.arch)
        return int(found.group(1)) if found else 0

    @property
    def has_clusters(self) -> bool:
        """Thread block clusters and programmatic dependent launch: from compute capability 9.0 on."""
        return self.capability >= 90

    @property
    def device(self) -> str:
        """The DLPack device type: "cpu" or "cuda"."""
        return "cuda" if self.kind == "cuda" else "cpu"


# Of the largest data-centre part of an architecture, for targets that are not here: templates ask whether a batch fills
# the machine, and a record made on such a part must be a point of its template's space where it is exported.
MULTIPROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_90a": 132, "sm_100a": 148, "sm_120a": 188}

# Bytes a second one kernel reads from device memory. H200: measured on one card (docs/measuring.md);
# H100: the data sheet's ratio to the H200 applied to that.
READ_BANDWIDTH = (("H200", 4.47e12), ("H100", 4.47e12 * 3.35 / 4.8))


@functools.cache
def cpu() -> Machine:
    """This machine's CPU."""
    return Machine(
        "llvm",
        cpu_arch(),
        cpu_name(),
        cores=os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0)),
    )


def default_builders() -> int:
    """How many processes compile at once unless told otherwise: one a core, 16 at most."""
    return min(cpu().cores, 16)


@functools.cache
def cpu_arch() -> str:
    """The psABI level of this CPU, or the bare architecture where levels are not defined (`aarch64`)."""
    isa = platform.machine().lower()
    if isa not in ("x86_64", "amd64"):
        return isa
    flags = set(_cpuinfo("flags").split())
    return next((level for level, needed in X86_LEVELS if needed <= flags), "x86-64")


@functools.cache
def cpu_name() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def _cpuinfo(field: str) -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    match = re.search(rf"^{field}\s*:\s*(.*)$", text, re.MULTILINE)
    return match.group(1) if match else ""


def cuda_arch(major: int, minor: int) -> str:
    """The architecture name of a compute capability: (9, 0) -> `sm_90a`."""
    arch = f"sm_{major}{minor}"
    return arch + "a" if arch in ARCH_SPECIFIC else arch


@functools.cache
def gpu() -> Machine | None:
    """The first CUDA GPU, read from the driver alone; None where there is no usable GPU."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if not hasattr(driver, "cuInit"):  # the stub that a process which builds CUDA code has loaded in its place
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
        return None
    driver.cuDeviceGetName(name, len(name), device)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), number, device)
        return value.value

    # CU_DEVICE_ATTRIBUTE_: COMPUTE_CAPABILITY_MAJOR 75, _MINOR 76, MULTIPROCESSOR_COUNT 16, MAX_THREADS_PER_BLOCK 1
    arch = cuda_arch(attribute(75), attribute(76))
    return Machine("cuda", arch, name.value.decode(), cores=attribute(16), max_threads=attribute(1))


def resolve(target: str) -> Machine:
    """The machine that a `--target` text means.

    `auto`: the GPU if there is one, else the CPU; `cpu`, `cuda`: this machine's; otherwise an architecture
    by name (`sm_90a`, `x86-64-v3`), to compile for a machine that is not this one.

    Raises
    ------
    UnknownArch
        With the valid names, if `target` is none of them, or if it is `cuda` and there is no GPU.
    """
    if target == "auto":
        return gpu() or cpu()
    if target in ("cpu", "llvm"):
        return cpu()
    if target == "cuda":
        found = gpu()
        if found is None:
            raise UnknownArch(
                "target: got 'cuda', but no CUDA GPU was found; name an architecture (sm_90a) to compile for one"
            )
        return found
    for present in (gpu(), cpu()):
        if present is not None and present.arch == target:
            return present
    if re.fullmatch(r"sm_\d{2,3}a?", target):
        return Machine("cuda", target, target, cores=MULTIPROCESSORS.get(target, 108))
    levels = [level for level, _ in X86_LEVELS] + ["x86-64", "aarch64"]
    if target in levels:
        return Machine("llvm", target, target, cores=cpu().cores)
    import difflib

    names = ["auto", "cpu", "cuda", "sm_80", "sm_86", "sm_89", "sm_90a", *levels]
    near = difflib.get_close_matches(target, names, n=3, cutoff=0.3)
    raise UnknownArch(f"target: got {target!r}; nearest valid names: {', '.join(near or names)}")
