"""How sessions share devices, what becomes of those that are lost, and tuning on several parts of a CPU."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tuning_child
from cases import SM90

from tvm_sparse.core import spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine, UnknownArch, cpu, gpu
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Log, Session, Trial
from tvm_sparse.tuning import fleet, plans, searching, session
from tvm_sparse.tuning.fleet import Device, Fleet, Lease
from tvm_sparse.tuning.measuring import Lost, Measurer, PrepareError
from tvm_sparse.tuning.plans import make_plan
from tvm_sparse.tuning.session import tune, tune_all
from tvm_sparse.tuning.sharing import Sharing
from tvm_sparse.tuning.workbench import NoValidRecord
from tvm_sparse.workers.processes import Reply, StartError, few_threads

PROBLEM = tuning_child.PROBLEM  # 20 points of one template
OTHERS = tuple(spaces.points(PROBLEM, cpu(), spaces.applicable(PROBLEM, cpu())[0]))
OTHER = parse("softmax_topk/batch=2,vocab=200,k=3")
Answer = Callable[[Any], Reply]


class Builders:
    """Builds nothing, at once."""

    def submit(self, request: Any, *, timeout: float) -> Future[Reply]:
        future: Future[Reply] = Future()
        value = {"path": request["candidate"], "workspaces": [], "resources": None, "seconds": 0.1}
        future.set_result(Reply("ok", value=value))
        return future

    def close(self) -> None:
        pass


class Simulated:
    """Measures nothing: `answer` says what came out of a candidate. Keeps what it was asked."""

    def __init__(self, answer: Answer, comes_back: bool = False) -> None:
        self.answer, self.comes_back = answer, comes_back
        self.asked: list[tuple[str, str]] = []

    def prepare(self, problem: Any, abandoned: Callable[[], bool]) -> None:
        pass

    def measure(self, problem: Any, library: Any, timeout: float, abandoned: Callable[[], bool]) -> Reply:
        if "time" not in library["steps"]:
            return Reply("ok", value={"seconds": []})
        self.asked.append((problem["problem"], library["library"]))
        return self.answer(library["library"])

    def recover(self, abandoned: Callable[[], bool]) -> bool:
        return self.comes_back

    def close(self) -> None:
        pass


def timed(candidate: str) -> Reply:
    """A time that depends on the candidate alone."""
    time.sleep(0.002)
    return Reply("ok", value={"seconds": [1e-6 * (1 + sum(map(ord, candidate)) % 97)]})


def lost(candidate: str) -> Reply:
    raise Lost("its node was switched off")


def once(fault: Answer, then: Answer = timed) -> Answer:
    """The fault, and from then on what is right."""
    answers = iter([fault])
    return lambda candidate: next(answers, then)(candidate)


def made(*measurers: Simulated, machine: Machine | None = None) -> Fleet:
    """A device for each, with one seat."""
    return Fleet([Device(f"device {n}", machine or cpu(), [one], Builders()) for n, one in enumerate(measurers)])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "BATCH", 4)
    monkeypatch.setattr(plans, "FINAL_ROUNDS", 2)
    monkeypatch.setattr(fleet, "RECOVERY_SECONDS", 0.0)


def log_of(root: Path, problem: Any = PROBLEM) -> Log:
    return Log(root, cpu().arch, problem.operator)


def run(root: Path, devices: Fleet, trials: int = 20, problem: Any = PROBLEM) -> Log:
    """All of the space unless told otherwise, for which no search is asked."""
    log = log_of(root, problem)
    with devices:
        tune(make_plan(problem, cpu(), trials, log, builders=1), log, using=devices)
    return log


def records(log: Log) -> list[Any]:
    """All that does not differ from one run to the next."""
    contents = log.read()
    assert not contents.skipped and len(contents.sessions) == 1
    found = [*contents.trials, *log.best().values()]
    return [dataclasses.replace(record, session="any") for record in found]


# ---- one session ----------------------------------------------------------------------------------


def test_three_devices_do_the_trials_of_one_and_leave_the_same_records(tmp_path: Path) -> None:
    alone, several = [Simulated(timed)], [Simulated(timed) for _ in range(3)]
    one = run(tmp_path / "one", made(*alone))
    three = run(tmp_path / "three", made(*several))
    assert records(one) == records(three) and len(three.read().trials) == 20
    asked = [measurer.asked for measurer in several]
    assert sorted(sum(asked, [])) == sorted(alone[0].asked)
    # All take part in the search, and the final, whose finalists are asked again, is held on one.
    final = alone[0].asked[20:]
    assert len(final) >= 2 * 2 and [own[-len(final) :] == final for own in asked].count(True) == 1
    assert all(asked)


@pytest.mark.parametrize(
    ("where", "first"),
    [(cpu(), ["propose", "report", "propose", "report"]), (SM90, ["propose", "propose", "report", "propose"])],
    ids=["llvm", "cuda"],
)
def test_a_gpu_is_given_the_next_batch_before_this_one_is_through(
    where: Machine, first: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where builds would disturb, after what came of this one."""
    problem = parse("bsr_matmul/m=8,k=256,n=256,block=16,sparsity=0.9")
    tables = spaces.applicable(problem, where)[0]
    events: list[str] = []

    class Search:
        predicted: dict[Any, float] = {}

        def __init__(self, abandoned: Any) -> None: ...

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *_: object) -> None: ...

        def spawn(self) -> None: ...

        def begin(self, *_: Any, known: Any, batch: int, **options: Any) -> None:
            self.left = (point for point in spaces.points(problem, where, tables) if point not in known)
            self.batch, self.asked = batch, []

        def propose(self) -> list[Any]:
            events.append("propose")
            self.asked.append([next(self.left) for _ in range(self.batch)])
            return self.asked[-1]

        def report(self, results: Any) -> None:
            events.append("report")
            batch = self.asked.pop(0)
            assert list(results) == batch[: len(results)]

    monkeypatch.setattr(session, "Searcher", Search)
    log = Log(tmp_path, where.arch, problem.operator)
    plan = make_plan(problem, where, 40, log, builders=1)
    with made(Simulated(timed), machine=where) as devices:
        tune(plan, log, using=devices)
    assert len(log.read().trials) == 40
    assert events[:4] == first
    assert events.count("propose") == events.count("report")


