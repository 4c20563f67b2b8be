"""The end of a row that thread blocks have: elements at minus infinity where others are too few, and given columns."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ..device.selection import FULL_WARP, MINUS_INFINITY, below, join_key
from .elements import write_given, written_element


# fmt: off
@phase
def fill_up(vocab, k, /, s):
    """Append the row's first elements at minus infinity until there are k keys.

    Reads: the arguments, `size`. Writes: `keys`, `size`. Barriers: none; the first warp comes alone.
    """
    lanes = T.alloc_local([1], "uint32")
    has = T.alloc_local([1], "int32")
    i: T.int32 = 0
    while i * 32 < vocab and s.size[0] < k:
        has[0] = 0
        if i * 32 + s.t < vocab:
            if written_element(s.io, s.row[0], i * 32 + s.t) == -T.infinity("float32"):
                has[0] = 1
        lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), has[0] != 0)
        s.slot[0] = s.size[0] + below(s.t, lanes[0])
        if has[0] != 0 and s.slot[0] < k:
            s.keys[s.slot[0]] = join_key(T.uint32(MINUS_INFINITY), i * 32 + s.t)
        s.size[0] = s.size[0] + T.Cast("int32", T.popcount(lanes[0]))
        i = i + 1


@phase
def complete(vocab, k, /, s):
    """Complete a row in which fewer than k elements are above minus infinity with its first elements at minus infinity.

    Reads and writes: as `fill_up`. Barriers: two, for such a row.
    """
    if s.size[0] < k:
        T.cuda.cta_sync()
        if s.t < 32:
            fill_up(vocab, k)(s)
        T.cuda.cta_sync()
        s.size[0] = k


@phase
def write_given_columns(threads, vocab, n, exponent, loop, /, s):
    """The probabilities of the columns that were given, wherever they rank.

    `exponent`: (state, element) -> the exponent of the element's exponential.

    Reads: the arguments, what `exponent` reads, `inverse`, `logarithm`. Writes: the output `given`. Barriers: none.
    """
    for i in loop((n - s.t + (threads - 1)) // threads):
        T.ptx.ld.global_.s64(s.wanted[0], s.io.ids.ptr_to([s.row[0], i * threads + s.t]))
        column: T.int32 = T.Cast("int32", T.max(T.min(s.wanted[0], T.int64(vocab - 1)), T.int64(0)))
        write_given(
            s.io.given, s.row[0], i * threads + s.t, s.wanted[0], vocab,
            exponent(s, written_element(s.io, s.row[0], column)), s.inverse[0], s.logarithm[0], s.io.log)
# fmt: on
