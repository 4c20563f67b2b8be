"""The CSV files of results/, and sentences on their device, date and method."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reproduction import read_csv, trials_in

from tvm_sparse.bench.compare import NAME
from tvm_sparse.core import registry
from tvm_sparse.core.problem import Problem

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "scripts" / "results"
Row = Mapping[str, str]
Times = Mapping[str, float]  # microseconds by implementation


@dataclass(frozen=True)
class Results:
    """One CSV file: its comments, on device, date and method, and its lines."""

    facts: Mapping[str, str]
    rows: tuple[Row, ...]

    def by_problem(self, **having: str) -> dict[Problem, Times]:
        """Microseconds by implementation for each problem, from the lines with these values in the columns `having`."""
        found: dict[Problem, dict[str, float]] = {}
        for row in self.rows:
            if row["microseconds"] and all(row[name] == value for name, value in having.items()):
                found.setdefault(registry.parse(row["problem"]), {})[row["implementation"]] = float(row["microseconds"])
        return dict(found)

    def by(self, *columns: str) -> dict[tuple[str, ...], Times]:
        """Microseconds by implementation, from lines with equal values in these columns."""
        found: dict[tuple[str, ...], dict[str, float]] = {}
        for row in self.rows:
            if row["microseconds"]:
                key = tuple(row[column] for column in columns)
                found.setdefault(key, {})[row["implementation"]] = float(row["microseconds"])
        return dict(found)


def exists(name: str) -> bool:
    """Whether there is a file of this name."""
    return (RESULTS / f"{name}.csv").exists()


@functools.cache
def results(name: str) -> Results:
    facts, rows = read_csv(RESULTS / f"{name}.csv")
    return Results(facts, tuple(rows))


def provenance(*names: str) -> str:
    """Device, versions and dates of some result files, as half a sentence."""
    files = [results(name).facts for name in names]
    days = sorted({facts["date"][:10] for facts in files})
    devices = " and ".join(dict.fromkeys(facts["device"] for facts in files))
    torch = " and ".join(
        dict.fromkeys(
            f"PyTorch {f['torch']}" + (f" with CUDA {f['torch_cuda']}" if "torch_cuda" in f else "") for f in files
        )
    )
    return f"{devices}, {torch}, {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def studied(name: str) -> str:
    """Date of a study of the records, the number of their trials then, and that of the trials that ship."""
    facts = results(name).facts
    then, now = int(facts["recorded"].split()[0]), trials_in(ROOT / "tuning_logs")
    today = "which ship" if then == now else f"{now:,} ship"
    return f"{facts['date'][:10]}, from {then:,} recorded trials ({today})."


def best(times: Times, *prefixes: str) -> float:
    """The least time of the other libraries, or of those whose name has one of these prefixes."""
    return min(t for name, t in times.items() if name != NAME and name.startswith(prefixes or ("",)))


def loses(ratio: float) -> bool:
    """Whether a peer's time over ours is less than 1 as printed; two runs of one kernel differ by more than the
    rounding.
    """
    return round(ratio, 2) < 1


def where(*names: str) -> str:
    """Device, date and method of some result files."""
    timing = {results(name).facts["timing"] for name in names}
    graphs = all(text.startswith("CUDA graphs") for text in timing)
    rotated = all("past the L2 cache" in text for text in timing)
    return (
        f"{provenance(*names)}; microseconds a call {'in CUDA graphs' if graphs else 'from Python'}, inputs"
        f" {'rotated past the L2 cache' if rotated else 'hot'}."
        # From a file that combines several runs.
        + "".join(f" {results(name).facts['runs']}" for name in names if "runs" in results(name).facts)
    )
