"""Tuned records into a folder of shared libraries with a manifest."""

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

# A problem, the decisions it is compiled with, how these were come by, and what was measured of them.
Job = tuple[Problem, Candidate, str, Mapping[str, Any]]


@dataclass(frozen=True)
class LeftOut:
    """A kernel that does not compile, why, and the decisions that are built instead if there are such."""

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

    With `problems`: what calls of these run, by records where there are, else by nearby decisions, those of another
    architecture or the fallback. Beside a cooperative kernel goes the one that takes its place where a GPU has no room
    for it.

    A folder that is exported into again gets a new manifest, the last of its files; libraries that it no longer names
    are removed. Files are replaced, never written over: who uses the folder keeps what it has loaded. TVM's runtime
    libraries, which the kernels call, lie beside them: no compiler has to be installed where they are used.

    With a private `key` (`artifacts.signing`) the folder is signed; a signature of what was there before goes.

    Parameters
    ----------
    skip
        Called with each kernel that does not compile. One whose decisions are not a record of its problem on this
        architecture is built with a template's default instead; others are left out.

    Raises
    ------
    LookupError
        If there is no such record, and no problem is given.
    CompileError
        Without `skip` for the first kernel that does not compile; with it if none does. The folder stays as it was.
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
    """The libraries of jobs, as `export` says. Raises `CompileError` if there is none at all."""
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
    """What is built where decisions that are no record of the problem do not compile: a template's default; or None."""
    if chosen in ("exact", "fallback") or (default := spaces.fallback(problem, machine)) == candidate:
        return None
    return default


def held(folder: Path) -> set[str]:
    """The libraries that a folder's manifest names, if it has one that can be read."""
    with contextlib.suppress(ManifestError):  # none, or of another version
        return {entry.library for entry in manifest.read(folder)}
    return set()


def remove_stale(folder: Path, entries: Iterable[Entry], before: Collection[str] = ()) -> None:
    """Remove exported libraries that are none of these entries': by their names, and those that were named `before`."""
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
    """What is compiled for a machine, each program once.

    Of `problems` what calls of these run; else every record of the machine's architecture.
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
            # Of another batch, but by a record of that very problem.
            own = choice.how != "borrowed" and choice.record == choice.compiled_for.key
            how = "exact" if own else choice.how
            found.append((choice.compiled_for, choice.candidate, how, choice.figures))
        # Of several that run one program the manifest names the one that has a record.
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
