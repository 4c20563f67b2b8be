"""The static extents of a point: how a row is cut up, which first threshold it gets, and where buffers lie.

Computed without the compiler, because the space asks for them: a point that needs too much shared memory is left out.
Everything is derived from the problem and the decisions; an attribute is computed at its first use.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil, isqrt, sqrt

from tvm_sparse.core.derived import Derived
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, ceildiv
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.pool import RESERVED, SHARED, STATIC, asked
from ...device.thresholds import FIRST, Floor, Rank, first_threshold, floor_of_runs
from ..share import Share

# The largest k for which survivors are ranked by counting, every one against every other; for larger k bins are used.
COUNTED = 16
# The number of survivors that is expected where they are ranked by counting: a block has as many groups of threads for
# them.
COUNTED_SURVIVORS = 64
# Bins in which survivors are ranked: enough for few of them to share one, and no more than a scan takes quickly.
MIN_BINS, MAX_BINS = 256, 1024
# Keys of one bin that are still ranked by comparing each with every other; twice as many for a bin with ties.
CROWD = 32
# Keys after those that are ranked, which are void (`ranking.rank_in_bins`).
SPARE_KEPT = 4
# Keys that a thread puts into bins at once: as many loads and atomics are in flight together.
BINNED_AT_ONCE = 4
# Threads at most that share the ranking of one key.
RANKERS = 8
# For k above COUNTED and up to this, survivors are ranked by counting if they are few: if all are ranked in one step.
# That takes less time than the barriers of bins, and two steps take more. For a larger k they are seldom few enough.
COUNTED_IF_FEW = 32
# Comparisons per thread that ranking by counting may take where bins have failed; beyond, sorting is quicker.
COMPARISONS = 512
# How many more elements that equal the threshold should pass than are needed: a share of these, and a number.
MORE_EQUALS, SPARE_EQUALS = 1 / 8, 64
# The least room for survivors beyond k. Without it, compactions would be frequent where k is small.
SLACK = 256
# Bytes of marked tiles that are copied to shared memory (`deferred`); those beyond are read again from global memory.
COPIED = 8192
# Marked vectors that are searched in one step where the survivors of all of them together have no room.
STEP = 64

# Threads that a multiprocessor should hold: its 65,536 registers then leave 64 per thread, or 96 for the largest tiles.
RESIDENT, RESIDENT_LARGE = 1024, 640
# Vectors from which on a tile is one of the largest.
LARGE = 8
# Bytes of shared memory of a block that leave room for a second one, and of a block that is alone on a multiprocessor.
MAX_SHARED, MAX_CLUSTER_SHARED = 112 * 1024, 200 * 1024


tiling_extent = Derived["Tiling", int]
tiling_whether = Derived["Tiling", bool]


@dataclass(frozen=True)
class Tiling(Share):
    """How a row lies over the blocks of a cluster, over tiles, warps and lanes. A vector is 16 bytes of the row.

    A block's share of the row is cut into chunks of 32 vectors, which a warp loads at once. `tiles` neighbouring chunks
    are a slot, and chunk i of each slot belongs to tile i. So every tile is spread over the whole share, and the first
    one is a sample of it. Slot u * warps + w is the u-th vector of warp w's lanes.
    """

    vectors: int
    stages: int

    # Elements of a tile that a thread has in registers.
    held = tiling_extent(lambda e: e.vectors * e.width)
    # 32-bit words of these elements.
    words = tiling_extent(lambda e: 4 * e.vectors)
    # Elements of a block's tile.
    tile = tiling_extent(lambda e: e.threads * e.held)
    # Bytes of the tiles in shared memory: the one that is worked on, and those that are being copied.
    ring = tiling_extent(lambda e: e.stages * e.tile * e.itemsize)
    # Lanes at a row's beginning that have no whole vector of the row.
    lead = tiling_extent(lambda e: 0 if e.aligned else 1)

    @cached_property
    def shares(self) -> set[int]:
        """The numbers of vectors that blocks have, as far as they have any."""
        return {min(self.share, self.row_vectors), self.row_vectors % self.share or self.share}

    # Chunks of a block's share.
    chunks = tiling_extent(lambda e: e.share // 32)
    # Tiles that a block reads one after another.
    tiles = tiling_extent(lambda e: ceildiv(e.chunks, e.warps * e.vectors))
    # Slots that have a chunk in some tile. What threads have beyond these is idle in all tiles.
    slots = tiling_extent(lambda e: ceildiv(e.chunks, e.tiles))

    @cached_property
    def inner(self) -> int:
        """Vectors of a thread that lie in the row in every tile of every block, of rows that begin with a vector."""
        least = min(self.shares) if self.share * (self.cluster - 1) < self.row_vectors else 0
        return least // (32 * self.tiles * self.warps)

    # Columns from one vector of a thread's tile to the next.
    slot_columns = tiling_extent(lambda e: e.warps * e.tiles * 32 * e.width)
    # Elements of a block's first tile: the sample of its share.
    sampled = tiling_extent(lambda e: e.slots * 32 * e.width)
    # Whether tiles have only elements of the row, so that columns need not be checked.
    whole = tiling_whether(lambda e: e.aligned and e.row_vectors == e.tiles * e.warps * e.vectors * 32 * e.cluster)


first_threshold_extent = Derived["FirstThreshold", int]
first_threshold_whether = Derived["FirstThreshold", bool]


@dataclass(frozen=True)
class FirstThreshold:
    """Which threshold a row's first tile gives, and how many elements pass it (see `device.thresholds`)."""

    tiling: Tiling
    k: int

    @cached_property
    def found(self) -> Rank | None:
        """Which value of the sample is the threshold; None if no value is good enough, as for a k that exceeds the
        sample.
        """
        tiling = self.tiling
        return first_threshold(self.k, min(tiling.sampled / tiling.vocab, 1.0), min(tiling.warps, tiling.slots))

    # Whether there is a first threshold. Without one the first compaction gives the row its threshold.
    gated = first_threshold_whether(lambda e: e.found is not None)

    @cached_property
    def rank(self) -> Rank:
        """The same; without a threshold, the sample's maximum, which is needed in any case."""
        return self.found or FIRST

    @cached_property
    def floor(self) -> Floor | None:
        """The threshold for rows that ascend or descend; None if k is too large for it."""
        tiling = self.tiling
        if not self.gated:
            return None
        return floor_of_runs(self.k, tiling.width, 32 - tiling.lead, min(tiling.warps, tiling.slots))

    # Warps that offer a floor; 0 for none.
    floors = first_threshold_extent(lambda e: e.floor.warps if e.floor else 0)

    @cached_property
    def last_vector(self) -> int:
        """Which vector of a thread is in an ascending row's last run: the last one that enough warps have."""
        tiling = self.tiling
        return max((min(tiling.shares) // 32 // tiling.tiles - self.floors) // tiling.warps, 0)

    # How many elements should pass where the threshold is the largest element: a little more than k, all equal.
    equals = first_threshold_extent(lambda e: ceil(e.k * (1 + MORE_EQUALS) + SPARE_EQUALS))

    @cached_property
    def survivors(self) -> int:
        """How many elements of a block's share pass the threshold: a number that few rows exceed.

        The number in the sample itself is known; that in the rest varies by its square root.
        """
        known, tiling = self.rank.most, self.tiling
        passing = known * max(tiling.share * tiling.width / tiling.sampled, 1.0)
        return ceildiv(ceil(passing + 4 * sqrt(passing - known)), 32) * 32

    def survivors_in_order(self, share: int) -> int:
        """How many elements of a block's `share` vectors reach the floor if the row ascends or descends."""
        assert self.floor is not None
        tiling = self.tiling
        # The lowest of the warps that offer a floor has this slot; `place_tile` says which chunk of it is sampled.
        slot = min(share // 32 // tiling.tiles, (self.last_vector + 1) * tiling.warps) - self.floor.warps
        late = 2 * slot >= tiling.warps if tiling.vectors == 1 else 2 * self.last_vector >= tiling.vectors
        chunk = slot * tiling.tiles + (tiling.tiles - 1 if late else 0)
        ascending = share - chunk * 32 - (32 - self.floor.lanes)
        descending = (self.floor.warps - 1) * tiling.tiles * 32 + tiling.lead + self.floor.lanes
        return min(max(ascending, descending), share) * tiling.width


pool_extent = Derived["Pool", int]
pool_whether = Derived["Pool", bool]


@dataclass(frozen=True)
class Pool:
    """The dynamic shared memory of a block, from front to back, and how large its buffers are.

    Offsets (`at_...`) are in elements of their own buffer.
    """

    tiling: Tiling
    first: FirstThreshold
    k: int
    deferred: bool
    room: int  # keys that each block of a cluster may push into the first block; 0 without a cluster

    # k rounded up for a bitonic sort: a power of two, at least a warp.
    rounded = pool_extent(lambda e: max(1 << (e.k - 1).bit_length(), 32))
    # Elements from a copied tile to the next: padded, so that threads with one each meet few bank conflicts.
    padded = pool_extent(lambda e: e.tiling.held + 4)

    @cached_property
    def copies(self) -> int:
        """Marked tiles that are copied; 0 where survivors are searched in the stream."""
        tiling = self.tiling
        return min(COPIED // (4 * self.padded), tiling.tiles * tiling.threads) if self.deferred else 0

    # Threads that search marked vectors in steps, so that what each step finds has room after the best k.
    step = pool_extent(lambda e: min(e.tiling.threads, STEP))

    @cached_property
    def wanted(self) -> int:
        """Keys for which there should be room: those that stay between two compactions, and those that blocks push."""
        rest = max(self.rounded + max(SLACK, self.rounded), self.first.survivors)
        if self.deferred:
            rest = max(rest, ceildiv(self.rounded + self.step * self.tiling.width, 32) * 32)
        return max(rest, self.tiling.cluster * self.room)

    # Whether more keys may survive than there is room for. No, if there is room for all elements of the share.
    overflows = pool_whether(lambda e: e.wanted < e.tiling.tiles * e.tiling.tile)

    @cached_property
    def capacity(self) -> int:
        """Keys of the buffer of survivors."""
        if self.overflows:
            return self.wanted
        return max(self.tiling.tiles * self.tiling.tile, self.rounded, self.tiling.cluster * self.room)

    # Keys of the second buffer: those that a compaction keeps, or those of all bins that have one of the best.
    kept = pool_extent(lambda e: ceildiv(max(e.rounded, e.k + 2 * CROWD + SPARE_KEPT), 32) * 32)
    # Bins in which keys are ranked, a power of two: about one for each key that is wanted.
    bins = pool_extent(lambda e: min(max(MIN_BINS, e.rounded), MAX_BINS))
    # Where the buffer of survivors begins: after the ring of tiles.
    at_keys = pool_extent(lambda e: e.tiling.ring // 8)
    # Where the second buffer begins.
    at_kept = pool_extent(lambda e: e.at_keys + e.capacity)
    # Where the keys lie that the blocks of a cluster push.
    at_united = pool_extent(lambda e: e.at_kept + e.kept)
    # Where the numbers of keys of the bins lie.
    at_counts = pool_extent(lambda e: 2 * (e.at_united + e.tiling.cluster * e.room))
    # Where, for each place of the second buffer, the beginning of its key's bin lies; or for each bin, one of its keys.
    at_homes = pool_extent(lambda e: e.at_counts + e.bins)
    # Elements of that array.
    homes = pool_extent(lambda e: max(e.kept, e.bins))
    # Where each key's bin, and its number within the bin, lie.
    at_numbers = pool_extent(lambda e: e.at_homes + e.homes)
    # Where the elements of copied tiles lie, which are read by vectors of 16 bytes.
    at_copied = pool_extent(lambda e: ceildiv(e.at_numbers + e.capacity, 4) * 4)
    # Where the numbers of all marked tiles lie.
    at_marked = pool_extent(lambda e: 2 * (e.at_copied + e.copies * e.padded))

    @cached_property
    def bytes(self) -> int:
        """Bytes of all dynamic shared memory."""
        marked = self.tiling.tiles * self.tiling.threads if self.deferred else 0
        return asked(ceildiv(2 * (self.at_marked + marked), 16) * 16)


layout_extent = Derived["Layout", int]
layout_whether = Derived["Layout", bool]


@dataclass(frozen=True)
class Layout:
    """All static extents of a point: what phases are made for."""

    # The problem's: columns of a row, elements to find, given columns, the logits' dtype, whether there is a bias,
    # whether there are bitmaps of allowed columns, and whether there is a soft cap.
    vocab: int
    k: int
    ids: int
    dtype: str
    bias: bool
    masked: bool
    capped: bool
    # How a row is cut up.
    tiling: Tiling
    # The first threshold.
    first: FirstThreshold
    # The decisions of these names (see `vocabulary`). Clusters always overlap, and do not prefetch.
    deferred: bool
    overlap: bool
    prefetch: bool
    unroll: bool

    @classmethod
    def of(cls, problem: SoftmaxTopk, decisions: Decisions) -> Layout:
        """The layout of a point of either template's space."""
        tiling = Tiling(
            vocab=problem.vocab,
            itemsize=numpy_dtype(problem.dtype).itemsize,
            threads=decisions["threads"],
            cluster=decisions.get("cluster", 1),
            vectors=decisions["vectors"],
            stages=decisions["stages"],
        )
        return cls(
            problem.vocab,
            problem.k,
            problem.ids,
            problem.dtype,
            bool(problem.bias),
            bool(problem.allowed),
            bool(problem.capped),
            tiling,
            FirstThreshold(tiling, problem.k),
            bool(decisions["deferred"]),
            bool(decisions.get("overlap", 1)),
            bool(decisions.get("prefetch", 0)),
            bool(decisions["unroll"]),
        )

    @cached_property
    def pool(self) -> Pool:
        """Shared memory, with room for what the blocks of a cluster push."""
        tiling, first = self.tiling, self.first
        if tiling.cluster == 1:
            return self._pool(0)
        # More than the keys of a row whose elements are all equal.
        least = max(ceildiv(first.equals + 32, 32) * 32, first.survivors)
        if first.floor is None:
            return self._pool(least)
        # As many as the keys of a row in order, unless the multiprocessor's second block would then not fit.
        two_blocks = 2 * tiling.threads <= RESIDENT and self._pool(least).bytes <= MAX_SHARED
        in_order = ceildiv(max(map(first.survivors_in_order, tiling.shares)), 32) * 32
        larger = self._pool(max(in_order, least))
        return larger if larger.bytes <= (MAX_SHARED if two_blocks else MAX_CLUSTER_SHARED) else self._pool(least)

    def _pool(self, room: int) -> Pool:
        return Pool(self.tiling, self.first, self.k, self.deferred, room)

    # Whether the stream may find the buffer full, and has to wait for a compaction.
    compacts = layout_whether(lambda e: e.pool.overflows and not e.deferred)
    # Whether the sample has a lower threshold for a row of which fewer than k elements reach the first one.
    lowers = layout_whether(lambda e: e.first.gated and e.first.rank.warp < e.tiling.warps)

    @cached_property
    def dense(self) -> bool:
        """Whether nearly every warp has survivors in every tile, so that a tile's largest element is not looked at
        first.

        About twice as many survive as are wanted.
        """
        tiling = self.tiling
        return not self.deferred and (not self.first.gated or self.k >= tiling.tiles * min(tiling.warps, tiling.slots))

    @cached_property
    def ties_limited(self) -> bool:
        """Whether the elements that equal the threshold are limited in number for any threshold, not only for one that
        is the sample's maximum.

        A single block with small k pushes a few more survivors in less time than limiting them takes.
        """
        return self.deferred or not self.counted or self.tiling.cluster > 1

    # Whether survivors are ranked by counting in nearly all rows: bins are cleared only in the others.
    counted = layout_whether(lambda e: e.k <= COUNTED)

    @cached_property
    def rankers(self) -> int:
        """Threads that share the ranking of one key: of a few survivors all are ranked in one step."""
        groups = self.tiling.threads // COUNTED_SURVIVORS
        return min(1 << max(groups.bit_length() - 1, 0), RANKERS) if self.counted else RANKERS

    @cached_property
    def countable(self) -> int:
        """Survivors that are ranked by counting in one step: a few per thread; 0 if that never pays."""
        if self.counted:
            return 4 * self.tiling.threads // self.rankers
        step = self.tiling.threads // self.rankers
        return step if self.k < step and self.k <= COUNTED_IF_FEW else 0

    @cached_property
    def countable_by_half(self) -> int:
        """Survivors, more than `countable`, that are still ranked by counting in one step with half as many threads for
        each; 0: none.

        A cluster's first block has more than a block alone, as the blocks' thresholds are not equally high.
        """
        return 2 * self.countable if 0 < self.countable and not self.counted and self.tiling.cluster > 1 else 0

    # Most survivors that are ranked by counting where bins have failed: about as many as are counted in the time of a
    # sort.
    crowded_countable = layout_extent(lambda e: isqrt(COMPARISONS * e.tiling.threads))
    # Keys that a thread puts into bins at once: about all that it has, of twice as many as are wanted.
    binned_at_once = layout_extent(lambda e: min(ceildiv(2 * e.k, e.tiling.threads), BINNED_AT_ONCE))
    # Whether one warp may do all that is left after the stream.
    one_warp = layout_whether(lambda e: e.deferred and e.counted and e.tiling.cluster == 1)

    @cached_property
    def resident(self) -> int:
        """Blocks that should fit on a multiprocessor at the same time, which limits the registers of a thread."""
        if self.tiling.cluster > 1:
            return 1
        threads, most = self.tiling.threads, RESIDENT_LARGE if self.tiling.vectors == LARGE else RESIDENT
        # A bitonic sort of many keys by few threads needs more registers.
        return max(most // (threads if self.pool.rounded <= 8 * threads else 2 * threads), 1)

    # Blocks that a multiprocessor works on at the same time.
    beside = layout_extent(lambda e: max(min(e.resident, SHARED // (e.pool.bytes + STATIC + RESERVED)), 1))
