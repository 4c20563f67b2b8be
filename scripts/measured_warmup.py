"""The gain of a warm-up that measures, where nothing is tuned: regret before and after it, with all records hidden.

    python scripts/measured_warmup.py --seed 1 --problems 10 --seconds 15          # a GPU
    python scripts/measured_warmup.py --target cpu --problems 2 --seconds 30       # a CPU

Problems are drawn from those whose records ship for this architecture. Look-up gets no records, as on a GPU that nobody
has tuned on: "before" is its choice without them, "after" its choice after `tvm_sparse.warmup(..., seconds=)` has
measured. Both, and the kernel of the shipped record, are then checked and timed in turn in one process.

before, after   time of the kernel over that of the fastest of the three
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from reproduction import provenance, write_csv

from tvm_sparse.cli.common import console, errors, fail, machine_here, require, table, us
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.records import Log
from tvm_sparse.records.queries import best_records
from tvm_sparse.runtime import measuring, paths
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.tuning import fleet
from tvm_sparse.tuning.measured import measured
from tvm_sparse.tuning.plans import Progress
from tvm_sparse.tuning.workbench import NoValidRecord

COLUMNS = ("problem", "before", "after", "before_us", "after_us", "tuned_us", "seconds", "chosen", "measured", "note")
ROUNDS = 5


def main(
    target: str = "auto",
    seed: Annotated[int, typer.Option(help="Of the draw.")] = 0,
    problems: Annotated[int, typer.Option(min=1, help="How many.")] = 10,
    seconds: Annotated[float, typer.Option(min=1, help="The budget of each.")] = 15.0,
    operators: Annotated[str, typer.Option(help="Only these, separated by commas.")] = "",
    csv: Annotated[Path | None, typer.Option(help="File to write.  \\[default: none]")] = None,
) -> None:
    with errors():
        where = machine_here(target, "measuring")
        require("tune", *(["cuda"] if where.kind == "cuda" else []))
        recorded = best_records([paths.shipped_logs()], where.arch)
        keys = sorted(key for key in recorded if not operators or key.partition("/")[0] in operators.split(","))
        if not keys:
            fail(f"no record ships for {where.arch}")
        drawn = random.Random(seed).sample(keys, min(problems, len(keys)))
        builders = machine.default_builders()
        gpus = [machine.gpus().index(where)] if where.kind == "cuda" else [0]
        lines: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            own = Dispatcher(logs=(folder / "logs",), shipped=folder / "none", cache=folder / "cache")
            chosen = {}
            for key in drawn:
                problem, began = parse(key), time.monotonic()
                before = own.choice(problem, where).candidate
                own.measure([problem], where, seconds, builders)
                chosen[key] = before, own.choice(problem, where).candidate, time.monotonic() - began
                typer.echo(f"{problem.typed}: {chosen[key][2]:.1f} s")
            measuring.kept.close()  # its processes would share the device with the comparison
            with fleet.local(where, builders, gpus=gpus) as devices:
                for key in drawn:
                    lines.append(compared(key, *chosen[key], recorded[key][0].candidate, where, folder, devices))
        show(lines)
        if csv:
            facts = provenance(where) | {"seed": str(seed), "budget": f"{seconds:g} s a problem", "records": "none"}
            write_csv(csv, facts, COLUMNS, ([line[column] for column in COLUMNS] for line in lines))


def compared(
    key: str, before: Any, after: Any, spent: float, tuned: Any, where: Any, folder: Path, devices: fleet.Fleet
) -> dict[str, Any]:
    """A line: the three kernels of a problem, timed in turn."""
    problem = parse(key)
    line: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    line |= {"problem": key, "seconds": f"{spent:.1f}", "chosen": before, "measured": after}
    last: list[Progress] = []
    given = [c for c in (before, after, tuned) if spaces.refusal(c, problem, where) is None]
    log = Log(folder / "compared", where.arch, problem.operator)
    try:
        measured(problem, where, given, log, devices, show=last.append, rounds=ROUNDS, strategy="compared")
    except NoValidRecord as error:
        return line | {"note": str(error)}
    medians = last[-1].medians
    times = {name: medians.get(one) for name, one in (("before", before), ("after", after), ("tuned", tuned))}
    best = min(filter(None, times.values()), default=None)
    line |= {f"{name}_us": us(taken) for name, taken in times.items()}
    line |= {name: f"{times[name] / best:.3f}" for name in ("before", "after") if times[name] and best}
    return line


def show(lines: list[dict[str, Any]]) -> None:
    right = ("before", "after", "before_us", "after_us", "tuned_us", "seconds")
    made = table("problem", *right, "note", right=right)
    for line in lines:
        made.add_row(parse(line["problem"]).typed, *(str(line[name]) for name in right), line["note"])
    console().print(made)
    both = [line for line in lines if line["before"] and line["after"]]
    for name in ("before", "after") if both else ():
        regrets = [float(line[name]) for line in both]
        typer.echo(f"{name}: {statistics.geometric_mean(regrets):.3f} in the mean, {max(regrets):.2f} at most")


if __name__ == "__main__":
    typer.run(main)
