"""The first kernel of `tiles` with `stages`: a warp, or a block, has a ring of shared memory, which bulk copies fill.

    init_ring       the ring's mbarriers
    begin_asking    which words come first
    ask             a stage of the ring is asked for; `ask_tile`, where stages have whole rows
    await_stage     until it is there
    bring_words     a step of its words to registers
    next_stage      the ring turns

A stage is `depth` cache lines of each row of a tile. Every lane asks for its row's part by one bulk copy, whose bytes
the stage's mbarrier counts. No register waits for memory, rows are read in runs as long as a stage, wherever they
start, and what lies between them in shared memory keeps lanes off each other's banks. A warp that has multiplied a
stage asks for the one `stages` later, be it of another tile: so the warps meet at no barrier, and what is on its way
depends on nothing but shared memory.

With a `depth` of 0 a stage is a tile of whole rows, and the warps that share it have one ring. A tile of a vocabulary
is one run of memory, which one bulk copy brings, whatever a row's length is: loads by row ask for more than the row has
where its ends are not those of cache lines, as of 1000 columns of 16 bits. The barrier at which the warps' sums meet
tells that all have read the tile; then the one `stages` later is asked for in its place.

Products, scores and sums are those of `product`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from ...device.arithmetic import LOG2_E
from ...device.mbarriers import arrive_expecting, await_phase, bulk_copy
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.state import local, pooled, shared
from ...device.words import held_address
from .product import (
    Place,
    State,
    bring_states,
    finish_alone,
    finish_scores,
    join_sums,
    join_warps,
    load_states,
    multiply_step,
    prefetch_tiles,
    row_of_group,
    stays_cached,
    take_tiles,
    vector_of,
    write_parts,
)
from .space import STEP, VECTOR, Extents
from .words import find_word, load_name, named_word

bulk_copy_hinted = bulk_copy.L2__cache_hint
load_shared = T.ptx.ld.shared.v4.u32


@dataclass
class RingState(State):
    """What the phases share, beside what all products do.

    Attributes
    ----------
    ring, full
        Shared: the stages of all rings, each a part of each row of a tile, or a tile; and their mbarriers.
    slot, turn
        The stage in use, and the parity of the phase that its mbarrier is in.
    asked, part, asked_slot
        The tile that is asked for next, which part of its rows, and the stage that it goes to.
    word, later
        The word whose row this lane asks for, and the candidate of the tile after it.
    done
        Whether a phase is over.
    policy
        Of the L2 cache, for words that leave it first.
    """

    slot: Any = local("int32")
    turn: Any = local("uint32")
    asked: Any = local("int32")
    part: Any = local("int32")
    asked_slot: Any = local("int32")
    later: Any = local("int32")
    done: Any = local("uint32")
    policy: Any = local("uint64")
    full: Any = shared("uint64", lambda e: e.rings * e.stages)
    ring: Any = pooled("uint32", lambda e: e.ring_bytes // 4, lambda e: e.ring_at // 4)


def stage_at(e: Extents, p: Place, slot: Any) -> Any:
    """The number of a stage of a thread's ring."""
    return slot if e.whole else p.t // 32 * e.stages + slot


# fmt: off
def init_ring(e: Extents) -> Callable[..., Any]:
    """Reads: nothing. Writes: `full` and `policy`. Barriers: of those that share the ring, at the end. The phase is (s,
    p)."""

    @T.inline
    def phase(s, p):
        if (p.t if e.whole else p.lane) == 0:
            for i in T.unroll(e.stages):
                T.ptx.mbarrier.init.shared__cta.b64(s.full.ptr_to([stage_at(e, p, i)]), T.uint32(1))
            T.ptx.fence.mbarrier_init.release.cluster()
        if e.evict_first > 0:
            T.ptx.createpolicy.fractional.L2__evict_first.b64(s.policy[0])
        if e.whole:
            T.cuda.cta_sync()
        else:
            T.cuda.warp_sync()

    return phase


@T.inline
def copy_words(e, s, tile, to, from_, size, full):
    """A bulk copy of words of a tile."""
    if e.cached > 0:
        if stays_cached(e, tile):
            bulk_copy(to, from_, size, full)
        else:
            bulk_copy_hinted(to, from_, size, full, s.policy[0])
    elif e.evict_first > 0:
        bulk_copy_hinted(to, from_, size, full, s.policy[0])
    else:
        bulk_copy(to, from_, size, full)


