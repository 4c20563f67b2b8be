"""Choosing and loading the kernel that a call runs, with the reason.

The decisions come from the first of these that is available: a record of the problem itself (exact); a record of the
same problem with the next larger batch (bucket); a model trained on measurements (predicted); a record of the nearest
problem whose decisions are a point of its template's space here (nearby); a record of another architecture, if this one
has none of the operator (borrowed); the template's default (fallback). The library comes from a folder of exported
kernels (first those loaded, then installed packages of kernels, then the user's cache) or is compiled once, in a child
process, into the user's cache. `configure` limits what a process may run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..artifacts import manifest, runtime_libraries, signing, trust
from ..artifacts.compile import CompileError
from ..artifacts.manifest import Entry, ManifestError
from ..artifacts.residency import unfit
from ..artifacts.signing import Signed
from ..core import commands, locking, registry, shape_files
from ..core import machine as machines
from ..core.candidate import Candidate
from ..core.machine import Machine, UnknownArch
from ..core.problem import Problem
from ..core.registry import make, parse
from . import cache, loading, paths
from .lookup import POLICIES, Built, Choice, Evidence, Known, choose, fallback, known_of, same_program

logger = logging.getLogger("tvm_sparse")

# Ways of look-up for which the times of the record apply to the call.
RECORDED = ("exact", "bucket")

# The environment variable with the policy of a process, unless `configure` sets one.
POLICY = "TVM_SPARSE_POLICY"


@dataclass(frozen=True)
class Explanation:
    """The result of `tvm_sparse.explain`: the kernel that a call runs, and the reason for the choice."""

    problem: str
    arch: str
    how: str  # one of `lookup.HOW`
    candidate: str  # template, version and decisions
    record: str | None  # key of the problem whose record gave the decisions; None if predicted, and for the fallback
    figures: dict[str, Any]  # times and provenance of that record (`queries.best_records`)
    library: str | None  # None: not compiled yet; the first call does that if `compiles`
    why: str
    tune: str | None  # the command that tunes the problem; None where a record of it, or of a larger batch, decides
    compiles: bool = True  # whether calls compile missing kernels; otherwise the first call raises `Miss`
    asked: str | None = None  # key of the given problem, if its calls run the kernel of another one, `problem`
    way: str | None = None  # which way calls of torch tensors take, and why, if the operator has several to tell of

    def __str__(self) -> str:
        lines = [] if self.asked is None else [f"calls of {self.asked} run {self.problem}"]
        lines += [f"{self.problem} on {self.arch}", f"  {self.candidate}", f"  {self.how}: {self.why}"]
        if self.figures:
            behind = " behind a kernel that writes its inputs" if self.figures.get("inputs") == "fresh" else ""
            tuned, untuned = self.figures["seconds"], self.figures["fallback_seconds"]
            lines.append(
                f"  {self.figures.get('strategy', 'tuned')} {self.figures['date'] or 'at an unknown date'}"
                f" on {self.figures['machine'] or 'an unknown machine'}:"
                f" {tuned * 1e6:.2f} us{behind}, {untuned / tuned:.2f}x the fallback's speed"
            )
            if "way" in self.figures and self.how in RECORDED:
                way, seconds = self.figures["way"], self.figures["way_seconds"]
                lines.append(f"  fastest way of a call of torch tensors: {way}, {seconds * 1e6:.2f} us")
        if self.way is not None:
            lines.append(f"  calls of torch tensors take {self.way}")
        otherwise = "compiled at the first call" if self.compiles else "none at hand, and none can be compiled here"
        lines.append(f"  library: {self.library or otherwise}")
        if self.tune:
            lines.append(f"  to tune it: {self.tune}")
        return "\n".join(lines)


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel: `function(inputs..., outputs...)`, with its workspaces bound."""

    function: Any
    entry: Entry
    explanation: Explanation


@dataclass(frozen=True)
class _Source:
    """A folder of exported kernels."""

    name: str
    folder: Path
    entries: tuple[Entry, ...]


