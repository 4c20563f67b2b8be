"""What `registers`, `rings` and `warp_rings` share: tokens are streamed through tensor cores, tile by tile.

A tile is `tile_n` tokens by `tile_m` rows of hidden states. Tiles are dealt out to the thread blocks in turn, so that
at any time all of them read neighbouring tokens. The `reduce_warps` warps of a thread block share the columns of a row:
each multiplies its part of all tokens of a tile, and the parts are added through shared memory. With `reduce_warps` 1
each warp has tiles of its own, and meets the others at no barrier. Hidden states stay in registers from beginning to
end (`staged` 0), in shared memory (1), or half in each (2). Tokens are operands of `mma` as they lie in memory: columns
are permuted in the same way in both operands, as in `bsr_matmul.tensor_core`. Tokens of a vocabulary larger than the L2
cache are marked to leave it first (`evict_first`), so that scores stay. With `prefetch` the first tiles are brought to
that cache before the producer kernel has ended: in a graph of calls, while the second kernel of the call before reads
little.

float32 is multiplied by three products of tf32: with x = h + l, where h has the upper 11 bits of the fraction, x y is
h h' + h l' + l h', which leaves out some 2^-22 of it.

A tile's scores go to a workspace, with the largest score of each of its rows, as an integer that orders like it. Sums
of exponentials relative to a maximum (Milakov & Gimelshein 2018, Algorithm 3) stay in registers until a thread block
ends. The second kernel finds the best tokens (`best`).

| template | where tokens go | for |
| --- | --- | --- |
| `rings` | whole tiles to a ring of the thread block, by one bulk copy each | vocabularies, from Hopper on |
| `warp_rings` | parts of rows to a ring of each warp | lists of one row each; rows too wide for two tiles |
| `registers` | to registers | before Hopper; beams; rows that end where cache lines do |
"""
