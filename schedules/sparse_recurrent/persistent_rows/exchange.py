"""How hidden states come from the thread blocks that compute them to all others, through global memory.

A *slot* of the exchange has the states before one step, by pack, column and sample: what `stage` copies is as it lies.
With polling there is a slot for each step, none of which is written twice. Every word of a slot is a mark until its
state is there. No state looks like the mark: it is a NaN, and NaNs are written as another one. Whoever has read all of
a slot's words as something else has the states; no flag is needed, and no order among the writes. At a grid barrier two
slots in turn suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from .space import WIDEST, Extents

Phase = Callable[..., Any]
MARK = 0xFFFFFFFF
HALF_MARK = 0xFFFF
# What a NaN is written as.
NAN, HALF_NAN = 0x7FFFFFFF, 0x7FFF
INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
# Loads that the L1 cache does not answer: it would go on showing a mark.
load_vector = T.ptx.ld.relaxed.gpu.global_.v4.u32
load_pair = T.ptx.ld.relaxed.gpu.global_.v2.u32
load_word = T.ptx.ld.relaxed.gpu.global_.u32
load_half = T.ptx.ld.relaxed.gpu.global_.u16
store_word = T.ptx.st.relaxed.gpu.global_.u32
store_half = T.ptx.st.relaxed.gpu.global_.u16
store_shared = T.ptx.st.shared.v4.u32


def missing(e: Extents, words: tirx.Buffer, at: Any, count: int) -> tirx.PrimExpr:
    """Whether one of the `count` words from `words[at]` on has a mark, or of 16 bits half a one."""
    if e.column_bytes == 2 and count == 1:
        return words[at] == T.uint32(HALF_MARK)
    found = None
    for i in range(count):
        word = words[at + i]
        if e.itemsize == 4:
            this = word == T.uint32(MARK)
        else:  # a half of all ones: the usual test for a zero half, of the complement
            this = ((~word - T.uint32(0x00010001)) & word & T.uint32(0x80008000)) != T.uint32(0)
        found = this if found is None else tirx.any(found, this)
    return found


def slot_elements(e: Extents) -> int:
    """Elements of a slot."""
    return e.packs * e.elements


def state_bits(e: Extents, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """A float32 in the problem's dtype, as bits in a word."""
    if e.itemsize == 4:
        return T.reinterpret("uint32", value)
    return T.Cast("uint32", T.reinterpret("uint16", T.Cast(e.dtype, value)))


def exchanged(e: Extents, io: Any) -> tirx.Buffer:
    """The exchange as a list of elements' bits."""
    slots, kind = T.Cast("int64", io.steps if e.polled else 2), "uint32" if e.itemsize == 4 else "uint16"
    return T.decl_buffer((slots * slot_elements(e),), kind, data=io.exchange.data)


# fmt: off
def put(e: Extents) -> Phase:
    """Give the others a state; the phase is (s, states, slot, pack, column), `states` being `exchanged`.

    Reads: `bits`. Writes: the exchange, by a store that goes to the L2 cache at once. Barriers: none.
    """
    infinity, nan = INFINITY[e.dtype], NAN if e.itemsize == 4 else HALF_NAN

    @T.inline
    def phase(s, states, slot, pack, column):
        at = T.meta_var(
            T.Cast("int64", slot * e.packs + pack) * e.elements + T.Cast("int64", column * e.pack + s.sample))
        s.sent[0] = T.Select(
            (s.bits[0] & T.uint32(nan)) > T.uint32(infinity), T.uint32(nan), s.bits[0])
        if e.itemsize == 4:
            store_word(states.ptr_to([at]), s.sent[0])
        else:
            store_half(states.ptr_to([at]), T.Cast("uint16", s.sent[0]))

    return phase