class Dispatcher:
    """All kernels of a process. Thread-safe; each kernel is loaded once.

    Parameters
    ----------
    logs, shipped, cache
        Folders of records, installed kernels and compiled ones; defaults from `runtime.paths`.

    Attributes
    ----------
    policy, compiles, measures
        As `configure` sets them; None: the environment's policy.
    launchers
        Launchers that public functions keep for repeated calls. It is replaced by a new empty dict whenever the choice
        of kernels may change.
    """

    def __init__(
        self, logs: tuple[Path, ...] | None = None, shipped: Path | None = None, cache: Path | None = None
    ) -> None:
        self._log_roots = logs
        self._more_logs: tuple[Path, ...] = ()  # given to `configure`
        self._shipped = shipped
        self._cache = cache
        self._folders: list[_Source] = []
        self._kernels: dict[tuple[Problem, Machine], Kernel] = {}
        self._serving: dict[tuple[Problem, Machine], Problem] = {}  # results of `serving`
        self._signed: dict[Path, Signed] = {}  # added folders that are trusted for their signature
        self._taken: tuple[Problem, Machine, str] | None = None  # set by `taking`
        self._libraries: dict[tuple[Path, str], Any] = {}
        self._records: dict[tuple[str, str], Any] = {}  # cache of `_kept`
        self._predictors: dict[tuple[str, str], Any] = {}
        self._manifests: dict[Path, tuple[Any, tuple[Entry, ...]]] = {}
        self._warned: set[tuple[Any, ...]] = set()
        # By operator and machine, the candidate that the GPU refused to launch, and the driver's message.
        self._refused: dict[tuple[str, Machine], dict[Candidate, str]] = {}
        self._lock = threading.RLock()
        self._forked = self._watches_forks = False
        self.launchers: dict[Any, Any] = {}
        self.policy: str | None = None
        self.compiles = True
        self.measures = 0.0
        self._measured: set[tuple[Problem, Machine]] = set()  # attempted, with or without success

    def configure(
        self,
        policy: str | None = None,
        compiles: bool | None = None,
        logs: tuple[Path, ...] | None = None,
        measures: float | None = None,
    ) -> None:
        """Set what is not None, and look all kernels up again."""
        with self._lock:
            self.policy = self.policy if policy is None else policy
            self.compiles = self.compiles if compiles is None else compiles
            self.measures = self.measures if measures is None else measures
            if logs is not None:
                self._more_logs = logs
                # Also if the folders are the same, since records may have been added.
                self._records, self._predictors = {}, {}
            self._forget()

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Make look-up after the block use the same folders of kernels and records as before it."""
        before = self._more_logs, list(self._folders), dict(self._signed)
        try:
            yield
        finally:
            with self._lock:
                logs, self._folders, self._signed = before
                self.configure(logs=logs)

    def add(self, folder: Path, signed: Signed | None = None) -> tuple[Entry, ...]:
        """Use the kernels of an exported folder before all others; folders added later have priority.

        With `signed`, files are checked against the folder's signature, and their owner does not matter.
        """
        content = None if signed is None else signed.read(manifest.NAME, manifest.MOST_BYTES)
        entries = manifest.read(folder, content)
        with self._lock:
            self._signed.pop(folder, None)
            if signed is not None:
                self._signed[folder] = signed
            self._folders.insert(0, _Source("folder", folder, entries))
            self._forget()
        return entries

    def _forget(self) -> None:
        """Forget the kernels that calls have found."""
        self._kernels, self._serving, self.launchers = {}, {}, {}

    def kernel(self, problem: Problem, machine: Machine) -> Kernel:
        """The kernel for a problem on a machine, loaded, and compiled if necessary.

        Raises
        ------
        LoadError
            If the chosen library may not be loaded; `Miss` if there is none and none may be compiled, or if the policy
            forbids it.
        CompileError
            If compilation was necessary and failed.
        """
        found = self._kernels.get((problem, machine))
        if found is not None:
            return found
        with self._lock:
            found = self._kernels.get((problem, machine))
            if found is None:
                if machine.kind == "llvm":
                    self._refuse_fork()
                found = self._kernels[problem, machine] = self._load(problem, machine)
            return found

    def serving(self, problem: Problem, wider: Problem, machine: Machine) -> Problem:
        """The problem whose kernel a call of `problem` runs. It is `wider`, a problem with larger extents, if `problem`
        itself has neither a record nor a library and would have to be compiled.
        """
        asked = problem, machine
        if wider == problem or asked in self._kernels:
            return problem
        found = self._serving.get(asked)
        if found is None:
            with self._lock:
                choice, located = self._decide(problem, machine, self._sources(machine))
                own = located is not None or choice.how in RECORDED
                found = self._serving[asked] = problem if own else wider
        return found

    def explain(self, problem: Problem, machine: Machine) -> Explanation:
        """The explanation of what `kernel` would return, without loading or compiling."""
        with self._lock:
            choice, located = self._decide(problem, machine, self._sources(machine))
            return _explanation(problem, machine, choice, located, self._may_compile())

    def choice(self, problem: Problem, machine: Machine) -> Choice:
        """The decisions that `kernel` uses, and the problem for which they are compiled."""
        with self._lock:
            return self._decide(problem, machine, self._sources(machine))[0]

    def way(self, problem: Problem, machine: Machine) -> str | None:
        """The fastest way to an operator's result (`Best.ways`), from the record of the problem or of the next larger
        batch.

        None if there is no record, or it does not compare ways.
        """
        if self._taken is not None and self._taken[:2] == (problem, machine):
            return self._taken[2]
        found = self.explain(problem, machine)
        return found.figures.get("way") if found.how in RECORDED else None

    @contextlib.contextmanager
    def taking(
        self, problem: Problem, machine: Machine, way: str, launchers: dict[Any, Any] | None = None
    ) -> Iterator[None]:
        """Let calls within the block take this way regardless of records, in order to time it. For one thread at a
        time.

        `launchers` replaces `self.launchers` within the block.
        """
        before = self._taken, self.launchers
        self._taken, self.launchers = (problem, machine, way), {} if launchers is None else launchers
        try:
            yield
        finally:
            self._taken, self.launchers = before

    def measure(self, problems: Sequence[Problem], machine: Machine, seconds: float, builders: int) -> None:
        """Time the best candidates of problems without a record of their own, for about `seconds` in total.

        The fastest are added to the user's records. Problems for which no time is left, or whose candidates cannot be
        measured, keep the decisions of look-up, with a message.
        """
        end = time.monotonic() + seconds
        with self._lock:
            wanted = [one for one in dict.fromkeys(problems) if self._is_unmeasured(one, machine)]
            for number, problem in enumerate(wanted):
                left = (end - time.monotonic()) / (len(wanted) - number)
                self._measure(problem, machine, left, builders)

    def _is_unmeasured(self, problem: Problem, machine: Machine) -> bool:
        """Whether the problem has no record of its own, and no measurement was attempted."""
        if (problem, machine) in self._measured or not self._may_compile():
            return False
        return self._decide(problem, machine, self._sources(machine))[0].how != "exact"

    def _measure(self, problem: Problem, machine: Machine, seconds: float, builders: int) -> None:
        """As `measure`, for one problem."""
        from . import measuring

        self._measured.add((problem, machine))
        evidence = self._evidence(problem, machine, self._sources(machine), compiles=True)
        choice = choose(problem, machine, evidence)
        refused = self._refused.get((problem.operator, machine), {})
        candidates = [c for c in measuring.contenders(problem, machine, choice, evidence) if c not in refused]
        logs = (self._log_roots or (paths.user_logs(),))[-1]
        found: dict[str, Any] = {"reason": "no time is left"}
        if seconds > 0:
            with _spinner(f"measuring {problem.typed}"):
                found = measuring.measure(problem, machine, candidates, logs, seconds, builders)
        if "reason" in found:
            logger.warning("%s on %s: not measured: %s", problem.typed, machine.arch, found["reason"])
            return
        logger.info(
            "%s on %s: %s is the fastest of %d candidates: %.2f us, the fallback %.2f",
            problem.typed,
            machine.arch,
            found["candidate"],
            len(found["times"]),
            found["seconds"] * 1e6,
            found["fallback_seconds"] * 1e6,
        )
        self._kernels.pop((problem, machine), None)
        self.launchers = {}

    def warmup(self, problems: Sequence[Problem], machine: Machine, builders: int) -> list[Explanation]:
        """Load the kernels of these problems, compiling missing ones `builders` at a time."""
        with self._lock:
            sources = self._sources(machine)
            choices = [self._allowed(problem, machine, sources) for problem in problems]
            missing = [choice for choice, located in choices if located is None]
            if missing:
                self._compile(missing, machine, builders)
            found = [self.kernel(problem, machine).explanation for problem in problems]
            if any(self._serving.pop((problem, machine), problem) != problem for problem in problems):
                self.launchers = {}  # which launch the kernels that stood in
            return found

    def installed(self, machine: Machine) -> list[Entry]:
        """The kernels of installed packages and loaded folders that a machine can run."""
        with self._lock:
            return [entry for source in self._sources(machine) if source.name != "cache" for entry in source.entries]

    def _refuse_fork(self) -> None:
        """Raise in a process forked from one that has loaded CPU kernels: it lacks their threads, and calls
        would hang.
        """
        if self._forked:
            raise loading.LoadError(
                "this process was forked from one that had used CPU kernels, whose threads do not survive a fork;"
                " start it with multiprocessing's 'spawn' or 'forkserver', or fork before the first call"
            )
        if not self._watches_forks:
            os.register_at_fork(after_in_child=self._after_fork)
            self._watches_forks = True

    def _after_fork(self) -> None:
        self._forked, self._lock = True, threading.RLock()
        self._forget()

    def _load(self, problem: Problem, machine: Machine) -> Kernel:
        if self.measures and self._is_unmeasured(problem, machine):
            self._measure(problem, machine, self.measures, machines.default_builders())
        sources = self._sources(machine)
        choice, located = self._allowed(problem, machine, sources)
        self._warn(problem, machine, choice)
        try:
            kernel = self._loaded(problem, machine, choice, located)
        except CompileError as error:
            if choice.how not in ("predicted", "nearby", "borrowed") or self._policy() != "any":
                raise
            decisions = f"the decisions of {choice.record}" if choice.record else "the predicted decisions"
            why = f"{decisions} do not compile for it; those are a template's default"
            logger.warning("%s on %s: %s: %s", problem.typed, machine.arch, why, error)
            choice = fallback(problem, machine, why)
            kernel = self._loaded(problem, machine, choice, self._find(choice, machine, sources))
        return self._retreating(problem, machine, kernel)

    def _retreating(self, problem: Problem, machine: Machine, kernel: Kernel) -> Kernel:
        """The kernel, with a fallback if this GPU refuses to launch it; a refusal is reported once and remembered for
        the process.
        """
        if machine.kind != "cuda":
            return kernel
        candidate = kernel.entry.candidate

        def other(reason: str) -> Kernel:
            with self._lock:
                refused = self._refused.setdefault((problem.operator, machine), {})
                refused[candidate] = reason
                choice = self._instead(problem, machine)
                if choice.candidate in refused:
                    raise loading.LoadError(
                        f"{problem.typed} on {machine.name}: the GPU launches none of {', '.join(map(str, refused))}:"
                        f" {_explained(reason)}"
                    )
                logger.warning(
                    "%s on %s: %s cannot be launched (%s); %s runs from now on",
                    problem.typed,
                    machine.name,
                    candidate,
                    _explained(reason),
                    choice.candidate,
                )
                if choice.how not in POLICIES[policy := self._policy()]:
                    raise loading.Miss(f"{problem.typed} on {machine.arch}: {choice.why}. The policy is {policy!r}")
                located = self._find(choice, machine, self._sources(machine))
                found = self._retreating(problem, machine, self._loaded(problem, machine, choice, located))
                self._kernels[problem, machine] = found
                return found

        if reason := _no_room(kernel.entry, machine):
            return other(reason)
        function = loading.Retreating(
            kernel.function, lambda reason: other(reason).function, always=kernel.entry.resident is not None
        )
        return dataclasses.replace(kernel, function=function)

    def _instead(self, problem: Problem, machine: Machine) -> Choice:
        """The choice that replaces kernels of an operator that were refused."""
        refused = self._refused[problem.operator, machine]
        why = f"this GPU does not launch {', '.join(map(str, refused))}: {_explained(next(reversed(refused.values())))}"
        return fallback(problem, machine, why, cooperative=False, refused=refused)

    def _loaded(self, problem: Problem, machine: Machine, choice: Choice, located: tuple[Path, Entry] | None) -> Kernel:
        """The kernel of a choice, loaded, and compiled if necessary."""
        if located is None:
            self._require_compiler(problem, machine)
            started = time.monotonic()
            with _spinner(f"compiling {problem.typed}"):
                [located] = self._compile([choice], machine)
            logger.warning(
                "%s on %s: compiled in %.1f s, once for this user; tvm_sparse.warmup compiles before the first call",
                problem.typed,
                machine.arch,
                time.monotonic() - started,
            )
        try:
            function = self._function(*located)
        except loading.LoadError as error:
            if located[0] != self._cache_folder(machine) or not self._may_compile():
                raise
            # Missing from the cache, not from an exported folder: compile it again.
            logger.warning("a library of the user's cache is compiled again: %s", error)
            [located] = self._compile([choice], machine)
            function = self._function(*located)
        function = loading.with_workspaces(function, located[1].workspaces, problem, machine.kind)
        return Kernel(function, located[1], _explanation(problem, machine, choice, located, self._may_compile()))

    def _warn(self, problem: Problem, machine: Machine, choice: Choice) -> None:
        """Warn that a problem is not tuned, once for all its batches."""
        command = _tune_command(problem, machine, choice)
        others = tuple(value for name, value in problem.axes.items() if name != problem.batch_axis)
        what = (problem.operator, *others, machine)
        if command is not None and what not in self._warned:
            self._warned.add(what)
            logger.warning("%s on %s: %s. To tune it: %s", problem.typed, machine.arch, choice.why, command)

    def _function(self, folder: Path, entry: Entry) -> Any:
        path = folder / entry.library
        library = self._libraries.get((path, entry.sha256))
        if library is None:
            signed = self._signed.get(folder)
            reader = None if signed is None else signed.read
            library = loading.load_library(path, entry.kind, entry.sha256, reader)
            self._libraries[path, entry.sha256] = library
        return loading.function_of(library, path, entry.symbol)

    def _sources(self, machine: Machine) -> list[_Source]:
        """Folders in order of preference, each with the entries that this machine can run."""
        sources = list(self._folders)
        shipped = paths.shipped_kernels() if self._shipped is None else (self._shipped,)
        for name, folder in (*(("package", folder) for folder in shipped), ("cache", self._cache_folder(machine))):
            if (stamp := locking.stamp(folder / manifest.NAME)) is None:
                continue
            held = self._manifests.get(folder)
            if held is None or held[0] != stamp:
                try:
                    held = self._manifests[folder] = (stamp, manifest.read(folder))
                except ManifestError as error:
                    if (folder, stamp) not in self._warned:
                        self._warned.add((folder, stamp))
                        logger.warning("%s kernels are left aside: %s", name, error)
                    continue
            sources.append(_Source(name, folder, held[1]))
        return [
            dataclasses.replace(
                source,
                entries=tuple(e for e in source.entries if machines.suitability(e.arch, machine) is not None),
            )
            for source in sources
        ]

    def _cache_folder(self, machine: Machine) -> Path:
        return (self._cache or paths.user_cache()) / machine.arch

    def _tuned(self, arch: str, operator: str) -> dict[str, Any]:
        """The best records of one operator, read again when their files have changed."""

        def read() -> dict[str, Any]:
            from ..records.queries import best_records

            return best_records(self._roots(), arch, (operator,))

        return self._kept(self._records, arch, operator, "best.jsonl", read)

    def _predictor(self, arch: str, operator: str) -> Any:
        """The model of one operator, or None; read again when its file has changed."""

        def read() -> Any:
            from ..records.queries import predictor

            return predictor(self._roots(), arch, operator)

        return self._kept(self._predictors, arch, operator, "predictor.json", read)

    def _kept(
        self, kept: dict[tuple[str, str], Any], arch: str, operator: str, name: str, read: Callable[[], Any]
    ) -> Any:
        """The result of `read` for the files of this name, one in each folder of logs; cached until one of them
        changes.
        """
        stamps = [locking.stamp(root / arch / operator / name) for root in self._roots()]
        held = kept.get((arch, operator))
        if held is None or held[0] != stamps:
            held = kept[arch, operator] = (stamps, read())
        return held[1]

    def _roots(self) -> tuple[Path, ...]:
        """The folders of records. If several have a record of a problem, the last one counts."""
        own = self._log_roots if self._log_roots is not None else (paths.shipped_logs(), paths.user_logs())
        return (*own, *self._more_logs)

    def _evidence(self, problem: Problem, machine: Machine, sources: list[_Source], compiles: bool) -> Evidence:
        """The exported kernels and the records of a problem's operator."""
        # Folders have priority over logs, since their libraries need no compiler. The user's cache decides only if
        # nothing else can: it reflects the logs at the time of compilation, and they may be better now.
        held: dict[str, Known] = {}
        built = []
        for source in reversed(sources):
            for entry in source.entries:
                if entry.problem.partition("/")[0] != problem.operator or (source.name == "cache" and compiles):
                    continue
                reason = unfit(entry.resident, entry.resources, machine)
                if entry.chosen == "exact" and entry.arch == machine.arch and source.name != "cache":
                    held[entry.problem] = Known(entry.candidate, entry.figures, at_hand=True, unfit=reason)
                if reason is None:
                    away = machines.suitability(entry.arch, machine) or 0
                    built.append(Built(entry.problem, entry.candidate, entry.chosen, entry.figures, away))
        own = held.get(problem.key)
        if own is not None and own.unfit is None:
            return Evidence(held, built=built, compiles=compiles)  # no record could change the choice
        known = known_of(self._tuned(machine.arch, problem.operator)) | held
        borrowed, lender = {}, None
        if not known:
            from ..records.queries import recorded_archs

            lender = machines.nearest_arch(machine, recorded_archs(self._roots(), (problem.operator,)))
            borrowed = known_of(self._tuned(lender, problem.operator)) if lender else {}
        policy = self._policy()
        evidence = Evidence(known, borrowed, lender or "", built, compiles, permitted=POLICIES[policy])
        if policy == "exact":
            return evidence  # a prediction would be refused, but a bucket may run
        predictor = functools.partial(self._predictor, machine.arch, problem.operator)
        return dataclasses.replace(evidence, predictor=predictor)

    def _decide(
        self, problem: Problem, machine: Machine, sources: list[_Source]
    ) -> tuple[Choice, tuple[Path, Entry] | None]:
        """The decisions for a problem, and the library that implements them, if there is one."""
        choice = choose(problem, machine, self._evidence(problem, machine, sources, compiles=True))
        if choice.candidate in self._refused.get((problem.operator, machine), {}):
            choice = self._instead(problem, machine)
        located = self._find(choice, machine, sources)
        if located is None and not self._may_compile():
            choice = choose(problem, machine, self._evidence(problem, machine, sources, compiles=False))
            located = self._find(choice, machine, sources)
        return choice, located

    def _allowed(
        self, problem: Problem, machine: Machine, sources: list[_Source]
    ) -> tuple[Choice, tuple[Path, Entry] | None]:
        """As `_decide`, restricted to what the policy allows."""
        choice, located = self._decide(problem, machine, sources)
        if located is None:
            self._require_compiler(problem, machine)
        if choice.how not in POLICIES[policy := self._policy()]:
            command = _tune_command(problem, machine, choice)
            raise loading.Miss(
                f"{problem.typed} on {machine.arch}: {choice.why}. The policy is {policy!r}: only"
                f" {', '.join(POLICIES[policy])} decisions run. To tune it: {command}"
            )
        return choice, located

    def _policy(self) -> str:
        policy = self.policy or os.environ.get(POLICY) or "any"
        if policy not in POLICIES:
            raise ValueError(f"{POLICY}: expected one of {', '.join(POLICIES)}, got {policy!r}")
        return policy

    def _may_compile(self) -> bool:
        return self.compiles and runtime_libraries.compiler() is not None

    def _require_compiler(self, problem: Problem, machine: Machine) -> None:
        if not self._may_compile():
            reason = (
                f"apache-tvm, which compiles one, is not installed: {commands.install(*_compiling(machine))}"
                if self.compiles
                else "tvm_sparse.configure(compile=False) forbids to compile one"
            )
            ahead = ("prebuild", *problem.typed.split(), "--target", machine.arch, "--output", "dist")
            raise loading.Miss(
                f"{problem.typed} on {machine.arch}: no kernel for it is at hand, and {reason}\n"
                "To build it ahead into a wheel, on any machine with the compiler:"
                f" {commands.PROGRAM} {shlex.join([*ahead, *_plugins_of(problem)])}"
            )

    def _find(self, choice: Choice, machine: Machine, sources: list[_Source]) -> tuple[Path, Entry] | None:
        """A library of the chosen candidate for the chosen problem, at any batch and with any data."""
        found = [
            (source.folder, entry)
            for source in sources
            for entry in source.entries
            if _is_program(entry, choice) and not unfit(entry.resident, entry.resources, machine)
        ]
        # Machine code for this architecture first, then other code that runs here; among equals, the first folder.
        return min(found, key=lambda one: machines.suitability(one[1].arch, machine) or 0, default=None)

    def _compile(self, choices: Sequence[Choice], machine: Machine, builders: int = 1) -> list[tuple[Path, Entry]]:
        """Compile the choices that the user's cache lacks; processes that need the same library wait for each other.

        If one of several fails, those compiled before it stay.
        """
        from ..workers import building

        def library(choice: Choice) -> str:
            return building.library_name(choice.compiled_for, choice.candidate, machine.arch)

        folder = self._cache_folder(machine)
        with cache.building(folder, map(library, choices)) as where:
            present: tuple[Entry, ...] = ()
            if (folder / manifest.NAME).exists():
                try:
                    present = manifest.read(folder)
                except ManifestError as error:
                    logger.warning("the user's cache is begun anew: %s", error)
            missing: list[Choice] = []
            for choice in choices:
                located = self._find(choice, machine, [_Source("cache", folder, present)])
                if (located is None or not _intact(*located)) and not any(
                    other.candidate == choice.candidate and same_program(other.compiled_for.key, choice.compiled_for)
                    for other in missing
                ):
                    missing.append(choice)
            jobs = [(choice.compiled_for, choice.candidate, choice.how, choice.figures) for choice in missing]
            built: list[Entry] = []
            try:
                if len(jobs) == 1:
                    with building.kept.pool() as pool:
                        building.build(jobs, machine, where, show=built.append, using=pool)
                elif jobs:
                    building.build(jobs, machine, where, show=built.append, builders=min(builders, len(jobs)))
            finally:
                if built:
                    cache.add(folder, built, where)
            entries = (*built, *present)
            return [
                (folder, next(e for e in entries if _is_program(e, choice)))  # including kernels too large for this GPU
                for choice in choices
            ]


