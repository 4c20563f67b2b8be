"""What the phases of a row share: the state of a block, and the columns of its elements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...device.selection import RADIX_BINS
from ...device.state import Buffers, local, pooled, shared
from .space import Layout

# The mbarriers of the first block: for the keys of all blocks, and for their sums.
KEYS, SUMS = 0, 1
# The mbarriers by which blocks agree on a bound: tops were offered; the tops of the other blocks have arrived; the
# bound is known. And for a share in registers: the sums of its threads are known.
OFFERED, EXCHANGED, BOUNDED, WEIGHED = 0, 1, 2, 3


def clustered(layout: Layout) -> bool:
    return layout.cluster > 1


def on_staged(layout: Layout) -> bool:
    return layout.staged


def has_early(layout: Layout) -> bool:
    return layout.early


def has_agreed(layout: Layout) -> bool:
    return layout.agreed


def is_late(layout: Layout) -> bool:
    return layout.late


def in_registers(layout: Layout) -> bool:
    return not layout.staged


@dataclass
class State(Buffers):
    """The state of one row in a block. Keys and orders are of `device.selection`.

    A sum of exponentials is a word of 64 bits: the sum below, and above it the reference, the element that all others
    are taken relative to.
    """

    io: Any  # the kernel's arguments (`core.arguments.function`)
    t: Any  # the thread of the block
    part: Any  # which block of the row's cluster this is; 0 in a block alone

    # ---- dynamic shared memory: keys --------------------------------------------------------------------------------
    keys: Any = pooled("uint64", lambda o: o.capacity, 0)  # keys of the row, in the first block, then zeros
    kept: Any = pooled("uint64", lambda o: o.kept, lambda o: o.capacity)  # keys that a selection keeps
    found_keys: Any = pooled("uint64", lambda o: o.room, lambda o: o.at_found)  # keys of the block's share
    united: Any = pooled("uint64", lambda o: o.capacity, lambda o: o.at_united, when=clustered)  # keys from all blocks
    # The first vectors of all threads, then their second ones, and so on; minus infinity where they have none.
    staged: Any = pooled("uint32", lambda o: 4 * o.vectors * o.threads, lambda o: o.at_staged, when=on_staged)
    # One word per step, which has the step's largest element.
    step_peaks: Any = pooled("uint32", lambda o: o.steps * o.threads, lambda o: o.at_peaks, when=has_early)
    # The tops of each block of the cluster, or those of the vectors so far (see `agreement`).
    row_tops: Any = pooled("uint32", lambda o: o.cluster * o.row_groups, lambda o: o.at_row_tops, when=has_agreed)
    # Sums of threads, each relative to a reference of its warp.
    thread_sums: Any = pooled("float32", lambda o: o.threads, lambda o: o.at_thread_sums, when=is_late)

    # ---- static shared memory ---------------------------------------------------------------------------------------
    tops: Any = shared("uint32", lambda o: o.groups)  # largest elements of groups of threads, as orders
    firsts: Any = shared("int32", lambda o: o.groups)  # the first columns of these elements, if they are needed
    kth: Any = shared("uint32")  # the k-th best of the tops
    equals: Any = shared("int32")  # how many tops equal it
    last: Any = shared("int32")  # the last column in which equals of it are wanted
    sums: Any = shared("uint64", lambda o: o.entries)  # sums of the cluster's blocks, then of the block's warps
    count: Any = shared("int32")  # keys that were found, those that had no room included
    histogram: Any = shared("int32", RADIX_BINS)  # of a radix pass
    found: Any = shared("int32", 4)  # what a radix pass finds
    united_tops: Any = shared("uint32", lambda o: o.groups, when=clustered)  # as `tops`, of the keys of all blocks
    united_firsts: Any = shared("int32", lambda o: o.groups, when=clustered)
    united_sizes: Any = shared("uint64", lambda o: o.cluster, when=clustered)  # how many keys each block has sent
    united_count: Any = shared("int32", when=clustered)  # how many of these keys reach the row's bound
    barriers: Any = shared("uint64", 2, when=clustered)  # KEYS and SUMS
    row_barriers: Any = shared("uint64", 4, when=has_agreed)  # OFFERED, EXCHANGED, BOUNDED and WEIGHED
    reached: Any = shared("int32", lambda o: o.reached_room, when=has_early)  # steps: number * threads + thread
    listed: Any = shared("int32", when=has_early)  # how many steps are listed, those without room included
    warp_references: Any = shared("float32", lambda o: o.warps, when=is_late)  # references of `thread_sums`
    total: Any = shared("uint64", when=has_agreed)  # the row's sum

    # ---- a thread's own ---------------------------------------------------------------------------------------------
    raw: Any = local("uint32", lambda o: o.words, when=in_registers)  # the thread's vectors, if they are not staged
    # One word per vector, which has the vector's largest element.
    peaks: Any = local("uint32", lambda o: o.vectors, when=lambda o: o.staged != o.agreed)
    vector: Any = local("uint32", lambda o: 4 * o.step)  # a vector, or those of a step
    pair: Any = local("uint32")  # the threshold, as a word whose elements it is; also scratch
    factor: Any = local("float32")  # scale * log2(e): exponentials are powers of 2
    top: Any = local("float32")  # the thread's largest element, NaN if it has one
    bits: Any = local("uint32")  # an order
    plain: Any = local("float32")
    power: Any = local("float32")
    partial: Any = local("float32", 4)  # sums of exponentials side by side
    sum: Any = local("float32")
    reference: Any = local("float32")  # the reference of the sum
    base: Any = local("float32", when=has_agreed)  # -reference * factor, rounded
    rest: Any = local("float32", when=has_agreed)  # what rounding removed from it; 0 unless `near`
    near: Any = local("int32", when=has_agreed)  # whether `base` is small enough to compute exponents from it
    inverse: Any = local("float32")  # 1 / sum
    logarithm: Any = local("float32")  # ln(sum)
    own: Any = local("uint32", lambda o: o.row_groups // 32)  # tops
    bound: Any = local("uint32")  # the order that elements have to reach
    until: Any = local("int32")  # the last column in which equals of the bound are wanted
    threshold: Any = local("float32")  # the bound as a value
    marks: Any = local("uint32")  # which of a thread's vectors have elements that reach it
    spot: Any = local("int32")  # one of them
    column: Any = local("int32")
    listing: Any = local("uint32", when=has_early)  # the address of `listed`
    counter: Any = local("uint32")  # the address of `count`, or of `united_count` (see `selection.counter_address`)
    row: Any = local("int64")  # offsets into the logits pass 2^31
    start: Any = local("int32")  # the column of the block's first vector; below 0 if that begins in the row before
    mine: Any = local("int32")  # vectors of the block
    left: Any = local("int32")  # elements from the row's begin to the array's end, or enough of them
    key: Any = local("uint64")
    pivot: Any = local("uint64")  # the least key that is wanted
    mask: Any = local("uint64")
    need: Any = local("int32")
    slot: Any = local("int32")
    size: Any = local("int32")  # number of keys: of the block, then of the row
    wanted: Any = local("int64")  # a given column


def column_of(layout: Layout, s: Any, e: Any) -> Any:
    """The column of the thread's element e."""
    return s.start[0] + (e // layout.width * layout.threads + s.t) * layout.width + e % layout.width
