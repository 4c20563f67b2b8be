"""Run the CUDA kernels that TVM generates on a machine without a GPU, and check how they behave.

`run_on_cpu` builds a module for CUDA as `tvm.compile` does, up to the CUDA C++ text. g++ compiles
that text behind `cuda_on_cpu.h`, where every CUDA thread is a fiber; LLVM compiles the host
function, so that launch extents, launch order and workspaces are those of the real thing. Both run
in a child process (`child`), which turns crashes, hangs and misbehaviour into an `EmulationError`:

* results that depend on the order of threads or blocks (the order is drawn from `seed`);
* data races between threads of a block, in shared and global memory, and between those of a cluster
  in shared memory (`check_races`);
* barriers and warp collectives which not all participants reach;
* blocks which exit while others of their cluster may access their shared memory;
* mbarriers used before they are initialised, beyond their count or for more or fewer bytes than come,
  and use of what bulk copies write by threads which have not awaited it (it is written at a moment
  drawn from `seed`);
* accesses out of the bounds of global, shared and local arrays, and misaligned vectors;
* reads of shared memory and workspaces before anything was written (they hold NaN or -1);
* in a launch that overlaps its producer kernel, use of what was read ahead of `griddepcontrol.wait`: what
  arrays held before that kernel wrote, which some threads find and others no longer. For the first kernel
  these are `stale` contents. A kernel that lets its consumer start before it has waited itself, or that
  never waits, leaves to it also what was there before its own producer wrote.

What it cannot see: performance, the weak memory model between blocks (a relaxed arrival at a cluster's
barrier orders what a release would, the scope of mbarrier operations and fences between proxies are
not looked at) and caches that are behind memory, contraction of a * b + c to fma, flushed denormals,
approximate intrinsics (`__expf` is exact here), the order and the rounding in which tensor cores add,
and registers or shared memory beyond a GPU's limits. Races through global memory between blocks show
only as different results under different seeds.
"""

from __future__ import annotations

import atexit
import functools
import mmap
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import tirx
from tvm.ir import Call, StringImm
from tvm.tirx.build import split_host_device_mods

from .child import CLUSTER_DIMS, COOPERATIVE, DIMS, DYNAMIC_SHARED, FLAGS, PAGE, Kernel, Placed, receive, send

__all__ = ["EmulationError", "cuda_source", "run_on_cpu"]

HEADER = Path(__file__).with_name("cuda_on_cpu.h")
CHILD = Path(__file__).with_name("child.py")
CANARY = 0xA5
GXX = ["g++", "-x", "c++", "-std=c++17", "-fPIC", "-w", "-U_FORTIFY_SOURCE"]
MACHINE_FLAGS = ["-O2", "-DCOC_MACHINE"]
# -Og, because most kernels run for less time than g++ takes for them. No guards around static variables: shared arrays
# are static here, and their locks would be instrumented.
KERNEL_FLAGS = [
    "-Og", "-g1", "-fno-threadsafe-statics", "-fno-strict-aliasing", "-ffp-contract=off", "-fwrapv",
    "-fsanitize=bounds,alignment", "-fno-sanitize-recover=all", "-fsanitize=thread",
]  # fmt: skip
KNOWN_INCLUDES = {"cstdint", "type_traits", "cuda.h", "cuda_fp16.h", "cuda_bf16.h",
                  "math_constants.h", "sm_61_intrinsics.h", "cuda/std/cstdint",
                  "cuda/std/type_traits", "cuda/barrier", "cooperative_groups.h"}  # fmt: skip