def test_a_run_with_fresh_inputs_knows_nothing_of_a_hot_one(tmp_path: Path) -> None:
    """Every candidate is measured again, the finalists and the fallback, too; its ranking is the one that counts."""
    problem = parse("bsr_matmul/m=8,k=256,n=256,block=16,sparsity=0.9")
    fixed = {name: values[:1] for name, values in next(iter(spaces.applicable(problem, SM90)[0].values())).items()}
    log = Log(tmp_path, SM90.arch, problem.operator)
    seen: list[tuple[bool, str]] = []

    class Noted(Simulated):
        def measure(self, problem: Any, library: Any, *others: Any) -> Reply:
            if "time" in library["steps"]:
                seen.append((library["fresh"], library["library"]))
            return super().measure(problem, library, *others)

    for fresh in (False, True, False):
        plan = make_plan(problem, SM90, 3, log, builders=1, fixed=fixed, fresh=fresh)
        before = len(seen)
        with made(Noted(timed), machine=SM90) as devices:
            best = tune(plan, log, using=devices)
        assert {kind for kind, _ in seen[before:]} == {fresh}
        found = log.sessions()[best.session]
        assert found.fresh == fresh and ("behind a kernel" in found.timer) == fresh
        assert log.best()[problem.key] == best
    hot, behind = (list(log.read().timed(fresh)) for fresh in (False, True))
    assert [trial.candidate for trial in hot] == [trial.candidate for trial in behind] != []


def test_a_lost_device_costs_nothing_but_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run(tmp_path / "whole", made(Simulated(timed)))
    for comes_back in (False, True):
        gone = Simulated(once(lost), comes_back)
        log = run(tmp_path / str(comes_back), made(gone, Simulated(timed)))
        assert records(log) == records(whole)
        assert (len(gone.asked) > 1) == comes_back
    assert caplog.messages == ["device 0 is lost: its node was switched off"] * 2 + ["device 0 is back"]


