"""Tuned records into a folder of shared libraries with a manifest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ..artifacts import manifest
from ..artifacts.manifest import Entry, ManifestError
from ..core import registry, spaces
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.registry import parse
from ..records.queries import best_records, recorded_archs
from ..workers.building import build


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

    Beside a cooperative kernel goes the one that takes its place where a GPU has no room for it.

    A folder that is exported into again gets a new manifest; libraries that it no longer names are removed.

    Raises
    ------
    LookupError
        If there is no such record.
    CompileError
        See `build`.
    """
    chosen = best_records(roots, machine.arch)
    jobs = [
        (problem, best.candidate, "exact", figures)
        for key, (best, figures) in sorted(chosen.items())
        if only(problem := parse(key))
    ]
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
            f" (tvm-sparse tune ... --target {machine.arch})"
            + (f". There are records for {', '.join(others)}" if others else "")
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
