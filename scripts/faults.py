"""Inject faults into tuning, storing and loading of kernels, and count the outcomes.

    python scripts/faults.py                                   # 20 minutes on two cores; writes results/faults-*.csv
    python scripts/faults.py --target cuda                     # faulty kernels on a GPU, 90 s
    python scripts/faults.py --only "bit flipped"             # one kind again; its line is replaced

For each kind there are three counts, which all have to be 0. *Lost*: a reported trial that is not in the log (beyond
the current batch if a run is killed), or a right candidate without its trial. *Wrong*: a record of something that was
not measured, or of another problem or architecture; and damage that is not reported. *Silent*: a wrong kernel, or a
kernel other than the requested one, that would have been used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import typer
from reproduction import merged, provenance, result_path, write_csv

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import faulty_kernels  # noqa: E402
import tuning_child  # noqa: E402
import writing_child  # noqa: E402
import wrong_kernels  # noqa: E402

from tvm_sparse.artifacts import manifest, trust  # noqa: E402
from tvm_sparse.artifacts.compile import CompileError  # noqa: E402
from tvm_sparse.artifacts.manifest import Entry, ManifestError  # noqa: E402
from tvm_sparse.bench import measure  # noqa: E402
from tvm_sparse.core import machine, spaces  # noqa: E402
from tvm_sparse.core.candidate import Candidate  # noqa: E402
from tvm_sparse.core.machine import Machine  # noqa: E402
from tvm_sparse.core.problem import Mismatch, Problem  # noqa: E402
from tvm_sparse.core.registry import parse  # noqa: E402
from tvm_sparse.core.spaces import points  # noqa: E402
from tvm_sparse.records import Best, Log, Session, Trial, codec, database, utc_now  # noqa: E402
from tvm_sparse.records.queries import best_records  # noqa: E402
from tvm_sparse.runtime import loading  # noqa: E402
from tvm_sparse.runtime.loading import LoadError  # noqa: E402
from tvm_sparse.tuning import fleet, measuring, plans, session  # noqa: E402
from tvm_sparse.workers import building  # noqa: E402
from tvm_sparse.workers.processes import Pool, Worker  # noqa: E402

COLUMNS = ("kind", "injected", "lost_trials", "wrong_records", "silent_wrong_results", "seconds", "note")
# A product whose spaces are large enough for every fault, on both kinds of machine.
PRODUCT = "bsr_matmul/m=4,k=64,n=48,block=8,sparsity=0.5,bias=1"
TOPK = "softmax_topk/batch=3,vocab=37,k=4"
# Time limit of a hung candidate, in seconds.
LIMIT = 1.0
# The outcome that a trial of a candidate with this fault must have.
OUTCOMES = {
    "plus one": "wrong", "nan": "wrong", "first_rows": "wrong", "wrong": "wrong", "crash": "crash", "exit": "crash",
    # On a busy machine a hung candidate may have waited for a processor, for which it is not blamed.
    "hang": "timeout environment", "hang with the GIL": "timeout environment", "endless": "timeout environment",
    "illegal address": "run-error crash",
    "compile": "build-error", "lost": "build-error", "full": "environment", "ended": "environment",
    "stopped": "environment", "memory": "environment",
}  # fmt: skip
IN_TUNING = {
    "llvm": (
        "plus one", "nan", "wrong", "crash", "exit", "hang", "hang with the GIL", "stopped", "compile", "lost", "full",
        "ended", "memory",
    ),
    "cuda": ("plus one", "nan", "endless", "illegal address", "compile", "lost", "memory"),
}  # fmt: skip
HANGS = {"llvm": ("hang", "hang with the GIL", "stopped"), "cuda": ("endless",)}
# The environment variable that marks the processes of a killed run.
MARK = "TVM_SPARSE_FAULTS"


@dataclass
class Count:
    """The outcomes of one kind of fault."""

    injected: int = 0
    lost: int = 0
    wrong: int = 0
    silent: int = 0
    note: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of fault: its number of injections in a whole run, and the function that injects them."""

    name: str
    counts: dict[str, int]  # by kind of machine
    inject: Callable[[int, Machine, Path], Count]