def test_a_final_whose_device_is_lost_is_held_anew_on_another(tmp_path: Path) -> None:
    asked = []

    def answer(candidate: str) -> Reply:
        asked.append(candidate)
        return lost(candidate) if len(asked) == 3 else timed(candidate)

    first, second = Simulated(answer), Simulated(answer)
    log = run(tmp_path, made(first, second), trials=1)
    assert [trial.outcome for trial in log.read().trials] == ["ok"] and log.best()
    # The fallback's only trial, a round on the first device and one that it is lost in, and both rounds on the second.
    assert len(asked) == 5 and len(first.asked) in (2, 3) and len(second.asked) in (2, 3)


def test_what_ends_one_device_after_another_is_no_candidates_failure(tmp_path: Path) -> None:
    target = spaces.fallback(PROBLEM, cpu())
    victim = next(str(c) for c in spaces.points(PROBLEM, cpu(), spaces.applicable(PROBLEM, cpu())[0]) if c != target)

    def answer(candidate: str) -> Reply:
        return lost(candidate) if candidate == victim else timed(candidate)

    devices = [Simulated(answer, comes_back=True) for _ in range(4)]
    log = run(tmp_path, made(*devices))
    outcomes = {str(trial.candidate): trial.outcome for trial in log.read().trials}
    assert outcomes.pop(victim) == "environment" and set(outcomes.values()) == {"ok"} and len(outcomes) == 19
    assert sum(asked == victim for one in devices for _, asked in one.asked) == fleet.MOST_LOST


def test_without_a_device_the_run_ends_and_keeps_what_it_has(tmp_path: Path) -> None:
    def fails(candidate: str) -> Reply:
        if len(calls) == 3:
            raise StartError("measure cannot be started: No space left on device")
        calls.append(candidate)
        return timed(candidate)

    calls: list[str] = []
    with pytest.raises(StartError, match="No space left"):
        run(tmp_path, made(Simulated(fails), Simulated(fails)))
    assert [trial.outcome for trial in log_of(tmp_path).read().trials] == ["ok"] * 3


def test_the_limit_of_a_plan_is_that_of_each_candidate(tmp_path: Path) -> None:
    """All steps of a candidate have it together: what has no step before it has it whole."""
    limits: list[tuple[tuple[str, ...], float]] = []

    class Noted(Simulated):
        def measure(self, problem: Any, library: Any, timeout: float, abandoned: Callable[[], bool]) -> Reply:
            limits.append((tuple(library["steps"]), timeout))
            return super().measure(problem, library, timeout, abandoned)

    log = log_of(tmp_path)
    with made(Noted(timed)) as devices:
        tune(dataclasses.replace(make_plan(PROBLEM, cpu(), 2, log, 1), limit=2.5), log, using=devices)
    proof = next(number for number, (steps, _) in enumerate(limits) if "prove" in steps)  # of the winner alone
    limits = limits[: proof - 1]
    whole = [limit for steps, limit in limits if "verify" in steps]
    assert len(whole) > 2 and set(whole) == {2.5}
    assert all(2 < limit <= 2.5 for _, limit in limits) and any(limit < 2.5 for _, limit in limits)


# ---- several sessions -----------------------------------------------------------------------------


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def names(lease: Lease) -> set[str]:
    return {seat.device.name for seat in lease.seats}


def test_devices_are_shared_evenly_and_stay_where_they_are() -> None:
    with made(*(Simulated(timed) for _ in range(4))) as devices:
        with devices.lease(cpu()) as first:
            assert len(names(first)) == 4
            with devices.lease(cpu()) as second, devices.lease(cpu()) as third:
                before = names(first)
                assert [len(lease.seats) for lease in (first, second, third)] == [2, 1, 1]
                assert len(before | names(second) | names(third)) == 4
                with devices.lease(dataclasses.replace(cpu(), name="another")) as none:
                    assert names(first) == before and not none.seats
                    with pytest.raises(StartError):
                        none.seat()
            assert len(names(first)) == 4 and before < names(first)


def test_a_session_without_a_device_waits_for_one() -> None:
    found = []

    def wait() -> None:
        with devices.lease(cpu()) as second:
            found.append(second.seat().device.name)

    with made(Simulated(timed)) as devices:
        thread = threading.Thread(target=wait)
        with devices.lease(cpu()) as first:
            thread.start()
            time.sleep(0.02)
            assert names(first) == {"device 0"} and not found
        thread.join(10)
    assert found == ["device 0"]


