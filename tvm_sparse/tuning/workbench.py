"""Trials of one problem's candidates: built in parallel, measured on the seats of a lease, with their outcomes."""

from __future__ import annotations

import datetime
import functools
import hashlib
import importlib.metadata
import itertools
import platform
import shutil
import uuid
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..bench.measure import PROVE, STEPS, WITHOUT_VERIFY
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import FROM_FILE, Problem
from ..core.registry import plugins
from ..records import Session, Trial
from ..workers import building
from ..workers.processes import Reply
from .fleet import Lease, Seat
from .measuring import PrepareError

BUILD_TIMEOUT = 120.0
# Seconds to check and to time a candidate, unless a plan sets another limit.
MEASURE_TIMEOUT = 30.0
# Factor on this limit for the winner of a final.
PROOF_LIMIT = 4
# Free bytes of the temporary folder below which a failed build is not blamed on its candidate.
LEAST_DISK = 1 << 20


class NoValidRecord(RuntimeError):
    """The run ended without a right candidate."""


class Bench:
    """Builds and measures candidates of one problem, and keeps the libraries it has built."""

    def __init__(
        self,
        problem: Problem,
        machine: Machine,
        fallback: Candidate,
        seed: int,
        folder: Path,
        lease: Lease,
        *,
        undisturbed: bool = False,
        fresh: bool = False,
        limit: float | None = None,
        structure: str | None = None,
        rivals: Mapping[Candidate, Problem] = MappingProxyType({}),
    ) -> None:
        self._rivals = rivals  # as in `plans.Plan`
        self._how = {"undisturbed": undisturbed, "fresh": fresh}
        self._limit = MEASURE_TIMEOUT if limit is None else limit
        self._problem, self._machine, self._fallback = problem, machine, fallback
        self._lease, self._folder = lease, folder
        self._built: dict[Candidate, Future[Reply]] = {}
        self._begun: dict[Candidate, Future[Reply | None]] = {}
        self._request = {"problem": problem.key, "kind": machine.kind, "seed": seed, "plugins": plugins()}
        if structure is not None:
            self._request["structure"] = structure
        self._names = (folder / f"{number}.so" for number in itertools.count())

    def seat(self) -> Seat:
        """The seat that measures alone."""
        return self._lease.seat()

    def order(self, candidates: Sequence[Candidate]) -> None:
        """Start building candidates that will be measured later."""
        self._submit(candidates)

    def begin(self, candidates: Sequence[Candidate], session: str) -> None:
        """Start building and measuring candidates for a later call of `measure`."""
        self._submit(candidates)
        self._begun.update((candidate, self._measured(candidate, session)) for candidate in candidates)

    def give_up(self) -> None:
        """Cancel builds that have not begun."""
        for future in self._built.values():
            future.cancel()

    def forget(self, candidate: Candidate) -> None:
        """Forget a candidate's library, so that it is built again at its next measurement."""
        self._built.pop(candidate, None)

    def build(self, candidates: Sequence[Candidate]) -> Generator[Candidate]:
        """Yield each candidate once it is built; the builds of later ones continue meanwhile."""
        new = self._submit(candidates)
        try:
            for candidate in candidates:
                wait([self._built[candidate]])
                yield candidate
        finally:
            for candidate in new:
                if self._built[candidate].cancel():
                    self.forget(candidate)

    def _submit(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Start builds of candidates without one; returns those."""
        new = [c for c in dict.fromkeys(candidates) if c not in self._built]
        requests = [
            building.request(self._rivals.get(c, self._problem), c, self._machine, next(self._names), quick_host=True)
            for c in new
        ]
        self._built.update(zip(new, self._lease.build(requests, BUILD_TIMEOUT), strict=True))
        return new

    def measure(
        self,
        candidates: Sequence[Candidate],
        session: str,
        order: int,
        seat: Seat | None = None,
        *,
        again: bool = False,
    ) -> Iterator[Trial]:
        """One trial for each candidate, in order. With `seat` it may raise `Lost`; `again` is as in `trial`."""
        new = self._submit(candidates)
        if self._machine.kind == "llvm":
            wait([self._built[c] for c in new])  # builds would compete with the timed kernels for cores
        begun = self._begun
        steps = WITHOUT_VERIFY if again else STEPS
        measured = [begun.pop(c) if c in begun else self._measured(c, session, steps, seat) for c in candidates]
        for i, (candidate, reply) in enumerate(zip(candidates, measured, strict=True)):
            yield self._finished(candidate, reply, session, order + i)

    def trial(self, candidate: Candidate, session: str, order: int, *, again: bool = False) -> Trial:
        """The trial of a built candidate.

        `again`: it was right before, and is checked only with the arguments used for timing.
        """
        return self._finished(
            candidate, self._measured(candidate, session, WITHOUT_VERIFY if again else STEPS), session, order
        )

    def prove(self, candidate: Candidate, session: str, seat: Seat | None = None) -> Trial | None:
        """None if a measured candidate is right on ten times as many drawn cases; otherwise the trial with the failing
        case. May raise `Lost`, as `measure`.
        """
        self._submit([candidate])
        proof = self._measured(candidate, session, (PROVE,), seat)
        reply = proof.result()
        if reply is not None and reply.ok:
            return None
        return self._finished(candidate, proof, session, 0)

    def _measured(
        self, candidate: Candidate, session: str, steps: Sequence[str] = STEPS, seat: Seat | None = None
    ) -> Future[Reply | None]:
        """Measure a candidate once it is built; the result is None for one that is not worth measuring."""

        def library(built: Reply) -> Mapping[str, Any] | None:
            if not built.ok or self._spills(candidate, built):
                return None
            found = {"library": built.value["path"], "workspaces": built.value["workspaces"]}
            return found | {"steps": tuple(steps), "draw": draw_of(session, candidate), **self._how}

        limit = self._limit * (PROOF_LIMIT if PROVE in steps else 1)
        return self._lease.measure(self._built[candidate], self._request, library, limit, seat)

    def _spills(self, candidate: Candidate, built: Reply) -> int:
        """Number of instructions that spill registers; 0 for the fallback and rivals, which are
        measured in any case.
        """
        if candidate == self._fallback or candidate in self._rivals:
            return 0
        return (built.value["resources"] or {}).get("spill_instructions", 0)

    def _finished(self, candidate: Candidate, measured: Future[Reply | None], session: str, order: int) -> Trial:
        found = self._trial(candidate, self._built[candidate].result(), measured, session, order)
        if found.outcome == "environment":
            self.forget(candidate)
        return found

    def _trial(
        self, candidate: Candidate, built: Reply, measured: Future[Reply | None], session: str, order: int
    ) -> Trial:
        def trial(outcome: str, reason: str = "", seconds: Sequence[float] = ()) -> Trial:
            return Trial(
                problem=self._problem.key,
                arch=self._machine.arch,
                candidate=candidate,
                outcome=outcome,
                reason=reason,
                seconds=tuple(seconds),
                build_seconds=built.value["seconds"] if built.ok else None,
                session=session,
                order=order,
                resources=built.value["resources"] if built.ok else None,
            )

        if not built.ok:
            reason = f"build: {built.message}"
            # Compilers do not always report a lack of resources, but end with an exit status.
            if built.environment or shutil.disk_usage(self._folder).free < LEAST_DISK:
                return trial("environment", reason)
            return trial("timeout" if built.kind == "timeout" else "build-error", reason)
        try:
            reply = measured.result()
        except PrepareError as error:
            raise NoValidRecord(f"{self._problem}: its inputs and references were not made: {error}") from None
        if reply is None:
            # Another point does the same work without spilling.
            return trial("rejected", f"spills registers: {self._spills(candidate, built)} instructions")
        if reply.ok:
            return trial("ok", seconds=reply.value["seconds"])
        outcome = {"crash": "crash", "timeout": "timeout"}.get(reply.kind, "run-error")
        if reply.environment:
            outcome = "environment"
        elif reply.message.startswith("Mismatch"):
            outcome = "wrong"
        return trial(outcome, reply.message)


def draw_of(session: str, candidate: Candidate) -> int:
    """Seed of the cases drawn for a candidate: it differs between sessions, and can be computed
    from a trial's record.
    """
    return int.from_bytes(hashlib.sha256(f"{session} {candidate}".encode()).digest()[:6], "little")


# How calls are timed, by the kind of machine and whether inputs are fresh.
TIMERS = {
    ("cuda", False): "CUDA graph of repeated calls, inputs not rotated, median over replays",
    ("cuda", True): "CUDA graph of repeated calls, each behind a kernel that reads four L2 caches and meanwhile writes"
    " the inputs of the batch, less a graph of that kernel alone, median over pairs of replays",
    ("llvm", False): "wall clock over repeated calls from Python, inputs not rotated, median over repeats",
}


def new_session(
    seat: Seat, seed: int, problem: Problem, strategy: str, *, fresh: bool = False, structure: str | None = None
) -> Session:
    """The provenance of a run that starts now, on this seat's device and others of the same kind. It has the name
    of a structure's file without its folder.
    """
    timed = problem.tuned if structure is None else f"{FROM_FILE}{Path(structure).name}"
    machine = seat.device.machine
    return Session(
        id=uuid.uuid4().hex[:12],
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine={"name": machine.name, "arch": machine.arch, "cores": machine.cores, **seat.device.state},
        versions=_versions(),
        timer=TIMERS[machine.kind, fresh],
        inputs={"seed": seed, "structure": timed, **problem.settings[0]},
        strategy=strategy,
        fresh=fresh,
    )


@functools.cache
def _versions() -> Mapping[str, str]:
    names = ("tvm_sparse", "apache-tvm", "apache-tvm-ffi", "numpy", "xgboost-cpu")
    found = {name: importlib.metadata.version(name) for name in names if _installed(name)}
    return {**found, "python": platform.python_version()}


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
