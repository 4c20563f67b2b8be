"""Where a block's share of a row lies, how it comes into registers, and a thread's vectors wherever they are."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ...device.arithmetic import LOG2_E
from ...device.selection import counter_address
from ...device.words import load_words
from ..elements import cap_elements
from .state import column_of
from .words import NOTHING

load_shared = T.ptx.ld.shared.v4.u32


# fmt: off
@phase
def locate_row(layout, /, s, block):
    """The columns of this block's share. `block` is the row's number.

    Reads: the arguments, but no logits.
    Writes: `row`, `start`, `mine`, `left`, `factor`, `counter`, `listing`.
    Barriers: none.
    """
    width = T.meta_var(layout.width)
    share = T.meta_var(layout.share)
    s.row[0] = T.Cast("int64", block)
    s.factor[0] = s.io.scale * T.float32(LOG2_E)
    s.start[0] = s.part * share * width
    s.mine[0] = T.max(T.min(layout.row_vectors - s.part * share, share), 0)
    if not layout.aligned:
        lead: T.int32 = T.Cast("int32", (s.row[0] * layout.vocab) % width)
        s.start[0] = s.start[0] - lead
        s.mine[0] = T.max(T.min((layout.vocab + lead + (width - 1)) // width - s.part * share, share), 0)
        s.left[0] = T.Cast("int32", T.min(T.Cast("int64", s.io.batch) - s.row[0], T.int64(width + 1)) * layout.vocab)
    s.counter[0] = counter_address(s.count.ptr_to([0]))
    if layout.early:
        s.listing[0] = counter_address(s.listed.ptr_to([0]))


@phase
def clear_group(layout, /, s, group):
    """Set the tops and firsts of a group to those of no element."""
    s.tops[group] = T.uint32(0)
    s.firsts[group] = layout.vocab
    if layout.cluster > 1:
        s.united_tops[group] = T.uint32(0)
        s.united_firsts[group] = layout.vocab


@phase
def clear(layout, /, s):
    """Set shared memory to how it is before any element was read.

    Writes: `tops`, `firsts`, `united_tops`, `united_firsts`, `last`, `count`, `listed`, `united_count`, the
        front of `keys`.
    Barriers: none.
    """
    threads = T.meta_var(layout.preparers)
    for i in T.unroll(ceildiv(layout.groups, threads)):
        if i * threads + s.t % threads < layout.groups:
            clear_group(layout)(s, i * threads + s.t % threads)
    for i in T.unroll(ceildiv(layout.at_once, threads)):
        if i * threads + s.t % threads < layout.at_once:
            s.keys[i * threads + s.t % threads] = T.uint64(0)
    if s.t % threads == 0:
        s.count[0] = 0
        if layout.early:
            s.listed[0] = 0
        s.last[0] = layout.vocab
        if layout.cluster > 1:
            s.united_count[0] = 0


@phase
def put(layout, /, s, e, value):
    """Set element e to `value`, given as bits in their place in a word."""
    per_word, mask = T.meta_var(layout.per_word), T.meta_var((1 << 8 * layout.itemsize) - 1)
    s.raw[e // per_word] = (
        s.raw[e // per_word] & ~(T.uint32(mask) << T.Cast("uint32", e % per_word * (8 * layout.itemsize)))) | value


@phase
def mend(layout, /, s, u, small):
    """Load those elements of a vector that belong to the row, where the vector lies partly outside of it."""
    width = T.meta_var(layout.width)
    bits = T.meta_var(8 * layout.itemsize)
    if column_of(layout, s, u * width) + width > s.left[0]:
        # Nothing may be read beyond the array's end.
        for e in T.unroll(width):
            if column_of(layout, s, u * width + e) < layout.vocab:
                load_words(
                    layout.itemsize, s.bits, 0, small,
                    s.io.logits.ptr_to([s.row[0], column_of(layout, s, u * width + e)]))
                put(layout)(s, u * width + e, s.bits[0] << T.Cast("uint32", e % layout.per_word * bits))
    if column_of(layout, s, u * width) < 0 or column_of(layout, s, u * width) + width > layout.vocab:
        for e in T.unroll(width):
            if column_of(layout, s, u * width + e) < 0 or column_of(layout, s, u * width + e) >= layout.vocab:
                put(layout)(s, u * width + e, T.uint32(NOTHING[layout.dtype]) & (
                    T.uint32((1 << 8 * layout.itemsize) - 1) << T.Cast("uint32", e % layout.per_word * bits)))


@phase
def cap_row(layout, /, s):
    """The soft cap of the elements in registers."""
    x = T.alloc_local([layout.words], "float32")
    for w in T.unroll(layout.words):
        x[w] = T.reinterpret("float32", s.raw[w])
    cap_elements(layout.words)(s.io, x)
    for w in T.unroll(layout.words):
        s.raw[w] = T.reinterpret("uint32", x[w])


@phase
def load_row(layout, /, s):
    """The thread's vectors.

    Reads: the logits, `row`, `start`, `mine`, `left`.
    Writes: `raw`; scratch is `bits`.
    Barriers: none.
    After: what is not of the row and of this block's share is minus infinity.
    """
    width = T.meta_var(layout.width)
    small = T.alloc_local([1], "uint16")
    for u in T.unroll(layout.vectors):
        if u < layout.inner:
            load_words(
                16, s.raw, u * 4, small, s.io.logits.ptr_to([s.row[0], column_of(layout, s, u * width)]))
        else:
            for w in T.unroll(4):
                s.raw[u * 4 + w] = T.uint32(NOTHING[layout.dtype])
            if u * layout.threads + s.t < s.mine[0] and (
                layout.aligned or column_of(layout, s, u * width) + width <= s.left[0]
            ):
                load_words(
                    16, s.raw, u * 4, small, s.io.logits.ptr_to([s.row[0], column_of(layout, s, u * width)]))
    if not layout.aligned:
        for u in T.unroll(layout.vectors):
            if u * layout.threads + s.t < s.mine[0]:
                mend(layout)(s, u, small)
    if layout.capped:
        cap_row(layout)(s)


@phase
def load_vector(layout, /, s, u):
    """`vector` = the thread's vector number u, in registers a constant. Reads: `raw` or `staged`. Barriers: none."""
    if layout.staged:
        read_staged(layout, s, u, 0)
    else:
        for w in T.unroll(4):
            s.vector[w] = s.raw[u * 4 + w]


@T.inline
def read_staged(layout, s, u, at):
    """Load staged vector number u to `vector`, from word `at` on."""
    load_shared(
        s.vector[at], s.vector[at + 1], s.vector[at + 2], s.vector[at + 3],
        s.staged.ptr_to([(u * layout.threads + s.t) * 4]))


@phase
def load_staged(layout, /, s, i):
    """`vector` = the thread's vectors of step i, staged.

    Reads: `staged`. Barriers: none.
    """
    for v in T.unroll(layout.step):
        read_staged(layout, s, i * layout.step + v, 4 * v)
# fmt: on
