"""Studies of the shipped trials: which templates and decisions matter, how good cost models are, what transfers.

    python scripts/study_trials.py        # two minutes, without a GPU

Reads tuning_logs/ and the completely measured spaces (results/spaces/). Writes scripts/results/trials-*.csv, from which
figures.py fills docs/laboratory.md, and the page's plots. For the gain of tuning see tuning_gain.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pandas
from reproduction import RESULTS, studied, write_csv

from tvm_sparse.cli.common import console, table
from tvm_sparse.research import plots, study
from tvm_sparse.research.trials import trials

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "tuning_logs"
SPACES = sorted((RESULTS / "spaces").glob("*.jsonl.xz"))
IMAGES = ROOT / "docs" / "images"
GPU = "sm_90a"
# Tables of the page; `study` prints the others too.
PARTS = ("distribution", "failures", "importance", "models", "transfer", "budget")
OF_SPACES = ("importance", "models", "budget")


def write(name: str, found: pandas.DataFrame, data: str, logs: Path | None = None) -> None:
    """Print a table and write it to results/trials-NAME.csv; `logs` are the records it is made from, if it is."""
    shown = study.shown(found)
    made = table(*shown.columns, title=name, right=[c for c in shown if found[c].dtype.kind in "fiu"])
    for row in shown.itertuples(index=False):
        made.add_row(*row)
    console().print(made)
    interval = "95 %, by the bootstrap; none where there are fewer than five values"
    facts = studied(logs) | {"data": data, "interval": interval}
    cells = ([_text(value) for value in row] for row in found.itertuples(index=False))
    write_csv(RESULTS / f"trials-{name}.csv", facts, list(found.columns), cells)


def _text(value: object) -> object:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value:.4f}"
    return value


def draw(recorded: pandas.DataFrame, tables: dict[str, pandas.DataFrame]) -> Iterable[Path]:
    """The plots of the page."""
    gpu = recorded[recorded["arch"] == GPU]
    products, heads = (gpu[gpu["operator"] == name] for name in ("bsr_matmul", "softmax_topk"))
    shuffles = products[products["template"] == "warp_shuffle"]
    figures = {
        "best-so-far": plots.best_so_far(gpu[gpu["operator"].isin(["bsr_matmul", "softmax_topk", "nhot_lookup"])]),
        "distribution": plots.distribution(products),
        "heat-map": plots.heat_map(shuffles, "reduce_threads", "vec"),
        "roofline": plots.roofline(gpu),
        "transfer": plots.transfer_matrix(heads, largest=16),
        "frontier": plots.frontier(products),
        "importance": plots.importance(tables["importance"].query("arch == @GPU and operator == 'bsr_matmul'")),
        "learning-curve": plots.learning_curves(tables["models"].query("arch == @GPU"), "top5"),
    }
    for name, figure in figures.items():
        yield plots.save(figure, IMAGES / f"laboratory-{name}.svg")


def main() -> None:
    """Print all tables, and write them and the plots."""
    recorded = trials(LOGS)
    tables = study.sections(recorded, PARTS)
    for name, found in tables.items():
        write(name, found, "tuning_logs/", LOGS)
    if SPACES:
        whole = trials(SPACES)
        # Other processes used the machine's cores, which can only lengthen a time: the minimum over the rounds is the
        # best estimate.
        least = whole["seconds_all"].map(lambda rounds: min(rounds, default=math.nan))
        whole["seconds"] = whole["seconds"].where(whole["arch"] == GPU, least)
        for name, found in study.sections(whole, OF_SPACES).items():
            write(f"spaces-{name}", found, "scripts/results/spaces/, every point measured")
    for path in draw(recorded, tables):
        print(path.relative_to(ROOT), path.stat().st_size)


if __name__ == "__main__":
    main()
