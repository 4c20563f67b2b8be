"""The build worker of `cases.calls_run`. It optimises CPU code only with the argument `OPTIMISED`, and keeps libraries.

A library that this or an earlier run has built of the same program is copied; the program itself is built anew, so a
change of a template shows. A library is named after the program's text, the target and the compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tvm_sparse.artifacts import compile, manifest
from tvm_sparse.core import scratch
from tvm_sparse.workers import building
from tvm_sparse.workers.absent import without
from tvm_sparse.workers.serving import serve

KEPT = "TVM_SPARSE_TEST_LIBRARIES"  # the folder of libraries that runs share
OPTIMISED = "optimised"  # the argument that asks for machine code as users have it

optimised = compile.target_of


def target_of(machine: Any, **how: Any) -> Any:
    target = optimised(machine, **how)
    return type(target)({**target.export(), "opt-level": 0}) if machine.kind == "llvm" else target


class Module:
    """A module of the compiler, of which the linked library is kept."""

    def __init__(self, program: Any, kept: Path, made: Any) -> None:
        self.program, self.kept, self.made = program, kept, made

    def export_library(self, path: str, **how: Any) -> None:
        with contextlib.suppress(FileNotFoundError):
            shutil.copyfile(self.kept, path)
            os.utime(self.kept)
            return
        self.made().mod.export_library(path, **how)
        with scratch.written(self.kept) as unfinished:
            shutil.copyfile(path, unfinished)


class Compiled:
    def __init__(self, module: Module) -> None:
        self.mod = module


def name_of(program: Any, target: Any, pipeline: str) -> str:
    """The file name of a library: of all that it is made of."""
    # What else it depends on: versions of the compiler, and how it is linked.
    parts = [program.script(show_meta=True), str(target), pipeline, str(sorted(manifest.versions().items()))]
    parts.append(Path(compile.__file__).read_text())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest() + ".so"


def compiling_once(folder: Path) -> Any:
    """What takes the place of `tvm.compile` for one library at a time."""
    import tvm

    compiled = tvm.compile

    def compile_once(program: Any, *, target: Any, tir_pipeline: str) -> Any:
        def made() -> Any:
            return compiled(program, target=target, tir_pipeline=tir_pipeline)

        return Compiled(Module(program, folder / name_of(program, target, tir_pipeline), made))

    return compile_once


if __name__ == "__main__":
    if OPTIMISED not in sys.argv:
        compile.target_of = target_of
    with without("torch", "tvm.runtime.disco"):
        if folder := os.environ.get(KEPT):
            import tvm

            tvm.compile = compiling_once(Path(folder))
        serve(building.handle)
