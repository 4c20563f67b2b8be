"""Code shared by scripts that reproduce a paper's table: provenance, a CSV with it, and a plot."""

from __future__ import annotations

import csv
import importlib.metadata
import importlib.util
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tvm_sparse.bench.compare import NAME, Comparison, has_torch
from tvm_sparse.core.machine import Machine
from tvm_sparse.records.values import utc_now

RESULTS = Path(__file__).parent / "results"


def provenance(where: Machine, *, rotated: bool = False, cold: bool = False, rounds: int = 30) -> dict[str, str]:
    """Device, date, versions, and method of timing, which are needed to interpret any figure. `rounds`: on a GPU."""
    inputs = "inputs rotated past the L2 cache" if rotated else "inputs not rotated (hot)"
    if cold:
        inputs = "inputs not rotated (from memory: another kernel uses the L2 cache in between)"
    facts = {
        "device": f"{where.name} ({where.arch})",
        "date": utc_now(),
        "python": platform.python_version(),
    }
    for package in ("tvm_sparse", "apache-tvm", "apache-tvm-ffi", "numpy", "scipy", "torch", "triton"):
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            facts[package] = "absent"
    if where.kind == "cuda" and has_torch("cuda"):
        import torch

        facts["torch_cuda"] = str(torch.version.cuda)
        facts["timing"] = f"CUDA graphs of 10-50 calls, events, median of {rounds} rounds in turn; {inputs}"
    else:
        facts["timing"] = f"calls from Python, median of 15 rounds in turn; {inputs}"
    return facts


def result_path(name: str, where: Machine) -> Path:
    """`scripts/results/<name>-<device>`, without a suffix: `h200` for an NVIDIA H200, the architecture for a CPU."""
    device = where.name.removeprefix("NVIDIA ") if where.kind == "cuda" else where.arch
    return RESULTS / f"{name}-{re.sub(r'[^a-z0-9_]+', '-', device.lower()).strip('-')}"


def timing_rows(columns: Sequence[str], result: Comparison, **given: Any) -> list[list[Any]]:
    """A CSV line for each contender: values `given` by name, and the comparison's values for the other columns."""
    bytes_, ours, limit, made = result.problem.cost().bytes, result.ours.median, result.machine.bandwidth, []
    for timing in result.timings:
        seconds, first = timing.median, timing is result.ours
        cells = {
            "problem": result.problem.key,
            "implementation": timing.name,
            "microseconds": f"{seconds * 1e6:.3f}" if seconds else "",
            "peer_over_ours": f"{seconds / ours:.3f}" if seconds and ours else "",
            "compulsory_GB_per_s": f"{bytes_ / seconds / 1e9:.2f}" if seconds else "",
            "share_of_limit": f"{bytes_ / seconds / limit:.3f}" if seconds and limit else "",
            "timed": timing.how,
            "correct": "" if timing.correct is None else timing.correct,
            "host_microseconds": (
                f"{result.host_seconds * 1e6:.2f}" if first and result.host_seconds is not None else ""
            ),
            "kernel": f"{result.kernel} ({result.how})" if first else "",
            "note": timing.note,
            **given,
        }
        made.append([cells[column] for column in columns])
    return made


def studied(logs: Path | None = None) -> dict[str, str]:
    """The first facts of a study that measures nothing: its date and, of records, the number of their trials."""
    facts = {"date": utc_now()}
    if logs is not None:
        facts["recorded"] = f"{trials_in(logs)} trials"
    return facts


def trials_in(logs: Path) -> int:
    """Number of trials in a folder of logs."""
    return sum(path.read_bytes().count(b'"kind":"trial"') for path in logs.rglob("trials.jsonl"))


def write_csv(path: Path, facts: Mapping[str, str], columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A CSV whose first lines are the facts, as comments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        file.writelines(f"# {name}: {value}\n" for name, value in facts.items())
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows(rows)


def read_csv(path: Path) -> tuple[dict[str, str], list[dict[str, str]]]:
    """What `write_csv` wrote: the facts, and the lines by column."""
    text = path.read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in text if line.startswith("# "))
    return facts, list(csv.DictReader(line for line in text if not line.startswith("#")))


def merged(path: Path, order: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[Sequence[Any]]:
    """The file's lines with these rows added, which replace lines with the same key, ordered by key."""
    lines: dict[str, Sequence[Any]] = {}
    if path.exists():
        with path.open(newline="") as file:
            lines = {line[0]: line for line in csv.reader(x for x in file if x[0] != "#")}
    lines |= {row[0]: row for row in rows}
    return [lines[name] for name in order if name in lines]


def has_plot() -> bool:
    """Whether matplotlib (extra `plot`) is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def write_plot(
    path: Path,
    facts: Mapping[str, str],
    series: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    x: str,
    y: str = "microseconds a call",
    printed: Sequence[str] = (),
) -> None:
    """Points by series on logarithmic axes, with the provenance below; series in `printed` are the paper's, drawn
    dashed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5.5), layout="constrained")
    for name, points in series.items():
        if points:
            own = name.startswith(NAME)
            style = {"linestyle": "--", "alpha": 0.6} if name in printed else {"linewidth": 2.5 if own else 1.2}
            axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, **style)
    ticks = sorted({place for points in series.values() for place, _ in points})
    axes.set(title=title, xlabel=x, ylabel=y, xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    shown = ("device", "date", "tvm_sparse", "apache-tvm", "torch", "torch_cuda")
    figure.supxlabel("  ".join(f"{name} {facts[name]}" for name in shown if name in facts), fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
