"""The first kernel of `tiles` with stages of whole rows: the warps of a block share a ring, which bulk copies fill.

    init_stages       the mbarriers
    ask_tile          a tile is asked for
    await_tile        until it is there
    bring_columns     a step of a warp's columns to registers

A tile of a vocabulary is one run of memory. One bulk copy brings it, whatever a row's length is: loads by row ask for
more than the row has where its ends are not those of cache lines, as of 1000 columns of 16 bits. The barrier at which
the warps' sums meet tells that all have read the tile; then the one `stages` later is asked for in its place.

Products, scores and sums are those of warps that share a tile (`product`).
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from ...device.arithmetic import LOG2_E
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.words import held_address
from .product import (
    Place,
    bring_states,
    finish_scores,
    join_sums,
    load_states,
    multiply_step,
    prefetch_tiles,
    take_tiles,
    write_parts,
)
from .ring import RingState, arrive_expecting, bulk_copy, bulk_copy_hinted, load_shared, next_stage, try_wait
from .space import VECTOR, Extents


# fmt: off
def init_stages(e: Extents) -> Callable[..., Any]:
    """Writes: `full`, `policy`, and the first stage's `slot`, `turn` and `asked_slot`. Barriers: of the thread block,
    at the end. The phase is (s, t)."""

    @T.inline
    def phase(s, t):
        if t == 0:
            for i in T.unroll(e.stages):
                T.ptx.mbarrier.init.shared__cta.b64(s.full.ptr_to([i]), T.uint32(1))
            T.ptx.fence.mbarrier_init.release.cluster()
        if e.evict_first > 0:
            T.ptx.createpolicy.fractional.L2__evict_first.b64(s.policy[0])
        s.slot[0] = 0
        s.turn[0] = T.uint32(0)
        s.asked_slot[0] = 0
        T.cuda.cta_sync()

    return phase


def ask_tile(e: Extents) -> Callable[..., Any]:
    """Ask for the next tile, if there is one; for one thread. The phase is (s).

    Reads: `asked`, `asked_slot`, which it moves on.
    Writes: the stage, by and by. Nothing may still be read of it.
    Barriers: none.
    """
    row = e.vectors * VECTOR

    @T.inline
    def phase(s):
        if s.asked[0] < s.end[0]:
            words = T.meta_var(T.min(s.words[0] - s.asked[0] * e.tile_n, e.tile_n))
            size = T.meta_var(T.Cast("uint32", words * row))
            full = T.meta_var(s.full.ptr_to([s.asked_slot[0]]))
            arrive_expecting(full, size)
            to = T.meta_var(s.ring.ptr_to([s.asked_slot[0] * (e.tile_n * row // 4)]))
            from_ = T.meta_var(s.base[0] + T.Cast("uint64", s.asked[0]) * T.uint64(e.tile_n * row))
            if e.evict_first > 0:
                bulk_copy_hinted(to, from_, size, full, s.policy[0])
            else:
                bulk_copy(to, from_, size, full)
            s.asked[0] = s.asked[0] + e.stride
            s.asked_slot[0] = T.Select(s.asked_slot[0] == e.stages - 1, 0, s.asked_slot[0] + 1)

    return phase


def await_tile() -> Callable[..., Any]:
    """Reads: `full`, `slot`, `turn`. Barriers: none. After: the tile is in its stage. The phase is (s)."""

    @T.inline
    def phase(s):
        s.done[0] = T.uint32(0)
        while s.done[0] == T.uint32(0):
            try_wait(s.done[0], s.full.ptr_to([s.slot[0]]), s.turn[0])

    return phase


def bring_columns(e: Extents) -> Callable[..., Any]:
    """A step of the warp's columns of a tile; the phase is (s, p, step).

    Reads: the stage.
    Writes: `hand`, zeros beyond the last column.
    Barriers: none.
    """
    even = e.padded_vectors == e.vectors

    @T.inline
    def phase(s, p, step):
        for n in T.unroll(e.a_fragments * 2):
            for h in T.unroll(2):
                i = n * 8 + h * 4
                row = T.meta_var(s.slot[0] * e.tile_n + n * 8 + p.group)
                vector = T.meta_var((p.warp * e.steps + step) * 8 + h * 4 + p.member)
                # Behind a row is the next one, or another tile on its way.
                there = T.meta_var(vector if even else T.min(vector, e.vectors - 1))
                load_shared(
                    s.hand[i], s.hand[i + 1], s.hand[i + 2], s.hand[i + 3],
                    s.ring.ptr_to([(row * e.vectors + there) * 4]))
                if not even:
                    if vector >= e.vectors:
                        for v in T.unroll(4):
                            s.hand[i + v] = T.uint32(0)

    return phase


def whole_product(e: Extents) -> Callable[..., Any]:
    """The kernel, called with (io, scores, tops, sums); the last two are None where they are not wanted."""
    do = SimpleNamespace(
        init_stages=init_stages(e),
        prefetch_tiles=prefetch_tiles(e),
        take_tiles=take_tiles(e),
        ask_tile=ask_tile(e),
        load_states=load_states(e),
        await_tile=await_tile(),
        bring_states=bring_states(e),
        bring_columns=bring_columns(e),
        multiply_step=multiply_step(e),
        next_stage=next_stage(e),
        write_parts=write_parts(e),
        finish_scores=finish_scores(e),
        join_sums=join_sums(e),
    )

    @T.inline
    def kernel(io, scores, tops, sums):
        with device_region():
            strips = T.meta_var((io.beam + (e.tile_m - 1)) // e.tile_m)
            block, y = T.cta_id([e.blocks, io.lists * strips])
            t = T.thread_id([e.product_threads])
            p = T.meta_var(Place(t, e.reduce_warps))
            s = T.meta_var(RingState.alloc(e, e.kept_bytes, index=y // strips, top=y % strips * e.tile_m))
            factor: T.float32 = io.scale * T.float32(LOG2_E) if e.k > 0 else T.float32(0)
            s.base[0] = held_address("u64", io.embedding.ptr_to([0, 0]))
            do.init_stages(s, t)
            if e.prefetch > 0:
                do.prefetch_tiles(io, p, block)
            if e.overlap > 0:
                wait_then_start_consumer()
            do.take_tiles(io, s, p, block)
            s.asked[0] = s.tile[0]
            if t == 0:
                for _ in T.serial(e.stages):
                    do.ask_tile(s)
            do.load_states(io, s, p)
            while s.tile[0] < s.end[0]:
                for i in T.unroll(e.a_fragments * e.b_fragments * 4):
                    s.sums[i] = T.float32(0)
                do.await_tile(s)
                for step in T.unroll(e.steps):
                    do.bring_columns(s, p, step)
                    if e.staged > 0:
                        do.bring_states(s, p, step)
                    do.multiply_step(s, step)
                half: T.int32 = s.tile[0] // e.stride % 2
                do.write_parts(s, p, half)
                # All threads have read the stage: the barrier in `write_parts`.
                if t == 0:
                    do.ask_tile(s)
                do.next_stage(s)
                do.finish_scores(io, s, p, half, scores, tops, factor)
                s.tile[0] = s.tile[0] + e.stride
            if e.summed:
                do.join_sums(io, s, p, block, sums, factor)

    return kernel
# fmt: on
