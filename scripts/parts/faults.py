"""Faults survived, sanitizers, and fuzzing."""

from __future__ import annotations

from .register import part
from .results import RESULTS, results
from .text import code, listed, table


@part
def fault_tables() -> str:
    """The faults injected by `scripts/faults.py`, one table for each machine."""
    tables = []
    for path in sorted(RESULTS.glob("faults-*.csv")):
        found = results(path.stem)
        head = ("what goes wrong", "injected", "lost trials", "wrong records", "silent wrong results", "")
        columns = ("injected", "lost_trials", "wrong_records", "silent_wrong_results", "note")
        rows = [[row["kind"], *(row[column] for column in columns)] for row in found.rows]
        total = sum(int(row["injected"]) for row in found.rows)
        tables.append(
            f"{found.facts['device']}, {found.facts['date'][:10]}: {total:,} injected.\n\n{table(head, rows)}"
        )
    return "\n\n".join(tables)


@part
def faults_sentence() -> str:
    """The findings of injected faults, mutated inputs and the sanitizer's tools together."""
    rows = [row for path in sorted(RESULTS.glob("faults-*.csv")) for row in results(path.stem).rows]
    injected, lost, wrong, silent = (
        sum(int(row[name]) for row in rows)
        for name in ("injected", "lost_trials", "wrong_records", "silent_wrong_results")
    )
    [fuzzed] = RESULTS.glob("fuzz-*.csv")
    cases, findings = (sum(int(row[name]) for row in results(fuzzed.stem).rows) for name in ("cases", "findings"))
    [sanitized] = RESULTS.glob("sanitize-*.csv")
    errors = sum(int(row["errors"]) for row in results(sanitized.stem).rows)
    return (
        f"Of {injected:,} faults that were injected, {lost} lost a trial, {wrong} made a wrong record and {silent} a"
        f" silent wrong result; {cases:,} mutated inputs had {findings} findings; compute-sanitizer's tools report"
        f" {errors} errors."
    )


@part
def sanitizer_table() -> str:
    """The findings of `scripts/sanitize.py`, one line for each run."""
    [path] = RESULTS.glob("sanitize-*.csv")
    found = results(path.stem)
    columns = ("tool", "date", "passed", "failed", "skipped", "left", "errors", "seconds")
    every = max((row["files"] for row in found.rows), key=len)  # the script's default selection
    rows = [[row["tool"], _checked(row, every), *(row[column] for column in columns[1:])] for row in found.rows]
    return f"{found.facts['device']}:\n\n{table(('tool', 'tests', *columns[1:]), rows)}"


def _checked(row: dict[str, str], every: str) -> str:
    """The tests of a run of the sanitizer; `every` are the files of all tests."""
    first = row["selection"].split()[0].strip("()")
    if first != "not":
        return code(first)
    if row["files"] == every:
        return "all files"
    return listed([code(name.removesuffix(".py")) for name in row["files"].split()])


@part
def fuzz_table() -> str:
    """The cases and findings of `scripts/fuzz.py`."""
    [path] = RESULTS.glob("fuzz-*.csv")
    found = results(path.stem)
    head = ("reader or function", "inputs", "taken", "refused", "inputs that showed more", "findings")
    columns = ("target", "cases", "taken", "refused", "kept", "findings")
    rows = [[row[c] if c != "kept" or row["how"] != "property-based" else "-" for c in columns] for row in found.rows]
    total = sum(int(row["cases"]) for row in found.rows)
    return f"{found.facts['device']}, {found.facts['date'][:10]}: {total:,} inputs.\n\n{table(head, rows)}"