def test_many_problems_run_at_the_same_time_each_on_its_device(tmp_path: Path) -> None:
    both, working = threading.Event(), set[str]()

    def meets(candidate: str) -> Reply:
        working.add(threading.current_thread().name)
        if len(working) == 2:
            both.set()
        # Not for ever: the first session may have begun on what is the second one's device now.
        both.wait(2)
        reply = timed(candidate)
        working.discard(threading.current_thread().name)
        return reply

    measurers = [Simulated(meets), Simulated(meets)]
    plans = [make_plan(problem, cpu(), 20, log_of(tmp_path, problem), 1) for problem in (PROBLEM, OTHER)]
    ends = {}
    with made(*measurers) as devices:
        tune_all(plans, tmp_path, devices, end=ends.__setitem__)
    assert both.is_set()
    assert {plan.problem.key: best.problem for plan, best in ends.items()} == {
        problem.key: problem.key for problem in (PROBLEM, OTHER)
    }
    assert {problem for problem, _ in measurers[0].asked[:4]} != {problem for problem, _ in measurers[1].asked[:4]}
    assert len(log_of(tmp_path).read().trials) == 40


def test_a_problem_that_fails_does_not_keep_the_others_from_their_turn(tmp_path: Path) -> None:
    class Wrong(Simulated):
        def measure(self, problem: Any, *rest: Any) -> Reply:
            right = problem["problem"] == OTHER.key
            return super().measure(problem, *rest) if right else Reply("error", message="Mismatch: is wrong")

    plans = [make_plan(problem, cpu(), 20, log_of(tmp_path, problem), 1) for problem in (PROBLEM, OTHER)]
    ends = {}
    with made(Wrong(timed)) as devices:
        tune_all(plans, tmp_path, devices, end=lambda plan, found: ends.update({plan.problem: found}))
    assert isinstance(ends[PROBLEM], NoValidRecord) and ends[OTHER].problem == OTHER.key


def test_an_interrupt_ends_all_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = threading.Event()

    class Endless(Simulated):
        def measure(self, problem: Any, library: Any, timeout: float, abandoned: Callable[[], bool]) -> Reply:
            begun.set()
            until(abandoned)
            raise Lost("given up")

    def interrupt(*_: Any, **__: Any) -> None:
        begun.wait(10)
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "wait", lambda futures, **options: interrupt() if options else wait(futures))
    plans = [make_plan(problem, cpu(), 20, log_of(tmp_path, problem), 1) for problem in (PROBLEM, OTHER)]
    with made(Endless(timed), Endless(timed)) as devices, pytest.raises(KeyboardInterrupt):
        tune_all(plans, tmp_path, devices)
    assert not log_of(tmp_path).read().trials


# ---- seats ----------------------------------------------------------------------------------------


def seated(*places: tuple[Simulated, ...], machine: Machine | None = None, builders: Any = None) -> Fleet:
    """A device for each, with a seat for each of its measurers."""
    where, builds = machine or cpu(), builders or Builders()
    return Fleet([Device(f"device {n}", where, found, builds) for n, found in enumerate(places)])


def test_a_session_has_a_seat_and_the_devices_that_nobody_else_needs() -> None:
    with seated(*(tuple(Simulated(timed) for _ in range(3)) for _ in range(2))) as devices, ExitStack() as stack:
        assert devices.sessions() == devices.sessions(cpu()) == 6
        leases = [stack.enter_context(devices.lease(cpu()))]
        assert names(leases[0]) == {"device 0", "device 1"} and len(leases[0].seats) == 2
        own = leases[0].seat()
        for count in range(2, 7):
            leases.append(stack.enter_context(devices.lease(cpu())))
            seats = [seat for lease in leases for seat in lease.seats]
            assert len(seats) == len(set(seats)) == count and leases[0].seat() is own
            on = [seat.device.name for seat in seats]
            assert abs(on.count("device 0") - on.count("device 1")) <= 1
        with devices.lease(cpu()) as waiting:
            assert not waiting.seats


