"""Run the tests of the device tier under NVIDIA's compute-sanitizer, and write a table of its findings.

    python scripts/sanitize.py --workers 12                           # all four tools, as long as it takes
    python scripts/sanitize.py -k "not large" --minutes 5             # a selection, at most five minutes a tool
    python scripts/sanitize.py -k "not large" --keep said --resume    # what a run with `--keep said` has left
    python scripts/sanitize.py --tool memcheck -- --kernel-regex kns=main_kernel    # what follows -- is the sanitizer's

memcheck: accesses out of bounds or misaligned. racecheck: races in shared memory. initcheck: reads of uninitialised
global memory. synccheck: barriers that not all threads reach. PyTorch's caching of memory is off, so that every array
is an allocation of the driver, whose end the tools know; tests that need it are marked `allocator`, and left out.
Errors returned by the CUDA API are not reported: callers check them, and bindings query functions that a driver may
lack.

First the tests run without a tool, so that kernels are compiled: under a sanitizer a compiler process takes minutes,
and all tests that need the same kernel wait for it. Then the tools run one after another, each in `--workers`
processes, each of which sees one of the GPUs. Every process has its own sanitizer, and takes the next test that no
other process has taken. (Under a single sanitizer the processes of pytest-xdist never start a test.) A finding ends the
CUDA context, so a process stops at its first failure and is replaced; a test whose process dies has failed. A tool's
line has its messages with the tests in which they occurred, the number of finished tests and the seconds, and how many
tests were `left` when `--minutes` were over. Finished tests count however the run ends; a tool that takes half as long
again is killed, and its line names the running tests, as after SIGTERM or Ctrl-C. `--keep FOLDER --resume` continues
with the tests that are left.

racecheck works on the CPU: its threads get an equal share of the cores. It checks only this package's kernels, as does
initcheck from version 2026.4 on, which tracks the writes of other kernels. Prefer a recent sanitizer (`pip install
nvidia-cuda-sanitizer-api`, `--sanitizer`): some reports of versions before 2026.4 on partial `cp.async` and on barriers
that count bytes are wrong.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import signal
import site
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
NO_TOOL = "none"  # a run that compiles kernels
OUTCOMES = ("passed", "failed", "skipped", "left")
COLUMNS = (
    "tool",
    "version",
    "files",
    "selection",
    "tests",
    *OUTCOMES,
    "errors",
    "seconds",
    "workers",
    "date",
    "ended",
    "messages",
)
# Environment variables for the tests' processes: the end of the time, the file of results, the folder with a file for
# each test that a process has taken, and the file of the process's sanitizer.
UNTIL, REPORT, TAKEN = "TVM_SPARSE_SANITIZE_UNTIL", "TVM_SPARSE_SANITIZE_REPORT", "TVM_SPARSE_SANITIZE_TAKEN"
SAID = "TVM_SPARSE_SANITIZE_SAID"
# The tests' own variable for the folder in which they keep built libraries.
BUILDS = "TVM_SPARSE_TEST_BUILDS"
# Variable for the largest cluster that tests sample. In larger ones synccheck reports divergent warps where divergence
# is impossible: probes/cluster_barriers.cu.
CLUSTER, LARGEST_CHECKED = "TVM_SPARSE_TEST_CLUSTER", "8"
UP, OTHERS = "the time is up", "another process has taken it"
KILLED, STOPPED = "killed: the time was up in a test", "stopped"
# Matches this package's kernels, named by `artifacts.manifest.symbol_of`.
OURS = "regex=^k[0-9a-f]{32}_"
# The first version whose initcheck can exclude other kernels.
TRACKS_OTHERS = (2026, 4)
# Exit statuses: the sanitizer's for a finding, pytest's for a failed test and for no tests.
FOUND, FAILED, NONE = 99, 1, 5
# The first port by which a process and its sanitizer communicate, and the number of ports to try.
PORT, PORTS = 49152, 64


def _place(folder: Path, test: str) -> Path:
    """The file that marks a test as taken; it contains the test and the process's file for the sanitizer."""
    return folder / hashlib.sha256(test.encode()).hexdigest()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Pytest hook (`-p sanitize`): take the test if no process has, and start none after the end of the time."""
    if TAKEN not in os.environ:
        return
    try:
        with _place(Path(os.environ[TAKEN]), item.nodeid).open("x") as file:
            print(item.nodeid, os.environ.get(SAID, ""), sep="\n", file=file)
    except FileExistsError:
        pytest.skip(OTHERS)
    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(UP)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Pytest hook: record a test's outcome and seconds."""
    if REPORT in os.environ and OTHERS not in str(report.longrepr):
        outcome = "left" if report.outcome == "skipped" and UP in str(report.longrepr) else report.outcome
        if outcome != "passed" or report.when == "call":
            _append(Path(os.environ[REPORT]), [report.nodeid, outcome, round(report.duration, 1)])


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """Pytest hook: record the sanitizer's messages during the test."""
    global _read
    log = Path(os.environ.get(SAID, ""))
    if REPORT not in os.environ or not log.is_file():
        return
    with log.open("rb") as file:
        file.seek(_read)
        said = file.read()
    _read += len(said)
    if kinds := _kinds(said.decode(errors="replace")):
        _append(_findings(Path(os.environ[REPORT])), [nodeid, kinds])


