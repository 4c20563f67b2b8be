"""Findings of fuzzing, and the coverage of an input."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import tvm_sparse

PACKAGE = str(Path(tvm_sparse.__file__).parent)
# Processor seconds above which a case is a finding.
SLOW = 10.0


@dataclass
class Report:
    """Results of a target's cases."""

    target: str
    how: str
    cases: int = 0
    taken: int = 0
    refused: int = 0
    kept: int = 0  # inputs that reached new transitions
    ways: int = 0  # transitions between lines of the package
    findings: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Coverage:
    """Records the transitions between lines of this package that the block takes."""

    def __init__(self) -> None:
        self.ways: set[tuple[Any, int, int]] = set()

    def __enter__(self) -> Coverage:
        self.ways.clear()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code, last = frame.f_code, 0
        if not code.co_filename.startswith(PACKAGE):
            return None
        ways = self.ways

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                ways.add((code, last, frame.f_lineno))
                last = frame.f_lineno
            return line

        return line


def found_error(report: Report, error: BaseException, what: str) -> None:
    """Note a finding, without duplicates."""
    import traceback

    where = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
    at = f"{Path(where[-1].filename).relative_to(PACKAGE)}:{where[-1].lineno}" if where else "?"
    text = f"{report.target}: {type(error).__name__} at {at}: {str(error)[:300]}"
    if not any(one.startswith(text[:80]) for one in report.findings):
        report.findings.append(f"{text}\n    {what}")