def asked_position(e: Extents, s: Any, p: Place, tile: Any) -> Any:
    """The position of the word of a tile that this lane asks for. Beyond the list's words, and in tiles beyond the
    last, there is one, too."""
    return T.max(T.min(tile * e.tile_n + p.lane % e.tile_n, s.words[0] - 1), 0)


def begin_asking(e: Extents) -> Callable[..., Any]:
    """Reads: `tile`; the list. Writes: `asked` and what belongs to it; of parts of rows also `word` and `later`.
    Barriers: none."""
    find, load = find_word(e), load_name(e)

    @T.inline
    def phase(io, s, p):
        s.asked[0] = s.tile[0]
        s.part[0] = 0
        s.slot[0] = 0
        s.turn[0] = T.uint32(0)
        s.asked_slot[0] = 0
        if not e.whole:
            find(io, s.index, asked_position(e, s, p, s.tile[0]), s.word)
            load(io, s.index, asked_position(e, s, p, s.tile[0] + e.stride), s.later)

    return phase


def ask(e: Extents) -> Callable[..., Any]:
    """Ask for the next stage, if there is one; the phase is (io, s, p).

    Reads: `asked`, `part`, `word`, `later`.
    Writes: those, moved on; `ring`, by and by.
    Barriers: of the warp, before the copies: nothing may still be read of the stage that they overwrite.
    """
    load = load_name(e)
    most, row = e.depth * STEP, e.vectors * VECTOR

    @T.inline
    def phase(io, s, p):
        if s.asked[0] < s.end[0]:
            column: T.int32 = (p.warp * e.parts + s.part[0]) * most
            # Of the last part of a row there may be less, or nothing.
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
            s.asked_slot[0] = T.Select(s.asked_slot[0] == e.stages - 1, 0, s.asked_slot[0] + 1)
            s.part[0] = s.part[0] + 1
            if s.part[0] == e.parts:
                s.part[0] = 0
                s.asked[0] = s.asked[0] + e.stride
                # Loaded a tile ago. What is loaded now nobody may use here, not even to see whether it is a word.
                s.word[0] = named_word(e, io, asked_position(e, s, p, s.asked[0]), s.later[0])
                load(io, s.index, asked_position(e, s, p, s.asked[0] + e.stride), s.later)

    return phase