class EmulationError(RuntimeError):
    """A kernel did what CUDA does not allow, crashed or did not end."""


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
    mod : a module with one public PrimFunc, with thread bindings or as a TIRx kernel.
    target : the CUDA target.
    args : arrays (updated in place; C-contiguous; float16, and bfloat16 through ml_dtypes) and
        scalars in the order of the PrimFunc's parameters.
    pipeline : "tirx" for TIRx kernels, as `tir_pipeline` of `tvm.compile`.
    seed : draws the order of threads and blocks. Try several: an order may be lucky.
    timeout : seconds for the run, the build not counted.
    check_races : also report races which did no harm in this order. Switch it off only for code
        that synchronises threads of a block by other means than barriers and warp collectives.
    stale : what arrays hold while the producer kernel still runs, by their place in `args`; it then
        writes what they hold in `args`, outputs included. It is done at a moment drawn from `seed`,
        before any `griddepcontrol.wait` returns. Only if the kernels are launched to overlap
        (programmatic dependent launch).

    Raises
    ------
    EmulationError : a kernel misbehaved; the message says which, where and in which thread.
    NotImplementedError : the kernel uses what is not emulated (TMA, wgmma...).
    ValueError : an array is not C-contiguous, or its stale contents are of another shape or dtype.
    ValueError, TypeError... : as from `tvm.compile` and from the host function's own checks.
    """
    built = _built(_Lowering(mod, target, pipeline))
    with tempfile.TemporaryDirectory(prefix="cuda_on_cpu_") as folder:
        library = Path(folder) / "kernel.so"
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
    """What the host function launches each kernel with, a line a kernel: the extents and how, without any names."""
    host, device, _ = _lower(_Lowering(mod, target, pipeline))
    named = {str(gv.name_hint): f for gv, f in device.functions.items()}
    lines: list[str] = []
    passed: dict[int, str] = {}  # by place, what was last put down to be passed

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
    """What is lowered, as a key: equal for the same functions, which never change once somebody else holds them."""

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
    """What a library is compiled from, and how it is entered."""

    source: str  # translated
    kernels: tuple[Kernel, ...]
    host: bytes  # an object file
    entry: str


# Kept, as are the libraries: a test runs a kernel on several inputs and seeds, and building takes longer than that.
@functools.lru_cache(maxsize=8)
def _built(key: _Lowering) -> _Built:
    host, device, target = _lower(key)
    entries = [str(f.attrs["global_symbol"]) for f in host.functions.values()]
    entries = [e.removeprefix("__tvm_ffi_") for e in entries if e.startswith("__tvm_ffi_")]
    if len(entries) != 1:
        raise ValueError(f"expected a module with one public function, got {entries}")
    kernels = tuple(_kernel(str(gv.name_hint), f) for gv, f in device.functions.items())
    source = _translate(_device_source(device, target))
    runtime = tvm.get_global_func("target.build.llvm")(host, tvm.target.Target("llvm"))
    with tempfile.TemporaryDirectory(prefix="cuda_on_cpu_") as folder:
        compiled = Path(folder) / "host.o"
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
    """Let the host function take CPU tensors and get workspaces from the emulator."""

    def rewrite(call: Call) -> object:
        name = getattr(call.op, "name", "")
        if name == "tirx.tvm_struct_get" and getattr(call.args[2], "value", None) == 10:
            return tirx.IntImm("int32", 2)  # the tensor's device type: pretend that it is CUDA
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
    dtypes = tuple("handle" if isinstance(p.ty, tvm.ir.PointerType) else str(p.ty) for p in func.params)
    return Kernel(name, dtypes, params)


def _device_source(device: tvm.IRModule, target: tvm.target.Target) -> str:
    """CUDA C++, also on machines where TVM could call NVRTC: only the code generator is run."""
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
    return code.encode()  # once TVM's CUDA runtime is loaded, it takes nothing else


@functools.lru_cache(maxsize=8)
def _compiled(source: str, kernels: tuple[Kernel, ...], host: bytes) -> bytes:
    with tempfile.TemporaryDirectory(prefix="cuda_on_cpu_") as folder:
        return _compile(source, kernels, host, Path(folder)).read_bytes()


def _compile(source: str, kernels: Sequence[Kernel], host: bytes, folder: Path) -> Path:
    text, library = folder / "kernel.cu", folder / "kernel.so"
    entries = "".join(
        f'extern "C" void emulated_{k.name}(void** args) {{\n  cuda_on_cpu::call(&{k.name}, args);\n}}\n'
        for k in kernels
    )
    text.write_text(f'#include "{_precompiled_header()}"\n#line 1 "kernel.cu"\n{source}\n{entries}')
    (folder / "host.o").write_bytes(host)
    machine = folder / "machine.o"
    machine.write_bytes(_machine_object())
    _gxx([*GXX, *KERNEL_FLAGS, "-c", str(text), "-o", str(folder / "kernel.o")])
    # Linked without -fsanitize: the machine takes the place of the sanitizers' libraries.
    _gxx(
        [
            "g++",
            "-shared",
            "-Wl,-Bsymbolic",
            "-o",
            str(library),
            str(folder / "kernel.o"),
            str(folder / "host.o"),
            str(machine),
        ]
    )
    return library


@functools.cache
def _machine_object() -> bytes:
    with tempfile.TemporaryDirectory(prefix="cuda_on_cpu_") as folder:
        out = Path(folder) / "machine.o"
        _gxx([*GXX, *MACHINE_FLAGS, "-c", str(HEADER), "-o", str(out)])
        return out.read_bytes()


@functools.cache
def _precompiled_header() -> Path:
    """The header as the kernels include it, beside what g++ has made of it (".gch"), which it reads in its place."""
    folder = _folder()
    header = Path(folder.name) / HEADER.name
    shutil.copyfile(HEADER, header)
    precompiled = ["c++-header" if word == "c++" else word for word in GXX]
    _gxx([*precompiled, *KERNEL_FLAGS, str(header), "-o", f"{header}.gch"])
    return header


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    """Of what all libraries have in common; it goes with the process."""
    return tempfile.TemporaryDirectory(prefix="cuda_on_cpu_")


def _gxx(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NotImplementedError(f"g++ rejects the translated CUDA source:\n{done.stderr[:4000]}")


# ---- translation of CUDA C++ to what g++ and cuda_on_cpu.h take ----------------------------------


def _translate(source: str) -> str:
    """Line numbers are kept: errors point into the text that `cuda_source` returns."""
    for include in re.findall(r"#\s*include\s*<([^>]+)>", source):
        if include not in KNOWN_INCLUDES:
            raise NotImplementedError(f"#include <{include}>: not emulated")
    if "CUtensorMap" in source:
        raise NotImplementedError("CUtensorMap (TMA): not emulated")
    source = re.sub(r"#\s*include\s*<(?!cstdint>|type_traits>)[^>]+>", "", source)
    source = re.sub(
        r"extern\s+__shared__\s+(?:__align__\(\d+\)|alignas\(\d+\))?\s*([\w ]+?)\s+(\w+)\[\];",
        r"\1* \2 = (\1*)cuda_on_cpu::dynamic_shared();",
        source,
    )
    source = re.sub(r"__shared__\s+((?:alignas|__align__)\(\d+\))", r"\1 __shared__", source)
    return _translate_asm(source)


def _translate_asm(source: str) -> str:
    out, position = [], 0
    for match in re.finditer(r"\b(?:asm|__asm__)\b\s*(?:volatile|__volatile__)?\s*\(", source):
        if source.count('"', source.rfind("\n", 0, match.start()), match.start()) % 2:
            continue  # inside a string literal
        if match.start() < position:
            continue
        end = _closing(source, match.end())
        body = source[match.end() : end]
        try:
            code = _asm_to_cpp(body)
        except NotImplementedError as error:
            names = re.findall(r"(\w+)\s*\([^()]*\)\s*\{+", source[: match.start()])
            raise NotImplementedError(f"{names[-1] if names else '?'}: {error}") from None
        semicolon = source.index(";", end)
        out.append(source[position : match.start()])
        out.append(code + "\n" * source.count("\n", match.start(), semicolon))
        position = semicolon + 1
    return "".join([*out, source[position:]])


def _closing(text: str, start: int) -> int:
    """Index of the parenthesis that closes the one before `start`."""
    depth, quoted, i = 1, False, start
    while depth:
        c = text[i]
        if quoted:
            i += c == "\\"
            quoted = c != '"'
        else:
            quoted = c == '"'
            depth += {"(": 1, ")": -1}.get(c, 0)
        i += 1
    return i - 1


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator outside of brackets and strings."""
    parts, depth, quoted, last = [], 0, False, 0
    for i, c in enumerate(text):
        if c == '"' and (i == 0 or text[i - 1] != "\\"):
            quoted = not quoted
        if not quoted:
            depth += (c in "([{") - (c in ")]}")
            double = "::" in (text[i - 1 : i + 1], text[i : i + 2])
            if c == separator and depth == 0 and not (separator == ":" and double and i):
                parts.append(text[last:i])
                last = i + 1
    return [*parts, text[last:]]


