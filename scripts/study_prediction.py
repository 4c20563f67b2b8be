"""The loss of choosing decisions for a problem that nobody tuned, by cross-validation over the recorded trials.

    python scripts/study_prediction.py                        # every operator with enough problems; minutes
    python scripts/study_prediction.py --operator nhot_lookup
    python scripts/study_prediction.py --new                  # of problems tuned after the shipped models were trained

Whole problems are left out, a tenth at a time, and each way of choosing decisions for them uses only the others:

default   the first template that fits, at its default point
bucket    the record of the next larger batch of the same problem, as in look-up
nearest   the record of the nearest problem, as in look-up without a model
twin      the record of the same problem in the other 16-bit dtype
ranked    the point with the best prediction, among those measured for the problem
chosen    look-up's prediction: the best among the points that it ranks, at the batch rounded up

Left out is the *problem* alone; or it with *all batches* of it, so that no bucket is left; or every problem of its
*batch*, so that the model has to extrapolate. A choice's loss is its time over the problem's best recorded time. A
choice that was not measured has no loss, so each way is judged by its measured choices ("measured"): for `ranked` all
of them, which favours it, since a search measures promising points. "over_chosen" is the geometric mean of a way's loss
over that of `chosen`, for the "both" problems where both were measured. A recorded best need not be the best of the
space. Needs no GPU. Writes the table into scripts/results/.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from reproduction import RESULTS, studied, write_csv

from tvm_sparse.cli.common import console, table
from tvm_sparse.core import registry, spaces
from tvm_sparse.core.problem import Problem
from tvm_sparse.records import Log
from tvm_sparse.records.queries import best_records, predictor
from tvm_sparse.runtime.lookup import Evidence, choose, known_of, twin_of
from tvm_sparse.tuning import training
from tvm_sparse.tuning.training import Measured

LOGS = Path(__file__).parent.parent / "tuning_logs"
APART: dict[str, Callable[[Problem], object]] = {
    "problem": lambda problem: problem,
    "all batches": training.all_batches,
    "batch": lambda problem: problem.batch_extent,
}
COLUMNS = (
    "operator",
    "left_out",
    "way",
    "problems",
    "measured",
    "geometric_mean",
    "worst",
    "above_1.3",
    "both",
    "over_chosen",
)
WAYS = ("default", "bucket", "nearest", "twin", "ranked", "chosen")
# Least number of problems: with fewer, most choices for those left out have not been measured.
LEAST_PROBLEMS = 20
# Loss that a choice should never exceed.
BAD = 1.3


def losses(
    log: Log, data: Sequence[Measured], apart: Callable[[Problem], object]
) -> dict[str, dict[Problem, float | None]]:
    """By way, the loss for each problem for which it has a choice; None if that choice was not measured."""
    known = known_of(best_records([log.root], log.arch, (log.operator,)))
    found: dict[str, dict[Problem, float | None]] = {way: {} for way in WAYS}
    for kept, out in training.rounds_of(data, apart):
        trees = training.fit(kept)
        predictor = training.predictor_of(log, kept, trees, [1.0])
        keys = {one.problem.key for one in kept}
        records = {key: one for key, one in known.items() if key in keys}
        for one in out:

            def loss(candidate: object, one: Measured = one) -> float | None:
                seconds = one.seconds.get(candidate)  # type: ignore[call-overload]
                return seconds / one.best if seconds else None

            found["default"][one.problem] = loss(spaces.fallback(one.problem, one.machine))
            found["ranked"][one.problem] = training.loss_of(trees, one)
            if (twin := twin_of(one.problem)) is not None and twin.key in known:
                found["twin"][one.problem] = loss(known[twin.key].candidate)
            choice = choose(one.problem, one.machine, Evidence(records))
            if choice.how in ("bucket", "nearby"):
                found["bucket" if choice.how == "bucket" else "nearest"][one.problem] = loss(choice.candidate)
            choice = choose(one.problem, one.machine, Evidence({}, predictor=lambda p=predictor: p))
            found["chosen"][one.problem] = loss(choice.candidate)
    return found


def of_new_problems(logs: Path, arch: str, operators: Iterable[str]) -> None:
    """Print the loss of the shipped models for problems that they do not know, where tuning measured their choice."""
    for name in operators:
        model = predictor([logs], arch, name)
        found = []
        for one in training.measured(Log(logs, arch, name)) if model else ():
            assert model is not None
            choice = model.choose(one.problem, one.machine)
            if one.problem.key not in model.problems and choice and (seconds := one.seconds.get(choice.candidate)):
                found.append(seconds / one.best)
                typer.echo(f"{one.problem.key}: {found[-1]:.3f}  {choice.candidate}")
        if found:
            typer.echo(f"{name}: {len(found)} problems, {mean(found)}, worst {max(found):.3f}")


def mean(ratios: Iterable[float]) -> str:
    """The geometric mean as text; empty without values."""
    ratios = list(ratios)
    return f"{statistics.geometric_mean(ratios):.3f}" if ratios else ""


def main(
    arch: Annotated[str, typer.Option(help="Architecture of the records.")] = "sm_90a",
    operator: Annotated[list[str] | None, typer.Option(help="Only this operator; may be given again.")] = None,
    logs: Annotated[Path, typer.Option(help="Folder of records.")] = LOGS,
    new: Annotated[bool, typer.Option(help="Only what shipped models choose for problems unknown to them.")] = False,
) -> None:
    """Print the table, and write it unless operators are named."""
    if new:
        of_new_problems(logs, arch, operator or registry.operators())
        return
    lines: list[list[object]] = []
    shown = table(*COLUMNS, right=COLUMNS[3:])
    for name in operator or registry.operators():
        log = Log(logs, arch, name)
        data = training.measured(log)
        if len(data) < LEAST_PROBLEMS and not (operator and data):
            continue
        for left_out, apart in APART.items():
            found = losses(log, data, apart)
            for way in WAYS:
                some = {problem: loss for problem, loss in found[way].items() if loss is not None}
                pairs = [loss / other for problem, loss in some.items() if (other := found["chosen"][problem])]
                worst, above = (f"{max(some.values()):.3f}", sum(x > BAD for x in some.values())) if some else ("", "")
                line = [name, left_out, way, len(found[way]), len(some), mean(some.values()), worst, above]
                line += [len(pairs), mean(pairs)]
                lines.append(line)
                shown.add_row(*map(str, line))
    console().print(shown)
    if not operator:
        facts = studied(logs) | {
            "arch": arch,
            "trials": "of templates at their present versions, points of their spaces",
            "loss": "time of the choice over the best recorded time of the problem, where the choice was measured",
        }
        write_csv(RESULTS / f"prediction-{arch}.csv", facts, COLUMNS, lines)


if __name__ == "__main__":
    typer.run(main)
