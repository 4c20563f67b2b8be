"""Records of before under the names that decisions have now; every figure, date and provenance stays."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable
from pathlib import Path

from filelock import FileLock

from ..core.candidate import Candidate
from .codec import UNREADABLE, decode, encode
from .log import LOCK_SECONDS
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

    changed = {}
    for path in sorted(Path(root).glob("*/*/*.jsonl")):
        with FileLock(f"{path}.lock", timeout=LOCK_SECONDS):
            before = path.read_bytes().splitlines(keepends=True)
            after = [_migrated(line, current) for line in before]
            if after != before:
                unfinished = path.with_suffix(".migrating")
                unfinished.write_bytes(b"".join(after))
                os.replace(unfinished, path)
        changed[path] = sum(old != new for old, new in zip(before, after, strict=True))
    return changed


def _migrated(line: bytes, current: Callable[[Candidate], Candidate]) -> bytes:
    try:
        record = decode(line, KINDS)
    except UNREADABLE:
        return line
    if isinstance(record, Session):
        return line
    record = dataclasses.replace(record, candidate=current(record.candidate))
    if isinstance(record, Best):
        record = dataclasses.replace(record, fallback=current(record.fallback))
    return encode(record)
