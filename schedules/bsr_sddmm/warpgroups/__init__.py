"""Sampled product by products of warpgroups (`wgmma`, compute capability 9.0).

Each thread block computes up to `tile_k` columns of the stored blocks of one block row, over all rows of both matrices
or, in a cluster, over a part of them. It walks the rows in steps of `tile_m`. A step brings `tile_m` rows of the block
row's columns of `left`, once for all of its blocks, and of the columns of `right` that the blocks have, by tensor maps
(`device.tensor_maps`) to a ring of `stages`. Neither matrix is copied or gathered in global memory.

For blocks of b x b elements and B blocks of a thread block, a product of two elements takes (1 + 1 / B) * 2 / b bytes
from the L2 cache.

**The producer warp** finds its block row by a sum over the numbers of blocks of all rows, and shares out a row's blocks
evenly over its thread blocks. A lane copies one box of each step.

**Warpgroups** have 64 rows of the blocks each; of smaller blocks also the rows below, whose products are not stored.
Both operands have the rows over which products are summed in the place
of columns: they are *transposed* (`device.operands`). Boxes of neighbouring blocks lie one after another, so that one
instruction multiplies up to 256 columns of them. Columns without a block are multiplied with whatever lies there, and
not stored.

**A cluster** of thread blocks has the same blocks, each for a part of the rows. In the end they pass their sums through
shared memory; each adds up its share in the order of ranks, so that equal inputs give equal bits.

The kernel, phase by phase, is `kernel.program`.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

sampled_warpgroups = in_phases(
    space,
    name="sampled_warpgroups",
    version=1,
    operator="bsr_sddmm",
    summary="columns of both matrices in shared memory, products of warpgroups",
)
