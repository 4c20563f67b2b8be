"""Sums of table rows in int8 by tensor cores: each row times its scale, in whole numbers.

The scales of a window's entries, times the values of these where they have some, become whole numbers: a power of two
makes the largest one nearly 2^30. Where that makes all of them whole, which is so for scales within a factor of 64 of
the largest, and for others by chance, the sums are exact: tensor cores multiply int8 by int8 and add in int32. A whole
number has four digits, signed bytes d with d0 + 256 d1 + 65,536 d2 + 16,777,216 d3, and instructions multiply the
numbers of the table by one digit of each scale. For other scales, NaN and infinity too, numbers become float32.

**Lanes.** An instruction adds 32 entries for 16 columns, of which lane 4 g + m has eight entries for columns g and
g + 8: a group of lanes that takes entries of its own is the lanes of one m. So the lanes along the columns of a tile
are every fourth one. A lane's vectors of four entries are turned, byte by byte, into words of four entries for one
column. Operand B has digit n of entry k in row k and column n, for n below 4. Results of digits 2 m and 2 m + 1 are in
the lanes of m, so that those of the last two groups have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.selection import FULL_WARP
from .space import GROUPS, SLOTS, Extents

Phase = Callable[..., Any]
Held = Callable[[Any, Any, bool], Any]
multiply = T.ptx.mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32
# Makes four bytes signed digits, each with a carry into the next one.
CARRIES = 0x00808080
# Exponents of float32, biased, of the power of two that makes a largest scale of exponent 0 nearly 2^30, and the
# largest of a power of two whose inverse is a normal number.
ENLARGED, MOST_ENLARGED = 283, 253
QUAD = 4  # entries of one word
BYTES = """
__device__ __forceinline__ unsigned int bytes_of(unsigned int a, unsigned int b, unsigned int which) {
  return __byte_perm(a, b, which);
}
"""


def bytes_of(a: Any, b: Any, which: Any) -> tirx.PrimExpr:
    """The word of four bytes of two words; `which` has their numbers, of eight, in its lowest hexadecimal digits."""
    return T.cuda.func_call("bytes_of", a, b, T.Cast("uint32", which), source_code=BYTES, return_type="uint32")


# fmt: off
@T.inline
def load_scale(s, io):
    """Load the scale of the window's entry."""
    T.ptx.ld.global_.f32(s.own_scale, io.scales.ptr_to([T.Cast("int64", s.window.column)]))


@phase
def load_scales(e, /, s, io, at):
    """Begin to load the scale of the lane's entry of the window.

    Reads: `window`, `count`, `padding`. Writes: `own_scale`; 0 without an entry. Barriers: none.
    """
    s.own_scale = T.float32(0)
    if e.padded:
        if at.lane < s.count and s.window.column != s.padding:
            load_scale(s, io)
    else:
        if at.lane < s.count:
            load_scale(s, io)


@phase
def find_digits(e, /, s):
    """The digits of the window's scales.

    Reads: `own_scale`, `window`. Writes: `digits` of the lane's entry; `unit`, what the last digit counts; `inexact`,
    whether the warp has a scale that is no whole number of it. Barriers: a maximum and a vote of the warp.
    """
    s.term = s.own_scale * s.window.value if e.weighted else s.own_scale
    s.exponent = T.call_extern(
        "uint32", "__reduce_max_sync", T.uint32(FULL_WARP),
        T.reinterpret("uint32", s.term) & T.uint32(0x7FFFFFFF)) >> T.uint32(23)
    s.exponent = T.min(T.uint32(ENLARGED) - s.exponent, T.uint32(MOST_ENLARGED))
    s.term = s.term * T.reinterpret("float32", s.exponent << T.uint32(23))
    s.unit = T.reinterpret("float32", (T.uint32(254) - s.exponent) << T.uint32(23))
    s.whole = T.Cast("int32", s.term)
    s.inexact = T.cuda.any_sync(T.uint32(FULL_WARP), T.Cast("float32", s.whole) != s.term)
    s.digits = (T.Cast("uint32", s.whole) + T.uint32(CARRIES)) ^ T.uint32(CARRIES)


