"""The first kernel of `rings` with `dynamic`: a ring of whole tiles, the last of which no thread block is given.

Memory answers some multiprocessors sooner than others. So that they end together, `dynamic` percent of the tiles are
dealt out to no thread block. A thread block that has requested its own tiles takes further ones by a counter in memory,
whose answer it needs a tile later. The second kernel resets the counter.

    locate_states   where the hidden states are, before the wait for the producer kernel
    begin_dealing   how many tiles are dealt out
    ask_next        requests a tile, and the number of the one after it
    ask_states      requests all hidden states
    end_states      zeros beyond their last column, when the first tokens are there
    find_tile       which tile is next, when it is there
    hold_scores     the warps' sums are added up
    weigh_scores    a tile later, while the next one's tokens come from shared memory, what these scores add

The other phases are those of `ring`. Which thread block adds which scores differs from run to run. Results do not: sums
of exponentials are in units of whole powers of two (see `device.powers`).

The warps of a thread block multiply the same tile, so that a delay of one warp delays all. Requesting a tile takes as
long as finishing scores. So a lane of the last warp requests: its rows are most often beyond the last one, and warps of
such rows finish no scores. A warp that only requests tiles, as soon as all others have read a stage, made the kernel
slower on an H200 by a tenth and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase

from ...device.arithmetic import LOG2_E
from ...device.mbarriers import arrive_expecting
from ...device.overlap import wait_then_start_consumer
from ...device.powers import add_to_base
from ...device.region import device_region
from ...device.selection import next_ticket
from ...device.state import local, shared
from ...device.words import held_address
from ..best.sizes import VECTOR
from ..scales import factor_at
from ..tiles.product import (
    Place,
    add_parts,
    bring_scales,
    bring_states,
    end_step,
    join_tiles,
    load_states,
    load_vector,
    multiply_step,
    own_factors,
    prefetch_tiles,
    state_row,
    take_tiles,
    vector_of,
    write_parts,
    write_top,
)
from ..tiles.ring import RingState, await_stage, begin_ring, bring_words, init_ring, next_asked, next_stage
from ..tiles.sizes import Extents
from ..words import at_row
from .dealt import copy_tile


@dataclass
class DynamicState(RingState):
    """What the phases share, beside what those of a ring do."""

    # Where the lane's hidden states are, if registers have them.
    rows_at: Any = local("uint64", lambda e: e.row_groups, when=lambda e: not e.staged)
    # Shared: numbers of the tiles in the stages; the number of tiles where there are no more.
    tiles: Any = shared("int32", lambda e: e.stages)
    # In the requesting thread: how many tiles it has requested, how many are dealt out to the thread block, and which
    # of the other tiles it takes next.
    many: Any = local("int32")
    dealt: Any = local("int32")
    ticket: Any = local("int32")
    # In which half of `parts` the sums of the tile in hand are.
    half: Any = local("int32")
    # The thread's scores of the tile before, and which that was, -1 for none.
    held: Any = local("float32", lambda e: e.pairs_each)
    held_tile: Any = local("int32")
    # A sum of exponentials, its base, and one of these.
    sum: Any = local("float64")
    unit: Any = local("float32")
    rest: Any = local("float32")


def asker(e: Extents) -> int:
    """The thread of a thread block that requests its tiles."""
    return e.product_threads - 32


def has_rows(e: Extents, io: Any, s: Any, p: Place, i: Any) -> Any:
    """Whether a warp finishes scores of rows that there are, of the i-th ones of its threads."""
    return s.top + (i * e.product_threads + p.t // 32 * 32) // e.tile_n < io.beam


# fmt: off
@phase
def locate_states(e, /, io, s, p):
    """Reads: nothing. Writes: `rows_at`. Barriers: none."""
    for f in T.unroll(e.row_groups):
        s.rows_at[f] = held_address("u64", io.hidden.ptr_to(at_row(io, s.index, state_row(io, s, p, f), 0)))


@phase
def ask_states(e, /, s, p):
    """Load the hidden states in the warp's columns to registers. Nothing waits for them before `end_states`, so that
    all are in flight together.

    Reads: `hidden`, rows beyond the beam as its last one; `rows_at`.
    Writes: `states`, what is beyond the last column as the last vector.
    Barriers: none.
    """
    for step in T.unroll(e.steps):
        for f in T.unroll(e.row_groups):
            for h in T.unroll(2):
                i = (step * e.row_groups + f) * 8 + h * 4
                vector = T.meta_var(
                    T.min(vector_of(e, p, step, h), e.vectors - 1) if e.uneven else vector_of(e, p, step, h))
                load_vector(
                    s.states[i], s.states[i + 1], s.states[i + 2], s.states[i + 3],
                    s.rows_at[f] + T.Cast("uint64", vector * VECTOR))


@phase
def end_states(e, /, s, p):
    """Reads and writes: `states`, zeros beyond the last column. Barriers: none."""
    for step in T.unroll(e.steps):
        for f in T.unroll(e.row_groups):
            for h in T.unroll(2):
                if e.uneven:
                    if vector_of(e, p, step, h) >= e.vectors:
                        for v in T.unroll(4):
                            s.states[(step * e.row_groups + f) * 8 + h * 4 + v] = T.uint32(0)


@phase
def begin_dealing(e, /, s):
    """`begin_ring`, and what this kernel has beside a ring.

    Reads: `tile`, `end`. Writes: what that does; `many`, `dealt`, `ticket`, `half`, `held_tile`. Barriers: none.
    """
    begin_ring(e)(s)
    s.many[0] = 0
    s.ticket[0] = 0
    s.dealt[0] = T.max(e.dealt(s.end[0]), 1)
    s.half[0] = 0
    s.held_tile[0] = -1


@phase
def take_ticket(e, /, io, s):
    """Choose the tile that is requested next. If the one after it is not dealt out, take its number from the counter
    already.

    Reads: `many`, `dealt`, `ticket`.
    Writes: `asked`, the number of tiles if there is none; `many`, one more; `ticket`, asynchronously; the counter.
    Barriers: none.
    """
    if s.many[0] >= s.dealt[0]:
        s.asked[0] = s.dealt[0] * e.stride + s.ticket[0]
    elif s.many[0] > 0:
        s.asked[0] = s.asked[0] + e.stride
    s.many[0] = s.many[0] + 1
    if s.many[0] >= s.dealt[0]:
        # Needed a tile later, so that nothing may wait for it here.
        s.ticket[0] = next_ticket(io.tickets.ptr_to(at_row(io, s.index, s.top)))


@phase
def ask_next(e, /, io, s):
    """Request a tile, if there may be one more. If there is none, the stage tells so to all threads. The phase is (io,
    s), for one thread.

    Reads: `asked`, `end`.
    Writes: `asked`, `tiles`, and what `take_ticket` does; `ring`, asynchronously.
    Barriers: as in `copy_tile`.
    """
    if s.asked[0] < s.end[0]:
        take_ticket(e)(io, s)
        s.tiles[s.asked_slot[0]] = s.asked[0]
        if s.asked[0] < s.end[0]:
            copy_tile(e)(s)
        else:
            arrive_expecting(s.full.ptr_to([s.asked_slot[0]]), T.uint32(0))
        next_asked(e, s)


@phase
def find_tile(e, /, s, p):
    """Find the tile of the stage in use, which was requested before the last barrier.

    Reads: `tiles`, `full`. Writes: `tile`. Barriers: none. After: its tokens are in `ring`.
    """
    s.tile[0] = s.tiles[s.slot[0]]
    await_stage(e)(s, p)


@phase
def hold_scores(e, /, io, s, p, scores):
    """Add up the warps' sums of a tile.

    Reads: `parts`; the bias. Writes: scores, -inf beyond the list's tokens; `held` and `held_tile`. Barriers: none.
    """
    pairs = T.meta_var(e.tile_m * e.tile_n)
    s.held_tile[0] = s.tile[0]
    for i in T.unroll(e.pairs_each):
        if pairs % e.product_threads == 0 or i * e.product_threads + p.t < pairs:
            if has_rows(e, io, s, p, i):
                row: T.int32 = (i * e.product_threads + p.t) // e.tile_n
                add_parts(e)(io, s, p, s.half[0], scores, row, s.tile[0] * e.tile_n + p.t % e.tile_n)
                s.held[i] = s.score[0]


@phase
def weigh_scores(e, /, io, s, p, tops, factor):
    """What the scores of the tile before add. All warps come here at about the same time, so that nobody else would use
    the time in which tokens come from shared memory.

    Reads: `held`, `held_tile`.
    Writes: each row's largest in `tops`; `m` and `d`.
    Barriers: none, but all lanes of a warp take part.
    """
    pairs = T.meta_var(e.tile_m * e.tile_n)
    if s.held_tile[0] >= 0:
        for i in T.unroll(e.pairs_each):
            if pairs % e.product_threads == 0 or i * e.product_threads + p.t < pairs:
                if has_rows(e, io, s, p, i):
                    s.score[0] = s.held[i]
                    write_top(e)(
                        io, s, p, tops, (i * e.product_threads + p.t) // e.tile_n, s.held_tile[0],
                        factor_at(factor, i))
                    if not e.draws:
                        s.sum[0] = s.d[i]
                        s.unit[0] = s.m[i]
                        add_to_base(s.sum, s.unit, s.rest, s.score[0], factor_at(factor, i))
                        s.d[i] = s.sum[0]
                        s.m[i] = s.unit[0]


@phase
def multiply(e, /, io, s, p, tops, factor):
    """The tile in hand, and meanwhile what the scores of the one before add."""
    bring_scales(e)(io, s, p)
    for i in T.unroll(e.sums_each):
        s.sums[i] = T.float32(0)
    for step in T.unroll(e.steps):
        bring_words(e)(s, p, 0, step)
        if step == 0:
            weigh_scores(e)(io, s, p, tops, factor)
        bring_states(e)(s, p, step)
        multiply_step(e)(s, step)
        end_step(e)(io, s, p, step)


@phase
def product(e, /, io, scores, tops, sums):
    """The kernel."""
    with device_region():
        # One list, the vocabulary, and all its rows.
        block, y = T.cta_id([e.blocks, (io.beam + (e.tile_m - 1)) // e.tile_m])
        t = T.thread_id([e.product_threads])
        p = T.meta_var(Place(t, e.reduce_warps))
        s = T.meta_var(DynamicState.alloc(e, e.kept_bytes, index=0, top=y * e.tile_m))
        factor: T.float32 = io.scale * T.float32(LOG2_E)
        s.base[0] = held_address("u64", io.embedding.ptr_to([0, 0]))
        init_ring(e)(s, p)
        if e.prefetch > 0:
            prefetch_tiles(e)(io, s, p, block)
        if e.staged == 0:
            locate_states(e)(io, s, p)
        wait_then_start_consumer()
        factors = T.meta_var(own_factors(e, io, s, p, factor))
        take_tiles(e)(io, s, p, block)
        begin_dealing(e)(s)
        if t == asker(e):
            for _ in T.serial(e.stages):
                ask_next(e)(io, s)
        if e.staged == 0:
            ask_states(e)(s, p)
        else:
            load_states(e)(io, s, p)
        if s.tile[0] < s.end[0]:
            await_stage(e)(s, p)
        if e.staged == 0:
            end_states(e)(s, p)
        while s.tile[0] < s.end[0]:
            multiply(e)(io, s, p, tops, factors)
            write_parts(e)(s, p, s.half[0])
            # All threads have read the stage: the barrier in `write_parts`.
            if t == asker(e):
                ask_next(e)(io, s)
            hold_scores(e)(io, s, p, scores)
            s.half[0] = s.half[0] ^ 1
            next_stage(e)(s)
            find_tile(e)(s, p)
        weigh_scores(e)(io, s, p, tops, factors)
        join_tiles(e)(io, s, p, block, sums, factors)
# fmt: on
