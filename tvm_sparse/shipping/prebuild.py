"""Building kernels ahead for many architectures, without a GPU: a few libraries for each operator, a manifest, and the
runtime libraries.

For each architecture these are built: every problem that was tuned on it; for operators without records on it, the
problems of the nearest architecture with records, with its decisions or the nearest ones in the space here
(`borrowed`), or, if these do not compile, with a template's default; and problems that are named. The result is one
folder per architecture, which `tvm_sparse.load` reads and `shipping.wheel` packs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..artifacts import manifest, runtime_libraries
from ..artifacts.compile import CompileError
from ..artifacts.manifest import Entry, digest
from ..core import registry
from ..core.candidate import Candidate
from ..core.machine import Machine, nearest_arch, resolve
from ..core.problem import Problem
from ..core.registry import parse
from ..records.queries import best_records, recorded_archs
from ..workers.building import BUILD_TIMEOUT, BUILD_WORKER, bundle_name, bundle_request, described
from ..workers.processes import Pool, Reply
from .export import Job, default_instead, held, planned, remove_stale

# Most kernels in a library: a first call reads and hashes its whole library (3 MB of machine code, 10 ms), and each
# library is built by one process.
KERNELS_A_LIBRARY = 32


@dataclass(frozen=True)
class Built:
    """The kernels built for one architecture.

    Attributes
    ----------
    folder
        The folder with manifest, libraries and TVM's runtime libraries.
    entries
        The manifest's entry of each kernel; `chosen` is the origin of its decisions.
    dropped
        Candidates that did not compile, and the reasons. A template's default replaces them, unless the default itself,
        or a record of the problem on this architecture, does not compile.
    """

    machine: Machine
    folder: Path
    entries: tuple[Entry, ...]
    dropped: tuple[str, ...]

    @property
    def libraries(self) -> tuple[Path, ...]:
        return tuple(self.folder / name for name in sorted({entry.library for entry in self.entries}))


@dataclass
class _State:
    """The state of one architecture's build."""

    machine: Machine
    folder: Path
    entries: list[Entry] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    again: list[Job] = field(default_factory=list)


def problems_for(machine: Machine, roots: Sequence[Path], operators: Iterable[str] | None = None) -> list[Problem]:
    """The problems tuned for a machine; for operators without any, those of the nearest architecture."""
    found = []
    for operator in registry.operators() if operators is None else operators:
        archs = recorded_archs(roots, (operator,))
        arch = machine.arch if machine.arch in archs else nearest_arch(machine, archs)
        if arch is not None:
            found += [parse(key) for key in sorted(best_records(roots, arch, (operator,)))]
    return found


def prebuild(
    archs: Sequence[str],
    folder: Path,
    roots: Sequence[Path],
    problems: Sequence[Problem] = (),
    *,
    operators: Sequence[str] | None = None,
    records: bool = True,
    builders: int = 1,
    show: Callable[[str, int, int], None] = lambda library, done, count: None,
) -> list[Built]:
    """Build the kernels of all these architectures into `folder/<arch>`, `builders` processes at a time.

    Parameters
    ----------
    archs
        Architectures, as for `core.machine.resolve`; `compute_80` is PTX, for every GPU from that number on.
    problems
        Problems built in addition to those with records in `roots`; without `records`, only these.
    operators
        If given, only these operators are built.
    show
        Called with each library's path, the number of finished libraries, and their total.

    Raises
    ------
    LookupError
        If there is nothing to build for an architecture.
    CompileError
        If nothing compiles for an architecture.
    """
    waiting: list[tuple[_State, list[Job]]] = []
    states = []
    for machine in map(resolve, archs):
        named = [one for one in problems if operators is None or one.operator in operators]
        recorded = problems_for(machine, roots, operators) if records else ()
        wanted = dict.fromkeys([*(one for problem in recorded for one in problem.as_shipped()), *named])
        jobs = planned(machine, roots, list(wanted))
        if not jobs:
            places = ", ".join(map(str, roots))
            raise LookupError(f"{machine.arch}: nothing to build: no records in {places} and no problems named")
        states.append(_State(machine, folder / machine.arch))
        waiting += [(states[-1], chunk) for chunk in _chunks(jobs, KERNELS_A_LIBRARY)]
    with Pool(builders, BUILD_WORKER, name="prebuild") as pool:
        done = 0
        while waiting:
            # The longest first, so that no process works alone at the end.
            waiting.sort(key=lambda one: -len(one[1]))
            count = done + len(waiting)
            replies = pool.map([_request(*one) for one in waiting], timeout=BUILD_TIMEOUT * KERNELS_A_LIBRARY)
            for (state, chunk), reply in zip(waiting, replies, strict=True):
                _take(state, chunk, reply)
                done += 1
                show(str(_path(state, chunk)), done, count)
            waiting = []
            for state in states:
                waiting += [(state, chunk) for chunk in _chunks(state.again, KERNELS_A_LIBRARY)]
                state.again = []
    return [_finish(state) for state in states]


