"""Tuned records into a folder of shared libraries with a manifest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..artifacts import manifest
from ..artifacts.manifest import Entry, ManifestError
from ..core import registry, spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.registry import parse
from ..records.queries import best_records, recorded_archs
from ..runtime.lookup import Known, choose, same_program
from ..workers.building import build


def export(
    machine: Machine,
    folder: Path,
    roots: Sequence[Path],
    *,
    only: Callable[[Problem], bool] = lambda problem: True,
    problems: Sequence[Problem] | None = None,
    builders: int = 1,
    show: Callable[[Entry], None] = lambda entry: None,
) -> list[Entry]:
    """Compile every best record of the machine's architecture in the logs under `roots` into `folder`.

    With `problems`: what calls of these run, by records where there are, else by nearby decisions or the fallback.
    Beside a cooperative kernel goes the one that takes its place where a GPU has no room for it.

    A folder that is exported into again gets a new manifest; libraries that it no longer names are removed.

    Raises
    ------
    LookupError
        If there is no such record, and no problem is given.
    CompileError
        See `build`.
    """
    chosen = best_records(roots, machine.arch)
    jobs: list[tuple[Problem, Candidate, str, Mapping[str, Any]]] = []
    if problems is None:
        for key, (best, figures) in sorted(chosen.items()):
            if only(problem := parse(key)):
                jobs.append((problem, best.candidate, "exact", figures))
    else:
        jobs = planned(filter(only, problems), machine, chosen)
    beside = {
        problem: spaces.fallback(problem, machine, cooperative=False)
        for problem, candidate, _, _ in jobs
        if spaces.find(candidate.template).cooperative
    }
    jobs += [(problem, candidate, "fallback", {}) for problem, candidate in beside.items()]
    if not jobs:
        places = ", ".join(map(str, roots))
        others = [arch for arch in recorded_archs(roots, registry.operators()) if arch != machine.arch]
        raise LookupError(
            f"no record for {machine.arch} in {places}; tune first on such a machine"
            f" (tvm-sparse tune ... --target {machine.arch}), or name the problems whose untuned kernels are wanted"
            " (--shapes FILE)" + (f". There are records for {', '.join(others)}" if others else "")
        )
    entries = build(jobs, machine, folder, builders=builders, show=show)
    before: set[str] = set()
    if (folder / manifest.NAME).exists():
        with contextlib.suppress(ManifestError):  # of another version
            before = {entry.library for entry in manifest.read(folder)}
    manifest.write(folder, entries)
    named = {entry.library for entry in entries}
    ours = re.compile(rf"({'|'.join(registry.operators())})-[0-9a-f]{{16}}\.so")
    for path in folder.iterdir():
        if (path.name in before or ours.fullmatch(path.name)) and path.name not in named:
            path.unlink()
    return entries


def planned(
    problems: Iterable[Problem], machine: Machine, best: Mapping[str, Any]
) -> list[tuple[Problem, Candidate, str, Mapping[str, Any]]]:
    """What calls of these problems run, each program once."""
    known = {key: Known(record.candidate, figures) for key, (record, figures) in best.items()}
    jobs: list[tuple[Problem, Candidate, str, Mapping[str, Any]]] = []
    for problem in problems:
        choice = choose(problem.as_called(), machine, known)
        # Of another batch, but by a record of that very problem.
        how = "exact" if choice.record == choice.compiled_for.key else choice.how
        if not any(choice.candidate == other[1] and same_program(other[0].key, choice.compiled_for) for other in jobs):
            jobs.append((choice.compiled_for, choice.candidate, how, choice.figures))
    return jobs