def _no_room(entry: Entry, machine: Machine) -> str | None:
    """Why the GPU cannot launch a kernel's clusters, if the driver is present and says so."""
    taken = entry.resources or {}
    cluster = taken.get("cluster", 1)
    if cluster <= machines.PORTABLE_CLUSTER or machine not in machines.gpus():
        return None
    from ..artifacts.cuda.limits import clusters_at_once

    threads, shared = taken.get("threads", 32), taken.get("dynamic_shared_bytes", 0)
    room = clusters_at_once(machines.gpus().index(machine), cluster, threads, shared)
    return f"no room for a cluster of {cluster} thread blocks" if room == 0 else None


def _explained(reason: str) -> str:
    """A refusal in words, with an explanation of the driver's code if it is known."""
    if "COOPERATIVE_LAUNCH_TOO_LARGE" in reason:
        return f"{reason}: no room for all thread blocks at the same time"
    return reason


def _is_program(entry: Entry, choice: Choice) -> bool:
    return entry.candidate == choice.candidate and same_program(entry.problem, choice.compiled_for)


def _intact(folder: Path, entry: Entry) -> bool:
    try:
        content = trust.read(folder / entry.library, loading.MOST_LIBRARY)
        return hashlib.sha256(content).hexdigest() == entry.sha256
    except OSError:
        return False


