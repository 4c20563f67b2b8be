"""The value of one tuned problem's decisions for another one, from the recorded trials; needs no GPU.

    python scripts/study_transfer.py                  # every operator; seconds
    python scripts/study_transfer.py --arch x86-64-v4

For each pair of problems of an operator, if the first one's winner and the second one's default were both timed for the
second: the winner's time over the default's, grouped by what look-up knows beforehand (`runtime.lookup.DOUBT`):

same      the default has the same decisions for both problems, so that winner and default were compared before
gained    the winner had beaten the default by more than e^(SURE + DOUBT * octaves) for its own problem
near      at most `FAR` octaves and batches at most `BATCHES` octaves apart

"lost" is the share of pairs in which the winner was more than 5 % slower. Look-up uses a record if all three hold.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from tvm_sparse.cli.common import console, table
from tvm_sparse.core import registry, spaces
from tvm_sparse.records import Log
from tvm_sparse.runtime.lookup import BATCHES, DOUBT, FAR, SURE, octaves
from tvm_sparse.tuning import training

LOGS = Path(__file__).parent.parent / "tuning_logs"
LOST = 1.05
COLUMNS = ("operator", "pairs", "which", "count", "geometric_mean", "lost", "worst")


@dataclass(frozen=True)
class Pair:
    """A winner elsewhere: its time over the default's here, and the facts known to look-up."""

    ratio: float
    same: bool
    gained: bool
    near: bool


def pairs_of(log: Log) -> Iterator[Pair]:
    """All pairs of a log in which both were timed."""
    data = training.measured(log)
    defaults = {one.problem: spaces.fallback(one.problem, one.machine) for one in data}
    winners = {one.problem: min(one.seconds, key=lambda candidate: one.seconds[candidate]) for one in data}
    for here in data:
        default = defaults[here.problem]
        if default not in here.seconds:
            continue
        for there in data:
            winner, compared = winners[there.problem], there.seconds.get(defaults[there.problem])
            if there is here or winner == default or winner not in here.seconds or compared is None:
                continue
            away = octaves(here.problem, there.problem, here.machine)
            if away is None:
                continue
            batches = abs(math.log2(here.problem.batch_extent / there.problem.batch_extent))
            yield Pair(
                here.seconds[winner] / here.seconds[default],
                defaults[there.problem] == default,
                math.log(compared / there.best) > SURE + DOUBT * away,
                away <= FAR and batches <= BATCHES,
            )


def line(operator: str, pairs: Iterable[Pair], which: str, count: int) -> list[str]:
    ratios = [pair.ratio for pair in pairs]
    if not ratios:
        return [operator, str(count), which, "0", "", "", ""]
    lost = sum(ratio > LOST for ratio in ratios) / len(ratios)
    mean = statistics.geometric_mean(ratios)
    return [operator, str(count), which, str(len(ratios)), f"{mean:.3f}", f"{lost:.1%}", f"{max(ratios):.2f}"]


def main(
    arch: Annotated[str, typer.Option(help="Architecture of the records.")] = "sm_90a",
    logs: Annotated[Path, typer.Option(help="Folder of records.")] = LOGS,
) -> None:
    """Print a table, by operator and for all operators together."""
    shown = table(*COLUMNS, right=COLUMNS[3:])
    everything: list[Pair] = []
    found = {name: list(pairs_of(Log(logs, arch, name))) for name in registry.operators()}
    for pairs in found.values():
        everything += pairs
    for name, pairs in {"all": everything, **found}.items():
        if not pairs:
            continue
        for which, chosen in (
            ("all", pairs),
            ("not same", [p for p in pairs if not p.same]),
            ("same", [p for p in pairs if p.same]),
            ("same, gained, near", [p for p in pairs if p.same and p.gained and p.near]),
        ):
            shown.add_row(*line(name, chosen, which, len(pairs)))
    console().print(shown)


if __name__ == "__main__":
    typer.run(main)
