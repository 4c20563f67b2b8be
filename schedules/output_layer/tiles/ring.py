"""Phases that `rings` and `warp_rings` share: a ring in shared memory, which bulk copies fill, and its state.

init_ring       the ring's mbarriers
begin_ring      which tile, part and stage come first
copy_words      a bulk copy of tokens of a tile to a stage
await_stage     until a stage has come
bring_words     a step of its tokens to registers
next_stage      the ring turns
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.mbarriers import await_phase, bulk_copy
from ...device.state import local, pooled, shared
from ...device.words import FILLERS, pair_of_bytes
from .product import Place, State, row_of_group, stays_cached, vector_of
from .sizes import VECTOR, Extents

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
        The tile that is requested next, which part of its rows, and the stage that receives it.
    word, later
        The token whose row this lane requests, and the candidate of the tile after it.
    done
        Whether a phase is over.
    policy
        The L2 cache's, for tokens that leave it first.
    shown
        Shared: what becomes `filler`, of each ring.
    """

    slot: Any = local("int32")
    turn: Any = local("uint32")
    asked: Any = local("int32")
    part: Any = local("int32")
    asked_slot: Any = local("int32")
    later: Any = local("int32")
    done: Any = local("uint32")
    policy: Any = local("uint64")
    shown: Any = shared("uint32", lambda e: e.rings, when=lambda e: e.stored)
    full: Any = shared("uint64", lambda e: e.rings * e.stages)
    ring: Any = pooled("uint32", lambda e: e.ring_bytes // 4, lambda e: e.ring_at // 4)


def stage_at(e: Extents, p: Place, slot: Any) -> Any:
    """The number of a stage of a thread's ring."""
    return slot if e.whole else p.t // 32 * e.stages + slot


# fmt: off
@phase
def init_ring(e, /, s, p):
    """Initialise the mbarriers of the ring, the cache policy, and what fills bytes. Writes: `full`, `policy`, `filler`.
    Barriers: of those that share the ring, at the end.
    """
    filler = T.meta_var(FILLERS.get((e.stored, e.dtype), 0))
    if (p.t if e.whole else p.lane) == 0:
        for i in T.unroll(e.stages):
            T.ptx.mbarrier.init.shared__cta.b64(s.full.ptr_to([stage_at(e, p, i)]), T.uint32(1))
        T.ptx.fence.mbarrier_init.release.cluster()
        if filler > 0:
            s.shown[0 if e.whole else p.t // 32] = T.uint32(filler)
    if e.evict_first > 0:
        T.ptx.createpolicy.fractional.L2__evict_first.b64(s.policy[0])
    if e.whole:
        T.cuda.cta_sync()
    else:
        T.cuda.warp_sync()
    # Through memory, so that the compiler does not know it, and keeps it in a register.
    if filler > 0:
        T.ptx.ld.shared.u32(s.filler[0], s.shown.ptr_to([0 if e.whole else p.t // 32]))


@T.inline
def copy_words(e, s, tile, to, from_, size, full):
    """A bulk copy of tokens of a tile."""
    if e.cached > 0:
        if stays_cached(e, tile):
            bulk_copy(to, from_, size, full)
        else:
            bulk_copy_hinted(to, from_, size, full, s.policy[0])
    elif e.evict_first > 0:
        bulk_copy_hinted(to, from_, size, full, s.policy[0])
    else:
        bulk_copy(to, from_, size, full)


@phase
def begin_ring(e, /, s):
    """Reads: `tile`. Writes: `asked`, `part`, `slot`, `turn`, `asked_slot`. Barriers: none."""
    s.asked[0] = s.tile[0]
    s.part[0] = 0
    s.slot[0] = 0
    s.turn[0] = T.uint32(0)
    s.asked_slot[0] = 0


@phase
def await_stage(e, /, s, p):
    """Reads: `full`, `slot`, `turn`. Barriers: none. After: the stage's tokens are in `ring`."""
    await_phase(s.done, s.full.ptr_to([stage_at(e, p, s.slot[0])]), s.turn[0])


def bring_words(e: Extents) -> Phase:
    """Load the words of a step from a stage; the phase is (s, p, part, step).

    Reads: `ring`. Writes: `hand`, zeros beyond the last column; `octets`. Barriers: none.
    """
    if e.stored:
        return bring_octets(e)

    def vector(p: Place, part: Any, step: Any, h: Any) -> Any:
        """The number, within its row, of the vector that a lane loads in the h-th half of a step."""
        return vector_of(e, p, part * e.stage_steps + step, h)

    def of_stage(p: Place, part: Any, step: Any, h: Any) -> Any:
        """The same, counted from the beginning of the part of the row that a stage holds. Where that is the whole row,
        what follows it is another row, or a tile that is still being copied: the last vector is loaded again instead.
        """
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


@phase
def bring_octets(e, /, s, p, part, step):
    """`bring_words` for tokens in eight bits: a lane has one vector of a step, twice as many columns."""
    vectors = T.meta_var(e.word_row // VECTOR)
    vector = T.meta_var((p.warp * e.steps + part * e.stage_steps + step) * 4 + p.member)
    # Behind a whole row lies the next one, or another tile that is being copied.
    of_stage = T.meta_var(T.min(vector, vectors - 1) if e.whole else step * 4 + p.member)
    for n in T.unroll(e.word_groups):
        row = T.meta_var(stage_at(e, p, s.slot[0]) * e.tile_n + n * 8 + row_of_group(e, p.group))
        load_shared(
            s.octets[n * 4], s.octets[n * 4 + 1], s.octets[n * 4 + 2], s.octets[n * 4 + 3],
            s.ring.ptr_to([row * (e.ring_pitch // 4) + of_stage * 4]))
        for v in T.unroll(4):
            if e.uneven:
                if vector >= vectors:
                    s.octets[n * 4 + v] = T.uint32(0)
            s.hand[n * 8 + v * 2] = pair_of_bytes(e.stored, e.dtype, s.octets[n * 4 + v], 0, s.filler[0])
            s.hand[n * 8 + v * 2 + 1] = pair_of_bytes(e.stored, e.dtype, s.octets[n * 4 + v], 1, s.filler[0])


@phase
def next_stage(e, /, s):
    """Go on to the next stage. Reads and writes: `slot`, `turn`. Barriers: none."""
    s.slot[0] = s.slot[0] + 1
    if s.slot[0] == e.stages:
        s.slot[0] = 0
        s.turn[0] = s.turn[0] ^ T.uint32(1)


@T.inline
def next_asked(e, s):
    """Move on to the stage after the one that was requested. Reads and writes: `asked_slot`. Barriers: none."""
    s.asked_slot[0] = T.Select(s.asked_slot[0] == e.stages - 1, 0, s.asked_slot[0] + 1)
# fmt: on