def mark(e: Extents) -> Phase:
    """Make the exchange ready; the phase is (s, io, states, block).

    Reads: `first`, `count`, `units`.
    Writes: of the block's own columns, the mark for each sample from the second slot on, if the exchange is polled; and
        zeros for samples that there are not. The first block: zeros in what is behind the last column of each pack.
    Barriers: none; one of the grid has to follow.
    """
    behind = e.elements - e.hidden * e.pack
    kind, marked = ("uint32", MARK) if e.itemsize == 4 else ("uint16", HALF_MARK)

    @T.inline
    def phase(s, io, states, block):
        slots = T.meta_var(io.steps if e.polled else 2)
        if e.polled or e.batch % e.pack > 0:
            for i in T.serial((s.count[0] * e.packs * slots - s.t + (e.threads - 1)) // e.threads):
                item: T.int32 = i * e.threads + s.t
                own: T.int32 = item % (s.count[0] * e.packs)
                slot: T.int32 = item // (s.count[0] * e.packs)
                column: T.int32 = io.units[s.first[0] + own // e.packs]
                for j in T.unroll(e.pack):
                    at = T.meta_var(T.Cast("int64", slot * e.packs + own % e.packs) * e.elements
                                    + T.Cast("int64", column * e.pack + j))
                    if own % e.packs * e.pack + j >= e.batch:
                        states[at] = tirx.const(0, kind)
                    elif e.polled:
                        if slot > 0:
                            states[at] = tirx.const(marked, kind)
        if block == 0:
            for i in T.serial((slots * (e.packs * behind) - s.t + (e.threads - 1)) // e.threads):
                item: T.int32 = i * e.threads + s.t
                states[T.Cast("int64", item // behind) * e.elements + T.Cast("int64", e.hidden * e.pack + item % behind)
                       ] = tirx.const(0, kind)

    return phase


def find_source(e: Extents) -> Phase:
    """Where the states of a pack before a step are; the phase is (s, io, slot, pack).

    Writes: `source`. Barriers: none.
    """

    @T.inline
    def phase(s, io, slot, pack):
        s.source[0] = s.base[0] + T.Cast("uint64", slot * e.packs + pack) * T.uint64(e.vectors * WIDEST)

    return phase


def stage(e: Extents) -> Phase:
    """Copy a pack's states to shared memory; the phase is (s).

    All loads of a round are under way before the first is looked at. Those that bring a mark are repeated, all of them
    before any is looked at again.

    Reads: the exchange, at `source`.
    Writes: `stages`, at `front`. Before that, with one copy, a barrier.
    Barriers: of the thread block, at the end.
    """
    rounds = ceildiv(e.vectors, e.threads * e.loads)

    @T.inline
    def load(s, number, i):
        load_vector(
            s.copied[i * 4], s.copied[i * 4 + 1], s.copied[i * 4 + 2], s.copied[i * 4 + 3],
            s.source[0] + T.Cast("uint64", number * WIDEST))

    @T.inline
    def wait(s, base):
        s.waiting[0] = 1
        while s.waiting[0] != 0:
            s.waiting[0] = 0
            for i in T.unroll(e.loads):
                if missing(e, s.copied, i * 4, 4):
                    load(s, base + i * e.threads, i)
                    s.waiting[0] = 1

    @T.inline
    def phase(s):
        for r in T.unroll(rounds):
            base = T.meta_var(r * (e.threads * e.loads) + s.t)
            for i in T.unroll(e.loads):
                if base + i * e.threads < e.vectors:
                    load(s, base + i * e.threads, i)
                else:
                    for v in T.unroll(4):
                        s.copied[i * 4 + v] = T.uint32(0)
            if e.polled:
                wait(s, base)
            if e.stages == 1:
                if r == 0:
                    T.cuda.cta_sync()
            for i in T.unroll(e.loads):
                if base + i * e.threads < e.vectors:
                    store_shared(
                        s.front[0] + T.Cast("uint32", (base + i * e.threads) * WIDEST),
                        s.copied[i * 4], s.copied[i * 4 + 1], s.copied[i * 4 + 2], s.copied[i * 4 + 3])
        T.cuda.cta_sync()

    return phase
# fmt: on
