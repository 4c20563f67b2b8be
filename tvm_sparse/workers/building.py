"""The child that compiles candidates: `python -m tvm_sparse.workers.building`, started by `processes.Worker`."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..artifacts import manifest
from ..artifacts.compile import CompileError
from ..artifacts.manifest import Entry, digest
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.registry import add_plugins, parse, plugins
from .processes import Pool, serve

BUILD_TIMEOUT = 300.0


def request(problem: Any, candidate: Candidate, machine: Machine, path: Path) -> dict[str, Any]:
    """The message that asks for one library."""
    return {
        "problem": problem.key,
        "candidate": str(candidate),
        "machine": asdict(machine),
        "path": str(path),
        "plugins": plugins(),
    }


def handle(message: dict[str, Any]) -> dict[str, Any]:
    from ..artifacts.compile import compile_candidate

    add_plugins(message["plugins"])
    compiled = compile_candidate(
        parse(message["problem"]),
        Candidate.parse(message["candidate"]),
        Machine(**message["machine"]),
        Path(message["path"]),
    )
    return asdict(compiled)


def library_name(problem: Problem, candidate: Candidate, arch: str) -> str:
    """A file name that differs for every problem, candidate, architecture and compiler version."""
    text = f"{problem.key}|{candidate}|{arch}|{sorted(manifest.versions().items())}"
    return f"{problem.operator}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"


def described(
    problem: Problem,
    candidate: Candidate,
    machine: Machine,
    chosen: str,
    compiled: Mapping[str, Any],
    figures: Mapping[str, Any],
) -> Entry:
    """The manifest's entry of a library, of which a build replied `compiled`."""
    path = Path(compiled["path"])
    return Entry(
        problem=problem.key,
        arch=machine.arch,
        kind=machine.kind,
        candidate=candidate,
        chosen=chosen,
        library=path.name,
        sha256=digest(path),
        workspaces=tuple(compiled["workspaces"]),
        figures=dict(figures),
        resources=compiled["resources"],
    )


def build(
    jobs: Sequence[tuple[Problem, Candidate, str, Mapping[str, Any]]],
    machine: Machine,
    folder: Path,
    *,
    builders: int = 1,
    show: Callable[[Entry], None] = lambda entry: None,
) -> list[Entry]:
    """Compile (problem, candidate, chosen, figures) jobs into `folder` and describe the libraries.

    Compilation happens in child processes: the caller's process imports no compiler and survives its crashes.

    Raises
    ------
    CompileError
        Naming the first problem that did not compile; nothing is written into a manifest then.
    """
    entries = []
    requests = [
        request(problem, candidate, machine, folder / library_name(problem, candidate, machine.arch))
        for problem, candidate, _, _ in jobs
    ]
    with Pool(builders, [sys.executable, "-m", "tvm_sparse.workers.building"], name="build") as pool:
        for (problem, candidate, chosen, figures), reply in zip(
            jobs, pool.map(requests, timeout=BUILD_TIMEOUT), strict=True
        ):
            if not reply.ok:
                raise CompileError(f"{problem} with {candidate}: {reply.message}")
            entry = described(problem, candidate, machine, chosen, reply.value, figures)
            entries.append(entry)
            show(entry)
    return entries


if __name__ == "__main__":
    serve(handle)
