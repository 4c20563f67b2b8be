"""The last kernel of the output layer where a token is drawn: a thread block for each row.

The first kernel has told of each tile, a *slice* of the tokens, the largest score and the sum of exponentials relative
to it; no score is in memory. The thread block

    sum_slices      sums what a thread's neighbouring slices have, and finds the best one
    join_threads    the row's maximum and sum, and the sums up to a thread's slices
    choose_thread   in whose slices the uniform number's share of the sum is reached
    find_slice      which of them that is, and the share of it that is passed before the token
    multiply_slice  its scores, once more
    write_token     the token, by one warp

Sums of a multiplied slice differ by rounding from those of the first kernel, so the token is looked for at a share of
the slice's own sum. It exists whatever is rounded: the last token with a mass is taken where none reaches the share. A
greedy row, and one without a distribution, gets the first of its best tokens, by way of the best slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.arguments import beside
from tvm_sparse.core.phase import phase
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Workspace, ceildiv
from tvm_sparse.operators.head_draw.problem import HeadDraw
from tvm_sparse.operators.softmax_sample.definition import clamped
from tvm_sparse.operators.softmax_sample.reference import BELOW_ONE
from tvm_sparse.operators.softmax_topk.definition import is_greedy

from ..device.arithmetic import LOG2_E
from ..device.overlap import wait_then_start_consumer
from ..device.region import device_region
from ..device.selection import (
    FULL_WARP,
    MINUS_INFINITY,
    bits_value,
    join_key,
    key_index,
    key_value,
    lanes_max,
    lanes_min,
    order_bits,
    scan_lanes,
)
from ..device.state import Buffers, local, shared
from ..device.words import load_element, load_words, value_at
from ..softmax_sample.words import Drawing, read_uniform
from ..softmax_topk.ending import argument_on_gpu
from .best.sizes import VECTOR
from .scales import has_cap, head_capped, own_arguments
from .words import OutputLayer

WARP = 32
LOWEST = T.min_value("float32")
# Slices of a thread, and vectors of a token, whose loads are in flight together.
SLICES, VECTORS = 8, 4
# No slice, thread or lane.
NONE = 2**31 - 1

load_two = T.ptx.ld.global_.v2.u32


def slices_of(e: Any) -> Workspace:
    """The workspace with, by row and slice, ordered bits of the largest score and bits of the sum of exponentials."""
    return Workspace("slices", ("batch", e.list_tiles, 2), "uint32")


@dataclass
class State(Buffers):
    """What the phases share."""

    # The row, and the thread.
    row: Any
    t: Any
    # Slices as they are loaded.
    pair: Any = local("uint32", 2 * SLICES)
    # The best slice of a thread, then of a warp and of the row: ordered bits and number.
    key: Any = local("uint64")
    # Maximum and sum: of a thread's slices, then of the row.
    m: Any = local("float32")
    d: Any = local("float32")
    # What a thread's slices add to the sum, in units of a warp and then of the row; the sums up to its last slice and
    # before its first one; a maximum; scratch.
    own: Any = local("float32")
    up_to: Any = local("float32")
    before: Any = local("float32")
    top: Any = local("float32")
    other: Any = local("float32")
    # The sum that the token has to pass; the slice; the token's number in it.
    aim: Any = local("float32")
    tile: Any = local("int32")
    lane: Any = local("int32")
    # Vectors of tokens and of the hidden state.
    raw: Any = local("uint32", 2 * VECTORS * (VECTOR // 4))
    small: Any = local("uint16")
    # Shared: of each warp the best slice, the sum, the first thread that passes `aim`, and the last one with a mass.
    keys: Any = shared("uint64", lambda e: e.threads // WARP)
    sums: Any = shared("float32", lambda e: e.threads // WARP)
    picks: Any = shared("int32", lambda e: e.threads // WARP)
    lasts: Any = shared("int32", lambda e: e.threads // WARP)
    # Shared: the slice, and the share of its sum before the token.
    where: Any = shared("int32")
    rest: Any = shared("float32")
    # Shared: scores of the slice, by the warps that share a token.
    parts: Any = shared("float32", lambda e: e.tile_n * sharing(e))


def sharing(e: Any) -> int:
    """Warps that share a token of a slice."""
    return max(1, e.threads // WARP // e.tile_n)


def slices_each(e: Any) -> int:
    """Slices of a thread."""
    return ceildiv(e.list_tiles, e.threads)


def mass_of(s: State, largest: Any, mass: Any, factor: Any) -> Any:
    """The sum of a slice relative to the row's maximum, from its ordered bits and its own sum's."""
    return T.reinterpret("float32", mass) * T.exp2((T.max(bits_value(largest), LOWEST) - s.m[0]) * factor)


# fmt: off
@phase
def load_slices(e, /, io, s, first, tiles):
    """Load a few of a thread's slices, from the `first` on; those that there are not are empty. Writes: `pair`.
    Barriers: none.
    """
    for j in T.unroll(min(SLICES, slices_each(e))):
        s.pair[2 * j] = T.uint32(MINUS_INFINITY)
        s.pair[2 * j + 1] = T.uint32(0)
        if first + j < slices_each(e) and s.t * slices_each(e) + first + j < tiles:
            load_two(s.pair[2 * j], s.pair[2 * j + 1],
                     io.slices.ptr_to([s.row, s.t * slices_each(e) + first + j, 0]))


@phase
def sum_slices(e, /, io, s, tiles, factor):
    """Sum a thread's slices.

    Reads: `slices`.
    Writes: `m` and `d`, relative to it; `key`, of the best slice, the first of equals.
    Barriers: none.
    """
    s.key[0] = T.uint64(0)
    s.m[0] = LOWEST
    s.d[0] = T.float32(0)
    for i in T.serial(ceildiv(slices_each(e), SLICES), unroll=False):
        load_slices(e)(io, s, i * SLICES, tiles)
        for j in T.unroll(min(SLICES, slices_each(e))):
            s.key[0] = T.max(
                s.key[0], join_key(s.pair[2 * j], s.t * slices_each(e) + i * SLICES + j))
            s.top[0] = T.max(s.m[0], bits_value(s.pair[2 * j]))
            s.d[0] = s.d[0] * T.exp2((s.m[0] - s.top[0]) * factor)
            s.m[0] = s.top[0]
            s.d[0] = s.d[0] + mass_of(s, s.pair[2 * j], s.pair[2 * j + 1], factor)


@phase
def join_threads(e, /, s, factor):
    """Join what the threads have summed.

    Reads: `key`, `m`, `d`.
    Writes: `key`, of the row; `m` and `d`, of the row; `own`, `up_to` and `before` of the thread's slices; scratch
        `keys`, `sums`.
    Barriers: one, and shuffles.
    """
    s.top[0] = s.m[0]
    for b in T.unroll(5):
        s.key[0] = T.max(s.key[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.key[0], 1 << b, 32, 32))
        s.top[0] = T.max(s.top[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.top[0], 1 << b, 32, 32))
    s.own[0] = s.d[0] * T.exp2((s.m[0] - s.top[0]) * factor)
    s.up_to[0] = s.own[0]
    scan_lanes(s.t, s.up_to, s.other)
    s.other[0] = T.tvm_warp_shuffle_up(T.uint32(FULL_WARP), s.up_to[0], 1, 32, 32)
    s.before[0] = T.Select(s.t % WARP == 0, T.float32(0), s.other[0])
    if s.t % WARP == WARP - 1:
        s.keys[s.t // WARP] = s.key[0]
        s.sums[s.t // WARP] = s.up_to[0]
    T.cuda.cta_sync()
    # In every warp a lane has one of the warps.
    s.key[0] = T.uint64(0)
    s.d[0] = T.float32(0)
    if s.t % WARP < e.threads // WARP:
        s.key[0] = s.keys[s.t % WARP]
        s.d[0] = s.sums[s.t % WARP]
    s.other[0] = T.max(key_value(s.key[0]), LOWEST)
    for b in T.unroll(5):
        s.key[0] = T.max(s.key[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.key[0], 1 << b, 32, 32))
    s.m[0] = T.max(key_value(s.key[0]), LOWEST)
    s.d[0] = s.d[0] * T.exp2((s.other[0] - s.m[0]) * factor)
    scan_lanes(s.t, s.d, s.other)
    s.other[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.d[0], T.max(s.t // WARP - 1, 0), 32, 32)
    s.d[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.d[0], WARP - 1, 32, 32)
    s.other[0] = T.Select(s.t < WARP, T.float32(0), s.other[0])
    s.top[0] = T.exp2((s.top[0] - s.m[0]) * factor)
    s.own[0] = s.own[0] * s.top[0]
    s.up_to[0] = s.up_to[0] * s.top[0] + s.other[0]
    s.before[0] = s.before[0] * s.top[0] + s.other[0]


@phase
def choose_thread(e, /, s):
    """Find the thread whose slices reach `aim`: the first, or the last with a mass where by rounding none does.

    Reads: `own`, `up_to`, `aim`.
    Writes: `lane`, the thread; scratch `picks`, `lasts`.
    Barriers: one, and shuffles.
    """
    s.tile[0] = lanes_min(T.Select(T.And(s.own[0] > T.float32(0), s.up_to[0] > s.aim[0]), s.t, NONE))
    s.lane[0] = lanes_max(T.Select(s.own[0] > T.float32(0), s.t, 0))
    if s.t % WARP == 0:
        s.picks[s.t // WARP] = s.tile[0]
        s.lasts[s.t // WARP] = s.lane[0]
    T.cuda.cta_sync()
    s.tile[0] = NONE
    s.lane[0] = 0
    if s.t % WARP < e.threads // WARP:
        s.tile[0] = s.picks[s.t % WARP]
        s.lane[0] = s.lasts[s.t % WARP]
    s.lane[0] = T.min(lanes_min(s.tile[0]), lanes_max(s.lane[0]))


@phase
def find_slice(e, /, io, s, tiles, factor):
    """Find the slice that reaches `aim`, for the thread that has it.

    Reads: `slices`, `m`, `key`, `aim`, `before`.
    Writes: `where`, the best slice of the row where rounding leaves the thread none; `rest`; `before` is lost.
    Barriers: none.
    """
    s.tile[0] = T.Cast("int32", key_index(s.key[0]))
    # What a slice has, once one is found that reaches the aim.
    s.other[0] = T.float32(0)
    s.rest[0] = T.float32(0)
    for i in T.serial(ceildiv(slices_each(e), SLICES), unroll=False):
        load_slices(e)(io, s, i * SLICES, tiles)
        for j in T.unroll(min(SLICES, slices_each(e))):
            s.top[0] = mass_of(s, s.pair[2 * j], s.pair[2 * j + 1], factor)
            if s.top[0] > T.float32(0) and s.other[0] <= T.float32(0):
                s.tile[0] = s.t * slices_each(e) + i * SLICES + j
                s.rest[0] = (s.aim[0] - s.before[0]) / s.top[0]
                s.before[0] = s.before[0] + s.top[0]
                if s.before[0] > s.aim[0]:
                    s.other[0] = s.top[0]
    s.rest[0] = T.max(T.min(s.rest[0], T.float32(BELOW_ONE)), T.float32(0))
    s.where[0] = s.tile[0]


def multiply_slice(e: Any) -> Callable[..., Any]:
    """The scores of slice `tile`, by the first warp's lanes; the phase is (io, s).

    Reads: the hidden state, the embedding, the bias.
    Writes: `up_to`, a lane's score, -inf beyond the slice or the vocabulary; scratch `parts`.
    Barriers: one, of the thread block.
    """
    size = numpy_dtype(e.dtype).itemsize
    load = VECTOR if e.hidden * size % VECTOR == 0 else size  # bytes
    elements, held = load // size, ceildiv(load, 4)
    vectors, share = e.hidden // elements, sharing(e)
    each = ceildiv(e.tile_n * share, e.threads // WARP)  # tokens of a warp
    stride = WARP * share  # vectors from one of a lane to its next
    rounds = ceildiv(vectors, VECTORS * stride)

    @T.inline
    def load_round(io, s, token, first):
        """The next vectors of a token and of the hidden state; zeros beyond their ends."""
        for u in T.unroll(VECTORS):
            at = T.meta_var(first + u * stride)
            for v in T.unroll(2 * held):
                s.raw[u * 2 * held + v] = T.uint32(0)
            if at < vectors:
                load_words(load, s.raw, u * 2 * held, s.small, io.embedding.ptr_to([token, at * elements]))
                load_words(load, s.raw, u * 2 * held + held, s.small, io.hidden.ptr_to([s.row, at * elements]))

    @T.inline
    def phase(io, s):
        for i in T.unroll(each):
            task = T.meta_var(i * (e.threads // WARP) + s.t // WARP)
            if task < e.tile_n * share:
                token = T.meta_var(T.Cast("int64", T.min(s.tile[0] * e.tile_n + task // share, io.vocab - 1)))
                s.other[0] = T.float32(0)
                for r in T.serial(rounds, unroll=False):
                    load_round(io, s, token, r * (VECTORS * stride) + task % share * WARP + s.t % WARP)
                    for u in T.unroll(VECTORS):
                        for j in T.unroll(elements):
                            s.other[0] = s.other[0] + value_at(e.dtype, s.raw, u * 2 * held, j) * value_at(
                                e.dtype, s.raw, u * 2 * held + held, j)
                for b in T.unroll(5):
                    s.other[0] = s.other[0] + T.tvm_warp_shuffle_xor(
                        T.uint32(FULL_WARP), s.other[0], 1 << b, 32, 32)
                if s.t % WARP == 0:
                    s.parts[task] = s.other[0]
        T.cuda.cta_sync()
        if s.t < WARP:
            s.up_to[0] = T.float32("-inf")
            if s.t < e.tile_n and s.tile[0] * e.tile_n + s.t < io.vocab:
                s.up_to[0] = T.float32(0)
                for j in T.unroll(share):
                    s.up_to[0] = s.up_to[0] + s.parts[s.t * share + j]
                if has_cap(io):
                    s.up_to[0] = head_capped(io, s.up_to[0])
                if io.bias is not None:
                    s.up_to[0] = s.up_to[0] + load_element("float32", io.bias.ptr_to([s.tile[0] * e.tile_n + s.t]))

    return phase


@T.inline
def weigh_slice(s, factor):
    """Reads: `up_to`. Writes: `pair`, ordered bits of the largest score in all lanes; `before`, a lane's exponential
    relative to it, and `other`, its sum up to the lane. Barriers: shuffles, of one warp."""
    s.pair[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), order_bits(s.up_to[0]))
    # At least the lowest finite number: the difference of two infinities would be NaN.
    s.before[0] = T.exp2((s.up_to[0] - T.max(bits_value(s.pair[0]), LOWEST)) * factor)
    s.other[0] = s.before[0]
    scan_lanes(s.t, s.other, s.top)


@T.inline
def write_token(io, s, n, drawn, whole, factor):
    """The token and its log-probability, by one warp; `n` tokens are in a slice.

    Reads: `up_to`, `tile`, `rest`; `m` and `d` of the row. `drawn`: whether it is drawn, and not the best one; `whole`:
    whether the row has a distribution.
    Writes: the row's outputs; scratch.
    Barriers: shuffles.
    """
    weigh_slice(s, factor)
    s.aim[0] = s.rest[0] * T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.other[0], 31, 32, 32)
    if drawn:
        s.lane[0] = lanes_min(T.Select(T.And(s.before[0] > T.float32(0), s.other[0] > s.aim[0]), s.t, NONE))
        s.lane[0] = T.min(s.lane[0], lanes_max(T.Select(s.before[0] > T.float32(0), s.t, 0)))
    else:
        s.lane[0] = lanes_min(T.Select(order_bits(s.up_to[0]) == s.pair[0], s.t, n - 1))
    if s.t == s.lane[0]:
        io.tokens[s.row] = s.tile[0] * n + s.t
        if whole:
            io.logprobs[s.row] = T.min((s.up_to[0] - s.m[0]) * io.scale - T.log(s.d[0]), T.float32(0))
        else:
            io.logprobs[s.row] = T.float32("nan")


def draw_token(problem: OutputLayer, e: Any) -> Callable[..., Any]:
    """The kernel, called with (io), which has `slices`. `e` has what is static: `dtype`, `hidden`, `tile_n` tokens of a
    slice, `list_tiles` slices, `threads` of a thread block, `overlap`, and `dynamic`, see `tiles.sizes`."""
    assert isinstance(problem, HeadDraw)
    per_row = bool(problem.per_row)
    multiply = multiply_slice(e)

    @T.inline
    def of_row(io, s, d, tiles):
        factor: T.float32 = io.scale * T.float32(LOG2_E)
        sum_slices(e)(io, s, tiles, factor)
        join_threads(e)(s, factor)
        # False for NaN, and for a row of nothing above minus infinity.
        whole: T.bool = T.And(s.d[0] > T.float32(0), s.d[0] < T.infinity("float32"))
        drawn: T.bool = whole
        if per_row:
            drawn = T.And(whole, T.Not(is_greedy(argument_on_gpu(io, "temperature", s.row))))
        s.tile[0] = T.Cast("int32", key_index(s.key[0]))
        if drawn:
            s.aim[0] = clamped(d.uniform[0]) * s.d[0]
            choose_thread(e)(s)
            if s.t == s.lane[0]:
                find_slice(e)(io, s, tiles, factor)
            T.cuda.cta_sync()
            s.tile[0] = s.where[0]
        multiply(io, s)
        if s.t < WARP:
            write_token(io, s, e.tile_n, drawn, whole, factor)

    @T.inline
    def kernel(given):
        with device_region():
            row = T.cta_id([given.rows])
            t = T.thread_id([e.threads])
            s = T.meta_var(State.alloc(e, row=row, t=t))
            d = T.meta_var(Drawing.alloc(1))
            if e.overlap > 0:
                wait_then_start_consumer()
            io = T.meta_var(beside(own_arguments(given, row), {"seeded": problem.seeded}))
            read_uniform(io, row, d)
            if e.dynamic > 0:
                if t == 0:
                    io.tickets[row] = 0
            of_row(io, s, d, (io.vocab + (e.tile_n - 1)) // e.tile_n)

    return kernel
# fmt: on
