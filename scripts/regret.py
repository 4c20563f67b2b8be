"""The loss of calls whose problem nobody tuned: look-up's choice for drawn problems, compared with tuning them.

    python scripts/regret.py --seed 1 --problems 40 --minutes 9 --logs records    # a GPU and 16 cores
    python scripts/regret.py --target cpu --operators softmax,logsumexp --problems 4 --trials 8
    python scripts/regret.py --summary scripts/results/regret-h200.csv            # the tables of an earlier run

On a GPU many problems are tuned at the same time: while one is timed, which it is alone, others are verified, built and
searched. All GPUs of one kind take part; a problem is timed on one of them.

Problems are drawn from the distributions that operators declare (`core.distribution`), for the operators in turn; a
seed determines them. For each one look-up chooses a kernel from the shipped records, or those of `--records`, and the
problem is tuned: the chosen kernel, the fallback, winners of similar problems and a search's proposals are measured.
Then the chosen kernel, the fallback and the fastest few, if they are right, are timed in turn in one process.

regret          time of the chosen kernel over that of the fastest one in these rounds
over_fallback   time of the chosen kernel over that of the fallback
tuning_gain     time of the fallback over that of the fastest one
bad, lost       shares of choices with a regret above 1.5, and slower than the fallback by more than 5 %

A problem's line is written when it is finished. After `--minutes` no problem is begun, searches end after the current
batch, and problems that were not reached are reported. `--logs` keeps the trials for `tvm-sparse db merge`.
"""

from __future__ import annotations

import contextlib
import csv as csvs
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from reproduction import provenance, read_csv, result_path, write_csv

from tvm_sparse.cli.common import console, errors, fail, machine_here, require, table
from tvm_sparse.core import distribution, machine, registry, spaces
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.records import Best, Log
from tvm_sparse.runtime import paths
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.runtime.lookup import Choice
from tvm_sparse.tuning import fleet
from tvm_sparse.tuning.plans import Plan, Progress, before_search, recorded, uncounted
from tvm_sparse.tuning.session import stop_on_interrupt, tune_all
from tvm_sparse.tuning.workbench import NoValidRecord

COLUMNS = (
    "problem",
    "operator",
    "how",
    "regret",
    "over_fallback",
    "chosen_microseconds",
    "fallback_microseconds",
    "tuned_microseconds",
    "trials",
    "chosen",
    "fallback",
    "tuned",
    "record",
    "compiled_for",
    "note",
)
BAD, LOST = 1.5, 1.05
# One in this many trials measures a winner of a similar problem.
PROVEN_SHARE = 2
# Problems that are tuned on a GPU at the same time. A problem needs it for a tenth of its time; the rest goes to
# compilers, references and proposals.
SEATS = 6
# Seconds to check and to time a candidate. A kernel of a drawn problem takes microseconds or milliseconds: one that
# takes longer hangs, and all others wait for it.
LIMIT = 10.0


def draw(operators: Sequence[str], seed: int, count: int) -> list[Problem]:
    """`count` different problems, for the operators in turn; an operator's problems do not depend on the other
    operators.
    """
    kinds = {name: registry.find(name).problem for name in operators}
    generators = {name: random.Random(f"{seed}/{name}") for name in operators}
    found: dict[Problem, None] = {}
    order = list(operators)
    random.Random(seed).shuffle(order)
    while len(found) < count:
        for name in order[: count - len(found)]:
            found[distribution.problem(kinds[name], generators[name])] = None
    return list(found)


