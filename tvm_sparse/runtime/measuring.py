"""The few best candidates of look-up, timed on this machine before one of them is run: what `warmup(seconds=)` does.

Which ones these are is said here (`contenders`). They are built, checked against the reference and timed by a process
of its own, `tuning.measured`, with what a tuning run uses, and the winner stands in the user's records from then on. A
crash, a hang or an illegal access costs that process, not this one.
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
# Candidates of one problem, as far as the time suffices; of each kind of evidence the best few.
MOST, RUNNERS_UP = 24, 3
# Neighbours are drawn around so many of them.
AROUND = 2
# The process stays for so long after a problem: it and its children have imported the compiler, and set up the device.
KEEP_SECONDS = 60.0


def contenders(problem: Problem, machine: Machine, choice: Choice, evidence: Evidence) -> list[Candidate]:
    """What may be the fastest for a problem by what is known, the most likely first; the fallback is among them.

    The chosen decisions, the fallback, those of the nearest records, of this architecture or another one, the
    predictor's best, and every template's default; then what differs from the first of these in one decision, drawn at
    random. Points of the problem's own spaces alone.
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
            except ProblemError:  # recorded by a version whose problems had other axes
                continue
            if away is not None:
                near.append((away, key, known.candidate))
        likely = dict.fromkeys(filter(None, (fitting(candidate) for *_, candidate in sorted(near)[: 4 * RUNNERS_UP])))
        found |= dict.fromkeys(list(likely)[:RUNNERS_UP])
    predictor = evidence.predictor()
    if predictor is not None:
        found |= dict.fromkeys(predictor.fastest(problem, machine, RUNNERS_UP))
    tables, _ = spaces.applicable(problem, machine)
    for name in tables:
        template = spaces.find(name, problem.operator)
        if not template.comparison:
            try:
                found[template.candidate(template.default(problem, machine))] = None
            except NotApplicable:
                continue
    around = {other for start in list(found)[:AROUND] for other in spaces.neighbours(start, problem, machine)}
    rest = sorted(around - found.keys(), key=str)
    random.Random(problem.key).shuffle(rest)
    return [*found, *rest][:MOST]


def measure(
    problem: Problem, machine: Machine, candidates: Sequence[Candidate], logs: Path, seconds: float, builders: int
) -> dict[str, Any]:
    """Have candidates timed, and the winner recorded under `logs`, within `seconds`.

    Returns what `tuning.measured` replies, or `{"reason": why nothing was measured}`: nothing that goes wrong raises.
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
            reply = pool.submit(request, timeout=seconds).result()
    except Exception as error:  # a process that does not start, say: calls do without
        return {"reason": f"{type(error).__name__}: {error}"}
    if reply.ok:
        return dict(reply.value)
    if reply.kind == "timeout":
        return {"reason": f"it takes longer than {seconds:.0f} s"}
    return {"reason": reply.message}


kept = Kept(KEEP_SECONDS, WORKER, "measured")
