"""Tiles with survivors, searched after the whole row has been read (the decision `deferred`).

Where few elements survive, a thread that searches its tile for them in the midst of the stream holds up its whole warp.
So it only marks the tile: its number goes to a list, and its elements to shared memory as long as there is room. The
marked tiles are searched after the stream: for small k by one warp, which writes the outputs too, or by the whole
block. Tiles that were not copied are read again from global memory.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ...device.arithmetic import tanh_on_gpu
from ...device.selection import FULL_WARP, below, bits_value, join_key, order
from ...device.words import load_element, load_words, value_in
from ..elements import capped, mask_vectors, written_element
from .rank import place_in_output
from .state import WRITTEN, address_of, column_of, folded, not_below
from .survivors import compact, mark_elements, take_mark, unmark_equals
from .tiles import place_tile


# fmt: off
@phase
def mark_tile(layout, /, s, i, attempt):
    """Put the tile in hand on the list if its largest element passes the threshold.

    When a row is read again, a tile of NaN alone passes, too.

    Reads: `x`, `top`, `threshold`, `equals_until`, `at`.
    Writes: `marks`, `marked`, `copied`, `tops`; `largest`.
    Barriers: none.
    """
    if not_below(s.top[0], s.threshold[0], attempt):
        if s.top[0] != s.threshold[0] or s.at[0] <= s.equals_until[0] or attempt != 0:
            s.largest[0] = T.max(s.largest[0], s.top[0])
            s.slot[0] = T.cuda.atomic_add(s.marks.ptr_to([0]), T.int32(1))
            s.marked[s.slot[0]] = T.Cast("uint16", i * layout.tiling.threads + s.t)
            if s.slot[0] < layout.pool.copies:
                if layout.one_warp:
                    order(s.top[0], s.plain, s.ordered)
                    s.tops[s.slot[0]] = s.ordered[0]
                for e in T.unroll(layout.tiling.held // 4):
                    for v in T.vectorized(4):
                        s.copied[s.slot[0] * layout.pool.padded + e * 4 + v] = s.x[e * 4 + v]


@phase
def place_marked(tiling, /, s, number):
    """Where a marked tile lies.

    Reads: `marked`. Writes: `at`, `slot`. Barriers: none.
    """
    s.slot[0] = T.Cast("int32", s.marked[number])
    place_tile(tiling)(s, s.at, s.slot[0] // tiling.threads, s.slot[0] % tiling.threads)


@phase
def load_copied(pool, /, s, number):
    """The elements of a marked tile that was copied.

    Reads: `copied`. Writes: `x`.
    """
    for e in T.unroll(pool.tiling.held // 4):
        for v in T.vectorized(4):
            s.x[e * 4 + v] = s.copied[number * pool.padded + e * 4 + v]


@phase
def load_marked(layout, /, s, column):
    """Load the vector of the row that begins at a column again.

    Reads: the arguments.
    Writes: x[0:width], minus infinity for what is not of this block's share; `raw`.
    Barriers: none.
    """
    tiling = T.meta_var(layout.tiling)
    width = T.meta_var(tiling.width)
    for e in T.unroll(width):
        s.x[e] = -T.infinity("float32")
    if column < s.end[0]:
        if tiling.aligned or (column >= 0 and column + width <= tiling.vocab):
            load_words(16, s.raw, 0, None, address_of(tiling, s.address, column))
            for e in T.unroll(width):
                s.x[e] = value_in(layout.dtype, s.raw[e // tiling.per_word], e % tiling.per_word)
                if layout.capped:
                    s.x[e] = capped(s.io, s.x[e], tanh_on_gpu)
                if layout.bias:
                    s.x[e] = s.x[e] + load_element("float32", s.io.bias.ptr_to([column + e]))
            if layout.masked:
                mask_vectors(tiling.vocab, width, 1, tiling.aligned)(s.io, s.row[0], s.x, lambda e: column + e)
        else:
            for e in T.unroll(width):
                if column + e >= 0 and column + e < tiling.vocab:
                    s.x[e] = written_element(s.io, s.row[0], column + e)


@phase
def search_vectors(layout, /, s, first, last, step):
    """Put what passes the threshold of some vectors of marked tiles into the buffer.

    These are the vectors from `first` up to, but not, `last` of all marked tiles' vectors;
    `step` threads take one after another.

    Reads: `marked`, the arguments, `threshold`, `equals_until`. Writes: `keys`, `count`. Barriers: none. After: if
    `count` is more than the buffer's capacity less a tile, some keys may be missing.
    """
    tiling = T.meta_var(layout.tiling)
    width = T.meta_var(tiling.width)
    for r in T.serial((last - first - s.t + (step - 1)) // step):
        if s.t < step:
            s.spot[0] = first + r * step + s.t
            place_marked(tiling)(s, s.spot[0] // tiling.vectors)
            s.spot[0] = column_of(tiling, s.at, s.spot[0] % tiling.vectors * width)
            load_marked(layout)(s, s.spot[0])
            s.bits[0] = T.uint32(0)
            for e in T.unroll(width):
                if not_below(s.x[e], s.threshold[0]) and (
                    s.x[e] != s.threshold[0] or s.spot[0] + e <= s.equals_until[0]
                ):
                    s.bits[0] = s.bits[0] | (T.uint32(1) << T.Cast("uint32", e))
            if s.bits[0] != T.uint32(0):
                s.slot[0] = T.cuda.atomic_add(s.count.ptr_to([0]), T.Cast("int32", T.popcount(s.bits[0])))
                if s.slot[0] + width <= layout.pool.capacity:
                    for e in T.unroll(width):
                        if (s.bits[0] >> T.Cast("uint32", e)) & T.uint32(1) != T.uint32(0):
                            order(s.x[e], s.plain, s.ordered)
                            s.keys[s.slot[0]] = join_key(s.ordered[0], s.spot[0] + e)
                            s.slot[0] = s.slot[0] + 1


@phase
def search_copied(layout, /, s):
    """Put what passes the threshold of the copied tiles into the buffer; a thread searches a tile.

    Reads: `marks`, `marked`, `copied`, `threshold`, `equals_until`.
    Writes: `keys`, `count`.
    Barriers: none.
    After: as after `search_vectors`.
    """
    tiling, pool = T.meta_var(layout.tiling), T.meta_var(layout.pool)
    threads = T.meta_var(tiling.threads)
    for r in T.serial((T.min(s.marks[0], pool.copies) - s.t + (threads - 1)) // threads):
        load_copied(pool)(s, r * threads + s.t)
        place_marked(tiling)(s, r * threads + s.t)
        s.bits[0] = T.uint32(0)
        mark_elements(s, 0, tiling.held, s.threshold)
        unmark_equals(tiling)(s)
        s.slot[0] = T.cuda.atomic_add(s.count.ptr_to([0]), T.Cast("int32", T.popcount(s.bits[0])))
        if s.slot[0] + tiling.held <= pool.capacity:
            while s.bits[0] != T.uint32(0):
                take_mark(s)
                order(s.copied[(r * threads + s.t) * pool.padded + s.spot[0]], s.plain, s.ordered)
                s.keys[s.slot[0]] = join_key(s.ordered[0], column_of(tiling, s.at, s.spot[0]))
                s.slot[0] = s.slot[0] + 1


@phase
def search_marked(layout, /, s):
    """Put what passes the threshold of all marked tiles into the buffer. After a barrier.

    If there is no room for the survivors of all, the tiles are searched in steps, each with the threshold that the step
    before has raised.

    Reads: `marks`, `marked`, `copied`, the arguments, `threshold`, `equals_until`; `count`, which comes as 0.
    Writes: `keys`, `count`, `threshold`, `equals_until`, and scratch as `compact`.
    Barriers: one, and more in steps.
    After: `count` keys are in the buffer, all that may be among the k best.
    """
    pool = T.meta_var(layout.pool)
    vectors, step = T.meta_var(layout.tiling.vectors), T.meta_var(pool.step)
    searched = T.meta_var(search_vectors(layout))
    search_copied(layout)(s)
    searched(s, pool.copies * vectors, s.marks[0] * vectors, layout.tiling.threads)
    T.cuda.cta_sync()
    if pool.overflows:
        if s.count[0] > pool.capacity - layout.tiling.held:
            T.cuda.cta_sync()
            if s.t == 0:
                s.count[0] = 0
            T.cuda.cta_sync()
            for r in T.serial((s.marks[0] * vectors + (step - 1)) // step):
                searched(s, r * step, T.min((r + 1) * step, s.marks[0] * vectors), step)
                T.cuda.cta_sync()
                s.size[0] = s.count[0]
                T.cuda.cta_sync()
                if s.size[0] > pool.rounded:
                    compact(layout)(s)


@phase
def finish_by_one_warp(layout, /, s):
    """One warp finds the k best in the copied tiles alone and writes them, where that is possible.

    The k-th largest of the tiles' maxima is a threshold that seldom a second element of a tile reaches. If one does, or
    if many elements are equal, the warp leaves the row to the block. It is called only if at least k tiles are marked
    and all of them were copied.

    Reads: `marks`, `marked`, `copied`, `tops`, `threshold`, `equals_until`, `factor`, `reference`, `unit`, `inverse`,
        `logarithm`.
    Writes: the outputs, and then found[WRITTEN] = 1, which otherwise stays as it is; scratch in `keys`. Barriers: none;
    the first warp comes alone.
    """
    each = T.meta_var(ceildiv(layout.pool.copies, 32))
    own = T.alloc_local([each], "uint32")
    lanes = T.alloc_local([1], "uint32")
    least = T.alloc_local([1], "uint32")
    for j in T.unroll(each):
        own[j] = T.uint32(0)
        if j * 32 + s.t < s.marks[0]:
            own[j] = s.tops[j * 32 + s.t]
    # Loops are not unrolled: fetching instructions takes longer than executing them once.
    above: T.int32 = 0
    s.bits[0] = folded(T.max, own, 0, each)
    least[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0])
    while above < layout.k - 1:
        lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), s.bits[0] == least[0])
        s.need[0] = T.Select(T.Cast("int32", T.cuda.ffs_u32(lanes[0])) - 1 == s.t, 1, 0)
        for j in T.unroll(each):
            if s.need[0] != 0 and own[j] == least[0]:
                own[j] = T.uint32(0)
                s.need[0] = 0
        s.bits[0] = folded(T.max, own, 0, each)
        least[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0])
        above = above + 1
    # A lane for each tile whose maximum reaches the threshold.
    s.need[0] = 0
    for j in T.unroll(each):
        s.bits[0] = T.uint32(0)
        if j * 32 + s.t < s.marks[0]:
            s.bits[0] = s.tops[j * 32 + s.t]
        lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), s.bits[0] >= least[0])
        s.slot[0] = s.need[0] + below(s.t, lanes[0])
        if s.bits[0] >= least[0] and s.slot[0] < 32:
            s.keys[s.slot[0]] = T.Cast("uint64", j * 32 + s.t)
        s.need[0] = s.need[0] + T.Cast("int32", T.popcount(lanes[0]))
    T.cuda.warp_sync()
    s.bits[0] = T.uint32(0)
    if s.t < s.need[0]:
        s.slot[0] = T.Cast("int32", s.keys[s.t])
        load_copied(layout.pool)(s, s.slot[0])
        s.plain[0] = bits_value(least[0])
        mark_elements(s, 0, layout.tiling.held, s.plain)
        take_mark(s)
        s.ordered[0] = s.tops[s.slot[0]]
        place_marked(layout.tiling)(s, s.slot[0])
        s.pivot[0] = join_key(s.ordered[0], column_of(layout.tiling, s.at, s.spot[0]))
    T.cuda.warp_sync()
    if s.t < s.need[0]:
        s.keys[s.t] = s.pivot[0]
    T.cuda.warp_sync()
    order(s.threshold[0], s.plain, s.ordered)
    # Elements that equal the first threshold and lie after its column are not marked.
    if s.need[0] <= 32 and (least[0] > s.ordered[0] or s.equals_until[0] >= layout.vocab) and T.cuda.any_sync(
        T.uint32(FULL_WARP), s.bits[0] != T.uint32(0)
    ) == 0:
        s.slot[0] = 0
        for j in T.serial(s.need[0]):
            if s.keys[j] > s.pivot[0]:
                s.slot[0] = s.slot[0] + 1
        if s.t < s.need[0] and s.slot[0] < layout.k:
            place_in_output(s, s.slot[0], s.pivot[0])
        if s.t == 0:
            s.found[WRITTEN] = 1
# fmt: on