def _explanation(
    problem: Problem, machine: Machine, choice: Choice, located: tuple[Path, Entry] | None, compiles: bool
) -> Explanation:
    return Explanation(
        problem=problem.key,
        arch=machine.arch,
        how=choice.how,
        candidate=str(choice.candidate),
        record=choice.record,
        figures=dict(choice.figures),
        library=str(located[0] / located[1].library) if located else None,
        why=choice.why,
        tune=_tune_command(problem, machine, choice),
        compiles=compiles,
    )


def _tune_command(problem: Problem, machine: Machine, choice: Choice) -> str | None:
    """The command that tunes a problem on this machine; None if a tuned record serves it."""
    if choice.how in RECORDED and "strategy" not in choice.figures:
        return None
    words = ["tune", *problem.typed.split()]
    if machine.arch != machines.resolve("auto").arch:
        words += ["--target", machines.target(machine)]
    return commands.command(*words, *_plugins_of(problem))


def _plugins_of(problem: Problem) -> list[str]:
    """The options that make a command load the problem's operator."""
    own = problem.operator in {operator.name for operator in registry.BUILTIN}
    return [] if own else commands.options("--plugin", registry.plugins())


def _compiling(machine: Machine) -> tuple[str, ...]:
    """The extras of this package that compile for a machine."""
    return ("cuda",) if machine.kind == "cuda" else ("compiler",)


