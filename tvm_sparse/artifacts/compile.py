"""Compiling candidates of problems to shared libraries, one or several in each."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core import scratch, spaces
from ..core.candidate import Candidate
from ..core.machine import AVX512_BF16, Machine
from ..core.problem import Problem, numpy_dtype
from ..core.template import Program
from . import trust
from .manifest import symbol_of
from .residency import unfit

# TVM's launch parameter for cooperative kernels, whose thread blocks must all be resident.
COOPERATIVE = "tirx.use_cooperative_launch"

# Functions that generated code calls by name; tvm_ffi, loaded in every process that loads a library, defines them.
OF_THE_RUNTIME = ("TVMFFIErrorSetRaisedFromCStrParts", "TVMFFIEnvModRegisterSystemLibSymbol")


class CompileError(RuntimeError):
    """The candidate does not compile, or compiled to something that may not be shipped."""


@dataclass(frozen=True)
class Compiled:
    """A kernel in a library on disk, with the properties that are known without running it."""

    path: str
    seconds: float  # to build the program, compile and link it
    workspaces: tuple[dict[str, Any], ...]  # `core.template.Workspace` as dicts, in calling order
    # CUDA: the maximum of each resource over its kernels, and `core.template.Template.needs`. CPU: its `instructions`.
    resources: dict[str, int] | None
    resident: dict[str, int] | None = None  # `core.template.Resident` as a dict, for a cooperative kernel
    symbol: str = "main"  # name of the library's function


# The compiler's names of CPU instructions (`core.machine.X86_INSTRUCTIONS`).
LLVM_ATTRIBUTES = {AVX512_BF16: "+avx512bf16"}


def target_of(machine: Machine, *, quick_host: bool = False, instructions: Sequence[str] = ()) -> Any:
    """The compiler's target for a machine; with `quick_host` the host code, which launches kernels, is not optimised.

    `instructions`: those of a CPU beyond its level.
    """
    from tvm.target import Target

    if machine.kind == "cuda":
        arch = machine.arch.replace("compute_", "sm_")  # the compile callback decides whether PTX is kept
        host = {"kind": "llvm", "opt-level": 0} if quick_host else {"kind": "llvm"}
        return Target({"kind": "cuda", "arch": arch}, host=Target(host))
    cpu: dict[str, Any] = {"mcpu": machine.arch} if machine.arch.startswith("x86-64") else {}
    if instructions:
        cpu["mattr"] = [LLVM_ATTRIBUTES[name] for name in instructions]
    return Target({"kind": "llvm", "num-cores": machine.cores, **cpu})


def compile_candidate(
    problem: Problem,
    candidate: Candidate,
    machine: Machine,
    path: Path,
    symbol: str = "main",
    *,
    quick_host: bool = False,
) -> Compiled:
    """Build the candidate's program and export it to `path` as a shared library that holds machine code.

    The file is written beside `path` and renamed into place. Without a `symbol` the kernel has that of
    `manifest.symbol_of`. `quick_host` is for libraries of which only the kernel is timed, on a GPU: the host code is
    compiled without optimisation, which saves a fifth of a small kernel's build time.

    Raises
    ------
    CompileError
        If the candidate's template has another version, its decisions are not a point of the template's space, the
        compiler fails, there is no C compiler to link with, a CUDA library holds no code for the machine's
        architecture, or the machine cannot run it (`residency.unfit`).
    """
    [found] = compile_bundle([(problem, candidate, symbol)], machine, path, quick_host=quick_host)
    if isinstance(found, CompileError):
        raise found
    return found


def compile_bundle(
    kernels: Sequence[tuple[Problem, Candidate, str]], machine: Machine, path: Path, *, quick_host: bool = False
) -> list[Compiled | CompileError]:
    """Export one library with all of these kernels, each under the symbol given or, if that is empty, `symbol_of` it.

    All symbols must differ.

    A kernel that does not compile is left out, and the result has its `CompileError` instead. If none compiles, no
    library is written.
    """
    parts: list[tuple[Any, Program, str, float] | CompileError] = []
    for problem, candidate, symbol in kernels:
        started = time.perf_counter()
        try:
            parts.append((*_module(problem, candidate, machine, symbol, quick_host), time.perf_counter() - started))
        except CompileError as error:
            parts.append(error)
        except Exception as error:
            if len(kernels) == 1:
                raise
            parts.append(CompileError(f"{candidate}: {type(error).__name__}: {error}"))
    modules = [part[0] for part in parts if not isinstance(part, CompileError)]
    if not modules:
        return [part for part in parts if isinstance(part, CompileError)]
    root, *rest = modules
    for module in rest:
        root.import_module(module)

    started = time.perf_counter()
    trust.make_folder(path.parent, trust.SHARED)
    found: list[Compiled | CompileError] = []
    with scratch.written(path) as unfinished:
        root.export_library(str(unfinished), fcompile=_link)
        resources = _resources(unfinished, machine)
        linked = (time.perf_counter() - started) / len(modules)
        for part, (problem, candidate, _) in zip(parts, kernels, strict=True):
            if isinstance(part, CompileError):
                found.append(part)
                continue
            _, program, symbol, seconds = part
            used = dict.fromkeys(program.instructions, 1)
            own = _of_symbol(resources or {}, symbol)
            needs = spaces.find(candidate.template, problem.operator).needs(problem, candidate.values)
            taken = {**(used if resources is None else _most(own)), **needs} or None
            resident = None if program.resident is None else asdict(program.resident)
            if reason := unfit(resident, taken, machine) or _refused_launch(problem, candidate, own, machine):
                found.append(CompileError(f"{candidate}: {reason}"))
                continue
            workspaces = tuple(asdict(workspace) for workspace in program.workspaces)
            found.append(Compiled(str(path), seconds + linked, workspaces, taken, resident, symbol))
        if not any(isinstance(one, Compiled) for one in found):
            unfinished.unlink()
    return found


def _refused_launch(
    problem: Problem, candidate: Candidate, kernels: Sequence[Mapping[str, int]], machine: Machine
) -> str | None:
    """Why a GPU would refuse to launch a program because of its shared memory; None if it would not, or if that is
    unknown.

    It is known for a program of one kernel whose template declares the launch. The host code requests more than
    `Machine.shared_bytes` only if dynamic buffers alone exceed them.
    """
    template = spaces.find(candidate.template, problem.operator)
    if template.launch is None or len(kernels) != 1:
        return None
    dynamic = template.launch(problem, candidate.values).dynamic_shared_bytes
    static = kernels[0].get("shared_bytes", 0)
    most = machine.block_shared_bytes if dynamic > machine.shared_bytes else machine.shared_bytes
    if static + dynamic <= most:
        return None
    return f"{static} bytes of static and {dynamic} of dynamic shared memory are more than a launch may have, {most}"


def _module(
    problem: Problem, candidate: Candidate, machine: Machine, symbol: str, quick_host: bool
) -> tuple[Any, Program, str]:
    """The compiler's module of one candidate, with its device code, the program it was built from, and its symbol."""
    template = spaces.find(candidate.template, problem.operator)
    if template.version != candidate.version:
        raise CompileError(f"{candidate}: the template is at version {template.version}")
    reason = template.point(problem, machine, candidate.values)
    if reason:
        raise CompileError(f"{candidate} is not a point of the template's space for {problem}: {reason}")

    if machine.kind == "cuda":
        # Before the first compilation: otherwise the compiler silently exports CUDA source instead.
        from . import cuda

        cuda.activate()
    import tvm
    from tvm.support import cc

    if cc.get_cc() is None:
        raise CompileError(
            "no C compiler, which links libraries: apt-get install g++ (or clang, or name one by the variable CXX)"
        )
    program = template.build(problem, candidate.values)
    if machine.kind == "llvm":
        _require_alignment(program.module, candidate)
    main = program.module["main"]
    launched = main.attrs.get("tirx.kernel_launch_params", ()) if main.attrs else ()
    if len({template.cooperative, program.resident is not None, COOPERATIVE in map(str, launched)}) > 1:
        raise CompileError(f"{candidate}: template, program and launch do not agree on whether it is cooperative")
    if not symbol:
        resident = None if program.resident is None else asdict(program.resident)
        symbol = symbol_of(problem.key, machine.arch, candidate, tuple(map(asdict, program.workspaces)), resident)
    target = target_of(machine, quick_host=quick_host, instructions=program.instructions)
    named = program.module
    if symbol != "main":  # device functions are named after it
        named = tvm.IRModule({symbol: main.with_attr("global_symbol", symbol)}, attrs=program.module.attrs)
    with contextlib.ExitStack() as stack:
        stack.enter_context(target)
        if machine.arch.startswith("compute_"):
            stack.enter_context(cuda.as_ptx())
        module = tvm.compile(named, target=target, tir_pipeline=program.pipeline or "default")
    return module.mod, program, symbol


