"""A token of what top-p and min-p leave of a row without a top-k, by thread blocks that do not wait for each other.

Where top-p counts, the kernel of `tickets` also counts each thread block's words by probability, in bins of 1/32 octave
(`count_slice`): as its maximum is not known before, relative to the largest word of the thread block's first tile. The
thread block with a row's last ticket joins these counts (`bracket`). A word's mass follows from its bin to within half
a bin, so that the mass below each bin is known to about one percent of itself, and two bounds between which that of
top-p surely lies.

A second kernel, `draw_left`, adds up the words of each slice above the bracket that min-p leaves, and lists the words
within. The thread block with the row's last ticket finds the word in the list at which top-p's share is reached, adds
what is left of the list to the slices, and draws as in `tickets`.

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
from ..device.selection import RADIX_BINS, RADIX_BITS, bits_value, lanes_max, lanes_min, order_bits, scan_lanes
from ..rows import hold
from ..rows import sum as sums
from ..rows.state import RowState, Views
from ..softmax_topk.ending import own_on_gpu
from .blocks import LISTED, OCTAVES, OF_OCTAVE, Blocks
from .search.blocks import bound_least, choose_slice, crew_of, search_state, take_word
from .search.bracket import raise_to_power
from .search.crew import leave_all, mass_share, pass_over_row
from .space import RESIDENT_TICKETS
from .words import Drawing, read_filters, read_uniform

# A row's stage: it is done, or needs sums of what is left next, or a search.
DONE, SUM, SEARCH = range(3)
# What `stages` holds of each row, as 32-bit words: its stage, maximum and sum of exponentials, and the bracket: words
# from LOWER to UPPER are listed.
STAGE, TOP, TOTAL, LOWER, UPPER = range(5)
FIELDS = 8
# Fields in shared memory of a search in a list: a bin, how many words it has, the mass before it and its own; the mass
# above the list, and that which is to be reached.
BIN, COUNT, BEFORE, MASS, ABOVE, NEED = range(6)
# Bins of a thread block.
BINS = OF_OCTAVE * OCTAVES
# Bins above the largest word of a thread block's first tile. Words above the first bin count as of it.
HEADROOM = 6 * OF_OCTAVE
# A float32 whose unit in the last place is 1: added to a smaller number it leaves that, rounded, in the lowest bits.
MAGIC, MAGIC_BITS = 1.5 * 2**23, 0x4B400000
# Bins are counted from this far from 0 at most.
FARTHEST = 2.0**21
# How wrong sums of float32 may be, relative to themselves and to the row's, and the place of a word, per bin that it or
# the row's maximum is away from 0.
SUM_SLACK, MASS_SLACK, PLACE_SLACK = 2.0**-16, 2.0**-18, 2.0**-20
# Exponentials below 2^LEAST_POWER are 0.
LEAST_POWER = -126.0
# Counts that a thread loads at once.
LOADED = 32
# The row's mass as a power of two: sums of rounded masses stay below 2^32.
MASS_BITS = 31


def workspaces(tickets: int) -> tuple[Workspace, ...]:
    """What `tickets` thread blocks of each row leave for others; `counted` is 0 between calls."""
    return (
        Workspace("stages", ("batch", FIELDS), "uint32", None),
        Workspace("counts", ("batch", tickets * BINS), "uint32", None),
        Workspace("references", ("batch", tickets), "int32", None),
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


@T.inline
def show_bracket(io, row, t, s):
    """Leave for later kernels between which logits top-p's bound lies. Reads: `reached`."""
    if t == 0:
        io.stages[row, LOWER] = T.reinterpret("uint32", s.reached[0])
        io.stages[row, UPPER] = T.reinterpret("uint32", s.reached[1])


def finer(s: Any) -> Any:
    """What logits are multiplied by to be in bins."""
    return s.factor[0] * T.float32(OF_OCTAVE)


