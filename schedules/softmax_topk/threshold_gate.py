"""Softmax + top-k on a GPU: one read of the row, a threshold in front of a buffer, the few survivors ranked.

Each thread streams 16-byte vectors of the row, adds up exponentials, and compares the largest of the elements in hand
with the block's threshold. Only what reaches it goes into a buffer in shared memory, by an atomic. So the insertion of
Algorithm 4 of Milakov & Gimelshein, whose cost grows with k, is paid for a few elements a row instead of all, and warps
stream without waiting for each other.

Threshold and reference of the exponentials come from the first tile, which is a sample of the whole row: a tile's
vectors are spread over it. `first_threshold` tells which value of the sample to take for a threshold, so that
little more than k elements survive; the sample's maximum is the reference in the place of the running maximum of
Algorithm 3, which leaves a sum without rescaling. The row is read a second time, with no threshold and its true
maximum, if fewer than k survive (`thresholds.MISS` of rows in random order) or the sum overflows (elements that exceed
the sample's maximum by 88 and more). If far more survive, a warp that finds the buffer full waits for all others, for
a compaction, in which radix selection cuts it to k and raises the threshold. A threshold is a key, value and index
together, so that rows of equal elements pass it no more often than others; the value alone decides in all but a few
comparisons.

Where few elements survive (`deferred`), a thread does not search its tile for them in the midst of the stream, which
holds up its whole warp: it copies the tile to shared memory, and its number to a list. Copied tiles are searched when
the row is through, for k up to `COUNTED` by one warp: the k-th largest of the tiles' maxima is a threshold that hardly
more than k elements reach. Tiles for which there is no room are read again.

The survivors are put in order by counting them in bins that are linear in the value, and by counting within a bin;
where that fails (many equal values) by radix selection and a bitonic sort.

`threshold_gate` gives a row to a block, which may be a single warp. `cluster_gate` gives it to a cluster of blocks, for
batches too small to fill the card with one block a row: each scans a part and pushes its (m, d) and survivors into the
first one's shared memory, so that there is one launch and no workspace.

Of a row in order a thread's maximum tells little of its other elements, and the threshold would be far below the k-th
largest: but then a warp sees its vectors ascend or descend, and gives a higher one, which neighbouring lanes reach with
all of a vector (`thresholds.Floor`). Of elements that equal the threshold only those up to a column pass.

Where the machine can, launches overlap the end of the kernel before (`early`). With 2 a block that is through with its
row has the first tile of the row that will come into its place brought into the L2 cache, so that memory is busy while
survivors are ranked; and the first blocks begin with their own rows so before the kernel before is done. That is no
more than a hint, and rows may be written until then.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil, isqrt, log2, sqrt

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, ceildiv, powers

from ..device.thresholds import FIRST, first_threshold, floor_of_runs

# Threads of a block. A row of 10,240 or 25,000 elements is cut evenly by 5 or 7 warps.
THREADS = (32, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)
# The least of a block that has a multiprocessor of its own.
ALONE = 256
# 16-byte vectors of a thread's tile: what is worked on at once.
VECTORS = (1, 2, 3, 4, 5, 6, 8)
# Tiles in shared memory: one that is worked on and others on their way. The memory's latency times its rate needs about
# 40 KB in flight on each multiprocessor.
STAGES = (1, 2, 3)
# Threads that a multiprocessor is to hold, which bounds their registers to 64, or to 96 for the largest tiles.
RESIDENT, RESIDENT_LARGE = 1024, 640
# The least room in the buffer beyond k.
SLACK = 256
# Up to here the survivors are ranked by counting, every one against every other.
COUNTED = 16
# About how many there are then.
RANKED = 64
# Comparisons a thread that ranking by counting may take where bins have failed.
COMPARISONS = 512
MAX_K = 2048
# The share of a tile's vectors that a row at least has; idle ones cost as much as others.
USED = 0.85
# Up to here few enough elements survive to look at their tiles again.
DEFERRED = 64
# Beyond, ranked keys go through shared memory, so that they are written to memory side by side.
STAGED = 64
# Bytes of marked tiles that are copied; others are read again.
COPIED = 8192
# Vectors that are searched at once where all survivors together have no room.
STEP = 64
# Bytes of shared memory that leave room for a second block, and those of a block that is alone.
MAX_SHARED, MAX_CLUSTER_SHARED = 112 * 1024, 200 * 1024
# Those of a multiprocessor, and what a block takes of them unasked.
SHARED, RESERVED = 228 * 1024, 1024
# About what the L2 cache holds: only more logits than that are read from memory.
CACHED = 50 << 20
# Bits of a float32 sum from which on it counts as overflown: 2^100, whose inverse is a normal number.
TOO_LARGE = (127 + 100) << 23
# What every kernel gets, and the most that is not in the pool.
STATIC_LIMIT, STATIC = 48 * 1024, 2 * 1024
# Blocks a row; above 8 a cluster is not portable, which every Hopper allows.
SPLITS = powers(2, 16)


class Layout:
    """How a point of the space lays a row out over tiles, and shared memory over buffers; static extents."""

    def __init__(self, problem: Problem, decisions: Decisions) -> None:
        vocab, k = problem.vocab, problem.k
        # Of elements that equal the threshold as many should pass: a little more than k.
        self.equals = k + k // 8 + 64
        self.threads, self.vectors, self.stages = (decisions[name] for name in ("threads", "vectors", "stages"))
        self.deferred = bool(decisions["deferred"])
        self.split = decisions.get("cluster", 1)
        self.warps = self.threads // 32
        self.width = 16 // numpy_dtype(problem.dtype).itemsize  # elements of a vector
        self.held = self.vectors * self.width  # elements of a thread's tile
        self.tile = self.threads * self.held
        # Rows that are no multiple of 16 bytes begin within a vector, and their first and last are shared with others.
        self.aligned = vocab % self.width == 0
        row_vectors = ceildiv(vocab + (0 if self.aligned else self.width - 1), self.width)
        self.share = ceildiv(ceildiv(row_vectors, self.split), 32) * 32  # vectors a block
        self.chunks = self.share // 32  # what a warp loads at once
        self.tiles = ceildiv(self.chunks, self.warps * self.vectors)
        # Chunk `slot * tiles + i` is in tile i: slots beyond the last chunk are idle in all tiles.
        self.slots = ceildiv(self.chunks, self.tiles)
        self.sample = self.slots * 32 * self.width
        place = first_threshold(k, min(self.sample / vocab, 1.0), min(self.warps, self.slots))
        self.gated = place is not None
        self.place = place or FIRST
        # A row that begins within a vector leaves its first lane without a whole one.
        self.lead = 0 if self.aligned else 1
        # How many vectors a block has: all blocks as many, but for the last one that has any.
        parts = {min(self.share, row_vectors), row_vectors % self.share or self.share}
        self.floor = floor_of_runs(k, self.width, 32 - self.lead, min(self.warps, self.slots)) if self.gated else None
        if self.floor is not None:
            # Which vector of a thread is in an ascending row's last run: the last one that enough warps have.
            self.last = max((min(parts) // 32 // self.tiles - self.floor.warps) // self.warps, 0)
        # What passes the first threshold, but for a few rows. Of the sample itself that is known, the rest varies.
        passing = self.place.most * max(self.share * self.width / self.sample, 1.0)
        survivors = ceildiv(ceil(passing + 4 * sqrt(passing - self.place.most)), 32) * 32
        self.whole = self.aligned and row_vectors == self.tiles * self.warps * self.vectors * 32 * self.split
        self.rounded = max(1 << (k - 1).bit_length(), 32)
        # Beyond k there is room for what comes to rest between two compactions.
        self.rest = max(self.rounded + max(SLACK, self.rounded), survivors)
        if self.deferred:
            # A copied tile is padded, so that threads which read one each meet few bank conflicts.
            self.padded = self.held + 4
            self.copies = min(COPIED // (4 * self.padded), self.tiles * self.threads)
            # Searched in steps, of which each finds no more than there is room for behind the best k of those before.
            self.step = min(self.threads, STEP)
            self.rest = max(self.rest, ceildiv(self.rounded + self.step * self.width, 32) * 32)
        self.kept = self.rounded
        self.bins = min(max(256, self.rounded), 1024)
        self.spread = self.bins + self.bins // 32  # words that they take, see `selection.spread`
        self.ring = self.stages * self.tile * numpy_dtype(problem.dtype).itemsize  # bytes
        # Keys that a block may push, more than those of a row that is constant.
        room = max(ceildiv(self.equals + 32, 32) * 32, survivors) if self.split > 1 else 0
        self.divide_pool(room)
        if self.split > 1 and self.floor is not None:
            # As many as those of a row in order, unless that takes the multiprocessor's second block its place.
            two = 2 * self.threads <= RESIDENT and self.pool <= MAX_SHARED
            limit = MAX_SHARED if two else MAX_CLUSTER_SHARED
            self.divide_pool(max(ceildiv(max(map(self.passing_in_order, parts)), 32) * 32, room))
            if self.pool > limit:
                self.divide_pool(room)

    def passing_in_order(self, part: int) -> int:
        """Of a block's part of so many vectors, the elements that reach the floor if the row ascends or descends."""
        assert self.floor is not None
        # The lowest of the warps that give it is that of this slot; see `place_tile` for which chunk is in the sample.
        slot = min(part // 32 // self.tiles, (self.last + 1) * self.warps) - self.floor.warps
        late = 2 * slot >= self.warps if self.vectors == 1 else 2 * self.last >= self.vectors
        chunk = slot * self.tiles + (self.tiles - 1 if late else 0)
        ascending = part - chunk * 32 - (32 - self.floor.lanes)
        descending = (self.floor.warps - 1) * self.tiles * 32 + self.lead + self.floor.lanes
        return min(max(ascending, descending), part) * self.width

    def divide_pool(self, room: int) -> None:
        """Lay the buffers out in shared memory, with room for so many keys of each block of a cluster."""
        self.room = room
        rest = max(self.rest, self.split * room)
        self.overflows = rest < self.tiles * self.tile
        self.capacity = rest if self.overflows else max(self.tiles * self.tile, self.rounded, self.split * room)
        # Offsets into the pool, in their own elements.
        self.at_keys = self.ring // 8
        self.at_kept = self.at_keys + self.capacity
        self.at_united = self.at_kept + self.kept
        self.at_counts = 2 * (self.at_united + self.split * self.room)
        self.at_heads = self.at_counts + self.spread
        self.at_nexts = self.at_heads + self.spread
        self.at_copied = ceildiv(self.at_nexts + self.capacity, 4) * 4
        self.at_marked = 2 * (self.at_copied + (self.copies * self.padded if self.deferred else 0))
        self.pool = ceildiv(2 * (self.at_marked + (self.tiles * self.threads if self.deferred else 0)), 16) * 16
        # A pool just below 48 KB would exceed what a kernel gets unasked together with the static buffers.
        if STATIC_LIMIT - STATIC < self.pool <= STATIC_LIMIT:
            self.pool = STATIC_LIMIT + 16


def space(problem: Problem, machine: Machine) -> Table:
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: the buffer would not fit into shared memory")
    size = problem.batch_extent * problem.vocab * numpy_dtype(problem.dtype).itemsize
    if not machine.has_clusters:
        overlap, prefetch = (0,), (0,)
    elif problem.batch_extent <= machine.cores:
        overlap, prefetch = (1,), (0,)
    else:
        overlap, prefetch = (0, 1), ((0, 1) if size > CACHED else (0,))
    return {
        "threads": THREADS,
        "vectors": VECTORS,
        "stages": STAGES,
        "overlap": overlap,
        "prefetch": prefetch,
        "deferred": (0, 1),
    }


def cluster_space(problem: Problem, machine: Machine) -> Table:
    if not machine.has_clusters:
        raise NotApplicable(f"{machine.arch} has no thread block clusters")
    if problem.batch_extent > 2 * machine.cores:
        raise NotApplicable(f"a block a row fills {machine.cores} multiprocessors at batch {problem.batch_extent}")
    # More blocks than fit at once would only wait for each other.
    splits = tuple(split for split in SPLITS if problem.batch_extent * split <= max(2 * machine.cores, 2))
    table = {"cluster": splits or SPLITS[:1], **space(problem, machine), "overlap": (1,), "prefetch": (0,)}
    if first_allowed(problem, machine, cluster_choices(table, problem, machine), cluster_allowed) is None:
        raise NotApplicable(f"vocab={problem.vocab} is too short to share")
    return table


def allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    if decisions["prefetch"] and not decisions["overlap"]:
        return "rows are prefetched in launches that overlap the producer kernel only"
    layout = Layout(problem, decisions)
    if layout.pool > (MAX_SHARED if layout.split == 1 else MAX_CLUSTER_SHARED):
        return f"{layout.pool} bytes of shared memory are more than a block should take"
    if layout.held > 32:
        return f"{layout.held} elements in registers are more than 32"
    if layout.vectors > 1 and layout.chunks < USED * layout.tiles * layout.warps * layout.vectors:
        return f"of {layout.warps * layout.vectors} vectors a tile has only {layout.slots} to load"
    if layout.warps > 1 and layout.chunks < layout.warps:
        return f"of {layout.warps} warps only {layout.chunks} have a vector to load"
    if layout.threads < ALONE <= 32 * layout.chunks and problem.batch_extent <= machine.cores:
        return f"{layout.threads} threads are too few for a block that has a multiprocessor of its own"
    if layout.deferred and layout.tiles == 1:
        return "a thread's only tile is searched at once"
    if layout.deferred and not layout.gated:
        return f"without a first threshold, as for k={problem.k}, every tile would be searched again"
    if layout.deferred and layout.tiles * layout.threads > 1 << 16:
        return f"the number of a tile, one of {layout.tiles * layout.threads}, takes more than 16 bits"
    if layout.stages > layout.tiles:
        return f"there are only {layout.tiles} tiles for {layout.stages} stages"
    if layout.threads == 32 and layout.tiles > 8:
        return f"a warp alone would load {layout.tiles} tiles, one after another"
    return None


def cluster_allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    if decisions["threads"] < ALONE:
        return f"{decisions['threads']} threads are too few for a block of a cluster"
    return allowed(problem, machine, decisions)


def choices(problem: Problem, machine: Machine) -> list[Decisions]:
    """Points in the order in which they are good guesses: large tiles, blocks of a middle size or larger ones."""
    crowded = problem.batch_extent > machine.cores
    overlap, wanted = int(machine.has_clusters), 256 if crowded else 512
    threads = sorted(THREADS, key=lambda t: abs(log2(t / wanted)))
    return [
        {"threads": t, "vectors": v, "stages": s, "overlap": overlap, "prefetch": 0, "deferred": deferred}
        for v in (4, 2, 1)
        for t in threads
        for s in (2, 1)
        for deferred in ((1, 0) if crowded and problem.k <= DEFERRED else (0,))
    ]


def cluster_choices(table: Table, problem: Problem, machine: Machine) -> list[Decisions]:
    """The most blocks a row that each have a multiprocessor of their own, then fewer, then more."""
    points = choices(problem, machine)
    splits = sorted((8, 4, 2), key=lambda split: (split * problem.batch_extent > machine.cores, -split))
    return [{"cluster": split, **point} for split in splits if split in table["cluster"] for point in points]


def first_allowed(
    problem: Problem,
    machine: Machine,
    points: list[Decisions],
    rule: Callable[[Problem, Machine, Decisions], str | None],
) -> Decisions | None:
    return next((point for point in points if rule(problem, machine, point) is None), None)


def default(problem: Problem, machine: Machine) -> Decisions:
    point = first_allowed(problem, machine, choices(problem, machine), allowed)
    assert point is not None, f"{problem}: the smallest point fits every k and vocab"
    return point


def cluster_default(problem: Problem, machine: Machine) -> Decisions:
    points = cluster_choices(cluster_space(problem, machine), problem, machine)
    point = first_allowed(problem, machine, points, cluster_allowed)
    assert point is not None, f"{problem}: the space would not apply"
    return point


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from ..device.arithmetic import LN_2, LOG2_E, is_nan
    from ..device.cluster import cluster_arrive, cluster_arrive_silent, cluster_barrier, cluster_wait, peer_write
    from ..device.overlap import LINE, await_previous, multiprocessors, overlapping
    from ..device.selection import (
        FULL_WARP,
        MINUS_INFINITY,
        PLUS_INFINITY,
        RADIX_BINS,
        RANKERS,
        below,
        bits_value,
        device_functions,
        join_key,
        key_bits,
        key_index,
        key_value,
        order,
        order_bits,
    )
    from ..device.words import fixed, load_words, per_word, read_element, value_in
    from .elements import element_of, write_given, write_value

    vocab, k, n, dtype = problem.vocab, problem.k, problem.ids, problem.dtype
    with_bias, early, prefetches = bool(problem.bias), bool(decisions["overlap"]), bool(decisions["prefetch"])
    element = element_of(problem, overlapped=True)
    layout = Layout(problem, decisions)
    threads, warps, vectors, width, stages = layout.threads, layout.warps, layout.vectors, layout.width, layout.stages
    held, tiles, share, split, aligned = layout.held, layout.tiles, layout.share, layout.split, layout.aligned
    slot_size = warps * tiles * 32 * width  # columns from one vector of a tile to the next
    capacity, room, bins = layout.capacity, layout.room, layout.bins
    parts, itemsize = per_word(dtype), numpy_dtype(dtype).itemsize
    words = 4 * vectors  # of a thread's tile
    deferred, overflows = layout.deferred, layout.overflows and not layout.deferred
    # A bitonic sort of many keys by few threads needs more registers.
    resident = RESIDENT_LARGE if vectors == max(VECTORS) else RESIDENT
    resident = max(resident // (threads if layout.rounded <= 8 * threads else 2 * threads), 1) if split == 1 else 1
    together = max(min(resident, SHARED // (layout.pool + STATIC + RESERVED)), 1)  # blocks of a multiprocessor
    gated, floor = layout.gated, layout.floor
    floors = floor.warps if floor else 0
    counted = k <= COUNTED
    # Few threads rank a key each, so that all survivors are ranked in one step.
    rankers = min(1 << max((threads // RANKED).bit_length() - 1, 0), RANKERS) if counted else RANKERS
    # Keys that are ranked by counting: a few a thread; where bins have failed, as many as cost no more than a sort.
    fits, crowd = 4 * threads // rankers, isqrt(COMPARISONS * threads)
    staged = k > STAGED
    # Whether one warp may do for all of a row what is left after the streaming.
    quick, each = deferred and counted and split == 1, ceildiv(layout.copies, 32) if deferred else 0
    halvings = (split - 1).bit_length()
    lowest = T.min_value("float32")
    put_float, put_int = peer_write("put_float", "float"), peer_write("put_int", "int")
    put_key = peer_write("put_key", "unsigned long long")
    device = device_functions(threads, k, bins, layout.place, floors, rankers)
    select_pivot, keep_selected = device.select_pivot, device.keep_selected
    maxima_of_warp, offer_maxima, place_of_maxima = device.maxima_of_warp, device.offer_maxima, device.place_of_maxima
    rank_key = device.rank_key
    rank_in_bins, sort_descending = device.rank_in_bins, device.sort_descending

    def key_in(keys, extra, row, i):
        return keys[i]

    def column_of(at, e):
        """The column of element e of a tile that lies at `at`."""
        u = e // width
        late = at[int(2 * u >= vectors)] if isinstance(e, int) else T.Select(u * 2 >= vectors, at[1], at[0])
        return (late if vectors > 1 else at[0]) + u * slot_size + e % width

    def address_of(row_at, column):
        """Of an element of the row whose first one is at `row_at`; `column` may be below 0."""
        return row_at[0] + T.Cast("uint64", T.Cast("int64", column) * itemsize)

    def folded(most, x, first, extent):
        """The maximum or minimum (`most`) of so many elements of x from the first one on, as a tree."""
        if extent == 1:
            return x[first]
        half = extent // 2
        return most(folded(most, x, first, half), folded(most, x, first + half, extent - half))

    def beside():
        """How many rows are worked on at a time, so that the one which comes into a row's place is as many behind."""
        return multiprocessors() * together

    def too_large(total):
        """Whether a sum of exponentials is no good; as if it is a NaN."""
        return (T.reinterpret("uint32", total) & T.uint32(0x7FFFFFFF)) >= T.uint32(TOO_LARGE)

    def not_below(value, bound, otherwise=0):
        """Whether a value, which may be a NaN, is no less than `bound`; or else if that is not 0."""
        return T.Select(value < bound, otherwise, 1) != 0

    def in_order(x, small, large):
        """Whether a vector whose ends these are may be of a run in order; not if it is not in the row."""
        ordered = x[small] <= x[large]
        return ordered if layout.whole else T.And(ordered, x[large] > -T.infinity("float32"))

    def is_run(rising, falling):
        """Whether all of a warp's last vectors ascend, up to the row's end, or all of its first ones descend."""
        descends = (falling | T.uint32(layout.lead)) == T.uint32(FULL_WARP)
        if layout.whole:
            return T.Or(rising == T.uint32(FULL_WARP), descends)
        ascends = T.And(rising & (rising + T.uint32(1)) == T.uint32(0), rising >= T.uint32((1 << floor.lanes) - 1))
        return T.Or(ascends, descends)

    def inside(t, at, start, end):
        """Whether all of a thread's tile lies in the row and in this block's share of it."""
        if layout.whole:
            return True
        last = column_of(at, (vectors - 1) * width)
        # A row that begins within a vector also ends in one.
        behind = last + (width if aligned else 2 * width) <= end
        return behind if aligned else T.And(behind, at[0] >= 0)

    # fmt: off
    @T.inline
    def place_tile(i, t, start, at):
        """Where this thread's i-th tile lies: at[0] is the column of its first vector, at[1] serves the later ones.

        A slot is a run of `tiles` chunks of 32 vectors, one chunk a tile; the u-th vector is of slot u * warps + warp.
        The first tile takes the first chunk of a slot, but in the upper half of the slots the last one: the sample
        then holds both ends of a row that ascends or descends.
        """
        at[0] = start + ((t // 32 * tiles + i) * 32 + t % 32) * width
        at[1] = start + ((t // 32 * tiles + (tiles - 1) - i) * 32 + t % 32) * width
        if vectors == 1:
            if t // 32 >= (warps + 1) // 2:
                at[0] = at[1]

    @T.inline
    def start_tile(i, row_at, start, end, t, ahead, ring):
        """Have a tile copied into this thread's part of the ring; beyond the row the last vector again."""
        if i < tiles:
            place_tile(i, t, start, ahead)
            if inside(t, ahead, start, end):
                for u in T.unroll(vectors):
                    T.ptx.cp.async_.cg.shared.global_(
                        ring.ptr_to([(((i % stages) * vectors + u) * threads + t) * 4]),
                        address_of(row_at, column_of(ahead, u * width)), 16)
            else:
                for u in T.unroll(vectors):
                    # Of the row's last vector only what is the row's: it may be the array's end.
                    T.ptx.cp.async_.cg.shared.global_(
                        ring.ptr_to([(((i % stages) * vectors + u) * threads + t) * 4]),
                        address_of(row_at, T.min(column_of(ahead, u * width), end - width)), 16,
                        T.Cast("uint32", T.min(
                            (vocab - T.min(column_of(ahead, u * width), end - width)) * itemsize, 16)))
        T.ptx.cp.async_.commit_group()

    @T.inline
    def prefetch_tile(row_at, start, end, t, ahead):
        """Have a row's first tile brought into the L2 cache: each thread asks for a line of its own and its neighbours'
        vectors. The row need not begin within a vector as the one does that `start` and `end` are of."""
        place_tile(0, t, start, ahead)
        for u in T.unroll(vectors):
            if t % (LINE // 16) == u:
                T.ptx.prefetch.global_.L2(address_of(row_at, T.min(column_of(ahead, u * width), end - width)))

    @T.inline
    def load_tile(i, t, ring, raw):
        """The words of a tile that has arrived."""
        T.ptx.cp.async_.wait_group(stages - 1)
        for u in T.unroll(vectors):
            for v in T.vectorized(4):
                raw[u * 4 + v] = ring[(((i % stages) * vectors + u) * threads + t) * 4 + v]

    @T.inline
    def convert_tile(B, start, end, t, at, raw, x):
        """The elements of a tile, -inf for what is not of this block's share."""
        for e in T.unroll(held):
            x[e] = value_in(dtype, raw[e // parts], e % parts)
        if with_bias:
            for e in T.unroll(held):
                x[e] = x[e] + read_element("float32", B.ptr_to([T.max(T.min(column_of(at, e), vocab - 1), 0)]))
        if not layout.whole:
            if not inside(t, at, start, end):
                for e in T.unroll(held):
                    if column_of(at, e) >= T.min(end, vocab) or column_of(at, e) < 0:
                        x[e] = -T.infinity("float32")

    @T.inline
    def keep_best(t, keys, kept, size, count, histogram, found, pivot, mask, need):
        """Cut the buffer's keys to the best k, in its front; `pivot` is a lower bound that only these reach."""
        select_pivot(t, key_in, keys, keys, 0, size[0], histogram, found, pivot, mask, need)
        keep_selected(t, keys, size[0], kept, count, pivot)

    @T.inline
    def compact(t, keys, kept, size, count, full, histogram, found, pivot, mask, need, gate, barred):
        """Cut the buffer to the best k and raise the threshold to the k-th. All threads come here, after a barrier."""
        size[0] = T.min(count[0], capacity)
        keep_best(t, keys, kept, size, count, histogram, found, pivot, mask, need)
        gate[0] = key_value(pivot[0])
        # The pivot's last digits are 0 where no equals had to be told apart.
        barred[0] = T.Cast("int32", T.min(key_index(pivot[0]), T.uint32(vocab)))
        if is_nan(gate[0]):
            # k NaN already: what is no NaN has no chance, and only plus infinity still passes for a candidate.
            gate[0] = T.infinity("float32")
        if t == 0:
            full[0] = T.uint32(0)
        T.cuda.cta_sync()

    @T.inline
    def bar_equals(t, x, gate, found, start, end, barred):
        """Of elements that equal the sample's maximum only the row's first are wanted: up to which column?

        As many as there should be `Layout.equals` of these, if in all of the block's part they are as dense as in the
        sample, which is one of its tiles. One barrier.
        """
        equal = T.alloc_local([1], "int32")
        equal[0] = 0
        for e in T.unroll(held):
            if x[e] == gate[0]:
                equal[0] = equal[0] + 1
        equal[0] = T.cuda.warp_sum(equal[0])
        if t % 32 == 0:
            T.evaluate(T.cuda.atomic_add(found.ptr_to([3]), equal[0]))
        T.cuda.cta_sync()
        barred[0] = T.Cast("int32", T.min(
            T.Cast("float32", start)
            + T.Cast("float32", T.min(end, vocab) - start) * T.float32(layout.equals / tiles)
            / T.Cast("float32", T.max(found[3], 1)), T.float32(vocab)))

    @T.inline
    def least_of_vectors(x, low, inside, plain, bits, least):
        """Raise `least` to what the lanes that are `inside` all reach with the vector from x[low] on."""
        order(folded(T.min, x, low, width), plain, bits)
        if not inside:
            bits[0] = T.uint32(FULL_WARP)
        bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), bits[0])
        least[0] = T.max(least[0], bits[0])

    @T.inline
    def floor_of_warp(t, x, plain, bits, least):
        """`least`: what `floor.lanes` neighbouring lanes reach with a whole vector; 0 if the row is not in order here.

        A warp's vectors of one slot are a run of the row. The last run of an ascending row ends in its largest elements
        and the first one of a descending row begins with them. The ends of the vectors only tell whether it is worth
        looking; what is found holds for any row. A NaN is left out of a minimum, which it counts as larger than.
        """
        rising = T.alloc_local([1], "uint32")
        falling = T.alloc_local([1], "uint32")
        rising[0] = T.cuda.ballot_sync(
            T.uint32(FULL_WARP), in_order(x, layout.last * width, layout.last * width + width - 1))
        falling[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), in_order(x, width - 1, 0))
        least[0] = T.uint32(0)
        if is_run(rising[0], falling[0]):
            # Places in a circle, so that it is always as many lanes, of which some have nothing if the run is shorter.
            least_of_vectors(
                x, layout.last * width,
                (t - T.Cast("int32", T.popcount(rising[0]))) & 31 >= 32 - floor.lanes, plain, bits, least)
            least_of_vectors(x, 0, (t - layout.lead) & 31 < floor.lanes, plain, bits, least)

    @T.inline
    def refer_to(highest, high, reference, factor):
        """Take the largest element of a sample, if it is finite, for the reference of the exponentials."""
        high[0] = T.Select(
            highest[0] > T.uint32(MINUS_INFINITY) and highest[0] < T.uint32(PLUS_INFINITY),
            bits_value(highest[0]), T.float32(0))
        reference[0] = high[0] * factor[0]

    @T.inline
    def offer_sample(
        t, x, top, plain, bits, least, highest, reached, group_bits, group_top, group_floor, high, reference, factor
    ):
        """From the first tile: the warp's own reference, and what it gives the others for a threshold."""
        if floors > 0:
            floor_of_warp(t, x, plain, bits, least)
        order(top[0], plain, bits)
        maxima_of_warp(t, bits, highest, reached)
        offer_maxima(t, least, highest, reached, group_bits, group_top, group_floor)
        refer_to(highest, high, reference, factor)

    @T.inline
    def look_at_sample(
        t, x, least, highest, reached, group_bits, group_top, group_floor, high, reference, factor, power, d, gate,
        found, start, end, barred
    ):
        """The reference for the rest, to which the sum so far is brought, and the first threshold. A barrier or two."""
        place_of_maxima(t, least, highest, group_bits, group_top, group_floor, reached)
        power[0] = reference[0]
        refer_to(highest, high, reference, factor)
        if d[0] > T.float32(0):
            T.ptx.ex2.approx.ftz.f32(power[0], power[0] - reference[0])
            d[0] = d[0] * power[0]
        if gated and reached[0] > T.uint32(MINUS_INFINITY):
            gate[0] = bits_value(T.min(reached[0], T.uint32(PLUS_INFINITY)))
            if (layout.overflows or split > 1) and reached[0] == highest[0]:
                bar_equals(t, x, gate, found, start, end, barred)

    @T.inline
    def mark_elements(x, first, extent, gate, bits):
        """Set the bits of those of x[first:first + extent] that reach the threshold, as every NaN does."""
        for e in T.unroll(extent):
            bits[0] = bits[0] | T.Select(
                x[first + e] < gate[0], T.uint32(0), T.uint32(1) << T.Cast("uint32", first + e))

    @T.inline
    def unmark_equals(x, gate, at, barred, bits):
        """Take the bits off elements that equal the threshold and lie behind its own place."""
        if barred[0] < vocab:
            for e in T.unroll(held):
                if x[e] == gate[0] and column_of(at, e) > barred[0]:
                    bits[0] = bits[0] & ~(T.uint32(1) << T.Cast("uint32", e))

    @T.inline
    def take_mark(bits, spot):
        """Take one bit off; `spot` is which."""
        spot[0] = 31 - T.clz(T.reinterpret("int32", bits[0]))
        bits[0] = bits[0] ^ (T.uint32(1) << T.Cast("uint32", spot[0]))

    @T.inline
    def mark_survivors(x, top, top_of, gate, attempt, at, barred, pending, bits):
        """One bit for each element of the tile that reaches the threshold and is not in the buffer yet."""
        bits[0] = T.uint32(0)
        # Equals of the threshold pass only up to its own place, and all of this tile may lie behind it.
        if pending[0] != 0 and (top[0] != gate[0] or at[0] <= barred[0] or attempt != 0):
            for u in T.unroll(vectors):
                if not_below(top_of[u], gate[0], attempt):
                    mark_elements(x, u * width, width, gate, bits)
            unmark_equals(x, gate, at, barred, bits)

    @T.inline
    def push_survivors(i, t, B, ring, keys, count, full, bits, at, slot, spot, power, plain, ordered, pending):
        """Put the elements of the thread's tile that have their bit into the buffer; if it is full, call for help."""
        slot[0] = T.cuda.atomic_add(count.ptr_to([0]), T.Cast("int32", T.popcount(bits[0])))
        if overflows and slot[0] + T.Cast("int32", T.popcount(bits[0])) > capacity:
            # What is left of the room is made void.
            while slot[0] < capacity:
                keys[slot[0]] = T.uint64(0)
                slot[0] = slot[0] + 1
            T.evaluate(T.call_extern("uint32", "atomicExch", full.ptr_to([0]), T.uint32(1)))
        else:
            pending[0] = 0
            # Registers cannot be indexed: the elements are read again, from the ring.
            while bits[0] != T.uint32(0):
                take_mark(bits, spot)
                power[0] = value_in(
                    dtype,
                    ring[(((i % stages) * vectors + spot[0] // width) * threads + t) * 4 + spot[0] % width // parts],
                    spot[0] % parts)
                if with_bias:
                    power[0] = power[0] + read_element("float32", B.ptr_to([column_of(at, spot[0])]))
                order(power[0], plain, ordered)
                keys[slot[0]] = join_key(ordered[0], column_of(at, spot[0]))
                slot[0] = slot[0] + 1

    @T.inline
    def place_marked(number, marked, start, at, slot):
        """Where a marked tile lies, as `place_tile` says."""
        slot[0] = T.Cast("int32", marked[number])
        place_tile(slot[0] // threads, slot[0] % threads, start, at)

    @T.inline
    def load_copied(number, copied, x):
        """The elements of a marked tile that was copied."""
        for e in T.unroll(held // 4):
            for v in T.vectorized(4):
                x[e * 4 + v] = copied[number * layout.padded + e * 4 + v]

    @T.inline
    def load_marked(X, B, row, row_at, column, end, raw, y):
        """The elements of a vector of the row, read again; -inf for what is not of this block's share."""
        for e in T.unroll(width):
            y[e] = -T.infinity("float32")
        if column < end:
            if aligned or (column >= 0 and column + width <= vocab):
                load_words(16, raw, 0, None, address_of(row_at, column))
                for e in T.unroll(width):
                    y[e] = value_in(dtype, raw[e // parts], e % parts)
                    if with_bias:
                        y[e] = y[e] + read_element("float32", B.ptr_to([column + e]))
            else:
                for e in T.unroll(width):
                    if column + e >= 0 and column + e < vocab:
                        y[e] = element(X, B, row, column + e)

    @T.inline
    def search_marked(
        first, last, step, X, B, row, row_at, start, end, t, marked, gate, barred, keys, count, at, raw, x, bits, slot,
        spot, plain, ordered
    ):
        """Put what reaches the threshold of the first to the last vector of marked tiles into the buffer, if it fits.

        `step` threads take one vector after another.
        """
        for r in T.serial((last - first - t + (step - 1)) // step):
            if t < step:
                spot[0] = first + r * step + t
                place_marked(spot[0] // vectors, marked, start, at, slot)
                spot[0] = column_of(at, spot[0] % vectors * width)
                load_marked(X, B, row, row_at, spot[0], end, raw, x)
                bits[0] = T.uint32(0)
                for e in T.unroll(width):
                    if not_below(x[e], gate[0]) and (x[e] != gate[0] or spot[0] + e <= barred[0]):
                        bits[0] = bits[0] | (T.uint32(1) << T.Cast("uint32", e))
                if bits[0] != T.uint32(0):
                    slot[0] = T.cuda.atomic_add(count.ptr_to([0]), T.Cast("int32", T.popcount(bits[0])))
                    if slot[0] + width <= capacity:
                        for e in T.unroll(width):
                            if (bits[0] >> T.Cast("uint32", e)) & T.uint32(1) != T.uint32(0):
                                order(x[e], plain, ordered)
                                keys[slot[0]] = join_key(ordered[0], spot[0] + e)
                                slot[0] = slot[0] + 1

    @T.inline
    def search_copied(
        start, t, marks, marked, copied, gate, barred, keys, count, at, x, bits, slot, spot, plain, ordered
    ):
        """Put what reaches the threshold of the copied tiles into the buffer, if it fits; a thread searches a tile."""
        for r in T.serial((T.min(marks[0], layout.copies) - t + (threads - 1)) // threads):
            load_copied(r * threads + t, copied, x)
            place_marked(r * threads + t, marked, start, at, slot)
            bits[0] = T.uint32(0)
            mark_elements(x, 0, held, gate, bits)
            unmark_equals(x, gate, at, barred, bits)
            slot[0] = T.cuda.atomic_add(count.ptr_to([0]), T.Cast("int32", T.popcount(bits[0])))
            if slot[0] + held <= capacity:
                while bits[0] != T.uint32(0):
                    take_mark(bits, spot)
                    order(copied[(r * threads + t) * layout.padded + spot[0]], plain, ordered)
                    keys[slot[0]] = join_key(ordered[0], column_of(at, spot[0]))
                    slot[0] = slot[0] + 1

    @T.inline
    def fill_up(X, B, row, t, keys, size, slot):
        """One warp appends the row's first elements at minus infinity until there are k keys."""
        lanes = T.alloc_local([1], "uint32")
        has = T.alloc_local([1], "int32")
        i: T.int32 = 0
        while i * 32 < vocab and size[0] < k:
            has[0] = 0
            if i * 32 + t < vocab:
                if element(X, B, row, i * 32 + t) == -T.infinity("float32"):
                    has[0] = 1
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), has[0] != 0)
            slot[0] = size[0] + below(t, lanes[0])
            if has[0] != 0 and slot[0] < k:
                keys[slot[0]] = join_key(T.uint32(MINUS_INFINITY), i * 32 + t)
            size[0] = size[0] + T.Cast("int32", T.popcount(lanes[0]))
            i = i + 1

    @T.inline
    def push_part(
        t, part, keys, size, united, united_size, united_high, united_reference, united_sum, united_gate, gate, barred,
        high, reference, d
    ):
        """Write the block's sum and its reference, its threshold and its keys to their place in the first block."""
        for i in T.serial((size[0] - t + (threads - 1)) // threads):
            T.evaluate(put_key(united.ptr_to([part * room + i * threads + t]), 0, keys[i * threads + t]))
        if t == 0:
            T.evaluate(put_int(united_size.ptr_to([part]), 0, size[0]))
            T.evaluate(put_float(united_high.ptr_to([part]), 0, high[0]))
            T.evaluate(put_float(united_reference.ptr_to([part]), 0, reference[0]))
            T.evaluate(put_float(united_sum.ptr_to([part]), 0, d[0]))
            T.evaluate(put_key(united_gate.ptr_to([part]), 0, join_key(order_bits(gate[0]), barred[0])))

    @T.inline
    def unite_parts(
        t, keys, size, count, united, united_size, united_high, united_reference, united_sum, united_gate, gate, barred,
        pivot, high, reference, d
    ):
        """Of what the blocks have pushed: sum and reference of the row, the highest threshold, the keys that reach it.

        What a block did not push is below its own threshold, so that no key that reaches the highest is missing. A lane
        reads what one block has pushed.
        """
        pivot[0] = united_gate[T.min(t % 32, split - 1)]
        high[0] = united_high[T.min(t % 32, split - 1)]
        reference[0] = united_reference[T.min(t % 32, split - 1)]
        d[0] = T.Select(t % 32 < split, united_sum[T.min(t % 32, split - 1)], T.float32(0))
        gate[0] = reference[0]
        for s in T.unroll(halvings):
            pivot[0] = T.max(pivot[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), pivot[0], 1 << s, 32, 32))
            high[0] = T.max(high[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), high[0], 1 << s, 32, 32))
            gate[0] = T.max(gate[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), gate[0], 1 << s, 32, 32))
        d[0] = T.cuda.warp_sum(d[0] * T.exp2(reference[0] - gate[0]))
        # Lanes beyond the last block repeat it, and the others' maxima are in each group of them.
        reference[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), gate[0], 0, 32, 32)
        pivot[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), pivot[0], 0, 32, 32)
        high[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), high[0], 0, 32, 32)
        gate[0] = key_value(pivot[0])
        barred[0] = T.Cast("int32", key_index(pivot[0]))
        if t == 0:
            count[0] = 0
        T.cuda.cta_sync()
        for r in T.serial((split - 1 - t // 32 + warps) // warps):
            for i in T.serial((united_size[r * warps + t // 32] - t % 32 + 31) // 32):
                if united[(r * warps + t // 32) * room + i * 32 + t % 32] >= pivot[0]:
                    keys[T.cuda.atomic_add(count.ptr_to([0]), T.int32(1))] = united[
                        (r * warps + t // 32) * room + i * 32 + t % 32]
        T.cuda.cta_sync()
        size[0] = count[0]

    @T.inline
    def clear_bins(t, counts, heads, flag):
        for i in T.serial((layout.spread - 1 - t + threads) // threads):
            counts[i * threads + t] = 0
            heads[i * threads + t] = 0
        if t == 0:
            flag[0] = 0

    @T.inline
    def least_value(t, keys, size, group_bits, bits, least):
        """The smallest value of the keys that is not minus infinity. One barrier."""
        bits[0] = T.uint32(0xFFFFFFFF)
        for i in T.serial((size[0] - t + (threads - 1)) // threads):
            bits[0] = T.min(bits[0], key_bits(keys[i * threads + t]))
        bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), bits[0])
        if t % 32 == 0:
            group_bits[t // 32] = bits[0]
        T.cuda.cta_sync()
        bits[0] = T.call_extern("uint32", "__reduce_min_sync", T.uint32(FULL_WARP), group_bits[t % warps])
        least[0] = T.max(bits_value(bits[0]), lowest)

    @T.inline
    def place_in_output(extra, rank, key):
        """Write one value and its index; extra is (V, Z, row, factor, reference, inverse, logarithm, log)."""
        extra[1][extra[2], rank] = T.Cast("int64", key_index(key))
        write_value(
            extra[0], extra[2], rank, (key_value(key) * extra[3][0] - extra[4][0]) * T.float32(LN_2), extra[5][0],
            extra[6][0], extra[7])

    @T.inline
    def place_in_buffer(extra, rank, key):
        extra[rank] = key

    @T.inline
    def rank_by_counting(t, keys, size, need, pivot, slot, place_key, extra):
        """Call place_key(extra, rank, key) for the k best keys."""
        for i in T.serial((size[0] * rankers + (threads - 1)) // threads):
            rank_key(t, i, keys, size[0], need, pivot, slot)
            if t % rankers == 0 and need[0] < size[0] and slot[0] < k:
                place_key(extra, slot[0], pivot[0])

    @T.inline
    def take_few(
        t, marks, tops, start, marked, copied, gate, barred, keys, found, at, need, bits, slot, spot, plain, ordered,
        pivot, x, outputs
    ):
        """One warp finds the k best in the copied tiles alone and writes them; or leaves found[0] as it is.

        The k-th largest of the tiles' maxima is a threshold that seldom a second element of a tile reaches. If one does
        or there are many equals, it is not for one warp.
        """
        own = T.alloc_local([each], "uint32")
        lanes = T.alloc_local([1], "uint32")
        least = T.alloc_local([1], "uint32")
        for j in T.unroll(each):
            own[j] = T.uint32(0)
            if j * 32 + t < marks[0]:
                own[j] = tops[j * 32 + t]
        # Loops that are not unrolled: what is executed once is fetched more slowly than executed.
        above: T.int32 = 0
        bits[0] = folded(T.max, own, 0, each)
        least[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), bits[0])
        while above < k - 1:
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), bits[0] == least[0])
            need[0] = T.Select(T.Cast("int32", T.cuda.ffs_u32(lanes[0])) - 1 == t, 1, 0)
            for j in T.unroll(each):
                if need[0] != 0 and own[j] == least[0]:
                    own[j] = T.uint32(0)
                    need[0] = 0
            bits[0] = folded(T.max, own, 0, each)
            least[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), bits[0])
            above = above + 1
        # A lane for each tile whose maximum reaches it.
        need[0] = 0
        for j in T.unroll(each):
            bits[0] = T.uint32(0)
            if j * 32 + t < marks[0]:
                bits[0] = tops[j * 32 + t]
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), bits[0] >= least[0])
            slot[0] = need[0] + below(t, lanes[0])
            if bits[0] >= least[0] and slot[0] < 32:
                keys[slot[0]] = T.Cast("uint64", j * 32 + t)
            need[0] = need[0] + T.Cast("int32", T.popcount(lanes[0]))
        T.cuda.warp_sync()
        bits[0] = T.uint32(0)
        if t < need[0]:
            slot[0] = T.Cast("int32", keys[t])
            load_copied(slot[0], copied, x)
            plain[0] = bits_value(least[0])
            mark_elements(x, 0, held, plain, bits)
            take_mark(bits, spot)
            ordered[0] = tops[slot[0]]
            place_marked(slot[0], marked, start, at, slot)
            pivot[0] = join_key(ordered[0], column_of(at, spot[0]))
        T.cuda.warp_sync()
        if t < need[0]:
            keys[t] = pivot[0]
        T.cuda.warp_sync()
        order(gate[0], plain, ordered)
        # Of equals of the first threshold those that lie behind its own place are not marked.
        if need[0] <= 32 and (least[0] > ordered[0] or barred[0] >= vocab) and T.cuda.any_sync(
            T.uint32(FULL_WARP), bits[0] != T.uint32(0)
        ) == 0:
            slot[0] = 0
            for j in T.serial(need[0]):
                if keys[j] > pivot[0]:
                    slot[0] = slot[0] + 1
            if t < need[0] and slot[0] < k:
                place_in_output(outputs, slot[0], pivot[0])
            if t == 0:
                found[0] = 1

    @T.prim_func
    def main(
        logits_h: T.handle, scale: T.float32, log: T.int32, bias_h: T.handle, ids_h: T.handle,
        values_h: T.handle, indices_h: T.handle, given_h: T.handle
    ):
        batch = T.int32()
        X = T.match_buffer(logits_h, (batch, vocab), dtype)
        B = T.match_buffer(bias_h, (vocab,), "float32")
        ids = T.match_buffer(ids_h, (batch, n), "int64")
        V = T.match_buffer(values_h, (batch, k), "float32")
        Z = T.match_buffer(indices_h, (batch, k), "int64")
        G = T.match_buffer(given_h, (batch, n), "float32")
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": resident})
        if split > 1:
            block = T.cluster_id([batch])
            part = T.cta_id_in_cluster([split])
        else:
            block = T.cta_id([batch])
            part = 0
        t = T.thread_id([threads])
        pool = T.alloc_buffer([layout.pool // 8], "uint64", scope="shared.dyn")
        ring = T.decl_buffer([layout.ring // 4], "uint32", data=pool.data, scope="shared.dyn")
        keys = T.decl_buffer([capacity], "uint64", data=pool.data, elem_offset=layout.at_keys, scope="shared.dyn")
        kept = T.decl_buffer([layout.kept], "uint64", data=pool.data, elem_offset=layout.at_kept, scope="shared.dyn")
        counts = T.decl_buffer(
            [layout.spread], "int32", data=pool.data, elem_offset=layout.at_counts, scope="shared.dyn")
        heads = T.decl_buffer(
            [layout.spread], "int32", data=pool.data, elem_offset=layout.at_heads, scope="shared.dyn")
        nexts = T.decl_buffer([capacity], "int32", data=pool.data, elem_offset=layout.at_nexts, scope="shared.dyn")
        if deferred:
            marked = T.decl_buffer(
                [tiles * threads], "uint16", data=pool.data, elem_offset=layout.at_marked, scope="shared.dyn")
            copied = T.decl_buffer(
                [layout.copies * layout.padded], "float32", data=pool.data, elem_offset=layout.at_copied,
                scope="shared.dyn")
            marks = T.alloc_shared([1], "int32")
        if quick:
            tops = T.alloc_shared([layout.copies], "uint32")
        histogram = T.alloc_shared([RADIX_BINS], "int32")
        totals = T.alloc_shared([32], "int32")
        found = T.alloc_shared([4], "int32")
        flag = T.alloc_shared([1], "int32")
        count = T.alloc_shared([1], "int32")
        group_sum = T.alloc_shared([32], "float32")
        group_bits = T.alloc_shared([32], "uint32")
        group_top = T.alloc_shared([32], "uint32")
        group_floor = T.alloc_shared([32], "uint32")
        full = T.alloc_shared([1], "uint32")
        group_high = T.alloc_shared([32], "uint32")
        raw = T.alloc_local([words], "uint32")
        x = T.alloc_local([held], "float32")
        top = T.alloc_local([1], "float32")
        top_of = T.alloc_local([vectors], "float32")
        d = T.alloc_local([1], "float32")
        power = T.alloc_local([1], "float32")
        factor = T.alloc_local([1], "float32")
        high = T.alloc_local([1], "float32")  # the largest element, as far as it is known
        reference = T.alloc_local([1], "float32")  # that, times factor
        gate = T.alloc_local([1], "float32")
        plain = T.alloc_local([1], "float32")
        inverse = T.alloc_local([1], "float32")
        logarithm = T.alloc_local([1], "float32")
        slot = T.alloc_local([1], "int32")
        spot = T.alloc_local([1], "int32")
        before = T.alloc_local([1], "float32")
        pending = T.alloc_local([1], "int32")
        sampling = T.alloc_local([1], "int32")
        row_at = T.alloc_local([1], "uint64")
        next_at = T.alloc_local([1], "uint64")
        size = T.alloc_local([1], "int32")
        pivot = T.alloc_local([1], "uint64")
        mask = T.alloc_local([1], "uint64")
        need = T.alloc_local([1], "int32")
        bits = T.alloc_local([1], "uint32")
        ordered = T.alloc_local([1], "uint32")
        at = T.alloc_local([2], "int32")
        ahead = T.alloc_local([2], "int32")
        barred = T.alloc_local([1], "int32")
        wanted = T.alloc_local([1], "int64")
        finer = T.alloc_local([1], "float32")
        reached = T.alloc_local([1], "uint32")
        highest = T.alloc_local([1], "uint32")
        called = T.alloc_local([1], "uint32")
        least = T.alloc_local([1], "uint32")
        settled = T.alloc_local([1], "int32")
        taken = T.alloc_local([1], "int32")
        if split > 1:
            united = T.decl_buffer(
                [split * room], "uint64", data=pool.data, elem_offset=layout.at_united, scope="shared.dyn")
            united_size = T.alloc_shared([split], "int32")
            united_high = T.alloc_shared([split], "float32")
            united_reference = T.alloc_shared([split], "float32")
            united_sum = T.alloc_shared([split], "float32")
            united_gate = T.alloc_shared([split], "uint64")
            verdict = T.alloc_shared([1], "int32")
        # Offsets into the logits pass 2^31.
        row: T.int64 = T.Cast("int64", block)
        # Elements of the row before in its first vector.
        lead: T.int32 = 0 if aligned else T.Cast("int32", (row * vocab) % width)
        # Columns of this block's first vector, and behind its last one.
        start: T.int32 = part * share * width - lead
        end: T.int32 = T.min(start + share * width, (vocab + lead + (width - 1)) // width * width - lead)
        factor[0] = scale * T.float32(LOG2_E)
        row_at[0] = fixed("u64", X.ptr_to([row, 0]))
        if split > 1:
            cluster_arrive_silent()  # and waits for the others to have begun before it writes into the first
        if not counted:
            clear_bins(t, counts, heads, flag)
        if prefetches:
            if block < beside():
                prefetch_tile(row_at, start, end, t, ahead)
        if early:
            await_previous()

        taken[0] = 0
        for attempt in T.serial(2):
            for i in T.unroll(stages):
                start_tile(i, row_at, start, end, t, ahead, ring)
            if t == 0:
                count[0] = 0
                full[0] = T.uint32(0)
                found[3] = 0
                if deferred:
                    marks[0] = 0
                    found[0] = 0
                if split > 1:
                    verdict[0] = 1
            d[0] = T.float32(0)
            # Everything above minus infinity passes: rows that have fewer than k of these are filled up at the end.
            gate[0] = lowest
            barred[0] = vocab
            sampling[0] = 1 - attempt
            T.cuda.cta_sync()

            i: T.int32 = 0
            pending[0] = 1
            called[0] = T.uint32(0)
            reading: T.int32 = 1
            while reading != 0:
                while i < tiles and called[0] == T.uint32(0):
                    place_tile(i, t, start, at)
                    load_tile(i, t, ring, raw)
                    convert_tile(B, start, end, t, at, raw, x)
                    for u in T.unroll(vectors):
                        top_of[u] = folded(T.max, x, u * width, width)
                    top[0] = folded(T.max, top_of, 0, vectors)
                    if deferred:
                        # Nobody reads the ring again.
                        start_tile(i + stages, row_at, start, end, t, ahead, ring)
                    if sampling[0] != 0:
                        offer_sample(
                            t, x, top, plain, bits, least, highest, reached, group_bits, group_top, group_floor, high,
                            reference, factor)
                    before[0] = d[0]
                    for e in T.unroll(held):
                        # One rounding, so that the reference cancels in the quotient; and without the steps that exp2
                        # takes for subnormal results, which add nothing to a sum of about 1 or more.
                        T.ptx.fma.rn.f32(power[0], x[e], factor[0], T.float32(0) - reference[0])
                        T.ptx.ex2.approx.ftz.f32(power[0], power[0])
                        d[0] = d[0] + power[0]
                    if sampling[0] != 0:
                        sampling[0] = 0
                        look_at_sample(
                            t, x, least, highest, reached, group_bits, group_top, group_floor, high, reference, factor,
                            power, d, gate, found, start, end, barred)
                    # A row with a NaN is always read twice: only then may elements pass where the largest does not.
                    if deferred:
                        if not_below(top[0], gate[0], attempt):
                            if top[0] != gate[0] or at[0] <= barred[0] or attempt != 0:
                                high[0] = T.max(high[0], top[0])
                                slot[0] = T.cuda.atomic_add(marks.ptr_to([0]), T.int32(1))
                                marked[slot[0]] = T.Cast("uint16", i * threads + t)
                                if slot[0] < layout.copies:
                                    if quick:
                                        order(top[0], plain, ordered)
                                        tops[slot[0]] = ordered[0]
                                    for e in T.unroll(held // 4):
                                        for v in T.vectorized(4):
                                            copied[slot[0] * layout.padded + e * 4 + v] = x[e * 4 + v]
                    elif T.cuda.any_sync(T.uint32(FULL_WARP), not_below(top[0], gate[0], attempt)) != 0:
                        high[0] = T.max(high[0], top[0])
                        mark_survivors(x, top, top_of, gate, attempt, at, barred, pending, bits)
                        if bits[0] != T.uint32(0):
                            push_survivors(
                                i, t, B, ring, keys, count, full, bits, at, slot, spot, power, plain, ordered, pending)
                        if overflows:
                            called[0] = T.Cast("uint32", T.cuda.any_sync(
                                T.uint32(FULL_WARP), bits[0] != T.uint32(0)))
                            # The tile comes again after the compaction, for what had no room.
                            if called[0] != T.uint32(0):
                                d[0] = before[0]
                    if called[0] == T.uint32(0):
                        if not deferred:
                            start_tile(i + stages, row_at, start, end, t, ahead, ring)
                        i = i + 1
                        pending[0] = 1
                if prefetches:
                    if attempt == 0 and block + beside() < batch:
                        next_at[0] = row_at[0] + T.Cast("uint64", beside()) * T.uint64(vocab * itemsize)
                        prefetch_tile(next_at, start, end, t, ahead)
                plain[0] = T.cuda.warp_sum(d[0])
                order(high[0], power, ordered)
                ordered[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), ordered[0])
                if t % 32 == 0:
                    group_sum[t // 32] = plain[0]
                    group_high[t // 32] = ordered[0]
                T.cuda.cta_sync()
                reading = 0
                if overflows:
                    # Warps that are through with the row wait here for calls until all are.
                    T.ptx.ld.volatile.shared.u32(called[0], full.ptr_to([0]))
                    if called[0] != T.uint32(0):
                        compact(
                            t, keys, kept, size, count, full, histogram, found, pivot, mask, need, gate, barred)
                        called[0] = T.uint32(0)
                        reading = 1
            d[0] = T.float32(0)
            if t % 32 < warps:
                d[0] = group_sum[t % 32]
            d[0] = T.cuda.warp_sum(d[0])
            if quick:
                if marks[0] >= k and marks[0] <= layout.copies and not too_large(d[0]):
                    if t < 32:
                        inverse[0] = T.float32(1) / d[0]
                        logarithm[0] = T.log(d[0])
                        take_few(
                            t, marks, tops, start, marked, copied, gate, barred, keys, found, at, need, bits, slot,
                            spot, plain, ordered, pivot, x,
                            (V, Z, row, factor, reference, inverse, logarithm, log))
                    T.cuda.cta_sync()
                    taken[0] = found[0]
                    if taken[0] != 0:
                        break
            if deferred:
                search_copied(
                    start, t, marks, marked, copied, gate, barred, keys, count, at, x, bits, slot, spot, plain, ordered)
                search_marked(
                    layout.copies * vectors, marks[0] * vectors, threads, X, B, row, row_at, start, end, t, marked,
                    gate, barred, keys, count, at, raw, x, bits, slot, spot, plain, ordered)
                T.cuda.cta_sync()
                if layout.overflows:
                    if count[0] > capacity - held:
                        # Once more, in steps, each with the threshold that the one before has raised.
                        T.cuda.cta_sync()
                        if t == 0:
                            count[0] = 0
                        T.cuda.cta_sync()
                        for r in T.serial((marks[0] * vectors + (layout.step - 1)) // layout.step):
                            search_marked(
                                r * layout.step, T.min((r + 1) * layout.step, marks[0] * vectors), layout.step, X, B,
                                row, row_at, start, end, t, marked, gate, barred, keys, count, at, raw, x, bits, slot,
                                spot, plain, ordered)
                            T.cuda.cta_sync()
                            size[0] = count[0]
                            T.cuda.cta_sync()
                            if size[0] > layout.rounded:
                                compact(
                                    t, keys, kept, size, count, full, histogram, found, pivot, mask, need, gate, barred)
            size[0] = count[0]
            ordered[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), group_high[t % warps])
            high[0] = bits_value(ordered[0])

            if split > 1:
                if size[0] > room:
                    keep_best(t, keys, kept, size, count, histogram, found, pivot, mask, need)
                    gate[0] = key_value(pivot[0])
                    barred[0] = T.Cast("int32", T.min(key_index(pivot[0]), T.uint32(vocab)))
                    size[0] = k
                if attempt == 0:
                    cluster_wait()
                push_part(
                    t, part, keys, size, united, united_size, united_high, united_reference, united_sum, united_gate,
                    gate, barred, high, reference, d)
                cluster_barrier()
                if part == 0:
                    unite_parts(
                        t, keys, size, count, united, united_size, united_high, united_reference, united_sum,
                        united_gate, gate, barred, pivot, high, reference, d)
            # Enough survivors, and a sum that is finite?
            settled[0] = 1
            if (size[0] < k and gate[0] > lowest) or too_large(d[0]):
                settled[0] = attempt
            if split > 1:
                # Whether all parts have to be read again is what the first block knows, and tells only if so.
                if part == 0 and settled[0] == 0:
                    if t < split:
                        T.evaluate(put_int(verdict.ptr_to([0]), t, 0))
                    cluster_arrive()
                else:
                    cluster_arrive_silent()
                if part != 0 or settled[0] == 0:
                    cluster_wait()
                    settled[0] = verdict[0]
            if settled[0] != 0:
                break
            T.cuda.cta_sync()
            reference[0] = high[0] * factor[0]

        if split > 1 and part != 0:
            T.thread_return()

        inverse[0] = T.float32(1) / d[0]
        logarithm[0] = T.log(d[0])
        if taken[0] == 0:
            # Fewer than k above minus infinity: the first ones at minus infinity complete them.
            if size[0] < k:
                T.cuda.cta_sync()
                if t < 32:
                    fill_up(X, B, row, t, keys, size, slot)
                T.cuda.cta_sync()
                size[0] = k
            if counted and size[0] <= fits:
                rank_by_counting(
                    t, keys, size, need, pivot, slot, place_in_output,
                    (V, Z, row, factor, reference, inverse, logarithm, log))
            else:
                if counted:
                    clear_bins(t, counts, heads, flag)
                if gate[0] == lowest:
                    T.cuda.cta_sync()
                    least_value(t, keys, size, group_bits, bits, gate)
                # Equals of the threshold are in the columns up to its own.
                finer[0] = T.float32(bins) / T.Cast("float32", T.max(T.min(barred[0], vocab - 1) + 1, 1))
                rank_in_bins(
                    t, keys, size[0], counts, heads, nexts, totals, flag, gate, high, finer,
                    place_in_buffer if staged else place_in_output,
                    kept if staged else (V, Z, row, factor, reference, inverse, logarithm, log), slot)
                if staged or slot[0] != 0:
                    T.cuda.cta_sync()
                    if slot[0] != 0:
                        if size[0] <= crowd:
                            rank_by_counting(t, keys, size, need, pivot, slot, place_in_buffer, kept)
                        else:
                            if size[0] > k:
                                keep_best(t, keys, kept, size, count, histogram, found, pivot, mask, need)
                            for i in T.serial((layout.rounded - k - t + (threads - 1)) // threads):
                                keys[k + i * threads + t] = T.uint64(0)
                            sort_descending(t, keys)
                            for i in T.serial((k - 1 - t + threads) // threads):
                                kept[i * threads + t] = keys[i * threads + t]
                        T.cuda.cta_sync()
                    for i in T.serial((k - 1 - t + threads) // threads):
                        place_in_output(
                            (V, Z, row, factor, reference, inverse, logarithm, log), i * threads + t,
                            kept[i * threads + t])
        if n > 0:
            for i in T.serial((n - t + (threads - 1)) // threads):
                T.ptx.ld.global_.s64(wanted[0], ids.ptr_to([row, i * threads + t]))
                column: T.int32 = T.Cast("int32", T.max(T.min(wanted[0], T.int64(vocab - 1)), T.int64(0)))
                write_given(
                    G, row, i * threads + t, wanted[0], vocab,
                    (element(X, B, row, column) * factor[0] - reference[0]) * T.float32(LN_2),
                    inverse[0], logarithm[0], log)
        if split > 1:
            cluster_wait()
    # fmt: on
    main = problem.trimmed(main).with_attr("global_symbol", "main")
    return Program(tvm.IRModule({"main": overlapping(main) if early else main}), pipeline="tirx")


threshold_gate = Template(
    name="threshold_gate",
    version=7,
    operator="softmax_topk",
    kind="cuda",
    summary="a block or a warp a row, one read, survivors of a sampled threshold ranked in bins",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)

cluster_gate = Template(
    name="cluster_gate",
    version=7,
    operator="softmax_topk",
    kind="cuda",
    summary="a cluster of blocks a row, joined over distributed shared memory",
    space=cluster_space,
    default=cluster_default,
    program=build,
    allowed=cluster_allowed,
    explicit_threads=True,
)