def _link(output: str, objects: Sequence[str], options: Sequence[str] = ()) -> None:
    """Link a shared library, by calling the linker directly where that suffices.

    A C compiler starts the linker through two more processes and adds libraries that no kernel needs, which opens a
    hundred files instead of thirty. If symbols other than the runtime's stay undefined, the C compiler links.
    """
    from tvm.support import cc

    if linker := shutil.which("ld"):
        command = [linker, "-shared", "-z", "defs", "-z", "noexecstack", "--eh-frame-hdr", "--hash-style=gnu"]
        command += [f"--ignore-unresolved-symbol={symbol}" for symbol in OF_THE_RUNTIME]
        command += ["-o", output, *objects, "--as-needed", "-l:libm.so.6", "-l:libc.so.6", *options]
        if not subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode:
            return
    cc.create_shared(output, objects, list(options))


def _require_alignment(module: Any, candidate: Candidate) -> None:
    """Raise if the program promises the code generator an alignment of its arguments beyond that of their elements.

    A buffer without a declaration promises 64 bytes, which arrays of NumPy and PyTorch do not guarantee; an aligned
    vector access would then crash the process.
    """
    for argument in module["main"].params:
        promised = getattr(argument.ty, "data_alignment", 0)  # 0: a scalar
        if promised and promised > (size := numpy_dtype(str(argument.ty.dtype)).itemsize):
            raise CompileError(
                f"{candidate}: the argument {argument} promises an alignment of {promised} bytes;"
                f" arrays of other libraries have that of their elements: declare it with align={size}"
            )


