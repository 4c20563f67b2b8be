"""Does `tune` reach what ships with half of the trials?

    python scripts/half_the_trials.py                       # from the records that ship: half a minute, without a GPU
    python scripts/half_the_trials.py --measure --list      # problems that would be tuned, and with how many trials
    python scripts/half_the_trials.py --measure             # on a GPU: tunes them anew; about six minutes

From the records:

search      best after half of the trials of a problem's first session, over the best after all of them. Most of these
            sessions had no model, and no winners of similar problems
start       best of the points that a run with half the problem's trials would try before its search (the fallback,
            defaults, predictions of a model of the other problems, and winners of those), over the problem's best
            recorded time. Only measured points count; `measured` is their share

"Half" refers to the distinct points in the log at the templates' present versions. Rows are for problems with at least
`least` trials.

Measured: selected problems are tuned anew with half of the trials, in a folder with the records of all other problems
and with models trained on those alone. The new winner, the shipped one, and the fallback are then timed in turn;
`ratio` is that of the first two, below 1 if the new point is faster. Writes CSVs into scripts/results/.
"""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from reproduction import RESULTS, provenance, result_path, studied, write_csv

from tvm_sparse.cli.common import console, duration, errors, machine_here, require, table, us
from tvm_sparse.core import machine, registry, scratch, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, ProblemError
from tvm_sparse.records import Best, Log
from tvm_sparse.research import study
from tvm_sparse.research.bootstrap import ratio_interval
from tvm_sparse.research.trials import trials
from tvm_sparse.tuning import fleet, plans, session, training, workbench
from tvm_sparse.tuning.fleet import Fleet
from tvm_sparse.tuning.training import Measured

LOGS = Path(__file__).parent.parent / "tuning_logs"
NAME = "half-the-trials"
# Problems of different operators, winning templates, dtypes and sizes, among those with most trials, since half of a
# few trials is nearly nothing.
MEASURED = {
    "cuda": (
        "softmax_topk/batch=4000,vocab=10000,k=5",
        "softmax_topk/batch=1024,vocab=10240,k=50",
        "softmax_topk/batch=64,vocab=128256,k=5",
        "softmax_topk/batch=12,vocab=128256,k=50",
        "bsr_matmul/m=8,k=1024,n=4096,block=32,sparsity=0.9,dtype=float16",
        "bsr_matmul/m=64,k=1024,n=4096,block=16,sparsity=0.9,dtype=float16",
        "bsr_matmul/m=8,k=1024,n=1024,block=16,sparsity=0.85",
        "bsr_matmul/m=8,k=1024,n=1024,block=8,sparsity=0.8",
        "bsr_matmul/m=1,k=128,n=768,block=32,sparsity=0.8",
        "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=100,dtype=float16",
        "nhot_lookup/rows=100,vocab=10240,width=512,nonzeros=10",
        "nhot_lookup/rows=8192,vocab=100000,width=128,nonzeros=20",
        "softmax/batch=512,vocab=10240",
        "head_topk/batch=12,vocab=40000,hidden=1000,k=12,dtype=float16",
    ),
    "llvm": ("bsr_matmul/m=8,k=1024,n=1024,block=16,sparsity=0.9",),
}
LEAST = (8, 32)
# Rounds: those of a final, and twice as many again, to distinguish two points.
ROUNDS = 15
RECORDED_COLUMNS = (
    "least",
    "operator",
    "way",
    "problems",
    "trials",
    "loss",
    "low",
    "high",
    "worst",
    "close",
    "measured",
)
MEASURED_COLUMNS = (
    "problem", "shipped_trials", "trials", "seconds", "shipped", "shipped_us", "found", "found_us", "fallback_us",
    "ratio",
)  # fmt: skip
SHOWN = ("problem", "shipped_trials", "trials", "seconds", "shipped_us", "found_us", "fallback_us", "ratio")


@dataclass(frozen=True)
class Loss:
    """The loss from stopping after half of the trials."""

    operator: str
    way: str
    trials: int  # of the whole session
    ratio: float
    measured: float = 1.0  # share of the tried points with a known time


def counts(log: Log) -> dict[str, int]:
    """By problem, the number of distinct points tried at the templates' present versions."""
    present = {template.name: template.version for template in spaces.templates(log.operator)}
    tried = {
        (trial.problem, trial.candidate)
        for trial in log.read().timed(fresh=False)
        if trial.outcome != "environment" and present.get(trial.candidate.template) == trial.candidate.version
    }
    found: dict[str, int] = {}
    for key, _ in tried:
        found[key] = found.get(key, 0) + 1
    return found


# ------------------------------------------------------------------------------------------------ from the records


def searched(logs: Path, arch: str, operator: str) -> list[Loss]:
    """The loss `search` of each problem's first session."""
    rows = study.halves(trials(logs, operator=operator, arch=arch), least=min(LEAST))
    return [Loss(operator, "search", row.trials, row.loss) for row in rows.itertuples()]


