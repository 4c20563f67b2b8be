"""What the phases of `persistent_tiles` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...device.state import Buffers, local, pooled
from ...recurrent.sizes import WARP
from .space import BATCHED, Extents


@dataclass
class State(Buffers):
    """Registers of a thread, and shared memory of its block."""

    # The thread and its warp, in its block.
    t: Any
    warp: Any
    # In fragments: its row of a tile, of eight, which is its sample too; and its group of a quad.
    row: Any
    member: Any
    # The first of the block's tiles, and how many units the block has.
    tile: Any = local("int32")
    count: Any = local("int32")
    # The first group of a tile, and the number of its groups.
    begin: Any = local("int32")
    groups: Any = local("int32")
    # Rounds of this warp in each tile.
    rounds: Any = local("int32", lambda e: e.most)
    # Words of the two rows for rounds in registers, and where the group's states are in a sample, in bytes; negative
    # where there is no group.
    weights: Any = local("uint32", lambda e: max(1, e.rounds * 8))
    places: Any = local("int32", lambda e: max(1, e.rounds))
    # The same of rounds in hand that are not in registers.
    word: Any = local("uint32", BATCHED * 8)
    at: Any = local("int32", BATCHED)
    # States that were fetched.
    vectors: Any = local("uint32", lambda e: e.fetched * e.fragments * 4)
    # Bytes from the states of a fragment's first sample to those of the thread's sample.
    samples: Any = local("uint32", lambda e: e.fragments)
    # This warp's sums of a tile.
    products: Any = local("float32", lambda e: e.fragments * 4)
    # Shared memory: the address of the copy of the states.
    front: Any = local("uint32")
    # Global memory: the addresses of the exchange, and of the states in it.
    base: Any = local("uint64")
    source: Any = local("uint64")
    # Vectors between the exchange and that copy, and whether a value had not been sent yet.
    copied: Any = local("uint32", lambda e: e.loads * 4)
    waiting: Any = local("int32")
    # The first sample of the pass in hand, and of the next one.
    first: Any = local("int32", when=lambda e: e.passes > 1)
    next_first: Any = local("int32", when=lambda e: e.passes > 1)
    # The inputs of a step: projections, and whether an item's sample or a fragment's one begins anew.
    x: Any = local("float32", lambda e: e.items * e.gates)
    reset: Any = local("int32", lambda e: e.items)
    fresh: Any = local("int32", lambda e: e.fragments)
    # Those of the step after it, projections as they are: to make floats of them would wait for their loads.
    next_x: Any = local("uint32", lambda e: e.items * e.gates)
    next_reset: Any = local("int32", lambda e: e.items)
    next_fresh: Any = local("int32", lambda e: e.fragments)
    # For each item: its unit, and the steps of its sequence.
    unit: Any = local("int32", lambda e: e.items)
    length: Any = local("int32", lambda e: e.items)
    # For each item: the cell's state, or z between the halves of a step, and the hidden state.
    cells: Any = local("float32", lambda e: e.items)
    owns: Any = local("float32", lambda e: e.items)
    # For each item: the sums of its gates.
    sums: Any = local("float32", lambda e: e.items * e.gates)
    # Both states of the item in hand before the step.
    cell: Any = local("float32")
    own: Any = local("float32")
    # For each item: the hidden state after the step.
    result: Any = local("float32", lambda e: e.items)
    # A gate of the item in hand; its state after the step, in the problem's dtype and as it is sent.
    passed: Any = local("float32")
    bits: Any = local("uint32")
    sent: Any = local("uint32", lambda e: e.sent_bytes // 4)
    # Shared: a copy of the states; all warps' sums; `owns` and `cells` of all passes, by pass, item and thread.
    stage: Any = pooled("uint32", lambda e: e.stage_bytes // 4, 0, when=lambda e: e.stages)
    parts: Any = pooled("float32", lambda e: e.halves * e.parts, lambda e: e.stage_bytes // 4)
    kept: Any = pooled(
        "float32", lambda e: e.kept, lambda e: e.stage_bytes // 4 + e.halves * e.parts, when=lambda e: e.passes > 1
    )

    @classmethod
    def of(cls, e: Extents, t: Any) -> State:
        """Within a kernel: the state of the thread `t`."""
        return cls.alloc(e, e.shared_bytes, t=t, warp=t // WARP, row=t % WARP // 4, member=t % 4)