@contextlib.contextmanager
def _spinner(text: str) -> Iterator[None]:
    """Show a spinner on stderr during the block, if it is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(text):
        yield


# The process's dispatcher, used by the public functions.
dispatcher = Dispatcher()


def configure(
    *,
    policy: str | None = None,
    compile: bool | None = None,
    logs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
    measure: float | None = None,
) -> None:
    """Set which kernels calls of this process may run; arguments that are not given leave their setting unchanged.

    Parameters
    ----------
    policy
        `exact`: only decisions from a record of the problem, or of the same one with a larger batch. `nearest`: also
        those of the nearest tuned problem, or of another architecture. `any`: also a template's default. Calls raise an
        error if the policy excludes their kernel. The default is the environment variable TVM_SPARSE_POLICY, or `any`
        if it is not set.
    compile
        Whether a call may compile a kernel that is in no folder, which takes seconds. If not, it runs the best
        available kernel for the problem at any batch, and raises if there is none. Default: True.
    measure
        Seconds that the first call of a problem may spend on timing the few best candidates of look-up, if the problem
        has no record of its own: see `warmup`. 0, the default: calls measure nothing.
    logs
        Folders of records that look-up reads besides the package's and the user's, such as those of `tvm-sparse tune
        --logs`. They have priority, the last one most. They replace folders given before; `()` gives none. Records
        added in the meantime are read.

    Raises
    ------
    ValueError
        For another policy, or `measure` that is negative or not a number.
    NotADirectoryError
        If one of `logs` is not a folder.

    Notes
    -----
    Calls, `warmup` and other functions that look kernels up raise `tvm_sparse.Miss` for an excluded kernel; `explain`
    does not raise.
    """
    if policy is not None and policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
    folders = None
    if logs is not None:
        folders = tuple(Path(one).absolute() for one in ([logs] if isinstance(logs, str | os.PathLike) else logs))
        for folder in folders:
            if not folder.is_dir():
                wanted = "expected a folder of records, as tvm-sparse tune --logs FOLDER writes it"
                raise NotADirectoryError(f"logs: {wanted}, got {str(folder)!r}, which is none")
    dispatcher.configure(policy, compile, folders, None if measure is None else _seconds("measure", measure))


def _seconds(name: str, value: float) -> float:
    """Check a length of time in seconds."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError(f"{name}: expected seconds, from 0 to 1,000,000, got {value!r}")
    return float(value)