def _resources(library: Path, machine: Machine) -> dict[str, dict[str, int]] | None:
    """Resources of each CUDA kernel of a library, by its name; None for a CPU's library, and for PTX."""
    if machine.kind != "cuda":
        return None
    from . import cuda

    if machine.arch.startswith("compute_"):
        if f".target {machine.arch.replace('compute_', 'sm_')}".encode() not in library.read_bytes():
            raise CompileError(f"the library holds no PTX for {machine.arch}")
        return None
    found = cuda.cubins(library)
    if not found:
        raise CompileError("the library holds CUDA source in the place of a cubin")
    wanted = machine.capability
    usage: dict[str, dict[str, int]] = {}
    for cubin in found:
        arch = cuda.cubin_arch(cubin)
        if arch != wanted:
            raise CompileError(f"the library holds a cubin for sm_{arch}, not for {machine.arch}")
        for kernel, taken in cuda.resource_usage(cubin).items():
            names = ("registers", "shared_bytes", "local_bytes", "spill_instructions")
            usage[kernel] = {name: getattr(taken, name) for name in names}
            if taken.max_threads is not None:
                usage[kernel]["threads"] = taken.max_threads
    return usage


def _of_symbol(usage: dict[str, dict[str, int]], symbol: str) -> list[dict[str, int]]:
    """Resources of each device function of one host function, after which they are named."""
    own = [taken for kernel, taken in usage.items() if re.fullmatch(rf"{symbol}_kernel(_\d+)?", kernel)]
    return own or list(usage.values())


def _most(kernels: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The maximum of each resource over these device functions."""
    return {name: max(taken.get(name, 0) for taken in kernels) for name in kernels[0]}
