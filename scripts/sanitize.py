"""Runs the tests of the device tier under NVIDIA's compute-sanitizer, and tells in a table what it found.

    python scripts/sanitize.py --workers 12                           # all four tools, as long as it takes
    python scripts/sanitize.py -k "topk and not large" --minutes 5    # a selection, at most five minutes a tool
    python scripts/sanitize.py --tool memcheck -- --kernel-regex kns=main_kernel    # what follows -- is the sanitizer's

memcheck: accesses out of bounds or misaligned, leaks of errors. racecheck: races in shared memory. initcheck: reads of
global memory that nobody wrote. synccheck: barriers that not all threads reach. PyTorch's caching of memory is off, so
that arrays lie beside each other as the driver places them.

The tools run one after another, each over the tests in `--workers` processes, which share the GPU. What a test costs is
mostly on the processor: kernels are compiled, references made, and the tools patch every kernel as it is loaded. So the
time falls with the processes up to one a core, and with one process 900 tests take hours. How long all of it takes on a
machine, `--minutes` tells: a tool's line has its tests and seconds, and how many tests are `left`, not begun before its
time was up. What has ended counts, whatever becomes of the run; a tool that takes half as long again is killed.
"""

from __future__ import annotations

import contextlib
import json
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
from pathlib import Path
from typing import Annotated, Any

import typer

ROOT = Path(__file__).parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
OUTCOMES = ("passed", "failed", "skipped", "left")
COLUMNS = ("tool", "tests", *OUTCOMES, "errors", "seconds", "ended", "messages")
# What the tests' processes are told: when the time is up, and the file for what became of each test.
UNTIL, REPORT = "TVM_SPARSE_SANITIZE_UNTIL", "TVM_SPARSE_SANITIZE_REPORT"
UP = "the time is up"
KILLED = "killed: the time was up in a test"
# The sanitizer's exit status where it has found something; pytest's own are below.
FOUND = 99


def pytest_runtest_setup(item: Any) -> None:
    """As a plugin of pytest (`-p sanitize`): begin no test once the time is up."""
    import pytest

    if time.time() > float(os.environ.get(UNTIL, "inf")):
        pytest.skip(UP)


def pytest_runtest_logreport(report: Any) -> None:
    """Likewise, in the process that hears of all tests: note what became of one."""
    if REPORT in os.environ and "PYTEST_XDIST_WORKER" not in os.environ:
        outcome = "left" if report.outcome == "skipped" and UP in str(report.longrepr) else report.outcome
        if outcome != "passed" or report.when == "call":
            with open(os.environ[REPORT], "a") as file:
                print(json.dumps([report.nodeid, outcome]), file=file)


def device_tier(folder: Path) -> list[str]:
    """The files of tests that are for a GPU, some of them at least. Every process collects what it is given, under the
    sanitizer; the other files are most, and ask for packages that a machine with a GPU may not have."""
    return [str(path) for path in sorted(folder.glob("test_*.py")) if "mark.gpu" in path.read_text()]


def program() -> str | None:
    """The sanitizer: on the path, of a toolkit, or of a package."""
    roots = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME")]
    places = [Path(root) for root in (*roots, "/usr/local/cuda") if root]
    places += [Path(folder) / "nvidia" / "cu13" for folder in site.getsitepackages()]
    for place in places:
        for name in ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer"):
            if os.access(place / name, os.X_OK):
                return str(place / name)
    return shutil.which("compute-sanitizer")