@phase
def hand_out(e, held, /, s, at, whole):
    """Operand B: each lane's digit of its entries of the batch.

    `held`: the lane that holds the entry of load u, of (s, u, whole).

    Reads: `digits`, `entry`, `count`. Writes: `picked`. Barriers: shuffles of the whole warp.
    """
    which: T.uint32 = T.Cast("uint32", at.lane // GROUPS)  # lanes beyond the last digit put zeros
    for u in T.unroll(SLOTS):
        s.of_entry[u] = T.uint32(0)
    for u in T.unroll(e.loads):
        s.of_entry[u] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.digits, held(s, u, whole), 32, 32)
        if not whole:
            s.of_entry[u] = T.Select(s.entry[u] < s.count, s.of_entry[u], T.uint32(0))
    pair: T.uint32 = which | (which + T.uint32(4)) << T.uint32(4)
    for q in T.unroll(SLOTS // QUAD):
        s.picked[q] = bytes_of(
            bytes_of(s.of_entry[q * QUAD], s.of_entry[q * QUAD + 1], pair),
            bytes_of(s.of_entry[q * QUAD + 2], s.of_entry[q * QUAD + 3], pair), 0x5410)
        s.picked[q] = T.Select(which < T.uint32(4), s.picked[q], T.uint32(0))


def turn(e: Extents, q: int) -> Phase:
    """The words of the q-th four entries for the columns of a word; the phase is (s, w).

    Bytes of entries that there are not may be any: their digits are zeros.

    Reads: `raw`. Writes: `turned` from `q * 4` on. Barriers: none.
    """
    there = min(max(e.loads - q * QUAD, 0), QUAD)

    @T.inline
    def phase(s, w):
        first = T.meta_var(q * QUAD * e.words + w)
        if there == 0:
            for j in T.unroll(QUAD):
                s.turned[q * QUAD + j] = T.uint32(0)
        elif there == 1:
            for j in T.unroll(QUAD):
                s.turned[q * QUAD + j] = s.raw[first] >> T.Cast("uint32", j * 8)
        elif there == 2:
            for j in T.unroll(QUAD):
                s.turned[q * QUAD + j] = bytes_of(s.raw[first], s.raw[first + e.words], j | (j + 4) << 4)
        else:
            third = T.meta_var(first + 2 * e.words)
            fourth = T.meta_var(first + (there - 1) * e.words)
            for h in T.unroll(2):
                s.halves[h] = bytes_of(s.raw[first], s.raw[first + e.words], 0x5140 + h * 0x2222)
                s.halves[2 + h] = bytes_of(s.raw[third], s.raw[fourth], 0x5140 + h * 0x2222)
            for j in T.unroll(QUAD):
                s.turned[q * QUAD + j] = bytes_of(s.halves[j // 2], s.halves[2 + j // 2], 0x5410 + j % 2 * 0x2222)

    return phase


@phase
def add_products(e, held, /, s, at, whole):
    """Add a batch's rows times their scales to `acc`, `held` as for `hand_out`.

    Reads: `raw`, `digits`, `unit`, `entry`, `count`. Writes: `acc`; in the lanes of the first two groups.
    Barriers: shuffles and products of the whole warp.
    """
    hand_out(e, held)(s, at, whole)
    s.unit = s.unit * T.Select(at.lane % GROUPS == 1, T.float32(65536), T.float32(1))
    for w in T.unroll(e.words):
        turn(e, 0)(s, w)
        turn(e, 1)(s, w)
        for p in T.unroll(2):
            multiply(
                s.product[0], s.product[1], s.product[2], s.product[3],
                s.turned[p * 2], s.turned[p * 2 + 1], s.turned[QUAD + p * 2], s.turned[QUAD + p * 2 + 1],
                s.picked[0], s.picked[1], *[T.uint32(0) for _ in range(4)])
            for i in T.unroll(2):
                column = T.meta_var(w * 4 + p * 2 + i)
                s.acc[column] = s.acc[column] + s.unit * T.Cast("float32", T.reinterpret(
                    "int32", s.product[i * 2] + s.product[i * 2 + 1] * T.uint32(256)))


@phase
def join_groups(e, /, s, at):
    """Bring the sums of the last two groups to the first two.

    Reads and writes: `acc`. Barriers: shuffles of the whole warp.
    """
    for v in T.unroll(e.vec):
        s.acc[v] = s.acc[v] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.acc[v], GROUPS // 2, 32, 32)
        s.acc[v] = T.Select(at.lane % GROUPS < GROUPS // 2, s.acc[v], T.float32(0))
# fmt: on