def test_one_seat_measures_while_another_prepares(tmp_path: Path) -> None:
    measuring, prepared = threading.Event(), threading.Event()
    at_work: list[str] = []

    class First(Simulated):
        def measure(self, *rest: Any) -> Reply:
            measuring.set()
            assert prepared.wait(10)
            return super().measure(*rest)

    class Second(Simulated):
        def prepare(self, *_: Any) -> None:
            assert measuring.wait(10)
            prepared.set()

    def alone(candidate: str) -> Reply:
        at_work.append(candidate)
        reply = timed(candidate)
        assert at_work.pop() == candidate and not at_work
        return reply

    plans = [make_plan(problem, cpu(), 20, log_of(tmp_path, problem), 1) for problem in (PROBLEM, OTHER)]
    with seated((First(alone), Second(alone))) as devices:
        tune_all(plans, tmp_path, devices)
        assert 40 * 0.002 < devices.devices[0].turn.busy
    assert [trial.outcome for trial in log_of(tmp_path).read().trials] == ["ok"] * 40


def test_seats_verify_side_by_side_and_time_alone(tmp_path: Path) -> None:
    """Each waits in its first verification for the other; nobody verifies while one times."""
    both, verifying = threading.Barrier(2), [0]

    class Watched(Simulated):
        met = False

        def measure(self, problem: Any, library: Any, timeout: float, abandoned: Callable[[], bool]) -> Reply:
            if "time" in library["steps"]:
                assert not verifying[0] and tuple(library["steps"]) == ("time",)
            elif not {"draw", "recheck"} & set(library["steps"]):
                verifying[0] += 1
                if not self.met:
                    both.wait(10)
                    self.met = True
                time.sleep(0.001)
                verifying[0] -= 1
            return super().measure(problem, library, timeout, abandoned)

    plans = [make_plan(problem, cpu(), 20, log_of(tmp_path, problem), 1) for problem in (PROBLEM, OTHER)]
    with seated((Watched(timed), Watched(timed))) as devices:
        tune_all(plans, tmp_path, devices)
    assert [trial.outcome for trial in log_of(tmp_path).read().trials] == ["ok"] * 40


def test_what_the_machine_had_no_room_for_beside_others_is_verified_alone(tmp_path: Path) -> None:
    class Small(Simulated):
        """Each candidate's first verification finds no memory."""

        def measure(self, problem: Any, library: Any, timeout: float, abandoned: Callable[[], bool]) -> Reply:
            steps = library["library"], tuple(library["steps"])
            first = steps not in seen
            seen.append(steps)
            if first and steps[1] == ("verify", "check"):
                return Reply("error", message="out of memory", environment=True)
            return super().measure(problem, library, timeout, abandoned)

    seen: list[Any] = []
    log = run(tmp_path, made(Small(timed)))
    assert {trial.outcome for trial in log.read().trials} == {"ok"}
    verified = Counter(candidate for candidate, steps in seen if steps == ("verify", "check"))
    assert set(verified.values()) == {2, 3}  # finalists a third time


def test_a_candidate_that_is_wrong_is_not_timed(tmp_path: Path) -> None:
    class Wrong(Simulated):
        def measure(self, problem: Any, library: Any, timeout: float, abandoned: Callable[[], bool]) -> Reply:
            if "verify" in library["steps"] and library["library"] != fallback:
                return Reply("error", message="Mismatch: is wrong")
            return super().measure(problem, library, timeout, abandoned)

    fallback = str(spaces.fallback(PROBLEM, cpu()))
    wrong = Wrong(timed)
    log = run(tmp_path, made(wrong))
    assert {trial.outcome for trial in log.read().trials if str(trial.candidate) != fallback} == {"wrong"}
    assert {asked for _, asked in wrong.asked} == {fallback}


@pytest.mark.parametrize("step", ["check", "time", "recheck"])
def test_a_library_that_changes_its_process_fails_by_name(tmp_path: Path, step: str) -> None:
    """Not for what the next step misses in a new process; and a time of such a process does not count."""
    spoilt = OTHERS[1]

    class Renewed(Simulated):
        def measure(self, problem: Any, library: Any, timeout: float, abandoned: Callable[[], bool]) -> Reply:
            reply = super().measure(problem, library, timeout, abandoned)
            is_it = step in library["steps"] and library["library"] == str(spoilt)
            return dataclasses.replace(reply, changed=("its alarms",)) if is_it else reply

    log = run(tmp_path, made(Renewed(timed)))
    [trial] = [one for one in log.read().trials if one.candidate == spoilt]
    assert (trial.outcome, trial.reason) == ("run-error", "calling the library changed its process: its alarms")
    assert log.best()[PROBLEM.key].candidate != spoilt


