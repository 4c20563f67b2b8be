"""The parts of a candidate's build time: `python scripts/probes/compile_time.py [PROBLEM TEMPLATE]...`.

For the default candidate of each template, compiled for sm_90a (no GPU is needed):

    child start   start of the build worker until it is ready: Python and the imports
    first         the first build of that process, which also imports the compiler, as in a first call
    second        the same build again, as in a later first call, since the worker is kept for a while
    parse         the template's program (`Template.build`): TVMScript into TIR
    lower         TVM's passes and code generators, without NVRTC
    nvrtc         the CUDA compiler
    link          the object files into a shared library
    rest          object files, the cubin's resources

Figures are processor seconds of the process and its children, the minimum of a few builds, which hardly depend on the
machine's load. On an idle machine the wall clock gives the same.
"""

from __future__ import annotations

import contextlib
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import resolve
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.workers.building import BUILD_TIMEOUT, BUILD_WORKER, request
from tvm_sparse.workers.processes import Worker

CASES = (
    ("softmax_topk/batch=10,vocab=25000,k=5", "threshold_gate"),
    ("bsr_matmul/m=64,k=4096,n=4096,block=16,sparsity=0.9,dtype=float16", "tensor_core"),
)
REPEATS = 4
MACHINE = resolve("sm_90a")


def spent() -> float:
    """Processor seconds of this process and of its finished children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Split:
    """Processor seconds by part; a part called within another is counted only for the inner one."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner = 0.0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        outer, self._inner = self._inner, 0.0
        began = spent()
        try:
            yield
        finally:
            whole = spent() - began
            self.seconds[name] = self.seconds.get(name, 0.0) + whole - self._inner
            self._inner = outer + whole

    def watch(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*arguments: Any, **named: Any) -> Any:
            with self.part(name):
                return call(*arguments, **named)

        return watched


def one_build(problem: Problem, candidate: Candidate, folder: Path) -> dict[str, float]:
    """The parts of one build in this process."""
    import tvm
    import tvm_ffi
    from tvm import compile as lower
    from tvm.support import cc

    from tvm_sparse.artifacts import compile as building
    from tvm_sparse.artifacts import cuda
    from tvm_sparse.core.template import Template

    cuda.activate()
    split = Split()
    nvrtc = tvm_ffi.get_global_func("tvm_callback_cuda_compile")
    program, link = Template.build, cc.create_shared
    try:
        Template.build = split.watch("parse", program)  # type: ignore[method-assign]
        tvm.compile = split.watch("lower", lower)
        tvm_ffi.register_global_func("tvm_callback_cuda_compile", split.watch("nvrtc", nvrtc), override=True)
        cc.create_shared = split.watch("link", link)
        with split.part("rest"):
            building.compile_candidate(problem, candidate, MACHINE, folder / "kernel.so")
    finally:
        Template.build, tvm.compile, cc.create_shared = program, lower, link  # type: ignore[method-assign]
        tvm_ffi.register_global_func("tvm_callback_cuda_compile", nvrtc, override=True)
    return split.seconds


def in_a_child(problem: Problem, candidate: Candidate, folder: Path) -> dict[str, float]:
    """The times of a build worker to start, for its first build and for another one; wall clock and
    processor seconds.
    """
    figures = {}
    with Worker(BUILD_WORKER, name="build") as worker:
        for name in ("child start", "first", "second"):
            began = time.perf_counter()
            before = _spent_by(worker.pid)
            if name == "child start":
                worker.start()
            else:
                reply = worker.call(request(problem, candidate, MACHINE, folder / "child.so"), timeout=BUILD_TIMEOUT)
                assert reply.ok, reply.message
            figures[name] = _spent_by(worker.pid) - before
            figures[f"{name} (wall)"] = time.perf_counter() - began
    return figures


def _spent_by(pid: int | None) -> float:
    """Processor seconds of a living process and of its finished children."""
    import os

    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def main(*words: str) -> None:
    cases = tuple(zip(words[::2], words[1::2], strict=True)) or CASES
    for key, name in cases:
        problem, template = parse(key), spaces.find(name)
        candidate = template.candidate(template.default(problem, MACHINE))
        print(f"{problem}\n{candidate}")
        with tempfile.TemporaryDirectory() as folder:
            child = in_a_child(problem, candidate, Path(folder))
            builds = [one_build(problem, candidate, Path(folder)) for _ in range(REPEATS + 1)][1:]
        least = {part: min(build[part] for build in builds) for part in builds[0]}
        for part, seconds in {**child, **least, "in all": sum(least.values())}.items():
            print(f"  {part:20s} {seconds:6.3f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
