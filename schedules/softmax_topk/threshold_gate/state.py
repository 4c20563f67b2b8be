"""What the phases of a row share: the state of a block, and expressions that several phases use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ...device.selection import RADIX_BINS
from ...device.state import Buffers, local, pooled, shared
from .layout import Layout, Tiling

# Reached by every float except minus infinity and NaN.
LOWEST = T.min_value("float32")
# Bits of a float32 sum from which on it counts as overflown: 2^100, whose inverse is a normal number. And bits below
# which exponentials that matter became 0, because their reference was too large: 2^-60.
TOO_LARGE, TOO_SMALL = (127 + 100) << 23, (127 - 60) << 23
# What `State.settled` says of a row: its outputs follow from what was found; it is read again with the threshold that
# it has, as only the sum was of no use; with a lower one; or with none.
SETTLED, SUM_AGAIN, LOWER_AGAIN, ALL_AGAIN = 1, 0, 2, -1
# Readings of a row, at most: the second one's threshold may be too high as well.
READINGS = 3
# The entries of `State.found` beside those of a radix pass: whether one warp has written the outputs, and how many of
# the sample equal the threshold.
WRITTEN, EQUALS = 0, 3


def deferred(layout: Layout) -> bool:
    return layout.deferred


def clustered(layout: Layout) -> bool:
    return layout.tiling.cluster > 1


@dataclass
class State(Buffers):
    """The state of one row in a block. Keys are of `device.selection`: value and column in one uint64.

    A threshold is a value and a column: an element passes it if it is larger, or equal and in a column up to
    `equals_until`. An order is a value's bits made to order as integers (`selection.order_bits`).
    """

    io: Any  # the kernel's arguments (`core.arguments.function`)
    t: Any  # the thread of the block
    block: Any  # the row, as the grid counts them
    part: Any  # which block of the row's cluster this is; 0 in a block alone

    # ---- dynamic shared memory: tiles, keys, bins, and marked tiles -------------------------------------------------
    ring: Any = pooled("uint32", lambda o: o.tiling.ring // 4, 0)  # words of `stages` tiles
    keys: Any = pooled("uint64", lambda o: o.pool.capacity, lambda o: o.pool.at_keys)  # the survivors
    kept: Any = pooled("uint64", lambda o: o.pool.kept, lambda o: o.pool.at_kept)  # keys that are kept, or ranked
    counts: Any = pooled("int32", lambda o: o.pool.bins, lambda o: o.pool.at_counts)  # keys of each bin, and before it
    homes: Any = pooled("int32", lambda o: o.pool.homes, lambda o: o.pool.at_homes)  # where a kept key's bin begins
    numbers: Any = pooled("int32", lambda o: o.pool.capacity, lambda o: o.pool.at_numbers)  # a key's bin, and its place
    marked: Any = pooled(  # which tiles have survivors: tile * threads + thread
        "uint16", lambda o: o.tiling.tiles * o.tiling.threads, lambda o: o.pool.at_marked, when=deferred
    )
    copied: Any = pooled(  # the elements of the first of these
        "float32", lambda o: o.pool.copies * o.pool.padded, lambda o: o.pool.at_copied, when=deferred
    )

    # ---- static shared memory ---------------------------------------------------------------------------------------
    marks: Any = shared("int32", when=deferred)  # how many tiles are marked
    tops: Any = shared("uint32", lambda o: o.pool.copies, when=lambda o: o.one_warp)  # orders of their largest elements
    histogram: Any = shared("int32", RADIX_BINS)  # of a radix pass
    bin_totals: Any = shared("int32", 32)  # of the bins that a warp scans: how many keys they have
    found: Any = shared("int32", 4)  # what a radix pass finds; see also WRITTEN and EQUALS
    flag: Any = shared("int32", 2)  # not 0: whether a bin is crowded, and whether by keys of several values
    count: Any = shared("int32")  # keys that were pushed into the buffer, those that had no room included
    warp_sums: Any = shared("float32", 32)  # of exponentials
    warp_ranked: Any = shared("uint32", 32)  # of the sample, each warp's candidate for the threshold; scratch of `rank`
    warp_tops: Any = shared("uint32", 32)  # of the sample, each warp's largest
    warp_floors: Any = shared("uint32", 32)  # of the sample, what a run in order gives for a threshold
    full: Any = shared("uint32")  # not 0 if a warp found the buffer full
    warp_largest: Any = shared("uint32", 32)  # of all that a warp read, the largest

    # ---- a thread's own: the tile in hand ---------------------------------------------------------------------------
    raw: Any = local("uint32", lambda o: o.tiling.words)  # its words
    x: Any = local("float32", lambda o: o.tiling.held)  # its elements; minus infinity for what is not of the share
    top: Any = local("float32")  # the largest of them

    # ---- a thread's own: the sum, the threshold, scratch ------------------------------------------------------------
    sum: Any = local("float32")  # sum of exponentials: of the thread's own elements, then of the row's
    power: Any = local("float32")
    factor: Any = local("float32")  # scale * log2(e): exponentials are powers of 2
    largest: Any = local("float32")  # the largest element, as far as it is known
    reference: Any = local("float32")  # the reference of the exponentials, times factor
    threshold: Any = local("float32")
    plain: Any = local("float32")
    inverse: Any = local("float32")  # 1 / sum
    logarithm: Any = local("float32")  # ln(sum)
    unit: Any = local("float32")  # what exponents are multiplied by to be in powers of e (`references.unit_of`)
    slot: Any = local("int32")
    spot: Any = local("int32")
    sum_before: Any = local("float32")  # without the tile in hand
    pending: Any = local("int32")  # whether the tile's survivors still have to be pushed
    sampling: Any = local("int32")  # whether the tile in hand is the sample, or comes again; see `stream`
    address: Any = local("uint64")  # of the row's first element
    next_address: Any = local("uint64")  # of the row that comes into this one's place
    size: Any = local("int32")  # keys in the buffer
    pivot: Any = local("uint64")
    mask: Any = local("uint64")
    need: Any = local("int32")
    bits: Any = local("uint32")  # one for each element of the tile that survives; also scratch
    ordered: Any = local("uint32")
    at: Any = local("int32", 2)  # where the tile in hand lies, see `tiles.place_tile`
    ahead: Any = local("int32", 2)  # where the tile to be loaded lies
    equals_until: Any = local("int32")  # the last column in which elements that equal the threshold pass
    wanted: Any = local("int64")  # a given column
    ranked: Any = local("uint32")  # order of the sample's value that becomes the threshold
    sample_top: Any = local("uint32")  # order of the sample's largest
    called: Any = local("uint32")  # not 0 if a compaction is called for
    floor: Any = local("uint32")  # order of what a run in order gives for a threshold
    settled: Any = local("int32")  # whether and how the row is read again, from SETTLED to ALL_AGAIN
    written: Any = local("int32")  # whether one warp has written the outputs

    # ---- of a cluster: what its blocks have pushed into the first one -----------------------------------------------
    united: Any = pooled("uint64", lambda o: o.tiling.cluster * o.pool.room, lambda o: o.pool.at_united, when=clustered)
    united_size: Any = shared("int32", lambda o: o.tiling.cluster, when=clustered)
    united_largest: Any = shared("float32", lambda o: o.tiling.cluster, when=clustered)
    united_reference: Any = shared("float32", lambda o: o.tiling.cluster, when=clustered)
    united_sum: Any = shared("float32", lambda o: o.tiling.cluster, when=clustered)
    united_threshold: Any = shared("uint64", lambda o: o.tiling.cluster, when=clustered)
    united_count: Any = shared("int32", when=clustered)  # how many of their keys the first block has kept
    verdict: Any = shared("int32", when=clustered)  # the first block's `settled`
    row_largest: Any = shared("float32", when=clustered)  # and its `largest`, if the row is read again

    # ---- where the row is -------------------------------------------------------------------------------------------
    row: Any = local("int64")  # offsets into the logits pass 2^31
    lead: Any = local("int32")  # elements of the row before in this one's first vector
    start: Any = local("int32")  # the column of this block's first vector; below 0 if that begins in the row before
    end: Any = local("int32")  # the column after its last vector
    i: Any = local("int32")  # the number of the tile in hand
    reading: Any = local("int32")  # whether tiles are left


def column_of(tiling: Tiling, at: Any, e: Any) -> tirx.PrimExpr:
    """The column of element e of a tile that lies at `at`."""
    u = e // tiling.width
    late = at[int(2 * u >= tiling.vectors)] if isinstance(e, int) else T.Select(u * 2 >= tiling.vectors, at[1], at[0])
    return (late if tiling.vectors > 1 else at[0]) + u * tiling.slot_columns + e % tiling.width


def address_of(tiling: Tiling, address: Any, column: Any) -> tirx.PrimExpr:
    """The address of an element of the row whose first element is at `address`; `column` may be below 0."""
    return address[0] + T.Cast("uint64", T.Cast("int64", column) * tiling.itemsize)


def vector_address(tiling: Tiling, address: Any, at: Any, u: Any) -> tirx.PrimExpr:
    """The address of the u-th vector of a tile that lies at `at`, in the row whose first element is at `address`.

    Two addresses are enough: all vectors of a tile lie at constant distances from these.
    """
    late = T.Select(u * 2 >= tiling.vectors, at[1], at[0]) if tiling.vectors > 1 else at[0]
    return address_of(tiling, address, late) + T.Cast("uint64", u * (tiling.slot_columns * tiling.itemsize))


def folded(most: Callable[..., Any], x: Any, first: int, extent: int) -> Any:
    """The maximum or minimum (`most`) of `extent` elements of x from `first` on, as a tree."""
    if extent == 1:
        return x[first]
    half = extent // 2
    return most(folded(most, x, first, half), folded(most, x, first + half, extent - half))


def no_good(total: Any) -> tirx.PrimExpr:
    """Whether a sum of exponentials, which is not negative, is too small, too large or NaN."""
    return T.reinterpret("uint32", total) - T.uint32(TOO_SMALL) >= T.uint32(TOO_LARGE - TOO_SMALL)


def not_below(value: Any, bound: Any, otherwise: Any = 0) -> tirx.PrimExpr:
    """Whether a value is no less than `bound`; for a NaN, whether `otherwise` is not 0."""
    return T.Select(value < bound, otherwise, 1) != 0
