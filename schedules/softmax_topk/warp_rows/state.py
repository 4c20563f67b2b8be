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
from tvm.script.ir_builder import IRBuilder

from ...device.selection import FULL_WARP
from ...device.state import named
from .space import WARP, Layout


@dataclass(frozen=True)
class Place:
    """Which row a warp has, and how it lies in memory."""

    lane: Any  # of the thread in its warp
    warp: Any  # of the thread in its thread block
    row: Any  # among the logits; int64, as offsets into these can exceed 2^31
    lead: Any  # elements of the row before in this row's first vector; 0 where rows are aligned
    keys: Any  # where the warp's keys begin in `State.keys`
    left: Any  # elements from the row's first to the end of the logits, or any number beyond the row's last vector


@dataclass(frozen=True)
class State:
    """What a thread has in registers, and its thread block in shared memory.

    Registers have the same value in all lanes of a warp, but for those of one lane's elements. Without bins, what is
    for bins alone is None.
    """

    # Shared memory of the thread block.
    keys: tirx.Buffer  # `layout.keys` for each warp
    counts: tirx.Buffer  # of bins, `layout.counts` words for each warp; first how many elements, then where
    # The row, and the sum of its exponentials.
    x: tirx.Buffer  # the lane's elements; minus infinity for what is not of the row
    maxima: tirx.Buffer  # maxima[g]: of the lane's elements g, g + groups, g + 2 * groups and so on
    top: tirx.Buffer  # the row's maximum
    top_bits: tirx.Buffer  # order bits of the row's maximum
    factor: tirx.Buffer  # scale * log2(e)
    reference: tirx.Buffer  # top * factor, subtracted from all exponents
    unit: tirx.Buffer  # what exponents are multiplied by to be in powers of e
    d: tirx.Buffer  # the sum of exponentials
    inverse: tirx.Buffer  # 1 / d
    logarithm: tirx.Buffer  # ln(d), if `log` is not 0
    # Which elements become keys.
    gate: tirx.Buffer  # a value: elements below it are not marked
    marks: tirx.Buffer  # bit e % 32 of word e // 32: whether the lane's element e is still to become a key
    size: tirx.Buffer  # keys in shared memory
    settled: tirx.Buffer  # 1 if these include the k largest and are few enough to be ranked; 0 if bisection is needed
    # Bins.
    first: tirx.Buffer  # the address that the count of bin -MAGIC_BITS would have (see `bins.find_bin`)
    fine: tirx.Buffer  # the share of all bins that a unit of value covers
    cut: tirx.Buffer  # the bin of the k-th largest; after a bisection, keys of elements above `lower`
    # Bisection, on order bits.
    ordered_row: tirx.Buffer  # order bits of the lane's elements
    lower: tirx.Buffer  # at least k elements are no less than this
    upper: tirx.Buffer  # fewer than k elements, NaN left out, are above this
    equals: tirx.Buffer  # how many of the elements that equal `lower` are among the k
    # Outputs: addresses of the row's first value and first index.
    outputs_at: tirx.Buffer
    # Scratch: free when a phase begins.
    column: tirx.Buffer  # of one element; and so the next four
    value: tirx.Buffer
    ordered: tirx.Buffer  # order bits of an element
    bin: tirx.Buffer
    key: tirx.Buffer
    rank: tirx.Buffer  # how many keys are larger than the one in hand
    slot: tirx.Buffer  # a place among the keys
    pair: tirx.Buffer  # two keys
    own: tirx.Buffer  # counts of four bins, or bins of four elements
    places: tirx.Buffer  # places of four elements among the keys
    power: tirx.Buffer  # an exponent or an exponential
    partial: tirx.Buffer  # sums of exponentials
    high: tirx.Buffer  # a value
    crowd: tirx.Buffer  # the most elements of one of the lane's bins
    lanes: tirx.Buffer  # a ballot
    raw: tirx.Buffer  # the row as words
    small: tirx.Buffer
    wanted: tirx.Buffer  # a given column

    @classmethod
    def alloc(cls, layout: Layout) -> State:
        pool = T.alloc_buffer([layout.rows * layout.bytes // 8], "uint64", scope="shared.dyn")
        IRBuilder.name("pool", pool)
        key_words = 2 * layout.rows * layout.keys

        def shared(extent: int, dtype: str, elem_offset: int) -> tirx.Buffer:
            return T.decl_buffer([extent], dtype, data=pool.data, elem_offset=elem_offset, scope="shared.dyn")

        def register(dtype: str, number: int = 1) -> tirx.Buffer:
            return T.alloc_local([number], dtype)

        binned = layout.bins > 0
        # The compiler numbers registers by the order of these declarations: another order, or scratch declared where
        # it is used, gives other machine code (neither better nor worse).
        return named(
            cls(
                keys=shared(layout.rows * layout.keys, "uint64", 0),
                counts=shared(layout.rows * layout.counts, "int32", key_words) if binned else None,
                own=register("int32", 4) if binned else None,
                first=register("uint32") if binned else None,
                places=register("int32", 4) if binned else None,
                raw=register("uint32", 4 * layout.vectors),
                small=register("uint16"),
                x=register("float32", layout.held),
                ordered_row=register("uint32", layout.held),
                partial=register("float32", layout.sums),
                d=register("float32"),
                power=register("float32"),
                value=register("float32"),
                factor=register("float32"),
                top=register("float32"),
                reference=register("float32"),
                unit=register("float32"),
                gate=register("float32"),
                fine=register("float32"),
                high=register("float32"),
                inverse=register("float32"),
                logarithm=register("float32"),
                maxima=register("float32", layout.tops),
                marks=register("uint32", layout.mark_words),
                ordered=register("uint32"),
                top_bits=register("uint32"),
                lower=register("uint32"),
                upper=register("uint32"),
                lanes=register("uint32"),
                column=register("int32"),
                size=register("int32"),
                slot=register("int32"),
                cut=register("int32"),
                bin=register("int32"),
                crowd=register("int32"),
                rank=register("int32"),
                equals=register("int32"),
                key=register("uint64"),
                pair=register("uint64", 2),
                settled=register("int32"),
                outputs_at=register("uint64", 2),
                wanted=register("int64"),
            )
        )


def column_of(layout: Layout, at: Place, e: Any) -> Any:
    """The column of the lane's element e; below 0 or from vocab on for one that is not of the row."""
    vector, within = e // layout.width, e % layout.width
    return (vector * WARP + at.lane) * layout.width + within - at.lead


def ragged(layout: Layout, vector: Any) -> Any:
    """Whether the vector of this number of some lane may reach beyond the row's end."""
    return (vector + 1) * WARP * layout.width > layout.vocab


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
