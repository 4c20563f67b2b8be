"""The block recurrent layer on a GPU in one launch: weights stay on chip, tensor cores multiply, blocks exchange.

Zhu, Pool et al. 2018, "Sparse Persistent RNNs"; dense, Diamos et al. 2016, "Persistent RNNs". All thread blocks are
resident at the same time: the launch is a cooperative one, which the runtime checks beforehand
(`core.template.Resident`), and which fails in the place of waiting for ever where they are not.

**Who does what.** Tiles of 16 rows go to `blocks` thread blocks in equal parts. The groups of 8 columns of a tile go,
by four, to all warps of the block in turn: a *round* is four groups of each warp. The weights of its first `registers`
rounds a warp keeps in registers from beginning to end, and what is left it reads anew in each step, from the L2 cache
if it fits there. So any pattern is right, and decisions say which are fast.

**A step** is

1.  **Fetch.** A lane needs 16 bytes of a sample's states for a group: as they lie in memory, since the order of
    columns is free as long as weights have the same one. With `stages` of 1 the thread block copies all states to
    shared memory, where each tile's lanes find them. With 0 lanes wait for the very states that they need, and there
    is neither a copy nor its barrier: that is as little to read where a thread block has one tile.
2.  **Multiply.** Two instructions a group of four and 8 samples: weights are operand A, states operand B.
3.  **Reduce.** Warps put their sums into shared memory; a thread adds up those of a unit and sample.
4.  **Gates,** by the same thread, which also keeps the cell's state; the state goes to the exchange at once, then to
    the output.

**Exchange.** That of `persistent_rows`: thread blocks poll for the data themselves, Lamport's way
(`recurrent.exchange`).

**Passes.** A batch may be computed in `passes` parts, one after another in each step, of whole fragments each. While a
part is computed, the states of the one before are exchanged, and those of the next one are prefetched. States that
threads own of the other parts are kept in shared memory. Samples that the last part lacks are exchanged as zeros.

What a step needs beside states, the input projection, is loaded a step ahead.

**Two exchanges.** With the reset before the product a step has two halves: from the states r and z follow, and the
states times r are exchanged in a slot of their own, from which the candidate follows. Both halves multiply whole tiles,
since an instruction takes all 16 rows of one, and add up the rows of their own gates. All passes take the first half,
then all the second, so that the exchange of one pass overlaps with the products of another.
"""

from __future__ import annotations

from tvm_sparse.core.template import in_phases

from . import space

persistent_tiles = in_phases(
    space,
    name="persistent_tiles",
    version=2,
    operator="block_recurrent",
    summary="all steps in one launch; weights stay on chip, tensor cores multiply, blocks exchange states",
    cooperative=True,
)
