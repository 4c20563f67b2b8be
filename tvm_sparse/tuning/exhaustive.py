"""Measuring every point of a space, in rounds, for studies that need to know what a search has missed.

    points ──► build all, measure each as it is built ──► measure all that were right again, in another order ──► ...

In the first round a point is verified as in tuning. A round's time is the median over its repeats on a GPU, which
measures them with its own clock, and the minimum on a CPU, where other processes can only increase them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core import scratch, spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.template import Table
from ..records import Session, Trial
from ..records import space as files
from ..records.space import POINTS, Space, SpaceError
from . import fleet
from .fleet import Fleet, Lease
from .workbench import Bench, NoValidRecord, new_session

ROUNDS = 3
# Seconds between writes of the file: the most that a killed run loses.
SAVE_SECONDS = 20.0
# Failures in a row after which the fallback is measured, to tell whether the machine is at fault.
MANY_FAILURES = 32
# Key in `Session.inputs` for the restriction of the space.
LIMITS = ("templates", "fixed")
# By kind of machine, how a round's time is computed from its repeats: a description and a function.
FIGURE: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "cuda": ("median of a round's replays", statistics.median),
    "llvm": ("least of the parts of 1 ms of a round", min),
}


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    round: int  # from 0
    done: int  # points of this round
    points: int
    failed: int
    best: float  # seconds


def measure_space(
    problem: Problem,
    machine: Machine,
    path: Path,
    *,
    named: Collection[str] = (),
    fixed: Table | None = None,
    rounds: int = ROUNDS,
    builders: int = 1,
    seed: int = 0,
    show: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    using: Fleet | None = None,
) -> Space:
    """Measure every point that `spaces.searched` allows, write them to `path`, and return them.

    Measurements in the file are not repeated, so that a stopped run can be continued.

    Parameters
    ----------
    named, fixed
        As in `spaces.searched`.
    rounds
        Number of times that every point is timed.
    show
        Called after every measurement.
    stop
        Called after every measurement; True ends the run, and the measurements are written.
    using
        The devices, if they are shared by several runs in a row.

    Raises
    ------
    SpaceError
        If the file is damaged, or holds a space of another problem, machine or restriction.
    NoValidRecord
        If the fallback fails.
    """
    with contextlib.ExitStack() as stack:
        devices = using or stack.enter_context(fleet.local(machine, builders))
        lease = stack.enter_context(devices.lease(machine))
        return _measured(problem, lease, path, named, fixed, rounds, seed, show, stop)


def _measured(
    problem: Problem,
    lease: Lease,
    path: Path,
    named: Collection[str],
    fixed: Table | None,
    rounds: int,
    seed: int,
    show: Callable[[Progress], None],
    stop: Callable[[], bool],
) -> Space:
    machine = lease.machine
    tables, _ = spaces.searched(problem, machine, named, fixed)
    points = list(spaces.points(problem, machine, tables))
    figure, reduce = FIGURE[machine.kind]
    session = new_session(lease.seat(), seed, problem, "exhaustive")
    threads = {"threads": os.environ.get("TVM_NUM_THREADS", "default")} if machine.kind == "llvm" else {}
    limits = {"templates": sorted(named), "fixed": {name: list(values) for name, values in (fixed or {}).items()}}
    session = dataclasses.replace(
        session,
        timer=f"{session.timer}; {figure}",
        inputs={**session.inputs, **threads, **limits, POINTS: len(points)},
    )
    record = _Recording(path, session, *_begun(path, session, problem, machine, points), reduce)

    with scratch.folder() as folder:
        fallback = spaces.fallback(problem, machine)
        bench = Bench(problem, machine, fallback, seed, folder, lease, undisturbed=True)

        def require_fallback() -> None:
            """The fallback fits every shape: if it fails, the machine is at fault, and points must not be blamed."""
            (trial,) = bench.measure([fallback], session.id, 0)
            if trial.outcome != "ok":
                raise NoValidRecord(f"{problem}: the fallback failed ({trial.outcome}): {trial.reason}")

        require_fallback()
        order, failures = random.Random(seed), 0
        for number in range(rounds):
            order.shuffle(points)
            waiting = [point for point in points if record.wants(point, number)]
            with contextlib.closing(bench.build(waiting)) as built:
                # On a CPU builds would compete with the measured kernels for cores.
                ready: Iterable[Candidate] = built if machine.kind == "cuda" else list(built)
                for done, candidate in enumerate(ready, start=1):
                    trial = bench.trial(candidate, session.id, len(record.trials), again=record.right(candidate))
                    failures = 0 if trial.outcome == "ok" else failures + 1
                    if failures == MANY_FAILURES:
                        require_fallback()
                        failures = 0
                    record.enter(trial)
                    show(record.progress(number, len(points) - len(waiting) + done, len(points)))
                    if stop():
                        return record.save()
    return record.save()


class _Recording:
    """The trials of a space that is being measured, with one time for each round, and their file.

    Parameters
    ----------
    session
        The present session.
    trials, sessions
        The file's previous content.
    reduce
        Computes a round's time from its repeats.
    """

    def __init__(
        self,
        path: Path,
        session: Session,
        trials: dict[Candidate, Trial],
        sessions: tuple[Session, ...],
        reduce: Callable[[Sequence[float]], float],
    ) -> None:
        self.trials = trials
        self._path, self._session, self._sessions, self._reduce = path, session, sessions, reduce
        self._saved = time.monotonic()

    def right(self, point: Candidate) -> bool:
        """Whether a point was measured, with a right result."""
        return point in self.trials and self.trials[point].outcome == "ok"

    def wants(self, point: Candidate, number: int) -> bool:
        """Whether a point has to be measured in a round: it was not yet, and did not fail through its own fault."""
        if self.right(point):
            return len(self.trials[point].seconds) <= number
        return point not in self.trials or self.trials[point].outcome == "environment"

    def enter(self, trial: Trial) -> None:
        """Add a round's result for a point; the file is written from time to time."""
        found = dataclasses.replace(trial, seconds=(self._reduce(trial.seconds),)) if trial.outcome == "ok" else trial
        if self.right(trial.candidate) and trial.outcome == "ok":
            before = self.trials[trial.candidate]
            found = dataclasses.replace(before, seconds=(*before.seconds, *found.seconds))
        self.trials[trial.candidate] = found
        if time.monotonic() > self._saved + SAVE_SECONDS:
            self.save()
            self._saved = time.monotonic()

    def progress(self, number: int, done: int, points: int) -> Progress:
        times = [one.median for one in self.trials.values() if one.outcome == "ok"]
        return Progress(number, done, points, len(self.trials) - len(times), min(times, default=float("inf")))

    def save(self) -> Space:
        """Write all trials to the file."""
        ours = (self._session,) if any(trial.session == self._session.id for trial in self.trials.values()) else ()
        space = Space((*self._sessions, *ours), tuple(self.trials.values()))
        files.write(self._path, space)
        return space


def _begun(
    path: Path, session: Session, problem: Problem, machine: Machine, points: Collection[Candidate]
) -> tuple[dict[Candidate, Trial], tuple[Session, ...]]:
    """The trials and sessions of a space in its file; nothing if there is no file."""
    if not path.exists():
        return {}, ()
    found = files.read(path)
    limits = {name: found.sessions[-1].inputs.get(name) for name in LIMITS}
    if (found.problem, found.arch) != (problem.key, machine.arch) or not {t.candidate for t in found.trials} <= set(
        points
    ):
        raise SpaceError(f"{path}: holds points of {found.problem} on {found.arch} that are none of this space")
    if limits != {name: session.inputs[name] for name in LIMITS}:
        raise SpaceError(f"{path}: holds a space that was restricted otherwise: {limits}")
    return {trial.candidate: trial for trial in found.trials}, found.sessions
