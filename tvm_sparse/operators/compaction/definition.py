"""Stream compaction in TVMScript, for definitions and CPU functions. Loads the compiler."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.formats.bitmap import BITS, bitmap_words
from tvm_sparse.operators.lsh_lookup.definition import valid_bits


@phase
def compact(vocab, counted, /, io, bitmap, at, row, first, s):
    """Append the words of a range to a list: row `at` of `bitmap` is that of list `row`, and the range has `counted`
    words from `first` on, both multiples of 32.

    Reads: the bitmap's bits below `vocab`. Writes: these words into the list's `candidates`, and after the last range
    `counts`, and -1 after the words; as scratch `count` and `bits`.
    """
    # fmt: off
    s.count[0] = 0
    for w in range(first // BITS):
        s.count[0] = s.count[0] + T.Cast("int32", T.popcount(T.reinterpret("uint32", bitmap[at, w])))
    for w in range(T.min(counted // BITS, bitmap_words(vocab) - first // BITS)):
        s.bits[0] = T.reinterpret("uint32", bitmap[at, first // BITS + w]) & valid_bits(vocab, first // BITS + w)
        while s.bits[0] != T.uint32(0):
            # x ^ (x - 1) sets the lowest set bit and all bits below it: their number is its index plus one.
            if s.count[0] < io.capacity:
                io.candidates[row, s.count[0]] = first + w * BITS - 1 + T.Cast(
                    "int32", T.popcount(s.bits[0] ^ (s.bits[0] - T.uint32(1))))
            s.count[0] = s.count[0] + 1
            s.bits[0] = s.bits[0] & (s.bits[0] - T.uint32(1))
    if first + counted >= vocab:
        io.counts[row] = s.count[0]
        for j in range(T.max(io.capacity - s.count[0], 0)):
            io.candidates[row, s.count[0] + j] = -1
