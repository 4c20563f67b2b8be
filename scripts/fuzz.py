"""Fuzzing: every file reader with coverage-guided inputs, and every public function with nearly valid arguments.

    python scripts/fuzz.py                            # 225,000 cases, 5 to 16 minutes; writes results/fuzz-*.csv
    python scripts/fuzz.py --only manifest --scale 4 --seed 7

*Readers* get mutations of valid files: of bytes, of JSON values, and of two files crossed. An input that takes a new
transition between lines of the package is kept and mutated further. A reader may accept the input or raise a documented
error; anything else is a finding, as is a case that takes longer than `SLOW`.

*Functions* get arguments drawn by Hypothesis: valid ones, with up to three of them changed in values, layout, library,
dtype, shape or kind. A call may raise a documented error. If it returns, its inputs must be unchanged, and its result
must equal, bit by bit, that of a call with plain copies.

Both run in separate processes: a crash is a finding too, with the input that caused it.
"""

from __future__ import annotations

import faulthandler
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from reproduction import provenance, result_path, write_csv

from tvm_sparse.core import machine

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from fuzzing.functions import CALLS, functions
from fuzzing.readers import READERS, guided
from fuzzing.report import Report

COLUMNS = ("target", "how", "cases", "taken", "refused", "kept", "ways", "findings", "seconds")
READER_CASES, FUNCTION_CASES = 16_000, 2_000
# Functions tested in one process: imports and kernels take longer than their cases.
TOGETHER = 11


def work(targets: list[str], scale: float, seed: int, last: Path, kernels: bool = True) -> Iterator[Report]:
    """Run the cases of some readers and functions."""
    for name in targets:
        if name in READERS:
            yield guided(name, max(1, round(READER_CASES * READERS[name].share * scale)), seed, last)
    names = [name for name in targets if name in CALLS]
    yield from functions(names, max(1, round(FUNCTION_CASES * scale)), seed, last, kernels)


def main(
    only: Annotated[list[str] | None, typer.Option(help="Targets whose name has this; may be given again.")] = None,
    scale: Annotated[float, typer.Option(help="Of how many cases a whole run has.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="For the same cases again.  [default: a new one]")] = None,
    csv: Annotated[Path | None, typer.Option(help="Where the table goes.  [default: results/, of a whole run]")] = None,
    worker: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Fuzz readers and functions; the exit code is 1 if anything was found."""
    import logging

    logging.getLogger("tvm_sparse").setLevel(logging.ERROR)
    np.set_printoptions(threshold=20, edgeitems=2)
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    targets = [name for name in (*READERS, *CALLS) if not only or any(word in name for word in only)]
    if worker is not None:
        faulthandler.enable()
        for report in work(list(only or ()), scale, seed, worker):
            print(json.dumps(asdict(report)), flush=True)
        return
    print(f"seed {seed}, {len(targets)} targets", flush=True)
    reports = []
    with tempfile.TemporaryDirectory() as name:
        last = Path(name) / "last"
        calls_ = [target for target in targets if target in CALLS]
        groups = [[target] for target in targets if target in READERS]
        for group in groups + [calls_[i : i + TOGETHER] for i in range(0, len(calls_), TOGETHER)]:
            named = [word for target in group for word in ("--only", target)]
            argv = [sys.executable, __file__, *named, "--scale", str(scale), "--seed", str(seed)]
            for _ in range(2):  # once more if it was killed, as for lack of memory on a shared machine
                done = subprocess.run([*argv, "--worker", str(last)], capture_output=True, text=True)
                if done.returncode != -9:
                    break
            found = [Report(**json.loads(line)) for line in done.stdout.splitlines()]
            if len(found) < len(group):
                what = last.read_bytes()[:2000] if last.exists() else b""
                whose = ", ".join(group[len(found) :])
                crash = f"{whose}: the process ended with {done.returncode}: {done.stderr[-2000:]}\n    {what!r}"
                found.append(Report(whose, "died", findings=[crash]))
            for report in found:
                print(
                    f"{report.target}: {report.cases} cases, {report.taken} taken, {report.refused} refused,"
                    f" {report.kept} kept, {report.ways} ways, {len(report.findings)} findings"
                    f" ({report.seconds:.0f} s)",
                    flush=True,
                )
                for finding in report.findings:
                    print(f"  {finding}", flush=True)
            reports += found
    print(f"{sum(report.cases for report in reports)} cases")
    if csv is None and scale == 1 and not only:
        csv = result_path("fuzz", machine.cpu()).with_suffix(".csv")
    if csv is not None:
        facts = {k: v for k, v in provenance(machine.cpu()).items() if k != "timing"} | {"seed": str(seed)}
        rows = [
            [
                len(r.findings) if c == "findings" else round(r.seconds) if c == "seconds" else getattr(r, c)
                for c in COLUMNS
            ]
            for r in reports
        ]
        write_csv(csv, facts, COLUMNS, rows)
    if any(report.findings for report in reports):
        raise SystemExit(1)


app = typer.Typer(pretty_exceptions_enable=False)
app.command()(main)


if __name__ == "__main__":
    app()
