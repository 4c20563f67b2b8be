"""A candidate: a template's name and version, and a value for each of its decisions."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from operator import index

_NAME = r"[A-Za-z_][A-Za-z0-9_.\-]*"
_CANDIDATE = re.compile(rf"(?P<template>{_NAME})@(?P<version>\d+)\((?P<decisions>.*)\)")
_DECISION = re.compile(rf"({_NAME})=(-?\d+)")


@functools.lru_cache(maxsize=1024)
def _is_name(text: str) -> bool:
    return re.fullmatch(_NAME, text) is not None


@dataclass(frozen=True)
class Candidate:
    """A tuned choice: a schedule template, its version, and a value for each of its decisions.

    Parameters
    ----------
    template : str
        Name of the schedule template.
    version : int
        Version of the template; raised when old decisions would mean something else.
    decisions : tuple of (str, int)
        Name and value of each decision, in the template's order.

    Examples
    --------
    >>> print(Candidate("warp_shuffle", 1, (("rows", 4), ("lanes", 32))))
    warp_shuffle@1(rows=4, lanes=32)
    """

    template: str
    version: int
    decisions: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        # `index` turns NumPy's and TVM's integers into plain ones, and refuses 4.0 and "4".
        decisions = tuple((name, index(value)) for name, value in self.decisions)
        object.__setattr__(self, "version", index(self.version))
        object.__setattr__(self, "decisions", decisions)
        names = [name for name, _ in decisions]
        for name in (self.template, *names):
            if not isinstance(name, str) or not _is_name(name):
                raise ValueError(f"not a name of a template or a decision: {name!r}")
        if len(set(names)) != len(names):
            raise ValueError(f"a decision is named twice: {', '.join(names)}")
        if self.version < 0:
            raise ValueError(f"a template's version is not negative: {self.version}")

    def __str__(self) -> str:
        decisions = ", ".join(f"{name}={value}" for name, value in self.decisions)
        return f"{self.template}@{self.version}({decisions})"

    @classmethod
    def parse(cls, text: str) -> Candidate:
        """Read what `str` writes.

        Raises
        ------
        ValueError
            If `text` is not of the form ``template@version(name=value, ...)``.
        """
        match = _CANDIDATE.fullmatch(text.strip())
        if match is None:
            raise ValueError(f"not a candidate (expected 'template@1(name=value, ...)'): {text!r}")
        decisions = []
        for item in match["decisions"].split(",") if match["decisions"].strip() else ():
            decision = _DECISION.fullmatch(item.strip())
            if decision is None:
                raise ValueError(f"not a decision (expected 'name=4'): {item!r} in {text!r}")
            decisions.append((decision[1], int(decision[2])))
        return cls(match["template"], int(match["version"]), tuple(decisions))

    @property
    def values(self) -> dict[str, int]:
        """The decisions by name."""
        return dict(self.decisions)
