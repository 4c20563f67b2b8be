"""Train the models with which look-up predicts decisions for problems that nobody tuned; needs no GPU.

    python scripts/train_predictor.py                     # of every operator that has a model; a minute
    python scripts/train_predictor.py --operator softmax_topk --logs records

Reads <logs>/<arch>/<operator>/trials.jsonl, and writes predictor.json beside it; equal trials give equal files. Run it
again after tuning, and after a change of a template's version or features (`Template.features`): look-up ignores a
model with another version of a template. `scripts/study_prediction.py` measures the quality of its choices, and whether
an operator gains from a model. Needs xgboost (extra `tune`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_sparse.cli.common import size
from tvm_sparse.core import registry
from tvm_sparse.records import Log, predictor
from tvm_sparse.tuning import training

LOGS = Path(__file__).parent.parent / "tuning_logs"


def main(
    arch: Annotated[str, typer.Option(help="Architecture of the records.")] = "sm_90a",
    operator: Annotated[
        list[str] | None, typer.Option(help="Only this operator, with a model or none; may be given again.")
    ] = None,
    logs: Annotated[Path, typer.Option(help="Folder of records.")] = LOGS,
) -> None:
    """Train and write the predictors of an architecture."""
    for name in operator or [name for name in registry.operators() if (logs / arch / name / predictor.NAME).exists()]:
        found = training.train(Log(logs, arch, name))
        if found is not None:
            path = found.write(logs)
            typer.echo(f"{path}: {size(path.stat().st_size)}, {len(found.known)} points; {found.provenance}")
        elif operator:
            typer.echo(f"{name}: fewer than {training.LEAST_PROBLEMS} problems were tuned on {arch}")


if __name__ == "__main__":
    typer.run(main)
