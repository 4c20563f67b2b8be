"""The machine a kernel is compiled for: back end, architecture, and the limits a template must respect.

An architecture is the name under which records and libraries are kept apart: `sm_90a` for a GPU, and for
a CPU the psABI level that its instruction set reaches (`x86-64-v2`, `-v3`, `-v4`), so that a library built
on one CPU serves all CPUs of the same level. Libraries are also built for architectures that no machine reports:
`sm_90` without the `a` runs on all later GPUs of the same major number, `compute_80` is PTX, which the driver
translates for any GPU from that number on (`suitability`). Nothing here imports the compiler.

GPUs of one architecture differ in multiprocessors. A target says which one is meant by a card's name (`CARDS`) or by
`sm_89:multiprocessors=128`; the bare architecture is its largest data-centre card. GPUs below `FLOOR` are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

# psABI levels of x86-64, highest first, with the /proc/cpuinfo flags that tell each from the next lower one.
X86_LEVELS = (
    ("x86-64-v4", {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}),
    ("x86-64-v3", {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"}),
    ("x86-64-v2", {"sse4_2", "ssse3", "popcnt", "cx16"}),
)

# Instructions that kernels use and only some CPUs of a level have, by their flag in /proc/cpuinfo.
AVX512_BF16 = "avx512_bf16"
X86_INSTRUCTIONS = {"x86-64-v4": AVX512_BF16}  # as `Machine.instructions`

# Compute capabilities whose `a` variant carries the instructions special to the chip (wgmma, setmaxnreg).
ARCH_SPECIFIC = {"sm_90", "sm_100", "sm_103", "sm_110", "sm_120"}


# Ten times the least compute capability that kernels are compiled for. Kernels use cp.async, bfloat16 products on
# tensor cores and warp reductions by one instruction, none of which 7.5 has.
FLOOR = 80


class UnknownArch(ValueError):
    """The text names no architecture that kernels can be compiled for."""


class BelowFloor(UnknownArch):
    """A GPU's compute capability is below `FLOOR`."""


