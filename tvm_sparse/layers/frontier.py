"""Settings of an LSH head with the words they read, their recall and their time: the result of a fit as text, CSV and
plot.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Point:
    """One setting of the frontier, a row of its table.

    Attributes
    ----------
    k, units, bands, threshold, frequent, capacity
        As in `LshHead`; `frequent` is a count.
    search_recall
        Share of the true n most probable words among the candidates, on the samples used to choose settings.
    recall, recall_1
        The same on the held-out samples, for the n most probable words, and for the most probable one.
    candidates
        Mean number of words of a list, on the held-out samples.
    share
        The same as a share of the vocabulary.
    overflowed
        Share of the held-out lists that exceed the capacity.
    level
        The recall for which the threshold was chosen, the highest if there are several.
    seconds
        Measured time of a step; None before the measurement.
    """

    k: int
    units: int
    bands: int
    threshold: int
    frequent: int
    capacity: int
    search_recall: float
    recall: float
    recall_1: float
    candidates: float
    share: float
    overflowed: float
    level: float
    seconds: float | None = None


@dataclass(frozen=True)
class Frontier:
    """The result of `LshHead.fit`: settings by the share of the vocabulary that they read, compared with the exact
    head.

    Attributes
    ----------
    points
        By increasing share: the measured settings that reach the target, and the one that reads least for each of the
        recalls 0.9, 0.95, 0.99 and 0.999.
    chosen
        The setting of the returned head; None if that is the exact head.
    target, n, rows
        The target recall, of the n most probable words, for steps of `rows` rows.
    exact_seconds
        Measured time of a step of the exact head.
    device
        The device of the measurement.
    verdict
        The outcome as a sentence.
    """

    points: tuple[Point, ...]
    chosen: Point | None
    target: float
    n: int
    rows: int
    exact_seconds: float
    device: str
    verdict: str

    def __str__(self) -> str:
        names = ("k", "u", "bands", "t", "T", "capacity", "recall", "@1", "words", "share", "us", "x exact")
        lines = [names, *(self._cells(point) for point in self.points)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(names))]
        table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.verdict, *table])

    def _cells(self, point: Point) -> tuple[str, ...]:
        seconds = point.seconds
        times = ("", "") if seconds is None else (f"{seconds * 1e6:.1f}", f"{self.exact_seconds / seconds:.2f}")
        return (
            *map(str, dataclasses.astuple(point)[:6]),
            f"{point.recall:.4f}",
            f"{point.recall_1:.4f}",
            f"{point.candidates:.0f}",
            f"{point.share:.1%}",
            *times,
        )

    def csv(self) -> str:
        """The table as CSV, with the exact head's time and the device in every row."""
        text = io.StringIO()
        names = [field.name for field in dataclasses.fields(Point)]
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*names, "exact_seconds", "chosen", "device"])
        for point in self.points:
            cells = ["" if cell is None else cell for cell in dataclasses.astuple(point)]
            writer.writerow([*cells, self.exact_seconds, int(point == self.chosen), self.device])
        return text.getvalue()

    def plot(self, path: str | Path | None = None) -> Any:
        """Recall against the share of the vocabulary that is read, and against the time of a step: a matplotlib figure.

        Parameters
        ----------
        path
            A file to write, if given.

        Raises
        ------
        ModuleNotFoundError
            Without matplotlib (extra `plot`).
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(9, 3.6), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.plot([p.share for p in self.points], [p.recall for p in self.points], "o-", label="held out")
        left.set(xlabel="share of the vocabulary", ylabel=f"recall of the top {self.n}", xscale="log")
        timed = [p for p in self.points if p.seconds is not None]
        right.plot([p.seconds * 1e6 for p in timed if p.seconds], [p.recall for p in timed], "o", label="LSH")
        right.axvline(self.exact_seconds * 1e6, color="black", linestyle="--", label="exact head")
        right.set(xlabel=f"microseconds a step of {self.rows} rows, {self.device}")
        for axis in (left, right):
            axis.axhline(self.target, color="grey", linewidth=0.8)
            axis.legend()
        if path is not None:
            figure.savefig(path)
        return figure
