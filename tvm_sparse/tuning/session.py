"""A tuning run: plan, trials in batches, and a final between the best; everything is recorded at once.

    plan ──► first candidates ──► batches: propose, build in parallel, measure, append ──► final

The first candidates are the fallback, every template's default, the predictions of the log's model, and winners of
similar problems in the same log, with hot or fresh inputs. Candidates in the log are not measured again, so an
interrupted run is resumed by starting it again. Failed trials count as measured too, unless they failed for lack of
memory, disk or processors, or because another process ended theirs: these are tried again.

Several runs of a problem may share a log: a candidate is measured by the run that claims it (`sharing`), and the others
take the result from the log and count it among their own trials.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from ..core import scratch, spaces
from ..core.candidate import Candidate
from ..core.template import Table
from ..records import Best, Log, Trial
from ..workers.processes import StartError
from . import fleet, plans, strategies
from .domain import Domain
from .fleet import Fleet, Lease
from .measuring import Lost
from .plans import Plan, Progress, before_search, covered, recorded
from .searching import Searcher, SearchError
from .sharing import Sharing
from .workbench import Bench, NoValidRecord, new_session

Show = Callable[[Progress], None]


def tune(
    plan: Plan,
    log: Log,
    *,
    seed: int = 0,
    show: Show = lambda progress: None,
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
        Called between batches; True ends the search, but the final still takes place.
    using
        The devices, if several runs share them; by default one of this machine.
    searcher
        The search process, if several runs in a row share it; by default the run starts its own.

    Raises
    ------
    NoValidRecord
        If no candidate, including the fallback, was right.
    """
    problem, machine = plan.problem, plan.machine
    tables, _ = spaces.searched(problem, machine, plan.named, plan.fixed)
    with scratch.folder() as folder, contextlib.ExitStack() as stack:
        sharing = stack.enter_context(contextlib.closing(Sharing(log, problem, fresh=plan.fresh)))
        devices = using or stack.enter_context(fleet.local(machine, plan.builders))
        lease = stack.enter_context(devices.lease(machine))
        run = Run(plan, log, sharing, seed, folder, lease, show, stop)
        stack.callback(run.bench.give_up)
        show(run.progress)
        if plan.given:
            run.begin_given(plan.given)
            return run.final()
        first = run.before_search(tables)
        trials = plan.trials - len(first)
        asked: Searcher | None = None
        # If the trials suffice for all remaining points, no search process is needed.
        if trials > 0 and not covered(problem, machine, tables, run.known | dict.fromkeys(first), trials):
            asked = searcher or stack.enter_context(Searcher(lambda: devices.closed))
        run.begin(first, asked)
        if trials > 0:
            run.follow(run.search(asked, tables, trials))
        return run.final()


