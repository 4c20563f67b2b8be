"""Queries over several logs: the best known candidate of each problem, and the predictor trained on them."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core import registry, spaces
from ..core.problem import ProblemError
from .log import Log
from .predictor import NAME, Predictor, PredictorError, read
from .values import MEASURED, Best, Trial

logger = logging.getLogger("tvm_sparse")


@dataclass(frozen=True)
class Failure:
    """A way in which trials of one template failed."""

    count: int
    template: str
    outcome: str  # one of `values.OUTCOMES`
    reason: str  # first line of the reason of one such trial
    candidate: str  # of that trial


def failures(trials: Iterable[Trial]) -> list[Failure]:
    """Failures of trials by kind, the most frequent first; reasons that differ only in numbers count as one."""
    groups: dict[tuple[str, str, str], list[Trial]] = {}
    for trial in trials:
        if trial.outcome != "ok":
            key = trial.candidate.template, trial.outcome, without_numbers(_first_line(trial.reason))
            groups.setdefault(key, []).append(trial)
    found = [
        Failure(len(same), template, outcome, _first_line(same[0].reason), str(same[0].candidate))
        for (template, outcome, _), same in groups.items()
    ]
    return sorted(found, key=lambda failure: -failure.count)


def without_numbers(reason: str) -> str:
    """A reason with `#` for each number, to group reasons that differ only in numbers."""
    return re.sub(r"\d[\d.,]*", "#", reason)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def predictor(roots: Sequence[Path], arch: str, operator: str) -> Predictor | None:
    """The predictor of an operator for `arch`, from the last folder that has one.

    None if there is none, or if it was trained with templates of another version. One that cannot be read is ignored
    with a warning.
    """
    for root in reversed(roots):
        path = root / arch / operator / NAME
        if path.exists():
            try:
                found = read(path)
            except PredictorError as error:
                logger.warning("left aside: %s", error)
                continue
            if found.outdated is None:
                return found
    return None


def recorded_archs(roots: Sequence[Path], operators: Iterable[str]) -> list[str]:
    """The architectures that have a log of one of these operators."""
    return sorted({path.parent.name for root in roots for name in operators for path in root.glob(f"*/{name}")})


def best_records(
    roots: Sequence[Path], arch: str, operators: Iterable[str] | None = None
) -> dict[str, tuple[Best, dict[str, Any]]]:
    """The best record of each problem for `arch`, with its figures; later folders win, and in a folder later records.

    The figures of a ranking with fresh inputs have the entry `inputs`. Without `operators` all are read; templates of
    operators not named are not imported.

    Records of removed templates or other versions are left out, since their decisions mean another program; an older
    record of the present version counts instead. Records whose problem cannot be read, since their operator had other
    axes, are left out too.
    """
    found: dict[str, tuple[Best, dict[str, Any]]] = {}
    for operator in registry.operators() if operators is None else operators:
        logs = [log for root in roots if (log := Log(root, arch, operator)).best_path.exists()]
        if not logs:
            continue
        current = {template.name: template.version for template in spaces.templates(operator)}

        def valid(record: Best, current: dict[str, int] = current) -> bool:
            return current.get(record.candidate.template) == record.candidate.version and _readable(record.problem)

        for log in logs:
            if not (best := log.best(valid)):
                continue
            sessions = log.sessions()
            for key, record in best.items():
                session = sessions.get(record.session)
                figures = {
                    "arch": arch,
                    "problem": key,
                    "seconds": record.seconds,
                    "fallback_seconds": record.fallback_seconds,
                    "session": record.session,
                    "machine": session.machine.get("name", "") if session else "",
                    "date": session.date if session else "",
                }
                if session is not None and session.strategy == MEASURED:
                    figures["strategy"] = MEASURED
                if session is not None and session.fresh:
                    figures["inputs"] = session.state
                if record.ways:
                    seconds, way = min((seconds, way) for way, seconds in record.ways.items())
                    figures |= {"way": way, "way_seconds": seconds}
                found[key] = (record, figures)
    return found


@functools.lru_cache(maxsize=4096)
def _readable(key: str) -> bool:
    """Whether this version has the operator of a problem key, and the problem is valid."""
    try:
        registry.parse(key)
    except ProblemError:
        return False
    return True
