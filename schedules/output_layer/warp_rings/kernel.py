"""The first kernel of `warp_rings`: each warp has a ring of parts of rows.

    begin_asking    which tokens come first
    ask             requests a stage of the ring

The other phases are those of `tiles.ring` and `tiles.product`.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program

from ...device.arithmetic import LOG2_E
from ...device.mbarriers import arrive_expecting
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.words import held_address
from ..lists import find_word, load_name, named_word
from ..tiles import program as tiles
from ..tiles.product import (
    Place,
    bring_scales,
    bring_states,
    end_step,
    finish_tile,
    join_tiles,
    load_states,
    multiply_step,
    own_factors,
    prefetch_tiles,
    take_tiles,
)
from ..tiles.ring import (
    RingState,
    await_stage,
    begin_ring,
    bring_words,
    copy_words,
    init_ring,
    next_asked,
    next_stage,
    stage_at,
)
from ..tiles.sizes import STEP, Extents
from ..words import OutputLayer
from .space import extents


# fmt: off
def asked_position(e: Extents, s: Any, p: Place, tile: Any) -> Any:
    """The position of the token of a tile that this lane requests: the list's last one beyond its end."""
    return T.max(T.min(tile * e.tile_n + p.lane % e.tile_n, s.words[0] - 1), 0)


@phase
def begin_asking(e, /, io, s, p):
    """Reads: `tile`; the list. Writes: what `begin_ring` does; `word` and `later`. Barriers: none."""
    begin_ring(e)(s)
    find_word(e)(io, s.index, asked_position(e, s, p, s.tile[0]), s.word)
    load_name(e)(io, s.index, asked_position(e, s, p, s.tile[0] + e.stride), s.later)


@phase
def ask(e, /, io, s, p):
    """Request the next stage, if there is one.

    Reads: `asked`, `part`, `word`, `later`.
    Writes: those, for the stage after; `ring`, asynchronously.
    Barriers: of the warp, before the copies: nothing may still be read of the stage that they overwrite.
    """
    most, row = T.meta_var(e.depth * STEP), T.meta_var(e.word_row)
    if s.asked[0] < s.end[0]:
        column: T.int32 = (p.warp * e.parts + s.part[0]) * most
        # The last part of a row may be shorter, or empty.
        size = T.meta_var(
            T.Cast("uint32", T.max(T.min(row - column, most), 0)) if e.uneven else T.uint32(most))
        stage = T.meta_var(stage_at(e, p, s.asked_slot[0]))
        if p.lane == 0:
            arrive_expecting(s.full.ptr_to([stage]), size * T.uint32(e.tile_n))
        T.cuda.warp_sync()
        if p.lane < e.tile_n and (not e.uneven or column < row):
            from_ = T.meta_var(
                s.base[0] + T.Cast("uint64", s.word[0]) * T.uint64(row)
                + T.Cast("uint64", column))
            to = T.meta_var(s.ring.ptr_to([(stage * e.tile_n + p.lane) * (e.ring_pitch // 4)]))
            copy_words(e, s, s.asked[0], to, from_, size, s.full.ptr_to([stage]))
        next_asked(e, s)
        s.part[0] = s.part[0] + 1
        if s.part[0] == e.parts:
            s.part[0] = 0
            s.asked[0] = s.asked[0] + e.stride
            # `later` was loaded a tile ago. The value loaded here has not arrived; a comparison would wait for it.
            s.word[0] = named_word(e, io, asked_position(e, s, p, s.asked[0]), s.later[0])
            load_name(e)(io, s.index, asked_position(e, s, p, s.asked[0] + e.stride), s.later)


def product(e: Extents) -> Phase:
    """The kernel, called with (io, scores, tops, sums); the last two are None where they are not wanted."""
    # Hidden states in registers are known by the number of the step.
    loop = T.unroll if e.register_steps else T.serial

    @T.inline
    def multiply(io, s, p):
        """The products of a tile, a stage after the other."""
        bring_scales(e)(io, s, p)
        for i in T.unroll(e.sums_each):
            s.sums[i] = T.float32(0)
        for part in loop(e.parts):
            await_stage(e)(s, p)
            for step in T.unroll(e.stage_steps):
                bring_words(e)(s, p, part, step)
                bring_states(e)(s, p, part * e.stage_steps + step)
                multiply_step(e)(s, part * e.stage_steps + step)
                end_step(e)(io, s, p, part * e.stage_steps + step)
            # All lanes have read the stage: the barrier in `ask`.
            ask(e)(io, s, p)
            next_stage(e)(s)

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
            init_ring(e)(s, p)
            if e.prefetch > 0:
                prefetch_tiles(e)(io, s, p, block)
            if e.overlap > 0:
                wait_then_start_consumer()
            factors = T.meta_var(own_factors(e, io, s, p, factor))
            take_tiles(e)(io, s, p, block)
            begin_asking(e)(io, s, p)
            for _ in T.serial(e.stages):
                ask(e)(io, s, p)
            load_states(e)(io, s, p)
            while s.tile[0] < s.end[0]:
                multiply(io, s, p)
                finish_tile(e)(io, s, p, scores, tops, factors)
                s.tile[0] = s.tile[0] + e.stride
            join_tiles(e)(io, s, p, block, sums, factors)

    return kernel
# fmt: on


def program(problem: OutputLayer, decisions: Decisions) -> Program:
    """The program of a point."""
    return tiles.program(problem, extents(problem, decisions), product)
