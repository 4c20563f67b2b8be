"""Tuning runs from plan to record on the CPU, and what becomes of one that meets faults or is ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest
import tuning_child
from cases import thorough

from tvm_sparse.core import scratch, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import cpu
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.core.spaces import points
from tvm_sparse.records import Best, Log, Trial
from tvm_sparse.tuning import fleet, plans, workbench
from tvm_sparse.tuning.plans import Progress, make_plan
from tvm_sparse.tuning.session import tune
from tvm_sparse.tuning.workbench import NoValidRecord
from tvm_sparse.workers.processes import Pool, StartError

TESTS = Path(__file__).parent
PROBLEM = tuning_child.PROBLEM  # 20 points of one template
FALLBACK = spaces.fallback(PROBLEM, cpu())
OTHERS = [c for c in points(PROBLEM, cpu(), spaces.applicable(PROBLEM, cpu())[0]) if c != FALLBACK]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, children_without_torch: None) -> None:
    monkeypatch.setattr(plans, "BATCH", 4)
    monkeypatch.setattr(plans, "FINAL_ROUNDS", 2)
    monkeypatch.setattr(plans, "FINALISTS", 2)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "logs", cpu().arch, PROBLEM.operator)


def run(
    log: Log, trials: int, problem: Problem = PROBLEM, fixed: Mapping[str, tuple[int, ...]] = {}, **options
) -> tuple[Best, list[Progress]]:
    shown: list[Progress] = []
    best = tune(make_plan(problem, cpu(), trials, log, builders=1, fixed=fixed), log, show=shown.append, **options)
    return best, shown


def spoil(monkeypatch: pytest.MonkeyPatch, faults: dict[Candidate | str, str]) -> None:
    argv = (sys.executable, str(TESTS / "faulty_build_worker.py"), json.dumps({str(c): f for c, f in faults.items()}))
    monkeypatch.setattr(fleet, "BUILD_WORKER", argv)


def record(candidate: Candidate, problem: Problem = PROBLEM) -> Trial:
    return Trial(problem.key, cpu().arch, candidate, "ok", "", (1e-5,), 0.1, "s", 0)


# ---- plans ---------------------------------------------------------------------------------------


def test_plan_counts_the_space_and_what_is_paid_for(log: Log) -> None:
    plan = make_plan(PROBLEM, cpu(), 6, log, builders=2)
    assert (plan.templates, plan.size, plan.trials, plan.paid) == ({"row_scan": 20}, 20, 6, 0)
    assert plan.seconds > 0
    assert make_plan(PROBLEM, cpu(), 1000, log, builders=2).trials == 20
    assert not log.trials_path.exists()  # a plan writes nothing

    log.append(record(OTHERS[0]), record(OTHERS[1]))
    log.append(Trial(PROBLEM.key, cpu().arch, OTHERS[2], "crash", "SIGSEGV", (), 0.1, "s", 1))
    plan = make_plan(PROBLEM, cpu(), 6, log, builders=2)
    assert (plan.trials, plan.paid) == (3, 3)  # a failure is paid for too
    assert make_plan(PROBLEM, cpu(), 2, log, builders=2).trials == 0


def test_records_of_other_problems_versions_and_templates_are_not_this_plans(log: Log) -> None:
    old = Candidate(OTHERS[0].template, OTHERS[0].version - 1, OTHERS[0].decisions)
    gone = Candidate("a_template_that_was_removed", 1, OTHERS[0].decisions)
    log.append(record(old), record(gone), record(OTHERS[0], PROBLEM.with_batch(3)))
    plan = make_plan(PROBLEM, cpu(), 6, log, builders=2)
    assert (plan.trials, plan.paid) == (6, 0)


def test_only_points_with_the_fixed_values_are_paid_for_and_tried(log: Log) -> None:
    log.append(record(FALLBACK), *(record(other) for other in OTHERS[:-1]))
    log.append_best(Best(PROBLEM.with_batch(3).key, cpu().arch, OTHERS[0], 1e-5, FALLBACK, 2e-5, 2, "s"))
    fixed = {name: (value,) for name, value in OTHERS[-1].decisions}
    plan = make_plan(PROBLEM, cpu(), 1000, log, builders=1, fixed=fixed)
    assert (plan.size, plan.paid, plan.trials) == (1, 1, 1)  # paid for is the fallback, which is no such point
    tune(plan, log)
    assert [trial.candidate for trial in log.read().trials[len(OTHERS) :]] == [OTHERS[-1]]


# ---- whole runs ----------------------------------------------------------------------------------


def test_run_records_trials_and_a_best_and_a_second_run_resumes(log: Log) -> None:
    best, shown = run(log, 6)
    contents = log.read()
    assert not contents.skipped
    assert [t.outcome for t in contents.trials] == ["ok"] * 6
    assert [t.order for t in contents.trials] == list(range(6))
    assert contents.trials[0].candidate == FALLBACK
    assert len({t.candidate for t in contents.trials}) == 6
    assert all(t.seconds and math.isfinite(t.median) and t.build_seconds for t in contents.trials)
    (this,) = contents.sessions
    assert {t.session for t in contents.trials} == {this.id} == {best.session}
    assert this.inputs == {"seed": 0, "structure": PROBLEM.tuned, **PROBLEM.settings[0]}
    assert {"apache-tvm", "numpy", "python"} <= set(this.versions)
    assert log.best() == {PROBLEM.key: best}
    assert best.fallback == FALLBACK and best.seconds <= best.fallback_seconds and best.rounds == 2
    assert best.candidate in {t.candidate for t in contents.trials}
    assert (shown[-1].phase, shown[-1].measured, shown[-1].outcomes) == ("final", 6, {"ok": 6})

    # Nothing is left to pay: only the final is held again.
    assert make_plan(PROBLEM, cpu(), 6, log, builders=2).trials == 0
    again, _ = run(log, 6)
    assert log.read().trials == contents.trials
    assert again.session != best.session and log.best() == {PROBLEM.key: again}

    # Two more than what is paid for are two trials, and none of them is an old one.
    run(log, 8)
    assert len(log.read().trials) == 8 and len({t.candidate for t in log.read().trials}) == 8


def test_run_through_metaschedule(tmp_path: Path) -> None:
    problem = parse("bsr_matmul/m=8,k=64,n=64,block=16,sparsity=0.5")
    log = Log(tmp_path, cpu().arch, problem.operator)
    plan = make_plan(problem, cpu(), 14, log, builders=2)
    assert plan.size > 2 * plan.trials  # else the search would not be asked
    run(log, 14, problem)
    trials = log.read().trials
    assert [t.outcome for t in trials] == ["ok"] * 14 and len({t.candidate for t in trials}) == 14


def test_what_won_for_similar_problems_is_tried_first(log: Log) -> None:
    def winner(key: str, candidate: Candidate) -> Best:
        return Best(key, cpu().arch, candidate, 1e-5, FALLBACK, 2e-5, 2, "s")

    axis = next(name for name, value in PROBLEM.axes.items() if isinstance(value, int) and value > 4)
    near, far = (dataclasses.replace(PROBLEM, **{axis: PROBLEM.axes[axis] * factor}) for factor in (2, 16))
    log.append_best(
        winner(far.key, OTHERS[0]),
        winner(near.key, OTHERS[1]),
        winner(PROBLEM.key, dataclasses.replace(OTHERS[2], version=99)),  # its own, of another version
    )
    tables = spaces.searched(PROBLEM, cpu(), ())[0]
    assert plans.winners_nearby(PROBLEM, cpu(), tables, log) == [OTHERS[2], OTHERS[1], OTHERS[0]]
    # One of another dtype comes last, wherever it stands in the log.
    alien = dataclasses.replace(PROBLEM, dtype="float16" if PROBLEM.axes["dtype"] == "float32" else "float32")
    elsewhere = Log(log.root / "elsewhere", log.arch, log.operator)
    elsewhere.append_best(winner(alien.key, OTHERS[3]), winner(far.key, OTHERS[0]), winner(near.key, OTHERS[1]))
    assert plans.winners_nearby(PROBLEM, cpu(), tables, elsewhere) == [OTHERS[1], OTHERS[0], OTHERS[3]]
    run(log, 2 * plans.PROVEN_SHARE)
    tried = [trial.candidate for trial in log.read().trials]
    assert tried[:3] == [FALLBACK, OTHERS[2], OTHERS[1]]


def test_stop_ends_the_search_and_holds_the_final(log: Log) -> None:
    best, shown = run(log, 20, stop=lambda: len(log.read().trials) >= 5)
    assert len(log.read().trials) == 5  # the fallback and one batch
    assert shown[-1].phase == "final" and log.best() == {PROBLEM.key: best}


def test_proposed_points_come_first_and_rivals_are_in_the_final(log: Log) -> None:
    """A rival is compiled for the batch that it is given, and takes part in any case; one that fails costs nothing."""
    rival, faulty = OTHERS[0], dataclasses.replace(FALLBACK, version=0)
    plan = make_plan(PROBLEM, cpu(), 3, log, builders=1)
    rivals = {rival: PROBLEM.with_batch(8 * PROBLEM.batch_extent), faulty: PROBLEM}
    plan = dataclasses.replace(plan, proposed=(OTHERS[1], OTHERS[2]), rivals=rivals)
    shown: list[Progress] = []
    best = tune(plan, log, show=shown.append)
    measured = [trial.candidate for trial in log.read().trials]
    assert measured == [FALLBACK, OTHERS[1], OTHERS[2]]
    medians = shown[-1].medians
    assert {rival, FALLBACK, best.candidate} <= set(medians) and faulty not in medians


# ---- faults --------------------------------------------------------------------------------------


def test_each_fault_costs_one_trial_and_the_run_goes_on(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ["wrong", "crash", "hang", "compile", "lost", "full", "ended"]
    # Half of the space, which the fallback is in.
    simd = FALLBACK.values["simd"]
    fixed = {"simd": (simd, next(c.values["simd"] for c in OTHERS if c.values["simd"] != simd))}
    others = [c for c in OTHERS if c.values["simd"] in fixed["simd"]]
    assert len(others) == 9
    spoil(monkeypatch, dict(zip(others, kinds, strict=False)))
    monkeypatch.setattr(workbench, "MEASURE_TIMEOUT", 6.0)
    best, shown = run(log, 10, fixed=fixed)
    trials = {t.candidate: t for t in log.read().trials}
    assert len(trials) == len(log.read().trials) == 10
    expected = {
        "wrong": ("wrong", "Mismatch: "),
        "crash": ("crash", "SIGSEGV"),
        "hang": ("timeout", "did not reply within 6 s"),
        "compile": ("build-error", "the compiler does not like this one"),
        "lost": ("build-error", "exit status 9"),
        "full": ("environment", "No space left on device"),
        "ended": ("environment", "SIGTERM"),
    }
    for candidate, kind in zip(others, kinds, strict=False):
        outcome, reason = expected[kind]
        assert trials[candidate].outcome == outcome, trials[candidate]
        assert reason in trials[candidate].reason
    assert sum(t.outcome == "ok" for t in trials.values()) == 3
    assert shown[-1].outcomes == {
        "ok": 3, "wrong": 1, "crash": 1, "timeout": 1, "build-error": 2, "environment": 2
    }  # fmt: skip
    assert trials[best.candidate].outcome == "ok"
    # What the machine has spoilt tells nothing of its candidate: it is neither known nor paid for.
    plan = make_plan(PROBLEM, cpu(), 10, log, builders=1, fixed=fixed)
    assert (plan.trials, plan.paid) == (2, 8)


def test_what_a_candidate_starts_ends_with_its_trial(log: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever session it has and however the process ends that had loaded the candidate."""
    (temporary := tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    kinds = ["escape", "escape and crash"]
    simd = FALLBACK.values["simd"]
    others = [c for c in OTHERS if c.values["simd"] == simd]
    spoil(monkeypatch, dict(zip(others, kinds, strict=False)))

    def started() -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.name() == "sleep" and process.environ().get("TMPDIR", "").startswith(str(temporary)):
                    found.append(process)
        return found

    during: list[int] = []
    real = scratch.end_processes

    def end_processes(*arguments: Any) -> None:
        during.append(len(started()))
        real(*arguments)
        # Processes that were killed, or were just being started, may take a moment to be gone: the next trial is not to
        # count them.
        end = time.monotonic() + 10
        while started() and time.monotonic() < end:
            time.sleep(0.02)

    monkeypatch.setattr(scratch, "end_processes", end_processes)
    run(log, 5, fixed={"simd": (simd,)})
    assert sorted(t.outcome for t in log.read().trials) == ["crash", "ok", "ok", "ok", "wrong"]
    assert sum(map(bool, during)) == len(kinds) and not started() and not list(temporary.iterdir())


def test_a_kernel_that_computes_only_its_first_rows_does_not_win(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch of 256 it computes 64, in a quarter of the time."""
    problem = PROBLEM.with_batch(256)
    fallback = spaces.fallback(problem, cpu())
    tables = spaces.applicable(problem, cpu())[0]
    faulty = next(candidate for candidate in points(problem, cpu(), tables) if candidate != fallback)
    spoil(monkeypatch, {faulty: "first_rows"})
    # What won for a similar problem is tried first.
    log.append_best(Best(problem.with_batch(512).key, cpu().arch, faulty, 1e-5, fallback, 2e-5, 2, "s"))
    best, _ = run(log, plans.PROVEN_SHARE, problem)
    outcomes = {trial.candidate: trial for trial in log.read().trials}
    wrong = outcomes.pop(faulty)
    # Not always row 64, which the reference may say is NaN, nor always its values.
    told = re.search(r"batch \d+, draw [-\d]+: \w+\[(\d+), \d\] is", wrong.reason)
    assert wrong.outcome == "wrong" and told and int(told[1]) >= 64
    assert len(outcomes) == 3 and {trial.outcome for trial in outcomes.values()} == {"ok"}
    assert best.candidate in outcomes


@pytest.mark.parametrize("fault", ["full", "wrong"])
def test_a_broken_environment_records_no_trial(fault: str, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, {"*": fault})
    outcome = "environment" if fault == "full" else fault
    with pytest.raises(NoValidRecord, match=rf"the fallback .* failed \({outcome}\), .*this batch is not recorded"):
        run(log, 6)
    assert not log.read().trials and not log.best()
    # Nor does it where the fallback was measured before, by a machine that was whole.
    log.append(record(FALLBACK))
    with pytest.raises(NoValidRecord):
        run(log, 6)
    assert [t.candidate for t in log.read().trials] == [FALLBACK] and not log.best()


def test_an_environment_that_breaks_during_a_run_is_noticed(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of failures alone is suspicious: the fallback is asked again before it is written down."""
    real = workbench.Bench.measure
    asked = []

    def measure(bench, candidates, *rest):
        if len(asked) == 2:  # after the fallback and a batch
            device, bench._built = bench.seat().device, {}
            device.builders.close()
            device.builders = Pool(1, broken, name="broken")
        asked.append(candidates)
        return real(bench, candidates, *rest)

    broken = (sys.executable, str(TESTS / "faulty_build_worker.py"), '{"*": "compile"}')
    monkeypatch.setattr(workbench.Bench, "measure", measure)
    with pytest.raises(NoValidRecord, match="build-error"):
        run(log, 20)
    assert [t.outcome for t in log.read().trials] == ["ok"] * sum(map(len, asked[:2]))


def test_what_was_measured_is_recorded_where_nothing_can_go_on(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(bench, candidates, session_id, order):
        for i, candidate in enumerate(candidates, start=order):
            if i == 3:
                raise StartError("measure cannot be started: No space left on device")
            trial = dataclasses.replace(record(candidate), session=session_id, order=i)
            yield dataclasses.replace(trial, outcome="crash", reason="?", seconds=()) if i == 1 else trial

    monkeypatch.setattr(workbench.Bench, "measure", measure)
    with pytest.raises(StartError, match="No space left"):
        run(log, 20)
    # What failed just before the machine did is not held against its candidate.
    assert [trial.outcome for trial in log.read().trials] == ["ok", "environment", "ok"] and not log.best()


def test_failures_alone_are_recorded_where_the_fallback_is_right(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, {FALLBACK: "", "*": "compile"})
    best, _ = run(log, 5)
    assert [t.outcome for t in log.read().trials] == ["ok"] + ["build-error"] * 4
    assert best.candidate == FALLBACK


# ---- the end of a run ----------------------------------------------------------------------------


class Child:
    """A tuning run in a process of its own, whose progress is read as it is printed."""

    def __init__(self, logs: Path, trials: int) -> None:
        argv = [sys.executable, str(TESTS / "tuning_child.py"), str(logs), str(trials)]
        self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []

    def read_until(self, text: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.strip() == text:
                return
        _, errors = self.process.communicate()
        raise AssertionError(f"{text!r} did not come: {self.lines}, {errors}")

    @property
    def measured(self) -> int:
        return max((int(line.split()[1]) for line in self.lines if line.startswith("search")), default=0)

    def finish(self) -> int:
        output, errors = self.process.communicate(timeout=120)
        self.lines += output.splitlines()
        self.errors = errors
        return self.process.returncode


@pytest.mark.parametrize("kills", [(3,), thorough((1, 4))])
def test_killed_runs_leave_a_clean_log_and_no_process_and_are_resumed(kills: tuple[int, ...], log: Log) -> None:
    rng = random.Random(time.time_ns())
    paid = 0
    for kill_at in kills:
        child = Child(log.root, 12)
        child.read_until(f"search {kill_at}")
        time.sleep(rng.uniform(0, 0.4))
        workers = psutil.Process(child.process.pid).children(recursive=True)
        assert workers
        child.process.send_signal(signal.SIGKILL)
        assert child.finish() == -signal.SIGKILL
        gone, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive
        contents = log.read()
        assert not contents.skipped
        assert len(contents.trials) >= paid + child.measured - tuning_child.BATCH
        assert len({t.candidate for t in contents.trials}) == len(contents.trials)
        paid = len(contents.trials)
    assert 0 < paid < 12
    child = Child(log.root, 12)
    assert child.finish() == 0, child.errors
    assert child.measured == 12 - paid
    assert len(log.read().trials) == 12 and len({t.candidate for t in log.read().trials}) == 12
    assert PROBLEM.key in log.best()


def test_the_first_interrupt_finishes_the_batch_and_holds_the_final(log: Log) -> None:
    child = Child(log.root, 20)  # the whole space, whose batches are all of two; the search's may be smaller
    child.read_until("search 2")  # one of a batch of two
    child.process.send_signal(signal.SIGINT)
    assert child.finish() == 0, child.errors
    assert child.lines[-1].startswith("best ") and PROBLEM.key in log.best()
    trials = log.read().trials
    assert len(trials) == child.measured and 3 <= len(trials) < 20
    assert len(trials) % tuning_child.BATCH == 1  # the fallback and whole batches


def test_the_second_interrupt_ends_the_run_at_once(log: Log) -> None:
    child = Child(log.root, 19)
    child.read_until("search 1")
    workers = psutil.Process(child.process.pid).children(recursive=True)
    for _ in range(2):
        child.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert child.finish() not in (0, None)
    assert not psutil.wait_procs(workers, timeout=60)[1]
    assert not log.read().skipped and PROBLEM.key not in log.best()
