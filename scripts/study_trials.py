"""What the shipped trials tell: is tuning worth it, which decisions matter, how good cost models are, what transfers.

    python scripts/study_trials.py        # minutes, without a GPU

Reads tuning_logs/, the spaces measured in full (results/spaces/) and results of other scripts. Writes
scripts/results/trials-*.csv, from which figures.py fills docs/laboratory.md, and the page's plots.

The first table asks of every operator and architecture what tuning gained over

fallback   what runs without tuning, measured in turn with the winner in the final
default    the default point of the winner's own template, where it was tried: a hand-picked choice
predicted  what look-up's model chooses for a problem that it has not seen (results/prediction-*.csv)
peer       the fastest other library (results/peers*.csv), in the same run as ours

and after how many trials a problem's longest search had 95 % of its gain over the fallback.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas
from reproduction import RESULTS, write_csv

from tvm_sparse.bench.compare import NAME
from tvm_sparse.cli.common import console, table
from tvm_sparse.core import machine, spaces
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import ProblemError
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable
from tvm_sparse.records.database import rows
from tvm_sparse.research import plots, study
from tvm_sparse.research.trials import trials

ROOT = Path(__file__).parent.parent
LOGS = ROOT / "tuning_logs"
SPACES = sorted((RESULTS / "spaces").glob("*.jsonl.xz"))
IMAGES = ROOT / "docs" / "images"
PEERS = ("peers-h200", "peers-softmax-h200", "head-h200")
GPU = "sm_90a"
# Of the gain, for how many trials it takes.
SHARE = 0.95
# Gains below are within what two measurements of one kernel differ by.
NOTABLE = 1.05


def lines_of(name: str) -> list[dict[str, str]]:
    """The lines of a CSV file of results; none if there is no such file."""
    path = RESULTS / f"{name}.csv"
    if not path.exists():
        return []
    return list(csv.DictReader(line for line in path.read_text().splitlines() if not line.startswith("#")))


def over_peers() -> dict[str, list[float]]:
    """By operator, the least time of other libraries over ours, a figure a problem."""
    least: dict[str, float] = {}
    for line in (line for name in PEERS for line in lines_of(name)):
        if line.get("problem") and line.get("peer_over_ours") and not line["implementation"].startswith(NAME):
            least[line["problem"]] = min(float(line["peer_over_ours"]), least.get(line["problem"], math.inf))
    found: dict[str, list[float]] = {}
    for key, ratio in least.items():
        found.setdefault(key.partition("/")[0], []).append(ratio)
    return found


def default_of(problem: str, candidate: str, arch: str, cores: int) -> str | None:
    """The default point of a candidate's template for a problem."""
    try:
        template = spaces.find(Candidate.parse(candidate).template)
        where = machine.Machine(template.kind, arch, arch, cores=cores)
        return str(template.candidate(template.default(parse(problem), where)))
    except (KeyError, ProblemError, NotApplicable, ValueError):
        return None


def worth(recorded: pandas.DataFrame) -> pandas.DataFrame:
    """A row for each operator and architecture."""
    predicted = {
        line["operator"]: float(line["geometric_mean"])
        for line in lines_of(f"prediction-{GPU}")
        if (line["left_out"], line["way"]) == ("all batches", "chosen") and line["geometric_mean"]
    }
    rankings = pandas.DataFrame([row for row in rows([LOGS]) if row["kind"] == "best"])
    rankings = rankings.drop_duplicates(["arch", "problem"], keep="last")
    times = study.points(recorded).set_index(["arch", "problem", "candidate"])["seconds"]
    longest = study.searches(recorded)
    peers, found = over_peers(), []
    for (operator, arch), mine in rankings.groupby(["operator", "arch"], sort=True):
        gains = (mine["fallback_seconds"] / mine["seconds"]).map(math.log).tolist()
        by_hand, needed = [], []
        for row in mine.to_dict("records"):
            cores = int(row["machine.cores"] or 1)
            chosen = (arch, row["problem"], row["candidate"])
            plain = (arch, row["problem"], default_of(row["problem"], row["candidate"], arch, cores))
            if chosen in times.index and plain in times.index:
                by_hand.append(math.log(times[plain] / times[chosen]))
            search = longest[(longest["arch"] == arch) & (longest["problem"] == row["problem"])]
            if len(search) >= 8:
                # A session begins with the fallback, unless an earlier one of the problem has measured it.
                start = row["fallback_seconds"]
                least = search["seconds"].min()
                if start > NOTABLE * least:
                    reached = search["seconds"].to_numpy() <= start - SHARE * (start - least)
                    needed.append(int(reached.argmax()) + 1)
        line: dict[str, Any] = {"operator": operator, "arch": arch, "problems": len(mine)}
        for name, logs in (("fallback", gains), ("default", by_hand)):
            line |= dict(zip((name, f"{name}_low", f"{name}_high"), study.mean_interval(logs), strict=True))
        line["notable"] = sum(gain > math.log(NOTABLE) for gain in gains) / len(gains)
        line["most"] = math.exp(max(gains))
        line["predicted"] = predicted.get(operator, math.nan) if arch == GPU else math.nan
        ours = peers.get(operator, []) if arch == GPU else []
        line["peer"] = study.mean_interval([math.log(ratio) for ratio in ours])[0]
        line["trials_to_95"] = float(pandas.Series(needed, dtype=float).median())
        found.append(line)
    return pandas.DataFrame(found)


def write(name: str, found: pandas.DataFrame, data: str) -> None:
    """Print a table and write it to results/trials-NAME.csv."""
    shown = study.shown(found)
    made = table(*shown.columns, title=name, right=[c for c in shown if found[c].dtype.kind in "fiu"])
    for row in shown.itertuples(index=False):
        made.add_row(*row)
    console().print(made)
    facts = {"data": data, "interval": "95 %, bootstrap over problems, or over points where there are fewer than five"}
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
    tables = study.sections(recorded)
    write("worth", worth(recorded), "tuning_logs/")
    for name, found in tables.items():
        write(name, found, "tuning_logs/")
    if SPACES:
        whole = trials(SPACES)
        for name in ("importance", "effects", "models", "budget"):
            found = study.PARTS[name](whole)
            if len(found):
                write(f"spaces-{name}", found, "scripts/results/spaces/, every point measured")
    for path in draw(recorded, tables):
        print(path.relative_to(ROOT), path.stat().st_size)


if __name__ == "__main__":
    main()
