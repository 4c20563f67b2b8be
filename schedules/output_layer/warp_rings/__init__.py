"""The output layer through tensor cores, with a ring of parts of rows in each warp: lists of one row each, wide rows.

Read `tiles` first. Each warp has a ring in shared memory. A stage of it holds `depth` cache lines of each row of a
tile. Each lane requests its row's part by one bulk copy, whose bytes the stage's mbarrier counts. No register waits for
memory, and rows are read in runs as long as a stage, wherever they start. Padding between rows in shared memory keeps
lanes off each other's banks. A warp that has multiplied a stage requests the one `stages` later, which may belong to
another tile. So the warps meet at no barrier of the ring, and shared memory alone limits how many bytes are in flight.

| problem | warps | hidden states |
| --- | --- | --- |
| lists of one row each | each has tiles of its own (`tiles`), and meets no other | in shared memory |
| a vocabulary | eight share a tile | in registers; with `staged` 2 half in registers, half in shared memory |
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import in_phases

from . import space

warp_rings = partial(
    in_phases,
    space,
    summary="parts of rows to rings of warps and through tensor cores; the best tokens of all or of the best tiles",
)
