"""The keys of what reaches a block's bound, and what is done where these are more than there is room for."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.loops import rolled
from ...device.selection import PLUS_INFINITY, bits_value, join_key, order, order_bits, radix_selection, take_places
from ...device.words import load_element, load_words, value_in
from .row import load_vector
from .space import Layout
from .state import column_of
from .words import HALF, either, largest, picked, reach, twice

# The largest number of vectors of a thread for which one is selected from registers. With more, it is read again, from
# the L1 cache, if it can be.
PICKED = 4


def peak_of(layout: Layout, s: Any, u: Any) -> Any:
    """A word that has the largest element of the thread's vector number u."""
    if layout.staged or layout.late:
        return s.peaks[u]
    return largest(layout.dtype, [s.raw[u * 4 + w] for w in range(4)])


def marked_column(layout: Layout, s: Any, place: Any) -> Any:
    """The column of the element of vector number `spot` that has the mark at a place (`words.reach`)."""
    return column_of(layout, s, s.spot[0] * layout.width + place % HALF * layout.per_word + place // HALF)


# fmt: off
@phase
def put_key(layout, /, s):
    """Append `key` to the block's.

    Reads: `key`, `counter`. Writes: `count`, `slot`, and `found_keys` if there is room. Barriers: none.
    """
    s.slot[0] = take_places(s.counter[0], T.int32(1))
    if s.slot[0] < layout.room:
        s.found_keys[s.slot[0]] = s.key[0]


@T.inline
def set_threshold(layout, s):
    """The bound as a value, and as a word whose elements both have that value. A NaN becomes plus infinity: no
    NaN is below that.

    Reads: `bound`. Writes: `threshold`, `pair`.
    """
    s.threshold[0] = bits_value(T.min(s.bound[0], T.uint32(PLUS_INFINITY)))
    s.pair[0] = twice(layout.dtype, s.threshold[0])


@T.inline
def lowest_mark(marks, place):
    """Set `place` to the position of the lowest bit of `marks`."""
    place[0] = 31 - T.clz(T.reinterpret("int32", marks[0] & (T.uint32(0) - marks[0])))


@T.inline
def take_mark(marks, place):
    """Set `place` to the position of the highest bit of `marks`, and clear that bit."""
    place[0] = 31 - T.clz(T.reinterpret("int32", marks[0]))
    marks[0] = marks[0] ^ (T.uint32(1) << T.Cast("uint32", place[0]))


@T.inline
def mark_vectors(layout, s, limited=False):
    """Mark, in `marks`, those of the thread's vectors that have elements which reach the bound.

    `limited`: beyond the last column in which equals of the bound are wanted, only vectors that exceed it.

    Reads: `raw` or `peaks`; `pair`; if `limited`, `until`.
    """
    s.marks[0] = T.uint32(0)
    for u in T.unroll(layout.vectors):
        if limited:
            s.marks[0] = s.marks[0] | T.Select(
                column_of(layout, s, u * layout.width) <= s.until[0],
                reach(layout.dtype, peak_of(layout, s, u), s.pair[0], u),
                reach(layout.dtype, peak_of(layout, s, u), s.pair[0], u, beyond=True))
        else:
            s.marks[0] = s.marks[0] | reach(layout.dtype, peak_of(layout, s, u), s.pair[0], u)
    s.marks[0] = either(s.marks[0])


@T.inline
def pick_vector(layout, s):
    """Set `vector` to vector number `spot`, from registers."""
    for w in T.unroll(4):
        s.vector[w] = picked(s.raw, s.spot[0], layout.vectors, 4, w)


@T.inline
def mark_elements(layout, s, elements):
    """Mark, in `elements`, the elements of `vector` that reach the bound, word by word (`words.reach`).

    Reads: `vector`, `pair`.
    """
    elements[0] = T.uint32(0)
    for w in T.unroll(4):
        elements[0] = elements[0] | reach(layout.dtype, s.vector[w], s.pair[0], w)


@phase
def take_vector(layout, /, s):
    """Load vector number `spot`."""
    if layout.staged:
        load_vector(layout)(s, s.spot[0])
    elif layout.vectors <= PICKED or layout.late:
        pick_vector(layout, s)
    elif layout.aligned:
        load_words(
            16, s.vector, 0, None, s.io.logits.ptr_to([s.row[0], column_of(layout, s, s.spot[0] * layout.width)]))
    else:
        # The ends of this vector may lie beyond the array.
        for u in T.unroll(layout.vectors):
            if s.spot[0] == u:
                for w in T.unroll(4):
                    s.vector[w] = s.raw[u * 4 + w]


@phase
def put_reached(layout, limited, /, s):
    """Append the keys of elements that exceed the bound, or equal it in a column up to `until`.

    Reads: `raw`, or `staged` and `peaks`; `top`, `bound`, `until`. Writes: as `put_key`; scratch is `threshold`,
    `pair`, `pivot`, `marks`, `spot`, `vector`, `column`, `key`. Barriers: none. After: if there is no room for all,
    `count` exceeds the room, and the buffer has an arbitrary part of the keys.
    """
    place = T.alloc_local([1], "int32")
    elements = T.alloc_local([1], "uint32")
    set_threshold(layout, s)
    s.pivot[0] = join_key(s.bound[0], s.until[0])
    # Written so that TVM's simplifier does not make "no less" of "not below": a NaN is not below, but not "no
    # less".
    if T.Select(s.top[0] < s.threshold[0], 0, 1) != 0:
        mark_vectors(layout, s, limited and layout.late)
        while s.marks[0] != T.uint32(0):
            take_mark(s.marks, s.spot)
            take_vector(layout)(s)
            mark_elements(layout, s, elements)
            while elements[0] != T.uint32(0):
                take_mark(elements, place)
                s.column[0] = marked_column(layout, s, place[0])
                order(value_in(layout.dtype, picked(s.vector, place[0] % HALF, 4), place[0] // HALF), s.plain, s.bits)
                s.key[0] = join_key(s.bits[0], s.column[0])
                if s.key[0] >= s.pivot[0]:
                    put_key(layout)(s)
                    # If there is no room for a key, the thread need not look any further.
                    if s.slot[0] >= layout.room:
                        s.marks[0] = T.uint32(0)
                        elements[0] = T.uint32(0)


@phase
def put_single(layout, /, s):
    """As `put_reached`, without a column for the bound, where few threads have elements that reach it, and most of them
    one: for one there is neither a loop nor a branch.

    Reads, writes, barriers: as `put_reached`, of a share in registers.
    """
    place = T.alloc_local([1], "int32")
    elements = T.alloc_local([1], "uint32")
    found = T.alloc_local([1], "int32")
    set_threshold(layout, s)
    # Written so that TVM's simplifier does not make "no less" of "not below": a NaN is not below, but not "no
    # less".
    if T.Select(s.top[0] < s.threshold[0], 0, 1) != 0:
        mark_vectors(layout, s)
        found[0] = T.Cast("int32", T.popcount(s.marks[0]))
        take_mark(s.marks, s.spot)
        pick_vector(layout, s)
        mark_elements(layout, s, elements)
        found[0] = found[0] + T.Cast("int32", T.popcount(elements[0]))
        if found[0] == 2:
            take_mark(elements, place)
            s.column[0] = marked_column(layout, s, place[0])
            # The single element is the thread's largest one.
            order(s.top[0], s.plain, s.bits)
            s.key[0] = join_key(s.bits[0], s.column[0])
            put_key(layout)(s)
        else:
            put_reached(layout, False)(s)


def select_keys(layout: Layout) -> Phase:
    """The k best of the block's share, whatever they are; if it has fewer elements, all of them. The phase is (s).

    Reads: the logits.
    Writes: `found_keys`, `count`; scratch as `radix_selection`, and `need`, `size`, `column`, `key`.
    Barriers: several; ends with one.
    """
    threads, width, vocab = layout.block_threads, layout.width, layout.vocab
    put = put_key(layout)

    def key_at(s: Any, i: Any) -> Any:
        column = T.max(s.start[0], 0) + i
        return join_key(order_bits(load_element(layout.dtype, s.io.logits.ptr_to([s.row[0], column]))), column)

    select = radix_selection(threads, layout.k, key_at, rolled)

    @T.inline
    def phase(s):
        s.size[0] = T.min(s.start[0] + s.mine[0] * width, vocab) - T.max(s.start[0], 0)
        s.pivot[0] = T.uint64(0)
        if s.size[0] > layout.k:
            select(s, s.t, s, s.size[0])
        T.cuda.cta_sync()
        if s.t == 0:
            s.count[0] = 0
        T.cuda.cta_sync()
        for i in rolled((s.size[0] - s.t + (threads - 1)) // threads):
            s.key[0] = key_at(s, i * threads + s.t)
            if s.key[0] >= s.pivot[0]:
                put(s)
        T.cuda.cta_sync()

    return phase


@T.inline
def clear_behind(layout, s):
    """Write zeros after the row's keys, as far as they are ranked at once.

    Reads: `size`. Writes: `keys`. Barriers: one, at the end.
    """
    if s.t >= s.size[0] and s.t < layout.at_once:
        s.keys[s.t] = T.uint64(0)
    T.cuda.cta_sync()
# fmt: on
