"""The steps as plain kernels, one for each step: for comparison, and for shapes that exceed shared memory.

Steps are called with (io), and each has a device region of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.formats.bitmap import BITS, bitmap_words
from tvm_sparse.operators.lsh_lookup.definition import find_bucket, valid_bits
from tvm_sparse.operators.wta_hash.definition import hash_code

Step = Callable[..., Any]


def alloc_scratch() -> SimpleNamespace:
    """What a thread keeps."""
    names = {
        "code": "int32", "start": "int32", "length": "int32", "word": "int32", "place": "int32", "best": "float32",
        "value": "float32", "bits": "uint32",
    }  # fmt: skip
    return SimpleNamespace(**{name: T.alloc_local([1], dtype) for name, dtype in names.items()})


# fmt: off
@phase
def hash_elements(k, units, threads, element, /, io):
    """One thread per code, which reads the row from global memory: `io.codes` of `io.rows` rows, `element(io, row,
    column)`.
    """
    block = T.cta_id([(io.rows * io.bands + (threads - 1)) // threads])
    t = T.thread_id([threads])
    s = T.meta_var(alloc_scratch())
    at: T.let = block * threads + t
    if at < io.rows * io.bands:
        hash_code(k, units, element)(io, at // io.bands, at % io.bands, s)
        io.codes[at // io.bands, at % io.bands] = s.code[0]


@phase
def count_in_global_memory(cuckoo, threads, /, io):
    """One thread per bucket (Figure 4, naive): adds hits of `io.rows` rows with `io.codes` to `io.hits`, which is 0."""
    block = T.cta_id([(io.rows * io.bands + (threads - 1)) // threads])
    t = T.thread_id([threads])
    s = T.meta_var(alloc_scratch())
    at: T.let = block * threads + t
    if at < io.rows * io.bands:
        s.code[0] = io.codes[at // io.bands, at % io.bands]
        find_bucket(cuckoo)(io, at % io.bands, s)
        for p in T.serial(s.length[0]):
            T.evaluate(T.cuda.atomic_add(
                io.hits.ptr_to([at // io.bands, io.words[at % io.bands, s.start[0] + p]]), T.int32(1)))


@phase
def choose_words(vocab, threads, /, io):
    """One thread for 32 words of a list: compares their `io.hits` with the threshold and sets them to 0; writes
    `io.chosen`.
    """
    words = T.meta_var(bitmap_words(vocab))
    block = T.cta_id([(io.lists * words + (threads - 1)) // threads])
    t = T.thread_id([threads])
    s = T.meta_var(alloc_scratch())
    at: T.let = block * threads + t
    if at < io.lists * words:
        s.bits[0] = T.reinterpret("uint32", io.always[at % words]) & valid_bits(vocab, at % words)
        for i in T.serial(io.beam):
            for j in T.serial(BITS):
                if at % words * BITS + j < vocab:
                    if io.hits[at // words * io.beam + i, at % words * BITS + j] >= io.threshold:
                        s.bits[0] = s.bits[0] | (T.uint32(1) << T.Cast("uint32", j))
                    io.hits[at // words * io.beam + i, at % words * BITS + j] = 0
        io.chosen[at // words, at % words] = T.reinterpret("int32", s.bits[0])


@phase
def scan_bitmap(vocab, threads, /, io):
    """Where the words of each int32 of `io.chosen` go: `io.places`, by one thread block per list, and `io.counts`.

    A thread adds up a run of the bitmap, and one thread the runs.
    """
    words = T.meta_var(bitmap_words(vocab))
    run = T.meta_var(-(-words // threads))
    row = T.cta_id([io.lists])
    t = T.thread_id([threads])
    sums = T.alloc_shared([threads + 1], "int32")
    s = T.meta_var(alloc_scratch())
    s.length[0] = 0
    for w in T.serial(run):
        if t * run + w < words:
            s.length[0] = s.length[0] + set_bits(vocab, io, row, t * run + w)
    sums[t] = s.length[0]
    T.cuda.cta_sync()
    if t == 0:
        s.start[0] = 0
        for other in T.serial(threads):
            s.length[0] = sums[other]
            sums[other] = s.start[0]
            s.start[0] = s.start[0] + s.length[0]
        io.counts[row] = s.start[0]
    T.cuda.cta_sync()
    s.start[0] = sums[t]
    for w in T.serial(run):
        if t * run + w < words:
            io.places[row, t * run + w] = s.start[0]
            s.start[0] = s.start[0] + set_bits(vocab, io, row, t * run + w)


def set_bits(vocab: int, io: Any, row: Any, word: Any) -> tirx.PrimExpr:
    """How many bits are set in one int32 of a list's bitmap."""
    return T.Cast("int32", T.popcount(T.reinterpret("uint32", io.chosen[row, word]) & valid_bits(vocab, word)))


@phase
def copy_if(vocab, threads, /, io):
    """One thread per word, or per place of a list: copies each word in `io.chosen` to its place; -1 to places left
    over.
    """
    block = T.cta_id([(io.lists * T.max(io.capacity, vocab) + (threads - 1)) // threads])
    t = T.thread_id([threads])
    s = T.meta_var(alloc_scratch())
    row: T.let = (block * threads + t) // T.max(io.capacity, vocab)
    at: T.let = (block * threads + t) % T.max(io.capacity, vocab)
    if row < io.lists:
        if at < vocab:
            s.bits[0] = T.reinterpret("uint32", io.chosen[row, at // BITS])
            if (s.bits[0] >> T.Cast("uint32", at % BITS)) & T.uint32(1) != T.uint32(0):
                s.bits[0] = s.bits[0] & ((T.uint32(1) << T.Cast("uint32", at % BITS)) - T.uint32(1))
                s.place[0] = io.places[row, at // BITS] + T.Cast("int32", T.popcount(s.bits[0]))
                if s.place[0] < io.capacity:
                    io.candidates[row, s.place[0]] = at
        if at < io.capacity and at >= io.counts[row]:
            io.candidates[row, at] = -1
# fmt: on
