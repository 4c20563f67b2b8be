"""The space of `persistent_back`, and the sizes of each of its points. Loads no compiler."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Table
from tvm_sparse.operators.recurrent_backward.problem import RecurrentBackward

from ...recurrent.sizes import require_one_exchange
from ...sparse_recurrent.persistent_rows.space import Extents
from ...sparse_recurrent.persistent_rows.space import allowed as _allowed
from ...sparse_recurrent.persistent_rows.space import default as _default
from ...sparse_recurrent.persistent_rows.space import launch as _launch
from ...sparse_recurrent.persistent_rows.space import space as _space


@dataclass(frozen=True)
class BackExtents(Extents):
    """The sizes of one point's kernel: those of a layer of one gate whose weight is the transposed one.

    Thread blocks exchange the gradients of all gates after a step, `columns` of them: that of a unit's gate is number
    gate * hidden + unit.
    """

    derived: int  # gates of the cell, of each of which a step yields a gradient
    kept: int  # values that a step keeps of each unit
    cuts: bool  # whether steps may begin a sequence, so that no gradient goes further back

    @classmethod
    def of(cls, problem: Any, decisions: Decisions, polled: bool = True) -> BackExtents:
        layer = {**vars(Extents.of(problem, decisions, polled)), "gates": 1, "resets": False}
        return cls(**layer, derived=problem.gates, kept=problem.kept, cuts=bool(problem.resets))

    @property
    def columns(self) -> int:
        return self.derived * self.hidden

    def held_in(self, form: str) -> int:
        """`held`: with two steps' inputs, and the gradients of a unit's gates."""
        return super().held_in(form) + 2 * self.units * (self.kept + 1) + self.derived


def space(problem: RecurrentBackward, machine: Machine) -> Table:
    require_one_exchange(problem)
    return _space(problem, machine, BackExtents.of)


default = functools.partial(_default, of=BackExtents.of)
allowed = functools.partial(_allowed, of=BackExtents.of)
launch = functools.partial(_launch, of=BackExtents.of)
