"""Fingerprints of the code that templates emit: what makes "the machine code is unchanged" a test.

A *point* is a template's decisions for one problem. Its fingerprint has three parts, of which the first that is as
before decides:

``program``
    of the program's text, its target and TVM's version, which determine all that follows. Cheap to make, and changed by
    a new name.
``source``
    of what the code generator emits: CUDA C++ and the launch, or LLVM IR.
``machine``
    of what the assembler makes of that: the instructions and constants of every kernel in the cubin and its launch, or
    the assembly of the CPU code. Made only where `source` has changed.

With them go, of a CUDA kernel, the ``resources`` that it takes: what tests hold against a GPU's limits without
compiling anything.

One file a template, ``<template>.json``, holds its version and the fingerprints of a few points that together reach
every branch of the template's program. ``python -m golden`` (in ``tests/``) checks, updates and chooses them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_sparse.artifacts import cuda
from tvm_sparse.artifacts.compile import Compiled, compile_candidate, target_of
from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import Program
from tvm_sparse.emulation import cuda_source, launches
from tvm_sparse.schedules.vocabulary import renamed

FOLDER = Path(__file__).parent
# What code is emitted for, whatever machine this is; and an older GPU, for points whose keys say so.
MACHINES = {
    "cuda": Machine("cuda", "sm_90a", "sm_90a", cores=132),
    "llvm": Machine("llvm", "x86-64-v3", "x86-64-v3", cores=2),
}
OLDER = Machine("cuda", "sm_80", "sm_80", cores=108)


@dataclass(frozen=True)
class Point:
    """One candidate of one problem."""

    problem: str
    candidate: Candidate
    older: bool = False  # for OLDER

    @property
    def key(self) -> str:
        decisions = ",".join(f"{name}={value}" for name, value in self.candidate.decisions)
        return f"{self.problem} ({decisions})" + self.older * f" for {OLDER.arch}"

    @property
    def machine(self) -> Machine:
        return OLDER if self.older else MACHINES[spaces.find(self.candidate.template).kind]


@dataclass
class Golden:
    """The fingerprints of one template, as its file holds them."""

    template: str
    version: int
    assembler: str  # what `machine` was made by
    points: dict[str, dict[str, Any]]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.template}.json"

    def write(self) -> None:
        content = {"version": self.version, "assembler": self.assembler, "points": self.points}
        self.path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")

    def point(self, key: str) -> Point:
        """The point of a key, at the present version of its template, and with decisions as the vocabulary has them
        now: under their present names, new ones at their neutral values (`present` does without the vocabulary)."""
        problem, _, rest = key.partition(" (")
        decisions, _, machine = rest.partition(")")
        version = spaces.find(self.template).version
        stored = Candidate.parse(f"{self.template}@{version}({decisions})")
        candidate = dataclasses.replace(stored, decisions=renamed(self.template, stored.decisions))
        return Point(problem, candidate, older=bool(machine))


def read(template: str) -> Golden:
    """The fingerprints of a template; FileNotFoundError if it has none."""
    content = json.loads((FOLDER / f"{template}.json").read_text())
    return Golden(template, content["version"], content["assembler"], content["points"])


def program_fingerprint(point: Point) -> str:
    """Of the program of a point, its target and the version of TVM."""
    program, target = _built(point), target_of(point.machine)
    return _hashed(program.module.script(show_meta=True), str(target), program.pipeline or "", assembler("llvm"))


def source_unchanged(point: Point, expected: dict[str, Any]) -> bool:
    """Whether the code generator emits what it did when the fingerprints were taken."""
    if program_fingerprint(point) == expected.get("program"):
        return True
    return source_fingerprint(emitted(point)) == expected["source"]


def _hashed(*parts: str | bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()[:20]


def emitted(point: Point) -> str:
    """The text that the code generator emits for a point: CUDA C++ with its launches, or the CPU's instructions."""
    return _emitted(_built(point), point.machine)


def _built(point: Point) -> Program:
    return spaces.find(point.candidate.template).build(parse(point.problem), point.candidate.values)


def _emitted(program: Program, machine: Machine) -> str:
    target = target_of(machine)
    if machine.kind == "llvm":
        return _instructions(program, target)
    launched = launches(program.module, target, pipeline=program.pipeline)
    source = cuda_source(program.module, target, pipeline=program.pipeline)
    return "".join(f"// launch: {line}\n" for line in launched) + source


def _instructions(program: Program, target: Any) -> str:
    """The assembly of CPU code, without directives and comments: these carry names and counters of the process."""
    import tvm

    with target:
        module = tvm.compile(program.module, target=target, tir_pipeline=program.pipeline or "default")
    lines = module.mod.inspect_source("s").splitlines()
    return "\n".join(re.sub(r"\s*#.*", "", line) for line in lines if re.match(r"\s+[a-z]", line))


def source_fingerprint(text: str) -> str:
    """Of an emitted text."""
    return _hashed(text)


def machine_fingerprint(point: Point) -> str:
    """Of the machine code of a point: instructions, constants and launches, whatever things are called."""
    return fingerprints(point)["machine"]


def fingerprints(point: Point) -> dict[str, Any]:
    """What is kept of a point: its fingerprints, and the resources of a CUDA kernel."""
    program = _built(point)
    text = _emitted(program, point.machine)
    found = {"program": program_fingerprint(point), "source": source_fingerprint(text)}
    if point.machine.kind == "llvm":
        return found | {"machine": _hashed(*text.split("\n"))}
    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_candidate(parse(point.problem), point.candidate, point.machine, Path(folder) / "kernel.so")
        parts: list[Any] = []
        for cubin in cuda.cubins(compiled.path):
            for name, content in sorted(cuda.code_sections(cubin).items()):
                parts += [name, content]
        parts += launches(program.module, target_of(point.machine), pipeline=program.pipeline)
        return found | {"machine": _hashed(*parts), "resources": _resources(compiled)}


def _resources(compiled: Compiled) -> dict[str, Any]:
    """The most that any kernel takes of each, and the threads of their blocks."""
    launched = {u.max_threads for cubin in cuda.cubins(compiled.path) for u in cuda.resource_usage(cubin).values()}
    names = ("registers", "local_bytes", "shared_bytes")
    assert compiled.resources is not None
    return {name: compiled.resources[name] for name in names} | {"threads": sorted(launched)}


def assembler(kind: str) -> str:
    """Name and version of what makes machine code for a kind of machine."""
    import importlib.metadata

    package = {"cuda": "nvidia-cuda-nvrtc", "llvm": "apache-tvm"}[kind]
    return f"{package} {importlib.metadata.version(package)}"
