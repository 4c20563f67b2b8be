"""Two rows a warp, each with half of the lanes: for short rows and small k.

What lanes do together (sort their maxima, add up, place keys, rank them) serves two rows at once, so that it takes half
as many instructions a row. A row that leaves too many keys makes its warp go through both rows again, one after the
other, with all lanes. The second row of the last warp may be absent: its lanes then work on the last row again, and
write nothing.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.selection import FULL_WARP, PLUS_INFINITY, bits_value, join_key
from .counting import count_larger, pad_keys
from .results import write_key
from .row import mark_reached, take_marked
from .state import any_lane


# fmt: off
@phase
def place_lanes(lanes, /, lane, number, before, total):
    """The sums of a number over the lanes of a row: of those before a lane, and of all.

    Reads: `number`, an expression. Writes: before[0], total[0]. Barriers: none, but all lanes take part.
    """
    own = T.alloc_local([1], "int32")
    own[0] = number
    before[0] = own[0]
    for j in T.unroll(lanes.bit_length() - 1):
        total[0] = T.tvm_warp_shuffle_up(T.uint32(FULL_WARP), before[0], 1 << j, lanes, 32)
        if lane >= 1 << j:
            before[0] = before[0] + total[0]
    total[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), before[0], lanes - 1, lanes, 32)
    before[0] = before[0] - own[0]


@phase
def collect_reached(layout, /, at, s):
    """Count and mark the elements that reach the threshold, and find places for their keys.

    Reads: `x`, `lower`.
    Writes: `gate`, `marks`, `size`, `slot`, `settled`.
    Barriers: none, but all lanes take part.
    After: `size` elements of the row reach `lower` and are above minus infinity, NaN left out. If `settled`, in all
        lanes of the warp, there is room for the keys of both rows, and this lane's begin at `slot`.
    """
    s.gate[0] = T.max(bits_value(T.min(s.lower[0], T.uint32(PLUS_INFINITY))), T.min_value("float32"))
    mark_reached(layout)(s)
    place_lanes(layout.lanes)(at.lane, T.Cast("int32", T.popcount(s.marks[0])), s.slot, s.size)
    s.settled[0] = 1
    if any_lane(s.size[0] < layout.k or s.size[0] > layout.room):
        s.settled[0] = 0


@phase
def rank_by_counting(layout, /, io, at, s):
    """Turn the marked elements into keys, compare each with all others, and write the first k by their ranks.

    Reads: `marks`, `slot`, `size`, `present`, the logits.
    Writes: `keys`, the values and indices.
    Barriers: one, of the warp.
    """
    while s.marks[0] != T.uint32(0):
        take_marked(layout)(io, at, s, 0)
        s.keys[at.keys + s.slot[0]] = join_key(s.ordered[0], s.column[0])
        s.slot[0] = s.slot[0] + 1
    pad_keys(at, s)
    T.cuda.warp_sync()
    for i in T.serial((s.size[0] + (layout.lanes - 1)) // layout.lanes):
        s.key[0] = s.keys[at.keys + T.min(i * layout.lanes + at.lane, s.size[0])]
        s.rank[0] = 0
        for j in T.serial((s.size[0] + 1) // 2):
            count_larger(layout)(at, s, j)
        if i * layout.lanes + at.lane < s.size[0] and s.rank[0] < layout.k and s.present[0] != 0:
            write_key(io, s, s.rank[0], s.key[0])
# fmt: on
