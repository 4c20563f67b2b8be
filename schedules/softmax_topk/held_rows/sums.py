"""Sums of exponentials, relative to the largest element: of a warp, and of several warps or blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.selection import FULL_WARP, MINUS_INFINITY, bits_value, order
from ...device.words import value_in
from .space import Layout

# The reference of a sum of nothing: the least float32, and its bits.
LOWEST = T.min_value("float32")
LOWEST_BITS = 0xFF7FFFFF
# Sums side by side, so that an addition does not wait for the one before.
PARTIAL = 4


def sum_word(total: Any, reference: Any) -> tirx.PrimExpr:
    """A sum and its reference, as `State` has them in a word."""
    low, high = (T.Cast("uint64", T.reinterpret("uint32", part)) for part in (total, reference))
    return low | (high << T.uint64(32))


def parts_of(word: Any) -> tuple[tirx.PrimExpr, tirx.PrimExpr]:
    """The sum and the reference of such a word."""
    low, high = T.Cast("uint32", word & T.uint64(0xFFFFFFFF)), T.Cast("uint32", word >> T.uint64(32))
    return T.reinterpret("float32", low), T.reinterpret("float32", high)


# fmt: off
@T.inline
def take_power(s, power, value):
    """`power` = exp((value - reference) * scale).

    The difference first: of numbers of any size it is 0 where they are equal, and minus infinity where it is too large.
    And without the steps that exp2 takes for subnormal results, which add nothing to a sum of about 1 or more.

    Reads: `reference`, `factor`.
    """
    T.ptx.ex2.approx.ftz.f32(power[0], (value - s.reference[0]) * s.factor[0])


@T.inline
def add_partial(s, e):
    """Add `power`, the e-th of some, to one of the sums side by side, which the first ones begin."""
    if e < PARTIAL:
        s.partial[e] = s.power[0]
    else:
        s.partial[e % PARTIAL] = s.partial[e % PARTIAL] + s.power[0]


def sum_of_partials(s: Any) -> tirx.PrimExpr:
    """The sum of these."""
    return (s.partial[0] + s.partial[1]) + (s.partial[2] + s.partial[3])


def sum_of_warp(layout: Layout) -> Callable[..., Any]:
    """The sum of a warp's elements. The phase is (s).

    Reads: `raw`, `top`; or, of a staged row, each thread's `sum` and `reference`; `factor`.
    Writes: `sums` of the warp; `reference`, `sum`; scratch is `plain`, `bits`, `power`, `partial`.
    Barriers: none, but all lanes take part.
    After: a warp with NaN or plus infinity has NaN for its sum; one with nothing above minus infinity 0.
    """
    dtype, words, per_word = layout.dtype, layout.words, layout.per_word

    @T.inline
    def of_registers(s):
        order(s.top[0], s.plain, s.bits)
        s.bits[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0])
        s.reference[0] = LOWEST
        if s.bits[0] > T.uint32(MINUS_INFINITY):
            s.reference[0] = bits_value(s.bits[0])
        for i in T.unroll(PARTIAL):
            s.partial[i] = T.float32(0)
        for e in T.unroll(words * per_word):
            take_power(s, s.power, value_in(dtype, s.raw[e // per_word], e % per_word))
            s.partial[e % PARTIAL] = s.partial[e % PARTIAL] + s.power[0]
        s.sum[0] = T.cuda.warp_sum(sum_of_partials(s))

    @T.inline
    def of_threads(s):
        s.plain[0] = s.reference[0]
        order(s.reference[0], s.power, s.bits)
        s.reference[0] = bits_value(T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0]))
        take_power(s, s.power, s.plain[0])
        s.sum[0] = T.cuda.warp_sum(s.sum[0] * s.power[0])

    @T.inline
    def phase(s):
        if layout.staged:
            of_threads(s)
        else:
            of_registers(s)
        if s.t % 32 == 0:
            s.sums[layout.cluster + s.t // 32] = sum_word(s.sum[0], s.reference[0])

    return phase


def add_up(first: int, extent: int) -> Callable[..., Any]:
    """The sum of `extent` sums from the `first` one on, in all lanes of a warp. The phase is (s).

    Reads: `sums`, `factor`.
    Writes: `sum`, `reference`; scratch is `key`, `plain`, `bits`, `power`.
    Barriers: none, but all lanes take part.
    """
    each = ceildiv(extent, 32)

    @T.inline
    def phase(s):
        totals = T.alloc_local([each], "float32")
        references = T.alloc_local([each], "float32")
        for i in T.unroll(each):
            # Lanes beyond the last one have its reference, and nothing to add.
            s.key[0] = s.sums[first + T.min(i * 32 + s.t % 32, extent - 1)]
            parts = T.meta_var(parts_of(s.key[0]))
            totals[i] = T.Select(i * 32 + s.t % 32 < extent, parts[0], T.float32(0))
            references[i] = parts[1]
        s.power[0] = references[0]
        for i in T.unroll(each - 1):
            T.ptx.max.NaN.f32(s.power[0], s.power[0], references[1 + i])
        order(s.power[0], s.plain, s.bits)
        s.reference[0] = bits_value(T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0]))
        s.sum[0] = T.float32(0)
        for i in T.unroll(each):
            take_power(s, s.power, references[i])
            s.sum[0] = s.sum[0] + totals[i] * s.power[0]
        s.sum[0] = T.cuda.warp_sum(s.sum[0])

    return phase
# fmt: on
