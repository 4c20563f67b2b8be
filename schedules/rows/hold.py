"""Which elements a thread has of a row, and how it holds them: in registers, in shared memory, or by reading again.

Each factory takes the kernel's extents and returns an inline over a thread's `RowState`.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from .cut import Extents

# What an absent vector's words hold: minus infinity, which adds nothing to a maximum or a sum.
MINUS_INFINITY = {"float32": 0xFF800000, "float16": 0xFC00FC00, "bfloat16": 0xFF80FF80}


def minus_infinity(ext: Extents) -> Any:
    return -T.infinity("float32") if ext.word == "float32" else T.uint32(MINUS_INFINITY[ext.dtype])


def value(ext: Extents, raw: Any, e: Any) -> Any:
    """The e-th element of a thread's words, in float32."""
    if ext.dtype == "float32":
        return raw[e] if ext.word == "float32" else T.reinterpret("float32", raw[e])
    half = raw[e // 2] >> T.Cast("uint32", e % 2 * 16)
    if ext.dtype == "bfloat16":
        return T.reinterpret("float32", half << T.uint32(16))
    return T.Cast("float32", T.reinterpret("float16", T.Cast("uint16", half)))


def staged_at(ext: Extents, s: Any) -> Any:
    """Where a part's vectors begin in its thread block's `stage`."""
    return s.part % ext.slices * ext.part if ext.slices > 1 else 0


# fmt: off
@phase
def locate(ext, /, s, logits):
    """Reads: the ragged elements of the row. Writes: `first`, `count`, `edge`, `edge_at`. Barriers: none.

    After: the part's vectors are known, and the ragged elements of the row are dealt out, one a thread, to threads of
    the first part: those before the first whole vector to threads 0, 1..., those after the last to `width`... (of the
    last part, where parts are slices).
    """
    vocab, width = T.meta_var(ext.vocab), T.meta_var(ext.width)
    # For rows that begin with a whole vector; all do if `vocab` is a multiple of `width`.
    before: T.int32 = 0
    s.first = s.row * T.int64(vocab // width) + s.part * ext.part
    s.edge_at = -1
    if ext.ragged:
        before = T.Cast(
            "int32", T.int64(width - 1) - (s.row * T.int64(vocab) + T.int64(width - 1)) % T.int64(width))
        before = T.min(before, vocab)
        s.first = (s.row * T.int64(vocab) + T.int64(width - 1)) // T.int64(width) + s.part * ext.part
        s.count = T.min(T.max((vocab - before) // width - s.part * ext.part, 0), ext.part)
        if ext.slices > 1:
            if s.part == 0 and s.t < before:
                s.edge_at = s.t
            if s.part == ext.parts - 1 and width <= s.t and s.t < width + (vocab - before) % width:
                s.edge_at = vocab - (vocab - before) % width + s.t - width
        elif s.part == 0:
            if s.t < before:
                s.edge_at = s.t
            if width <= s.t and s.t < width + (vocab - before) % width:
                s.edge_at = vocab - (vocab - before) % width + s.t - width
    else:
        s.count = T.min(vocab // width - s.part * ext.part, ext.part)
    s.edge = -T.infinity("float32")
    if ext.ragged:
        if s.edge_at >= 0:
            s.edge = T.Cast("float32", logits[s.row, s.edge_at])


@phase
def load_vector(ext, /, s, words, u, at):
    """Load vector `at` of the row as the u-th in hand; what a kernel also writes needs a load that sees it."""
    if ext.written:
        T.ptx.ld.global_.v4.u32(
            s.raw[u * 4], s.raw[u * 4 + 1], s.raw[u * 4 + 2], s.raw[u * 4 + 3], words.ptr_to([at * 4]))
    else:
        for v in T.vectorized(4):
            s.raw[u * 4 + v] = words[at * 4 + v]


@phase
def load_tile(ext, /, s, words, base, inside):
    """Reads: the logits' words. Writes: `raw`. Barriers: none.

    After: `raw` holds the thread's vectors of the tile that begins at the part's vector `base`; minus infinity for
    those beyond the part. The first `inside` of them are known to be in the part, without a comparison.
    """
    threads = T.meta_var(ext.threads)
    for u in T.unroll(inside):
        load_vector(ext)(s, words, u, s.first + T.Cast("int64", base + u * threads + s.t))
    for u in T.unroll(ext.vectors - inside):
        if base + (inside + u) * threads + s.t < s.count:
            load_vector(ext)(s, words, inside + u, s.first + T.Cast("int64", base + (inside + u) * threads + s.t))
    for w in T.unroll((ext.vectors - inside) * 4):
        s.raw[inside * 4 + w] = T.Select(
            base + (inside + w // 4) * threads + s.t < s.count, s.raw[inside * 4 + w], minus_infinity(ext))


@phase
def copy_part(ext, /, s, words, stage):
    """Reads: the logits' words. Writes: `stage`. Barriers: none, each thread waits for its own copies.

    After: `stage` holds the part's vectors; a thread may read those that it copied itself, which are its own of a tile.
    """
    for u in T.unroll(ext.kept):
        if u * ext.threads + s.t < s.count:
            T.ptx.cp.async_.cg.shared.global_(
                stage.ptr_to([(staged_at(ext, s) + u * ext.threads + s.t) * 4]),
                words.ptr_to([(s.first + T.Cast("int64", u * ext.threads + s.t)) * 4]), 16)
    T.ptx.cp.async_.commit_group()
    T.ptx.cp.async_.wait_group(0)


@phase
def take_tile(ext, /, s, stage, base):
    """Reads: what this thread copied to `stage`. Writes: `raw`. Barriers: none. After: as `load_tile`."""
    for u in T.unroll(ext.vectors):
        if base + u * ext.threads + s.t < s.count:
            for v in T.vectorized(4):
                s.raw[u * 4 + v] = stage[(staged_at(ext, s) + base + u * ext.threads + s.t) * 4 + v]
    for w in T.unroll(ext.vectors * 4):
        s.raw[w] = T.Select(base + w // 4 * ext.threads + s.t < s.count, s.raw[w], minus_infinity(ext))


def fenced(word: Any) -> Any:
    source = '__device__ __forceinline__ unsigned fenced_word(unsigned x) { asm volatile("" : "+r"(x)); return x; }'
    return T.cuda.func_call("fenced_word", word, source_code=source, return_type="uint32")


@phase
def fence_tile(ext, /, s):
    """Writes: `raw`, with what it holds, in a way that the compiler cannot see through (see `Extents.fenced`)."""
    if ext.fenced:
        for w in T.unroll(ext.vectors * 4):
            s.raw[w] = fenced(s.raw[w])
# fmt: on
