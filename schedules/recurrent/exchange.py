"""How hidden states come from the thread blocks that compute them to all others, through global memory.

A *slot* of the exchange has the states before one step, by pack (samples side by side), column and sample of the pack.
With polling there is a slot for each step, none of which is written twice. Every word of a slot is a mark until its
state is there. No state looks like the mark: it is a NaN, and NaNs are written as another one. Whoever has read all of
a slot's words as something else has the states; no flag is needed, and no order among the writes. At a grid barrier two
slots in turn suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

Phase = Callable[..., Any]
WIDEST = 16  # bytes of the widest load that a thread can issue
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


class Exchanged(Protocol):
    """What the extents of a kernel say of its exchange."""

    @property
    def dtype(self) -> str:
        """Of states."""

    @property
    def itemsize(self) -> int:
        """Bytes of a state."""

    @property
    def pack(self) -> int:
        """Samples side by side."""

    @property
    def packs(self) -> int:
        """Such packs of a batch."""

    @property
    def column_bytes(self) -> int:
        """Of the states of a column in a pack."""

    @property
    def elements(self) -> int:
        """Of a pack, those included that fill its last vector of 16 bytes."""

    @property
    def polled(self) -> bool:
        """Whether thread blocks wait for the data themselves; else at a grid barrier."""

    @property
    def threads(self) -> int:
        """Of a thread block."""

    @property
    def loads(self) -> int:
        """Vectors that a thread has in flight while it copies."""


def missing(e: Exchanged, words: tirx.Buffer, at: Any, count: int) -> tirx.PrimExpr:
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


def slot_elements(e: Exchanged) -> int:
    """Elements of a slot."""
    return e.packs * e.elements


def state_bits(e: Exchanged, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """A float32 in the problem's dtype, as bits in a word."""
    if e.itemsize == 4:
        return T.reinterpret("uint32", value)
    return T.Cast("uint32", T.reinterpret("uint16", T.Cast(e.dtype, value)))


def exchanged(e: Exchanged, io: Any) -> tirx.Buffer:
    """The exchange as a list of elements' bits."""
    slots, kind = T.Cast("int64", io.steps if e.polled else 2), "uint32" if e.itemsize == 4 else "uint16"
    return T.decl_buffer((slots * slot_elements(e),), kind, data=io.exchange.data)


# fmt: off
def put(e: Exchanged) -> Phase:
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


def stage(e: Exchanged, vectors: int, place: Callable[[Any], Any], guarded: bool) -> Phase:
    """Copy vectors of the exchange to shared memory; the phase is (s).

    All loads of a round are under way before the first is looked at. Those that bring a mark are repeated, all of them
    before any is looked at again.

    `place`: of a vector's number, counted from `source`, the vector in shared memory. `guarded`: others may still read
    there what was copied before.

    Reads: the exchange, from the address `source` on.
    Writes: shared memory, from the address `front` on.
    Barriers: of the thread block, at the end; with `guarded` one more, before it writes.
    """
    rounds = ceildiv(vectors, e.threads * e.loads)

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
                if base + i * e.threads < vectors:
                    load(s, base + i * e.threads, i)
                else:
                    for v in T.unroll(4):
                        s.copied[i * 4 + v] = T.uint32(0)
            if e.polled:
                wait(s, base)
            if guarded:
                if r == 0:
                    T.cuda.cta_sync()
            for i in T.unroll(e.loads):
                if base + i * e.threads < vectors:
                    store_shared(
                        s.front[0] + T.Cast("uint32", place(base + i * e.threads) * WIDEST),
                        s.copied[i * 4], s.copied[i * 4 + 1], s.copied[i * 4 + 2], s.copied[i * 4 + 3])
        T.cuda.cta_sync()

    return phase
# fmt: on
