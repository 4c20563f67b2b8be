"""Measures every point of a space, in rounds: for studies of spaces, which need to know what a search has missed.

    points ──► build all, measure each as it is built ──► measure all that were right again, in another order ──► ...

In the first round a point is verified as in tuning. A round's figure is the median over its repeats on a GPU, whose
own clock takes the times, and the least on a CPU, where other processes only ever add to them.
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
from .session import Bench, NoValidRecord, new_session

ROUNDS = 3
# What one run may lose to a kill.
SAVE_SECONDS = 20.0
# In a row: then the fallback tells whether the machine is at fault.
MANY_FAILURES = 32
LIMITS = ("templates", "fixed")  # in `Session.inputs`
FIGURE: dict[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "cuda": ("median of a round's replays", statistics.median),
    "llvm": ("least of the parts of 1 ms of a round", min),
}


@dataclass(frozen=True)
class Progress:
    """How far a run is."""

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

    What the file holds already is not measured again, so that a run that was stopped goes on where it ended.

    Parameters
    ----------
    named, fixed
        As of `spaces.searched`.
    rounds
        How often every point is timed.
    show
        Called after every measurement.
    stop
        Asked after every measurement; True ends the run, and what was measured is written.
    using
        The devices, for several runs in a row.

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
    trials, sessions = _begun(path, session, problem, machine, points)
    saved = time.monotonic()

    def save() -> Space:
        ours = (session,) if any(trial.session == session.id for trial in trials.values()) else ()
        space = Space((*sessions, *ours), tuple(trials.values()))
        files.write(path, space)
        return space

    def enter(trial: Trial, number: int, done: int) -> None:
        nonlocal saved
        found = dataclasses.replace(trial, seconds=(reduce(trial.seconds),)) if trial.outcome == "ok" else trial
        before = trials.get(trial.candidate)
        if before and before.outcome == "ok" == trial.outcome:
            found = dataclasses.replace(before, seconds=(*before.seconds, *found.seconds))
        trials[trial.candidate] = found
        times = [one.median for one in trials.values() if one.outcome == "ok"]
        show(Progress(number, done, len(points), len(trials) - len(times), min(times, default=float("inf"))))
        if time.monotonic() > saved + SAVE_SECONDS:
            save()
            saved = time.monotonic()

    with scratch.folder() as folder:
        fallback = spaces.fallback(problem, machine)
        bench = Bench(problem, machine, fallback, seed, folder, lease, undisturbed=True)

        def require_fallback() -> None:
            """The fallback fits every shape: where it fails the machine is at fault, and no point is to pay."""
            (trial,) = bench.measure([fallback], session.id, 0)
            if trial.outcome != "ok":
                raise NoValidRecord(f"{problem}: the fallback failed ({trial.outcome}): {trial.reason}")

        require_fallback()
        order, failures = random.Random(seed), 0
        for number in range(rounds):
            order.shuffle(points)
            waiting = [c for c in points if c not in trials or _open(trials[c], number)]
            with contextlib.closing(bench.build(waiting)) as built:
                # On a CPU builds would take the cores from what is measured.
                ready: Iterable[Candidate] = built if machine.kind == "cuda" else list(built)
                for done, candidate in enumerate(ready, start=1):
                    again = candidate in trials and trials[candidate].outcome == "ok"
                    trial = bench.trial(candidate, session.id, len(trials), again=again)
                    failures = 0 if trial.outcome == "ok" else failures + 1
                    if failures == MANY_FAILURES:
                        require_fallback()
                        failures = 0
                    enter(trial, number, len(points) - len(waiting) + done)
                    if stop():
                        return save()
    return save()


def _open(trial: Trial, number: int) -> bool:
    """Whether a point is still to be measured in a round."""
    return trial.outcome == "environment" or (trial.outcome == "ok" and len(trial.seconds) <= number)


def _begun(
    path: Path, session: Session, problem: Problem, machine: Machine, points: Collection[Candidate]
) -> tuple[dict[Candidate, Trial], tuple[Session, ...]]:
    """What a file holds of a space already; nothing if there is no file."""
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