def test_whoever_waits_for_a_turn_gives_up_once_it_is_unwanted() -> None:
    turn = fleet.Turn()
    with turn.alone(lambda: False):
        for way in (turn.alone, turn.beside):
            with pytest.raises(CancelledError), way(lambda: True):
                pass
    with turn.beside(lambda: False), turn.beside(lambda: False):  # nobody waits any more
        pass


def test_a_device_is_lost_with_all_of_its_seats(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = run(tmp_path / "whole", made(Simulated(timed)))
    broken = tuple(Simulated(lost) for _ in range(fleet.MOST_LOST))
    log = run(tmp_path / "some", seated(broken, (Simulated(timed),)))
    assert records(log) == records(whole)  # no trial met one seat of it after the other
    assert caplog.messages == ["device 0 is lost: its node was switched off"]


def test_a_gpus_first_candidates_are_built_while_the_fallback_is_measured(tmp_path: Path) -> None:
    gpu_machine = Machine("cuda", "sm_90a", "H200", cores=132)
    ordered: list[str] = []

    class Noted(Builders):
        def submit(self, request: Any, *, timeout: float) -> Future[Reply]:
            ordered.append(request["candidate"])
            return super().submit(request, timeout=timeout)

    def waits(candidate: str) -> Reply:
        until(lambda: len(ordered) == 2)
        return timed(candidate)

    log = Log(tmp_path, gpu_machine.arch, PROBLEM.operator)
    plan = make_plan(PROBLEM, gpu_machine, 2, log, 1)
    assert len(plan.templates) > plan.trials
    with seated((Simulated(waits),), machine=gpu_machine, builders=Noted()) as devices:
        tune(plan, log, using=devices)
    # As many as were asked for, though there are more defaults to begin with.
    assert [str(trial.candidate) for trial in log.read().trials] == ordered and len(ordered) == 2


# ---- what is asked for ----------------------------------------------------------------------------


def test_records_of_one_architecture_are_of_one_model() -> None:
    h100, h200 = (Machine("cuda", "sm_90a", f"NVIDIA {name}", cores=132) for name in ("H100", "H200"))
    a100 = Machine("cuda", "sm_80", "NVIDIA A100", cores=108)
    assert fleet.of_one_model([h200, a100, h200]) == {h200, a100}
    assert fleet.of_one_model([h100, h200, a100], "h200") == {h200}
    with pytest.raises(UnknownArch, match="name one of .*H100.*H200"):
        fleet.of_one_model([h100, h200])
    with pytest.raises(UnknownArch, match="'B200'.*H100"):
        fleet.of_one_model([h100], "B200")


def test_parts_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {7, 3, 5, 1, 9}, raising=False)
    assert fleet.cpu_parts(2) == [[1, 3], [5, 7]]
    assert fleet.cpu_parts(5) == [[1], [3], [5], [7], [9]]
    assert fleet.cpu_parts(7)[4:] == [[9], [1], [3]]  # two take turns on a core
    assert fleet.cpu_part(dataclasses.replace(cpu(), cores=5), 2).cores == 2


@pytest.mark.parametrize(("cores", "seats", "threads"), [(32, 6, 1), (32, 3, 2), (128, 3, 10), (2, 3, 1)])
def test_references_share_a_quarter_of_the_processors(
    monkeypatch: pytest.MonkeyPatch, cores: int, seats: int, threads: int
) -> None:
    monkeypatch.setattr(fleet.machines, "cpu", lambda: dataclasses.replace(cpu(), cores=cores))
    assert fleet.threads_of_seat(seats) == threads
    assert set(fleet.few_threads(threads).values()) == {str(threads)}


# ---- the search's process -------------------------------------------------------------------------


