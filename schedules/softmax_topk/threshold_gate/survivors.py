"""Survivors of the threshold: which elements of a tile they are, the buffer that they go into, and its compaction.

A compaction cuts the buffer to the k best by radix selection, and makes the k-th of these the threshold.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.arithmetic import is_nan, tanh_on_gpu
from ...device.loops import loop_of
from ...device.selection import join_key, keep_selected, key_index, key_value, order, radix_selection
from ...device.words import load_element, value_in
from ..elements import capped
from .state import column_of, not_below


def key_in_buffer(keys: Any, i: Any) -> Any:
    """The i-th key of a buffer."""
    return keys[i]


# fmt: off
@T.inline
def mark_elements(s, first, extent, threshold):
    """Set the bits of those of x[first:first + extent] that reach a threshold, as every NaN does.

    Reads: `x`. Writes: `bits`. Barriers: none.
    """
    for e in T.unroll(extent):
        if not_below(s.x[first + e], threshold[0]):
            s.bits[0] = s.bits[0] | (T.uint32(1) << T.Cast("uint32", first + e))


@phase
def unmark_equals(tiling, /, s):
    """Clear the bits of elements that equal the threshold and lie after its column.

    Reads: `x`, `threshold`, `equals_until`, `at`. Writes: `bits`. Barriers: none.
    """
    if s.equals_until[0] < tiling.vocab:
        for e in T.unroll(tiling.held):
            if s.x[e] == s.threshold[0] and column_of(tiling, s.at, e) > s.equals_until[0]:
                s.bits[0] = s.bits[0] & ~(T.uint32(1) << T.Cast("uint32", e))


@T.inline
def take_mark(s):
    """Clear one bit of `bits`; `spot` becomes its number."""
    s.spot[0] = 31 - T.clz(T.reinterpret("int32", s.bits[0]))
    s.bits[0] = s.bits[0] ^ (T.uint32(1) << T.Cast("uint32", s.spot[0]))


@phase
def mark_survivors(layout, /, s, attempt):
    """One bit for each element of the tile that passes the threshold and is not in the buffer yet.

    When a row is read again, tiles of NaN alone are looked at, too.

    Reads: `x`, `top`, `threshold`, `equals_until`, `at`, `pending`. Writes: `bits`. Barriers: none.
    """
    unmark = T.meta_var(unmark_equals(layout.tiling))
    s.bits[0] = T.uint32(0)
    if layout.dense:
        mark_elements(s, 0, layout.tiling.held, s.threshold)
        unmark(s)
        if layout.compacts:
            if s.pending[0] == 0:
                s.bits[0] = T.uint32(0)
    # Equals of the threshold pass only up to its own column, and all of this tile may lie after it.
    elif s.pending[0] != 0 and (s.top[0] != s.threshold[0] or s.at[0] <= s.equals_until[0] or attempt != 0):
        mark_elements(s, 0, layout.tiling.held, s.threshold)
        unmark(s)


@phase
def push_survivors(layout, /, s, i):
    """Put the elements of the thread's tile that have their bit into the buffer; if it is full, call for a compaction.

    `i` is the tile's number.

    Reads: `bits`, `ring`, the bias, `at`.
    Writes: `keys`, `count`, `full`; `largest`, if no tile's is known (`Layout.dense`); `pending` becomes 0, unless
        there was no room. `bits` are overwritten if there was room.
    Barriers: none.
    """
    tiling = T.meta_var(layout.tiling)
    s.slot[0] = T.cuda.atomic_add(s.count.ptr_to([0]), T.Cast("int32", T.popcount(s.bits[0])))
    if layout.compacts and s.slot[0] + T.Cast("int32", T.popcount(s.bits[0])) > layout.pool.capacity:
        # Fill what is left of the room with void keys.
        while s.slot[0] < layout.pool.capacity:
            s.keys[s.slot[0]] = T.uint64(0)
            s.slot[0] = s.slot[0] + 1
        T.evaluate(T.call_extern("uint32", "atomicExch", s.full.ptr_to([0]), T.uint32(1)))
    else:
        s.pending[0] = 0
        # Registers cannot be indexed: the elements are read again, from the ring.
        while s.bits[0] != T.uint32(0):
            take_mark(s)
            s.power[0] = value_in(
                layout.dtype,
                s.ring[(((i % tiling.stages) * tiling.vectors + s.spot[0] // tiling.width) * tiling.threads + s.t) * 4
                       + s.spot[0] % tiling.width // tiling.per_word],
                s.spot[0] % tiling.per_word)
            if layout.capped:
                s.power[0] = capped(s.io, s.power[0], tanh_on_gpu)
            if layout.bias:
                s.power[0] = s.power[0] + load_element(
                    "float32", s.io.bias.ptr_to([column_of(tiling, s.at, s.spot[0])]))
            if layout.dense:
                s.largest[0] = T.max(s.largest[0], s.power[0])
            order(s.power[0], s.plain, s.ordered)
            s.keys[s.slot[0]] = join_key(s.ordered[0], column_of(tiling, s.at, s.spot[0]))
            s.slot[0] = s.slot[0] + 1


@phase
def keep_best(layout, /, s):
    """Cut the buffer's keys to the best k, in its front.

    Reads: `keys`, `size`, which is more than k.
    Writes: `keys`, `pivot`, a lower bound that only these reach; scratch is `kept`, `count`, `histogram`, `found`,
        `mask`, `need`.
    Barriers: several; begins and ends with one.
    """
    loop = T.meta_var(loop_of(layout.unroll))
    radix_selection(layout.tiling.threads, layout.k, key_in_buffer, loop)(s, s.t, s.keys, s.size[0])
    keep_selected(layout.tiling.threads, layout.k, loop)(s, s.t, s.size[0])


@phase
def compact(layout, /, s):
    """Cut the buffer to the best k and raise the threshold to the k-th. All threads come, after a barrier.

    Reads: `keys`, `count`.
    Writes: `keys`, `size`, `threshold`, `equals_until`, and scratch as `keep_best`; `full` becomes 0.
    Barriers: several; ends with one.
    After: `count` is k.
    """
    s.size[0] = T.min(s.count[0], layout.pool.capacity)
    keep_best(layout)(s)
    take_pivot(s, layout.vocab)
    if is_nan(s.threshold[0]):
        # Already k NaN: no number has a chance any more, and only plus infinity still passes as a candidate.
        s.threshold[0] = T.infinity("float32")
    if s.t == 0:
        s.full[0] = T.uint32(0)
    T.cuda.cta_sync()


@T.inline
def take_pivot(s, vocab):
    """Make the k-th key the threshold. Its last digits are 0 where equal elements did not have to be distinguished.

    Reads: `pivot`. Writes: `threshold`, `equals_until`. Barriers: none.
    """
    s.threshold[0] = key_value(s.pivot[0])
    s.equals_until[0] = T.Cast("int32", T.min(key_index(s.pivot[0]), T.uint32(vocab)))
# fmt: on