_read = 0  # bytes of the sanitizer's file that have been read


def _findings(report: Path) -> Path:
    """The file beside a report for the sanitizer's messages by test."""
    return report.with_name("findings")


def device_tier(folder: Path) -> list[str]:
    """The files with at least one test for a GPU. Every process collects its files under the sanitizer; most other
    files need packages that a machine with a GPU may lack.
    """
    return [str(path) for path in sorted(folder.glob("test_*.py")) if "mark.gpu" in path.read_text()]


def program() -> str | None:
    """The path of the sanitizer, from PATH, a toolkit, or a package."""
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    places = [Path(root) for root in (*roots, "/usr/local/cuda") if root]
    places += [Path(folder) / "nvidia" / "cu13" for folder in site.getsitepackages()]
    for place in places:
        for name in ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer"):
            if os.access(place / name, os.X_OK):
                return str(place / name)
    return shutil.which("compute-sanitizer")


def version_of(sanitizer: str) -> tuple[int, ...]:
    """The sanitizer's version, as it reports it."""
    said = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"Version (\d[\d.]*)", said)
    return tuple(map(int, found[1].split("."))) if found else ()


def run(
    sanitizer: str,
    tool: str,
    tests: list[str],
    *,
    version: tuple[int, ...] = (),
    stop: Callable[[], bool] = lambda: False,
    selection: str = "",
    deselected: list[str] | None = None,
    minutes: float = 0,
    workers: int = 1,
    gpus: Sequence[str] = (),
    more: list[str] | None = None,
    builds: Path | None = None,
    keep: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Run one tool, or none, over the tests; returns a line of the table. Built libraries are kept in the folder
    `builds`, or not at all; the output of pytest and the sanitizer in the folder `keep`, whose run `resume` continues.
    `gpus` are the values of `CUDA_VISIBLE_DEVICES` for the processes in turn; empty to leave it unchanged. If `stop`
    returns true the run ends at once.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) if keep is None else keep.resolve() / tool
        if not resume:
            shutil.rmtree(folder, ignore_errors=True)
        report, taken, printed = folder / "report", folder / "taken", folder / "printed"
        shutil.rmtree(taken, ignore_errors=True)
        taken.mkdir(parents=True)
        ended_before = [line for line in _lines(report) if line[1] != "left"]
        report.write_text("".join(json.dumps(line) + "\n" for line in ended_before))
        for test, *_ in ended_before:
            _place(taken, test).touch()
        failed_before, begun = counts(report)["failed"], len(list(folder.glob("log*")))
        log_of: dict[int, str] = {}  # of each worker's process
        # Not the project's own options, whose groups run all GPU tests in one process.
        checked = [sys.executable, "-m", "pytest", "-o", "addopts=-q", "-m", "gpu and not allocator", "-o", "timeout=0"]
        checked += ["-p", "sanitize", "-p", "no:cacheprovider", "-p", "no:xdist", "--exitfirst"]
        checked += [*(["-k", selection] if selection else []), *(f"--deselect={one}" for one in deselected or ())]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        told = {"PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", REPORT: str(report), TAKEN: str(taken)}
        if builds is not None:
            builds.mkdir(parents=True, exist_ok=True)
            told[BUILDS] = str(builds)
        if tool == "synccheck":
            told[CLUSTER] = LARGEST_CHECKED
        if minutes:
            told[UNTIL] = str(time.time() + 60 * minutes)
        logs = (folder / f"log{number}" for number in itertools.count(begun))

        def begin(worker: int) -> subprocess.Popen[bytes]:
            options = ["--target-processes", "all", "--error-exitcode", str(FOUND)]
            options += ["--port", str(PORT + worker * PORTS), "--max-connections", str(PORTS)]
            if tool == "memcheck":
                options += ["--report-api-errors", "no"]
            if tool == "racecheck":
                threads = max(1, len(os.sched_getaffinity(0)) // workers)
                options += ["--racecheck-num-workers", str(threads)]
            if tool == "racecheck" or (tool == "initcheck" and version >= TRACKS_OTHERS):
                options += ["--kernel-name", OURS]
            log_of[worker] = log = str(next(logs))
            options += ["--log-file", log, *(more or ())]
            command = [*([] if tool == NO_TOOL else [sanitizer, "--tool", tool, *options]), *checked, *tests]
            env = os.environ | told | {SAID: log}
            if gpus:
                env["CUDA_VISIBLE_DEVICES"] = gpus[worker % len(gpus)]
            return subprocess.Popen(command, cwd=ROOT, env=env, stdout=file, stderr=file, start_new_session=True)

        def failures(worker: int) -> int:
            _note_died(taken, report, log_of[worker])
            return counts(report)["failed"] - failed_before

        started = time.monotonic()
        with printed.open("a") as file:  # a file, not a pipe, which an orphaned process would keep open
            until = started + 90 * minutes + 60 if minutes else math.inf
            ended = _work(begin, workers, until, stop, failures)
        output = printed.read_text(errors="replace")
        spent, found = folder / "seconds", counts(report)
        seconds = round(time.monotonic() - started) + (int(spent.read_text()) if spent.exists() else 0)
        spent.write_text(str(seconds))
        if found["left"] and ended not in (KILLED, STOPPED):
            ended = "time up"
        said = "".join(path.read_text(errors="replace") for path in folder.glob("log*"))
        line: dict[str, Any] = {"tool": tool, "ended": ended, "seconds": seconds} | found
        line |= errors_of(said, _lines(_findings(report)))
        if ended in (KILLED, STOPPED) and (some := sorted(test.partition("::")[2] for test in _begun(taken, report))):
            line["left"] += len(some)
            line["messages"] = "; ".join(filter(None, (line["messages"], f"in the midst of {', '.join(some)}")))
    if line["failed"] or ended.startswith("status") or not line["tests"]:
        print(output[-4000:])
    return line


def _work(
    begin: Callable[[int], subprocess.Popen[bytes]],
    workers: int,
    until: float,
    stop: Callable[[], bool],
    failures: Callable[[int], int],
) -> str:
    """Run processes, replacing those that stop at a failure, until all tests or the time have ended; returns how they
    ended.

    `failures` gets the worker whose process has ended, and returns the number of failures so far.
    """
    processes: dict[int, subprocess.Popen[bytes]] = {worker: begin(worker) for worker in range(workers)}
    statuses: set[int] = set()
    replaced = 0
    try:
        while processes:
            if stop():
                return STOPPED
            if time.monotonic() > until:
                return KILLED
            time.sleep(0.1)
            for worker, process in list(processes.items()):
                if (status := process.poll()) is None:
                    continue
                _end(process)
                statuses.add(status)
                del processes[worker]
                if replaced < failures(worker):
                    replaced += 1
                    processes[worker] = begin(worker)
    finally:
        for process in processes.values():
            _end(process)
    failed = sorted(statuses - {0, NONE})
    return f"status {', '.join(map(str, failed))}" if failed else "no test" if statuses == {NONE} else "whole"


def _begun(taken: Path, report: Path) -> dict[str, str]:
    """Tests that processes have taken and not finished, each with that process's file for the sanitizer."""
    ended = {test for test, *_ in _lines(report)}
    begun = dict(path.read_text().strip().partition("\n")[::2] for path in taken.iterdir())
    return {test: said for test, said in begun.items() if test and test not in ended}


def _note_died(taken: Path, report: Path, log: str) -> None:
    """If the process with this file died during a test, record that as failed, with the sanitizer's messages."""
    for test, said in _begun(taken, report).items():
        if said == log:
            _append(report, [test, "failed", 0.0])
            if kinds := _kinds(Path(log).read_text(errors="replace") if Path(log).exists() else ""):
                _append(_findings(report), [test, kinds])


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the sanitizer, pytest and its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _append(report: Path, line: list[Any]) -> None:
    """Append a line to a report, or to its findings."""
    with report.open("a") as file:
        print(json.dumps(line), file=file)


def _lines(report: Path) -> list[Any]:
    """The lines of a report (a test, its outcome, its seconds), or of its findings."""
    return [json.loads(line) for line in report.read_text().splitlines()] if report.exists() else []


def counts(report: Path) -> dict[str, int]:
    """Number of tests by outcome, of those begun, and of those left."""
    of: dict[str, str] = {}
    for test, outcome, _ in _lines(report):
        of[test] = "failed" if of.get(test) == "failed" else outcome  # also if its teardown succeeds
    found = Counter(of.values())
    return {"tests": len(of) - found["left"]} | {outcome: found[outcome] for outcome in OUTCOMES}


def _kinds(log: str) -> Counter[str]:
    """Number of the sanitizer's messages by kind, without numbers."""
    lines = re.findall(r"^=+ ((?:Invalid|Uninitialized|Barrier|Program hit|Error|Warning|Race).*)", log, re.MULTILINE)
    return Counter(re.sub(r"0x[0-9a-f]+|\d+", "#", line)[:120] for line in lines)


def errors_of(log: str, findings: Sequence[tuple[str, dict[str, int]]] = ()) -> dict[str, Any]:
    """The number of errors counted by the sanitizer in all processes, and its messages, with the tests from `findings`
    in which they occurred.
    """
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)s?\b(?! were)", log)
    kinds, messages = _kinds(log), []
    for text, count in kinds.most_common(5):
        tests = sorted({test.partition("::")[2] for test, said in findings if text in said})
        where = " in " + ", ".join(tests) if tests else ""
        messages.append(f"{text} ({count}{where})")
    return {"errors": max(sum(map(int, summaries)), kinds.total()), "messages": "; ".join(messages)}