def _asm_to_cpp(body: str) -> str:
    # "a" :: "b" has an empty section of outputs: part the colons first.
    sections = _split(re.sub(r'(?<=["\s)])::(?=\s*")', ": :", body), ":")
    text = "".join(s.encode().decode("unicode_escape") for s in re.findall(r'"((?:[^"\\]|\\.)*)"', sections[0]))
    operands = [
        _matched(r'\s*"[^"]*"\s*\((.*)\)\s*', o).group(1)
        for section in sections[1:3] for o in _split(section, ",") if o.strip()
    ]  # fmt: skip
    text = re.sub(r"%%", "%", text)
    text = re.sub(r"%(\d+)", lambda m: f"@{m.group(1)}@", text)
    statements = [s.strip() for s in text.replace("{\n", "{ ").split(";")]
    code = []
    for statement in statements:
        statement = re.sub(r"^\{\s*(?=[.@\w])|^\}\s*", "", statement).strip()
        if statement in ("", "}", "{"):
            continue
        code.append(_statement_to_cpp(statement))
    joined = " ".join(code)
    joined = re.sub(r"@(\d+)@", lambda m: f"({operands[int(m.group(1))]})", joined)
    return "{ " + joined.replace("%", "") + " }"


REGISTERS = {"pred": "bool", "b8": "uint8_t", "u64": "uint64_t", "b64": "uint64_t",
             "u32": "uint32_t", "b32": "uint32_t", "f32": "float"}  # fmt: skip
