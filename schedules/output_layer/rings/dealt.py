"""The first kernel of `rings` where all tiles are dealt out: a thread block has one ring, of tiles of whole rows.

    copy_tile       a bulk copy of a tile
    ask_tile        the next tile is requested

The other phases are those of `tiles.ring` and `tiles.product`; with `dynamic`, those of `taken`.
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.arithmetic import LOG2_E
from ...device.mbarriers import arrive_expecting
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.words import held_address
from ..tiles.product import (
    Place,
    bring_scales,
    bring_states,
    end_step,
    finish_scores,
    join_tiles,
    load_states,
    multiply_step,
    own_factors,
    prefetch_tiles,
    take_tiles,
    write_parts,
)
from ..tiles.ring import RingState, await_stage, begin_ring, bring_words, copy_words, init_ring, next_asked, next_stage


# fmt: off
@phase
def copy_tile(e, /, s):
    """Have the tile `asked` brought to a stage, for one thread.

    Reads: `asked`, `asked_slot`.
    Writes: `ring`, by and by.
    Barriers: none. One has to come before: nothing may still be read of the stage that the copy overwrites.
    """
    words = T.meta_var(T.min(s.words[0] - s.asked[0] * e.tile_n, e.tile_n))
    size = T.meta_var(T.Cast("uint32", words * e.word_row))
    full = T.meta_var(s.full.ptr_to([s.asked_slot[0]]))
    arrive_expecting(full, size)
    to = T.meta_var(s.ring.ptr_to([s.asked_slot[0] * (e.tile_bytes // 4)]))
    from_ = T.meta_var(s.base[0] + T.Cast("uint64", s.asked[0]) * T.uint64(e.tile_bytes))
    copy_words(e, s, s.asked[0], to, from_, size, full)


@phase
def ask_tile(e, /, s):
    """Ask for the next tile, if there is one, for one thread.

    Reads: `asked`. Writes: that, moved on; `ring`, by and by. Barriers: those of `copy_tile`.
    """
    if s.asked[0] < s.end[0]:
        copy_tile(e)(s)
        s.asked[0] = s.asked[0] + e.stride
        next_asked(e, s)


@phase
def multiply(e, /, io, s, p):
    """The products of the tile in hand."""
    bring_scales(e)(io, s, p)
    for i in T.unroll(e.sums_each):
        s.sums[i] = T.float32(0)
    await_stage(e)(s, p)
    for step in T.unroll(e.steps):
        bring_words(e)(s, p, 0, step)
        bring_states(e)(s, p, step)
        multiply_step(e)(s, step)
        end_step(e)(io, s, p, step)


@phase
def product(e, /, io, scores, tops, sums):
    """The kernel."""
    with device_region():
        strips = T.meta_var((io.beam + (e.tile_m - 1)) // e.tile_m)
        block, y = T.cta_id([e.blocks, io.lists * strips])
        t = T.thread_id([e.product_threads])
        p = T.meta_var(Place(t, e.reduce_warps))
        s = T.meta_var(RingState.alloc(e, e.kept_bytes, index=y // strips, top=y % strips * e.tile_m))
        factor: T.float32 = io.scale * T.float32(LOG2_E)
        s.base[0] = held_address("u64", io.embedding.ptr_to([0, 0]))
        init_ring(e)(s, p)
        if e.prefetch > 0:
            prefetch_tiles(e)(io, s, p, block)
        wait_then_start_consumer()
        factors = T.meta_var(own_factors(e, io, s, p, factor))
        take_tiles(e)(io, s, p, block)
        begin_ring(e)(s)
        if t == 0:
            for _ in T.serial(e.stages):
                ask_tile(e)(s)
        load_states(e)(io, s, p)
        while s.tile[0] < s.end[0]:
            multiply(e)(io, s, p)
            half: T.int32 = s.tile[0] // e.stride % 2
            write_parts(e)(s, p, half)
            # All threads have read the stage: the barrier in `write_parts`.
            if t == 0:
                ask_tile(e)(s)
            next_stage(e)(s)
            finish_scores(e)(io, s, p, half, scores, tops, factors)
            s.tile[0] = s.tile[0] + e.stride
        join_tiles(e)(io, s, p, block, sums, factors)
# fmt: on
