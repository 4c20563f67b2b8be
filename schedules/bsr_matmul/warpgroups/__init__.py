"""Block-sparse matmul by products of warpgroups (`wgmma`, compute capability 9.0), from some 64 rows of x on.

With many rows of x a product of blocks is bound by what the L2 cache delivers: x is read again for every block row that
has a block in its columns, unless block rows share it. A thread block has a tile of y: `tile_m` rows of x by `tile_n`
rows of the weight, which are several block rows. It walks the columns in *panels* of `panel` columns, and brings a
panel of x once for all of its block rows that have a block there.

For density d, blocks of b rows and R block rows of a tile, a product of two elements takes
(1 - (1 - d)^R) / (R b d) + 1 / tile_m bytes from the L2 cache.

**A producer warp** merges block rows: a lane has one, and its next block's column. The least of these is the next
panel, and a ballot says which rows have a block in it. Nothing is sorted or prepared. Columns in any order and repeated
blocks are right, since each block is taken once, with whatever panel it needs; they only bring panels again. x and the
blocks come by tensor maps (`device.tensor_maps`) to a ring of `stages`, in the layout that tensor cores read. A warp
takes longer for the copies of a panel than for the merge: of `producers` warps each goes through all panels and copies
those that are its turn.

**Warpgroups** have 64 rows of x each, and all of the tile's rows of the weight. x is operand A, and a block operand B,
both in shared memory; products of a block are issued without waiting for those of the block before. Sums are float32
registers. In the end a warp passes its rows of y through shared memory, to write whole sectors.

**Transposed blocks** (`turned`), of which a gradient of x is made, are the same operand B with k along the rows: boxes
of up to 64 columns, which an instruction transposes. Nobody makes a copy of them.

**float32** is taken where a problem allows tf32 (`precision`): an instruction then takes 8 columns in the place of 16.

`overlap` is programmatic dependent launch: barriers and tensor maps are ready when the producer kernel ends.

The kernel, phase by phase, is `kernel.program`.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

warpgroups = in_phases(
    space,
    name="block_warpgroups",
    version=3,
    operator="bsr_matmul",
    summary="panels of x and 16-bit blocks in shared memory, products of warpgroups",
)
