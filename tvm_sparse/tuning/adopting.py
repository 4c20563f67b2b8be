"""Adopting a GPU that nobody has tuned on yet: how look-up serves a set of problems there, and the plan of
measurements.

    standings ──► checked: each default and borrowed kernel once, beside the fallback ──► tuned: the farthest from the
    limit first ──► a folder of records

All measurements are in that folder, from which an interrupted run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ..core import registry, scratch, shape_files, spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..records import MEASURED, Log
from ..runtime.dispatch import Dispatcher
from ..runtime.lookup import Choice
from .plans import Measured, Plan, recorded, uncounted

SETS = tuple(registry.SETS)
# Trials of each problem after each stage: all problems get the first number before any gets the second.
PASSES = (16, 48)
# No kernel takes less time than this, whatever it reads: problems close to it have nothing to gain.
LEAST_SECONDS = 2e-6
# Bytes per second assumed where the bandwidth is unknown: only the order of problems depends on it.
SOME_BANDWIDTH = 2e10


@dataclass(frozen=True)
class Standing:
    """How look-up serves a problem on a machine, from records alone."""

    problem: Problem
    machine: Machine
    choice: Choice

    @property
    def own(self) -> bool:
        """Whether the problem was tuned on this model of a machine."""
        tuned = self.choice.how == "exact" and "strategy" not in self.choice.figures
        return tuned and self.choice.figures.get("machine") in (self.machine.name, "")

    @property
    def how(self) -> str:
        """The way of look-up, in a word, with the machine of the decisions if it is another one."""
        word = {"fallback": "default"}.get(self.choice.how, self.choice.how)
        if word == "exact" and "strategy" in self.choice.figures:
            word = "measured"
        other = self.choice.figures.get("machine", "")
        return f"{word} ({other})" if other and other != self.machine.name else word

    @property
    def refusal(self) -> str | None:
        """Why the decisions cannot be built for the machine, as far as this is known without compiling."""
        return spaces.refusal(self.choice.candidate, self.choice.compiled_for, self.machine)

    def candidates(self) -> tuple[Candidate, ...]:
        """The fallback, and look-up's choice if it is another point."""
        fallback = spaces.fallback(self.problem, self.machine)
        return tuple(dict.fromkeys([fallback, self.choice.candidate]))


def problems_of(name: str) -> list[Problem]:
    """The problems of a set (`SETS`), or of `all` sets, as calls look them up."""
    names = SETS if name == "all" else (name,)
    found = [one for each in names for one in shape_files.read(Path(__file__).parent / "sets" / f"{each}.toml")]
    return list(dict.fromkeys(problem.as_called() for problem in found))


def standings(problems: Sequence[Problem], machine: Machine, roots: Sequence[Path]) -> list[Standing]:
    """How look-up serves problems with the records under `roots`."""
    with scratch.folder() as nothing:
        own = Dispatcher(logs=tuple(roots), shipped=nothing / "kernels", cache=nothing / "cache")
        return [Standing(problem, machine, own.choice(problem, machine)) for problem in problems]


@dataclass(frozen=True)
class Row:
    """The results for a problem."""

    standing: Standing
    before: float | None  # seconds of look-up's choice; None if not measured, or wrong
    after: float | None  # seconds of the best that is recorded now
    fallback: float | None
    trials: int
    fault: str  # why look-up's choice has no time; empty if it has, or was not measured

    @property
    def gain(self) -> float | None:
        """Speed-up over `before`."""
        return self.before / self.after if self.before and self.after else None


def rows(
    standings: Sequence[Standing], folder: Path, finals: Mapping[str, Mapping[Candidate, float]] = MappingProxyType({})
) -> list[Row]:
    """The results in the folder of records, for each problem.

    `finals`: by problem key, times of candidates from finals, which are preferred since they were measured in turn.
    """
    logs: dict[tuple[str, str], tuple[Log, Mapping[str, Measured]]] = {}
    found = []
    for one in standings:
        place = one.machine.arch, one.problem.operator
        if place not in logs:
            log = Log(folder, *place)
            logs[place] = log, recorded(log)
        log, known = logs[place]
        measured, best = known.get(one.problem.key, {}), log.best().get(one.problem.key)
        fault = ""
        if one.choice.candidate in measured and measured[one.choice.candidate] is None:
            said = [t for t in log.read().trials if (t.problem, t.candidate) == (one.problem.key, one.choice.candidate)]
            fault = f"{said[-1].outcome}: {said[-1].reason}"
        before = measured.get(one.choice.candidate)
        if best is not None and before is not None:
            in_turn = {best.fallback: best.fallback_seconds, best.candidate: best.seconds}
            in_turn = {**finals.get(one.problem.key, {}), **in_turn}
            before = in_turn.get(one.choice.candidate, before)
        found.append(
            Row(
                one,
                before,
                best.seconds if best else None,
                best.fallback_seconds if best else measured.get(spaces.fallback(one.problem, one.machine)),
                len(measured),
                fault,
            )
        )
    return found


def checks(before: Sequence[Row], builders: int, limit: float | None = None) -> list[Plan]:
    """Plans that measure look-up's choice for each problem, and the fallback, once each, unless they are known."""
    plans = []
    for row in before:
        one = row.standing
        known = {c for c, seconds in ((one.choice.candidate, row.before or row.fault),) if seconds}
        known |= {spaces.fallback(one.problem, one.machine)} if row.fallback else set()
        unknown = [candidate for candidate in one.candidates() if candidate not in known]
        if unknown:
            fields = {"strategy": MEASURED, "proposed": one.candidates(), "rounds": 1, "limit": limit, "given": 2}
            plans.append(uncounted(one.problem, one.machine, len(unknown), builders, **fields))
    return plans


def worth(row: Row, bandwidth: float | None) -> float:
    """Time of a problem as a multiple of its limit: at 1 there is nothing to gain."""
    seconds = row.after or row.before or row.fallback
    if seconds is None:
        return float("inf")
    limit = row.standing.problem.cost().bytes / (bandwidth or SOME_BANDWIDTH)
    return seconds / max(limit, LEAST_SECONDS)


def searches(before: Sequence[Row], trials: int, bandwidth: float | None, builders: int) -> list[Plan]:
    """Plans that tune problems up to a number of trials, those farthest from their limit first."""
    plans = []
    for row in sorted(before, key=lambda row: -worth(row, bandwidth)):
        one = row.standing
        if row.trials < trials:
            rivals = {} if row.fault else {one.choice.candidate: one.choice.compiled_for}
            fields = {"proposed": one.candidates(), "rivals": rivals}
            plans.append(uncounted(one.problem, one.machine, trials - row.trials, builders, **fields))
    return plans
