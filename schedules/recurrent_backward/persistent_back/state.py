"""What the phases of `persistent_back` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...device.state import local
from ...sparse_recurrent.persistent_rows.state import State


@dataclass
class BackState(State):
    """The state of `persistent_rows`, with the registers of the phases before and after the sums.

    Attributes
    ----------
    x, next_x
        Values that the forward pass kept of each unit, for this step (float32) and for the next one to be taken (bits
        of the dtype).
    given, next_given
        Gradient of each unit's output in these two steps (float32, and bits of the dtype).
    before, next_before
        Cell state (LSTM) or state (GRU) of each unit before these two steps.
    cell_of
        With the reset before the product: of each unit, the gradient of z until it is sent.
    reset, next_reset
        Whether the step after the one in hand began a sequence, so that its gradient ends there.
    kept, c, h
        Copies of `x` and `before` for the current unit.
    d, fresh
        Gradients of the current unit's gates, and for a GRU the gradient of x_n.
    dh, dc
        Gradients of the current unit's state and cell state after the step.
    own
        The part of the current unit's gradient that goes to the state before the step without the recurrent weight. It
        and `dc` are carried from step to step, in the places of `own` and `cell`.
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
