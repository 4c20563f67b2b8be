"""Timing look-up's best candidates on this machine before one of them is used: `warmup(seconds=)`.

`contenders` selects the candidates. A separate process, `tuning.measured`, builds them, checks them against the
reference and times them as a tuning run does, and the winner is added to the user's records. A crash, a hang or an
illegal access ends that process, not this one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..core import machine as machines
from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem, ProblemError
from ..core.registry import parse, plugins
from ..core.template import NotApplicable
from ..workers.building import Kept
from .lookup import Choice, Evidence, octaves

WORKER = (sys.executable, "-m", "tvm_sparse.tuning.measured")
# Most candidates of one problem, if the time suffices, and of each kind of evidence.
MOST, RUNNERS_UP = 24, 3
# Number of candidates around which neighbours are drawn.
AROUND = 2
# Seconds for which the process stays after a problem: it and its children have imported the compiler, and set up the
# device.
KEEP_SECONDS = 60.0
# Seconds after the time limit in which candidates under way are finished and the final is held; then the process hangs,
# and is ended. Without them a first problem, for which the process and its children start, would often be lost, and so
# would the started children.
GRACE = 30.0


def contenders(problem: Problem, machine: Machine, choice: Choice, evidence: Evidence) -> list[Candidate]:
    """Candidates that may be the fastest for a problem, by the evidence, the most likely first, including the fallback.

    They are the choice, the fallback, the nearest records' decisions (of this architecture or another one), the
    predictor's best, and every template's default; then random neighbours of the first of these, which differ in one
    decision. All are points of the problem's own spaces.
    """

    def fitting(candidate: Candidate) -> Candidate | None:
        if spaces.refusal(candidate, problem, machine) is None:
            return candidate
        return spaces.adapted(candidate, problem, machine)

    found = dict.fromkeys(filter(None, [fitting(choice.candidate), spaces.fallback(problem, machine)]))
    for records in (evidence.records, evidence.borrowed):
        near: list[tuple[float, str, Candidate]] = []
        for key, known in records.items():
            try:
                away = octaves(problem, parse(key), machine)
            except ProblemError:  # recorded by a version with other axes
                continue
            if away is not None:
                near.append((away, key, known.candidate))
        likely = dict.fromkeys(filter(None, (fitting(candidate) for *_, candidate in sorted(near)[: 4 * RUNNERS_UP])))
        found |= dict.fromkeys(list(likely)[:RUNNERS_UP])
    predictor = evidence.predictor()
    if predictor is not None:
        found |= dict.fromkeys(predictor.fastest(problem, machine, RUNNERS_UP))
    tables, _ = spaces.applicable(problem, machine)
    for name, table in tables.items():
        template = spaces.find(name, problem.operator)
        if not template.comparison:
            try:
                found[spaces.default(template, table, problem, machine)] = None
            except NotApplicable:
                continue
    around = {other for start in list(found)[:AROUND] for other in spaces.neighbours(start, problem, machine)}
    rest = sorted(around - found.keys(), key=str)
    random.Random(problem.key).shuffle(rest)
    return [*found, *rest][:MOST]


def measure(
    problem: Problem, machine: Machine, candidates: Sequence[Candidate], logs: Path, seconds: float, builders: int
) -> dict[str, Any]:
    """Time candidates for about `seconds`, and record the winner under `logs`.

    After seven tenths of that time no candidate is begun.

    Returns the reply of `tuning.measured`, or `{"reason": why nothing was measured}`; failures do not raise.
    """
    present = machines.gpus()
    request = {
        "problem": problem.key,
        "machine": asdict(machine),
        "number": present.index(machine) if machine in present else 0,
        "candidates": [str(candidate) for candidate in candidates],
        "logs": str(logs),
        "seconds": seconds,
        "builders": builders,
        "plugins": plugins(),
    }
    try:
        with kept.pool() as pool:
            reply = pool.submit(request, timeout=seconds + GRACE).result()
    except Exception as error:  # such as a process that does not start: calls work without
        return {"reason": f"{type(error).__name__}: {error}"}
    if reply.ok:
        return dict(reply.value)
    if reply.kind == "timeout":
        return {"reason": f"it takes longer than {seconds + GRACE:.0f} s"}
    return {"reason": reply.message}


kept = Kept(KEEP_SECONDS, WORKER, "measured")
