"""The exact output layer on compute capability 9.0 for tens of rows, or for very long ones: products of warpgroups.

With many or long hidden states, neither registers nor shared memory hold all of their columns beside the tokens, and
the product of one warp (`mma`, as in `rings`) reads more hidden states than tokens from shared memory. Here tensor
cores read the hidden states from shared memory themselves (`wgmma`), once for the tokens of four warps.

**Kernel `arrange`** stores the hidden states as operand B: matrices of eight rows by 16 bytes, one after another, part
by part of the columns. It lets the product start at once, and tokens of a `constant` embedding are
loaded before it has ended.

**Kernel `product`.** A tile is `tile_n` tokens by `tile_m` rows. `tiles` warps of a thread block have one tile each,
and multiply the same part of `depth` cache lines of the columns at the same time. A producer warp copies the hidden
states of a part by one bulk copy; shared memory holds three parts, and mbarriers hand them over and back. All thread
blocks read them again for each round of tiles, from the L2 cache. Tokens come by `cp.async` to a ring of `stages`
parts, one for each warp, and go to registers by `ldmatrix`: they are operand A. The ring requests the next part as soon
as all tokens of one are in registers.

A warp passes its scores through shared memory, so that a lane has all scores of a row. Then their largest one and the
sum of their exponentials need no exchange between lanes, and whole sectors are written to memory. Sums of exponentials
relative to a maximum (Milakov & Gimelshein 2018, Algorithm 3) stay in registers until a thread block ends.

With `gated` only scores that may be among a row's best are written (`gate`).

**Kernel `best`** finds the best tokens (`best`).

Not faster on an H200: hidden states that the thread blocks of a cluster copy for each other (multicast), which halves
what they read; other warps for the work after the product; products of a part that are awaited in the next part; bulk
copies of single rows; warpgroups that begin with different parts.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import in_phases

from . import space

warpgroups = partial(
    in_phases,
    space,
    summary="words streamed through products of warpgroups, of tens of rows or long ones; the best of their tiles",
)