def load(
    folder: str | os.PathLike[str],
    *,
    trusted_keys: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None = None,
) -> int:
    """Use the kernels of a folder written by `tvm-sparse export` before all others; returns the number that fit this
    machine.

    Kernels are code. A folder is accepted if only this user or root can have written it (`artifacts.trust`), or if it
    is signed by a trusted key.

    Parameters
    ----------
    trusted_keys
        Public keys, `ssh-ed25519 AAAA...`, or paths of files of such lines: the folder has to be signed by one of
        them, whoever owns it. Default: a folder that others may have written has to be signed by a key of the user's
        file of trusted keys (`runtime.paths.user_keys`); other folders need no signature.

    Raises
    ------
    ManifestError
        If the folder's manifest is missing, malformed, not trusted or of another version. `SignatureError` if a
        required signature is missing or invalid, or cryptography is not installed. Libraries are checked by their hash
        when they are first used.
    """
    there = [found for found in (machines.gpu(), machines.cpu()) if found is not None]
    place = Path(folder).absolute()  # libraries are loaded later, when the working directory may differ
    signed = None if trusted_keys is None else signing.check(place, signing.public_keys(trusted_keys))
    if trusted_keys is None and signing.is_signed(place) and not _is_own(place):
        named = paths.user_keys()
        signed = signing.check(place, signing.public_keys(named) if named.exists() else (), str(named))
    entries = dispatcher.add(place, signed)
    count = sum(any(machines.suitability(entry.arch, one) is not None for one in there) for entry in entries)
    if not count:
        holds = ", ".join(sorted({entry.arch for entry in entries})) or "nothing"
        logger.warning(
            "%s holds kernels for %s; this machine is %s, and uses none",
            folder,
            holds,
            " and ".join(one.arch for one in there),
        )
    return count


