"""Small k: what reaches the k-th largest of the lanes' maxima becomes keys, and each is compared with all others."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.selection import PLUS_INFINITY, below, bits_value, join_key, lanes_sum
from .results import write_key
from .row import mark_reached, take_marked
from .state import count_lanes, lanes_with


# fmt: off
@phase
def push_marked(layout, /, io, at, s):
    """Append the keys of the marked elements."""
    s.size[0] = 0
    for w in T.unroll(layout.mark_words):
        s.lanes[0] = lanes_with(s.marks[w] != T.uint32(0))
        while s.lanes[0] != T.uint32(0):
            if s.marks[w] != T.uint32(0):
                take_marked(layout)(io, at, s, w)
                s.keys[at.keys + s.size[0] + below(at.lane, s.lanes[0])] = join_key(s.ordered[0], s.column[0])
            s.size[0] = s.size[0] + count_lanes(s.lanes[0])
            s.lanes[0] = lanes_with(s.marks[w] != T.uint32(0))


@phase
def collect_reached(layout, /, io, at, s):
    """Collect the keys of the elements that reach the threshold.

    Reads: `x`, `lower`.
    Writes: `gate`, `marks`, `settled`, `size`, `keys`.
    Barriers: none.
    After: `size` elements reach `lower` and are above minus infinity, NaN left out. If `settled`, their keys are there,
        in no order.
    """
    s.settled[0] = 1
    s.gate[0] = T.max(bits_value(T.min(s.lower[0], T.uint32(PLUS_INFINITY))), T.min_value("float32"))
    mark_reached(layout)(s)
    s.size[0] = 0
    for w in T.unroll(layout.mark_words):
        s.size[0] = s.size[0] + T.Cast("int32", T.popcount(s.marks[w]))
    s.size[0] = lanes_sum(s.size[0])
    # Fewer than k if fewer than k elements are above minus infinity; more than there is room for if many are equal.
    if s.size[0] < layout.k or s.size[0] > layout.room:
        s.settled[0] = 0
    else:
        push_marked(layout)(io, at, s)


@T.inline
def pad_keys(at, s):
    """Write two keys after the last one, smaller than all others, because keys are read two at a time.

    Reads: `size`. Writes: these two of `keys`.
    """
    if at.lane < 2:
        s.keys[at.keys + s.size[0] + at.lane] = T.uint64(0)


@phase
def count_larger(layout, /, at, s, j):
    """One step of ranking: a key against two.

    Reads: `key`, the j-th two of `keys`. Writes: `rank`, to which it adds how many of the two are larger.
    """
    for v in T.vectorized(2):
        s.pair[v] = s.keys[layout.first_key + at.warp * layout.keys + j * 2 + v]
    s.rank[0] = s.rank[0] + (
        T.Select(s.pair[0] > s.key[0], T.int32(1), T.int32(0))
        + T.Select(s.pair[1] > s.key[0], T.int32(1), T.int32(0)))


@phase
def rank_by_counting(layout, /, io, at, s):
    """Compare each key with all others, and write it by its rank.

    Reads: `keys`, `size`. Writes: two keys after the last, the values and indices. Barriers: one, at the start.
    """
    pad_keys(at, s)
    T.cuda.warp_sync()
    for i in T.serial((s.size[0] + 31) // 32):
        s.key[0] = s.keys[at.keys + T.min(i * 32 + at.lane, s.size[0])]
        s.rank[0] = 0
        for j in T.serial((s.size[0] + 1) // 2):
            count_larger(layout)(at, s, j)
        if i * 32 + at.lane < s.size[0] and s.rank[0] < layout.k:
            write_key(io, s, s.rank[0], s.key[0])
# fmt: on
