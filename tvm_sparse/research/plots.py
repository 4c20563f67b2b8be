"""Plots of recorded trials, each a function from a table to a figure of matplotlib."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import machine, registry
from ..core.problem import ProblemError
from . import study
from .points import points

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Number of templates that are distinguished, limited by the colours of a palette for the colour-blind (Okabe & Ito
# 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c8c1a", "#555555")
# Points beyond this multiple of the best are drawn at it.
CLIP = 8.0


def _figure(width: float = 6.4, height: float = 4.0) -> tuple[Figure, Axes]:
    """A figure without a window."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format of its suffix (.svg, .png); equal figures give equal bytes."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "tvm_sparse", "svg.fonttype": "none"}):
        metadata = {"Date": None} if path.suffix == ".svg" else {}
        figure.savefig(path, dpi=150, metadata=metadata)
    return path


def _share(axes: Axes, name: str = "y") -> None:
    """Make an axis logarithmic, with readable marks for ratios."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis = axes.yaxis if name == "y" else axes.xaxis
    (axes.set_yscale if name == "y" else axes.set_xscale)("log")
    largest = (axes.get_ylim() if name == "y" else axes.get_xlim())[1]
    fine = [1.05, 1.1, 1.2, 1.3] if largest < 2 else [1.2] if largest < 5 else []
    axis.set_major_locator(FixedLocator([1, *fine, 1.5, 2, 3, 5, 10, 20, 50, 100]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))


def best_so_far(table: pandas.DataFrame) -> Figure:
    """The best time of a search after each trial, over its final best: the median search and the middle half of
    searches, as recorded and as expected of random draws of the same points.
    """
    found = study.best_so_far(table)
    figure, axes = _figure()
    lengths = found.groupby(["arch", "problem"])["trial"].transform("max")
    # From searches at least as long as the median one: otherwise the curve would jump where searches end.
    shown = found[(lengths >= lengths.median()) & (found["trial"] <= lengths.median())]
    for name, label, colour in (("reached", "as recorded", COLOURS[0]), ("random", "random draws", COLOURS[1])):
        levels = shown.groupby("trial")[name].quantile([0.25, 0.5, 0.75]).unstack()
        axes.plot(levels.index, levels[0.5], color=colour, label=label)
        axes.fill_between(levels.index, levels[0.25], levels[0.75], color=colour, alpha=0.2, linewidth=0)
    _share(axes)
    axes.set(xlabel="trials that were right", ylabel="best so far / best of the search")
    count = shown.groupby(["arch", "problem"]).ngroups
    axes.set_title(f"{count} searches: median, and the half between the quartiles", fontsize=9)
    axes.legend(frameon=False)
    return figure


def distribution(table: pandas.DataFrame) -> Figure:
    """The times of every template's points over their problem's best: each point, the quartiles and the median."""
    known = points(table)
    known = known.assign(label=known["template"] + " (" + known["arch"] + ")")
    order = known.groupby("label")["ratio"].median().sort_values(ascending=False).index
    figure, axes = _figure(height=0.8 + 0.32 * len(order))
    values = [known.loc[known["label"] == label, "ratio"].clip(upper=CLIP * 4) for label in order]
    boxes = axes.boxplot(values, orientation="horizontal", showfliers=False, widths=0.6, patch_artist=True)
    for box in boxes["boxes"]:
        box.set(facecolor="none", edgecolor="#333333")
    for place, ratios in enumerate(values, start=1):
        spread = [place + 0.22 * math.sin(12.9898 * number) for number in range(len(ratios))]
        axes.plot(ratios, spread, ".", color=COLOURS[0], alpha=0.25, markersize=3, rasterized=True, zorder=0)
    axes.set_yticks(range(1, len(order) + 1), [f"{name} {len(v)}" for name, v in zip(order, values, strict=True)])
    axes.tick_params(axis="y", labelsize=8)
    _share(axes, "x")
    axes.set(xlabel="time / best recorded of the problem")
    return figure


def heat_map(table: pandas.DataFrame, one: str, other: str) -> Figure:
    """The mean time over the problem's best for each pair of two decisions' values, with the number of points."""
    import numpy as np

    known = points(table)
    rows, columns = f"decision.{one}", f"decision.{other}"
    missing = [name for name in (one, other) if f"decision.{name}" not in known or not known[f"decision.{name}"].any()]
    known = known[known[rows].notna() & known[columns].notna()] if not missing else known[:0]
    if not len(known):
        raise ProblemError(f"heat map: no trial has both of the decisions {one} and {other}")
    grouped = np.log(known["ratio"]).groupby([known[rows], known[columns]])
    means, counts = np.exp(grouped.mean()).unstack(), grouped.size().unstack()
    figure, axes = _figure(1.6 + 0.75 * means.shape[1], 1.3 + 0.55 * means.shape[0])
    image: Any = axes.imshow(means.to_numpy(dtype=float), cmap="viridis_r", aspect="auto", norm=_log_norm(means))
    for (row, column), value in np.ndenumerate(means.to_numpy(dtype=float)):
        if not math.isnan(value):
            dark = image.norm(value) > 0.6
            text = f"{value:.2f}\n({int(counts.iloc[row, column])})"
            axes.text(column, row, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    axes.set_xticks(range(means.shape[1]), [str(value) for value in means.columns])
    axes.set_yticks(range(means.shape[0]), [str(value) for value in means.index])
    axes.tick_params(labelsize=8)
    axes.set_xlabel(other, fontsize=9)
    axes.set_ylabel(one, fontsize=9)
    axes.set_title("mean time / best (points)", fontsize=9)
    return figure


def _log_norm(values: Any) -> Any:
    import numpy as np
    from matplotlib.colors import LogNorm

    flat = np.asarray(values, dtype=float)
    return LogNorm(1.0, max(1.05, min(CLIP, float(np.nanmax(flat)))), clip=True)


@functools.cache
def _cost(problem: str) -> tuple[int, int] | None:
    try:
        found = registry.parse(problem).cost()
    except ProblemError:
        return None
    return found.bytes, found.operations


def roofline(table: pandas.DataFrame) -> Figure:
    """Operations per second against operations per compulsory byte (Williams et al. 2009): a point for each trial, the
    roof of the memory's bandwidth where it was measured, and larger points for the best of each problem.
    """
    import numpy as np

    known = points(table)
    costs = known["problem"].map(_cost)
    known, costs = known[costs.notna()], costs.dropna()
    moved, done = (np.array([cost[place] for cost in costs], dtype=float) for place in (0, 1))
    intensity, speed = done / moved, done / known["seconds"].to_numpy(dtype=float)
    figure, axes = _figure()
    for number, (arch, rows) in enumerate(known.groupby("arch", sort=True)):
        mine = np.isin(known.index, rows.index)
        best = mine & (known["ratio"].to_numpy() == 1)
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(intensity[mine], speed[mine], ".", color=colour, alpha=0.2, markersize=3, rasterized=True)
        axes.plot(intensity[best], speed[best], "o", color=colour, markersize=4, label=f"{arch}: best of a problem")
        name = str(rows["machine.name"].iloc[0])
        bandwidth = machine.Machine("cuda", arch, name).bandwidth
        if bandwidth:
            ends = np.array([intensity[mine].min(), intensity[mine].max()])
            axes.plot(ends, ends * bandwidth, color=colour, linewidth=1, label=f"{name}: {bandwidth / 1e12:.2f} TB/s")
    axes.set(xscale="log", yscale="log", xlabel="operations / compulsory byte", ylabel="operations / s")
    axes.legend(frameon=False, fontsize=8)
    return figure


def _short(problems: Sequence[str]) -> list[str]:
    """Keys of problems without the axes that they all share."""
    pairs = [dict(pair.split("=", 1) for pair in key.partition("/")[2].split(",") if "=" in pair) for key in problems]
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    varying = [name for name in names if len({pair.get(name) for pair in pairs}) > 1]
    return [" ".join(f"{name}={pair[name]}" for name in varying if name in pair) or "all" for pair in pairs]


def transfer_matrix(table: pandas.DataFrame, largest: int = 24) -> Figure:
    """The loss of using the best point of one problem (row) for another (column), for the `largest` problems by points;
    white where it was not measured.
    """
    import numpy as np

    counts = points(table).groupby(["arch", "problem"]).size().sort_values(ascending=False, kind="stable")
    nodes = sorted(counts.index[:largest])
    pairs = study.transfer(table)
    place = {node: number for number, node in enumerate(nodes)}
    losses = np.full((len(nodes), len(nodes)), math.nan)
    for row in pairs.itertuples():
        one, other = (row.arch, row.problem), (row.to_arch, row.to_problem)
        if one in place and other in place:
            losses[place[one], place[other]] = row.loss
    side = 2.6 + 0.17 * len(nodes)
    figure, axes = _figure(side + 1.0, side)
    image: Any = axes.imshow(losses, cmap="viridis_r", norm=_log_norm(losses))
    labels = _short([problem for _, problem in nodes])
    axes.set_xticks(range(len(nodes)), labels, rotation=90, fontsize=5)
    axes.set_yticks(range(len(nodes)), labels, fontsize=5)
    axes.set(xlabel="is used for", ylabel="the best point of")
    bar = figure.colorbar(image, ax=axes, shrink=0.7, label="time / best recorded")
    bar.ax.minorticks_off()
    bar.set_ticks([t for t in (1, 1.1, 1.25, 1.5, 2, 3, 5, 8) if t <= image.norm.vmax], labels=None)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    return figure


def frontier(table: pandas.DataFrame) -> Figure:
    """Registers per thread against time over the problem's best, by template, with the frontier: the least median time
    of points with at most that many registers.
    """
    known = points(table)
    known = known[known["registers"].notna()]
    figure, axes = _figure()
    for number, (template, rows) in enumerate(known.groupby("template", sort=True)):
        colour = COLOURS[number % len(COLOURS)]
        ratios = rows["ratio"].clip(upper=CLIP)
        registers = rows["registers"].astype(float)
        axes.plot(registers, ratios, ".", color=colour, alpha=0.25, markersize=4, rasterized=True)
        rising = rows.groupby(registers)["ratio"].median().cummin()
        axes.step(rising.index, rising.clip(upper=CLIP), where="post", color=colour, label=str(template), linewidth=1.2)
    _share(axes)
    axes.set(xlabel="registers a thread", ylabel="time / best recorded of the problem")
    axes.set_title("lines: the median of points with that many registers, or fewer", fontsize=9)
    axes.legend(frameon=False, fontsize=7)
    return figure


def importance(found: pandas.DataFrame) -> Figure:
    """Bars of `study.importance`, with intervals."""
    found = found[::-1]
    figure, axes = _figure(height=0.8 + 0.22 * len(found))
    mean = found["importance"]
    low, high = mean - found["importance_low"], found["importance_high"] - mean
    axes.barh(range(len(found)), found["importance"], color=COLOURS[0], alpha=0.8)
    axes.errorbar(found["importance"], range(len(found)), xerr=[low, high], fmt="none", ecolor="#333333", linewidth=1)
    axes.set_yticks(range(len(found)), [f"{row.template} {row.decision}" for row in found.itertuples()], fontsize=7)
    axes.set(xlabel="rise of the squared error when shuffled / variance")
    return figure


def learning_curves(found: pandas.DataFrame, column: str = "top1") -> Figure:
    """Curves of `study.model_quality`: `column` by the number of training points, one line for each model, means over
    operators.
    """
    figure, axes = _figure()
    for number, (model, rows) in enumerate(found.groupby("model", sort=False)):
        curve = rows.groupby("learnt")[column].mean()
        axes.plot(curve.index, curve, "o-", color=COLOURS[number % len(COLOURS)], markersize=4, label=str(model))
    axes.set(xscale="log", xlabel="points learnt", xticks=sorted(found["learnt"].unique()))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    axes.set_ylabel("rank correlation" if column == "rank" else "best of the favoured / best of the others")
    axes.legend(frameon=False, fontsize=8)
    return figure


def search_curves(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """`simulation.curves`, one panel for each space: mean excess over the optimum by number of trials, with its
    interval.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row["space"] for row in rows))
    columns = min(len(names), 2)
    lines = -(-len(names) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.4 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False, sharex=True)
    for panel in panels.flat[len(names) :]:
        panel.remove()
    for name, panel in zip(names, panels.flat, strict=False):
        for number, strategy in enumerate(dict.fromkeys(row["strategy"] for row in rows)):
            curve = [row for row in rows if (row["space"], row["strategy"]) == (name, strategy)]
            at, colour = [row["trials"] for row in curve], COLOURS[number % len(COLOURS)]
            panel.plot(at, [100 * row["excess"] for row in curve], label=strategy, linewidth=1.2, color=colour)
            band = [[100 * row[end] for row in curve] for end in ("low", "high")]
            panel.fill_between(at, *band, color=colour, alpha=0.15, linewidth=0)
        panel.set_title(name, fontsize=9)
        panel.set_yscale("symlog", linthresh=1)
        # If all find the optimum at once, the panel still needs an axis.
        panel.set_ylim(0, max(1.0, panel.get_ylim()[1]))
        panel.set(xlabel="trials", ylabel="% over the optimum")
    figure.legend(*panels.flat[0].get_legend_handles_labels(), fontsize=8, ncols=4, loc="outside lower center")
    return figure
