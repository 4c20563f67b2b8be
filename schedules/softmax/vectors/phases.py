"""The phases of the vector kernels, in the order in which a kernel goes through them.

A phase is a factory: it takes the kernel's `Extents` and returns an inline over a thread's `RowState` and what else it
reads or writes. Its head says what is true after it. Equation 4 of Milakov & Gimelshein joins two pairs (m, d) of
disjoint sets of elements: the larger maximum, and the sum of both sums after each was rescaled to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.arithmetic import LOG2_E
from ...device.cluster import cluster_barrier, cluster_wait, peer_store
from .extents import Extents
from .tiles import copy_part, fence_tile, load_tile, result, store_tile, take_tile, value

Phase = Callable[..., Any]

# Maxima begin with the least finite number: with minus infinity, the first difference of a masked row would be NaN.
# Those of logsumexp are kept at most at the largest one, so that plus infinity makes the sum infinite and not NaN.
LOWEST, HIGHEST = T.min_value("float32"), T.max_value("float32")


def scaled(difference: Any) -> Any:
    """An exponent of e as one of 2, which is what the hardware computes."""
    return difference * T.float32(LOG2_E)


# fmt: off
# ---- which elements are this thread's ------------------------------------------------------------


def locate(ext: Extents) -> Phase:
    """Reads: the ragged elements of the row. Writes: `first`, `count`, `edge`, `edge_at`. Barriers: none.

    After: the part's vectors are known, and the ragged elements of the row are dealt out, one a thread, to threads of
    the first part: those before the first whole vector to threads 0, 1..., those after the last to `width`...
    """
    vocab, width = ext.vocab, ext.width

    @T.inline
    def phase(s, logits):
        # Of rows that begin with a whole vector, as all do where `vocab` is a multiple of `width`.
        before: T.int32 = 0
        s.first = s.row * T.int64(vocab // width) + s.part * ext.part
        s.edge_at = -1
        if ext.ragged:
            before = T.Cast(
                "int32", T.int64(width - 1) - (s.row * T.int64(vocab) + T.int64(width - 1)) % T.int64(width))
            before = T.min(before, vocab)
            s.first = (s.row * T.int64(vocab) + T.int64(width - 1)) // T.int64(width) + s.part * ext.part
            s.count = T.min(T.max((vocab - before) // width - s.part * ext.part, 0), ext.part)
            if s.part == 0:
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

    return phase


# ---- the pair of this thread's elements ----------------------------------------------------------


def begin_pair(ext: Extents) -> Phase:
    """Reads: `edge`. Writes: `m`, `d`. Barriers: none.

    After: `m` covers the ragged element, whose exponential is added last (`add_edge`), when `m` is final; `d` is 0.
    """

    @T.inline
    def phase(s):
        s.m = T.max(LOWEST, s.edge)
        if ext.algorithm == "naive":
            s.m = T.float32(0)
        if not ext.softmax:
            s.m = T.min(s.m, HIGHEST)
        s.d = T.float32(0)

    return phase


def raise_maximum(ext: Extents) -> Phase:
    """Reads: `raw`. Writes: `m`, `d`, `top`. Barriers: none. After: `m` covers `raw`, and `d` is relative to it."""

    @T.inline
    def phase(s):
        s.top = s.m
        for e in T.unroll(ext.vectors * ext.width):
            s.top = T.max(s.top, value(ext, s.raw, e))
        if not ext.softmax:
            s.top = T.min(s.top, HIGHEST)
        if s.top > s.m:
            s.d = s.d * T.exp2(scaled(s.m - s.top))
            s.m = s.top

    return phase


def absorb(ext: Extents) -> Phase:
    """Reads: `raw`. Writes: `m`, `d`, `top`, `power`; `raw` where it is to hold exponentials. Barriers: none.

    After: (m, d) covers the elements of `raw`: the online algorithm, rescaled once for all of them. The others have
    their maximum before.
    """
    raised, fenced = raise_maximum(ext), fence_tile(ext)

    @T.inline
    def phase(s, log):
        if ext.algorithm == "online":
            raised(s)
            fenced(s)
        for e in T.unroll(ext.vectors * ext.width):
            # Without the steps that exp2 takes for subnormal results, which add nothing to a sum of at least 1.
            T.ptx.ex2.approx.ftz.f32(s.power, scaled(value(ext, s.raw, e) - s.m))
            s.d = s.d + s.power
            if ext.in_place:
                s.raw[e] = T.Select(log != 0, s.raw[e], s.power)

    return phase


def accumulate(ext: Extents) -> Phase:
    """Reads: the part's vectors. Writes: `m`, `d`, `raw`, `stage`, `top`, `power`. Barriers: none.

    After: (m, d) covers this thread's vectors. They are where the kernel keeps them: in `raw`, in `stage`, or nowhere.
    """
    return {"registers": _accumulate_held, "shared": _accumulate_staged, "nowhere": _accumulate_streamed}[ext.keep](ext)


def _accumulate_held(ext: Extents) -> Phase:
    load, absorbed = load_tile(ext), absorb(ext)

    @T.inline
    def phase(s, words, block, log):
        load(s, words, 0, ext.certain)
        absorbed(s, log)

    return phase


def _accumulate_staged(ext: Extents) -> Phase:
    copied, take, absorbed = copy_part(ext), take_tile(ext), absorb(ext)

    @T.inline
    def phase(s, words, block, log):
        copied(s, words, block.stage)
        for i in T.serial(ext.full_tiles + ext.other_tiles):
            take(s, block.stage, i * ext.tile)
            absorbed(s, log)

    return phase


def _accumulate_streamed(ext: Extents) -> Phase:
    load, raised, absorbed = load_tile(ext), raise_maximum(ext), absorb(ext)

    @T.inline
    def phase(s, words, block, log):
        if ext.algorithm == "safe":
            # The maximum of this thread's own elements; those of the row's threads are joined with their sums.
            for i in T.serial(ext.full_tiles):
                load(s, words, i * ext.tile, ext.vectors)
                raised(s)
            for i in T.serial(ext.other_tiles):
                load(s, words, (ext.full_tiles + i) * ext.tile, 0)
                raised(s)
        for i in T.serial(ext.full_tiles):
            load(s, words, i * ext.tile, ext.vectors)
            absorbed(s, log)
        for i in T.serial(ext.other_tiles):
            load(s, words, (ext.full_tiles + i) * ext.tile, 0)
            absorbed(s, log)

    return phase


def add_edge(ext: Extents) -> Phase:
    """Reads: `edge`, `m`. Writes: `d`, `power`. Barriers: none. After: (m, d) covers all elements of this thread."""

    @T.inline
    def phase(s):
        if ext.ragged:
            T.ptx.ex2.approx.ftz.f32(s.power, scaled(s.edge - s.m))
            s.d = s.d + s.power

    return phase


# ---- the row's pair ------------------------------------------------------------------------------


def join_warp() -> Phase:
    """Reads: (m, d) of the warp's threads. Writes: `top`, `d`. Barriers: shuffles of the whole warp.

    After: (top, d) is the warp's pair, in all of its threads: the maximum first, then every sum rescaled to it.
    """

    @T.inline
    def phase(s):
        s.top = T.cuda.warp_max(s.m)
        s.d = T.cuda.warp_sum(s.d * T.exp2(scaled(s.m - s.top)))

    return phase


def join_block(ext: Extents) -> Phase:
    """Reads: (top, d) of the block's warps. Writes: `top`, `d`, `pair_m`, `pair_d`. Barriers: one of the block.

    After: (top, d) is the row's pair, in all threads of the block.
    """
    joined = _join_pairs(ext)

    @T.inline
    def phase(s, block):
        if s.t % 32 == 0:
            block.pair_m[s.t // 32] = s.top
            block.pair_d[s.t // 32] = s.d
        T.cuda.cta_sync()
        joined(s, block)

    return phase


def join_cluster(ext: Extents) -> Phase:
    """Reads: (top, d) of the cluster's warps. Writes: `top`, `d`; `pair_m`, `pair_d` of every block of the cluster.

    Barriers: two of the cluster. The first one's arrival is at the kernel's start (`kernel.main`): a block has to have
    begun before another may write to its shared memory. After: (top, d) is the row's pair, in all of its threads.
    """
    joined = _join_pairs(ext)
    put = peer_store("put_float", "float")

    @T.inline
    def phase(s, block):
        cluster_wait()
        # A warp's lanes write its pair to one block each.
        if s.t % 32 < ext.cluster:
            put(block.pair_m.ptr_to([s.part * ext.warps + s.t // 32]), s.t % 32, s.top)
            put(block.pair_d.ptr_to([s.part * ext.warps + s.t // 32]), s.t % 32, s.d)
        cluster_barrier()
        joined(s, block)

    return phase


def _join_pairs(ext: Extents) -> Phase:
    """Reads: `pair_m`, `pair_d`. Writes: `top`, `d`. Barriers: shuffles. Every warp joins all pairs for itself.

    Where the elements stay in registers, `m` is kept; elsewhere nobody reads it again, and its register is used.
    """
    pairs = ext.pairs

    @T.inline
    def phase(s, block):
        own: T.float32 = s.m
        s.m = LOWEST
        for i in T.unroll(ceildiv(pairs, 32)):
            if i * 32 + s.t % 32 < pairs:
                s.m = T.max(s.m, block.pair_m[i * 32 + s.t % 32])
        s.top = T.cuda.warp_max(s.m)
        if ext.in_place:
            s.m = own
        s.d = T.float32(0)
        for i in T.unroll(ceildiv(pairs, 32)):
            if i * 32 + s.t % 32 < pairs:
                s.d = s.d + block.pair_d[i * 32 + s.t % 32] * T.exp2(
                    scaled(block.pair_m[i * 32 + s.t % 32] - s.top))
        s.d = T.cuda.warp_sum(s.d)

    return phase


# ---- results -------------------------------------------------------------------------------------


def normalise(ext: Extents) -> Phase:
    """Reads: (top, d), the row's pair, and `m`, this thread's. Writes: `d`, `scale`, `shift`, `offset`. Barriers: none.

    After: `d` is the logarithm of the row's sum for log-probabilities, else its reciprocal. Exponentials in registers
    are relative to `m`, which `scale` makes good.
    """

    @T.inline
    def phase(s, log):
        if log != 0:
            s.d = T.log(s.d)
            if ext.in_place:
                s.shift = s.top
                s.scale = T.float32(1)
                s.offset = -s.d
        else:
            s.d = T.float32(1) / s.d
            if ext.in_place:
                s.shift = T.float32(0)
                s.scale = T.exp2(scaled(s.m - s.top)) * s.d
                s.offset = T.float32(0)

    return phase


def write(ext: Extents) -> Phase:
    """Reads: the part's vectors from where they are, and what `normalise` wrote. Writes: their probabilities.

    Barriers: none.
    """
    return {"registers": _write_held, "shared": _write_staged, "nowhere": _write_streamed}[ext.keep](ext)


def _write_held(ext: Extents) -> Phase:
    fenced, store = fence_tile(ext), store_tile(ext)

    @T.inline
    def phase(s, views, block, log):
        fenced(s)
        store(s, views.elements, 0, ext.certain, log)

    return phase


def _write_staged(ext: Extents) -> Phase:
    take, store = take_tile(ext), store_tile(ext)

    @T.inline
    def phase(s, views, block, log):
        for i in T.serial(ext.full_tiles + ext.other_tiles):
            take(s, block.stage, i * ext.tile)
            store(s, views.elements, i * ext.tile, 0, log)

    return phase


def _write_streamed(ext: Extents) -> Phase:
    load, store = load_tile(ext), store_tile(ext)

    @T.inline
    def phase(s, views, block, log):
        # Backwards: what was read last is likeliest to be in a cache.
        for i in T.serial(ext.other_tiles):
            load(s, views.words, (ext.full_tiles + i) * ext.tile, 0)
            store(s, views.elements, (ext.full_tiles + i) * ext.tile, 0, log)
        for i in T.serial(ext.full_tiles):
            load(s, views.words, (ext.full_tiles - 1 - i) * ext.tile, ext.vectors)
            store(s, views.elements, (ext.full_tiles - 1 - i) * ext.tile, ext.vectors, log)

    return phase


def write_edge(ext: Extents) -> Phase:
    """Reads: `edge`, and what `normalise` wrote. Writes: the probability of the ragged element. Barriers: none."""
    computed = result()

    @T.inline
    def phase(s, out, log):
        if ext.ragged:
            if s.edge_at >= 0:
                if log != 0:
                    computed(s, s.edge, True)
                else:
                    computed(s, s.edge, False)
                out[s.row, s.edge_at] = T.Cast(ext.dtype, s.power)

    return phase


def write_value() -> Phase:
    """Reads: (top, d), the row's pair. Writes: the row's logsumexp, by one thread. Barriers: none."""

    @T.inline
    def phase(s, out):
        if s.part == 0 and s.t == 0:
            out[s.row] = s.top + T.log(s.d)

    return phase
# fmt: on