TYPES = {
    **{f"u{n}": f"uint{n}_t" for n in (8, 16, 32, 64)},
    **{f"b{n}": f"uint{n}_t" for n in (8, 16, 32, 64)},
    **{f"s{n}": f"int{n}_t" for n in (8, 16, 32, 64)},
    "f32": "float", "f64": "double",
}  # fmt: skip
SPECIAL = {
    "laneid": "cuda_on_cpu::self().lane", "warpid": "cuda_on_cpu::self().warp",
    "tid": "threadIdx", "ctaid": "blockIdx", "ntid": "blockDim", "nctaid": "gridDim",
    "clusterid": "cuda_on_cpu::cluster_index()", "cluster_nctaid": "cuda_on_cpu::machine.cluster",
    "cluster_ctarank": "cuda_on_cpu::self().block->rank",
    "cluster_nctarank": "cuda_on_cpu::cluster_size()", "nsmid": "2u",
    "lanemask_lt": "((1u << cuda_on_cpu::self().lane) - 1)",
    "lanemask_le": "((2u << cuda_on_cpu::self().lane) - 1)",
    "lanemask_eq": "(1u << cuda_on_cpu::self().lane)",
    "lanemask_gt": "~((2u << cuda_on_cpu::self().lane) - 1)",
    "lanemask_ge": "~((1u << cuda_on_cpu::self().lane) - 1)",
}  # fmt: skip
STRONG = {"volatile", "relaxed", "acquire", "release", "acq_rel", "mmio"}
ATOMICS = {"add": "Add", "min": "Min", "max": "Max", "and": "And", "or": "Or", "xor": "Xor",
           "exch": "Exch", "inc": "Inc", "dec": "Dec"}  # fmt: skip