KINDS: list[Kind] = []


def kind(name: str, **counts: int) -> Callable[[Any], Any]:
    def register(function: Callable[[int, Machine, Path], Count]) -> Any:
        KINDS.append(Kind(name, counts, function))
        return function

    return register


# ---------------------------------------------------------------------------------------------------- candidates


@kind("candidate in a tuning run: wrong, crashes, hangs, does not compile, lacks memory or disk", llvm=52, cuda=12)
def candidates(count: int, where: Machine, folder: Path) -> Count:
    """A run over a space with faulty points: all others have a trial, and the winner is a right one."""
    problem, found = parse(PRODUCT), Count()
    named, fixed = ((), {}) if where.kind == "llvm" else (("cross_thread",), {"rows": (4, 8), "vec": (1, 2)})
    if where.kind == "llvm":
        problem = parse("bsr_matmul/m=64,k=128,n=128,block=16,sparsity=0.5")
    tables, _ = spaces.searched(problem, where, named, fixed)
    space = list(points(problem, where, tables))
    fallback = spaces.fallback(problem, where)
    defaults = {spaces.find(n).candidate(spaces.find(n).default(problem, where)) for n in tables}
    others = random.sample([c for c in space if c not in {fallback, *defaults}], len(space) - len(defaults) - 1)
    kinds = IN_TUNING[where.kind]
    spoilt = {candidate: kinds[i % len(kinds)] for i, candidate in enumerate(others[:count])}
    log = Log(folder, where.arch, problem.operator)
    with faulty_builds(spoilt), mock.patch.object(session, "MEASURE_TIMEOUT", 5.0):
        plan = plans.make_plan(problem, where, len(space) + 1, log, 1, named, fixed)
        best = session.tune(plan, log)
    trials = {trial.candidate: trial for trial in log.read().trials}
    found.injected = len(spoilt)
    found.lost = len({*space, fallback} - set(trials))
    for candidate, trial in trials.items():
        fault = spoilt.get(candidate)
        if fault is not None:
            found.silent += trial.outcome == "ok"
            found.wrong += trial.outcome not in OUTCOMES[fault].split()
        else:
            found.wrong += trial.outcome not in ("ok", "rejected")
    found.silent += best.candidate in spoilt
    reasons = {fault: trials[c].outcome for c, fault in spoilt.items() if c in trials}
    found.note = ", ".join(f"{fault}: {outcome}" for fault, outcome in reasons.items())
    return found


@contextlib.contextmanager
def faulty_builds(faults: dict[Candidate, str]) -> Iterator[tuple[str, ...]]:
    """Make tuning runs build candidates with these faults."""
    script = str(ROOT / "tests" / "faulty_build_worker.py")
    argv = (sys.executable, script, json.dumps({str(c): fault for c, fault in faults.items()}))
    with mock.patch.object(fleet, "BUILD_WORKER", argv):
        yield argv


