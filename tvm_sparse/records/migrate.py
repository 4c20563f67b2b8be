"""Rewriting records of an earlier version of a template for the present one; times, dates and provenance stay."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from ..core import machine, registry, spaces
from ..core.candidate import Candidate
from ..core.problem import ProblemError
from ..core.template import NotApplicable
from . import predictor
from .codec import UNREADABLE, decode, encode
from .log import Log, rewrite
from .values import Best, Session, Trial

KINDS = {cls.kind: cls for cls in (Trial, Session, Best)}
Present = Callable[[Candidate], Candidate]
Current = Callable[[Trial | Best, Candidate], Candidate]
# Seconds of candidates, by problem and by session.
Times = dict[str, dict[str, dict[Candidate, float]]]


def migrate(root: Path, present: Present) -> dict[Path, int]:
    """Rewrite the logs under `root`; returns the number of changed lines of each. Unreadable lines stay as they are.

    Parameters
    ----------
    present
        (candidate) -> the same point under the present names of its template and its decisions.
    """

    def current(record: Trial | Best, candidate: Candidate) -> Candidate:
        return present(candidate)

    return {
        path: rewrite(path, lambda lines: [_migrated(line, current) for line in lines])
        for path in sorted(Path(root).glob("*/*/*.jsonl"))
    }


@dataclasses.dataclass(frozen=True)
class Restamped:
    """The changes that `restamp` made to one file.

    Attributes
    ----------
    changed
        Number of lines of a log, or 1 for a predictor.
    left
        Number of candidates that keep their version, by the reason.
    """

    changed: int
    left: Counter[str]


def restamp(root: Path, template: str, before: int, now: int, *, dry_run: bool = False) -> dict[Path, Restamped]:
    """Give the records of version `before` of a template the version `now`, in trials, rankings and predictors.

    Use it after a change of machine code that leaves every recorded kernel as fast as before, so that earlier times
    hold for the present version (`scripts/compare_trees.py` times both in turns). Candidates whose decisions differ in
    name from the template's present ones keep their version, as do unreadable lines. Running it again changes nothing.

    Parameters
    ----------
    dry_run
        Count, and write nothing.

    Raises
    ------
    ProblemError
        If there is no such template, `now` is not its present version, or `before` is not an earlier one.
    PredictorError
        If a predictor of the template's operator cannot be read. Nothing is written.
    """
    try:
        found = spaces.find(template)
    except KeyError:
        names = (one.name for one in spaces.templates())
        raise ProblemError(f"template: got {template!r}; {registry.nearest(template, names)}") from None
    if now != found.version:
        raise ProblemError(f"to: {template} is at version {found.version}, got {now}; expected {found.version}")
    if not 0 <= before < now:
        raise ProblemError(f"from: expected an earlier version of {template} than {now}, got {before}")

    @functools.cache
    def names_of(problem: str, arch: str) -> tuple[str, ...] | str:
        """Names of the template's decisions, or the reason why it does not fit the problem."""
        try:
            return tuple(found.space(registry.parse(problem), machine.resolve(arch)))
        except (NotApplicable, ProblemError, machine.UnknownArch) as error:
            return str(error)

    models = {path: predictor.read(path) for path in sorted(Path(root).glob(f"*/{found.operator}/{predictor.NAME}"))}
    done = {}
    for path in sorted(Path(root).glob(f"*/{found.operator}/*.jsonl")):
        left: Counter[str] = Counter()

        def current(record: Trial | Best, candidate: Candidate, left: Counter[str] = left) -> Candidate:
            if (candidate.template, candidate.version) != (template, before):
                return candidate
            names = names_of(record.problem, record.arch)
            if tuple(candidate.values) == names:
                return dataclasses.replace(candidate, version=now)
            had = ", ".join(candidate.values) or "none"
            left[names if isinstance(names, str) else f"decisions are {had}; expected {', '.join(names)}"] += 1
            return candidate

        def changed(lines: list[bytes], current: Current = current) -> list[bytes]:
            return [_migrated(line, current) for line in lines]

        if dry_run:
            lines = path.read_bytes().splitlines(keepends=True)
            count = sum(one != other for one, other in zip(lines, changed(lines), strict=True))
        else:
            count = rewrite(path, changed)
        done[path] = Restamped(count, left)
    for path, model in models.items():
        anew = _restamped(model, template, before, now)
        if anew != model and not dry_run:
            anew.write(Path(root))
        done[path] = Restamped(int(anew != model), Counter())
    return done


def compare_anew(root: Path) -> dict[Path, int]:
    """Compare rankings on GPUs with today's fallbacks; returns the number of changed lines of each file.

    Look-up uses the decisions of another problem if they beat the fallback there, and that is known of the fallback of
    the time. Where the default has changed since, and a session has timed both the winner and today's fallback, the
    ranking names today's, with the winner's time multiplied by the ratio of their trials. Others stay as they are, and
    running it again changes nothing.
    """
    done = {}
    for path in sorted(Path(root).glob("*/*/best.jsonl")):
        arch, operator = path.parts[-3:-1]
        times: Times = {}
        for trial in Log(root, arch, operator).read().trials:
            if trial.outcome == "ok":
                times.setdefault(trial.problem, {}).setdefault(trial.session, {})[trial.candidate] = trial.median

        def compared(lines: list[bytes], times: Times = times) -> list[bytes]:
            return [_compared_anew(line, times) for line in lines]

        done[path] = rewrite(path, compared)
    return done


def _compared_anew(line: bytes, times: Times) -> bytes:
    try:
        record = decode(line, KINDS)
        if not isinstance(record, Best):
            return line
        where = machine.resolve(record.arch)
        today = spaces.fallback(registry.parse(record.problem), where)
    except (*UNREADABLE, ProblemError, machine.UnknownArch):
        return line
    if where.kind != "cuda" or today == record.fallback:
        return line
    both = [
        found[today] / found[record.candidate]
        for found in times.get(record.problem, {}).values()
        if today in found and record.candidate in found
    ]
    if not both:
        return line
    seconds = record.seconds * max(1.0, statistics.median(both))
    return encode(dataclasses.replace(record, fallback=today, fallback_seconds=seconds, fallback_all=()))


def _restamped(model: predictor.Predictor, template: str, before: int, now: int) -> predictor.Predictor:
    def current(candidate: Candidate) -> Candidate:
        mine = (candidate.template, candidate.version) == (template, before)
        return dataclasses.replace(candidate, version=now) if mine else candidate

    if model.templates.get(template) != before:
        return model
    return dataclasses.replace(
        model,
        templates={**model.templates, template: now},
        known=tuple(map(current, model.known)),
        probes=tuple(
            dataclasses.replace(probe, candidate=str(current(Candidate.parse(probe.candidate))))
            for probe in model.probes
        ),
    )


def _migrated(line: bytes, current: Current) -> bytes:
    """The line with its candidates replaced by `current`; unchanged if no candidate changes or the line is
    unreadable.
    """
    try:
        record = decode(line, KINDS)
    except UNREADABLE:
        return line
    if isinstance(record, Session):
        return line
    now = dataclasses.replace(record, candidate=current(record, record.candidate))
    if isinstance(now, Best):
        now = dataclasses.replace(now, fallback=current(now, now.fallback))
    return line if now == record else encode(now)