@phase
def refer(blocks, /, t, s):
    """The bin from which the thread block counts: HEADROOM above its largest word so far.

    Reads: `r.m`. Writes: `lane`: its number, from 0 on; as before if there is no word; `sums` is scratch.
    Barriers: two.
    """
    s.power[0] = T.cuda.warp_max(s.r.m)
    T.cuda.cta_sync()
    if t % 32 == 0:
        s.sums[t // 32] = s.power[0]
    T.cuda.cta_sync()
    for w in T.unroll(blocks.ext.slices):
        s.power[0] = T.max(s.power[0], s.sums[w])
    if s.power[0] > sums.LOWEST:
        s.lane[0] = T.round(
            T.min(T.max(s.power[0] * finer(s), T.float32(-FARTHEST)), T.float32(FARTHEST))) + T.float32(HEADROOM)


@phase
def count_slice(blocks, crew, absorb, /, io, row, t, s):
    """The pair (m, d) of a lane's elements, and how many elements of the thread block are in each bin.

    `absorb`: the phase that adds adjusted elements to the pair.

    Reads: the row. Writes: `r.m`, `r.d`, where the slice lies (`hold.locate`); the row's counts and reference; scratch.
    Barriers: three, and two more for each first tile without a word.
    """
    threads, ext = T.meta_var(blocks.threads), T.meta_var(blocks.ext)
    x = T.alloc_local([crew.elements], "float32")
    hold.locate(ext)(s.r, io.logits)
    for i in T.serial(BINS // threads):
        s.lows[i * threads + t] = T.uint32(0)
    s.r.m = sums.LOWEST
    s.r.d = T.float32(0)
    s.r.tile = 0
    s.lane[0] = sums.LOWEST
    for i in T.serial(crew.steps, unroll=False):
        crew.load(io, row, t, s, i)
        if blocks.adjusted:
            absorb(io, s, x)
        else:
            sums.absorb(ext)(s.r, 0)
        if s.lane[0] == sums.LOWEST:
            refer(blocks)(t, s)
        if ext.dtype != "float32":
            # Converted again: there are no registers for all elements.
            for w in T.unroll(ext.vectors * 4):
                s.r.raw[w] = hold.fenced(s.r.raw[w])
        for e in T.unroll(crew.elements):
            if blocks.adjusted:
                s.x[0] = x[e]
            else:
                crew.take(io, s, e)
            s.goal[0] = T.min(T.max(
                T.float32(MAGIC) + s.lane[0] - s.x[0] * finer(s), T.float32(MAGIC)), T.float32(MAGIC + BINS - 1))
            T.evaluate(T.cuda.atomic_add(
                s.lows.ptr_to([T.reinterpret("int32", s.goal[0]) - MAGIC_BITS]), T.uint32(1)))
    T.cuda.cta_sync()
    for i in T.serial(BINS // threads):
        io.counts[row, s.r.part // ext.slices * BINS + i * threads + t] = s.lows[i * threads + t]
    if t == 0:
        io.references[row, s.r.part // ext.slices] = T.Cast("int32", T.max(s.lane[0], T.float32(-FARTHEST)))
    T.cuda.thread_fence()


@phase
def join_counts(blocks, /, io, row, t, s):
    """Add up the counts of a row's thread blocks.

    Reads: the row's counts and references.
    Writes: `lows`: how many words each bin has, from the highest reference on; `number`: that;
        `scanned[BIN]`: the bin after the last that is the first of a thread block, if it has words.
    Barriers: two.
    """
    threads, tickets = T.meta_var(blocks.threads), T.meta_var(blocks.cluster)
    each = T.meta_var(BINS // threads)
    together = T.meta_var(min(tickets, max(1, LOADED // each)))
    counts = T.alloc_local([together * each], "uint32")
    references = T.alloc_local([tickets], "int32")
    for b in T.unroll(tickets):
        T.ptx.ld.relaxed.gpu.global_.s32(references[b], io.references.ptr_to([row, b]))
    s.number[0] = references[0]
    for b in T.unroll(tickets - 1):
        s.number[0] = T.max(s.number[0], references[1 + b])
    for i in T.unroll(each):
        s.lows[i * threads + t] = T.uint32(0)
    if t == 0:
        s.scanned[BIN] = T.uint32(0)
    T.cuda.cta_sync()
    for part in T.unroll(tickets // together):
        for b in T.unroll(together):
            for i in T.unroll(each):
                T.ptx.ld.relaxed.gpu.global_.u32(
                    counts[b * each + i], io.counts.ptr_to([row, (part * together + b) * BINS + i * threads + t]))
        for b in T.unroll(together):
            for i in T.unroll(each):
                if counts[b * each + i] > T.uint32(0):
                    s.scratch[0] = T.min(s.number[0] - references[part * together + b], BINS - 1)
                    if i * threads + t == 0:
                        T.evaluate(T.call_extern(
                            "uint32", "atomicMax", s.scanned.ptr_to([BIN]), T.Cast("uint32", s.scratch[0] + 1)))
                    T.evaluate(T.cuda.atomic_add(
                        s.lows.ptr_to([T.min(s.scratch[0] + i * threads + t, BINS - 1)]), counts[b * each + i]))
    T.cuda.cta_sync()


@phase
def bracket(blocks, /, io, row, t, s, top_p):
    """Logits between which top-p's bound lies.

    A word is left if the mass of it and all smaller ones exceeds a share of 1 - top_p. With B(j) the mass of bins from
    j on, which counts tell to within half a bin, words of a bin j are out if B(j) is surely less than that, and words
    above a bin j are left if B(j) is surely more.

    Reads: the row's counts and references; `r.top`, `r.d`, `factor`.
    Writes: `reached`: the bounds, minus and plus infinity where there is none; scratch.
    Barriers: five.
    """
    threads = T.meta_var(blocks.threads)
    each = T.meta_var(BINS // threads)
    below = T.alloc_local([1], "float32")
    share = T.alloc_local([1], "float32")
    slack = T.alloc_local([1], "float32")
    out = T.alloc_local([1], "int32")
    left = T.alloc_local([1], "int32")
    join_counts(blocks)(io, row, t, s)
    # In units of the mass of a word of the first bin.
    s.goal[0] = s.r.top * finer(s)
    slack[0] = T.float32(0.5) + T.float32(PLACE_SLACK) * (T.abs(s.goal[0]) + T.float32(2 * BINS))
    s.total[0] = s.r.d * T.exp2(T.min(
        (s.goal[0] - T.Cast("float32", s.number[0])) * T.float32(1 / OF_OCTAVE), T.float32(100)))
    share[0] = s.total[0] * (T.float32(1) - T.max(top_p, T.float32(0)))
    s.power[0] = T.exp2(slack[0] * T.float32(1 / OF_OCTAVE)) * T.float32(1 + SUM_SLACK)
    # A thread has some of the bins, the last one first.
    below[0] = T.float32(0)
    for i in T.unroll(each):
        below[0] = below[0] + mass_of_bin(s, BINS - 1 - (t * each + i))
    s.sum[0] = below[0]
    scan_lanes(t, below, s.tie)
    T.cuda.cta_sync()
    if t % 32 == 31:
        s.sums[t // 32] = below[0]
    if t == 0:
        s.ties[0] = BINS
        s.ties[1] = 0
    T.cuda.cta_sync()
    below[0] = below[0] - s.sum[0]
    for w in T.unroll(blocks.ext.slices):
        if w < t // 32:
            below[0] = below[0] + s.sums[w]
    out[0] = BINS
    left[0] = 0
    for i in T.unroll(each):
        s.scratch[0] = BINS - 1 - (t * each + i)
        below[0] = below[0] + mass_of_bin(s, s.scratch[0])
        # The words of a thread block's first bin may be larger.
        if s.scratch[0] >= T.Cast("int32", s.scanned[BIN]):
            if below[0] * s.power[0] <= share[0] - s.total[0] * T.float32(MASS_SLACK):
                out[0] = s.scratch[0]
            # And those of the last bin smaller.
            if below[0] - mass_of_bin(s, BINS - 1) >= (share[0] + s.total[0] * T.float32(MASS_SLACK)) * s.power[0]:
                left[0] = T.max(left[0], s.scratch[0])
    out[0] = lanes_min(out[0])
    left[0] = lanes_max(left[0])
    if t % 32 == 0:
        T.evaluate(T.call_extern("int32", "atomicMin", s.ties.ptr_to([0]), out[0]))
        T.evaluate(T.call_extern("int32", "atomicMax", s.ties.ptr_to([1]), left[0]))
    T.cuda.cta_sync()
    # Words without mass are never left, nor masked ones.
    s.reached[0] = T.float32(LEAST_POWER * OF_OCTAVE)
    if s.ties[0] < BINS:
        s.reached[0] = T.max(
            s.reached[0], T.Cast("float32", s.number[0] - s.ties[0]) - s.goal[0] + T.float32(1) - slack[0])
    s.reached[0] = T.max(s.r.top + s.reached[0] / finer(s), sums.LOWEST)
    s.reached[1] = T.infinity("float32")
    if s.ties[1] > 0:
        s.reached[1] = s.r.top + (
            T.Cast("float32", s.number[0] - s.ties[1]) - s.goal[0] + slack[0]) / finer(s)


def mass_of_bin(s: Any, i: Any) -> Any:
    """That of its words if each is in the middle of it, in units of that of a word of the first bin."""
    return T.Cast("float32", s.lows[i]) * T.exp2(T.Cast("float32", i) * T.float32(-1 / OF_OCTAVE))


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
    hold.locate(blocks.ext)(r, io.logits)
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
    # The last rows first, which the kernel before has read last: the L2 cache still has them.
    row = T.meta_var(T.Cast("int64", io.batch - 1 - block // tickets))
    load_stage(io, row, found)
    if found[0] == T.uint32(stage):
        begin(blocks, of_row)(io, row, block % tickets, t)


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


def room(blocks: Blocks) -> int:
    """How many elements a thread may have listed before a step."""
    return blocks.entries // blocks.threads - blocks.ext.vectors * blocks.ext.width


@T.inline
def make_room(blocks, t, s):
    """Before each step: elements for which there is no room are forgotten. Writes: `listed`; `scratch`: the most."""
    s.scratch[0] = T.max(s.scratch[0], s.listed[0])
    s.listed[0] = T.min(s.listed[0], room(blocks) * blocks.threads + t)


@phase
def share_list(blocks, /, io, row, t, s):
    """Append the threads' lists to the row's.

    Reads: `list`, in which a thread's elements are `threads` apart; `listed`: where its next one would be; `scratch`.
    Writes: the row's list, and `counted`: more than LISTED if one is too long; `ties` is scratch.
    Barriers: two.
    """
    threads, slices = T.meta_var(blocks.threads), T.meta_var(blocks.ext.slices)
    before = T.alloc_local([1], "int32")
    s.scratch[0] = T.max(s.scratch[0], s.listed[0])
    s.listed[0] = T.Select(
        s.scratch[0] > room(blocks) * threads + t, LISTED + 1, T.truncdiv(s.listed[0] - t, threads))
    before[0] = s.listed[0]
    scan_lanes(t, before, s.scratch)
    if t % 32 == 31:
        s.ties[t // 32] = before[0]
    T.cuda.cta_sync()
    if t == 0:
        s.number[0] = 0
        for w in T.unroll(slices):
            s.scratch[0] = s.ties[w]
            s.ties[w] = s.number[0]
            s.number[0] = s.number[0] + s.scratch[0]
        s.scratch[0] = T.cuda.atomic_add(io.counted.ptr_to([row]), T.min(s.number[0], LISTED + 1))
        for w in T.unroll(slices):
            s.ties[w] = s.ties[w] + s.scratch[0]
    T.cuda.cta_sync()
    before[0] = before[0] - s.listed[0] + s.ties[t // 32]
    if before[0] + s.listed[0] <= LISTED:
        for i in T.serial(s.listed[0]):
            io.listed[row, before[0] + i] = s.list[i * threads + t]
            io.listed[row, LISTED + before[0] + i] = T.Cast("uint32", s.r.part)


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
            s.scanned[BEFORE] = reached[0]
            s.scanned[MASS] = own[0]
            s.scanned[COUNT] = s.lows[RADIX_BINS + RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
        reached[0] = reached[0] + own[0]


@phase
def narrow_list(blocks, /, io, row, t, s, top_p):
    """The group of equal words in the row's list within which top-p's share is reached.

    Reads: `list`, `listed`; the mass above the list in each slice.
    Writes: `lowest`, `highest`, `rank`, `tie`; `guessed`: 0 if the share is not reached within the list; scratch.
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
        s.scanned[COUNT] = T.uint32(0)
        s.scanned[NEED] = T.Cast("uint32", mass_share(top_p, T.uint64(2**MASS_BITS)))
    if t < 32:
        s.mass[0] = T.uint64(0)
        for i in T.serial((blocks.ext.parts - t + 31) // 32):
            T.ptx.ld.relaxed.gpu.global_.f32(s.power[0], io.pairs.ptr_to([row, i * 32 + t]))
            # Whole numbers, whose sums are the same in any order.
            s.mass[0] = s.mass[0] + T.Cast("uint64", mass_of(s))
        scan_lanes(t, s.mass, s.other)
        if t == 31:
            s.scanned[ABOVE] = T.Cast("uint32", s.mass[0])
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
            s.guessed[0] = T.Cast("int32", s.scanned[COUNT])
            if s.guessed[0] == 0:
                s.unknown[0] = 0
            if t == 0:
                s.scanned[ABOVE] = s.scanned[BEFORE]
            s.low[0] = s.low[0] + (s.scanned[BIN] << T.Cast("uint32", s.unknown[0]))
            s.high[0] = s.low[0] + T.min(
                s.high[0] - s.low[0], (T.uint32(1) << T.Cast("uint32", s.unknown[0])) - T.uint32(1))
            # Equal words have equal masses: one is as good as any.
            if s.guessed[0] == 1:
                s.unknown[0] = 0
    s.lowest[0] = bits_value(s.low[0])
    s.highest[0] = bits_value(s.high[0])
    s.added[0] = T.max(T.truncdiv(s.scanned[MASS], T.max(s.scanned[COUNT], T.uint32(1))), T.uint32(1))
    s.rank[0] = T.Cast("uint64", T.truncdiv(
        s.scanned[NEED] - s.scanned[BEFORE] + s.added[0] - T.uint32(1), s.added[0]))
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
    share, narrow, add = share_list(blocks), narrow_list(blocks), add_listed(blocks)
    choose, take = choose_slice(blocks), take_word(blocks, crew)

    @T.inline
    def see(io, row, t, s, j, e):
        if e == 0:
            make_room(blocks, t, s)
        raise_to_power(s)
        if s.x[0] > s.reached[1]:
            s.sum[0] = s.sum[0] + s.power[0]
        # Stored in any case, and overwritten by the next if it is not one: conditional stores take longer.
        s.list[s.listed[0]] = T.reinterpret("uint32", s.x[0])
        if not s.x[0] > s.reached[1] and s.x[0] >= s.reached[0]:
            s.listed[0] = s.listed[0] + threads

    pass_over = pass_over_row(crew, see)

    @T.inline
    def finish(io, row, t, s, d):
        T.cuda.thread_fence()
        T.ptx.ld.relaxed.gpu.global_.s32(s.listed[0], io.counted.ptr_to([row]))
        s.guessed[0] = T.Select(s.listed[0] <= LISTED, 1, 0)
        T.cuda.cta_sync()
        if t == 0:
            io.counted[row] = 0
            io.taken[row] = 0
        if s.guessed[0] != 0:
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
            if s.reached[0] <= s.reached[1]:
                narrow(io, row, t, s, d.top_p[0])
        if s.guessed[0] != 0:
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
        s.reached[0] = T.reinterpret("float32", io.stages[row, LOWER])
        s.reached[1] = T.reinterpret("float32", io.stages[row, UPPER])
        # What min-p leaves may be above the bracket, where top-p leaves all words; then min-p alone counts.
        leave_all(s)
        bound_least(s)
        if s.highest[0] >= s.reached[1]:
            s.reached[0] = T.infinity("float32")
            s.reached[1] = s.highest[0]
        s.listed[0] = t
        s.scratch[0] = t
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
