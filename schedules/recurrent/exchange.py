"""How hidden states come from the thread blocks that compute them to all others, through global memory.

A *slot* of the exchange has the states before one step, by pack (samples side by side), column and sample of the pack.
There is a slot for each step, none of which is written twice. Every word of a slot is a mark until its state is there.
No state looks like the mark: it is a NaN, and NaNs are written as another one. Whoever has read all of a slot's words
as something else has the states; no flag is needed, and no order among the writes. Where thread blocks meet at a
barrier of the grid after each step (not `polled`), two slots in turn suffice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ..device.selection import FULL_WARP
from .sizes import WIDEST

MARK = 0xFFFFFFFF
HALF_MARK = 0xFFFF
# The NaN that every NaN is written as, so that no state equals the mark.
NAN, HALF_NAN = 0x7FFFFFFF, 0x7FFF
INFINITY = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}
# Loads that bypass the L1 cache, which would go on returning the mark.
load_vector = T.ptx.ld.relaxed.gpu.global_.v4.u32
store_vector = T.ptx.st.relaxed.gpu.global_.v4.u32
store_word = T.ptx.st.relaxed.gpu.global_.u32
store_half = T.ptx.st.relaxed.gpu.global_.u16
STORE_EXCHANGED = {16: store_vector, 8: T.ptx.st.relaxed.gpu.global_.v2.u32, 4: store_word, 2: store_half}
store_shared = T.ptx.st.shared.v4.u32


class Exchanged(Protocol):
    """What the extents of a kernel say of its exchange."""

    @property
    def dtype(self) -> str:
        """The dtype of states."""

    @property
    def itemsize(self) -> int:
        """Bytes of a state."""

    @property
    def pack(self) -> int:
        """Samples of a pack."""

    @property
    def packs(self) -> int:
        """Packs of a batch."""

    @property
    def column_bytes(self) -> int:
        """Bytes of the states of a column in a pack."""

    @property
    def threads(self) -> int:
        """Threads of a block."""

    @property
    def loads(self) -> int:
        """Vectors that a thread has in flight while it copies."""

    @property
    def columns(self) -> int:
        """Columns: the values of a sample that are exchanged in a step."""

    @property
    def sent_bytes(self) -> int:
        """Bytes of one store into the exchange: the states of neighbouring lanes."""

    @property
    def pitch(self) -> int:
        """16-byte vectors from one pack to the next."""

    @property
    def blocks(self) -> int:
        """Thread blocks."""

    @property
    def exchanges(self) -> int:
        """Slots of a step."""


def missing(e: Exchanged, words: tirx.Buffer, at: Any) -> tirx.PrimExpr:
    """Whether one of the four words of a vector still has a mark; where halves are sent, whether one half of a word
    has.
    """
    found = None
    for i in range(4):
        word = words[at + i]
        if e.sent_bytes > 2:
            this = word == T.uint32(MARK)
        else:  # a half of all ones is a mark: the usual test for a zero half, of the complement
            this = ((~word - T.uint32(0x00010001)) & word & T.uint32(0x80008000)) != T.uint32(0)
        found = this if found is None else tirx.any(found, this)
    return found


def state_bits(e: Exchanged, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """A float32 in the problem's dtype, as bits in a word."""
    return element_bits(e.dtype, T.Cast(e.dtype, value))


def element_bits(dtype: str, value: tirx.PrimExpr) -> tirx.PrimExpr:
    """The bits, in a word, of a value of the dtype."""
    if dtype == "float32":
        return T.reinterpret("uint32", value)
    return T.Cast("uint32", T.reinterpret("uint16", value))


def element_of(dtype: str, bits: tirx.PrimExpr) -> tirx.PrimExpr:
    """The value whose bits `element_bits` gave."""
    if dtype == "float32":
        return T.reinterpret("float32", bits)
    return T.reinterpret(dtype, T.Cast("uint16", bits))


def sent_words(e: Exchanged) -> int:
    """Words of one store into the exchange; a half counts as one."""
    return ceildiv(e.sent_bytes, 4)


# fmt: off
@phase
def collect(e, /, s):
    """Bring together the states that are sent at once, those of neighbouring lanes.

    Reads: `bits`. Writes: `sent`; it is right in the first lane of those whose states are sent together. Barriers:
    none, but all lanes of a warp take part.
    """
    # 16 bits: the first exchange makes words, each further one doubles their number.
    nan = T.meta_var(NAN if e.itemsize == 4 else HALF_NAN)
    halves = T.meta_var(e.itemsize == 2 and e.sent_bytes > 2)
    s.sent[0] = T.Select((s.bits[0] & T.uint32(nan)) > T.uint32(INFINITY[e.dtype]), T.uint32(nan), s.bits[0])
    if halves:
        s.sent[0] = s.sent[0] | (T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.sent[0], 1, 32, 32) << T.uint32(16))
    for d in T.unroll(sent_words(e).bit_length() - 1):
        for i in T.unroll(sent_words(e)):
            if i < (1 << d):
                s.sent[(1 << d) + i] = T.tvm_warp_shuffle_xor(
                    T.uint32(FULL_WARP), s.sent[i], (2 if halves else 1) << d, 32, 32)


