"""Sums of exponentials, relative to the largest element: of a warp, and of several warps or blocks."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device.cluster import place_there
from ...device.mbarriers import await_arrivals, send_word
from ...device.selection import FULL_WARP, MINUS_INFINITY, bits_value, order
from ...device.words import value_in
from .space import Layout
from .state import SUMS, WEIGHED

# The reference of an empty sum: the least float32, and its bits.
LOWEST = T.min_value("float32")
LOWEST_BITS = 0xFF7FFFFF
# The block that receives what all others send.
FIRST = T.uint32(0)
# A power of two. Products with `factor` below it lose little to rounding.
NEAR = 1 << 20
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
    """The total of the partial sums."""
    return (s.partial[0] + s.partial[1]) + (s.partial[2] + s.partial[3])


@T.inline
def place_sum(s, there, barrier, entry):
    """Where an entry of `sums` lies in the first block, and the mbarrier that counts its bytes."""
    place_there(barrier, s.barriers.ptr_to([SUMS]), FIRST)
    place_there(there, s.sums.ptr_to([entry]), FIRST)


@T.inline
def send_sum(s, entry):
    """Send `sum` and `reference` to an entry of `sums` of the first block, asynchronously."""
    barrier = T.alloc_local([1], "uint32")
    there = T.alloc_local([1], "uint32")
    place_sum(s, there, barrier, entry)
    send_word(there[0], sum_word(s.sum[0], s.reference[0]), barrier[0])


@T.inline
def set_base(s):
    """What exponents are taken from where they are one product and sum: -reference * factor.

    Writes: `base`, rounded; `rest`, what rounding took of it; `near`. Where numbers are too large, `near` is 0.
    """
    s.base[0] = s.reference[0] * -s.factor[0]
    s.rest[0] = T.float32(0)
    s.near[0] = 0
    if T.abs(s.base[0]) < T.float32(NEAR):
        s.near[0] = 1
        T.ptx.fma.rn.f32(s.rest[0], s.reference[0], s.factor[0], s.base[0])


@T.inline
def take_near_power(s, value):
    """`power` = exp((value - reference) * scale) / 2^rest, if `near`."""
    T.ptx.fma.rn.f32(s.power[0], value, s.factor[0], s.base[0])
    T.ptx.ex2.approx.ftz.f32(s.power[0], s.power[0])


@T.inline
def take_rest(s):
    """Make `sum`, of near powers, relative to the reference itself."""
    T.ptx.ex2.approx.ftz.f32(s.power[0], T.float32(0) - s.rest[0])
    s.sum[0] = s.sum[0] * s.power[0]


def weigh_warp(layout: Layout) -> Phase:
    """Each thread's sum, relative to the largest element of the warp. The phase is (s).

    Reads: `raw`, `top`; or, of a staged row, each thread's `sum` and `reference`; `factor`.
    Writes: `reference`, `sum`; scratch is `plain`, `bits`, `power`, `partial`, and as `set_base`.
    Barriers: none, but all lanes take part.
    After: a warp with NaN or plus infinity has NaN for its sum; one with nothing above minus infinity 0.
    """
    dtype, words, per_word = layout.dtype, layout.words, layout.per_word

    @T.inline
    def add_any(s):
        for e in T.unroll(words * per_word):
            take_power(s, s.power, value_in(dtype, s.raw[e // per_word], e % per_word))
            s.partial[e % PARTIAL] = s.partial[e % PARTIAL] + s.power[0]

    @T.inline
    def add_near(s):
        for e in T.unroll(words * per_word):
            take_near_power(s, value_in(dtype, s.raw[e // per_word], e % per_word))
            s.partial[e % PARTIAL] = s.partial[e % PARTIAL] + s.power[0]

    @T.inline
    def of_registers(s):
        order(s.top[0], s.plain, s.bits)
        s.bits[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0])
        s.reference[0] = LOWEST
        if s.bits[0] > T.uint32(MINUS_INFINITY):
            s.reference[0] = bits_value(s.bits[0])
        for i in T.unroll(PARTIAL):
            s.partial[i] = T.float32(0)
        if layout.late:
            set_base(s)
            if s.near[0] != 0:
                add_near(s)
            else:
                add_any(s)
            s.sum[0] = sum_of_partials(s)
            take_rest(s)
        else:
            add_any(s)
            s.sum[0] = sum_of_partials(s)

    @T.inline
    def of_threads(s):
        s.plain[0] = s.reference[0]
        order(s.reference[0], s.power, s.bits)
        s.reference[0] = bits_value(T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0]))
        take_power(s, s.power, s.plain[0])
        s.sum[0] = s.sum[0] * s.power[0]

    return of_threads if layout.staged else of_registers


@phase
def sum_of_warp(layout, /, s):
    """The sum of a warp's elements.

    Reads: as `weigh_warp`.
    Writes: `sums` of the warp, or those of the first block, asynchronously; as `weigh_warp`.
    Barriers: none, but all lanes take part.
    """
    weigh_warp(layout)(s)
    s.sum[0] = T.cuda.warp_sum(s.sum[0])
    if s.t % 32 == 0:
        if layout.senders > 0:
            send_sum(s, s.part * layout.warps + s.t // 32)
        else:
            s.sums[layout.cluster + s.t // 32] = sum_word(s.sum[0], s.reference[0])


@phase
def add_threads(layout, /, s):
    """The sum of a block, by the warp that has no vectors, to the first block.

    Reads: `thread_sums`, `warp_references`, `factor`.
    Writes: `sums` of the first block, asynchronously; scratch is `sum`, `reference`, `plain`, `bits`, `power`.
    Barriers: awaits WEIGHED.
    """
    scale = T.alloc_local([1], "float32")
    await_arrivals(s.row_barriers.ptr_to([WEIGHED]))
    scale[0] = s.warp_references[T.min(s.t % 32, layout.warps - 1)]
    order(scale[0], s.plain, s.bits)
    s.reference[0] = bits_value(T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.bits[0]))
    take_power(s, s.power, scale[0])
    scale[0] = s.power[0]
    s.sum[0] = T.float32(0)
    for w in T.unroll(layout.warps):
        s.sum[0] = s.sum[0] + s.thread_sums[w * 32 + s.t % 32] * T.tvm_warp_shuffle(
            T.uint32(FULL_WARP), scale[0], w, 32, 32)
    s.sum[0] = T.cuda.warp_sum(s.sum[0])
    if s.t % 32 == 0:
        send_sum(s, s.part)


@phase
def add_up(first, extent, /, s):
    """The sum of `extent` sums from the `first` one on, in all lanes of a warp.

    Reads: `sums`, `factor`.
    Writes: `sum`, `reference`; scratch is `key`, `plain`, `bits`, `power`.
    Barriers: none, but all lanes take part.
    """
    each = T.meta_var(ceildiv(extent, 32))
    totals = T.alloc_local([each], "float32")
    references = T.alloc_local([each], "float32")
    for i in T.unroll(each):
        # Lanes beyond the last sum take that sum's reference, and add nothing.
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
# fmt: on
