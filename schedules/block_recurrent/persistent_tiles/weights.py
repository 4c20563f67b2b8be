"""Which tiles a thread block works for, and their weights, which its warps keep for all steps.

Quad q of a tile, four neighbours of its list of groups, is warp q % `warps`'s, in its round q // `warps`. Of a quad a
lane has one group, `member`, and of it two rows, `row` and `row + 8`, a vector of 16 bytes each. The order of columns
in a product is free, as long as it is the same in both operands: so a vector of weights meets one of states as they lie
in memory, and makes two instructions of a tensor core.

The first rounds stay in registers, and what is left is read anew in every step. A group
that there is not has weights of zero, and a negative place.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...recurrent.sizes import WIDEST
from .space import QUAD, Extents

load_vector = T.ptx.ld.global_.v4.u32
load_shared = T.ptx.ld.shared.v4.u32
store_shared = T.ptx.st.shared.v4.u32


# fmt: off
def take_tiles(e: Extents) -> Phase:
    """Deal the tiles out to the blocks, equally many neighbours each; the phase is (s, io, block).

    Reads: `group_start`. Writes: `tile`, `count`, `rounds`. Barriers: none.
    """
    find = find_tile(e)
    share, more = divmod(e.tiles, e.blocks)

    @T.inline
    def phase(s, io, block):
        s.tile[0] = block * share + T.min(block, more)
        s.count[0] = T.min(
            (share + T.Cast("int32", block < more)) * e.tile_units, e.hidden - s.tile[0] * e.tile_units)
        for k in T.unroll(e.most):
            find(s, io, k)
            s.rounds[k] = ((s.groups[0] + (QUAD - 1)) // QUAD - s.warp + (e.warps - 1)) // e.warps

    return phase


@phase
def find_tile(e, /, s, io, k):
    """Where a tile's groups are. Reads: `group_start`. Writes: `begin`, `groups`; no groups beyond the block's last
    tile.

    Barriers: none.
    """
    tile = T.meta_var(T.min(s.tile[0] + k, e.tiles - 1))
    s.begin[0] = io.group_start[tile]
    s.groups[0] = io.group_start[tile + 1] - s.begin[0]
    if k * e.tile_units >= s.count[0]:
        s.groups[0] = 0


@phase
def read_round(e, /, s, io, r, words, w, places, p):
    """Load the weights of a round.

    Reads: `begin`, `groups`. Writes: `words` from `w` on, eight of them, and `places[p]`. Barriers: none.
    """
    number: T.int32 = (r * e.warps + s.warp) * QUAD + s.member
    if number < s.groups[0]:
        places[p] = io.groups[s.begin[0] + number] * WIDEST
        for h in T.unroll(2):
            load_vector(
                words[w + h * 4], words[w + h * 4 + 1], words[w + h * 4 + 2], words[w + h * 4 + 3],
                io.weights.ptr_to([s.begin[0] + number, s.row + h * 8, 0]))
    else:
        places[p] = -1
        for v in T.unroll(8):
            words[w + v] = T.uint32(0)


@phase
def load_weights(e, /, s, io):
    """Bring the warp's weights on chip.

    Writes: `weights`, `places`. Barriers: none: a thread reads what it wrote.
    """
    for k in T.unroll(e.most):
        find_tile(e)(s, io, k)
        for r in T.unroll(e.registers):
            read_round(e)(s, io, r, s.weights, (k * e.registers + r) * 8, s.places, k * e.registers + r)
# fmt: on
