"""Which of the measured kernels are those that calls run today, with the records that ship."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from tvm_sparse.bench.compare import NAME
from tvm_sparse.core import machine, registry
from tvm_sparse.core.candidate import Candidate
from tvm_sparse.core.problem import Problem, ProblemError
from tvm_sparse.runtime.dispatch import Dispatcher
from tvm_sparse.schedules.vocabulary import DIVIDED, present

from .output_layer import measured_decisions
from .register import part
from .results import RESULTS, ROOT, Row, results
from .text import table

CARD = "h200"
# A candidate, and in most files how look-up came by it.
KERNEL = re.compile(r"(\w+@\d+\([^()]*\))(?: \(\w+\))?")


def problem_of(name: str, row: Row) -> Problem | None:
    """The problem of a line, from its key or, in the tables of Gu, from columns; None if an axis was removed."""
    try:
        if "problem" in row:
            return registry.parse(row["problem"])
        if name.startswith("gu-tables"):
            axes = ("m", "k", "n", "block", "sparsity")
            return registry.parse(f"bsr_matmul/{','.join(f'{axis}={row[axis]}' for axis in axes)}")
    except ProblemError:
        pass
    return None


def candidate_of(text: str) -> Candidate:
    """A candidate as written in a file, with the present names of its template and its decisions."""
    return present(Candidate.parse(text))


def at_last_version(candidate: Candidate) -> Candidate:
    """The candidate of the present templates, if it is one of an earlier version of a template that was divided."""
    last = {name: version for name, version in DIVIDED}.get(candidate.template, candidate.version)
    return present(dataclasses.replace(candidate, version=last))


def measured() -> Iterator[tuple[str, Problem, Candidate]]:
    """File, problem and candidate of the public functions' kernels in the results of this card."""
    for path in sorted(RESULTS.glob(f"*-{CARD}.csv")):
        name = path.stem
        for row in results(name).rows:
            if not row.get("kernel") or row.get("implementation", NAME) != NAME:
                continue
            written = KERNEL.fullmatch(row["kernel"])
            problem = problem_of(name, row)
            if written and problem:
                yield name, problem, candidate_of(written[1])
    for name, problem, candidate, _ in measured_decisions():
        yield name, problem, Candidate.parse(candidate)


@part
def present_kernels() -> str:
    """For each file of results, the number of problems by how the measured kernel differs from look-up's choice."""
    where = machine.resolve(CARD)
    seen: dict[str, dict[Problem, int]] = {}
    with TemporaryDirectory() as empty:
        today = Dispatcher((ROOT / "tuning_logs",), Path(empty), Path(empty))
        for name, problem, candidate in measured():
            chosen = today.choice(problem.as_called(), where).candidate
            at_its_version = dataclasses.replace(chosen, version=candidate.version)
            earlier = candidate == at_its_version or chosen == at_last_version(candidate)
            kind = 0 if chosen == candidate else 1 if earlier else 2
            seen.setdefault(name, {})[problem] = kind
    rows = []
    for name, found in sorted(seen.items()):
        counts = [str(sum(kind == one for kind in found.values())) for one in range(3)]
        rows.append([f"`{name}`", results(name).facts["date"][:10], str(len(found)), *counts])
    return table(["file", "measured", "problems", "today's kernel", "at an earlier version", "other decisions"], rows)
