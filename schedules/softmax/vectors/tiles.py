"""A thread's vectors of a tile: from memory or shared memory to registers, and as results to memory.

Each factory takes the kernel's extents and returns an inline over a thread's `RowState`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ...device.arithmetic import LOG2_E
from .extents import Extents

# What an absent vector's words hold: minus infinity, which adds nothing to a maximum or a sum.
MINUS_INFINITY = {"float16": 0xFC00FC00, "bfloat16": 0xFF80FF80}


def minus_infinity(ext: Extents) -> Any:
    return -T.infinity("float32") if ext.dtype == "float32" else T.uint32(MINUS_INFINITY[ext.dtype])


def value(ext: Extents, raw: Any, e: Any) -> Any:
    """The e-th element of a thread's words, in float32."""
    if ext.dtype == "float32":
        return raw[e]
    half = raw[e // 2] >> T.Cast("uint32", e % 2 * 16)
    if ext.dtype == "bfloat16":
        return T.reinterpret("float32", half << T.uint32(16))
    return T.Cast("float32", T.reinterpret("float16", T.Cast("uint16", half)))


# fmt: off
def load_tile(ext: Extents) -> Callable[..., Any]:
    """Reads: the logits' words. Writes: `raw`. Barriers: none.

    After: `raw` holds the thread's vectors of the tile that begins at the part's vector `base`; minus infinity for
    those beyond the part. The first `inside` of them are known to be in the part, without a comparison.
    """
    threads, vectors = ext.threads, ext.vectors

    @T.inline
    def load(s, words, base, inside):
        for u in T.unroll(inside):
            for v in T.vectorized(4):
                s.raw[u * 4 + v] = words[(s.first + T.Cast("int64", base + u * threads + s.t)) * 4 + v]
        for u in T.unroll(vectors - inside):
            if base + (inside + u) * threads + s.t < s.count:
                for v in T.vectorized(4):
                    s.raw[(inside + u) * 4 + v] = words[
                        (s.first + T.Cast("int64", base + (inside + u) * threads + s.t)) * 4 + v]
        for w in T.unroll((vectors - inside) * 4):
            s.raw[inside * 4 + w] = T.Select(
                base + (inside + w // 4) * threads + s.t < s.count, s.raw[inside * 4 + w], minus_infinity(ext))

    return load


def copy_part(ext: Extents) -> Callable[..., Any]:
    """Reads: the logits' words. Writes: `stage`. Barriers: none, each thread waits for its own copies.

    After: `stage` holds the part's vectors; a thread may read those that it copied itself, which are its own of a tile.
    """

    @T.inline
    def copy(s, words, stage):
        for u in T.unroll(ext.kept):
            if u * ext.threads + s.t < s.count:
                T.ptx.cp.async_.cg.shared.global_(
                    stage.ptr_to([(u * ext.threads + s.t) * 4]),
                    words.ptr_to([(s.first + T.Cast("int64", u * ext.threads + s.t)) * 4]), 16)
        T.ptx.cp.async_.commit_group()
        T.ptx.cp.async_.wait_group(0)

    return copy


def take_tile(ext: Extents) -> Callable[..., Any]:
    """Reads: what this thread copied to `stage`. Writes: `raw`. Barriers: none. After: as of `load_tile`."""

    @T.inline
    def take(s, stage, base):
        for u in T.unroll(ext.vectors):
            if base + u * ext.threads + s.t < s.count:
                for v in T.vectorized(4):
                    s.raw[u * 4 + v] = stage[(base + u * ext.threads + s.t) * 4 + v]
        for w in T.unroll(ext.vectors * 4):
            s.raw[w] = T.Select(base + w // 4 * ext.threads + s.t < s.count, s.raw[w], minus_infinity(ext))

    return take


def fence_tile(ext: Extents) -> Callable[..., Any]:
    """Writes: `raw`, with what it holds, in a way that the compiler cannot see through (see `Extents.fenced`)."""
    source = '__device__ __forceinline__ unsigned fenced_word(unsigned x) { asm volatile("" : "+r"(x)); return x; }'

    def fenced(word: Any) -> Any:
        return T.cuda.func_call("fenced_word", word, source_code=source, return_type="uint32")

    @T.inline
    def fence(s):
        if ext.fenced:
            for w in T.unroll(ext.vectors * 4):
                s.raw[w] = fenced(s.raw[w])

    return fence


def result() -> Callable[..., Any]:
    """Reads: `top`, the row's maximum, and `d`, made into a divisor or subtrahend by `phases.normalise`.

    After: `power` is the result for one logit. `log` is known when the kernel is generated.
    """

    @T.inline
    def compute(s, logit, log):
        if log:
            s.power = logit - s.top - s.d
        else:
            T.ptx.ex2.approx.ftz.f32(s.power, (logit - s.top) * T.float32(LOG2_E))
            s.power = s.power * s.d

    return compute


def store_tile(ext: Extents) -> Callable[..., Any]:
    """Reads: `raw`, and what `phases.normalise` wrote. Writes: the probabilities of the tile's vectors; `out`, `power`.

    Barriers: none. `base` and `inside`: as of `load_tile`.
    """
    computed = result()

    @T.inline
    def store_vectors(s, elements, base, inside, log):
        for u in T.unroll(ext.vectors):
            for v in T.unroll(ext.width):
                if ext.in_place:
                    s.out[v] = (value(ext, s.raw, u * ext.width + v) - s.shift) * s.scale + s.offset
                else:
                    computed(s, value(ext, s.raw, u * ext.width + v), log)
                    s.out[v] = T.Cast(ext.dtype, s.power)
            if u < inside or base + u * ext.threads + s.t < s.count:
                for v in T.vectorized(ext.width):
                    elements[(s.first + T.Cast("int64", base + u * ext.threads + s.t)) * ext.width + v] = s.out[v]

    @T.inline
    def store(s, elements, base, inside, log):
        # Two loops, and not a branch in one: the compiler would first work out, for all elements, what both share.
        if ext.in_place:
            store_vectors(s, elements, base, inside, False)
        elif log != 0:
            store_vectors(s, elements, base, inside, True)
        else:
            store_vectors(s, elements, base, inside, False)

    return store
# fmt: on