@kind("hung candidate: endless loop, with the GIL held, process stopped", llvm=30, cuda=4)
def hung(count: int, where: Machine, folder: Path) -> Count:
    """Each hung candidate is ended within its limit plus a second."""
    problem, found, late = parse(PRODUCT), Count(), 0.0
    candidate = spaces.fallback(problem, where)
    message = {"problem": problem.key, "kind": where.kind, "seed": 0}
    device = {"kind": where.kind}
    with Worker(measuring.MEASURE_WORKER, name="measure") as worker:
        for number, fault in enumerate(HANGS[where.kind]):
            with faulty_builds({candidate: fault}) as argv, Pool(1, argv, name="build") as pool:
                request = building.request(problem, candidate, where, folder / f"{number}.so")
                [built] = pool.map([request], timeout=120)
            library = {"library": built.value["path"], "workspaces": built.value["workspaces"]}
            for _ in range(max(1, count // len(HANGS[where.kind]))):
                if not all(worker.call(m, timeout=measuring.PREPARE_TIMEOUT).ok for m in (message, device)):
                    raise RuntimeError("the measuring process does not start")
                started = time.monotonic()
                reply = worker.call(message | library, timeout=LIMIT)
                taken = time.monotonic() - started - LIMIT
                late = max(late, taken)
                found.injected += 1
                found.wrong += reply.kind != "timeout" or taken > 1
                found.silent += reply.ok
    found.note = f"the last ended {late:.2f} s after its limit"
    return found


@kind("wrong candidate that runs: rows, edges, NaN, ties, arguments, memory, repeatability", llvm=1000)
def wrong(count: int, where: Machine, folder: Path) -> Count:
    """Faults between the measuring code and a right kernel, with inputs of several seeds: none is accepted."""
    found, load = Count(), measure.load
    faults = [(operator, name) for operator, ones in faulty_kernels.FAULTS.items() for name in ones]
    passed = []
    for number in range(count):
        operator, name = faults[number % len(faults)]
        problem, fault = parse(faulty_kernels.PROBLEMS[operator]), faulty_kernels.FAULTS[operator][name]

        def spoilt(*place: Any, problem: Problem = problem, fault: Any = fault) -> Any:
            return faulty_kernels.Faulty(problem, load(*place), fault)

        message = faulty_kernels.message(problem) | {"seed": number // len(faults)}
        with mock.patch.object(measure, "load", spoilt):
            try:
                measure.handle(message)
            except (Mismatch, RuntimeError):
                pass
            else:
                passed.append(f"{operator}: {name}")
        found.injected += 1
    found.silent = len(passed)
    found.note = ", ".join(passed) or f"{len(faults)} faults of {len(faulty_kernels.FAULTS)} operators"
    return found


@kind("wrong candidate that runs: conditions drawn at random, of all operators", llvm=160)
def drawn(count: int, where: Machine, folder: Path) -> Count:
    """Kernels that are wrong at some batches, alignments, settings or data: five of 160 may pass a winner's check."""
    seed = random.randrange(2**32)
    kernels = wrong_kernels.wrong_kernels(seed, count)
    passed = [f"{one.problem}: {one.what}" for number, one in enumerate(kernels) if one.passes(seed + number)]
    over = max(0, len(passed) - count * 5 // 160)
    return Count(
        count, silent=over, note=f"{len(passed)} passed of seed {seed}" + "".join(f"; {one}" for one in passed)
    )


# ------------------------------------------------------------------------------------------------------- processes


@kind("kill -9 of a tuning run, at random times", llvm=200)
def killed(count: int, where: Machine, folder: Path) -> Count:
    """After each kill the log is valid and lacks at most the current batch; no process of the run
    is alive 2 s later.
    """
    found, lock, orphans, lost = Count(), threading.Lock(), [0], [0]

    def side(number: int, rounds: int) -> None:
        root, fresh = folder / str(number), 0
        for turn in range(rounds):
            logs = root / str(fresh)
            before = _trials(logs, where)
            mark = f"{os.getpid()}-{number}-{turn}"
            measured = _killed_run(logs, mark)
            after = _trials(logs, where)
            with lock:
                found.injected += 1
                orphans[0] += _alive_after(mark, 2.0)
                gone = len(before) + measured - len(after)
                lost[0] = max(lost[0], gone)
                found.lost += max(0, gone - tuning_child.BATCH) + len(set(before) - set(after))
                found.wrong += len(database.verify(logs))
            if len(after) >= 18:
                fresh += 1

    sides = [threading.Thread(target=side, args=(i, (count + 1 - i) // 2)) for i in range(2)]
    for thread in sides:
        thread.start()
    for thread in sides:
        thread.join()
    found.wrong += orphans[0]
    found.note = f"at most {lost[0]} trials of a batch of {tuning_child.BATCH} gone, {orphans[0]} processes left"
    return found


def _trials(logs: Path, where: Machine) -> list[Trial]:
    return list(Log(logs, where.arch, tuning_child.PROBLEM.operator).read().trials)


def _killed_run(logs: Path, mark: str) -> int:
    """Start a run and kill it at a random time, in one of five cases while it still imports; returns the number of
    reported trials.
    """
    argv = [sys.executable, str(ROOT / "tests" / "tuning_child.py"), str(logs), "20"]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ | {MARK: mark})
    assert child.stdout is not None
    first = b"" if random.random() < 0.2 else child.stdout.readline()
    timer = threading.Timer(random.uniform(0.0, 4.0), child.kill)
    timer.start()
    output, _ = child.communicate()
    timer.cancel()
    lines = (first + output).decode().rpartition("\n")[0].splitlines()
    return max((int(line.split()[1]) for line in lines if line.startswith(("search", "final"))), default=0)


def _alive_after(mark: str, seconds: float) -> int:
    """Number of processes with this mark that run after `seconds`; returns as soon as there are none."""
    wanted, until = f"{MARK}={mark}".encode(), time.monotonic() + seconds
    while True:
        alive = 0
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    alive += (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        if not alive or time.monotonic() > until:
            return alive
        time.sleep(0.05)


@kind("writers at the same time, 4 a log: records", llvm=1000)
def writers(count: int, where: Machine, folder: Path) -> Count:
    each = max(1, count // 4)
    script = str(ROOT / "tests" / "writing_child.py")
    running = [
        subprocess.Popen([sys.executable, script, str(folder), str(i), str(each)], stdout=subprocess.DEVNULL)
        for i in range(4)
    ]
    failed = sum(process.wait() != 0 for process in running)
    expected = {writing_child.record(i, order) for i in range(4) for order in range(each)}
    contents = Log(folder, writing_child.ARCH, "softmax_topk").read()
    return Count(4 * each, len(expected - set(contents.trials)) + failed, len(set(contents.trials) - expected))


@kind("kill -9 of a writer", llvm=100)
def killed_writers(count: int, where: Machine, folder: Path) -> Count:
    """Lines that a killed writer had reported are in the log."""
    found, script = Count(), str(ROOT / "tests" / "writing_child.py")
    log = Log(folder, writing_child.ARCH, "softmax_topk")
    reported: set[Trial] = set()
    for number in range(count):
        argv = [sys.executable, script, str(folder), str(number), "100000"]
        with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            first = process.stdout.readline()
            time.sleep(random.uniform(0, 0.05))
            process.kill()
            lines = (first + process.stdout.read()).decode().rpartition("\n")[0].split()
        reported |= {writing_child.record(number, int(order)) for order in lines}
        found.injected += 1
    there = set(log.read().trials)
    found.lost = len(reported - there)
    found.wrong = sum(writing_child.record(int(t.session[1:]), t.order) != t for t in there)
    found.note = f"{len(reported)} records reported"
    return found


# --------------------------------------------------------------------------------------------------------- records


def written(folder: Path, count: int = 5) -> tuple[Log, list[Trial], Best]:
    """A log with a session, `count` trials and a ranking of them."""
    log = Log(folder, writing_child.ARCH, "softmax_topk")
    trials = [dataclasses.replace(writing_child.record(0, order), problem=_key(0)) for order in range(count)]
    log.append(Session("s0", utc_now(), {}, {}, "none", {}), *trials)
    best = Best(_key(0), log.arch, trials[0].candidate, 1e-6, trials[1].candidate, 2e-6, 3, "s0", count)
    log.append_best(best)
    return log, trials, best


def _key(number: int) -> str:
    return parse(f"softmax_topk/batch={number + 1},vocab=100,k=3").key


@kind("damaged line of a log: flipped, cut, doubled, emptied, glued, removed", llvm=1000)
def damaged_lines(count: int, where: Machine, folder: Path) -> Count:
    """A damaged line affects no other, and `db verify` names it."""
    log, trials, _ = written(folder)
    whole, found, intact = log.trials_path.read_bytes().splitlines(keepends=True), Count(), log.read()
    for number in range(count):
        lines, at = list(whole), random.randrange(len(whole))
        line = lines[at]
        place = random.randrange(len(line) - 1)
        lines[at] = [
            line[:place] + bytes([line[place] ^ 1 << random.randrange(8)]) + line[place + 1 :],
            line[:place] + line[place + 1 :],
            line[: place + 1] + line[place:],
            line[:place] + b"\n",
            b"\0" * len(line),
            line[:-1],  # the next line is appended to it, or the last one has no end
            b"",
            line[:place] + os.urandom(8) + line[place:],
        ][number % 8]
        if len(lines[at]) == len(line) - 1 and at == len(lines) - 1 and number % 8 == 5:
            continue  # cut at the end of the file: nothing is lost or damaged
        log.trials_path.write_bytes(b"".join(lines))
        there = set(log.read().trials)
        near = {trials[i - 1] for i in (at, at + 1) if 0 < i <= len(trials)}  # an appended line is lost with it
        found.injected += 1
        found.lost += len(set(trials) - there - near)
        found.wrong += len(there - set(trials)) + (log.read() != intact and not database.verify(folder))
    return found


@kind("full disk: an append that finds no room", llvm=300)
def full_disk(count: int, where: Machine, folder: Path) -> Count:
    """The file may not grow beyond a random size, as on a full disk: an append is complete or undone."""
    found, done = Count(), []
    log = Log(folder, writing_child.ARCH, "softmax_topk")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(count):
        batch = [writing_child.record(number % 9, 3 * number + i) for i in range(3)]
        size = log.trials_path.stat().st_size if log.trials_path.exists() else 0
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + random.randrange(1300), before[1]))
        try:
            log.append(*batch)
            done += batch
        except OSError:
            found.injected += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    contents = log.read()
    found.lost = len(set(done) - set(contents.trials))
    found.wrong = len(set(contents.trials) - set(done)) + len(contents.skipped)
    found.note = f"{len(done)} records written in between"
    return found


@kind("full disk: a build into the cache", llvm=8)
def full_cache(count: int, where: Machine, folder: Path) -> Count:
    """A build fails with the reason, and existing files are intact."""
    found, problem = Count(), parse(TOPK)
    [entry] = building.build([(problem, spaces.fallback(problem, where), "fallback", {})], where, folder)
    manifest.write(folder, [entry])
    names = {path.name for path in folder.iterdir()}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for number in range(count):
        other = dataclasses.replace(problem, vocab=100 + number)
        resource.setrlimit(resource.RLIMIT_FSIZE, (random.randrange(1, 9000), before[1]))
        try:
            building.build([(other, spaces.fallback(other, where), "fallback", {})], where, folder)
            found.silent += 1
        except CompileError:
            found.injected += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        found.wrong += {path.name for path in folder.iterdir()} != names
        found.lost += manifest.read(folder) != (entry,)
        loading.load_function(folder / entry.library, entry.kind, entry.sha256, entry.symbol)
    return found


@kind("folder that cannot be written: logs, cache, temporary files", llvm=30)
def read_only(count: int, where: Machine, folder: Path) -> Count:
    """An error names the folder, and its content can be read. Run as another user if this one may write everywhere."""
    log, trials, best = written(folder / "logs")
    places = [folder / "logs", log.trials_path.parent, log.trials_path]
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o555 if path.is_dir() else 0o444)
    folder.parent.chmod(0o755)
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe(False)

    def child() -> None:
        if os.geteuid() == 0:
            os.seteuid(65534)
        results = []
        for number in range(count):
            what = number % 3
            try:
                if what == 0:
                    log.append(writing_child.record(0, 7))
                elif what == 1:
                    Log(folder / "logs" / "new", "sm_80", "softmax").append()
                    Log(folder / "logs", "sm_80", "softmax_topk").append_best(dataclasses.replace(best, arch="sm_80"))
                else:
                    trust.make_folder(folder / "cache" / where.arch)
                results.append("written")
            except OSError as error:
                results.append("" if str(folder) in str(error) else f"not named: {error}")
        results.append("" if list(log.read().trials) == trials and log.best() else "not read")
        theirs.send(results)

    process = context.Process(target=child)
    process.start()
    results = mine.recv()
    process.join()
    for path in (folder, *folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o755)
    said = [result for result in results if result]
    return Count(count, 0, len(said), 0, ", ".join(said) or f"{len(places)} places, and their parents")


@kind("clock that goes backwards", llvm=200)
def clock(count: int, where: Machine, folder: Path) -> Count:
    """Rankings are used in the order in which they were written, and no time limit depends on the system clock."""
    found = Count()
    log = Log(folder / "logs", writing_child.ARCH, "softmax_topk")
    real_time, real_gmtime = time.time, time.gmtime
    behind = 0.0

    def now() -> float:
        return real_time() - behind

    with (
        mock.patch.object(time, "time", now),
        mock.patch.object(time, "gmtime", lambda *t: real_gmtime(*(t or (now(),)))),
    ):
        for number in range(count):
            behind = random.uniform(0, 1e9)
            name = f"s{number}"
            trial = dataclasses.replace(writing_child.record(number, 0), session=name, order=0)
            log.append(Session(name, utc_now(), {}, {}, "none", {}), trial)
            best = Best(_key(0), log.arch, trial.candidate, 1e-6 * (number + 1), trial.candidate, 2e-6, 3, name, 0)
            log.append_best(best)
            found.injected += 1
            found.wrong += log.best()[_key(0)] != best
        found.lost = count - len(log.read().trials)
        behind = 1e7
        tuned = Log(folder / "tuned", where.arch, tuning_child.PROBLEM.operator)
        session.tune(plans.make_plan(tuning_child.PROBLEM, where, 4, tuned, 1), tuned)
        found.lost += 4 - len(tuned.read().trials)
    found.wrong += len(database.verify(folder / "logs")) + len(database.verify(folder / "tuned"))
    return found


@kind("another version: of a line, a template, a manifest, the compiler", llvm=400)
def versions(count: int, where: Machine, folder: Path) -> Count:
    """What this version may not read is passed over and named, what it may not use is not used."""
    found = Count()
    problem = parse(TOPK)
    fallback = spaces.fallback(problem, where)
    entry = Entry(problem.key, where.arch, where.kind, fallback, "fallback", "a.so", "0" * 64, (), {}, None)
    for number in range(count):
        found.injected += 1
        root = folder / str(number)
        change = random.choice([-2, -1, 1, 2, 7])
        if number % 4 == 0:
            log, trials, _ = written(root)
            lines = log.trials_path.read_bytes().splitlines(keepends=True)
            line = json.loads(lines[3])
            line.pop("sum")
            line["schema"] = codec.SCHEMA + abs(change)
            log.trials_path.write_bytes(b"".join([*lines[:3], _line(line), *lines[4:]]))
            found.lost += len(log.read().trials) != len(trials) - 1
            found.wrong += not any(damage.line == 4 for damage in database.verify(root))
        elif number % 4 == 1:
            log = Log(root, where.arch, problem.operator)
            other = dataclasses.replace(fallback, version=fallback.version + change)
            log.append_best(Best(problem.key, where.arch, other, 1e-6, fallback, 2e-6, 3, "s0"))
            found.silent += bool(best_records([root], where.arch, [problem.operator]))
        else:
            manifest.write(root, [entry])
            path = root / manifest.NAME
            content = json.loads(path.read_text())
            if number % 4 == 2:
                content["format"] += change
            else:
                content["versions"]["apache-tvm"] += f".{abs(change)}"
            path.write_text(json.dumps(content))
            try:
                manifest.read(root)
                found.silent += 1
            except ManifestError:
                pass
        shutil.rmtree(root)
    return found


def _line(fields: dict[str, Any]) -> bytes:
    """A line with the right checksum."""
    import hashlib

    def text(content: dict[str, Any]) -> str:
        return json.dumps(content, sort_keys=True, separators=(",", ":"))

    return text(fields | {"sum": hashlib.sha256(text(fields).encode()).hexdigest()[:16]}).encode() + b"\n"


# ------------------------------------------------------------------------------------------------------- libraries


def exported(folder: Path, where: Machine) -> list[Entry]:
    """A folder with two libraries and its manifest."""
    problems = [parse(TOPK), parse(PRODUCT)]
    jobs = [(problem, spaces.fallback(problem, where), "fallback", {}) for problem in problems]
    entries = building.build(jobs, where, folder)
    manifest.write(folder, entries)
    return entries


@contextlib.contextmanager
def nothing_loads() -> Iterator[list[Path]]:
    """Collects what would have been given to the loader."""
    loaded: list[Path] = []
    with mock.patch.object(loading, "_opened", lambda path, *_: loaded.append(path)):
        yield loaded


@kind("library with a bit flipped, or cut off", llvm=1000, cuda=1000)
def damaged_libraries(count: int, where: Machine, folder: Path) -> Count:
    """A damaged library is refused before it is loaded."""
    found, entries = Count(), exported(folder, where)
    whole = {entry.library: (folder / entry.library).read_bytes() for entry in entries}
    with nothing_loads() as loaded:
        for number in range(count):
            entry = entries[number % 2]
            content = bytearray(whole[entry.library])
            if number % 4 < 2:
                bit = random.randrange(8 * len(content))
                content[bit // 8] ^= 1 << bit % 8
            else:
                del content[random.randrange(len(content)) :]
            (folder / entry.library).write_bytes(content)
            found.injected += 1
            try:
                loading.load_library(folder / entry.library, entry.kind, entry.sha256)
            except LoadError:
                pass
        found.silent = len(loaded)
    return found


@kind("manifest that was damaged or changed", llvm=1000)
def damaged_manifests(count: int, where: Machine, folder: Path) -> Count:
    """A manifest is refused, or its entry is as written: no other kernel is called."""
    found, entries = Count(), exported(folder, where)
    path = folder / manifest.NAME
    text = path.read_text()
    names = ("problem", "arch", "candidate", "library", "sha256", "symbol")
    right = {tuple(getattr(entry, name) for name in names) for entry in entries}
    refused = 0
    for number in range(count):
        content = json.loads(text)
        kernels = content["kernels"]
        if number % 3 == 0:
            place = random.randrange(len(text))
            damaged = text[:place] + random.choice(["", "0", "9", '"', "x", "{"]) + text[place + 1 :]
        else:
            name = random.choice(list(kernels[0]))
            values = [kernels[1][name], kernels[0][name], 7, None, "", [], {}, "x" * 99, -1, 1e99]
            kernels[0][name] = random.choice(values)
            if number % 3 == 2 and name in ("library", "sha256"):  # swapped together
                kernels[0]["library"], kernels[0]["sha256"] = kernels[1]["library"], kernels[1]["sha256"]
            damaged = json.dumps(content)
        path.write_text(damaged)
        found.injected += 1
        try:
            for entry in manifest.read(folder):
                function = loading.load_function(folder / entry.library, entry.kind, entry.sha256, entry.symbol)
                found.silent += function is None or tuple(getattr(entry, name) for name in names) not in right
        except (ManifestError, LoadError):
            refused += 1
    found.note = f"{refused} refused, the others say of problem, candidate and library what was written"
    return found


@kind("library swapped while it is loaded", llvm=300)
def swapped(count: int, where: Machine, folder: Path) -> Count:
    """Another process keeps replacing the library by one of two files: the right one is loaded, or none."""
    entries = exported(folder, where)
    first, second = ((folder / entry.library).read_bytes() for entry in entries)
    path, found, right = folder / entries[0].library, Count(), 0
    code = (
        "import os, sys\n"
        "first, second = (open(name, 'rb').read() for name in sys.argv[2:])\n"
        "while True:\n"
        "    for content in (first, second):\n"
        "        open(sys.argv[1] + '.new', 'wb').write(content); os.replace(sys.argv[1] + '.new', sys.argv[1])\n"
    )
    for name, content in (("first", first), ("second", second)):
        (folder / name).write_bytes(content)
    argv = [sys.executable, "-c", code, str(path), str(folder / "first"), str(folder / "second")]
    with subprocess.Popen(argv) as process:
        try:
            for _ in range(count):
                found.injected += 1
                try:
                    library = loading.load_library(path, entries[0].kind, entries[0].sha256)
                except LoadError:
                    continue
                right += 1
                try:
                    loading.function_of(library, path, entries[0].symbol)
                except LoadError:
                    found.silent += 1
        finally:
            process.kill()
    found.note = f"{right} times the right one was loaded"
    return found


@kind("folder, manifest or library that others may write, or of another user", llvm=120)
def foreign(count: int, where: Machine, folder: Path) -> Count:
    found, entries = Count(), exported(folder, where)
    entry = entries[0]
    library, described = folder / entry.library, folder / manifest.NAME
    with nothing_loads():
        for number in range(count):
            path = (folder, described, library)[number % 3]
            mode, owner = path.stat().st_mode & 0o777, os.geteuid()
            how = number // 3 % 3
            if how == 2 and os.geteuid() == 0:
                os.chown(path, random.randrange(1, 60000), -1)
            else:
                path.chmod(mode | (0o002 if how else 0o022))
                if not how:
                    with contextlib.suppress(PermissionError):
                        os.chown(path, -1, 1)  # a group that is not this user's own
            try:
                for one in manifest.read(folder):
                    loading.load_library(folder / one.library, one.kind, one.sha256)
                found.silent += 1
            except (ManifestError, LoadError):
                pass
            path.chmod(mode)
            with contextlib.suppress(PermissionError):
                os.chown(path, owner, os.getegid())
            found.injected += 1
    return found


# --------------------------------------------------------------------------------------------------------- the run


def chosen(only: Sequence[str], where: Machine) -> list[Kind]:
    found = [one for one in KINDS if where.kind in one.counts and (not only or any(word in one.name for word in only))]
    if not found:
        raise typer.BadParameter(f"no kind of fault has any of {', '.join(only)} in its name")
    return found


def main(
    target: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    only: Annotated[list[str] | None, typer.Option(help="Kinds whose name has this; may be given again.")] = None,
    scale: Annotated[float, typer.Option(help="Of how often each is injected in a whole run.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="For the same faults again.  [default: a new one]")] = None,
    csv: Annotated[Path | None, typer.Option(help="Where the table goes.  [default: results/, unless scaled]")] = None,
) -> None:
    """Inject faults and count what came of them; the exit code is 1 if any count is not 0."""
    where = machine.resolve(target)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    random.seed(seed)
    logging.getLogger("tvm_sparse").setLevel(logging.ERROR)  # damage is expected
    print(f"{where.name} ({where.arch}), seed {seed}", flush=True)
    rows, bad = [], 0
    for one in chosen(only or (), where):
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="tvm_sparse-faults-") as name:
            found = one.inject(max(1, round(one.counts[where.kind] * scale)), where, Path(name) / "work")
        taken = time.monotonic() - started
        bad += found.lost + found.wrong + found.silent
        counts = (found.injected, found.lost, found.wrong, found.silent)
        rows.append((one.name, *counts, f"{taken:.1f}", found.note))
        print(f"{one.name}: {', '.join(map(str, counts))}  ({taken:.1f} s)  {found.note}", flush=True)
    if csv is None and scale == 1:  # lines of repeated kinds are replaced
        csv = result_path("faults", where).with_suffix(".csv")
        rows = merged(csv, [one.name for one in KINDS], rows)
    if csv is not None:
        facts = {k: v for k, v in provenance(where).items() if k != "timing"} | {"seed": str(seed)}
        write_csv(csv, facts, COLUMNS, rows)
    if bad:
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
