"""Block-sparse matmul on tensor cores, for 16-bit inputs: `mma.m16n8k16`, fed from registers.

**The work of a warp** is a *tile* of y: `tile_m` rows of x times `tile_n` rows of a block row of the weight. The sum
runs over the *octets* of the block row: an octet is eight neighbouring columns of a stored block, 16 bytes in each of
its rows.

**Operands.** In the instruction's operands four neighbouring lanes share a row, and lane t of the four holds columns
2t, 2t + 1, 2t + 8 and 2t + 9 of 16. Tiles are usually brought to shared memory and put into this order by `ldmatrix`.
Here lane t loads a whole octet of its row of the weight, and the same columns of its row of x, by one 16-byte load
each. It passes the first half of both to one instruction and the second half to another, as the four columns that it is
to hold. Which columns of the matrix these really are does not matter to the sum, as long as both operands agree. So
nothing stands between the loads and the tensor cores, and the four octets of a *step* may be from different blocks:
blocks of 8 columns fill an instruction like any others. A step is 32 columns, two instructions for each pair of
*fragments*, which is what one instruction takes of an operand: 16 rows of operand A, 8 of operand B.

Operand A is the weight where a tile has 8 rows of x, so that m = 8 wastes nothing. Else it is x, whose sums then lie in
registers as y does in memory; blocks of 8 rows need this, too.

**Loads in flight** decide how fast a product of few rows is. `reduce_warps` warps share the steps of a tile and add up
through shared memory, `depth` steps of a warp are in flight together, and column ids are read one round ahead, since
the address of x depends on them. The weight is asked for before x, because its address does not.

**Long rows.** One thread block takes long to read a heavy block row of a skewed pattern. With `cluster` such a row is
shared by a cluster of thread blocks (`device.balance`).

**overlap** is programmatic dependent launch. A thread block makes three trips to memory, each for the address of the
next: where its block row begins and ends, the column ids, x. The first two are made while the producer kernel is still
running. If the host has looked at the pattern (`long` is not negative), the structure is not written any more, and what
is read is right. Otherwise it is a guess: after the wait it is read again, together with x, and compared. In most calls
it was right, and no time is lost; otherwise the guess is dropped.

With `overlap=2` the consumer kernel may start as soon as this one has started. And for a weight that is known to be
`constant` there is a path without guesses: the first round of its blocks is loaded before the wait, too. After the wait
only x, the products and the sum are left to do.

The kernel, phase by phase, is `kernel.program`.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

tensor_core = in_phases(
    space,
    name="tensor_core",
    version=4,
    operator="bsr_matmul",
    summary="16-bit blocks on tensor cores, operands straight from global memory, warps and clusters share rows",
)