def _is_own(folder: Path) -> bool:
    """Whether nobody else can have written a folder and its manifest; true if there is none."""
    try:
        trust.check_file(folder / manifest.NAME)
    except trust.Refused:
        return False
    except OSError:
        return True
    return True


def warmup(
    problems: str | os.PathLike[str] | Problem | Iterable[str | Problem],
    *,
    target: str = "auto",
    builders: int | None = None,
    seconds: float | None = None,
) -> list[Explanation]:
    """Load the kernels of these problems before their first calls; missing kernels are compiled first.

    Only kernels that are neither in an exported folder nor in the user's cache are compiled, several at a time. One
    kernel serves every batch with the same decisions.

    Parameters
    ----------
    problems
        A problem or its key (`"softmax_topk/batch=8,vocab=32000,k=20"`), several of these, or the path of a file of
        shapes as for `tvm-sparse tune --shapes`.
    target
        `auto` (the GPU if there is one), `cpu` or `cuda`, of this machine.
    builders
        Number of processes that compile. Default: one a core, at most 16.
    seconds
        Time for measurements, for all problems together; candidates under way are finished, so that it may take some
        seconds more. Ten seconds a problem are enough for most on a GPU. For each problem without a record of its own,
        look-up's best candidates (its choice, runners-up, defaults, the fallback) are built in other processes, checked
        against the reference, and timed on this machine. The fastest is added to the user's records, where later
        processes find it, and `explain` says "measured here". If the time does not suffice or something fails, the
        choice of look-up runs. Requires the extras for tuning. Default: nothing is measured.

    Returns
    -------
    explanations
        The result of `explain` for each problem, in their order.

    Raises
    ------
    ProblemError
        For an unknown operator or axis, or an invalid file of shapes.
    UnknownArch
        For a target other than this machine's.
    ValueError
        For fewer than 1 builder, or `seconds` that is negative or not a number.
    CompileError, LoadError
        If a kernel does not compile or may not be loaded. Kernels compiled before it stay in the cache.
    """
    where = machines.resolve(target)
    if where not in (machines.gpu(), machines.cpu()):
        raise UnknownArch(f"target: expected this machine's, got {target!r}; export compiles for others")
    builders = machines.default_builders() if builders is None else builders
    if builders < 1:
        raise ValueError(f"builders: expected at least 1, got {builders}")
    asked = _problems(problems)
    wanted = [problem.as_called() for problem in asked]
    if seconds is not None:
        dispatcher.measure(wanted, where, _seconds("seconds", seconds), builders)
    return list(map(_for, asked, dispatcher.warmup(wanted, where, builders)))


