"""Fingerprints of the code that templates emit: what makes "the machine code is unchanged" a test.

A *point* is a template's decisions for one problem. Its fingerprint has two parts:

``source``
    of what the code generator emits: CUDA C++ and the launch, or LLVM IR. Cheap to make, and changed by a new name.
``machine``
    of what the assembler makes of that: the instructions and constants of every kernel in the cubin and its launch, or
    the assembly of the CPU code. Made only where `source` has changed.

One file a template, ``<template>.json``, holds its version and the fingerprints of a few points that together reach
every branch of the template's program. ``python -m golden`` (in ``tests/``) checks, updates and chooses them.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emulation import cuda_source, launches
from tvm_sparse import schedules
from tvm_sparse.artifacts import cuda_toolchain
from tvm_sparse.artifacts.compile import compile_candidate, target_of
from tvm_sparse.machine import Machine
from tvm_sparse.operators import parse
from tvm_sparse.tuning.records import Candidate

FOLDER = Path(__file__).parent
# What code is emitted for, whatever machine this is.
MACHINES = {
    "cuda": Machine("cuda", "sm_90a", "sm_90a", cores=132),
    "llvm": Machine("llvm", "x86-64-v3", "x86-64-v3", cores=2),
}


@dataclass(frozen=True)
class Point:
    """One candidate of one problem."""

    problem: str
    candidate: Candidate

    @property
    def key(self) -> str:
        decisions = ",".join(f"{name}={value}" for name, value in self.candidate.decisions)
        return f"{self.problem} ({decisions})"


@dataclass
class Golden:
    """The fingerprints of one template, as its file holds them."""

    template: str
    version: int
    assembler: str  # what `machine` was made by
    points: dict[str, dict[str, str]]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.template}.json"

    def write(self) -> None:
        content = {"version": self.version, "assembler": self.assembler, "points": self.points}
        self.path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")

    def point(self, key: str) -> Point:
        """The point of a key, at the version that the template has now."""
        problem, _, decisions = key.rstrip(")").partition(" (")
        version = schedules.find(self.template).version
        return Point(problem, Candidate.parse(f"{self.template}@{version}({decisions})"))


def read(template: str) -> Golden:
    """The fingerprints of a template; FileNotFoundError if it has none."""
    content = json.loads((FOLDER / f"{template}.json").read_text())
    return Golden(template, content["version"], content["assembler"], content["points"])


def _hashed(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def emitted(point: Point) -> str:
    """The text that the code generator emits for a point, with its launches."""
    import tvm

    template = schedules.find(point.candidate.template)
    machine = MACHINES[template.kind]
    program = template.build(parse(point.problem), point.candidate.values)
    target = target_of(machine)
    if template.kind == "cuda":
        launched = "\n".join(f"// launch: {line}" for line in launches(program.module, target, pipeline=program.pipeline))
        return launched + "\n" + cuda_source(program.module, target, pipeline=program.pipeline)
    with target:
        module = tvm.compile(program.module, target=target, tir_pipeline=program.pipeline or "default")
    return module.mod.inspect_source("ll")


def source_fingerprint(text: str) -> str:
    """Of an emitted text."""
    return _hashed(text)


def machine_fingerprint(point: Point) -> str:
    """Of the machine code of a point: instructions, constants and launches, whatever things are called."""
    import tvm

    problem, template = parse(point.problem), schedules.find(point.candidate.template)
    machine = MACHINES[template.kind]
    target = target_of(machine)
    program = template.build(problem, point.candidate.values)
    if template.kind == "llvm":
        with target:
            module = tvm.compile(program.module, target=target, tir_pipeline=program.pipeline or "default")
        # Without directives and comments, which carry names.
        lines = module.mod.inspect_source("s").splitlines()
        return _hashed(*(re.sub(r"\s*#.*", "", line) for line in lines if re.match(r"\s+[a-z]", line)))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernel.so"
        compile_candidate(problem, point.candidate, machine, library)
        parts: list[Any] = []
        for cubin in cuda_toolchain.cubins(library):
            for name, content in sorted(cuda_toolchain.code_sections(cubin).items()):
                parts += [name, content]
    return _hashed(*parts, *launches(program.module, target, pipeline=program.pipeline))


def assembler(kind: str) -> str:
    """Name and version of what makes machine code for a kind of machine."""
    import importlib.metadata

    package = {"cuda": "nvidia-cuda-nvrtc", "llvm": "apache-tvm"}[kind]
    return f"{package} {importlib.metadata.version(package)}"
