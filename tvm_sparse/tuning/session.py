"""A tuning run: plan, trials in batches, a final between the best, and everything written down as it happens.

    plan ──► first candidates ──► batches: propose, build in parallel, measure, append ──► final

The first candidates are the fallback, every template's default, what the log's model predicts, and what won for similar
problems in the same log.
A run is a function of its log: what stands there is not measured again, so an interrupted run is resumed by starting
it again. Records of other versions of a template, and of trials that failed, count as paid for too. What failed for
want of memory, disk or processors, or because something else ended its process, does not: it is tried again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import importlib.metadata
import itertools
import math
import platform
import queue
import shutil
import signal
import statistics
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..bench.measure import STEPS, WITHOUT_VERIFY
from ..core import scratch, spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.registry import parse, plugins
from ..core.spaces import points
from ..core.template import Table
from ..records import Best, Log, Session, Trial
from ..records.queries import predictor
from ..workers import building
from ..workers.processes import Reply, StartError
from . import fleet, strategies
from .domain import Domain
from .fleet import Fleet, Lease, Seat
from .measuring import Lost, PrepareError
from .searching import Searcher, SearchError

# Candidates that are built at the same time: enough to keep the builders busy, few enough to lose to a kill.
BATCH = 16
# One in this many trials goes to what won for similar problems, before the search begins.
PROVEN_SHARE = 4
# One in this many goes to what the log's model takes for the fastest, but no more than so many of a long run.
PREDICTED_SHARE, MOST_PREDICTED = 2, 8
FINALISTS = 4
FINAL_ROUNDS = 5
BUILD_TIMEOUT = 120.0
# To check and to time a candidate, unless a plan says otherwise.
MEASURE_TIMEOUT = 30.0
# Bytes of the temporary folder; where fewer are free, a build that fails is not its candidate's fault.
LEAST_DISK = 1 << 20
# For the estimate of a plan, until this run has its own figures: seconds to build and to measure one candidate.
TYPICAL = {"llvm": (0.5, 0.4), "cuda": (1.0, 0.3)}


class NoValidRecord(RuntimeError):
    """The run ended without a candidate that was right."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What a run will do, before it does it."""

    problem: Problem
    machine: Machine
    templates: Mapping[str, int]  # points of each template's space
    left_out: Mapping[str, str]  # templates that do not apply, and why
    trials: int  # to be measured now
    paid: int  # in the log already
    builders: int
    seconds: float  # estimate
    named: tuple[str, ...] = ()  # templates that were asked for; none: all but those for comparison
    fixed: Table = field(default_factory=dict)  # decisions whose values were given
    strategy: str = strategies.DEFAULT
    limit: float | None = None  # seconds to check and to time a candidate; None: `MEASURE_TIMEOUT`

    @property
    def size(self) -> int:
        return sum(self.templates.values())

    @property
    def trial_seconds(self) -> float:
        """What a trial of the search takes by estimate."""
        build, measure = TYPICAL[self.machine.kind]
        return build / self.builders + measure

    @property
    def final_seconds(self) -> float:
        """What the final takes by estimate."""
        return FINAL_ROUNDS * (FINALISTS + 1) * TYPICAL[self.machine.kind][1]


@dataclass
class Progress:
    """The state of a run, for whoever shows it."""

    plan: Plan
    outcomes: dict[str, int] = field(default_factory=dict)
    best: Candidate | None = None
    best_seconds: float = float("inf")
    fallback_seconds: float | None = None
    measured: int = 0
    ends: list[float] = field(default_factory=list)  # when each trial was through
    last: Trial | None = None
    phase: str = "search"
    final_share: float = 0.0  # of the final that is through
    search_seconds: float = 0.0  # spent on the search: its beginning and its proposals

    @property
    def slowness(self) -> float:
        """How many times as long as estimated the last two batches took.

        What of them is not measured yet counts as estimated. A batch is built before it is measured: over one and less
        the pace jumps. The first trial waits for the processes to start, and tells nothing of the others.
        """
        ends = self.ends[-2 * BATCH - 1 :]
        if not ends:
            return 1.0
        counted, planned = len(ends) - 1, self.plan.trial_seconds
        assumed = 2 * BATCH - counted
        return (ends[-1] - ends[0] + assumed * planned) / ((counted + assumed) * planned)

    @property
    def seconds_left(self) -> float:
        trials = max(self.plan.trials - self.measured, 0) if self.phase == "search" else 0
        return self.slowness * (trials * self.plan.trial_seconds + (1 - self.final_share) * self.plan.final_seconds)


