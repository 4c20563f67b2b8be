"""What the choice of decisions for a problem that nobody tuned loses, by cross-validation over the recorded trials.

    python scripts/study_prediction.py                        # every operator with enough problems; minutes
    python scripts/study_prediction.py --operator nhot_lookup

Whole problems are left out, a tenth at a time, and each way to choose decisions for them knows the others alone:

default   the first template that fits, at its default point
bucket    the record of the next larger batch of the same problem, as look-up takes it
nearest   the record of the nearest problem, as look-up takes it without a model
ranked    the fastest by the model of the points that were measured for the problem
chosen    as look-up predicts: the fastest by the model of the points that it ranks, at the batch rounded up

Left out is the *problem* alone; or it with *all batches* of it, so that no bucket is left; or every problem of its
*batch*, so that the model has to extrapolate. A choice's loss is its time over the best time that is recorded of the
problem. What nobody measured for it has no loss, so each way is judged by the choices that were measured ("measured"):
for `ranked` all of them, which flatters it, since most points were measured because a search had hopes of them. A
recorded best need not be the best of the space. Needs no GPU. Writes the table into scripts/results/.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from reproduction import RESULTS, write_csv

from tvm_sparse.cli.common import console, table
from tvm_sparse.core import registry, spaces
from tvm_sparse.core.problem import Problem
from tvm_sparse.records import Log
from tvm_sparse.records.queries import best_records
from tvm_sparse.runtime.lookup import Evidence, Known, choose
from tvm_sparse.tuning import training
from tvm_sparse.tuning.training import Measured

LOGS = Path(__file__).parent.parent / "tuning_logs"
APART: dict[str, Callable[[Problem], object]] = {
    "problem": lambda problem: problem,
    "all batches": training.all_batches,
    "batch": lambda problem: problem.batch_extent,
}
COLUMNS = ("operator", "left_out", "way", "problems", "measured", "geometric_mean", "worst", "above_1.3")
# Of how far above the best a choice should never be.
BAD = 1.3


def losses(log: Log, data: Sequence[Measured], apart: Callable[[Problem], object]) -> dict[str, list[float | None]]:
    """By way, the loss of each problem for which it has a choice; None where nobody measured that choice."""
    known = {
        key: Known(best.candidate, figures)
        for key, (best, figures) in best_records([log.root], log.arch, (log.operator,)).items()
    }
    found: dict[str, list[float | None]] = {way: [] for way in ("default", "bucket", "nearest", "ranked", "chosen")}
    for kept, out in training.rounds_of(data, apart):
        trees = training.fit(kept)
        predictor = training.predictor_of(log, kept, trees, [1.0])
        keys = {one.problem.key for one in kept}
        records = {key: one for key, one in known.items() if key in keys}
        for one in out:

            def loss(candidate: object, one: Measured = one) -> float | None:
                seconds = one.seconds.get(candidate)  # type: ignore[call-overload]
                return seconds / one.best if seconds else None

            found["default"].append(loss(spaces.fallback(one.problem, one.machine)))
            found["ranked"].append(training.loss_of(trees, one))
            choice = choose(one.problem, one.machine, Evidence(records))
            if choice.how in ("bucket", "nearby"):
                found["bucket" if choice.how == "bucket" else "nearest"].append(loss(choice.candidate))
            choice = choose(one.problem, one.machine, Evidence({}, predictor=lambda p=predictor: p))
            found["chosen"].append(loss(choice.candidate))
    return found


def main(
    arch: Annotated[str, typer.Option(help="Architecture of the records.")] = "sm_90a",
    operator: Annotated[list[str] | None, typer.Option(help="Only this operator; may be given again.")] = None,
    logs: Annotated[Path, typer.Option(help="Folder of records.")] = LOGS,
) -> None:
    """Print the table, and write it unless operators are named."""
    lines: list[list[object]] = []
    shown = table(*COLUMNS, right=COLUMNS[3:])
    for name in operator or registry.operators():
        log = Log(logs, arch, name)
        data = training.measured(log)
        if len(data) < training.LEAST_PROBLEMS and not (operator and data):
            continue
        for left_out, apart in APART.items():
            for way, all_losses in losses(log, data, apart).items():
                some = [loss for loss in all_losses if loss is not None]
                figures = [f"{statistics.geometric_mean(some):.3f}", f"{max(some):.3f}"] if some else ["", ""]
                above = sum(loss > BAD for loss in some)
                line = [name, left_out, way, len(all_losses), len(some), *figures, above if some else ""]
                lines.append(line)
                shown.add_row(*map(str, line))
    console().print(shown)
    if not operator:
        facts = {
            "arch": arch,
            "trials": "of templates at their present versions, points of their spaces",
            "loss": "time of the choice over the best recorded time of the problem, where the choice was measured",
        }
        write_csv(RESULTS / f"prediction-{arch}.csv", facts, COLUMNS, lines)


if __name__ == "__main__":
    typer.run(main)