def started(logs: Path, arch: str, operator: str) -> list[Loss]:
    """The loss `start` of each problem, with a model trained without a tenth of the problems in all their batches."""
    log = Log(logs, arch, operator)
    data, tried = training.measured(log), counts(log)
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for kept, out in training.rounds_of(data):
            others = without(log, {one.problem.key for one in out}, Path(folder) / f"{len(found)}", kept)
            for one in out:
                budget = tried[one.problem.key] // 2
                tables, _ = spaces.searched(one.problem, one.machine)
                first = plans.before_search(one.problem, one.machine, tables, others, budget)[:budget]
                times = [one.seconds[c] for c in first if c in one.seconds]
                if tried[one.problem.key] >= min(LEAST) and times:
                    share = len(times) / len(first)
                    found.append(Loss(operator, "start", tried[one.problem.key], min(times) / one.best, share))
        return found


def without(log: Log, keys: Collection[str], root: Path, data: Sequence[Measured] | None = None) -> Log:
    """A log in another folder without these problems, with a model trained without them."""
    contents = log.read()
    made = Log(root, log.arch, log.operator)
    made.append(*contents.sessions, *(trial for trial in contents.trials if trial.problem not in keys))
    made.append_best(*(best for best in log.read_best().bests if best.problem not in keys))
    data = training.measured(made) if data is None else data
    if len(data) >= training.LEAST_PROBLEMS:
        training.predictor_of(made, data, training.fit(data), [1.0]).write(root)
    return made


def summary(losses: Sequence[Loss]) -> list[list[object]]:
    """A line of `RECORDED_COLUMNS` for each least number of trials, way and operator."""
    lines: list[list[object]] = []
    for least in LEAST:
        for way in ("search", "start"):
            mine = [loss for loss in losses if loss.way == way and loss.trials >= least]
            for operator in (*dict.fromkeys(loss.operator for loss in mine), "all"):
                some = [loss for loss in mine if operator in ("all", loss.operator)]
                ratios = [loss.ratio for loss in some]
                mean = ratio_interval(np.log(ratios))
                middle = statistics.median_low(loss.trials for loss in some)
                ends = ["" if x != x else f"{x:.3f}" for x in (mean.low, mean.high)]
                close = statistics.fmean(ratio <= study.CLOSE for ratio in ratios)
                known = statistics.fmean(loss.measured for loss in some)
                line = [least, operator, way, len(some), middle, f"{mean.value:.3f}", *ends, f"{max(ratios):.3f}"]
                lines.append([*line, f"{close:.2f}", f"{known:.2f}"])
    return lines


def show(columns: Sequence[str], lines: Sequence[Sequence[object]], texts: Collection[str]) -> None:
    """Print a table; the columns named in `texts` hold no figures."""
    shown = table(*columns, right=[name for name in columns if name not in texts])
    for line in lines:
        shown.add_row(*map(str, line))
    console().print(shown)


def from_records(logs: Path, arch: str) -> None:
    """Print and write the table for the recorded trials."""
    losses = []
    for operator in registry.operators():
        if Log(logs, arch, operator).best():
            losses += searched(logs, arch, operator) + started(logs, arch, operator)
    lines = summary(losses)
    show(RECORDED_COLUMNS, lines, ("operator", "way"))
    facts = studied(logs) | {
        "arch": arch,
        "loss": "best time with half of the trials over the best recorded, geometric mean with 95 % bootstrap interval",
        "search": "after half of the trials of the session that met a problem first, over the best of that session",
        "start": "of what a run of half the trials tries before it searches, as far as that was measured",
    }
    write_csv(RESULTS / f"{NAME}-{arch}.csv", facts, RECORDED_COLUMNS, lines)


# ------------------------------------------------------------------------------------------------------- measured


@dataclass(frozen=True)
class Shipped:
    """A problem whose record ships, and the number of its trials."""

    problem: Problem
    best: Best
    trials: int

    @property
    def half(self) -> int:
        """Number of trials for tuning it anew."""
        return self.trials // 2


def shipped(logs: Path, where: Machine, keys: Sequence[str]) -> list[Shipped]:
    """The shipped records of these problems; those without a valid one are named and left out."""
    found = []
    for key in keys:
        problem = registry.parse(key)
        log = Log(logs, where.arch, problem.operator)
        best = log.best().get(problem.key)
        reason = "there is none" if best is None else spaces.refusal(best.candidate, problem, where)
        if best is None or reason:
            typer.echo(f"{problem.typed}: its record of {where.arch} is left out: {reason}")
            continue
        found.append(Shipped(problem, best, counts(log)[problem.key]))
    return found


def in_turn(
    problem: Problem, where: Machine, candidates: Sequence[Candidate], devices: Fleet, seed: int
) -> Mapping[Candidate, float]:
    """Median seconds of each, in rounds on one device, so that a drift of the machine affects all."""
    times: dict[Candidate, list[float]] = {candidate: [] for candidate in candidates}
    with scratch.folder() as folder, devices.lease(where) as lease:
        bench = workbench.Bench(problem, where, spaces.fallback(problem, where), seed, folder, lease)
        seat = bench.seat()
        for _ in range(ROUNDS):
            for trial in bench.measure(list(times), "in-turn", 0, seat):
                if trial.outcome != "ok":
                    raise workbench.NoValidRecord(f"{problem}: {trial.candidate} failed: {trial.reason}")
                times[trial.candidate].append(trial.median)
    return {candidate: statistics.median(seconds) for candidate, seconds in times.items()}


