"""What the phases of `persistent_rows` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...device.state import Buffers, local, pooled
from .space import BATCHED, Extents


@dataclass
class State(Buffers):
    """Registers of a thread, and shared memory of its block. A lane of a group has the place `lane`."""

    # The thread, in its block; its lane, and its group.
    t: Any
    lane: Any
    group: Any
    # The sample of a pack that the thread finishes. Lanes beyond `pack` do the same again, and write nothing.
    sample: Any
    # The first of the block's slots, and how many it has.
    first: Any = local("int32")
    count: Any = local("int32")
    # The unit of each of the group's slots.
    unit: Any = local("int32", lambda e: e.units)
    # Entries of each row, of the lane that has most in all groups of the warp.
    rounds: Any = local("int32", lambda e: e.rows)
    # The first entries of each row, in the extents' `form`.
    weights: Any = local("uint32", lambda e: max(1, e.rows * e.row_words))
    # The entry of each row in the first round that is not on chip.
    ahead: Any = local("uint32", lambda e: e.rows * e.words)
    # The sum of each row where all states are zero.
    zeros: Any = local("float32", lambda e: e.rows if e.resets else 1)
    # Where the entries of each row begin, and how many there are.
    begin: Any = local("int32", lambda e: e.rows)
    length: Any = local("int32", lambda e: e.rows)
    # An entry's words.
    word: Any = local("uint32", 2)
    # Columns and values of the entries that are gathered, where they are not in `weights`.
    places: Any = local("uint32", BATCHED)
    values: Any = local("float32", BATCHED)
    # What was gathered.
    vectors: Any = local("uint32", lambda e: e.gathered * e.column_words)
    # A load of 2 bytes.
    small: Any = local("uint16")
    # Sums by unit, gate and sample.
    sums: Any = local("float32", lambda e: e.rows * e.pack)
    # To and from another lane.
    passed: Any = local("float32")
    # Shared memory: the address of the copy of the hidden states that is in use, and the sum of both addresses.
    front: Any = local("uint32")
    copies: Any = local("uint32")
    # Global memory: the addresses of the exchange, and of the pack's states in it.
    base: Any = local("uint64")
    source: Any = local("uint64")
    # Vectors in flight from there to shared memory.
    copied: Any = local("uint32", lambda e: e.loads * 4)
    # Whether some of them were not there yet.
    waiting: Any = local("int32")
    # The inputs of a step: projections of each row, whether the sample begins anew, and how many steps it has.
    x: Any = local("float32", lambda e: e.rows)
    reset: Any = local("int32")
    steps_of: Any = local("int32")
    # Those of the step after it, projections as they are: to make floats of them would wait for their loads.
    next_x: Any = local("uint32", lambda e: e.rows)
    next_reset: Any = local("int32")
    # The cell's state and the hidden state before, for the unit in hand.
    cell: Any = local("float32")
    own: Any = local("float32")
    # What these stay where a sequence has ended.
    last_cell: Any = local("float32")
    last_own: Any = local("float32")
    # The hidden state of each unit after the step.
    result: Any = local("float32", lambda e: e.units)
    # `cell` and `own` of each unit, if the thread block has one pack.
    cell_of: Any = local("float32", lambda e: e.units)
    own_of: Any = local("float32", lambda e: e.units)
    # The hidden state in the problem's dtype, and the states of a pack as they are sent.
    bits: Any = local("uint32")
    sent: Any = local("uint32", lambda e: e.column_words)
    # Shared: copies of a pack's states.
    stages: Any = pooled("uint32", lambda e: e.stage_bytes // 4, 0)
    # Shared: the same of each slot and sample, if there are several packs. Written and read by one thread.
    cells: Any = pooled(
        "float32",
        lambda e: e.carried_each,
        lambda e: e.stage_bytes // 4,
        when=lambda e: e.has_cell and e.packs_each > 1,
    )
    owns: Any = pooled(
        "float32",
        lambda e: e.carried_each,
        lambda e: e.stage_bytes // 4 + e.has_cell * e.carried_each,
        when=lambda e: e.has_own and e.packs_each > 1,
    )

    @classmethod
    def of(cls, e: Extents, t: Any) -> State:
        """Within a kernel: the state of the thread `t`."""
        return cls.alloc(e, e.shared_bytes, t=t, lane=t % e.lanes, group=t // e.lanes, sample=t % e.pack)
