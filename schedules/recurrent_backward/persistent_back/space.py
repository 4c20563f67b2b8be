"""The space of `persistent_back`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Table, ceildiv
from tvm_sparse.operators.recurrent_backward.problem import RecurrentBackward
from tvm_sparse.operators.sparse_recurrent.problem import EXCHANGES

from ...recurrent.sizes import WIDEST
from ...sparse_recurrent.persistent_rows.space import Extents
from ...sparse_recurrent.persistent_rows.space import allowed as _allowed
from ...sparse_recurrent.persistent_rows.space import default as _default
from ...sparse_recurrent.persistent_rows.space import launch as _launch
from ...sparse_recurrent.persistent_rows.space import space as _space

extent = Derived["BackExtents", int]
whether = Derived["BackExtents", bool]


@dataclass(frozen=True)
class BackExtents(Extents):
    """The sizes of one point's kernel: those of a layer of one gate whose weight is the transposed one.

    Thread blocks exchange the gradients of all gates after a step, `columns` of them: that of a unit's gate is number
    gate * hidden + unit. With the reset before the product the weight has the rows of three gates, those of each gate's
    gradients, which come at two times: the last gate's begin at a whole vector, after a gap.
    """

    derived: int  # gates of the cell, of each of which a step yields a gradient
    kept: int  # values that a step keeps of each unit
    cuts: bool  # whether steps may begin a sequence, so that no gradient goes further back

    @classmethod
    def of(cls, problem: Any, decisions: Decisions, polled: bool = True) -> BackExtents:
        layer = {**vars(Extents.of(problem, decisions, polled)), "gates": problem.parts, "resets": False}
        layer["nonzeros"] = ceildiv(problem.nonzeros, problem.parts)
        return cls(**layer, derived=problem.gates, kept=problem.kept, cuts=bool(problem.resets))

    # Whether gradients of a step come at two times.
    twice = whether(lambda e: EXCHANGES.get(e.cell, 1) == 2)
    # Slots of a step: both times' gradients are in one.
    exchanges = extent(lambda e: 1)
    # Whether a part of the gradient goes to the state before the step without the recurrent weight.
    mixed = whether(lambda e: e.cell.startswith("gru"))
    has_own = whether(lambda e: e.mixed or e.ragged)

    @property
    def gap(self) -> tuple[int, int]:
        first, vector = 2 * self.hidden, WIDEST // self.column_bytes
        return (first, vector - first % vector) if self.twice else (0, 0)

    columns = extent(lambda e: e.derived * e.hidden + e.gap[1])

    @property
    def regions(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """The gradients of the first two gates and those of the last one: the first vector, and how many."""
        first = sum(self.gap) * self.column_bytes // WIDEST
        return (0, first), (first, self.vectors - first)

    stage_bytes = extent(lambda e: e.vectors * WIDEST if e.twice else Extents.stage_bytes.find(e))

    def column(self, gate: Any) -> Any:
        """The column of a gate's first unit."""
        return gate * self.hidden + (gate // 2 * self.gap[1] if self.twice else 0)

    def held_in(self, form: str) -> int:
        """`held`: with two steps' inputs, and the gradients of a unit's gates."""
        return super().held_in(form) + 2 * self.units * (self.kept + 1) + self.derived


def space(problem: RecurrentBackward, machine: Machine) -> Table:
    return _space(problem, machine, BackExtents.of)


default = functools.partial(_default, of=BackExtents.of)
allowed = functools.partial(_allowed, of=BackExtents.of)
launch = functools.partial(_launch, of=BackExtents.of)