def _problems(given: Any) -> list[Problem]:
    if isinstance(given, os.PathLike) or (isinstance(given, str) and given.endswith(".toml")):
        return shape_files.read(Path(given))
    if isinstance(given, str | Problem):
        given = [given]
    found = []
    for one in given:
        if not isinstance(one, str | Problem):
            raise TypeError(f"problems: expected problems, keys or the path of a file, got {type(one).__name__}")
        found.append(parse(one) if isinstance(one, str) else one)
    return found


def explain(problem: str | Problem, *, target: str = "auto", **axes: Any) -> Explanation:
    """The kernel that a call runs, and the reason for it: an exact record, a batch bucket, a prediction, a nearby or
    borrowed record, or the fallback.

    Parameters
    ----------
    problem
        A problem, its key (`"softmax_topk/batch=10,vocab=25000,k=5,dtype=float32"`), or an operator's name with the
        axes as keywords: `explain("softmax_topk", batch=10, vocab=25000, k=5)`. Some operators accept arguments of a
        call, too: `explain("softmax_sample", batch=8, vocab=32000, top_k=50, seed="array")`.
    target
        As for the command line: `auto` (the GPU if there is one), `cpu`, `cuda`, or an architecture.

    Raises
    ------
    ProblemError
        For an unknown operator or axis, with the nearest valid names.
    UnknownArch
        For an unknown target.
    """
    if isinstance(problem, str):
        problem = parse(problem) if "/" in problem else make(problem, axes)
    elif not isinstance(problem, Problem):
        raise TypeError(f"problem: expected a Problem, its key or an operator's name, got {type(problem).__name__}")
    called, where = problem.as_called(), machines.resolve(target)
    told = getattr(registry.find(problem.operator).call, "told_way", None)
    found = dataclasses.replace(dispatcher.explain(called, where), way=told and told(called, where))
    return _for(problem, found)


def _for(asked: Problem, found: Explanation) -> Explanation:
    """The explanation found for the problem whose kernel calls of `asked` run."""
    return found if asked.key == found.problem else dataclasses.replace(found, asked=asked.key)
