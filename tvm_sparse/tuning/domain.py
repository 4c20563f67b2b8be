"""What a search chooses from: the points of several templates' spaces, listed.

Most spaces have hundreds to tens of thousands of points, so a list is cheap, and a search needs no templates: it works
on a recorded space as on a present one. Of a space with millions some are listed (`spaces.searchable`); a search that
makes points up may find others.
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
        What they would run on: MetaSchedule asks for a target.
    tables
        The decisions of each template, each with the values it takes.
    points
        The allowed points, in the tables' order, or some. All of a template have its decisions in the same order.
    prior
        Of each point what a model of other problems' trials (`records.predictor`) says of it, if there is one:
        ln(time / best time of the problem).
    open
        By the names of templates of which only some points are listed: from decisions to the point, None if they are
        not allowed.
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
        """The allowed points of present templates; `trees` make the prior.

        `around`: points whose neighbours are to be listed, too, where not all points are.
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
        """The same points, with what these trees say of them."""
        rows = trees.matrix(features_of(problem, self.machine, point) for point in self.points)
        return dataclasses.replace(self, prior=trees.predict(rows))

    @classmethod
    def recorded(cls, machine: Machine, points: Collection[Candidate]) -> Domain:
        """A domain of these points alone; a decision's values are those that occur, in rising order."""
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
        """The points, those first of which the prior hopes most."""
        if self.prior is None:
            return list(self.points)
        return [self.points[number] for number in self.prior.argsort(kind="stable")]

    @functools.cached_property
    def index(self) -> Mapping[Candidate, int]:
        """The place of each point in `points`."""
        return {point: number for number, point in enumerate(self.points)}

    @functools.cached_property
    def _by_values(self) -> Mapping[tuple[str, tuple[int, ...]], Candidate]:
        """The points by template and their decisions' values: a search asks for thousands."""
        return {(point.template, tuple(value for _, value in point.decisions)): point for point in self.points}

    def candidate(self, template: str, decisions: Mapping[str, int]) -> Candidate | None:
        """The point of these decisions; None if it is not allowed."""
        table = self.tables.get(template, {})
        if decisions.keys() != table.keys():
            return None
        found = self._by_values.get((template, tuple(decisions[name] for name in table)))
        if found is None and template in self.open:
            found = self.open[template]({name: decisions[name] for name in table})
        return found

    @functools.cached_property
    def columns(self) -> Sequence[tuple[str, str | None]]:
        """What a column of `rows` stands for: a template (None), or one of its decisions."""
        return [(name, decision) for name, table in self.tables.items() for decision in (None, *table)]

    def row(self, candidate: Candidate) -> list[float]:
        """A point as numbers: 1 for its template, log2 of a decision's value + 1, and -1 for what it has not."""
        values: dict[tuple[str, str | None], float] = {(candidate.template, None): 1.0}
        values |= {(candidate.template, name): math.log2(value + 1) for name, value in candidate.decisions}
        return [values.get(column, -1.0) for column in self.columns]

    @functools.cached_property
    def rows(self) -> np.ndarray:
        """`row` of every point, and its prior in a last column if there is one."""
        import numpy as np

        found = np.array([self.row(point) for point in self.points], dtype=np.float32)
        return found if self.prior is None else np.column_stack([found, self.prior.astype(np.float32)])
