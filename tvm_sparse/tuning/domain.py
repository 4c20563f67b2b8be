"""The domain of a search: a list of points from several templates' spaces.

Most spaces have hundreds to tens of thousands of points, so a list is cheap, and a search needs no templates: it works
equally on a recorded space. For a space with millions of points a part is listed (`spaces.searchable`); a search that
generates points may find others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..core import spaces
from ..core.candidate import Candidate
from ..core.machine import Machine
from ..core.problem import Problem
from ..core.template import Table, Template
from ..records.predictor import Trees, features_of

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, eq=False)
class Domain:
    """The points of a search.

    Attributes
    ----------
    machine
        The machine of the points: MetaSchedule requires a target.
    tables
        The decisions of each template, each with the values it takes.
    points
        The allowed points in the tables' order, or a part of them. All points of a template have their decisions in the
        same order.
    prior
        For each point the prediction of a model of other problems' trials (`records.predictor`), if there is one:
        ln(time / best time of the problem).
    open
        For templates of which only a part of the points is listed, by name: a function from decisions to the point, or
        None if they are not allowed.
    """

    machine: Machine
    tables: Mapping[str, Table]
    points: tuple[Candidate, ...]
    prior: np.ndarray | None = None
    open: Mapping[str, Callable[[Mapping[str, int]], Candidate | None]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(
        cls,
        problem: Problem,
        machine: Machine,
        tables: Mapping[str, Table],
        trees: Trees | None = None,
        around: Collection[Candidate] = (),
    ) -> Domain:
        """The allowed points of the present templates; `trees` compute the prior.

        `around`: points whose neighbours are listed too, where only a part of the points is.
        """
        listed = tuple(spaces.searchable(problem, machine, tables, around))

        def point(template: Template, decisions: Mapping[str, int]) -> Candidate | None:
            candidate = template.candidate(decisions)
            there = spaces.among(candidate, tables) and template.allowed(problem, machine, decisions) is None
            return candidate if there else None

        some = {name: functools.partial(point, spaces.find(name)) for name in spaces.drawn(tables)}
        made = cls(machine, tables, listed, open=some)
        return made if trees is None else made.with_prior(problem, trees)

    def with_prior(self, problem: Problem, trees: Trees) -> Domain:
        """The same points, with the prior of these trees."""
        rows = trees.matrix(features_of(problem, self.machine, point) for point in self.points)
        return dataclasses.replace(self, prior=trees.predict(rows))

    @classmethod
    def recorded(cls, machine: Machine, points: Collection[Candidate]) -> Domain:
        """A domain of these points alone; a decision's values are those that occur, in ascending order."""
        ordered = sorted(points, key=lambda c: (c.template, [value for _, value in c.decisions]))
        values: dict[str, dict[str, set[int]]] = {}
        for point in ordered:
            table = values.setdefault(point.template, {name: set() for name, _ in point.decisions})
            if list(table) != [name for name, _ in point.decisions]:
                raise ValueError(f"{point}: other points of the template have the decisions {', '.join(table)}")
            for name, value in point.decisions:
                table[name].add(value)
        tables = {name: {d: tuple(sorted(v)) for d, v in table.items()} for name, table in values.items()}
        return cls(machine, tables, tuple(ordered))

    def hoped(self) -> list[Candidate]:
        """The points in ascending order of the prior, the most promising first."""
        if self.prior is None:
            return list(self.points)
        return [self.points[number] for number in self.prior.argsort(kind="stable")]

    @functools.cached_property
    def index(self) -> Mapping[Candidate, int]:
        """The index of each point in `points`."""
        return {point: number for number, point in enumerate(self.points)}

    @functools.cached_property
    def _by_values(self) -> Mapping[tuple[str, tuple[int, ...]], Candidate]:
        """The points by template and their decisions' values, since a search queries thousands."""
        return {(point.template, tuple(value for _, value in point.decisions)): point for point in self.points}

    def candidate(self, template: str, decisions: Mapping[str, int]) -> Candidate | None:
        """The point with these decisions; None if it is not allowed."""
        table = self.tables.get(template, {})
        if decisions.keys() != table.keys():
            return None
        found = self._by_values.get((template, tuple(decisions[name] for name in table)))
        if found is None and template in self.open:
            found = self.open[template]({name: decisions[name] for name in table})
        return found

    @functools.cached_property
    def columns(self) -> Sequence[tuple[str, str | None]]:
        """The meaning of the columns of `rows`: a template (None), or one of its decisions."""
        return [(name, decision) for name, table in self.tables.items() for decision in (None, *table)]

    def row(self, candidate: Candidate) -> list[float]:
        """A point as numbers: 1 for its template, log2(value + 1) for its decisions, and -1 for what it lacks."""
        values: dict[tuple[str, str | None], float] = {(candidate.template, None): 1.0}
        values |= {(candidate.template, name): math.log2(value + 1) for name, value in candidate.decisions}
        return [values.get(column, -1.0) for column in self.columns]

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """`row` of every point, with its prior in a last column if there is one."""
        import numpy as np

        found = np.array([self.row(point) for point in self.points], dtype=np.float32)
        return found if self.prior is None else np.column_stack([found, self.prior.astype(np.float32)])
