"""Block-sparse matmul through shared memory: those parts of x that the block row needs (Gu 2020, section 4.3).

The paper gave this approach up, because TVM then cached what it knew at compile time, whole rows of x. Here a thread
block takes a block row and `tile_m` rows of x, and goes through the stored blocks in *chunks*: it reads which columns
the chunk's blocks stand in, copies those parts of x into shared memory (`cp.async`), and multiplies. Every staged part
of x serves all rows of its block.

The weight goes straight to registers, and is read once, as one stream. A *vector* is `vec` neighbouring elements in a
row of a block. Thread t takes the vectors t, t + threads, ... of the chunk, which always lie in the same columns and
the same rows of their blocks: its sums stay in registers, `tile_m` for each of its rows. Threads that share a row add
up at the end, by shuffles within a warp and through shared memory between warps.

The weight is asked for before x, whose address depends on the column ids; these are read one chunk ahead. A row of one
chunk costs three trips to memory, whatever its length: where it begins and ends, the column ids, x.

In a skewed pattern the chunks of a long row can be dealt out to a `cluster` of thread blocks (`device.balance`). With
`overlap` the launch overlaps the producer kernel (programmatic dependent launch): where the host has looked at the
pattern nobody writes the structure any more, and it is read before the wait.

The kernel, phase by phase, is `kernel.program`.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

staged_x = in_phases(
    space,
    name="staged_x",
    version=3,
    operator="bsr_matmul",
    summary="a thread block a block row, its parts of x in shared memory (Gu 2020, 4.3)",
)
