"""The CSV files of results/, and sentences on where and when they were measured."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tvm_sparse.bench.compare import NAME
from tvm_sparse.core import registry
from tvm_sparse.core.problem import Problem

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "scripts" / "results"
Row = Mapping[str, str]
Times = Mapping[str, float]  # microseconds by implementation


@dataclass(frozen=True)
class Results:
    """One CSV file: what its comments say of where and when, and its lines."""

    facts: Mapping[str, str]
    rows: tuple[Row, ...]

    def by_problem(self, **having: str) -> dict[Problem, Times]:
        """Microseconds by implementation, of the problems of the lines whose columns are `having`."""
        found: dict[Problem, dict[str, float]] = {}
        for row in self.rows:
            if row["microseconds"] and all(row[name] == value for name, value in having.items()):
                found.setdefault(registry.parse(row["problem"]), {})[row["implementation"]] = float(row["microseconds"])
        return dict(found)

    def by(self, *columns: str) -> dict[tuple[str, ...], Times]:
        """Microseconds by implementation, of the lines that agree in these columns."""
        found: dict[tuple[str, ...], dict[str, float]] = {}
        for row in self.rows:
            if row["microseconds"]:
                key = tuple(row[column] for column in columns)
                found.setdefault(key, {})[row["implementation"]] = float(row["microseconds"])
        return dict(found)


@functools.cache
def results(name: str) -> Results:
    lines = (RESULTS / f"{name}.csv").read_text().splitlines()
    facts = dict(line[2:].split(": ", 1) for line in lines if line.startswith("# "))
    return Results(facts, tuple(csv.DictReader(line for line in lines if not line.startswith("#"))))


def provenance(*names: str) -> str:
    """Device, versions and dates of some files of results, as half a sentence."""
    files = [results(name).facts for name in names]
    days = sorted({facts["date"][:10] for facts in files})
    devices = " and ".join(dict.fromkeys(facts["device"] for facts in files))
    torch = " and ".join(
        dict.fromkeys(
            f"PyTorch {f['torch']}" + (f" with CUDA {f['torch_cuda']}" if "torch_cuda" in f else "") for f in files
        )
    )
    return f"{devices}, {torch}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def best(times: Times, *prefixes: str) -> float:
    """The least time of the others, or of those of them whose name begins so."""
    return min(t for name, t in times.items() if name != NAME and name.startswith(prefixes or ("",)))


def loses(ratio: float) -> bool:
    """Whether another one's time over ours is less than 1 as it is printed; two runs of one kernel differ by more."""
    return round(ratio, 2) < 1


def where(*names: str) -> str:
    """Where, when and how some files of results were measured."""
    timing = {results(name).facts["timing"] for name in names}
    graphs = all(text.startswith("CUDA graphs") for text in timing)
    rotated = all("past the L2 cache" in text for text in timing)
    return (
        f"{provenance(*names)}; microseconds a call {'in CUDA graphs' if graphs else 'from Python'}, inputs"
        f" {'rotated past the L2 cache' if rotated else 'hot'}."
        # Of a file that was put together of several runs.
        + "".join(f" {results(name).facts['runs']}" for name in names if "runs" in results(name).facts)
    )