def tuned_anew(one: Shipped, where: Machine, root: Path, devices: Fleet, builders: int, seed: int) -> list[object]:
    """A line: tune the problem in a folder without its records, and time the winner and the shipped kernel in turn."""
    began = time.monotonic()
    log = Log(root, where.arch, one.problem.operator)
    plan = plans.make_plan(one.problem, where, one.half, log, builders)
    found = session.tune(plan, log, seed=seed, using=devices).candidate
    taken = time.monotonic() - began
    fallback = spaces.fallback(one.problem, where)
    times = in_turn(one.problem, where, list(dict.fromkeys([found, one.best.candidate, fallback])), devices, seed)
    ratio = times[found] / times[one.best.candidate]
    line = [
        one.problem.typed,
        one.trials,
        plan.trials,
        f"{taken:.0f}",
        one.best.candidate,
        us(times[one.best.candidate]),
    ]
    return [*line, found, us(times[found]), us(times[fallback]), f"{ratio:.4f}"]


def measure(logs: Path, target: str, seconds: float, seed: int, keep: Path | None) -> None:
    """Tune the problems of `MEASURED` anew, one after another; `keep` is a folder for their records."""
    if keep and keep.exists():
        raise ProblemError(f"keep: {keep} exists; what is in it would be known to the runs")
    where, began = machine_here(target, "tuning"), time.monotonic()
    wanted = shipped(logs, where, MEASURED[where.kind])
    if not wanted:
        raise ProblemError(f"{logs}: no problem has a record of {where.arch}")
    builders, longest = machine.default_builders(), 0.0
    lines: list[list[object]] = []
    with contextlib.ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        devices = stack.enter_context(fleet.local(where, builders))
        for operator in dict.fromkeys(one.problem.operator for one in wanted):
            keys = {one.problem.key for one in wanted if one.problem.operator == operator}
            without(Log(logs, where.arch, operator), keys, folder)
        for one in wanted:
            started = time.monotonic()
            if started - began + longest > seconds:
                typer.echo(f"{one.problem.typed}: left out, as {seconds:.0f} s are nearly over")
                continue
            lines.append(tuned_anew(one, where, folder, devices, builders, seed))
            longest = max(longest, time.monotonic() - started)
            typer.echo(f"{duration(time.monotonic() - began)}: {one.problem.typed}: ratio {lines[-1][-1]}")
            write_measured(lines, where, seed)  # an interrupted run keeps its results
    show(SHOWN, [[line[MEASURED_COLUMNS.index(name)] for name in SHOWN] for line in lines], ("problem",))
    typer.echo(verdict(lines))


def verdict(lines: Sequence[Sequence[object]]) -> str:
    """Mean and worst ratio, in words."""
    ratios = [float(str(line[MEASURED_COLUMNS.index("ratio")])) for line in lines]
    close = sum(ratio <= study.CLOSE for ratio in ratios)
    mean = ratio_interval(np.log(ratios))
    ends = f" [{mean.low:.3f}, {mean.high:.3f}]" if mean.low == mean.low else ""
    return f"{mean.value:.3f}{ends} over {len(ratios)} problems, worst {max(ratios):.3f}, {close} within 2 %"


def write_measured(lines: Sequence[Sequence[object]], where: Machine, seed: int) -> None:
    """Write the measurements so far."""
    facts = provenance(where)
    facts["timing"] = f"as a final of tune: median of {ROUNDS} rounds in turn; inputs not rotated (hot)"
    facts |= {"ratio": verdict(lines), "seed": str(seed)}
    write_csv(result_path(NAME, where).with_suffix(".csv"), facts, MEASURED_COLUMNS, lines)


def main(
    arch: Annotated[str, typer.Option(help="Architecture of the records.")] = "sm_90a",
    logs: Annotated[Path, typer.Option(help="Folder of records.")] = LOGS,
    measured: Annotated[bool, typer.Option("--measure", help="Tune anew on this machine.")] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="Of --measure: the problems and their trials, and stop.")
    ] = False,
    target: Annotated[str, typer.Option(help="Of --measure: cuda or cpu.")] = "cuda",
    seconds: Annotated[float, typer.Option(help="Of --measure: no problem is begun that would end later.")] = 3600.0,
    seed: Annotated[int, typer.Option(help="Of --measure: of inputs and search.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(help="Of --measure: a new folder for its records, to be studied.")
    ] = None,
) -> None:
    with errors():
        if not measured:
            from_records(logs, arch)
        elif listed:
            where = machine.resolve(arch if target == "cuda" else target)
            for one in shipped(logs, where, MEASURED[where.kind]):
                typer.echo(f"{one.problem.typed}: {one.half} of {one.trials} trials")
        else:
            require("tune", *(["cuda"] if target == "cuda" else []))
            measure(logs, target, seconds, seed, keep)


if __name__ == "__main__":
    typer.run(main)
