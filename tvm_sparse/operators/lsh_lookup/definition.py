"""Equations 9, 10 and 3 in TVMScript, for definitions and CPU functions; and finding a code's bucket, also for GPUs.

Loads the compiler.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.formats.bitmap import BITS, bitmap_words
from tvm_sparse.formats.wta import MIX, MIX_SHIFT


def slot_of(code: tirx.PrimExpr, multiplier: tirx.PrimExpr, slots: tirx.PrimExpr) -> tirx.PrimExpr:
    """`formats.wta.slot_of` of an int32 code, as int32."""
    x = T.Cast("uint32", code) * T.uint32(MIX)
    x = (x ^ (x >> T.uint32(MIX_SHIFT))) * T.Cast("uint32", multiplier)
    return T.Cast("int32", (T.Cast("uint64", x) * T.Cast("uint64", slots)) >> T.uint64(32))


def valid_bits(vocab: int, word: Any) -> tirx.PrimExpr:
    """The bits of the `word`-th int32 of a bitmap that stand for words below `vocab`, as uint32."""
    words, rest = bitmap_words(vocab), vocab % BITS
    every = T.uint32(0xFFFFFFFF)
    return T.Select(word == words - 1, T.uint32((1 << rest) - 1), every) if rest else every


def alloc_scratch(counted: int) -> SimpleNamespace:
    """Scratch buffers, within a block, for hashing, look-up and compaction; `counted`: words counted at a time."""
    return SimpleNamespace(
        counts=T.sblock_alloc_buffer((counted,), "int32"),
        code=T.sblock_alloc_buffer((1,), "int32"),
        start=T.sblock_alloc_buffer((1,), "int32"),
        length=T.sblock_alloc_buffer((1,), "int32"),
        word=T.sblock_alloc_buffer((1,), "int32"),
        bits=T.sblock_alloc_buffer((1,), "uint32"),
        place=T.sblock_alloc_buffer((1,), "int32"),
        best=T.sblock_alloc_buffer((1,), "float32"),
        value=T.sblock_alloc_buffer((1,), "float32"),
        count=T.sblock_alloc_buffer((1,), "int32"),
    )


@phase
def find_bucket(cuckoo, /, io, band, s):
    """Find the bucket of a code.

    Reads: `code`, the band's table. Writes: `start` and `length`, which is 0 if no word has the code.
    """
    # fmt: off
    if cuckoo:
        s.start[0] = 0
        s.length[0] = 0
        for half in range(2):
            s.word[0] = slot_of(s.code[0], io.multipliers[band, half], io.slots)
            if io.entries[band, half, s.word[0], 0] == s.code[0]:
                s.start[0] = io.entries[band, half, s.word[0], 1]
                s.length[0] = io.entries[band, half, s.word[0], 2]
    else:
        s.start[0] = io.starts[band, s.code[0]]
        s.length[0] = io.starts[band, s.code[0] + 1] - s.start[0]


@phase
def look_up_list(vocab, counted, cuckoo, set_code, /, io, row, first, bitmap, at, s):
    """Set the bits of the words in a range with enough hits of some row of a list's beam, and of those that are always
    candidates.

    Called with (io, row, first, bitmap, at, s): a list, the first of its `counted` words (both multiples of 32), and
    the row `at` of a bitmap for their bits. `set_code(io, row, i, band, s)` sets `code` of a row of the beam.

    Reads: words, table, `always`, `threshold`. Writes: the bitmap; as scratch `s`.
    """
    # fmt: off
    words = T.meta_var(bitmap_words(vocab))
    for w in range(counted // BITS):
        if first // BITS + w < words:
            bitmap[at, first // BITS + w] = T.reinterpret("int32", T.reinterpret("uint32", io.always[
                first // BITS + w]) & valid_bits(vocab, first // BITS + w))
    for i in range(io.beam):
        for j in range(counted):
            s.counts[j] = 0
        for band in range(io.bands):
            set_code(io, row, i, band, s)
            find_bucket(cuckoo)(io, band, s)
            for p in range(s.length[0]):
                s.word[0] = io.words[band, s.start[0] + p] - first
                if s.word[0] >= 0 and s.word[0] < counted:
                    s.counts[s.word[0]] = s.counts[s.word[0]] + 1
        for w in range(counted // BITS):
            if first // BITS + w < words:
                s.bits[0] = T.uint32(0)
                for j in range(BITS):
                    if s.counts[w * BITS + j] >= io.threshold:
                        s.bits[0] = s.bits[0] | (T.uint32(1) << T.Cast("uint32", j))
                bitmap[at, first // BITS + w] = bitmap[at, first // BITS + w] | T.reinterpret("int32", s.bits[0])