@pytest.mark.parametrize("reported", [{}, {"second": 0.25}, {"second": None}], ids=str)
def test_a_search_whose_process_is_lost_learns_all_anew(tmp_path: Path, reported: dict[str, float | None]) -> None:
    """The new process counts candidates that are being measured as failures, and does not propose them again."""
    first, second = [c for c in spaces.points(PROBLEM, cpu(), spaces.applicable(PROBLEM, cpu())[0])][:2]
    requests: list[Any] = []

    class Worker:
        def call(self, request: Any, **_: Any) -> Reply:
            requests.append(request)
            if len(requests) in broken:
                return Reply("crash", message="search was killed by SIGSEGV")
            return Reply("ok", value=[[str(second)], {str(second): 0.5}])

        def close(self) -> None:
            pass

    for broken in ({3}, {3, 4}, {3, 5}):
        requests.clear()
        with searching.Searcher() as searcher:
            searcher._worker = Worker()  # type: ignore[assignment]
            options = {"named": (), "fixed": {}, "known": {first: 1.0}, "trials": 9, "batch": 1, "seed": 0}
            searcher.begin(PROBLEM, cpu(), "random", log_of(tmp_path), fresh=False, **options)
            assert searcher.propose() == [second] and searcher.predicted == {second: 0.5}
            searcher.report(dict.fromkeys([second] if reported else [], reported.get("second")))
            if len(broken) > 1:
                with pytest.raises(searching.SearchError, match="SIGSEGV"):
                    searcher.propose()
            else:
                assert searcher.propose() == [second]
                assert requests[3]["known"] == {str(first): 1.0, str(second): reported.get("second")}


# ---- processes ------------------------------------------------------------------------------------


@pytest.mark.skipif(gpu() is not None, reason="needs a machine without a GPU")
def test_a_device_that_does_not_work_is_told_from_inputs_that_cannot_be_made() -> None:
    measurer = Measurer()
    try:
        with pytest.raises(StartError, match="the device: "):
            measurer.measure({"problem": PROBLEM.key, "kind": "cuda", "seed": 0}, {}, 30)
        with pytest.raises(PrepareError, match="no_such_operator"):
            measurer.measure({"problem": "no_such_operator/n=1", "kind": "llvm", "seed": 0}, {}, 30)
    finally:
        measurer.close()


@pytest.fixture
def two_parts() -> Iterator[Fleet]:
    with fleet.local(cpu(), 2, workers=2) as devices:
        yield devices


def test_two_parts_of_the_cpu_tune_with_real_workers(tmp_path: Path, two_parts: Fleet) -> None:
    (machine,) = two_parts.machines
    plans = [make_plan(problem, machine, 1, log_of(tmp_path, problem), 2) for problem in (PROBLEM, OTHER)]
    ends: dict[Any, Any] = {}
    tune_all(plans, tmp_path, two_parts, end=ends.__setitem__)
    assert {best.problem for best in ends.values()} == {PROBLEM.key, OTHER.key}
    assert [trial.outcome for trial in log_of(tmp_path).read().trials] == ["ok"] * 2
    assert {one.machine["cores"] for one in log_of(tmp_path).read().sessions} == {machine.cores}


# ---- several runs of a problem --------------------------------------------------------------------


def test_runs_that_share_a_log_measure_nothing_twice(tmp_path: Path) -> None:
    """Not even where they begin at the same moment, and each knows what all have measured when it holds its final."""
    runs = 3
    measurers = [Simulated(timed) for _ in range(runs)]
    together = threading.Barrier(runs)

    def one(measurer: Simulated) -> Any:
        log = log_of(tmp_path)
        with made(measurer) as devices:
            plan = make_plan(PROBLEM, cpu(), 20, log, builders=1)
            together.wait()
            return tune(plan, log, using=devices)

    with ThreadPoolExecutor(runs) as pool:
        bests = list(pool.map(one, measurers))
    trials = log_of(tmp_path).read().trials
    assert len(trials) == len({trial.candidate for trial in trials}) == 20
    assert {trial.session for trial in trials} <= {best.session for best in bests}
    # The last to end knew of all.
    fastest = min(trials, key=lambda trial: trial.median).candidate
    assert log_of(tmp_path).best()[PROBLEM.key].candidate == fastest


