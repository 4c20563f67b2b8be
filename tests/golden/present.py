"""Stored points under the decisions that their template has now.

A template may have got or lost a decision since its points were chosen. A stored point is then the point with the same
program: a renamed decision has its present name, and a new one has its *neutral* value, which means the program of
before. A removed decision goes from the points whose value means the present program; the others are no points any
more. `schedules/vocabulary.py` declares all three, for records (`tvm-sparse db migrate`) as for these points. For a new
decision that it does not declare, the neutral value is looked for: the value at which every point emits the code of its
fingerprint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tvm_sparse.core import spaces
from tvm_sparse.core.registry import parse
from tvm_sparse.core.template import NotApplicable, Table

from . import Golden, Point, machine_fingerprint, source_unchanged


@dataclass(frozen=True)
class Present:
    """The stored points of a template as they are now.

    Attributes
    ----------
    points
        By stored key, the point with the template's present decisions.
    gone
        By stored key, why there is no such point now.
    undeclared
        Values given to new decisions that the vocabulary does not declare.
    neutral
        Whether all points emit the machine code of their fingerprints at the `undeclared` values.
    """

    points: Mapping[str, Point]
    gone: Mapping[str, str]
    undeclared: Mapping[str, int]
    neutral: bool


def present(golden: Golden) -> Present:
    """The points of a template's fingerprints, under its present decisions."""
    template = spaces.find(golden.template)
    tables: dict[str, Table] = {}
    outside: dict[str, str] = {}
    for key in golden.points:
        point = golden.point(key)
        try:
            tables[key] = template.space(parse(point.problem), point.machine)
        except NotApplicable as error:
            outside[key] = str(error)

    def at(values: Mapping[str, int]) -> Present:
        """The points where new decisions that are not declared have these values."""
        points, gone = {}, dict(outside)
        for key, table in tables.items():
            stored = golden.point(key)
            known = {**values, **stored.candidate.values}
            removed = [f"{name}={value}" for name, value in stored.candidate.decisions if name not in table]
            if removed:
                gone[key] = f"{', '.join(removed)} is no decision any more, and RENAMED does not declare it removed"
                continue
            candidate = template.candidate({name: known[name] for name in table})
            reason = template.point(parse(stored.problem), stored.machine, candidate.values)
            if reason is None:
                points[key] = Point(stored.problem, candidate, stored.older)
            else:
                gone[key] = reason
        return Present(points, gone, values, neutral=True)

    choices = [at(values) for values in _choices(golden, tables)]
    if len(choices) == 1 and not choices[0].undeclared:
        return choices[0]
    # The emitted text is cheap, and mostly decides; machine code may be the same where it does not.
    for same in (_same_source, _same_machine):
        for found in choices:
            if len(found.points) == len(tables) and all(same(golden, *item) for item in found.points.items()):
                return found
    most = max(choices, key=lambda found: len(found.points))
    return Present(most.points, most.gone, most.undeclared, neutral=False)


def _choices(golden: Golden, tables: Mapping[str, Table]) -> Iterator[dict[str, int]]:
    """Every combination of values of the decisions that are in a point's table, and neither stored nor declared."""
    new: dict[str, dict[int, None]] = {}
    for key, table in tables.items():
        stored = golden.point(key).candidate.values
        for name, values in table.items():
            if name not in stored:
                new.setdefault(name, {}).update(dict.fromkeys(values))
    for values in itertools.product(*new.values()):
        yield dict(zip(new, values, strict=True))


def _same_source(golden: Golden, key: str, point: Point) -> bool:
    return source_unchanged(point, golden.points[key])


def _same_machine(golden: Golden, key: str, point: Point) -> bool:
    return machine_fingerprint(point) == golden.points[key]["machine"]