def plan_of(
    problem: Problem, where: Machine, choice: Choice, trials: int, log: Log, records: Log, builders: int
) -> Plan:
    """A plan whose final includes the chosen kernel, and whose first trials are those that the records suggest."""
    tables, _ = spaces.searched(problem, where)
    proposed = before_search(problem, where, tables, records, trials // PROVEN_SHARE)
    if spaces.refusal(choice.candidate, problem, where) is None:
        proposed = list(dict.fromkeys([choice.candidate, *proposed]))
    rivals = {choice.candidate: choice.compiled_for}
    done = len(recorded(log, problem).get(problem.key, {}))
    left = max(0, trials - done)
    return uncounted(problem, where, left, builders, proposed=tuple(proposed), rivals=rivals, limit=LIMIT)


def line_of(plan: Plan, choice: Choice, found: Best | NoValidRecord, progress: Progress | None) -> dict[str, Any]:
    """A CSV line; without times if nothing could be measured, or the chosen kernel was wrong."""
    fallback = spaces.fallback(plan.problem, plan.machine)
    medians = progress.medians if progress else {}
    chosen, untuned = medians.get(choice.candidate), medians.get(fallback)
    best = min(medians, key=lambda candidate: medians[candidate], default=None)
    line: dict[str, Any] = dict.fromkeys(COLUMNS, "")
    line |= {
        "problem": plan.problem.key,
        "operator": plan.problem.operator,
        "how": choice.how,
        "trials": progress.measured if progress else 0,
        "chosen": choice.candidate,
        "fallback": fallback,
        "tuned": best or "",
        "record": choice.record or "",
        "compiled_for": choice.compiled_for.key if choice.compiled_for != plan.problem else "",
    }
    times = {"chosen": chosen, "fallback": untuned, "tuned": medians[best] if best else None}
    line |= {f"{name}_microseconds": f"{seconds * 1e6:.3f}" for name, seconds in times.items() if seconds}
    if isinstance(found, NoValidRecord):
        line["note"] = str(found)
    elif chosen is None:
        line["note"] = "the chosen kernel failed in the final"
    if chosen and best:
        line["regret"] = f"{chosen / medians[best]:.4f}"
    if chosen and untuned:
        line["over_fallback"] = f"{chosen / untuned:.4f}"
    return line


def groups(lines: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], list[Mapping[str, str]]]:
    """The lines with times: all together, by operator, and by way of look-up."""
    found: dict[tuple[str, str], list[Mapping[str, str]]] = {}
    timed = [line for line in lines if line["regret"] and line["over_fallback"]]
    for name, of in (("operator", lambda line: line["operator"]), ("way", lambda line: line["how"])):
        for line in sorted(timed, key=of):
            found.setdefault((name, of(line)), []).append(line)
    return {("all", ""): timed, **found} if timed else {}


def summary(lines: Iterable[Mapping[str, str]]) -> list[list[str]]:
    """For each group the number of problems, geometric means, the worst, and shares of bad and lost choices."""
    rows = []
    for (name, value), some in groups(lines).items():
        regrets, over = ([float(line[column]) for line in some] for column in ("regret", "over_fallback"))
        gain = [regret / ratio for regret, ratio in zip(regrets, over, strict=True)]
        rows.append(
            [
                " ".join(filter(None, (name, value))),
                str(len(some)),
                f"{statistics.geometric_mean(regrets):.3f}",
                f"{max(regrets):.2f}",
                f"{sum(regret > BAD for regret in regrets) / len(some):.0%}",
                f"{statistics.geometric_mean(over):.3f}",
                f"{max(over):.2f}",
                f"{sum(ratio > LOST for ratio in over) / len(some):.0%}",
                f"{statistics.geometric_mean(gain):.3f}",
            ]
        )
    return rows


