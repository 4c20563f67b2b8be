"""One candidate of one problem, compiled to a shared library."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem, numpy_dtype
from .residency import too_large

# What TVM calls the launch of a kernel whose thread blocks are all resident, or which fails.
COOPERATIVE = "tirx.use_cooperative_launch"


class CompileError(RuntimeError):
    """The candidate does not compile, or compiled to something that may not be shipped."""


@dataclass(frozen=True)
class Compiled:
    """A library on disk and what is known of it without running it."""

    path: str
    seconds: float  # to build the program, compile and link it
    workspaces: tuple[dict[str, Any], ...]  # `core.template.Workspace` as dicts, in calling order
    resources: dict[str, int] | None  # CUDA: the most that any kernel takes of each
    resident: dict[str, int] | None = None  # `core.template.Resident` as a dict, of a cooperative kernel


def target_of(machine: Machine) -> Any:
    """The compiler's target for a machine."""
    from tvm.target import Target

    if machine.kind == "cuda":
        return Target({"kind": "cuda", "arch": machine.arch}, host=Target({"kind": "llvm"}))
    cpu = {"mcpu": machine.arch} if machine.arch.startswith("x86-64") else {}
    return Target({"kind": "llvm", "num-cores": machine.cores, **cpu})


def compile_candidate(problem: Problem, candidate: Candidate, machine: Machine, path: Path) -> Compiled:
    """Build the candidate's program and export it to `path` as a shared library that holds machine code.

    The file is written beside `path` and renamed into place.

    Raises
    ------
    CompileError
        If the candidate's template has another version, its decisions are not a point of the template's space, the
        compiler fails, there is no C compiler to link with, a CUDA library holds no cubin for the machine's
        architecture, or the machine has no room for all thread blocks of a cooperative kernel.
    """
    started = time.perf_counter()
    template = spaces.find(candidate.template)
    if template.version != candidate.version:
        raise CompileError(f"{candidate}: the template is at version {template.version}")
    reason = template.point(problem, machine, candidate.values)
    if reason:
        raise CompileError(f"{candidate} is not a point of the template's space for {problem}: {reason}")

    if machine.kind == "cuda":
        # Before the first compilation: without it the compiler silently falls back to shipping CUDA source.
        from . import cuda

        cuda.activate()
    import tvm
    from tvm.support import cc

    if cc.get_cc() is None:
        raise CompileError(
            "no C compiler, which links libraries: apt-get install g++ (or clang, or name one by the variable CXX)"
        )
    target = target_of(machine)
    program = template.build(problem, candidate.values)
    if machine.kind == "llvm":
        _require_alignment(program.module, candidate)
    launched = program.module["main"].attrs.get("tirx.kernel_launch_params", ()) if program.module["main"].attrs else ()
    if len({template.cooperative, program.resident is not None, COOPERATIVE in map(str, launched)}) > 1:
        raise CompileError(f"{candidate}: template, program and launch do not agree on whether it is cooperative")
    with target:
        module = tvm.compile(program.module, target=target, tir_pipeline=program.pipeline or "default")

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    unfinished = Path(name)
    try:
        module.export_library(str(unfinished))
        resources = _kernel_resources(unfinished, machine) if machine.kind == "cuda" else None
        resident = None if program.resident is None else asdict(program.resident)
        reason = too_large(resident, resources, machine)
        if reason:
            raise CompileError(f"{candidate}: {reason}")
        unfinished.chmod(0o644)  # mkstemp's own mode would keep a shared folder's other users out
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    workspaces = tuple(asdict(workspace) for workspace in program.workspaces)
    return Compiled(str(path), time.perf_counter() - started, workspaces, resources, resident)


def _require_alignment(module: Any, candidate: Candidate) -> None:
    """Raise if the program promises the code generator that its arguments are aligned beyond their elements.

    That is what a buffer does that says nothing (64 bytes), and NumPy's and PyTorch's arrays do not keep it: an aligned
    vector access then ends the process.
    """
    for argument in module["main"].params:
        promised = getattr(argument.ty, "data_alignment", 0)  # 0: a scalar
        if promised and promised > (size := numpy_dtype(str(argument.ty.dtype)).itemsize):
            raise CompileError(
                f"{candidate}: the argument {argument} promises an alignment of {promised} bytes;"
                f" arrays of other libraries have that of their elements: declare it with align={size}"
            )


def _kernel_resources(library: Path, machine: Machine) -> dict[str, int]:
    from . import cuda

    found = cuda.cubins(library)
    if not found:
        raise CompileError("the library holds CUDA source in the place of a cubin")
    wanted = int("".join(filter(str.isdigit, machine.arch)))
    most: dict[str, int] = {}
    for cubin in found:
        arch = cuda.cubin_arch(cubin)
        if arch != wanted:
            raise CompileError(f"the library holds a cubin for sm_{arch}, not for {machine.arch}")
        for kernel in cuda.resource_usage(cubin).values():
            for name in ("registers", "shared_bytes", "local_bytes", "spill_instructions"):
                most[name] = max(most.get(name, 0), getattr(kernel, name))
    return most
