"""Exporting tuned records to a folder of shared libraries with a manifest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts import manifest, runtime_libraries, signing
from ..artifacts.compile import CompileError
from ..artifacts.manifest import Entry, ManifestError
from ..core import registry, spaces
from ..core.candidate import Candidate
from ..core.machine import Machine, nearest_arch
from ..core.problem import Problem
from ..core.registry import parse
from ..records.queries import best_records, predictor, recorded_archs
from ..runtime.lookup import Evidence, Known, choose, known_of, same_program
from ..workers.building import build

# A problem, the candidate to compile for it, the origin of its decisions, and their measured figures.
Job = tuple[Problem, Candidate, str, Mapping[str, Any]]


@dataclass(frozen=True)
class LeftOut:
    """A kernel that does not compile, the reason, and the candidate that is built instead, if any."""

    problem: Problem
    candidate: Candidate
    chosen: str  # as in `manifest.Entry`
    why: str
    instead: Candidate | None = None


def export(
    machine: Machine,
    folder: Path,
    roots: Sequence[Path],
    *,
    only: Callable[[Problem], bool] = lambda problem: True,
    problems: Sequence[Problem] | None = None,
    builders: int = 1,
    show: Callable[[Entry], None] = lambda entry: None,
    skip: Callable[[LeftOut], None] | None = None,
    key: Any = None,
) -> list[Entry]:
    """Compile every best record of the machine's architecture in the logs under `roots` into `folder`.

    With `problems`, the kernels that their calls run are compiled: by records if there are any, else by nearby
    decisions, those of another architecture or the fallback. A cooperative kernel is accompanied by the one that
    replaces it on a GPU without room for it.

    Exporting into an existing folder writes a new manifest, after all other files, and removes libraries that it does
    not name. Files are replaced, never overwritten, so processes that use the folder keep what they have loaded. TVM's
    runtime libraries are included, so that no compiler is needed where the kernels are used.

    With a private `key` (`artifacts.signing`) the folder is signed. An older signature is removed.

    Parameters
    ----------
    skip
        Called with each kernel that does not compile. If its decisions are not from a record of its problem on this
        architecture, a template's default is built instead; otherwise it is left out.

    Raises
    ------
    LookupError
        If there is no record, and no problem is given.
    CompileError
        Without `skip`, for the first kernel that does not compile; with it, if none compiles. The folder stays as it
        was.
    """
    jobs = planned(machine, roots, problems, only)
    if not jobs:
        places = ", ".join(map(str, roots))
        others = [arch for arch in recorded_archs(roots, registry.operators()) if arch != machine.arch]
        raise LookupError(
            f"no record for {machine.arch} in {places}; tune first on such a machine"
            f" (tvm-sparse tune ... --target {machine.arch}), or name the problems whose untuned kernels are wanted"
            " (--shapes FILE)" + (f". There are records for {', '.join(others)}" if others else "")
        )
    entries = built(jobs, machine, folder, builders, show, skip)
    before = held(folder)
    runtime_libraries.carry(folder, machine.kind)
    (folder / signing.NAME).unlink(missing_ok=True)
    manifest.write(folder, entries)
    remove_stale(folder, entries, before)
    if key is not None:
        signing.sign(folder, key)
    return entries


def built(
    jobs: Sequence[Job],
    machine: Machine,
    folder: Path,
    builders: int,
    show: Callable[[Entry], None],
    skip: Callable[[LeftOut], None] | None,
) -> list[Entry]:
    """Build the libraries of jobs, see `export`; raises `CompileError` if no kernel compiles."""
    if skip is None:
        return build(jobs, machine, folder, builders=builders, show=show)
    failed: list[tuple[Job, str]] = []
    entries = build(
        jobs, machine, folder, builders=builders, show=show, skip=lambda number, why: failed.append((jobs[number], why))
    )
    there = {(entry.problem, entry.candidate) for entry in entries}
    again: list[Job] = []
    for (problem, candidate, chosen, _), why in failed:
        instead = default_instead(problem, candidate, chosen, machine)
        skip(LeftOut(problem, candidate, chosen, why, instead))
        if instead is not None and (problem.key, instead) not in there:
            there.add((problem.key, instead))
            again.append((problem, instead, "fallback", {}))
    if again:

        def unable(number: int, why: str) -> None:
            problem, candidate, chosen, _ = again[number]
            skip(LeftOut(problem, candidate, chosen, why))

        entries += build(again, machine, folder, builders=builders, show=show, skip=unable)
    if not entries:
        (problem, candidate, *_), why = failed[0]
        raise CompileError(
            f"none of {len(jobs)} kernels compiles for {machine.arch}; {problem} with {candidate}: {why}"
        )
    return entries


def default_instead(problem: Problem, candidate: Candidate, chosen: str, machine: Machine) -> Candidate | None:
    """The candidate to build if decisions that are not a record of the problem do not compile: a template's default, or
    None.
    """
    if chosen in ("exact", "fallback") or (default := spaces.fallback(problem, machine)) == candidate:
        return None
    return default


def held(folder: Path) -> set[str]:
    """The libraries named by a folder's manifest; empty if it has none that can be read."""
    with contextlib.suppress(ManifestError):  # missing, or of another version
        return {entry.library for entry in manifest.read(folder)}
    return set()