def show(lines: Sequence[Mapping[str, str]]) -> None:
    """Print the tables."""
    columns = ("of", "problems", "regret", "worst", "bad", "over_fallback", "worst", "lost", "tuning_gain")
    shown = table(*columns, right=columns[1:])
    for row in summary(lines):
        shown.add_row(*row)
    console().print(shown)
    for line in lines:
        if line["note"]:
            typer.echo(f"{line['problem']}: {line['note']}")


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a CSV that `main` wrote."""
    return read_csv(path)[1]


def measure(
    plans: Mapping[Plan, Choice],
    root: Path,
    where: Machine,
    builders: int,
    seed: int,
    stop: Callable[[], bool],
    done: Callable[[dict[str, Any]], None],
) -> None:
    """Tune all plans, and call `done` with the line of each when it is finished."""
    last: dict[Plan, Progress] = {}

    def end(plan: Plan, found: Best | NoValidRecord) -> None:
        done(line_of(plan, plans[plan], found, last.get(plan)))

    with fleet.local(where, builders, gpus=like(where), seats=SEATS) as devices:
        began = time.monotonic()
        tune_all(
            list(plans),
            root,
            devices,
            seed=seed,
            show=lambda progress: last.update({progress.plan: progress}),
            end=end,
            stop=stop,
        )
        for one in devices.devices:
            spent = time.monotonic() - began
            typer.echo(
                f"{one.name}: in use for {one.turn.busy:.0f} of {spent:.0f} s, and timed for {one.turn.timed:.0f};"
                f" seats verified for {one.turn.checked:.0f} and waited for {one.turn.waited:.0f}",
                err=True,
            )


def like(where: Machine) -> list[int]:
    """Numbers of the GPUs that are like this machine; [0] for a CPU."""
    return [number for number, gpu in enumerate(machine.gpus()) if gpu == where] if where.kind == "cuda" else [0]


def main(
    seed: Annotated[int, typer.Option(help="Of the problems, their inputs and the searches.")] = 0,
    problems: Annotated[int, typer.Option(min=1, help="How many, over all operators.")] = 40,
    operators: Annotated[str | None, typer.Option(metavar="NAME,...", help="Only these.")] = None,
    trials: Annotated[int, typer.Option(min=1, help="Of the tuning of each problem.")] = 48,
    minutes: Annotated[float | None, typer.Option(min=0.1, help="After which nothing new is begun.")] = None,
    target: Annotated[str, typer.Option(help="auto, cpu or cuda, of this machine.")] = "auto",
    records: Annotated[
        Path | None, typer.Option(help="Folder of records that look-up knows.  [default: those that ship]")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder that keeps the trials.  [default: none]")] = None,
    builders: Annotated[int | None, typer.Option(min=1, help="Processes that compile.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Where to write.  [default: scripts/results/regret-...csv]")] = None,
    summary: Annotated[Path | None, typer.Option(help="Print the tables of this CSV, and measure nothing.")] = None,
) -> None:
    """Measure the regret of look-up on drawn problems."""
    if summary is not None:
        show(read(summary))
        return
    with errors():
        began = time.monotonic()
        where = machine_here(target, "tuning")
        require("tune", *(["cuda"] if where.kind == "cuda" else []))
        named = operators.split(",") if operators else list(registry.operators())
        known = records or paths.shipped_logs()
        if not known.is_dir():
            fail(f"records: {known} is no folder")
        drawn = draw(named, seed, problems)
        # Verification is short for drawn problems, so that builders may take nearly all cores.
        count = builders or max(1, machine.cpu().cores - 3 * (len(like(where)) if where.kind == "cuda" else 0))
        with contextlib.ExitStack() as stack:
            nothing = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tvm_sparse-regret-")))
            root = logs or nothing / "logs"
            dispatcher = Dispatcher(logs=(known,), shipped=nothing / "none", cache=nothing / "cache")
            plans: dict[Plan, Choice] = {}
            for problem in drawn:
                choice = dispatcher.choice(problem, where)
                pair = (Log(folder, where.arch, problem.operator) for folder in (root, known))
                plans[plan_of(problem, where, choice, trials, *pair, count)] = choice
            typer.echo(f"{len(plans)} problems are planned in {time.monotonic() - began:.0f} s", err=True)
            path = csv or result_path("regret", where).with_suffix(".csv")
            facts = provenance(where) | {
                "seed": str(seed),
                "trials": f"{trials} a problem",
                "records": "those that ship" if records is None else str(records),
                "timing": "median of 5 rounds in turn in one process, CUDA graphs on a GPU; inputs not rotated (hot)",
            }
            write_csv(path, facts, COLUMNS, ())
            lines: list[dict[str, Any]] = []

            def done(line: dict[str, Any]) -> None:
                lines.append(line)
                with path.open("a", newline="") as file:
                    csvs.writer(file, lineterminator="\n").writerow([line[column] for column in COLUMNS])
                ratio = line["regret"] or "none"
                typer.echo(
                    f"{len(lines)}/{len(plans)} at {time.monotonic() - began:.0f} s: {line['problem']}, {line['how']}:"
                    f" regret {ratio}, over the fallback {line['over_fallback'] or 'none'}",
                    err=True,
                )

            deadline = began + 60 * minutes if minutes else float("inf")
            interrupted = stack.enter_context(stop_on_interrupt())
            measure(plans, root, where, count, seed, lambda: interrupted() or time.monotonic() > deadline, done)
        show([{name: str(value) for name, value in line.items()} for line in lines])
        reached = {line["problem"] for line in lines}
        if left := [problem.key for problem in drawn if problem.key not in reached]:
            typer.echo(f"{len(left)} of {len(drawn)} problems were not reached: {', '.join(left)}")
        short = sum(line["trials"] < trials and not line["note"] for line in lines)
        if short:
            typer.echo(f"{short} problems had fewer than {trials} trials: their space is smaller, or the time was over")
        typer.echo(f"Written to {path}")


if __name__ == "__main__":
    typer.run(main)