def make_plan(
    problem: Problem,
    machine: Machine,
    trials: int,
    log: Log,
    builders: int,
    named: Collection[str] = (),
    fixed: Table | None = None,
    strategy: str = strategies.DEFAULT,
) -> Plan:
    """Count the space, of the named templates if there are any, and what of it is paid for."""
    tables, reasons = spaces.searched(problem, machine, named, fixed)
    sizes = dict.fromkeys(tables, 0)
    for candidate in points(problem, machine, tables):
        sizes[candidate.template] += 1
    # The fallback is measured in every run.
    fallback = spaces.fallback(problem, machine)
    size = sum(sizes.values()) + (not spaces.among(fallback, tables))
    paid = sum(candidate == fallback or spaces.among(candidate, tables) for candidate in _known(problem, log))
    left = max(0, min(trials, size) - paid)
    plan = Plan(problem, machine, sizes, reasons, left, paid, builders, 0.0, tuple(named), fixed or {}, strategy)
    return dataclasses.replace(plan, seconds=left * plan.trial_seconds + plan.final_seconds)


def _known(problem: Problem, log: Log) -> dict[Candidate, float | None]:
    """Candidates of the log at their templates' present version: median seconds, None for a failure."""
    known: dict[Candidate, float | None] = {}
    for trial in log.read().trials:
        if trial.problem == problem.key and trial.outcome != "environment":
            with contextlib.suppress(KeyError):
                if spaces.find(trial.candidate.template).version == trial.candidate.version:
                    known[trial.candidate] = trial.median if trial.outcome == "ok" else None
    return known


def winners_nearby(
    problem: Problem, machine: Machine, tables: Mapping[str, Table], log: Log, *, itself: bool = True
) -> list[Candidate]:
    """What won for this operator's problems and is a point of these spaces, of the most similar problems first.

    Winners at an earlier version of a template count as well, those of the problem itself too, unless not `itself`:
    kernels change more often than what suits a shape.
    """

    found: list[tuple[float, Candidate]] = []
    for key, best in log.best().items():
        if key == problem.key and not itself:
            continue
        with contextlib.suppress(KeyError, ValueError):  # of an operator or a template that is no longer there
            template, values = spaces.find(best.candidate.template), best.candidate.values
            if spaces.among(best.candidate, tables) and not template.point(problem, machine, values):
                distance = problem.distance(parse(key))  # None for one of another dtype: last
                found.append((math.inf if distance is None else distance, template.candidate(values)))
    return list(dict.fromkeys(candidate for _, candidate in sorted(found, key=lambda pair: pair[0])))


def predicted(problem: Problem, machine: Machine, tables: Mapping[str, Table], log: Log, count: int) -> list[Candidate]:
    """What the log's model takes for the fastest, of what these spaces have; trials tell how far off the model is."""
    model = predictor((log.root,), machine.arch, problem.operator)
    if model is None:
        return []
    chosen = model.choose(problem, machine)  # what look-up takes, which ranks for a larger batch
    found = dict.fromkeys([*([chosen.candidate] if chosen else []), *model.fastest(problem, machine, count)])

    there = [c for c in found if spaces.among(c, tables) and spaces.refusal(c, problem, machine) is None]
    return there[:count]


