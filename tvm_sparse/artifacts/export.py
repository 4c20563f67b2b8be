"""Tuned records into a folder of shared libraries with a manifest."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..machine import Machine
from ..operators import OPERATORS, parse
from ..operators.problem import Problem, ProblemError
from ..tuning import build_worker
from ..tuning.processes import Pool
from ..tuning.records import Best, Candidate, Log
from . import manifest
from .compile import CompileError
from .manifest import Entry, digest

BUILD_TIMEOUT = 300.0


def records(roots: Sequence[Path], arch: str) -> dict[str, tuple[Best, dict[str, Any]]]:
    """The best record of each problem for `arch`, with its figures; later folders win.

    Records whose template has gone or has another version now are left out: their decisions mean another program.
    So are those whose problem cannot be read: their operator had other axes.
    """
    import tvm_sparse.schedules as schedules

    current = {template.name: template.version for template in schedules.TEMPLATES}
    found: dict[str, tuple[Best, dict[str, Any]]] = {}
    for root in roots:
        for operator in OPERATORS:
            log = Log(root, arch, operator)
            best = log.best()
            sessions = {session.id: session for session in log.read().sessions} if best else {}
            for key, record in best.items():
                if current.get(record.candidate.template) != record.candidate.version:
                    continue
                try:
                    parse(key)
                except ProblemError:
                    continue
                session = sessions.get(record.session)
                figures = {
                    "seconds": record.seconds,
                    "fallback_seconds": record.fallback_seconds,
                    "session": record.session,
                    "machine": session.machine.get("name", "") if session else "",
                    "date": session.date if session else "",
                }
                found[key] = (record, figures)
    return found


def library_name(problem: Problem, candidate: Candidate, arch: str) -> str:
    """A file name that differs for every problem, candidate, architecture and compiler version."""
    text = f"{problem.key}|{candidate}|{arch}|{sorted(manifest.versions().items())}"
    return f"{problem.operator}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"


def build(
    jobs: Sequence[tuple[Problem, Candidate, str, dict[str, Any]]],
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
        build_worker.request(problem, candidate, machine, folder / library_name(problem, candidate, machine.arch))
        for problem, candidate, _, _ in jobs
    ]
    with Pool(builders, [sys.executable, "-m", "tvm_sparse.tuning.build_worker"], name="build") as pool:
        for (problem, candidate, chosen, figures), reply in zip(
            jobs, pool.map(requests, timeout=BUILD_TIMEOUT), strict=True
        ):
            if not reply.ok:
                raise CompileError(f"{problem} with {candidate}: {reply.message}")
            path = Path(reply.value["path"])
            entry = Entry(
                problem=problem.key,
                arch=machine.arch,
                kind=machine.kind,
                candidate=candidate,
                chosen=chosen,
                library=path.name,
                sha256=digest(path),
                workspaces=tuple(reply.value["workspaces"]),
                figures=figures,
                resources=reply.value["resources"],
            )
            entries.append(entry)
            show(entry)
    return entries


def export(
    machine: Machine,
    folder: Path,
    roots: Sequence[Path],
    *,
    only: Callable[[Problem], bool] = lambda problem: True,
    builders: int = 1,
    show: Callable[[Entry], None] = lambda entry: None,
) -> list[Entry]:
    """Compile every best record of the machine's architecture in the logs under `roots` into `folder`.

    A folder that is exported into again gets a new manifest; libraries that it no longer names are removed.

    Raises
    ------
    LookupError
        If there is no such record.
    CompileError
        See `build`.
    """
    chosen = records(roots, machine.arch)
    jobs = [
        (problem, best.candidate, "exact", figures)
        for key, (best, figures) in sorted(chosen.items())
        if only(problem := parse(key))
    ]
    if not jobs:
        places = ", ".join(map(str, roots))
        raise LookupError(
            f"no record for {machine.arch} in {places}; tune first (tvm-sparse tune ... --target {machine.arch})"
        )
    entries = build(jobs, machine, folder, builders=builders, show=show)
    manifest.write(folder, entries)
    named = {entry.library for entry in entries}
    ours = re.compile(rf"({'|'.join(OPERATORS)})-[0-9a-f]{{16}}\.so")
    for path in folder.iterdir():
        if ours.fullmatch(path.name) and path.name not in named:
            path.unlink()
    return entries