@phase
def put(e, /, s, slot, pack, column, mine):
    """Store the collected states in the exchange.

    `column`: of the first state. `mine`: whether the lane stores.

    Reads: `sent`. Writes: the exchange, by a store that goes to the L2 cache at once. Barriers: none.
    """
    store = T.meta_var(STORE_EXCHANGED[e.sent_bytes])
    if mine:
        at = T.meta_var(
            s.base[0] + T.Cast("uint64", slot * e.packs + pack) * T.uint64(e.pitch * WIDEST)
            + T.Cast("uint64", column) * T.uint64(e.column_bytes))
        if e.sent_bytes == 2:
            store(at, T.Cast("uint16", s.sent[0]))
        else:
            store(at, *[s.sent[i] for i in range(sent_words(e))])


def mark(e: Exchanged, polled: bool = True, begun: bool = True, gap: tuple[int, int] = (0, 0)) -> Phase:
    """Make the exchange ready; the phase is (s, io, block).

    `begun`: whether states are being written to the first slot meanwhile. `gap`: the first of the columns that nobody
    sends, at a whole word, and how many they are, whole words too; only if nothing has `begun`.

    Writes: the mark from the second slot on (or from the first), and zeros after the last column of each pack and in
    the gap. Barriers: none; one of the grid has to follow.
    """
    zeros, zeros_end = (column * e.column_bytes // 4 for column in (gap[0], sum(gap)))
    # Words that are sent, and bytes of states in the word after them. A store of whole words has zeros for columns
    # beyond the last one.
    words, rest = divmod(e.columns * e.column_bytes, 4)
    if rest and e.sent_bytes > 2:
        words, rest = words + 1, 0

    @T.inline
    def phase(s, io, block):
        slots = T.meta_var(io.steps * e.exchanges if polled else 2)
        for i in T.serial((slots * (e.packs * e.pitch) - (block * e.threads + s.t) + (e.blocks * e.threads - 1))
                          // (e.blocks * e.threads)):
            number: T.int32 = i * (e.blocks * e.threads) + block * e.threads + s.t
            for v in T.unroll(4):
                word = T.meta_var(number % e.pitch * 4 + v)
                s.copied[v] = T.Select(word < words, T.uint32(MARK), T.uint32(0))
                if rest > 0:
                    s.copied[v] = T.Select(word == words, T.uint32(HALF_MARK), s.copied[v])
                if zeros_end > zeros:
                    s.copied[v] = T.Select(
                        tirx.all(word >= zeros, word < zeros_end), T.uint32(0), s.copied[v])
            # Meanwhile the states before the first step are being written to the first slot.
            if number >= (e.packs * e.pitch if begun else 0):
                store_vector(s.base[0] + T.Cast("uint64", number) * T.uint64(WIDEST),
                             s.copied[0], s.copied[1], s.copied[2], s.copied[3])
            else:
                for v in T.unroll(4):
                    word = T.meta_var(number % e.pitch * 4 + v)
                    if word > words or (rest == 0 and word == words):
                        store_word(s.base[0] + T.Cast("uint64", number * WIDEST + v * 4), T.uint32(0))
                    if rest > 0:
                        if word == words:
                            store_half(s.base[0] + T.Cast("uint64", number * WIDEST + v * 4 + 2), T.uint16(0))

    return phase


@phase
def find_source(e, /, s, io, slot, pack):
    """The address of the states of a pack before a step.

    Writes: `source`. Barriers: none.
    """
    s.source[0] = s.base[0] + T.Cast("uint64", slot * e.packs + pack) * T.uint64(e.pitch * WIDEST)


@T.inline
def load_copied(s, number, i):  # type: ignore[no-untyped-def]
    """Load a vector of the exchange, counted from `source`, as the i-th of `copied`."""
    load_vector(
        s.copied[i * 4], s.copied[i * 4 + 1], s.copied[i * 4 + 2], s.copied[i * 4 + 3],
        s.source[0] + T.Cast("uint64", number * WIDEST))


@phase
def fetch(e, vectors, /, s, base):
    """Issue the loads of a round of `stage`.

    `base`: the first vector of the thread in the round, counted from `source`; in the first round that is `s.t`.

    Reads: the exchange, from the address `source` on. Writes: `copied`. Barriers: none.
    """
    for i in T.unroll(e.loads):
        if base + i * e.threads < vectors:
            load_copied(s, base + i * e.threads, i)
        else:
            for v in T.unroll(4):
                s.copied[i * 4 + v] = T.uint32(0)


def stage(
    e: Exchanged, vectors: int, place: Callable[[Any], Any], guarded: bool, polled: bool = True,
    prefetched: bool = False,
) -> Phase:
    """Copy vectors of the exchange to shared memory; the phase is (s).

    All loads of a round are issued before the first result is used. Loads that brought a mark are issued again, all of
    them before any result is used: waiting for one vector after another takes the latency of the L2 cache for each.

    `place`: of a vector's number, counted from `source`, the vector in shared memory. `guarded`: other threads may
    still read what was copied there before. `prefetched`: the loads of the first round were issued before.

    Reads: the exchange, from the address `source` on.
    Writes: shared memory, from the address `front` on.
    Barriers: of the thread block, at the end; with `guarded` one more, before it writes.
    """
    rounds, begin = ceildiv(vectors, e.threads * e.loads), fetch(e, vectors)

    @T.inline
    def wait(s, base):
        s.waiting[0] = 1
        while s.waiting[0] != 0:
            s.waiting[0] = 0
            for i in T.unroll(e.loads):
                if missing(e, s.copied, i * 4):
                    load_copied(s, base + i * e.threads, i)
                    s.waiting[0] = 1

    @T.inline
    def phase(s):
        for r in T.unroll(rounds):
            base = T.meta_var(r * (e.threads * e.loads) + s.t)
            if not prefetched or r > 0:
                begin(s, base)
            if polled:
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