# d = f(a, b, ...), by the opcode without its rounding and flush modifiers.
ARITHMETIC = {
    "mov": "{0}", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "mul.lo": "{0} * {1}",
    "fma": "fmaf({0}, {1}, {2})", "mad.lo": "{0} * {1} + {2}", "min": "min({0}, {1})",
    "max": "max({0}, {1})", "abs": "({0} < 0 ? -{0} : {0})", "neg": "-{0}", "and": "{0} & {1}",
    "or": "{0} | {1}", "xor": "{0} ^ {1}", "not": "~{0}", "ex2": "exp2f({0})", "lg2": "log2f({0})",
    "rcp": "1 / {0}", "rsqrt": "1 / sqrtf({0})", "sqrt": "sqrtf({0})", "tanh": "tanhf({0})",
    "sin": "sinf({0})", "cos": "cosf({0})", "div": "{0} / {1}",
}  # fmt: skip
BITS = {
    "popc.b32": "__popc({0})", "popc.b64": "__popcll({0})", "clz.b32": "__clz({0})",
    "clz.b64": "__clzll({0})", "brev.b32": "__brev({0})", "brev.b64": "__brevll({0})",
    "bfind.u32": "31 - __clz({0})", "bfind.u64": "63 - __clzll({0})",
    "prmt.b32": "__byte_perm({0}, {1}, {2})",
    "bfe.u32": "uint32_t(((uint64_t({0}) >> ({1} & 255)) & ((1ull << min({2} & 255, 32u)) - 1)))",
    "cvta.to.shared.u64": "uint64_t(cuda_on_cpu::shared_address((const void*){0}))",
    "cvta.to.global.u64": "(uint64_t){0}", "cvt.u32.u64": "uint32_t({0})",
    "dp4a.u32.s32": "cuda_on_cpu::ptx::dp4a<uint8_t, int8_t>({0}, {1}, {2})",
    "dp4a.s32.u32": "cuda_on_cpu::ptx::dp4a<int8_t, uint8_t>({0}, {1}, {2})",
    "cvt.u8.u16": "uint8_t({0})", "cvt.u16.u8": "uint16_t({0})",
    "activemask.b32": "__activemask()", "createpolicy.fractional.L2::evict_first.b64": "0ull",
    "createpolicy.fractional.L2::evict_last.b64": "0ull",
}  # fmt: skip
# Ordering is stronger here than anything these ask for.
NO_EFFECT = re.compile(
    r"(fence|membar)(\.(acq_rel|sc|cta|cluster|gpu|sys|gl|acquire|release))*"
    r"|fence\.mbarrier_init\.release\.cluster|fence\.proxy\.async\.shared::cta"
)
MBARRIER = re.compile(
    r"mbarrier\.(init|arrive\.expect_tx|try_wait\.parity)(\.(acquire|release)\.(cta|cluster))?\.shared(::cta)?\.b64"
)


def _statement_to_cpp(statement: str) -> str:
    """One PTX statement as C++; registers are variables, operands @N@ are filled in later."""
    if guard := re.match(r"@(!?)(%?\w+)\s+(.*)", statement, re.S):
        return f"if ({guard.group(1)}{guard.group(2)}) {{ {_statement_to_cpp(guard.group(3))} }}"
    if register := re.fullmatch(r"\.reg\s+\.(\w+)\s+(%?\w+)", statement):
        kind = register.group(1)
        if kind not in REGISTERS:
            raise NotImplementedError(f"PTX register class .{kind} is not emulated")
        return f"{REGISTERS[kind]} {register.group(2)} = {{}};"
    opcode, _, rest = statement.partition(" ")
    operands = [o.strip() for o in _split(rest, ",") if o.strip()]
    parts = opcode.split(".")
    code = _instruction(opcode, parts, operands)
    if code is None:
        raise NotImplementedError(f"PTX instruction {opcode} is not emulated")
    return code


def _matched(pattern: str, text: str) -> re.Match[str]:
    """The match of all of a text; NotImplementedError if it is of another form."""
    match = re.fullmatch(pattern, text, re.S)
    if match is None:
        raise NotImplementedError(f"operand {text!r} of inline assembly is not emulated")
    return match