def copy_tile(e: Extents) -> Callable[..., Any]:
    """Have the tile `asked` brought to a stage; the phase is (s), for one thread.

    Reads: `asked`, `asked_slot`.
    Writes: `ring`, by and by.
    Barriers: none. One has to come before: nothing may still be read of the stage that the copy overwrites.
    """
    row = e.vectors * VECTOR

    @T.inline
    def phase(s):
        words = T.meta_var(T.min(s.words[0] - s.asked[0] * e.tile_n, e.tile_n))
        size = T.meta_var(T.Cast("uint32", words * row))
        full = T.meta_var(s.full.ptr_to([s.asked_slot[0]]))
        arrive_expecting(full, size)
        to = T.meta_var(s.ring.ptr_to([s.asked_slot[0] * (e.tile_bytes // 4)]))
        from_ = T.meta_var(s.base[0] + T.Cast("uint64", s.asked[0]) * T.uint64(e.tile_bytes))
        copy_words(e, s, s.asked[0], to, from_, size, full)

    return phase


def ask_tile(e: Extents) -> Callable[..., Any]:
    """`ask` where stages have whole rows, for one thread.

    Reads: `asked`.
    Writes: that, moved on; `ring`, by and by.
    Barriers: as of `copy_tile`.
    """
    copy = copy_tile(e)

    @T.inline
    def phase(io, s, p):
        if s.asked[0] < s.end[0]:
            copy(s)
            s.asked[0] = s.asked[0] + e.stride
            s.asked_slot[0] = T.Select(s.asked_slot[0] == e.stages - 1, 0, s.asked_slot[0] + 1)

    return phase


def await_stage(e: Extents) -> Callable[..., Any]:
    """Reads: `full`, `slot`, `turn`. Barriers: none. After: the stage's words are in `ring`. The phase is (s, p)."""

    @T.inline
    def phase(s, p):
        await_phase(s.done, s.full.ptr_to([stage_at(e, p, s.slot[0])]), s.turn[0])

    return phase


def bring_words(e: Extents) -> Callable[..., Any]:
    """A step of a stage; the phase is (s, p, part, step).

    Reads: `ring`.
    Writes: `hand`, zeros beyond the last column.
    Barriers: none.
    """

    def vector(p: Place, part: Any, step: Any, h: Any) -> Any:
        """Of a row."""
        return vector_of(e, p, part * e.stage_steps + step, h)

    def of_stage(p: Place, part: Any, step: Any, h: Any) -> Any:
        """The same of a row's part in a stage. Behind a whole row is the next one, or another tile on its way."""
        if not e.whole:
            return step * 8 + h * 4 + p.member
        return T.min(vector(p, part, step, h), e.vectors - 1) if e.uneven else vector(p, part, step, h)

    @T.inline
    def phase(s, p, part, step):
        for n in T.unroll(e.word_groups):
            for h in T.unroll(2):
                i = n * 8 + h * 4
                row = T.meta_var(stage_at(e, p, s.slot[0]) * e.tile_n + n * 8 + row_of_group(e, p.group))
                load_shared(
                    s.hand[i], s.hand[i + 1], s.hand[i + 2], s.hand[i + 3],
                    s.ring.ptr_to([row * (e.ring_pitch // 4) + of_stage(p, part, step, h) * 4]))
                if e.uneven:
                    if vector(p, part, step, h) >= e.vectors:
                        for v in T.unroll(4):
                            s.hand[i + v] = T.uint32(0)

    return phase


def next_stage(e: Extents) -> Callable[..., Any]:
    """Reads and writes: `slot`, `turn`. Barriers: none. The phase is (s)."""

    @T.inline
    def phase(s):
        s.slot[0] = s.slot[0] + 1
        if s.slot[0] == e.stages:
            s.slot[0] = 0
            s.turn[0] = s.turn[0] ^ T.uint32(1)

    return phase


def ring_product(e: Extents) -> Callable[..., Any]:
    """The kernel, called with (io, scores, tops, sums); the last two are None where they are not wanted."""
    do = SimpleNamespace(
        init_ring=init_ring(e),
        prefetch_tiles=prefetch_tiles(e),
        take_tiles=take_tiles(e),
        begin_asking=begin_asking(e),
        ask=(ask_tile if e.whole else ask)(e),
        load_states=load_states(e),
        await_stage=await_stage(e),
        bring_states=bring_states(e),
        bring_words=bring_words(e),
        multiply_step=multiply_step(e),
        next_stage=next_stage(e),
        write_parts=write_parts(e),
        finish_scores=finish_scores(e),
        join_sums=join_sums(e),
        finish_alone=finish_alone(e),
        join_warps=join_warps(e),
    )
    # Hidden states in registers are known by the number of the step.
    loop = T.unroll if e.register_steps else T.serial

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
            do.init_ring(s, p)
            if e.prefetch > 0:
                do.prefetch_tiles(io, s, p, block)
            if e.overlap > 0:
                wait_then_start_consumer()
            do.take_tiles(io, s, p, block)
            do.begin_asking(io, s, p)
            if not e.whole or t == 0:
                for _ in T.serial(e.stages):
                    do.ask(io, s, p)
            do.load_states(io, s, p)
            while s.tile[0] < s.end[0]:
                for i in T.unroll(e.sums_each):
                    s.sums[i] = T.float32(0)
                for part in loop(e.parts):
                    do.await_stage(s, p)
                    for step in T.unroll(e.stage_steps):
                        do.bring_words(s, p, part, step)
                        if e.kept_steps > 0:
                            do.bring_states(s, p, part * e.stage_steps + step)
                        do.multiply_step(s, part * e.stage_steps + step)
                    if not e.whole:
                        # All lanes have read the stage: the barrier in `ask`.
                        do.ask(io, s, p)
                        do.next_stage(s)
                if e.reduce_warps > 1:
                    half: T.int32 = s.tile[0] // e.stride % 2
                    do.write_parts(s, p, half)
                    if e.whole:
                        # All threads have read the stage: the barrier in `write_parts`.
                        if t == 0:
                            do.ask(io, s, p)
                        do.next_stage(s)
                    do.finish_scores(io, s, p, half, scores, tops, factor)
                else:
                    do.finish_alone(io, s, p, scores, tops, factor)
                s.tile[0] = s.tile[0] + e.stride
            if e.summed:
                if e.reduce_warps > 1:
                    do.join_sums(io, s, p, block, sums, factor)
                else:
                    do.join_warps(io, s, p, block, sums, factor)

    return kernel
# fmt: on