class Run:
    """The execution of a plan.

    Attributes
    ----------
    known
        Median seconds of measured candidates, in this run or an earlier one; None for a failure.
    ahead
        Whether a batch is proposed before the results of the last one are known, so that the device does not wait for
        its first library; only where builds do not disturb measurements. Batches are then half as large.
    """

    def __init__(
        self,
        plan: Plan,
        log: Log,
        sharing: Sharing,
        seed: int,
        folder: Path,
        lease: Lease,
        show: Show,
        stop: Callable[[], bool],
    ) -> None:
        problem, machine = plan.problem, plan.machine
        self._plan, self._log, self._seed, self._show, self._stop = plan, log, seed, show, stop
        self._sharing = sharing
        self._unreported: set[Candidate] = set()
        self._fallback = spaces.fallback(problem, machine)
        self.known = recorded(log, problem, fresh=plan.fresh).get(problem.key, {})
        self.progress = Progress(plan)
        for candidate, seconds in self.known.items():
            if seconds and seconds < self.progress.best_seconds:
                self.progress.best, self.progress.best_seconds = candidate, seconds
        self.progress.fallback_seconds = self.known.get(self._fallback)
        self.ahead = machine.kind == "cuda"
        self._under_way = 2 if self.ahead else 1
        self._proposed: deque[tuple[list[Candidate], Mapping[Candidate, float]]] = deque()
        session = new_session(lease.seat(), seed, problem, plan.strategy, fresh=plan.fresh, structure=plan.structure)
        log.append(session)
        self._session = session.id
        self.bench = Bench(
            problem,
            machine,
            self._fallback,
            seed,
            folder,
            lease,
            fresh=plan.fresh,
            limit=plan.limit,
            structure=plan.structure,
            rivals=plan.rivals,
        )

    def before_search(self, tables: Mapping[str, Table]) -> list[Candidate]:
        """The first candidates that are not known, within the trials of the plan; the fallback in any case."""
        plan = self._plan
        known = before_search(plan.problem, plan.machine, tables, self._log, plan.trials)
        first = dict.fromkeys([*known[:1], *plan.proposed, *known[1:]])
        return [c for c in first if c not in self.known][: max(plan.trials, self._fallback not in self.known)]

    def begin(self, first: Sequence[Candidate], asked: Searcher | None) -> None:
        """Measure the candidates before the search: the fallback alone, and then the others. The search process starts
        meanwhile.
        """
        if self.ahead:
            self.bench.order(first)
            if asked:
                asked.spawn()
        if self._fallback in self.known and self._plan.trials:
            self._require_fallback()
        for batch in (first[:1], first[1:]):
            self._measure(self._claimed(batch), {})

    def begin_given(self, together: int) -> None:
        """Measure the fallback and the plan's `proposed` points, `together` at a time, until the run is to stop."""
        first = [c for c in dict.fromkeys([self._fallback, *self._plan.proposed]) if c not in self.known]
        if self.ahead:
            self.bench.order(first)
        if self._fallback in self.known:
            self._require_fallback()
        for start in range(0, len(first), together):
            if start and self._stop():
                break
            self._measure(self._claimed(first[start : start + together]), {})

    def search(self, asked: Searcher | None, tables: Mapping[str, Table], trials: int) -> strategies.Strategy:
        """A search for this many trials, in the process started for it; without one, over all remaining points."""
        plan, batch = self._plan, plans.BATCH // self._under_way
        if asked is None:
            everything = Domain.of(plan.problem, plan.machine, tables)
            return strategies.make(
                plan.strategy, everything, known=self.known, trials=trials, batch=batch, seed=self._seed
            )
        began = time.monotonic()
        asked.begin(
            plan.problem,
            plan.machine,
            plan.strategy,
            self._log,
            named=plan.named,
            fixed=plan.fixed,
            fresh=plan.fresh,
            known=self.known,
            trials=trials,
            batch=batch,
            seed=self._seed,
        )
        self.progress.search_seconds += time.monotonic() - began
        return asked

    def follow(self, search: strategies.Strategy) -> None:
        """Measure a search's proposals, and report them, until the trials are used or the run is to stop."""
        self._propose(search)
        while self._proposed and not self._stop():
            results = self._measure(*self._proposed.popleft())
            search.report(results)
            self._propose(search)

    def _propose(self, search: strategies.Strategy) -> None:
        """Propose batches until enough are in progress, or nothing is left."""
        progress = self.progress
        while len(self._proposed) < self._under_way and not self._stop():
            returned = self._learn(search)
            under_way = sum(len(batch) for batch, _ in self._proposed)
            left = self._plan.trials - progress.measured - under_way - self._sharing.count
            self._sharing.release(returned[max(left, 0) :])
            if left <= 0:
                return
            began = time.monotonic()
            try:
                batch = returned or search.propose()
            except SearchError as error:
                raise NoValidRecord(f"{self._plan.problem}: {error}") from None
            progress.search_seconds += time.monotonic() - began
            if not batch:
                return
            if not (claimed := self._claimed(batch[:left])):
                continue  # other runs are measuring all of them
            self._proposed.append((claimed, {} if returned else search.predicted))
            if self.ahead:
                self.bench.begin(claimed, self._session)

    def _claimed(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """Claim those candidates that no other run has measured or is measuring."""
        claimed, found = self._sharing.claim(candidates)
        self._note_others(found)
        return claimed

    def _learn(self, search: strategies.Strategy) -> list[Candidate]:
        """Report results of other runs; returns candidates that they began and gave up, which this run takes over."""
        returned, found = self._sharing.learn()
        self._note_others(found)
        if unreported := {one: self.known[one] for one in self._unreported}:
            search.report(unreported)
            self._unreported.clear()
        return returned

    def _note_others(self, found: Mapping[Candidate, float | None]) -> None:
        """Add results of other runs to those known, and to those to be reported to the search."""
        self.known.update(found)
        self._unreported.update(found)
        for candidate, seconds in found.items():
            if seconds is not None and seconds < self.progress.best_seconds:
                self.progress.best, self.progress.best_seconds = candidate, seconds
            if candidate == self._fallback:
                self.progress.fallback_seconds = seconds

    def _require_fallback(self) -> None:
        """The fallback fits every shape: if it fails, the machine is at fault, and candidates must not be blamed."""
        self.bench.forget(self._fallback)
        (trial,) = self.bench.measure([self._fallback], self._session, 0)
        if trial.outcome != "ok":
            raise NoValidRecord(
                f"{self._plan.problem}: the fallback {self._fallback} failed ({trial.outcome}), so that no candidate is"
                f" to blame and this batch is not recorded: {trial.reason}"
            )

    def _measure(self, batch: Sequence[Candidate], scores: Mapping[Candidate, float]) -> dict[Candidate, float | None]:
        """Measure a batch, and append its trials to the log. `scores` are the predictions of the
        search's cost model.
        """
        trials: list[Trial] = []
        try:
            for measured in self.bench.measure(batch, self._session, self.progress.measured):
                trials.append(dataclasses.replace(measured, predicted=scores.get(measured.candidate)))
                self._note(trials[-1])
        except (StartError, OSError, CancelledError):
            # The run cannot continue. Right results are not measured again, everything else is.
            right = (t if t.outcome == "ok" else dataclasses.replace(t, outcome="environment") for t in trials)
            self._log.append(*right)
            raise
        if trials and all(trial.outcome != "ok" for trial in trials):
            self._require_fallback()
        self._log.append(*trials)
        self._sharing.done(batch)
        results = {trial.candidate: trial.median if trial.outcome == "ok" else None for trial in trials}
        self.known.update(results)
        return results

    def _note(self, trial: Trial) -> None:
        """Count a trial, and report progress."""
        progress = self.progress
        progress.measured += 1
        progress.ends.append(time.monotonic())
        progress.last = trial
        progress.outcomes[trial.outcome] = progress.outcomes.get(trial.outcome, 0) + 1
        seconds = trial.median if trial.outcome == "ok" else None
        if seconds is not None and seconds < progress.best_seconds:
            progress.best, progress.best_seconds = trial.candidate, seconds
        if trial.candidate == self._fallback:
            progress.fallback_seconds = seconds
        self._show(progress)

    def final(self) -> Best:
        """Measure the best few and the fallback again, in turn on one device. The one with the best median is recorded
        as the winner if it is right on ten times as many cases as candidates are checked on; otherwise the next best is
        tried.

        Rounds follow each other, so that a drift of the machine affects all of them; the fallback takes part, so that a
        tuned result cannot lose to not tuning. Devices differ, so everything is measured by the session's own seat; if
        that is lost, the final starts again on another.
        """
        problem, fallback, known = self._plan.problem, self._fallback, self.known
        self.progress.phase = "final"
        self._show(self.progress)
        ranked = sorted((c for c, seconds in known.items() if seconds), key=lambda c: known[c] or 0.0)
        finalists = list(dict.fromkeys([*ranked[: plans.FINALISTS], *self._plan.rivals, fallback]))
        while True:
            with contextlib.suppress(Lost):
                times, spoilt = self._rounds(finalists)
                rounds = self._plan.final_rounds
                medians = {c: statistics.median(seconds) for c, seconds in times.items() if len(seconds) == rounds}
                self.progress.medians = dict(medians)
                for rival in self._plan.rivals:
                    if spaces.refusal(rival, problem, self._plan.machine) is not None:
                        medians.pop(rival, None)
                winner, failed = self._proven(medians)
                break
        spoilt = failed or spoilt
        if winner is None and spoilt:
            raise NoValidRecord(f"{problem}: the final could not be held (environment): {spoilt.reason}")
        if winner is None:
            raise NoValidRecord(f"{problem}: no candidate gave the right answer; the log has the reasons")
        before = self._log.best().get(problem.key)
        best = Best(
            problem=problem.key,
            arch=self._plan.machine.arch,
            candidate=winner,
            seconds=medians[winner],
            fallback=fallback,
            fallback_seconds=medians.get(fallback, medians[winner]),
            rounds=self._plan.final_rounds,
            session=self._session,
            trials=self.progress.measured,
            ways=before.ways if before is not None and before.candidate == winner else None,
            seconds_all=tuple(times[winner]),
            fallback_all=tuple(times.get(fallback, ())),
        )
        self._log.append_best(best)
        return best

    def _proven(self, medians: dict[Candidate, float]) -> tuple[Candidate | None, Trial | None]:
        """The fastest finalist that passes the proof, or the fallback if it is as fast; and a trial that failed because
        of the environment, if any. Failures are recorded and removed from `medians`.
        """
        seat, spoilt = self.bench.seat(), None
        while medians:
            winner = min(medians, key=lambda c: (medians[c], c != self._fallback))
            trial = self.bench.prove(winner, self._session, seat)
            if trial is None:
                return winner, None
            self._log.append(trial)
            self.known[winner] = None
            del medians[winner]
            if trial.outcome == "environment":
                spoilt = trial
        return None, spoilt

    def _rounds(self, finalists: Sequence[Candidate]) -> tuple[dict[Candidate, list[float]], Trial | None]:
        """Times of finalists, one for each round, and a trial that failed because of the environment, if any."""
        seat = self.bench.seat()
        times: dict[Candidate, list[float]] = {}
        spoilt: Trial | None = None
        for number in range(self._plan.final_rounds):
            for trial in self.bench.measure(finalists, self._session, 0, seat, again=number > 0):
                if trial.outcome == "ok":
                    times.setdefault(trial.candidate, []).append(trial.median)
                elif trial.outcome == "environment":
                    spoilt = trial
            # One failure excludes a finalist.
            finalists = [c for c in finalists if c in times]
            self.progress.final_share = (number + 1) / self._plan.final_rounds
            self._show(self.progress)
        return times, spoilt


def tune_all(
    plans: Sequence[Plan],
    root: Path,
    devices: Fleet,
    *,
    seed: int = 0,
    begin: Callable[[Plan], None] = lambda plan: None,
    show: Show = lambda progress: None,
    end: Callable[[Plan, Best | NoValidRecord], None] = lambda plan, found: None,
    stop: Callable[[], bool] = lambda: False,
    searchers: Sequence[Searcher] = (),
) -> None:
    """Run plans, as many at the same time as devices have seats; a failing one does not stop the others.

    Parameters
    ----------
    root
        Root folder of the logs.
    begin, show, end
        Called at a plan's begin, during it as in `tune`, and at its end; never two at the same time.
    stop
        As in `tune`; no plan is begun once it returns true.
    searchers
        Search processes, `Fleet.sessions` of them, if several runs in a row share them; by default the run starts its
        own.

    Raises
    ------
    StartError, OSError
        If the run cannot continue. All plans then end, and `devices` are closed, as after `KeyboardInterrupt`.
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
            # Left first, since a search process ends with the thread that started it.
            lanes = stack.enter_context(ThreadPoolExecutor(count, f"tune-{machine.arch}"))
            running += [lanes.submit(run, plan) for plan in plans if plan.machine == machine]
        try:
            for future in wait(running, return_when=FIRST_EXCEPTION).done:
                future.result()
        except BaseException:
            failed.set()
            devices.close()  # pending waits end now
            raise


@contextlib.contextmanager
def stop_on_interrupt() -> Iterator[Callable[[], bool]]:
    """For `tune(stop=...)`: the first Ctrl-C or SIGTERM stops after the current batch, a second ends at once."""
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
