"""The output layer through tensor cores, tokens straight from global memory to registers: before Hopper, and for beams.

Read `tiles` first. A lane loads 16 bytes, so that a warp reads whole cache lines. Half of them belong to a neighbouring
lane, and shuffles exchange these halves. As soon as a step is multiplied, the step `depth` later is loaded, which may
belong to the next tile, so that as many steps are in flight at any time. Token ids of candidates are read one tile
further ahead. If the caller says that a vocabulary is constant, its first steps are loaded before the producer kernel
has ended.

With `reduce_warps` 1 each warp has a tile of its own, and a thread block as many warps as registers have room for.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.template import in_phases

from . import space

registers = partial(
    in_phases,
    space,
    summary="tokens to registers and through tensor cores; the best tokens of the best tiles",
)
