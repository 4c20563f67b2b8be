"""Records of before under the names that decisions have now; every figure, date and provenance stays."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from ..core.candidate import Candidate
from .codec import UNREADABLE, decode, encode
from .log import rewrite
from .values import Best, Session, Trial

KINDS = {cls.kind: cls for cls in (Trial, Session, Best)}
Renamed = Callable[[str, Iterable[tuple[str, int]]], tuple[tuple[str, int], ...]]


def migrate(root: Path, renamed: Renamed) -> dict[Path, int]:
    """Rewrite the logs under `root`; how many lines of each changed. Lines that cannot be read stay as they are.

    Parameters
    ----------
    renamed
        (template, decisions) -> the decisions under their names of now.
    """

    def current(candidate: Candidate) -> Candidate:
        return dataclasses.replace(candidate, decisions=renamed(candidate.template, candidate.decisions))

    return {
        path: rewrite(path, lambda lines: [_migrated(line, current) for line in lines])
        for path in sorted(Path(root).glob("*/*/*.jsonl"))
    }


def _migrated(line: bytes, current: Callable[[Candidate], Candidate]) -> bytes:
    try:
        record = decode(line, KINDS)
    except UNREADABLE:
        return line
    if isinstance(record, Session):
        return line
    now = dataclasses.replace(record, candidate=current(record.candidate))
    if isinstance(now, Best):
        now = dataclasses.replace(now, fallback=current(now.fallback))
    return line if now == record else encode(now)
