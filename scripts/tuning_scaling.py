"""Speed-up of tuning by several devices: the same problems, with the same number of trials, on 1, 2, ... of them.

    python scripts/tuning_scaling.py --devices 1,2 --trials 48                    # 1 and 2 GPUs: 3 minutes
    python scripts/tuning_scaling.py --workers 1,2,4 --problems 4 --trials 12   # parts of the CPU: 3 minutes

The problems are products with block-sparse weights of 1024 x 1024 at several batches, each tuned from scratch in a
temporary folder, with the same number of trials. All processes are started before the clock, by a small run that is not
counted. The time is split into parts, from which docs/many-gpus.md makes a projection: CPU seconds of the driver;
seconds of proposals, of builds (each on one core), and of devices; and the seconds, summed over all seats
(`tuning.fleet`), of waiting for a device, checking, and timing. `processes` is the number of measuring processes: one
for each seat, and one more after each failed candidate. Writes a CSV with device, versions and date into
scripts/results/.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from reproduction import provenance, result_path, write_csv

from tvm_sparse.cli.common import console, errors, fail, machine_here, ratio, require, table
from tvm_sparse.core import machine
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Log
from tvm_sparse.tuning import fleet
from tvm_sparse.tuning.fleet import Fleet
from tvm_sparse.tuning.plans import Plan, Progress, make_plan
from tvm_sparse.tuning.searching import Searcher
from tvm_sparse.tuning.session import tune_all
from tvm_sparse.tuning.workbench import NoValidRecord

BATCHES = (*range(4, 32, 2), *range(32, 64, 4), 64, 80)  # as many problems as seats on several GPUs, and more
WARM_BATCH, WARM_TRIALS = 101, 8
COLUMNS = (
    "devices",
    "builders",
    "problems",
    "trials",
    "seconds",
    "driver_seconds",
    "search_seconds",
    "build_seconds",
    "device_seconds",
    "wait_seconds",
    "check_seconds",
    "time_seconds",
    "seats",
    "processes",
)


def problem(batch: int) -> Problem:
    return parse(f"bsr_matmul/m={batch},k=1024,n=1024,block=16,sparsity=0.9")


def plans_of(batches: list[int], where: Machine, trials: int, root: Path, builders: int) -> list[Plan]:
    made = []
    for one in map(problem, batches):
        made.append(make_plan(one, where, trials, Log(root, where.arch, one.operator), builders))
    return made


def _spent(devices: Fleet) -> dict[str, float]:
    """Seconds spent so far, by columns."""
    turns = [device.turn for device in devices.devices]
    return {
        "device_seconds": sum(turn.busy for turn in turns),
        "wait_seconds": sum(turn.waited for turn in turns),
        "check_seconds": sum(turn.checked for turn in turns),
        "time_seconds": sum(turn.timed for turn in turns),
    }


def measure(devices: Fleet, count: int, builders: int, problems: int, trials: int, seed: int) -> dict[str, Any]:
    """A line of the CSV."""
    (where,) = devices.machines
    last: dict[Plan, Progress] = {}

    def end(plan: Plan, found: Any) -> None:
        if isinstance(found, NoValidRecord):
            raise found

    seats = devices.sessions()
    with contextlib.ExitStack() as stack:
        searchers = [stack.enter_context(Searcher(lambda: devices.closed)) for _ in range(seats)]
        for pool in {id(device.builders): device.builders for device in devices.devices}.values():
            pool.start()
        for searcher in searchers:
            searcher.spawn()
        name = stack.enter_context(tempfile.TemporaryDirectory(prefix="tvm_sparse-scaling-"))
        root = Path(name) / "warm"
        warm = plans_of([WARM_BATCH + number for number in range(seats)], where, WARM_TRIALS, root, builders)
        tune_all(warm, root, devices, seed=seed, end=end, searchers=searchers)
        before = _spent(devices)
        plans = plans_of(list(BATCHES[:problems]), where, trials, Path(name), builders)
        began, used = time.monotonic(), time.process_time()
        tune_all(
            plans,
            Path(name),
            devices,
            seed=seed,
            show=lambda progress: last.update({progress.plan: progress}),
            end=end,
            searchers=searchers,
        )
        seconds, driver = time.monotonic() - began, time.process_time() - used
        found = Log(Path(name), where.arch, plans[0].problem.operator).read().trials
    return {
        "devices": count,
        "builders": builders,
        "problems": problems,
        "trials": len(found),
        "seconds": seconds,
        "driver_seconds": driver,
        "search_seconds": sum(progress.search_seconds for progress in last.values()),
        "build_seconds": sum(trial.build_seconds or 0.0 for trial in found),
        **{name: seconds - before[name] for name, seconds in _spent(devices).items()},
        "seats": seats,
        "processes": sum(measurer.processes for device in devices.devices for measurer in device.measurers),
    }


def main(
    devices: Annotated[
        str | None, typer.Option(metavar="1,2,...", help="Numbers of GPUs, each from the first on.")
    ] = None,
    workers: Annotated[str | None, typer.Option(metavar="1,2,...", help="Numbers of parts of the CPU.")] = None,
    problems: Annotated[int, typer.Option(min=1, max=len(BATCHES))] = len(BATCHES),
    trials: Annotated[int, typer.Option(min=1, help="Of each problem.")] = 24,
    builders: Annotated[int | None, typer.Option(min=1, help="For all devices together.")] = None,
    seed: int = 0,
    csv: Annotated[
        Path | None, typer.Option(help="Where to write.  [default: scripts/results/tuning-scaling-...csv]")
    ] = None,
) -> None:
    """Tune the same problems on several numbers of devices."""
    with errors():
        if (devices is None) == (workers is None):
            fail("give either --devices or --workers")
        counts = [int(word) for word in (devices or workers or "").split(",")]
        where = machine_here("cuda" if devices else "cpu", "tuning")
        require("tune", *(["cuda"] if devices else []))
        if devices and max(counts) > len(machine.gpus()):
            fail(f"devices: {max(counts)} asked for, and this machine has {len(machine.gpus())}")
        shown = table(
            "devices", "seconds", "times as fast", "trials/s", "devices busy", right=("seconds", "times as fast")
        )
        lines = []
        for count in counts:
            together = builders or machine.default_builders(count if devices else 0)
            with (
                fleet.local(where, together, gpus=range(count))
                if devices
                else fleet.local(where, together, workers=count)
            ) as found:
                line = measure(found, count, together, problems, trials, seed)
            lines.append(line)
            typer.echo(f"{count}: {line['seconds']:.1f} s", err=True)
        for line in lines:
            shown.add_row(
                str(line["devices"]),
                f"{line['seconds']:.1f}",
                ratio(lines[0]["seconds"], line["seconds"]),
                f"{line['trials'] / line['seconds']:.2f}",
                f"{line['device_seconds'] / line['seconds'] / line['devices']:.0%}",
            )
        console().print(shown)
        facts = provenance(where) | {
            "cores": str(machine.cpu().cores),
            "load": f"{os.getloadavg()[0]:.1f}",
            "timing": "wall clock of whole tuning runs, once; processes were started before",
        }
        path = csv or result_path("tuning-scaling", where).with_suffix(".csv")
        rows = [[f"{line[c]:.3f}" if isinstance(line[c], float) else line[c] for c in COLUMNS] for line in lines]
        write_csv(path, facts, COLUMNS, rows)
        typer.echo(f"Written to {path}")


if __name__ == "__main__":
    typer.run(main)
