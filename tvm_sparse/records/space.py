"""A completely measured space in a file of its own: a line for each session and trial, as in a log.

Spaces are for studies; `runtime` never reads one. A trial has one time for each *round*: all points are measured once
before any is measured again, so that a drift of the machine affects all of them. A name that ends in ``.xz`` is
compressed: about 100 bytes a point.
"""

from __future__ import annotations

import functools
import lzma
import os
from dataclasses import dataclass
from pathlib import Path

from .codec import UNREADABLE, decode, encode
from .values import Session, Trial

POINTS = "points"
"""In `Session.inputs`: how many points the space has."""


class SpaceError(ValueError):
    """A file that holds no space, or a damaged one."""


@dataclass(frozen=True)
class Space:
    """The trials of one problem's space on one machine, one for each point.

    Parameters
    ----------
    sessions : tuple of Session
        The sessions of the measurement; `inputs` of the last one has the number of points and the space's restrictions.
    trials : tuple of Trial
        In the order in which they were first measured. `Trial.seconds` has one entry for each round.
    """

    sessions: tuple[Session, ...]
    trials: tuple[Trial, ...]

    def __post_init__(self) -> None:
        if not self.sessions or not self.trials:
            raise SpaceError("a space has a session and at least one trial")
        for name, values in (
            ("problem", {trial.problem for trial in self.trials}),
            ("arch", {trial.arch for trial in self.trials}),
        ):
            if len(values) > 1:
                raise SpaceError(f"a space is of one {name}, not of {len(values)}: {', '.join(sorted(values)[:3])}")
        if len({trial.candidate for trial in self.trials}) < len(self.trials):
            raise SpaceError("a point of the space has two trials")

    @property
    def problem(self) -> str:
        """The problem's key."""
        return self.trials[0].problem

    @property
    def arch(self) -> str:
        """The architecture on which it was measured."""
        return self.trials[0].arch

    @functools.cached_property
    def points(self) -> int:
        """Number of points of the space, measured or not."""
        return int(self.sessions[-1].inputs.get(POINTS, len(self.trials)))

    @property
    def complete(self) -> bool:
        """Whether every point has an outcome that does not depend on the machine's state."""
        return len(self.trials) == self.points and all(trial.outcome != "environment" for trial in self.trials)


def read(path: Path) -> Space:
    """Read the space of a file.

    Raises
    ------
    SpaceError
        If a line is damaged (the message names it), or if the file holds more than one space.
    OSError
        If it cannot be read.
    """
    try:
        data = path.read_bytes()
        lines = (lzma.decompress(data) if path.suffix == ".xz" else data).splitlines()
    except lzma.LZMAError as error:
        raise SpaceError(f"{path}: {error}") from error
    kinds = {cls.kind: cls for cls in (Session, Trial)}
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(decode(line, kinds))
        except UNREADABLE as error:
            raise SpaceError(f"{path}, line {number}: {error}") from error
    try:
        return Space(
            tuple(one for one in records if isinstance(one, Session)),
            tuple(one for one in records if isinstance(one, Trial)),
        )
    except SpaceError as error:
        raise SpaceError(f"{path}: {error}") from error


def write(path: Path, space: Space) -> None:
    """Write a space; on failure nothing is written."""
    records: tuple[Session | Trial, ...] = (*space.sessions, *space.trials)
    text = b"".join(encode(record) for record in records)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(lzma.compress(text, preset=9) if path.suffix == ".xz" else text)
    os.replace(unfinished, path)
