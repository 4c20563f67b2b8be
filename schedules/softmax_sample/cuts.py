"""A token of what top-p and min-p leave of a row without a top-k, by thread blocks that do not wait for each other.

Two kernels after that of `tickets`, which leaves a row's maximum, its sum of exponentials, and its stage. As there, the
thread block with a row's last ticket finishes a kernel's work on it.

1. `find_bin`, for top-p alone: the masses of all words, whole numbers, are added to bins of the logarithmic scale of
   probability. The last thread block finds the bin in which top-p's share is reached.
2. `draw_left`: sums of slices are taken again, of words above that bin that min-p leaves, and the words of the bin are
   listed. The last thread block finds the word in the list at which the share is reached, adds what is left of the list
   to the slices, and draws as in `tickets`.

A list that is too long is not searched: the row's stage is `SEARCH` then, for another kernel.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Workspace, ceildiv
from tvm_sparse.operators.softmax_sample.definition import clamped

from ..device.arithmetic import LOG2_E
from ..device.overlap import wait_then_start_consumer
from ..device.selection import FULL_WARP, RADIX_BINS, RADIX_BITS, bits_value, order_bits, scan_lanes
from ..rows.hold import locate
from ..rows.state import RowState, Views
from ..softmax_topk.ending import own_on_gpu
from .blocks import Blocks
from .search.blocks import bound_least, choose_slice, crew_of, search_state, take_word
from .search.bracket import raise_to_power
from .search.crew import leave_all, mass_share, pass_over_row
from .space import RESIDENT_TICKETS
from .words import Drawing, read_filters, read_uniform

# A row's stage: it is done, or needs the bin of top-p's share next, or sums of what is left, or a search.
DONE, FIND, SUM, SEARCH = range(4)
# What `stages` holds of each row, as 32-bit words.
STAGE, TOP, TOTAL, BIN, ABOVE, NEED = range(6)
FIELDS = 8
# Bins of an octave of probability, and of a row: words of the last octave have no mass.
OF_OCTAVE, OCTAVES = 32, 32
BINS = OF_OCTAVE * OCTAVES
# A bin below all words.
NOWHERE = 2 * BINS
# Copies of each bin in a thread block, so that lanes seldom meet in one.
COPIES = 2
# Most words of the bin in which the share is reached, in a thread block and in a row.
LISTED = 4096
# The row's mass as a power of two: sums of rounded masses stay below 2^32.
MASS_BITS = 31


def workspaces() -> tuple[Workspace, ...]:
    """What kernels leave of each row for the next ones; bins and `counted` are 0 between calls."""
    return (
        Workspace("stages", ("batch", FIELDS), "uint32", None),
        Workspace("bins", ("batch", BINS), "uint32"),
        Workspace("counted", ("batch",), "int32"),
        Workspace("listed", ("batch", 2 * LISTED), "uint32", None),
    )


# fmt: off
@T.inline
def show_row(io, row, t, stage, top, total):
    """Leave for later kernels what is to be done of the row, its maximum, and its sum of exponentials."""
    if t == 0:
        io.stages[row, STAGE] = T.Cast("uint32", stage)
        io.stages[row, TOP] = T.reinterpret("uint32", top)
        io.stages[row, TOTAL] = T.reinterpret("uint32", total)
        io.stages[row, BIN] = T.uint32(NOWHERE)


@T.inline
def load_stage(io, row, stage):
    """The row's stage, by a load that sees what a producer kernel has written."""
    T.ptx.ld.global_.u32(stage[0], io.stages.ptr_to([row, STAGE]))


