"""What the phases of `persistent_back` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...device.state import local
from ...sparse_recurrent.persistent_rows.state import State


@dataclass
class BackState(State):
    """The state of `persistent_rows`, of which the phases before and after the sums are others here.

    Attributes
    ----------
    x, next_x
        Of each unit: what this step and the next one to be taken kept, as float32 and as bits of the dtype.
    given, next_given
        Of each unit: the gradient of the output, likewise.
    before, next_before
        Of each unit: of an LSTM the cell state before the step, of a GRU the state before it.
    reset, next_reset
        Whether the step after the one in hand began a sequence, so that its gradient ends there.
    kept, c, h
        Of the unit in hand: `x` and `before`.
    d, fresh
        Of the unit in hand: the gradients of its gates, and of a GRU that of x_n.
    dh, dc
        Of the unit in hand: the gradients of its state and cell state after the step.
    own
        Of the unit in hand: what passes the state before the step by. It and `dc` are carried from step to step, in
        the places of `own` and `cell`.
    """

    x: Any = local("float32", lambda e: e.units * e.kept)
    next_x: Any = local("uint32", lambda e: e.units * e.kept)
    given: Any = local("float32", lambda e: e.units)
    next_given: Any = local("uint32", lambda e: e.units)
    before: Any = local("float32", lambda e: e.units)
    next_before: Any = local("float32", lambda e: e.units)
    kept: Any = local("float32", lambda e: e.kept)
    c: Any = local("float32")
    h: Any = local("float32")
    d: Any = local("float32", lambda e: e.derived)
    fresh: Any = local("float32")
    dh: Any = local("float32")
    dc: Any = local("float32")