def main(
    more: Annotated[list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="For the sanitizer.")] = None,
    selection: Annotated[str, typer.Option("-k", help="As pytest takes it.")] = "",
    deselect: Annotated[list[str] | None, typer.Option(help="As pytest takes it; may be given again.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that run tests.")] = 1,
    minutes: Annotated[float, typer.Option(help="For each tool; 0: as long as it takes.")] = 0,
    tool: Annotated[list[str] | None, typer.Option(help="One of the four; may be given again.")] = None,
    tests: Annotated[list[str] | None, typer.Option(help="Files of tests.  [default: those for a GPU]")] = None,
    sanitizer: Annotated[str | None, typer.Option(help="The program.  [default: looked for]")] = None,
    builds: Annotated[
        Path | None, typer.Option(help="Folder for kernels, of one revision.  [default: none that stays]")
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Folder for what pytest and the sanitizer said.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run that --keep names.")] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Where the tools' lines go, in the place of those there.  [default: results/]")
    ] = None,
) -> None:
    """Run the device tier under compute-sanitizer; the exit code is 1 unless every tool ran tests and found nothing."""
    from reproduction import merged, provenance, result_path, write_csv

    from tvm_sparse.cli.common import console, table
    from tvm_sparse.core import machine
    from tvm_sparse.tuning.session import stop_on_interrupt

    if resume and keep is None:
        raise typer.BadParameter("resume: expected --keep with it, the folder of the run")
    sanitizer = sanitizer or program()
    if sanitizer is None:
        raise SystemExit("compute-sanitizer is not here: it comes with a CUDA toolkit; --sanitizer PATH names it")
    for name in tool or ():
        if name not in TOOLS:
            raise typer.BadParameter(f"tool: expected one of {', '.join(TOOLS)}, got {name}")
    files = tests or device_tier(ROOT / "tests")
    asked = {
        "files": " ".join(Path(path).name for path in files),
        "selection": " ".join([selection or "all", *(f"without {one}" for one in deselect or ())]),
        "workers": workers,
    }
    where = machine.resolve("auto")
    path = csv or result_path("sanitize", where).with_suffix(".csv")
    facts = {k: v for k, v in provenance(where).items() if k != "timing"}
    version = version_of(sanitizer)
    asked |= {"date": facts["date"][:10], "version": ".".join(map(str, version))}
    lines = []
    with tempfile.TemporaryDirectory() as temporary, stop_on_interrupt() as stop:
        for name in (NO_TOOL, *(tool or TOOLS)):
            line = run(
                sanitizer,
                name,
                files,
                version=version,
                stop=stop,
                selection=selection,
                deselected=deselect,
                minutes=minutes,
                workers=workers,
                gpus=machine.visible_gpus(),
                more=more,
                builds=(builds or Path(temporary)).resolve(),
                keep=keep,
                resume=resume,
            )
            line |= asked
            print({column: line[column] for column in COLUMNS}, flush=True)
            if name != NO_TOOL:
                lines.append(line)
                write_csv(path, facts, COLUMNS, merged(path, TOOLS, [[line[column] for column in COLUMNS]]))
            if stop():
                break
    columns = [column for column in COLUMNS if column not in asked]
    shown = table(*columns, right=columns[1 : columns.index("ended")])
    for line in lines:
        shown.add_row(*(str(line[column]) for column in columns))
    console().print(shown)
    if stop() or any(line["errors"] or line["failed"] or not line["passed"] for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