def remove_stale(folder: Path, entries: Iterable[Entry], before: Collection[str] = ()) -> None:
    """Remove exported libraries that these entries do not name, recognised by their names or listed in `before`."""
    named = {entry.library for entry in entries}
    ours = re.compile(rf"({'|'.join(registry.operators())})-[0-9a-f]{{16}}\.so")
    for path in folder.iterdir():
        if (path.name in before or ours.fullmatch(path.name)) and path.name not in named:
            path.unlink()


def planned(
    machine: Machine,
    roots: Sequence[Path],
    problems: Iterable[Problem] | None = None,
    only: Callable[[Problem], bool] = lambda problem: True,
) -> list[Job]:
    """The jobs for a machine, each program once.

    They are the kernels that calls of `problems` run, or, without these, all records of the machine's architecture.
    """
    recorded = best_records(roots, machine.arch)
    jobs: list[Job] = []
    if problems is None:
        for key, (best, figures) in sorted(recorded.items()):
            if only(recorded_one := parse(key)):
                for problem in recorded_one.as_shipped():
                    if problem == recorded_one or problem.key not in recorded:
                        candidate = spaces.built_here(best.candidate, problem, machine)
                        jobs.append((problem, candidate, "exact", figures))
    else:
        evidence: dict[str, Evidence] = {}
        found: list[Job] = []
        for problem in map(Problem.as_called, filter(only, problems)):
            if problem.operator not in evidence:
                evidence[problem.operator] = _evidence(problem.operator, machine, roots, recorded)
            choice = choose(problem, machine, evidence[problem.operator])
            # Compiled for another batch, unless a record of the problem itself chose it.
            own = choice.how != "borrowed" and choice.record == choice.compiled_for.key
            how = "exact" if own else choice.how
            found.append((choice.compiled_for, choice.candidate, how, choice.figures))
        # If several problems run one program, the manifest names the one with a record.
        for job in sorted(found, key=lambda job: job[2] != "exact"):
            if not any(job[1] == one[1] and same_program(one[0].key, job[0]) for one in jobs):
                jobs.append(job)
    beside = {
        problem: spaces.fallback(problem, machine, cooperative=False)
        for problem, candidate, _, _ in jobs
        if spaces.find(candidate.template, problem.operator).cooperative
    }
    return jobs + [(problem, candidate, "fallback", {}) for problem, candidate in beside.items()]


def _evidence(operator: str, machine: Machine, roots: Sequence[Path], recorded: Mapping[str, Any]) -> Evidence:
    def known(records: Mapping[str, Any]) -> dict[str, Known]:
        return known_of({key: found for key, found in records.items() if key.partition("/")[0] == operator})

    if own := known(recorded):
        return Evidence(own, predictor=lambda: predictor(roots, machine.arch, operator))
    other = nearest_arch(machine, recorded_archs(roots, (operator,)))
    return Evidence({}, known(best_records(roots, other, (operator,))) if other else {}, other or "")