@dataclass(frozen=True)
class Machine:
    """What a kernel may use of a CPU or GPU. `name` is for people; records are filed under `arch`."""

    kind: str  # "llvm" or "cuda"
    arch: str
    name: str
    cores: int = 1  # CPU threads, or streaming multiprocessors
    max_threads: int = 1024  # threads in a thread block
    shared_bytes: int = 48 * 1024  # static shared memory of a thread block
    instructions: str = ""  # of a CPU beyond those of its level, separated by spaces
    l2_bytes: int = 0  # size of a GPU's L2 cache; 0 if not known

    @property
    def bandwidth(self) -> float | None:
        """Read bandwidth of device memory in bytes/s where it was measured (see `READ_BANDWIDTH`), else None."""
        return next((rate for chip, rate in READ_BANDWIDTH if chip in self.name), None)

    @property
    def capability(self) -> int:
        """Ten times the compute capability of a GPU, 0 of a CPU."""
        return _capability(self.arch)

    @property
    def has_clusters(self) -> bool:
        """Whether the GPU has thread block clusters and programmatic dependent launch: from compute
        capability 9.0 on.
        """
        return self.capability >= 90

    @property
    def most_cluster(self) -> int:
        """Thread blocks in the largest cluster that the GPU launches: 1 where there are no clusters, 8 (the portable
        size), or more on GPUs whose GPCs are large enough.
        """
        if not self.has_clusters:
            return 1
        return PORTABLE_CLUSTER if self.capability >= 120 else MOST_CLUSTER

    def clusters(self, sizes: Iterable[int]) -> tuple[int, ...]:
        """The cluster sizes among `sizes` that this GPU launches."""
        return tuple(size for size in sizes if size <= self.most_cluster)

    @property
    def has_warpgroups(self) -> bool:
        """Whether the GPU has wgmma, products of warpgroups with an operand in shared memory: compute capability 9.0
        alone.
        """
        return self.arch == "sm_90a"

    def blocks_at_once(self, threads: int, registers: int, shared_bytes: int) -> int:
        """Number of a kernel's thread blocks that an otherwise idle GPU runs at the same time.

        `threads` and `shared_bytes` (static and dynamic) are per thread block, `registers` per thread.
        """
        most = self._limits
        warps = -(-threads // 32)
        # Registers are allocated to a warp in units of eight a thread, from one of four register files.
        held = 4 * (REGISTER_FILE // 4 // (32 * (max(1, -(-registers // 8)) * 8)))
        each = min(
            most.blocks,
            most.threads // (32 * warps),
            held // (-(-warps // 4) * 4),
            most.shared_bytes // (-(-shared_bytes // 128) * 128 + most.reserved_bytes),
        )
        return self.cores * each

    def clusters_at_once(self, blocks: int) -> int:
        """Number of clusters of `blocks` thread blocks that the GPU runs at the same time if each thread block takes a
        whole multiprocessor.

        A cluster lies within one part of the GPU (a GPC), so some multiprocessors stay unused.
        """
        return CLUSTERS_AT_ONCE[blocks - 1] * self.cores // CLUSTER_CORES

    @property
    def _limits(self) -> _Limits:
        return _limits(self.capability)

    @property
    def block_shared_bytes(self) -> int:
        """Shared memory, static and dynamic, that one thread block may have if its kernel opts in."""
        return self._limits.shared_bytes - self._limits.reserved_bytes

    @property
    def threads_at_once(self) -> int:
        """Largest number of threads that a multiprocessor runs at the same time."""
        return self._limits.threads

    @property
    def device(self) -> str:
        """The DLPack device type: "cpu" or "cuda"."""
        return "cuda" if self.kind == "cuda" else "cpu"


# `sm_90a`: machine code for this GPU alone; `sm_90`: for it and later ones of its major number; `compute_90`: PTX.
_CUDA = re.compile(r"(?P<code>sm|compute)_(?P<number>\d{2,3})(?P<specific>a?)")


# Kept, because spaces ask for them at every point.
@functools.cache
def _capability(arch: str) -> int:
    found = _CUDA.fullmatch(arch)
    return int(found["number"]) if found else 0


@functools.cache
def _limits(capability: int) -> _Limits:
    return next(limits for least, limits in MULTIPROCESSOR if capability >= least)


class Card(NamedTuple):
    """A GPU as it is sold, with the figures that NVIDIA publishes."""

    name: str
    arch: str
    multiprocessors: int
    l2_bytes: int


_MB = 1 << 20
# Keyed by the name used in targets. From NVIDIA's data sheets and architecture white papers; shared memory and threads
# follow from the architecture (`MULTIPROCESSOR`).
CARDS = {
    "a100": Card("A100", "sm_80", 108, 40 * _MB),
    "a30": Card("A30", "sm_80", 56, 24 * _MB),
    "a40": Card("A40", "sm_86", 84, 6 * _MB),
    "a10": Card("A10", "sm_86", 72, 6 * _MB),
    "rtx3090": Card("GeForce RTX 3090", "sm_86", 82, 6 * _MB),
    "l40s": Card("L40S", "sm_89", 142, 96 * _MB),
    "l4": Card("L4", "sm_89", 58, 48 * _MB),
    "rtx4090": Card("GeForce RTX 4090", "sm_89", 128, 72 * _MB),
    "rtx4080": Card("GeForce RTX 4080", "sm_89", 76, 64 * _MB),
    "h100": Card("H100", "sm_90a", 132, 50 * _MB),
    "h100-pcie": Card("H100 PCIe", "sm_90a", 114, 50 * _MB),
    "h200": Card("H200", "sm_90a", 132, 50 * _MB),
    "b200": Card("B200", "sm_100a", 148, 126 * _MB),
    "rtx5090": Card("GeForce RTX 5090", "sm_120a", 170, 96 * _MB),
    "rtxpro6000": Card("RTX PRO 6000 Blackwell", "sm_120a", 188, 128 * _MB),
}

# Multiprocessors and L2 of each architecture's largest data-centre part, for targets that are not installed here:
# templates ask whether a batch fills the machine, and a record made on such a part must be a point of its template's
# space where it is exported.
MULTIPROCESSORS = {80: 108, 86: 84, 89: 142, 90: 132, 100: 148, 120: 188}


class _Limits(NamedTuple):
    blocks: int
    threads: int
    shared_bytes: int
    reserved_bytes: int  # shared memory reserved in each thread block


# Limits of a multiprocessor, from a compute capability on (CUDA C++ Programming Guide, "Compute Capabilities"), and its
# number of 32-bit registers.
MULTIPROCESSOR = (
    (120, _Limits(24, 1536, 100 * 1024, 1024)),
    (90, _Limits(32, 2048, 228 * 1024, 1024)),
    (86, _Limits(16, 1536, 100 * 1024, 1024)),
    (80, _Limits(32, 2048, 164 * 1024, 1024)),
    (0, _Limits(16, 1024, 64 * 1024, 0)),
)
REGISTER_FILE = 65536
# Clusters of 1 to 16 thread blocks, each of which takes a whole multiprocessor, that an H200 runs at the same time, and
# its number of multiprocessors. Measured on four cards with equal results: scripts/probes/cluster_room.cu.
CLUSTERS_AT_ONCE = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)
CLUSTER_CORES = 132
# Most threads of a thread block, on every GPU.
MAX_THREADS = 1024
# Most thread blocks of a cluster: on every GPU that has clusters, and on the data-centre parts of 9.0 to 11.0.
PORTABLE_CLUSTER, MOST_CLUSTER = 8, 16
# The environment variable that limits the multiprocessors for which kernels are chosen, as on a slice of a GPU.
LIMIT = "TVM_SPARSE_MULTIPROCESSORS"

# Bytes a second one kernel reads from device memory. H200: measured on one card (docs/measuring.md);
# H100: the data sheet's ratio to the H200 applied to that.
READ_BANDWIDTH = (("H200", 4.47e12), ("H100", 4.47e12 * 3.35 / 4.8))


@functools.cache
def cpu() -> Machine:
    """This machine's CPU."""
    flags = _cpuinfo("flags").split()
    return Machine(
        "llvm",
        cpu_arch(),
        cpu_name(),
        cores=os.process_cpu_count() if hasattr(os, "process_cpu_count") else len(os.sched_getaffinity(0)),
        instructions=" ".join(one for one in X86_INSTRUCTIONS.get(cpu_arch(), "").split() if one in flags),
    )


def default_builders(gpus: int = 0) -> int:
    """Default number of processes that compile at once: one a core, at most 16, or 5 for each of several GPUs.

    With a GPU three cores are left free, for the process that measures on it and those that prepare and search. With
    several GPUs verification needs cores as well, and more builders than keep the GPUs busy slow it down.
    """
    cores, most = cpu().cores - 3 * gpus, 5 * gpus if gpus > 1 else 16
    return max(1, min(cores, most))


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


@functools.cache
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
def _driver() -> Any:
    """The CUDA driver, initialised; None if there is none."""
    import ctypes

    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    if not hasattr(driver, "cuInit"):  # the stub that a process building CUDA code loads instead
        return None
    return None if driver.cuInit(0) else driver


@functools.cache
def gpus() -> tuple[Machine, ...]:
    """The CUDA GPUs that this process may use, in CUDA's order, read from the driver alone."""
    import ctypes

    driver, count = _driver(), ctypes.c_int()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()

    def describe(number: int) -> Machine:
        device, name = ctypes.c_int(), ctypes.create_string_buffer(256)
        driver.cuDeviceGet(ctypes.byref(device), number)
        driver.cuDeviceGetName(name, len(name), device)

        def attribute(which: int) -> int:
            value = ctypes.c_int()
            driver.cuDeviceGetAttribute(ctypes.byref(value), which, device)
            return value.value

        # CU_DEVICE_ATTRIBUTE_: COMPUTE_CAPABILITY_MAJOR 75, _MINOR 76, MULTIPROCESSOR_COUNT 16, L2_CACHE_SIZE 38,
        # MAX_THREADS_PER_BLOCK 1
        arch = cuda_arch(attribute(75), attribute(76))
        cores = min(attribute(16), limit())
        return Machine("cuda", arch, name.value.decode(), cores=cores, max_threads=attribute(1), l2_bytes=attribute(38))

    return tuple(describe(number) for number in range(count.value))


def gpu() -> Machine | None:
    """The first CUDA GPU that kernels are compiled for; None where there is none."""
    return next((found for found in gpus() if below_floor(found) is None), None)


def below_floor(machine: Machine) -> str | None:
    """Why no kernel is compiled for a machine, if its compute capability is below `FLOOR`; else None."""
    if machine.kind != "cuda" or machine.capability >= FLOOR:
        return None
    of = "" if machine.name.startswith(("sm_", "compute_")) else f" of the {machine.name}"
    return (
        f"compute capability {_point(machine.capability)}{of} is below {_point(FLOOR)} (sm_{FLOOR}), the least that"
        " kernels are compiled for"
    )


def _point(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"


def gpu_bus(number: int) -> str:
    """The PCI address of a GPU, by which tools that number GPUs differently from CUDA know it."""
    import ctypes

    device, text = ctypes.c_int(), ctypes.create_string_buffer(32)
    driver = _driver()
    driver.cuDeviceGet(ctypes.byref(device), number)
    driver.cuDeviceGetPCIBusId(text, len(text), device)
    return text.value.decode()


def visible_gpus() -> list[str]:
    """For each of `gpus`, the value of `CUDA_VISIBLE_DEVICES` with which a child process sees that GPU alone."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [str(number) for number in range(len(gpus()))] if chosen is None else chosen.split(",")
    return [name.strip() for name in names[: len(gpus())]]


def limit() -> int:
    """The most multiprocessors for which kernels are chosen, from the environment variable `LIMIT`.

    Raises ValueError if its value is not an integer of at least 1.
    """
    text = os.environ.get(LIMIT, "")
    if text and (not text.isascii() or not text.isdigit() or int(text) < 1):
        raise ValueError(f"{LIMIT}: expected a number of multiprocessors of at least 1, got {text!r}")
    return int(text) if text else 1 << 30


def resolve(target: str) -> Machine:
    """The machine that a `--target` text means.

    `auto`: the GPU if there is one that kernels are compiled for, else the CPU; `cpu`, `cuda`: this machine's;
    otherwise an architecture (`sm_90a`, `x86-64-v3`), to compile for any machine of it, an architecture with a number
    of multiprocessors (`sm_89:multiprocessors=128`), or a card (`CARDS`).

    Raises
    ------
    UnknownArch
        With the valid names, if `target` is none of them, or if it is `cuda` and there is no GPU; as `BelowFloor` for
        a GPU below `FLOOR`.
    """
    if not isinstance(target, str):
        raise UnknownArch(f"target: expected the name of a machine, an architecture or a card, got {target!r}")
    if target == "auto":
        return gpu() or cpu()
    if target in ("cpu", "llvm"):
        return cpu()
    if target == "cuda":
        found = gpu()
        if found is None:
            refused = next(filter(None, map(below_floor, gpus())), None)
            if refused:
                raise BelowFloor(f"target: got 'cuda': {refused}")
            raise UnknownArch(
                "target: got 'cuda', but no CUDA GPU was found; name an architecture (sm_90a) to compile for one"
            )
        return found
    card = CARDS.get(target.lower())
    arch, cores = (card.arch, card.multiprocessors) if card else _arch_and_cores(target)
    for present in (*gpus(), cpu()):
        same = present.arch == arch and cores in (0, present.cores) and (card is None or card.name in present.name)
        if same and below_floor(present) is None:
            return dataclasses.replace(present, instructions="")
    if (named := _CUDA.fullmatch(arch)) and not (named["code"] == "compute" and named["specific"]):
        most = MULTIPROCESSORS.get(int(named["number"]), 108)
        name, l2_bytes = (card.name, card.l2_bytes) if card else (target, 0)
        wanted = Machine("cuda", arch, name, cores=cores or most, l2_bytes=l2_bytes)
        if refused := below_floor(wanted):
            raise BelowFloor(f"target: got {target!r}: {refused}")
        return wanted
    levels = [level for level, _ in X86_LEVELS] + ["x86-64", "aarch64"]
    if arch in levels and not cores:
        return Machine("llvm", arch, target, cores=cpu().cores)
    import difflib

    names = ["auto", "cpu", "cuda", "sm_80", "sm_86", "sm_89", "sm_90a", *CARDS, *levels]
    near = difflib.get_close_matches(target, names, n=3, cutoff=0.3)
    raise UnknownArch(f"target: got {target!r}; nearest valid names: {', '.join(near or names)}")


def _arch_and_cores(target: str) -> tuple[str, int]:
    """The architecture and the number of multiprocessors that a target names; 0 if it gives no number."""
    arch, colon, text = target.partition(":")
    if not colon:
        return target, 0
    name, _, count = text.partition("=")
    if name != "multiprocessors" or not (count.isascii() and count.isdigit() and 0 < int(count) < 1 << 16):
        raise UnknownArch(f"target: got {target!r}; expected {arch}:multiprocessors=NUMBER, such as 128")
    return arch, int(count)


def target(machine: Machine) -> str:
    """The target text that `resolve` takes for a machine: `cpu` for this CPU, which may have instructions beyond its
    level.
    """
    if machine == cpu():
        return "cpu"
    if machine.kind == "cuda" and resolve(machine.arch).cores != machine.cores:
        return f"{machine.arch}:multiprocessors={machine.cores}"
    return machine.arch


def suitability(arch: str, machine: Machine) -> int | None:
    """Distance of a library's architecture from a machine's: 0 for the same, None if the machine cannot run it."""
    if arch == machine.arch:
        return 0
    levels = [*(level for level, _ in X86_LEVELS), "x86-64"]
    if arch in levels and machine.arch in levels:
        below = levels.index(arch) - levels.index(machine.arch)
        return below if below > 0 else None
    theirs, ours = _CUDA.fullmatch(arch), _CUDA.fullmatch(machine.arch)
    if theirs is None or ours is None or theirs["specific"]:
        return None
    older = int(ours["number"]) - int(theirs["number"])
    if theirs["code"] == "compute":
        return _TRANSLATED + older if older >= 0 else None
    same_major = int(ours["number"]) // 10 == int(theirs["number"]) // 10
    return 1 + older if same_major and older >= 0 and ours["code"] == "sm" else None


# PTX comes after all machine code.
_TRANSLATED = 1000


def nearest_arch(machine: Machine, archs: Iterable[str]) -> str | None:
    """The architecture most like a machine's among those of the same kind, whose decisions may suit it; None if there
    is none.
    """
    levels = [level for level, _ in reversed(X86_LEVELS)]

    def place(arch: str) -> int:
        found = _CUDA.fullmatch(arch)
        return int(found["number"]) if found else levels.index(arch) if arch in levels else -1

    same = [arch for arch in archs if bool(_CUDA.fullmatch(arch)) == (machine.kind == "cuda") and arch != machine.arch]
    return min(same, key=lambda arch: (abs(place(arch) - place(machine.arch)), arch), default=None)
