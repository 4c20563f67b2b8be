"""What the phases of `warp_rows` share: a thread's place, its warp's registers and shared memory, and small helpers.

A phase takes a `Layout`, then (io, at, s): the kernel's arguments, the thread's `Place` and `State`.
All threads of a warp take part in a phase, and no phase waits for another warp. Its head says what it reads and writes;
its "barriers" are those of a warp (`warp_sync`), which let lanes see what others wrote to shared memory.

Elements are compared by their order bits: an unsigned integer that orders as the float does, NaN above all (see
`selection.order_bits`). A key has an element's order bits above the complement of its column, so that no two keys of a
row are equal, and of equal elements the one in the lower column has the larger key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ...device.selection import FULL_WARP
from ...device.state import Buffers, local, pooled
from .space import WARP, Layout


@dataclass(frozen=True)
class Place:
    """Which row a warp has, and how it lies in memory."""

    lane: Any  # of the thread among those of its row
    warp: Any  # of the row in its thread block
    row: Any  # among the logits; int64, as offsets into these can exceed 2^31
    lead: Any  # elements of the row before in this row's first vector; 0 where rows are aligned
    keys: Any  # where the warp's keys begin in `State.keys`
    left: Any  # elements from the row's first to the end of the logits, or any number beyond the row's last vector


@dataclass
class State(Buffers):
    """What a thread has in registers, and its thread block in shared memory.

    Registers have the same value in all lanes of a warp, but for those of one lane's elements. Without bins, what is
    for bins alone is None. Scratch is free when a phase begins. The compiler numbers registers by the order of these
    declarations: another order, or scratch declared where it is used, gives other machine code (neither better nor
    worse).
    """

    keys: Any = pooled("uint64", lambda e: e.all_keys, 0)  # shared: `layout.keys` for each row
    # Counts of bins, `layout.counts` words for each warp: first how many elements, then where.
    counts: Any = pooled("int32", lambda e: e.rows * e.counts, lambda e: 2 * e.rows * e.keys, when=lambda e: e.bins > 0)
    own: Any = local("int32", 4, when=lambda e: e.bins > 0)  # scratch: counts of four bins, or bins of four elements
    # The address that the count of bin -MAGIC_BITS would have (see `bins.find_bin`).
    first: Any = local("uint32", when=lambda e: e.bins > 0)
    places: Any = local("int32", 4, when=lambda e: e.bins > 0)  # scratch: places of four elements among the keys
    raw: Any = local("uint32", lambda e: 4 * e.vectors)  # the row as words
    small: Any = local("uint16")
    x: Any = local("float32", lambda e: e.held)  # the lane's elements; minus infinity for what is not of the row
    ordered_row: Any = local("uint32", lambda e: e.held)  # order bits of the lane's elements
    partial: Any = local("float32", lambda e: e.sums)  # scratch: sums of exponentials
    d: Any = local("float32")  # the sum of exponentials
    power: Any = local("float32")  # scratch: an exponent or an exponential
    value: Any = local("float32")  # scratch: an element
    factor: Any = local("float32")  # scale * log2(e)
    top: Any = local("float32")  # the row's maximum
    reference: Any = local("float32")  # top * factor, subtracted from all exponents
    unit: Any = local("float32")  # what exponents are multiplied by to be in powers of e
    gate: Any = local("float32")  # a value: elements below it are not marked
    fine: Any = local("float32")  # the share of all bins that a unit of value covers
    high: Any = local("float32")  # scratch: a value
    inverse: Any = local("float32")  # 1 / d
    logarithm: Any = local("float32")  # ln(d), if `log` is not 0
    # maxima[g]: the largest of the lane's elements g, g + groups, g + 2 * groups and so on.
    maxima: Any = local("float32", lambda e: e.tops)
    # Bit e % 32 of word e // 32: whether the lane's element e is still to become a key.
    marks: Any = local("uint32", lambda e: e.mark_words)
    ordered: Any = local("uint32")  # scratch: order bits of an element
    top_bits: Any = local("uint32")  # order bits of the row's maximum
    lower: Any = local("uint32")  # at least k elements are no less than this
    upper: Any = local("uint32")  # fewer than k elements, NaN left out, are above this
    lanes: Any = local("uint32")  # scratch: a ballot
    column: Any = local("int32")  # scratch: the column of an element
    size: Any = local("int32")  # keys in shared memory
    slot: Any = local("int32")  # scratch: a place among the keys
    cut: Any = local("int32")  # the bin of the k-th largest; after a bisection, keys of elements above `lower`
    bin: Any = local("int32")  # scratch: the bin of an element
    crowd: Any = local("int32")  # scratch: the most elements of one of the lane's bins
    rank: Any = local("int32")  # scratch: how many keys are larger than the one in hand
    equals: Any = local("int32")  # how many of the elements that equal `lower` are among the k
    key: Any = local("uint64")  # scratch: the key of an element
    pair: Any = local("uint64", 2)  # scratch: two keys
    # 1 if these include the k largest and are few enough to be ranked; 0 if bisection is needed.
    settled: Any = local("int32")
    # Whether there is a row for these lanes.
    present: Any = local("int32", when=lambda e: e.lanes < WARP)
    # Addresses of the row's first value and first index.
    outputs_at: Any = local("uint64", 2)
    wanted: Any = local("int64")  # a given column


def column_of(layout: Layout, at: Place, e: Any) -> Any:
    """The column of the lane's element e; below 0 or from vocab on for one that is not of the row."""
    vector, within = e // layout.width, e % layout.width
    return (vector * layout.lanes + at.lane) * layout.width + within - at.lead


def ragged(layout: Layout, vector: Any) -> Any:
    """Whether the vector of this number of some lane may reach beyond the row's end."""
    return (vector + 1) * layout.lanes * layout.width > layout.vocab


def folded(operation: Any, values: Any, count: int, start: int = 0, step: int = 1) -> Any:
    """`operation` over `count` of the values, from `start` on and `step` apart, as a tree."""
    if count == 1:
        return values[start]
    half = count // 2
    return operation(
        folded(operation, values, half, start, step),
        folded(operation, values, count - half, start + half * step, step),
    )


def added(a: Any, b: Any) -> Any:
    return a + b


def lanes_max(bits: tirx.PrimExpr) -> tirx.PrimExpr:
    """The largest uint32 of the lanes."""
    return T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), bits)


def lanes_min(bits: tirx.PrimExpr) -> tirx.PrimExpr:
    """The smallest uint32 of the lanes."""
    return T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), bits)


def lanes_with(condition: tirx.PrimExpr) -> tirx.PrimExpr:
    """A uint32 with one bit for each lane for which the condition holds."""
    return T.cuda.ballot_sync(T.uint32(FULL_WARP), condition)


def any_lane(condition: tirx.PrimExpr) -> tirx.PrimExpr:
    """Whether the condition holds for some lane."""
    return T.cuda.any_sync(T.uint32(FULL_WARP), condition) != 0


def count_lanes(lanes: tirx.PrimExpr) -> tirx.PrimExpr:
    """How many lanes a ballot has."""
    return T.Cast("int32", T.popcount(lanes))