def state_of(blocks: Blocks, io: Any, r: Any) -> Any:
    """The state of a search of the row `r`, with the thread block's dynamic shared memory."""
    pool = T.alloc_buffer([blocks.bytes // 8], "uint64", scope="shared.dyn")
    return search_state(blocks, pool.data, r=r, words=Views(blocks.ext, io).words)


@phase
def begin(blocks, of_row, /, given, row, part, t):
    """The states of a row and of its search: factor, maximum and total, and where its elements lie."""
    io = T.meta_var(own_on_gpu(given, row))
    r = RowState(blocks.ext, row, part * blocks.ext.slices + t // 32, t % 32)
    s = T.meta_var(state_of(blocks, io, r))
    s.factor[0] = io.scale * T.float32(LOG2_E)
    r.factor = s.factor[0]
    s.top[0] = T.reinterpret("float32", io.stages[row, TOP])
    s.total[0] = T.reinterpret("float32", io.stages[row, TOTAL])
    locate(blocks.ext)(r, io.logits)
    of_row(io, row, t, s)


@phase
def of_rows(blocks, stage, of_row, /, io):
    """The body of a kernel for rows in a stage: of_row(io, row, t, s) in each thread block.

    Before: the warp's slice is known, and `top`, `factor`, `total` are.
    """
    tickets = T.meta_var(blocks.cluster)
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": RESIDENT_TICKETS // blocks.threads})
    block = T.cta_id([io.batch * tickets])
    t = T.thread_id([blocks.threads])
    found = T.alloc_local([1], "uint32")
    if blocks.overlap:
        wait_then_start_consumer()
    load_stage(io, T.Cast("int64", block // tickets), found)
    if found[0] == T.uint32(stage):
        begin(blocks, of_row)(io, T.Cast("int64", block // tickets), block % tickets, t)


def octaves_below(s: Any) -> Any:
    """How far below the row's maximum the element in hand is, in bins."""
    return (s.top[0] - s.x[0]) * s.factor[0] * T.float32(OF_OCTAVE)


def mass_of(s: Any) -> Any:
    """The mass of the element whose exponential is in hand; the row's is about 2^MASS_BITS."""
    return T.Cast("uint32", s.power[0] * (T.float32(2.0 ** MASS_BITS) / s.total[0]) + T.float32(0.5))


@T.inline
def take_ticket(io, row, t, s):
    """Take a ticket of the row, after all that this thread block has written. Writes: `ties[0]`. Barriers: two."""
    T.cuda.thread_fence()
    T.cuda.cta_sync()
    if t == 0:
        s.ties[0] = T.cuda.atomic_add(io.taken.ptr_to([row]), T.int32(1))
    T.cuda.cta_sync()


def find_bin(blocks: Blocks) -> Phase:
    """The body of the kernel that finds in which bin top-p's share of the row's mass is reached."""
    threads, tickets, crew = blocks.threads, blocks.cluster, crew_of(blocks)

    @T.inline
    def see(io, row, t, s, j, e):
        raise_to_power(s)
        s.added[0] = mass_of(s)
        if s.added[0] > T.uint32(0):
            s.number[0] = T.Cast("int32", T.min(octaves_below(s), T.float32(BINS - 1)))
            T.evaluate(T.cuda.atomic_add(s.lows.ptr_to([s.number[0] * COPIES + t % COPIES]), s.added[0]))

    pass_over = pass_over_row(crew, see)

    @T.inline
    def find(io, row, t, s):
        d = T.meta_var(Drawing.alloc(1))
        read_filters(io, row, d)
        T.cuda.thread_fence()
        for i in T.serial(BINS // threads):
            T.ptx.ld.relaxed.gpu.global_.u32(s.lows[i * threads + t], io.bins.ptr_to([row, i * threads + t]))
            io.bins[row, i * threads + t] = T.uint32(0)
        if t == 0:
            io.taken[row] = 0
        T.cuda.cta_sync()
        if t < 32:
            own = T.alloc_local([1], "uint32")
            reached = T.alloc_local([1], "uint32")
            other = T.alloc_local([1], "uint32")
            need = T.alloc_local([1], "uint32")
            own[0] = T.uint32(0)
            # Lanes begin at different bins, which are in different banks.
            for i in T.serial(BINS // 32):
                own[0] = own[0] + s.lows[t * (BINS // 32) + (i + t) % (BINS // 32)]
            reached[0] = own[0]
            scan_lanes(t, reached, other)
            other[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), reached[0], 31, 32, 32)
            need[0] = T.Cast("uint32", mass_share(d.top_p[0], T.Cast("uint64", other[0])))
            reached[0] = reached[0] - own[0]
            if reached[0] < need[0] and need[0] <= reached[0] + own[0]:
                for i in T.serial(BINS // 32, unroll=False):
                    own[0] = s.lows[t * (BINS // 32) + i]
                    if reached[0] < need[0] and need[0] <= reached[0] + own[0]:
                        io.stages[row, STAGE] = T.uint32(SUM)
                        io.stages[row, BIN] = T.Cast("uint32", t * (BINS // 32) + i)
                        io.stages[row, ABOVE] = reached[0]
                        io.stages[row, NEED] = need[0]
                    reached[0] = reached[0] + own[0]

    @T.inline
    def of_row(io, row, t, s):
        for i in T.serial(BINS * COPIES // threads):
            s.lows[i * threads + t] = T.uint32(0)
        T.cuda.cta_sync()
        pass_over(io, row, t, s)
        T.cuda.cta_sync()
        for i in T.serial(BINS // threads):
            s.added[0] = T.uint32(0)
            for c in T.unroll(COPIES):
                s.added[0] = s.added[0] + s.lows[(i * threads + t) * COPIES + c]
            if s.added[0] > T.uint32(0):
                T.evaluate(T.cuda.atomic_add(io.bins.ptr_to([row, i * threads + t]), s.added[0]))
        take_ticket(io, row, t, s)
        if s.ties[0] == tickets - 1:
            find(io, row, t, s)

    return of_rows(blocks, FIND, of_row)


@phase
def list_entry(blocks, /, s):
    """Put the element in hand on the thread block's list. Reads: `x`, `r.part`. Writes: `number`."""
    s.number[0] = T.cuda.atomic_add(s.ties.ptr_to([0]), T.int32(1))
    if s.number[0] < LISTED:
        s.list[s.number[0]] = T.reinterpret("uint32", s.x[0])
        s.list[LISTED + s.number[0]] = T.Cast("uint32", s.r.part)


@phase
def share_list(blocks, /, io, row, t, s):
    """Append the thread block's list to the row's.

    Reads: `list`; `ties[0]`: how many there are.
    Writes: the row's list, and `counted`: more than LISTED if one is too long.
    Barriers: two.
    """
    threads = T.meta_var(blocks.threads)
    T.cuda.cta_sync()
    s.listed[0] = s.ties[0]
    if t == 0:
        s.ties[1] = T.cuda.atomic_add(
            io.counted.ptr_to([row]), T.Select(s.listed[0] > LISTED, LISTED + 1, s.listed[0]))
    T.cuda.cta_sync()
    if s.listed[0] + s.ties[1] <= LISTED:
        for i in T.serial((s.listed[0] - t + threads - 1) // threads):
            io.listed[row, s.ties[1] + i * threads + t] = s.list[i * threads + t]
            io.listed[row, LISTED + s.ties[1] + i * threads + t] = s.list[LISTED + i * threads + t]


@T.inline
def take(s, i):
    """The i-th listed element and its power."""
    s.x[0] = T.reinterpret("float32", s.list[i])
    raise_to_power(s)


@T.inline
def find(s, t):
    """The bin, by a warp; the last bins have the largest words."""
    own = T.alloc_local([1], "uint32")
    reached = T.alloc_local([1], "uint32")
    other = T.alloc_local([1], "uint32")
    own[0] = T.uint32(0)
    for b in T.unroll(RADIX_BINS // 32):
        own[0] = own[0] + s.lows[RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
    reached[0] = own[0]
    scan_lanes(t, reached, other)
    reached[0] = reached[0] - own[0] + s.scanned[ABOVE]
    for b in T.unroll(RADIX_BINS // 32):
        own[0] = s.lows[RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
        if reached[0] < s.scanned[NEED] and s.scanned[NEED] <= reached[0] + own[0]:
            s.scanned[BIN] = T.Cast("uint32", RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b))
            s.scanned[TOP] = reached[0]
            s.scanned[TOTAL] = own[0]
            s.scanned[STAGE] = s.lows[RADIX_BINS + RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
        reached[0] = reached[0] + own[0]


@phase
def narrow_list(blocks, /, io, row, t, s):
    """The group of equal words in the row's list within which top-p's share is reached.

    Reads: `list`, `listed`; what `find_bin` has left of the row.
    Writes: `lowest`, `highest`, `rank`, `tie`; scratch.
    Barriers: several.
    """
    threads = T.meta_var(blocks.threads)
    # Bounds of the list, as order bits.
    s.low[0] = T.uint32(0xFFFFFFFF)
    s.high[0] = T.uint32(0)
    for i in T.serial((s.listed[0] - t + threads - 1) // threads):
        s.added[0] = order_bits(T.reinterpret("float32", s.list[i * threads + t]))
        s.low[0] = T.min(s.low[0], s.added[0])
        s.high[0] = T.max(s.high[0], s.added[0])
    if t == 0:
        s.lows[0] = T.uint32(0xFFFFFFFF)
        s.lows[1] = T.uint32(0)
        for field in T.unroll(FIELDS):
            s.scanned[field] = io.stages[row, field]
    T.cuda.cta_sync()
    T.evaluate(T.call_extern("uint32", "atomicMin", s.lows.ptr_to([0]), s.low[0]))
    T.evaluate(T.call_extern("uint32", "atomicMax", s.lows.ptr_to([1]), s.high[0]))
    T.cuda.cta_sync()
    s.low[0] = s.lows[0]
    s.high[0] = s.lows[1]
    s.unknown[0] = 1
    for _ in T.serial(ceildiv(32, RADIX_BITS) + 1, unroll=False):
        if s.unknown[0] > 0:
            # The number of leading zeros of 0 is undefined.
            s.unknown[0] = T.Select(
                s.high[0] == s.low[0], 0,
                T.max(32 - T.Cast("int32", T.clz(T.reinterpret("int32", s.high[0] - s.low[0]))) - RADIX_BITS, 0))
            T.cuda.cta_sync()
            for i in T.serial((2 * RADIX_BINS - t + threads - 1) // threads):
                s.lows[i * threads + t] = T.uint32(0)
            T.cuda.cta_sync()
            for i in T.serial((s.listed[0] - t + threads - 1) // threads):
                take(s, i * threads + t)
                s.added[0] = order_bits(s.x[0])
                if s.added[0] >= s.low[0] and s.added[0] <= s.high[0]:
                    s.number[0] = T.Cast("int32", (s.added[0] - s.low[0]) >> T.Cast("uint32", s.unknown[0]))
                    s.added[0] = mass_of(s)
                    if s.added[0] > T.uint32(0):
                        T.evaluate(T.cuda.atomic_add(s.lows.ptr_to([s.number[0]]), s.added[0]))
                        T.evaluate(T.cuda.atomic_add(s.lows.ptr_to([RADIX_BINS + s.number[0]]), T.uint32(1)))
            T.cuda.cta_sync()
            if t < 32:
                find(s, t)
            T.cuda.cta_sync()
            if t == 0:
                s.scanned[ABOVE] = s.scanned[TOP]
            s.low[0] = s.low[0] + (s.scanned[BIN] << T.Cast("uint32", s.unknown[0]))
            s.high[0] = s.low[0] + T.min(
                s.high[0] - s.low[0], (T.uint32(1) << T.Cast("uint32", s.unknown[0])) - T.uint32(1))
            # Equal words have equal masses: one is as good as any.
            if s.scanned[STAGE] == T.uint32(1):
                s.unknown[0] = 0
    s.lowest[0] = bits_value(s.low[0])
    s.highest[0] = bits_value(s.high[0])
    s.added[0] = T.truncdiv(s.scanned[TOTAL], s.scanned[STAGE])
    s.rank[0] = T.Cast("uint64", T.truncdiv(
        s.scanned[NEED] - s.scanned[TOP] + s.added[0] - T.uint32(1), s.added[0]))
    s.tie[0] = T.Cast("float32", s.added[0]) * s.total[0] * T.float32(2.0 ** -MASS_BITS)


@phase
def add_listed(blocks, /, t, s):
    """Add what is left of the row's list to the sums of its slices.

    Reads: `list`, `listed`, and the bounds of the group at which the words that are left end.
    Writes: `sums`, `ties`; scratch.
    Barriers: three.
    """
    threads = T.meta_var(blocks.threads)
    T.cuda.cta_sync()
    for i in T.serial((blocks.ext.parts - t + threads - 1) // threads):
        # Whole numbers, whose sums are the same in any order.
        s.lows[i * threads + t] = T.uint32(0)
        s.ties[i * threads + t] = 0
    T.cuda.cta_sync()
    for i in T.serial((s.listed[0] - t + threads - 1) // threads):
        s.x[0] = T.reinterpret("float32", s.list[i * threads + t])
        if s.x[0] > s.highest[0]:
            raise_to_power(s)
            T.evaluate(T.cuda.atomic_add(
                s.lows.ptr_to([T.Cast("int32", s.list[LISTED + i * threads + t])]), mass_of(s)))
        elif s.x[0] >= s.lowest[0]:
            T.evaluate(T.cuda.atomic_add(
                s.ties.ptr_to([T.Cast("int32", s.list[LISTED + i * threads + t])]), T.int32(1)))
    T.cuda.cta_sync()
    for i in T.serial((blocks.ext.parts - t + threads - 1) // threads):
        s.sums[i * threads + t] = s.sums[i * threads + t] + (
            T.Cast("float32", s.lows[i * threads + t]) * (s.total[0] * T.float32(2.0 ** -MASS_BITS)))
    T.cuda.cta_sync()


def draw_left(blocks: Blocks) -> Phase:
    """The body of the kernel that draws a word of what is left."""
    ext, threads, tickets, crew = blocks.ext, blocks.threads, blocks.cluster, crew_of(blocks)
    put, share, narrow, add = list_entry(blocks), share_list(blocks), narrow_list(blocks), add_listed(blocks)
    choose, take = choose_slice(blocks), take_word(blocks, crew)

    @T.inline
    def see(io, row, t, s, j, e):
        raise_to_power(s)
        s.goal[0] = octaves_below(s)
        s.sum[0] = s.sum[0] + T.Select(
            s.goal[0] < s.tie[0] and s.power[0] >= s.least[0], s.power[0], T.float32(0))
        if s.goal[0] >= s.tie[0] and s.goal[0] < s.tie[0] + T.float32(1):
            put(s)

    pass_over = pass_over_row(crew, see)

    @T.inline
    def finish(io, row, t, s, d):
        T.cuda.thread_fence()
        T.ptx.ld.relaxed.gpu.global_.s32(s.listed[0], io.counted.ptr_to([row]))
        T.cuda.cta_sync()
        if t == 0:
            io.counted[row] = 0
            io.taken[row] = 0
        if s.listed[0] <= LISTED:
            for i in T.serial((s.listed[0] - t + threads - 1) // threads):
                T.ptx.ld.relaxed.gpu.global_.u32(s.list[i * threads + t], io.listed.ptr_to([row, i * threads + t]))
                T.ptx.ld.relaxed.gpu.global_.u32(
                    s.list[LISTED + i * threads + t], io.listed.ptr_to([row, LISTED + i * threads + t]))
            for i in T.serial((ext.parts - t + threads - 1) // threads):
                T.ptx.ld.relaxed.gpu.global_.f32(s.sums[i * threads + t], io.pairs.ptr_to([row, i * threads + t]))
            read_uniform(io, row, d)
            T.cuda.cta_sync()
            s.summed[0] = 1
            leave_all(s)
            if io.stages[row, BIN] != T.uint32(NOWHERE):
                narrow(io, row, t, s)
            bound_least(s)
            add(t, s)
            choose(t, s, clamped(d.uniform[0]))
            take(io, row, t, s)
        elif t == 0:
            io.stages[row, STAGE] = T.uint32(SEARCH)

    @T.inline
    def of_row(io, row, t, s):
        d = T.meta_var(Drawing.alloc(1))
        read_filters(io, row, d)
        s.least[0] = d.min_p[0]
        s.best[0] = -T.log(s.total[0])
        s.tie[0] = T.Cast("float32", io.stages[row, BIN])
        if s.tie[0] == T.float32(NOWHERE):
            s.tie[0] = T.infinity("float32")
        if t == 0:
            s.ties[0] = 0
        T.cuda.cta_sync()
        s.sum[0] = T.float32(0)
        pass_over(io, row, t, s)
        s.sum[0] = T.cuda.warp_sum(s.sum[0])
        if t % 32 == 0:
            io.pairs[row, s.r.part] = s.sum[0]
        share(io, row, t, s)
        take_ticket(io, row, t, s)
        if s.ties[0] == tickets - 1:
            finish(io, row, t, s, d)

    return of_rows(blocks, SUM, of_row)
# fmt: on