def _address(operand: str) -> str:
    inner = _matched(r"\[\s*(\S+?)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
    return f"{inner.group(1)}, {inner.group(2) or 0}"


def _lanes(operand: str) -> list[str]:
    return [o.strip() for o in operand.strip("{} ").split(",")]


def _set(destination: str, value: str) -> str:
    return "" if destination == "_" else f"cuda_on_cpu::ptx::set({destination}, {value});"


def _mbarrier(action: str, ops: list[str]) -> str | None:
    place = f"cuda_on_cpu::ptx::in_block({_address(next(o for o in ops if o.startswith('[')))})"
    if action == "init":
        return f"cuda_on_cpu::mbarrier_init({place}, {ops[1]});"
    if action == "arrive.expect_tx":
        return f"cuda_on_cpu::mbarrier_arrive({place}, {ops[2]});" if ops[0] == "_" else None
    return f"{ops[0]} = cuda_on_cpu::mbarrier_wait(__builtin_LINE(), {place}, {ops[2]});"


def _instruction(opcode: str, parts: list[str], ops: list[str]) -> str | None:
    family, kind = parts[0], TYPES.get(parts[-1])
    strong = str(bool(STRONG & set(parts))).lower()
    if family in ("ld", "st", "atom", "red") and (
        kind is None or "cluster" in opcode or "bulk" in parts or "async" in parts
    ):
        return None
    if family in ("ld", "st"):
        width = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
        place, values = (ops[1], _lanes(ops[0])) if family == "ld" else (ops[0], _lanes(ops[1]))
        address, offset = _address(place).split(", ")
        code = f"cuda_on_cpu::ptx::check_alignment({address}, {offset}, {width} * sizeof({kind}));"
        for i, value in enumerate(values):
            at = f"{address}, {offset} + {i} * int(sizeof({kind})), {strong}"
            code += (
                _set(value, f"cuda_on_cpu::ptx::load<{kind}>({at})") if family == "ld"
                else f"cuda_on_cpu::ptx::store<{kind}>({at}, {value});"
            )  # fmt: skip
        return code
    if family in ("atom", "red"):
        destination, (place, *values) = (ops[0], ops[1:]) if family == "atom" else ("_", ops)
        at = f"cuda_on_cpu::ptx::at<{kind}>({_address(place)})"
        values = [f"cuda_on_cpu::ptx::as<{kind}>({v})" for v in values]
        if "cas" in parts:
            call = f"atomicCAS({at}, {values[0]}, {values[1]})"
        elif "noftz" in parts or any(re.fullmatch(r"v\d", p) for p in parts):
            return None
        else:
            name = next((ATOMICS[p] for p in parts if p in ATOMICS), None)
            if name is None:
                return None
            call = f"atomic{name}({at}, {values[0]})"
        return f"{call};" if destination == "_" else _set(destination, call)
    if re.fullmatch(r"shfl\.sync\.(up|down|bfly|idx)\.b32", opcode):
        d, _, p = ops[0].partition("|")
        flag = f"bool in_range; uint32_t got = cuda_on_cpu::ptx::shuffle(\"{parts[2]}\", " \
               f"cuda_on_cpu::ptx::as<uint32_t>({ops[1]}), {ops[2]}, {ops[3]}, {ops[4]}, " \
               f"&in_range, __builtin_LINE());"  # fmt: skip
        return f"{{ {flag} {_set(d, 'got')} {f'{p} = in_range;' if p else ''} }}"
    if matrix := re.fullmatch(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(f16|bf16)\.\1\.f32", opcode):
        d, a, b, c = ("{" + ", ".join(_lanes(o)) + "}" for o in ops)
        value = {"f16": "half_value", "bf16": "bfloat16_value"}[matrix.group(1)]
        code = f"uint32_t of_a[4] = {a}, of_b[2] = {b}; float of_c[4] = {c}; " \
               f"cuda_on_cpu::ptx::mma(cuda_on_cpu::{value}, of_a, of_b, of_c, __builtin_LINE());"  # fmt: skip
        return "{ " + code + " ".join(_set(lane, f"of_c[{i}]") for i, lane in enumerate(_lanes(d))) + " }"
    if opcode == "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32":
        d, a, b, c = ("{" + ", ".join(_lanes(o)) + "}" for o in ops)
        code = f"uint32_t of_a[4] = {a}, of_b[2] = {b}; float of_c[4] = {c}; " \
               f"cuda_on_cpu::ptx::mma_tf32(of_a, of_b, of_c, __builtin_LINE());"  # fmt: skip
        return "{ " + code + " ".join(_set(lane, f"of_c[{i}]") for i, lane in enumerate(_lanes(d))) + " }"
    if load := re.fullmatch(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16", opcode):
        count, trans = int(load.group(1)), str(bool(load.group(2))).lower()
        call = f"cuda_on_cpu::ptx::load_matrices({_address(ops[1])}, {count}, {trans}, got, __builtin_LINE());"
        lanes = " ".join(_set(lane, f"got[{i}]") for i, lane in enumerate(_lanes(ops[0])))
        return "{ uint32_t got[4]; " + call + lanes + " }"
    if opcode == "vote.sync.ballot.b32":
        return _set(ops[0], f"__ballot_sync({ops[2]}, {ops[1]})")
    if opcode in ("vote.sync.any.pred", "vote.sync.all.pred"):
        return f"{ops[0]} = __{parts[2]}_sync({ops[2]}, {ops[1]});"
    if re.fullmatch(r"match\.any\.sync\.b(32|64)", opcode):
        return _set(ops[0], f"__match_any_sync({ops[2]}, {ops[1]})")
    if re.fullmatch(r"redux\.sync\.(add|min|max|and|or|xor)\.\w32", opcode) and kind != "float":
        value = f"cuda_on_cpu::ptx::as<{kind}>({ops[1]})"
        return _set(ops[0], f"__reduce_{parts[2]}_sync({ops[2]}, {value})")
    if opcode == "elect.sync":
        d, _, p = ops[0].partition("|")
        first = f"__builtin_ctz(__ballot_sync({ops[1]}, 1))"
        return f"{{ unsigned first = {first}; {p} = cuda_on_cpu::self().lane == first; {_set(d, 'first')} }}"
    if opcode == "bar.warp.sync":
        return f"__syncwarp({ops[0]});"
    if barrier := re.fullmatch(r"(bar|barrier)(\.cta)?\.(sync|arrive)(\.aligned)?", opcode):
        threads, wait = (ops[1] if len(ops) > 1 else "0"), str(barrier.group(3) == "sync").lower()
        return (f'cuda_on_cpu::block_barrier("bar.{barrier.group(3)}", __builtin_LINE(), {ops[0]}, '
                f"{threads}, false, {wait});")  # fmt: skip
    if re.fullmatch(r"barrier\.cluster\.(arrive(?:\.release|\.relaxed)?|wait(?:\.acquire)?)(?:\.aligned)?", opcode):
        return f"cuda_on_cpu::cluster_{parts[2]}(__builtin_LINE());"
    if barrier := re.fullmatch(r"(bar|barrier)(?:\.cta)?\.red\.(popc|and|or)(?:\.aligned)?\.(u32|pred)", opcode):
        threads, p = (ops[2], ops[3]) if len(ops) == 4 else ("0", ops[2])
        negate, compare = {"popc": ("", ""), "and": ("!", " == 0"), "or": ("", " > 0")}[barrier.group(2)]
        call = (f'cuda_on_cpu::block_barrier("bar.red", __builtin_LINE(), {ops[1]}, {threads}, '
                f"{negate}({p}))")  # fmt: skip
        return f"{ops[0]} = {call}{compare};"
    if opcode in ("cp.async.ca.shared.global", "cp.async.cg.shared.global") or re.fullmatch(
        r"cp\.async\.c[ag]\.shared\.global\.L2::\d+B", opcode
    ):
        filled = ops[3] if len(ops) > 3 else ops[2]
        return (f"cuda_on_cpu::ptx::copy_async({_address(ops[0])}, (const void*)"
                f"{_address(ops[1])}, {ops[2]}, {filled});")  # fmt: skip
    if barrier := MBARRIER.fullmatch(opcode):
        return _mbarrier(barrier.group(1), ops)
    if opcode == "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes":
        to, barrier_there = (f"cuda_on_cpu::ptx::in_cluster({_address(ops[i])})" for i in (0, 3))
        source = f"cuda_on_cpu::ptx::in_block({_address(ops[1])})"
        return f"cuda_on_cpu::bulk_copy({to}, {source}, {ops[2]}, {barrier_there});"
    if re.fullmatch(
        r"cp\.async\.bulk\.shared::(cluster|cta)\.global\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?", opcode
    ):
        to, source, barrier_there = (f"cuda_on_cpu::ptx::in_block({_address(ops[i])})" for i in (0, 1, 3))
        return f"cuda_on_cpu::bulk_copy({to}, {source}, {ops[2]}, {barrier_there});"
    if re.fullmatch(r"cp\.async\.bulk\.prefetch\.L2\.global(\.L2::cache_hint)?", opcode):
        # No more than a hint, but one that should be about something.
        return f"cuda_on_cpu::bulk_prefetch(cuda_on_cpu::ptx::in_block({_address(ops[0])}), {ops[1]});"
    if opcode in ("cp.async.commit_group", "cp.async.wait_group", "cp.async.wait_all"):
        return f"cuda_on_cpu::ptx::{parts[2]}({', '.join(ops)});"
    if re.fullmatch(r"prefetchu?(\.global)?\.L[12]", opcode):
        # No more than a hint, but one that should be about something.
        return f"cuda_on_cpu::ptx::check_place({_address(ops[0])});"
    if opcode == "mov." + parts[-1] and ops[1].startswith("%"):
        register = ops[1][1:]
        base = SPECIAL.get(register.partition(".")[0])
        return base and _set(ops[0], base + register[len(register.partition(".")[0]) :])
    if opcode == "setp.ne.b32":
        return f"{ops[0]} = ({ops[1]}) != ({ops[2]});"
    if opcode == "setp.eq.u32":
        return f"{ops[0]} = ({ops[1]}) == ({ops[2]});"
    if opcode in ("selp.b32", "selp.u32"):
        return _set(ops[0], f"uint32_t({ops[3]} ? {ops[1]} : {ops[2]})")
    if family == "nanosleep":
        return f"__nanosleep({ops[0]});"
    if opcode == "trap":
        return "__trap();"
    if opcode in BITS:
        return _set(ops[0], BITS[opcode].format(*ops[1:]))
    if opcode == "mapa.shared::cluster.u32":
        return _set(ops[0], f"cuda_on_cpu::ptx::map_shared_address({ops[1]}, {ops[2]})")
    if opcode == "griddepcontrol.wait":
        return "cuda_on_cpu::await_previous();"
    if opcode == "griddepcontrol.launch_dependents":
        return "cuda_on_cpu::launch_dependents();"
    if NO_EFFECT.fullmatch(opcode):
        return "cuda_on_cpu::yield_point();"
    modifiers = {"rn", "ftz", "approx", "full", parts[-1]}
    name = ".".join([family, *(p for p in parts[1:] if p not in modifiers)])
    if name in ARITHMETIC and kind in ("float", "int32_t", "uint32_t", "int64_t", "uint64_t"):
        if kind != "float" and family in ("fma", "ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh"):
            return None
        typed = [f"cuda_on_cpu::ptx::as<{kind}>({o})" for o in ops[1:]]
        value = f"{kind}({ARITHMETIC[name].format(*typed)})"
        if kind == "float" and family in ("add", "sub", "mul", "fma", "ex2"):
            value = f"cuda_on_cpu::ptx::canonical({value})"
        return _set(ops[0], value)
    return None


# ---- run ---------------------------------------------------------------------------------------


class _GuardedArray:
    """A copy of an array in memory shared with the child, ending at a page without access.

    The end is rounded up to 16 bytes, the alignment that the widest vector access needs. What is
    left of the pages in front and behind is filled with a pattern and compared afterwards.
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
    """The process that forks the runs, and how to ask it."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._connection, theirs = socket.socketpair()
        with theirs:
            runtime = Path(tvm.__file__).with_name("lib") / "libtvm_runtime.so"
            command = [sys.executable, "-P", str(CHILD), str(theirs.fileno()), str(runtime)]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def run(self, request: dict[str, Any], files: Sequence[int], timeout: float) -> str | int:
        """What the child said, or the status that it ended with."""
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
    """What went wrong, if anything: text from the emulator or an exception of the host function."""
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
        if _runner is not None and _runner.owner != os.getpid():  # of the process that this one was forked of
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
