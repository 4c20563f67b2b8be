"""Questions to several logs: the best that is known of each problem, and the model that was trained on them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..core import registry, spaces
from ..core.problem import ProblemError
from .log import Log
from .predictor import NAME, Predictor, PredictorError, read
from .values import MEASURED, Best

logger = logging.getLogger("tvm_sparse")


def predictor(roots: Sequence[Path], arch: str, operator: str) -> Predictor | None:
    """The predictor of an operator for `arch`; that of the last folder that has one.

    None if there is none, or if it was trained with templates of another version. One that cannot be read is left aside
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
    """The best record of each problem for `arch`, with its figures; later folders win.

    The figures of a ranking with fresh inputs say so as `inputs`, those of others say nothing.
    Of all operators, or of those named: no template of any other is imported.

    Records whose template has gone or has another version now are left out: their decisions mean another program.
    So are those whose problem cannot be read: their operator had other axes.
    """
    found: dict[str, tuple[Best, dict[str, Any]]] = {}
    for operator in registry.operators() if operators is None else operators:
        current: dict[str, int] = {}
        for root in roots:
            log = Log(root, arch, operator)
            if not (best := log.best()):
                continue
            current = current or {template.name: template.version for template in spaces.templates(operator)}
            sessions = log.sessions()
            for key, record in best.items():
                if current.get(record.candidate.template) != record.candidate.version:
                    continue
                try:
                    registry.parse(key)
                except ProblemError:
                    continue
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
