"""Where ties crowd a bin: the row's distinct values, the largest first, and the columns that have them."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.selection import below, join_key, order
from .state import column_of, count_lanes, folded, lanes_max, lanes_with, ragged

# A value costs as much time as some eight keys cost otherwise. So many keys may come before values pay.
ELEMENTS, LEVELS = 8, 4


# fmt: off
@phase
def order_row(layout, /, io, at, s):
    """Turn the row into integers that order as its elements do.

    Reads: `x`. Writes: `ordered_row`, 0 for what is not of the row, which no element is. Barriers: none.
    """
    for e in T.unroll(layout.held):
        order(s.x[e], s.value, s.ordered)
        s.ordered_row[e] = s.ordered[0]
        if ragged(layout, e // layout.width):
            if column_of(layout, at, e) >= layout.vocab:
                s.ordered_row[e] = T.uint32(0)
        if not layout.aligned and e < layout.width:
            if column_of(layout, at, e) < 0:
                s.ordered_row[e] = T.uint32(0)


@phase
def place_vector(layout, /, at, s, u, placed):
    """Place the elements of a vector that have the level's value."""
    width = T.meta_var(layout.width)
    s.slot[0] = placed[0]
    for v in T.unroll(width):
        s.lanes[0] = lanes_with(s.ordered_row[u * width + v] == s.upper[0])
        placed[0] = placed[0] + count_lanes(s.lanes[0])
        s.slot[0] = s.slot[0] + below(at.lane, s.lanes[0])
    for v in T.unroll(width):
        if s.ordered_row[u * width + v] == s.upper[0]:
            s.ordered_row[u * width + v] = T.uint32(0)
            if s.slot[0] < layout.k:
                s.keys[at.keys + s.slot[0]] = join_key(s.upper[0], column_of(layout, at, u * width + v))
            s.slot[0] = s.slot[0] + 1


@phase
def place_levels(layout, /, io, at, s):
    """Put the k best in order, if they have few distinct values.

    All elements of one value follow each other in the order as their columns do, which is how vectors, lanes and a
    lane's elements follow each other: votes tell how many are before one. Elements that have been placed are removed.

    Reads: `ordered_row`, which is overwritten. Writes: `keys`, `settled`. Barriers: one, at the end. After: if
    `settled`, the first k of `keys` are the k best, in their order.
    """
    placed, due = T.meta_var(s.size), T.meta_var(s.crowd)  # elements: placed; to be placed with this level
    placed[0] = 0
    due[0] = -ELEMENTS * LEVELS
    while placed[0] < layout.k and placed[0] >= due[0]:
        s.upper[0] = lanes_max(folded(T.max, s.ordered_row, layout.held))
        for u in T.unroll(layout.vectors):
            place_vector(layout)(at, s, u, placed)
        due[0] = due[0] + ELEMENTS
    s.settled[0] = T.Select(placed[0] >= layout.k, 1, 0)
    T.cuda.warp_sync()
# fmt: on