def test_what_another_run_began_and_gave_up_is_measured_after_all(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.append(session_of("other"))
    other = Sharing(log, PROBLEM)
    given_up, failed = OTHERS[2:7], OTHERS[7:9]
    assert other.claim([*given_up, *failed]) == ([*given_up, *failed], {})
    seen: list[str] = []

    def answer(candidate: str) -> Reply:
        seen.append(candidate)
        if len(seen) == 3:  # it records two failures, and ends
            log.append(*(Trial(PROBLEM.key, cpu().arch, one, "wrong", "why", (), 0.1, "other", 0) for one in failed))
            other.close()
        return timed(candidate)

    run(tmp_path, made(Simulated(answer)))
    trials = log.read().trials
    assert len(trials) == len({trial.candidate for trial in trials}) == 20
    assert {trial.candidate for trial in trials if trial.session == "other"} == set(failed)
    assert not {str(one) for one in failed} & set(seen) and {str(one) for one in given_up} <= set(seen)


def test_what_another_run_measures_counts_as_paid_for(tmp_path: Path) -> None:
    """A trial of other inputs, or of another problem, or that the environment spoilt, does not."""
    log = log_of(tmp_path)
    log.append(session_of("other"), session_of("fresh", fresh=True))
    sharing = Sharing(log, PROBLEM)

    def trial(candidate: Candidate, session: str = "other", outcome: str = "ok", problem: Problem = PROBLEM) -> Trial:
        reason, times = ("", (1e-6,)) if outcome == "ok" else ("why", ())
        return Trial(problem.key, cpu().arch, candidate, outcome, reason, times, 0.1, session, 0)

    log.append(trial(OTHERS[0]), trial(OTHERS[1], "fresh"), trial(OTHERS[2], outcome="environment"))
    log.append(trial(OTHERS[3], problem=OTHER), trial(dataclasses.replace(OTHERS[4], version=99)))
    with log.trials_path.open("ab") as file:
        file.write(b'{"half": "' + PROBLEM.key.encode())  # being written
    assert sharing.claim(OTHERS[:5]) == (list(OTHERS[1:5]), {OTHERS[0]: 1e-6}) and sharing.count == 1
    log.append(trial(OTHERS[5], outcome="crash"))
    assert sharing.learn() == ([], {OTHERS[5]: None}) and sharing.count == 2
    sharing.done(OTHERS[1:3])
    log.append(trial(OTHERS[1]))
    assert sharing.learn() == ([], {}) and sharing.count == 2
    log.prune(lambda record: True)  # written anew
    assert sharing.learn()[0] == [] and sharing.count == 2
    sharing.close()


def test_a_candidate_that_another_run_gives_up_is_this_ones(tmp_path: Path) -> None:
    log = log_of(tmp_path)
    log.append(session_of("other"))
    one, two = Sharing(log, PROBLEM), Sharing(log, PROBLEM)
    assert one.claim(OTHERS[:2]) == (list(OTHERS[:2]), {})
    assert two.claim(OTHERS[:3]) == ([OTHERS[2]], {}) and two.count == 2
    one.release(OTHERS[:1])
    assert two.learn() == ([OTHERS[0]], {}) and two.count == 1
    one.close()
    assert two.learn() == ([OTHERS[1]], {}) and two.count == 0
    two.close()


def test_a_log_whose_last_lines_were_taken_back_is_read_on(tmp_path: Path) -> None:
    """As where a run saw lines of an append that then failed: the file ends before what was read."""
    log = log_of(tmp_path)
    log.append(session_of("other"))
    before, sharing = log.trials_path.stat().st_size, Sharing(log, PROBLEM)

    def trial(candidate: Candidate) -> Trial:
        return Trial(PROBLEM.key, cpu().arch, candidate, "ok", "", (1e-6,), 0.1, "other", 0)

    log.append(*map(trial, OTHERS[:3]))
    assert set(sharing.learn()[1]) == set(OTHERS[:3])
    os.truncate(log.trials_path, before)
    log.append(trial(OTHERS[3]))
    assert sharing.learn() == ([], {OTHERS[3]: 1e-6})
    sharing.close()


def session_of(name: str, fresh: bool = False) -> Session:
    return Session(name, "2026-01-02T03:04:05Z", {"name": "m"}, {}, "t", {"seed": 1}, fresh=fresh)


@pytest.mark.parametrize("threads", ["1", "2"])
def test_a_run_is_the_same_with_few_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: str) -> None:
    """As torchrun and Ray have it: then the first thread of the process that measures is a kernel's."""
    for name in few_threads(1):
        monkeypatch.setenv(name, threads)
    log = run(tmp_path, fleet.local(cpu(), 1), 2, tuning_child.THREADED)
    assert [trial.outcome for trial in log.read().trials] == ["ok"] * 2 and tuning_child.THREADED.key in log.best()