def before_search(
    problem: Problem, machine: Machine, tables: Mapping[str, Table], log: Log, trials: int
) -> list[Candidate]:
    """What a run of so many trials measures before it asks a search, the fallback first: each point once.

    The fallback, and what is in the tables of every template's default, what a model of the log's trials predicts, and
    what won for other problems.
    """
    templates = map(spaces.find, tables)
    defaults = [c for t in templates if spaces.among(c := t.candidate(t.default(problem, machine)), tables)]
    count = max(1, min(trials // PREDICTED_SHARE, MOST_PREDICTED))
    found = dict.fromkeys(
        [spaces.fallback(problem, machine), *defaults, *predicted(problem, machine, tables, log, count)]
    )
    proven = [point for point in winners_nearby(problem, machine, tables, log) if point not in found]
    return [*found, *proven[: trials // PROVEN_SHARE]]


def _covered(
    problem: Problem,
    machine: Machine,
    tables: Mapping[str, Table],
    known: Mapping[Candidate, float | None],
    trials: int,
) -> bool:
    """Whether the trials suffice for all points that are left: then no search is asked."""
    most = itertools.islice(points(problem, machine, tables), trials + len(known) + 1)
    return sum(candidate not in known for candidate in most) <= trials


def tune(
    plan: Plan,
    log: Log,
    *,
    seed: int = 0,
    show: Callable[[Progress], None] = lambda progress: None,
    stop: Callable[[], bool] = lambda: False,
    using: Fleet | None = None,
    searcher: Searcher | None = None,
) -> Best:
    """Run the plan and return the record of its best candidate, which is appended to the log.

    Parameters
    ----------
    show
        Called after every trial and phase.
    stop
        Asked between batches; True ends the search there, and the final is still held.
    using
        The devices, for several runs in a row or at the same time; without it the run has one of this machine.
    searcher
        For several runs in a row; without it the run starts its own.

    Raises
    ------
    NoValidRecord
        If no candidate, the fallback included, gave the right answer.
    """
    problem, machine = plan.problem, plan.machine
    progress = Progress(plan)
    tables, _ = spaces.searched(problem, machine, plan.named, plan.fixed)
    fallback = spaces.fallback(problem, machine)
    known = _known(problem, log)
    for candidate, seconds in known.items():
        if seconds and seconds < progress.best_seconds:
            progress.best, progress.best_seconds = candidate, seconds
    progress.fallback_seconds = known.get(fallback)

    with scratch.folder() as folder, contextlib.ExitStack() as stack:
        devices = using or stack.enter_context(fleet.local(machine, plan.builders))
        lease = stack.enter_context(devices.lease(machine))
        session = new_session(lease.seat(), seed, problem, plan.strategy)
        log.append(session)
        bench = Bench(problem, machine, fallback, seed, folder, lease, limit=plan.limit)
        stack.callback(bench.give_up)

        def require_fallback() -> None:
            """The fallback fits every shape: where it fails the machine is at fault, and no candidate is to pay."""
            bench.forget(fallback)
            (trial,) = bench.measure([fallback], session.id, 0)
            if trial.outcome != "ok":
                raise NoValidRecord(
                    f"{problem}: the fallback {fallback} failed ({trial.outcome}), so that no candidate is to blame and"
                    f" this batch is not recorded: {trial.reason}"
                )

        def run(batch: Sequence[Candidate], scores: Mapping[Candidate, float]) -> dict[Candidate, float | None]:
            """`scores`: what the search's cost model said of candidates."""
            results: dict[Candidate, float | None] = {}
            trials = []
            try:
                for measured in bench.measure(batch, session.id, progress.measured):
                    trial = dataclasses.replace(measured, predicted=scores.get(measured.candidate))
                    trials.append(trial)
                    results[trial.candidate] = trial.median if trial.outcome == "ok" else None
                    progress.measured += 1
                    progress.ends.append(time.monotonic())
                    progress.last = trial
                    progress.outcomes[trial.outcome] = progress.outcomes.get(trial.outcome, 0) + 1
                    if trial.outcome == "ok" and trial.median < progress.best_seconds:
                        progress.best, progress.best_seconds = trial.candidate, trial.median
                    if trial.candidate == fallback:
                        progress.fallback_seconds = results[fallback]
                    show(progress)
            except (
                StartError,
                OSError,
                CancelledError,
            ):  # nothing can go on; what was right is not to be measured again, all else is
                log.append(*(t if t.outcome == "ok" else dataclasses.replace(t, outcome="environment") for t in trials))
                raise
            if trials and all(trial.outcome != "ok" for trial in trials):
                require_fallback()
            log.append(*trials)
            return results

        show(progress)
        first = [c for c in before_search(problem, machine, tables, log, plan.trials) if c not in known]
        del first[max(plan.trials, fallback not in known) :]
        trials = plan.trials - len(first)
        covered = _covered(problem, machine, tables, known | dict.fromkeys(first), trials)
        # Where builds disturb no measurement, a batch is proposed before what came of the last one is known: else the
        # device would wait for its first library. Batches are half as large then.
        ahead = machine.kind == "cuda"
        under_way = 2 if ahead else 1
        batch_size = BATCH // under_way
        asked: Searcher | None = None
        if trials > 0 and not covered:
            asked = searcher or stack.enter_context(Searcher(lambda: devices.closed))
        if ahead:
            bench.order(first)
            if asked:
                asked.spawn()
        if fallback in known and plan.trials:
            require_fallback()
        for batch in (first[:1], first[1:]):
            known.update(run(batch, {}))
        search: strategies.Strategy | None = asked
        if asked:
            began = time.monotonic()
            asked.begin(
                problem,
                machine,
                plan.strategy,
                log,
                named=plan.named,
                fixed=plan.fixed,
                known=known,
                trials=trials,
                batch=batch_size,
                seed=seed,
            )
            progress.search_seconds += time.monotonic() - began
        elif trials > 0:
            everything = Domain.of(problem, machine, tables)
            search = strategies.make(plan.strategy, everything, known=known, trials=trials, batch=batch_size, seed=seed)
        proposed: deque[tuple[list[Candidate], Mapping[Candidate, float]]] = deque()

        def propose() -> None:
            """Until as many batches are under way as should be, or there is nothing left."""
            while search and len(proposed) < under_way and not stop():
                left = plan.trials - progress.measured - sum(len(waiting) for waiting, _ in proposed)
                if left <= 0:
                    return
                began = time.monotonic()
                try:
                    batch = search.propose()[:left]
                except SearchError as error:
                    raise NoValidRecord(f"{problem}: {error}") from None
                progress.search_seconds += time.monotonic() - began
                if not batch:
                    return
                proposed.append((batch, search.predicted))
                if ahead:
                    bench.begin(batch)

        propose()
        while search and proposed and not stop():
            results = run(*proposed.popleft())
            known.update(results)
            search.report(results)
            propose()

        progress.phase = "final"
        show(progress)
        return _final(bench, progress, known, fallback, session.id, log, show)


def tune_all(
    plans: Sequence[Plan],
    root: Path,
    devices: Fleet,
    *,
    seed: int = 0,
    begin: Callable[[Plan], None] = lambda plan: None,
    show: Callable[[Progress], None] = lambda progress: None,
    end: Callable[[Plan, Best | NoValidRecord], None] = lambda plan, found: None,
    stop: Callable[[], bool] = lambda: False,
    searchers: Sequence[Searcher] = (),
) -> None:
    """Run plans, as many at the same time as devices have seats; one that fails does not keep the others from theirs.

    Parameters
    ----------
    root
        Of the logs.
    begin, show, end
        Called at a plan's begin, as `tune` says, and at its end; never two of them at the same time.
    stop
        As in `tune`; no plan is begun once it is true.
    searchers
        For several runs in a row: as many as `Fleet.sessions`. Without them the run starts its own.

    Raises
    ------
    StartError, OSError
        Where nothing can go on. All plans end then, and `devices` are closed, as they are after `KeyboardInterrupt`.
    """
    saying, failed = threading.Lock(), threading.Event()
    free: queue.LifoQueue[Searcher] = queue.LifoQueue()

    def said(what: Callable[..., None], *arguments: Any) -> None:
        with saying:
            what(*arguments)

    def run(plan: Plan) -> None:
        if stop() or failed.is_set():
            return
        said(begin, plan)
        log = Log(root, plan.machine.arch, plan.problem.operator)
        found: Best | NoValidRecord
        searcher = free.get_nowait()
        try:
            found = tune(
                plan,
                log,
                seed=seed,
                show=lambda progress: said(show, progress),
                stop=stop,
                using=devices,
                searcher=searcher,
            )
        except NoValidRecord as error:
            found = error
        finally:
            free.put(searcher)
        said(end, plan, found)

    for searcher in searchers:
        free.put(searcher)
    with contextlib.ExitStack() as stack:
        running = []
        for machine in dict.fromkeys(plan.machine for plan in plans):
            count = devices.sessions(machine)
            for _ in range(0 if searchers else count):
                free.put(stack.enter_context(Searcher(lambda: devices.closed)))
            # Left first: a searcher's process ends with the thread that started it.
            lanes = stack.enter_context(ThreadPoolExecutor(count, f"tune-{machine.arch}"))
            running += [lanes.submit(run, plan) for plan in plans if plan.machine == machine]
        try:
            for future in wait(running, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            failed.set()
            devices.close()  # what waits for one ends now
            raise


def _final(
    bench: Bench,
    progress: Progress,
    known: Mapping[Candidate, float | None],
    fallback: Candidate,
    session: str,
    log: Log,
    show: Callable[[Progress], None],
) -> Best:
    """Measure the best few and the fallback again, in turn on one device, and record the winner by its median.

    One round after another, so that a drift of the machine meets all of them; the fallback takes part, so that a
    tuned result cannot lose to not tuning. Devices differ: all is measured by the session's own seat, and where that
    is lost all begins anew on another.
    """
    problem, machine = progress.plan.problem, progress.plan.machine
    ranked = sorted((c for c, seconds in known.items() if seconds), key=lambda c: known[c] or 0.0)
    finalists = list(dict.fromkeys([*ranked[:FINALISTS], fallback]))
    while True:
        with contextlib.suppress(Lost):
            times, spoilt = _rounds(bench, progress, finalists, session, show)
            break
    medians = {c: statistics.median(seconds) for c, seconds in times.items() if len(seconds) == FINAL_ROUNDS}
    if not medians and spoilt:
        raise NoValidRecord(f"{problem}: the final could not be held (environment): {spoilt.reason}")
    if not medians:
        raise NoValidRecord(f"{problem}: no candidate gave the right answer; the log has the reasons")
    winner = min(medians, key=lambda c: medians[c])
    if medians.get(fallback, float("inf")) <= medians[winner]:
        winner = fallback
    before = log.best().get(problem.key)
    best = Best(
        problem=problem.key,
        arch=machine.arch,
        candidate=winner,
        seconds=medians[winner],
        fallback=fallback,
        fallback_seconds=medians.get(fallback, medians[winner]),
        rounds=FINAL_ROUNDS,
        session=session,
        trials=progress.measured,
        ways=before.ways if before is not None and before.candidate == winner else None,
    )
    log.append_best(best)
    return best


def _rounds(
    bench: Bench, progress: Progress, finalists: Sequence[Candidate], session: str, show: Callable[[Progress], None]
) -> tuple[dict[Candidate, list[float]], Trial | None]:
    """Times of finalists, a figure a round, and a trial that the environment spoilt if there was one."""
    seat = bench.seat()
    times: dict[Candidate, list[float]] = {}
    spoilt: Trial | None = None
    for number in range(FINAL_ROUNDS):
        for trial in bench.measure(finalists, session, 0, seat, again=number > 0):
            if trial.outcome == "ok":
                times.setdefault(trial.candidate, []).append(trial.median)
            elif trial.outcome == "environment":
                spoilt = trial
        # One that fails once is no finalist.
        finalists = [c for c in finalists if c in times]
        progress.final_share = (number + 1) / FINAL_ROUNDS
        show(progress)
    return times, spoilt


class Bench:
    """Builds and measures candidates of one problem; keeps the libraries it has built."""

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
        limit: float | None = None,
    ) -> None:
        self._undisturbed = undisturbed
        self._limit = MEASURE_TIMEOUT if limit is None else limit
        self._problem, self._machine, self._fallback = problem, machine, fallback
        self._lease, self._folder = lease, folder
        self._built: dict[Candidate, Future[Reply]] = {}
        self._begun: dict[Candidate, Future[Reply | None]] = {}
        self._request = {"problem": problem.key, "kind": machine.kind, "seed": seed, "plugins": plugins()}
        self._names = (folder / f"{number}.so" for number in itertools.count())

    def seat(self) -> Seat:
        """One to measure on alone."""
        return self._lease.seat()

    def order(self, candidates: Sequence[Candidate]) -> None:
        """Have built what will be measured later."""
        self._submit(candidates)

    def begin(self, candidates: Sequence[Candidate]) -> None:
        """Have built and measured what `measure` will be asked for later."""
        self._submit(candidates)
        self._begun.update((candidate, self._measured(candidate)) for candidate in candidates)

    def give_up(self) -> None:
        """Have nothing built any more that has not been begun."""
        for future in self._built.values():
            future.cancel()

    def forget(self, candidate: Candidate) -> None:
        """Have it built anew when it is measured next."""
        self._built.pop(candidate, None)

    def build(self, candidates: Sequence[Candidate]) -> Generator[Candidate]:
        """Yield each candidate once it is built; the builds of those that follow go on meanwhile."""
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
        """Have built what is not; returns that."""
        new = [c for c in dict.fromkeys(candidates) if c not in self._built]
        requests = [building.request(self._problem, c, self._machine, next(self._names), quick_host=True) for c in new]
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
        """One trial a candidate, in order. One `seat` may raise `Lost`; `again` is as in `trial`."""
        new = self._submit(candidates)
        if self._machine.kind == "llvm":
            wait([self._built[c] for c in new])  # what compiles would take the cores away from what is timed
        begun = self._begun
        measured = [begun.pop(c) if c in begun else self._measured(c, again=again, seat=seat) for c in candidates]
        for i, (candidate, reply) in enumerate(zip(candidates, measured, strict=True)):
            yield self._finished(candidate, reply, session, order + i)

    def trial(self, candidate: Candidate, session: str, order: int, *, again: bool = False) -> Trial:
        """The trial of a candidate that is built.

        `again`: it was right before, and is checked only with the arguments that it is timed with.
        """
        return self._finished(candidate, self._measured(candidate, again=again), session, order)

    def _measured(self, candidate: Candidate, *, again: bool = False, seat: Seat | None = None) -> Future[Reply | None]:
        """What comes of it once it is built; None for what is not worth its share of a device."""

        def library(built: Reply) -> Mapping[str, Any] | None:
            if not built.ok or self._spills(candidate, built):
                return None
            found = {"library": built.value["path"], "workspaces": built.value["workspaces"]}
            return found | {"steps": WITHOUT_VERIFY if again else STEPS, "undisturbed": self._undisturbed}

        return self._lease.measure(self._built[candidate], self._request, library, self._limit, seat)

    def _spills(self, candidate: Candidate, built: Reply) -> int:
        """Of registers, in instructions. The fallback's are not asked for."""
        return (built.value["resources"] or {}).get("spill_instructions", 0) if candidate != self._fallback else 0

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
            # Compilers do not always say what they lacked, but end with an exit status.
            if built.environment or shutil.disk_usage(self._folder).free < LEAST_DISK:
                return trial("environment", reason)
            return trial("timeout" if built.kind == "timeout" else "build-error", reason)
        try:
            reply = measured.result()
        except PrepareError as error:
            raise NoValidRecord(f"{self._problem}: its inputs and references were not made: {error}") from None
        if reply is None:
            # Another point holds the same work in registers.
            return trial("rejected", f"spills registers: {self._spills(candidate, built)} instructions")
        if reply.ok:
            return trial("ok", seconds=reply.value["seconds"])
        outcome = {"crash": "crash", "timeout": "timeout"}.get(reply.kind, "run-error")
        if reply.environment:
            outcome = "environment"
        elif reply.message.startswith("Mismatch"):
            outcome = "wrong"
        return trial(outcome, reply.message)


def new_session(seat: Seat, seed: int, problem: Problem, strategy: str) -> Session:
    """The provenance of a run that starts now, on this seat's device and others of the same kind."""
    machine = seat.device.machine
    timer = (
        "CUDA graph of repeated calls, inputs not rotated, median over replays"
        if machine.kind == "cuda"
        else "wall clock over repeated calls from Python, inputs not rotated, median over repeats"
    )
    return Session(
        id=uuid.uuid4().hex[:12],
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        machine={"name": machine.name, "arch": machine.arch, "cores": machine.cores, **seat.device.state},
        versions=_versions(),
        timer=timer,
        inputs={"seed": seed, "structure": problem.tuned, **problem.settings[0]},
        strategy=strategy,
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


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """For `tune(stop=...)`: the first Ctrl-C or SIGTERM asks to stop after the batch in hand, a second ends at once."""
    asked: list[int] = []

    def handler(number: int, frame: Any) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    previous = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, old in previous.items():
            signal.signal(number, old)