def _chunks(jobs: Sequence[Job], most: int) -> list[list[Job]]:
    """Jobs by operator, in chunks of nearly equal size: each becomes a library."""
    by_operator: dict[str, list[Job]] = {}
    for job in jobs:
        by_operator.setdefault(job[0].operator, []).append(job)
    chunks = []
    for own in by_operator.values():
        own.sort(key=lambda job: (job[0].key, str(job[1])))
        parts = -(-len(own) // most)
        chunks += [own[len(own) * i // parts : len(own) * (i + 1) // parts] for i in range(parts)]
    return chunks


def _path(state: _State, chunk: Sequence[Job]) -> Path:
    return state.folder / bundle_name(_kernels(chunk), state.machine.arch)


def _request(state: _State, chunk: Sequence[Job]) -> dict[str, Any]:
    return bundle_request(_kernels(chunk), state.machine, _path(state, chunk))


def _kernels(chunk: Sequence[Job]) -> list[tuple[Problem, Candidate]]:
    return [(problem, candidate) for problem, candidate, *_ in chunk]


def _take(state: _State, chunk: Sequence[Job], reply: Reply) -> None:
    """Note the kernels of a library, and those to try again: separately, or with a template's default."""
    if not reply.ok and len(chunk) > 1:
        # One of them has ended the process: built separately, only that one fails.
        singles = [_request(state, [job]) for job in chunk]
        with Pool(1, BUILD_WORKER, name="prebuild-single") as pool:
            for job, own in zip(chunk, pool.map(singles, timeout=BUILD_TIMEOUT), strict=True):
                _take(state, [job], own)
        return
    results: list[Mapping[str, Any] | str] = reply.value if reply.ok else [reply.message]
    path = _path(state, chunk)
    sha256 = digest(path) if path.exists() else ""
    for job, result in zip(chunk, results, strict=True):
        problem, candidate, chosen, figures = job
        if not isinstance(result, str):
            state.entries.append(described(problem, candidate, state.machine, chosen, result, figures, sha256))
            continue
        state.dropped.append(f"{problem.typed}: {candidate}: {result}")
        if (instead := default_instead(problem, candidate, chosen, state.machine)) is not None:
            state.again.append((problem, instead, "fallback", {}))


def _finish(state: _State) -> Built:
    if not state.entries:
        raise CompileError(
            f"none of {len(state.dropped)} kernels compiles for {state.machine.arch}: {state.dropped[0]}"
        )
    entries = sorted(state.entries, key=lambda entry: (entry.problem, entry.chosen))
    before = held(state.folder)
    runtime_libraries.carry(state.folder, state.machine.kind)
    manifest.write(state.folder, entries)
    remove_stale(state.folder, entries, before)
    return Built(state.machine, state.folder, tuple(entries), tuple(state.dropped))