def run(
    sanitizer: str,
    tool: str,
    tests: list[str],
    *,
    selection: str = "",
    deselected: list[str] | None = None,
    minutes: float = 0,
    workers: int = 0,
    more: list[str] | None = None,
) -> dict[str, Any]:
    """One tool over the tests: a line of the table."""
    with tempfile.TemporaryDirectory() as name:
        log, report, printed = Path(name) / "log", Path(name) / "report", Path(name) / "printed"
        # Not the project's own: its groups have all GPU tests run in one process.
        checked = [sys.executable, "-m", "pytest", "-o", "addopts=-q", "-n", str(workers), "--dist", "load"]
        checked += ["-m", "gpu", "-p", "sanitize", "-p", "no:cacheprovider", "-o", "timeout=0"]
        checked += [*(["-k", selection] if selection else []), *(f"--deselect={one}" for one in deselected or ())]
        options = ["--target-processes", "all", "--error-exitcode", str(FOUND), "--log-file", str(log)]
        path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
        # Whoever runs this may be a process of pytest-xdist; the one that it starts is none.
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        environment = own | {"PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", REPORT: str(report)}
        if minutes:
            environment[UNTIL] = str(time.time() + 60 * minutes)
        started = time.monotonic()
        command = [sanitizer, "--tool", tool, *options, *(more or ()), *checked, *tests]
        with printed.open("w") as file:  # no pipe, which a process that is left behind would hold
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                status = process.wait(90 * minutes + 60 if minutes else None)
                ended = {0: "whole", 5: "no test"}.get(status, f"status {status}")
            except subprocess.TimeoutExpired:
                ended = KILLED
            finally:
                _end(process)
        output = printed.read_text(errors="replace")
        seconds, found = round(time.monotonic() - started), counts(report)
        if found["left"] and ended != KILLED:
            ended = "time up"
        logs = "".join(path.read_text(errors="replace") for path in log.parent.glob("log*"))
        line: dict[str, Any] = {"tool": tool, "ended": ended, "seconds": seconds} | found | errors_of(logs)
    if line["failed"] or ended.startswith("status") or not line["tests"]:
        print(output[-4000:])
    return line


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what runs of it: the sanitizer, pytest and its processes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def counts(report: Path) -> dict[str, int]:
    """How many tests were begun, and how they ended; and how many were left."""
    of: dict[str, str] = {}
    for line in report.read_text().splitlines() if report.exists() else ():
        test, outcome = json.loads(line)
        of[test] = "failed" if of.get(test) == "failed" else outcome  # also while what it needs is taken down
    found = Counter(of.values())
    return {"tests": len(of) - found["left"]} | {outcome: found[outcome] for outcome in OUTCOMES}


def errors_of(log: str) -> dict[str, Any]:
    """How many errors the sanitizer counted, in all processes, and its messages without numbers."""
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", log)
    lines = re.findall(r"^=+ ((?:Invalid|Uninitialized|Barrier|Program hit|Error|Warning|Race).*)", log, re.MULTILINE)
    kinds = Counter(re.sub(r"0x[0-9a-f]+|\d+", "#", line)[:120] for line in lines)
    messages = "; ".join(f"{text} ({count})" for text, count in kinds.most_common(5))
    return {"errors": max(sum(map(int, summaries)), len(lines)), "messages": messages}


def main(
    more: Annotated[list[str] | None, typer.Argument(metavar="[-- OPTION...]", help="For the sanitizer.")] = None,
    selection: Annotated[str, typer.Option("-k", help="As pytest takes it.")] = "",
    deselect: Annotated[list[str] | None, typer.Option(help="As pytest takes it; may be given again.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that run tests; 0: this one's child alone.")] = 0,
    minutes: Annotated[float, typer.Option(help="For each tool; 0: as long as it takes.")] = 0,
    tool: Annotated[list[str] | None, typer.Option(help="One of the four; may be given again.")] = None,
    tests: Annotated[list[str] | None, typer.Option(help="Files of tests.  [default: those for a GPU]")] = None,
    sanitizer: Annotated[str | None, typer.Option(help="The program.  [default: looked for]")] = None,
    csv: Annotated[Path | None, typer.Option(help="Where the table goes, too.")] = None,
) -> None:
    """Run the device tier under compute-sanitizer; the exit code is 1 unless every tool ran tests and found nothing."""
    from reproduction import provenance, write_csv

    from tvm_sparse.cli.common import console, table
    from tvm_sparse.core import machine

    sanitizer = sanitizer or program()
    if sanitizer is None:
        raise SystemExit("compute-sanitizer is not here: it comes with a CUDA toolkit; --sanitizer PATH names it")
    for name in tool or ():
        if name not in TOOLS:
            raise typer.BadParameter(f"tool: expected one of {', '.join(TOOLS)}, got {name}")
    lines = []
    for name in tool or TOOLS:
        line = run(
            sanitizer,
            name,
            tests or device_tier(ROOT / "tests"),
            selection=selection,
            deselected=deselect,
            minutes=minutes,
            workers=workers,
            more=more,
        )
        lines.append(line)
        print({column: line[column] for column in COLUMNS}, flush=True)
    shown = table(*COLUMNS, right=COLUMNS[1 : COLUMNS.index("ended")])
    for line in lines:
        shown.add_row(*(str(line[column]) for column in COLUMNS))
    console().print(shown)
    if csv is not None:
        chosen = " ".join([selection or "all", *(f"without {one}" for one in deselect or ())])
        facts = {k: v for k, v in provenance(machine.resolve("auto")).items() if k != "timing"}
        write_csv(
            csv,
            facts | {"selection": chosen, "workers": str(workers)},
            COLUMNS,
            [[x[c] for c in COLUMNS] for x in lines],
        )
    if any(line["errors"] or line["failed"] or not line["passed"] for line in lines):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
