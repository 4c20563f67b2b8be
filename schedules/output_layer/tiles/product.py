"""Phases of the first kernel that `registers`, `rings` and `warp_rings` share, and their state.

    prefetch_tiles  the first tokens of a vocabulary come to the L2 cache while the producer kernel still runs
    take_tiles      which tiles are a warp's
    load_states     the hidden states, which stay
    multiply_step   a step's products
    own_factors     factors of exponents of the scores that a thread finishes
    finish_tile     the scores of a tile, its largest ones, and sums of exponentials
    join_tiles      a thread block's sums of exponentials

Where several warps share a tile, the last two are

    write_parts     a warp's sums to shared memory
    finish_scores   their sum over the warps: scores, the tile's largest ones, sums of exponentials
    join_sums       a thread block's sums of exponentials

and where each warp has tiles of its own, which need no barrier,

    finish_alone    the same from a warp's registers
    join_warps      a thread block's sums of exponentials
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device.powers import change_base
from ...device.selection import FULL_WARP, bits_value, order_bits
from ...device.state import Buffers, local, pooled, shared
from ...device.words import load_element
from ..best.state import add_pair
from ..lists import count_words, find_word
from ..scales import factor_at, factors_of, has_cap, head_capped
from ..words import at_row
from .sizes import GROUPS_IN_HAND, STEP_COLUMNS, Extents

load_vector = T.ptx.ld.global_.v4.u32
load_shared = T.ptx.ld.shared.v4.u32
bulk_prefetch = T.ptx.cp.async_.bulk.prefetch.L2.global_
bulk_prefetch_hinted = bulk_prefetch.L2__cache_hint
store_shared = T.ptx.st.shared.v4.u32
store_two = T.ptx.st.global_.v2.u32
LOWEST = T.min_value("float32")
MINUS_INFINITY = T.float32("-inf")


# Keeps the compiler from computing what all tiles share before the loop, for which there are too few registers.
IN_PLACE = """
__device__ __forceinline__ unsigned int in_place(unsigned int word) {
  unsigned int held;
  asm volatile("mov.b32 %0, %1;" : "=r"(held) : "r"(word));
  return held;
}
"""


def in_place(word: Any) -> tirx.PrimExpr:
    """A 32-bit word, as something that is known only here."""
    return T.cuda.func_call("in_place", word, source_code=IN_PLACE, return_type="uint32")


@dataclass
class State(Buffers):
    """What the phases share."""

    # The list, and the first row of its beam in this block's tiles.
    index: Any
    top: Any
    # The tile in hand, and the number of the list's tiles.
    tile: Any = local("int32")
    end: Any = local("int32")
    # Number of tokens of the list.
    words: Any = local("int32")
    # Hidden states: in registers those in the warp's columns, for each step and each 8 rows the registers of two
    # vectors; or in shared memory all rows of a tile, and in registers those of one step; or of the first steps as the
    # one, and of the others as the other.
    states: Any = local("uint32", lambda e: e.held_steps * e.row_groups * 8)
    # Tokens of the steps in hand, in the same order.
    hand: Any = local("uint32", lambda e: e.in_hand * e.word_groups * 8)
    # The address of the embedding.
    base: Any = local("uint64")
    # Addresses of the tokens of the tile in hand and of the next one, at this lane's column of the first step.
    at: Any = local("uint64", lambda e: e.word_groups * 2)
    ahead: Any = local("uint64", lambda e: e.word_groups * 2)
    # Ids of the tokens of the tile after that.
    word: Any = local("int32", lambda e: e.word_groups * 2)
    # What a lane has from another one.
    passed: Any = local("uint32")
    # Tokens in eight bits of the step in hand, as they are in the ring; what fills them up to 16 bits (see
    # `device.words`); and the scale of the token whose scores a thread finishes.
    octets: Any = local("uint32", lambda e: e.word_groups * 4, when=lambda e: e.stored)
    filler: Any = local("uint32", when=lambda e: e.stored)
    factor: Any = local("float32", when=lambda e: e.stored and not e.scale_groups)
    # Sums of the groups of columns so far, each times its scale; and scales of the tokens of a lane's sums, of the
    # group in hand and the next one.
    totals: Any = local("float32", lambda e: e.sums_each, when=lambda e: e.scale_groups)
    factors: Any = local("float32", lambda e: GROUPS_IN_HAND * e.scales_each, when=lambda e: e.scale_groups)
    # Sums of all pairs of fragments, four a pair.
    sums: Any = local("float32", lambda e: e.sums_each)
    # For each score that a thread finishes in every tile: the largest so far, and the sum of exponentials relative to
    # it; with `whole_sums` the sum's base, and the sum in its unit (see `device.powers`).
    m: Any = local("float32", lambda e: e.pairs_each)
    d: Any = local(lambda e: e.sum_dtype, lambda e: e.pairs_each)
    # Shared: the same of each row, by the warps that have tiles of their own.
    pairs: Any = shared("float32", lambda e: e.tiles * e.tile_m * 2, when=lambda e: e.reduce_warps == 1)
    # Scores, their tokens' biases, values of another lane, and ordered bits.
    score: Any = local("float32", lambda e: e.word_groups)
    added: Any = local("float32", lambda e: e.word_groups)
    other: Any = local("float32", 2)
    bits: Any = local("uint32", 2)
    # Shared: each warp's sums of a tile by row and token, of two tiles in turn.
    parts: Any = shared("float32", lambda e: 2 * e.reduce_warps * e.tile_m * e.pitch, when=lambda e: e.reduce_warps > 1)
    # As `states`.
    kept: Any = pooled(
        "uint32", lambda e: e.ring_at // 4 if e.stages else e.kept_bytes // 4, 0, when=lambda e: e.staged
    )


@dataclass(frozen=True)
class Place:
    """A thread's place.

    Attributes
    ----------
    team
        Its tile, of several that a block has in hand.
    warp
        Its warp, of those that share the tile.
    lane
        Its place in its warp.
    group, member
        In the fragments its row, of eight, and its vector of half a step, of four.
    odd
        Whether its row is an odd one. It loads this half of a step for both rows of a pair.
    """

    t: Any
    reduce_warps: int

    @property
    def team(self) -> Any:
        return self.t // (32 * self.reduce_warps)

    @property
    def warp(self) -> Any:
        return self.t // 32 % self.reduce_warps

    @property
    def lane(self) -> Any:
        return self.t % 32

    @property
    def group(self) -> Any:
        return self.t % 32 // 4

    @property
    def member(self) -> Any:
        return self.t % 4

    @property
    def odd(self) -> Any:
        return self.t // 4 % 2


def in_step(e: Extents, p: Place, h: Any) -> Any:
    """Which of a step's eight vectors a lane has in a half: beside tokens in eight bits, of which a lane has one vector
    a step, the two of the same columns."""
    return p.member * 2 + h if e.stored else h * 4 + p.member


def vector_of(e: Extents, p: Place, step: Any, h: Any) -> Any:
    """Which vector of a row a lane has in half a step."""
    return (p.warp * e.steps + step) * 8 + in_step(e, p, h)


def state_row(io: Any, s: State, p: Place, f: Any) -> Any:
    """The row of the lane's hidden state in a group of eight; beyond the beam its last row."""
    return T.min(s.top + f * 8 + p.group, io.beam - 1)


def stays_cached(e: Extents, tile: Any) -> Any:
    """Whether a tile stays in the L2 cache: of the rounds in which tiles are dealt out some, as far apart as can be, so
    that what memory brings and what the cache has come at the same time. The first round's do not: `prefetch_tiles`
    has memory bring them ahead. Nor do tiles that blocks take as they come to them: in the next call it may be a
    multiprocessor at the other half of the cache that reads them, which waits for them longer."""
    turn, turns = tile // e.stride, max(e.dealt_turns - 1, 1)
    share = turn * e.cached_turns
    kept = share // turns > (share - e.cached_turns) // turns
    return T.And(T.And(turn > 0, turn < e.dealt_turns), kept)


# fmt: off
def first_tile(e: Extents, p: Place, block: Any) -> Any:
    """A warp's first tile. With a ring, tiles go round the blocks before they go round a block's warps, so that the
    last tiles are spread over all blocks.
    """
    return p.team * e.blocks + block if e.stages else block * e.tiles + p.team


@phase
def prefetch_tiles(e, /, io, s, p, block):
    """Have the first tiles of a vocabulary brought into the L2 cache. All accesses to memory go through this cache, so
    a prefetch may come before the wait for the producer kernel, whatever that kernel writes.

    Reads: with `cached` `policy`. Writes: nothing. Barriers: none.
    """
    for i in T.serial(e.prefetched):
        tile = T.meta_var(first_tile(e, p, block) + i * e.stride)
        first = T.meta_var(tile * e.tile_n)
        size = T.meta_var(T.uint32(e.tile_bytes))
        if p.t % (32 * e.reduce_warps) == 0 and first + e.tile_n <= io.vocab:
            if e.cached > 0:
                if not stays_cached(e, tile):
                    bulk_prefetch_hinted(io.embedding.ptr_to([first, 0]), size, s.policy[0])
            else:
                bulk_prefetch(io.embedding.ptr_to([first, 0]), size)


@phase
def take_tiles(e, /, io, s, p, block):
    """Deal the tiles of a list out to the blocks, and those that have several in hand, one in turn: so at any time all
    of them read neighbouring tokens, which memory answers faster than many runs of tokens at once.

    Reads: the list's count.
    Writes: `words`, `tile`, `end`, and empty sums to `m` and `d`, or to `pairs`.
    Barriers: none.
    """
    count_words(e)(io, s.index, s.words)
    s.tile[0] = first_tile(e, p, block)
    # Only the operator that computes all logits also writes those beyond the count.
    s.end[0] = (s.words[0] + (e.tile_n - 1)) // e.tile_n if e.k > 0 else e.list_tiles
    if e.reduce_warps > 1:
        for i in T.unroll(e.pairs_each):
            s.m[i] = LOWEST
            s.d[i] = T.Cast(e.sum_dtype, 0)
    else:
        for i in T.serial((e.tile_m - p.t % 32 + 31) // 32):
            s.pairs[(p.team * e.tile_m + i * 32 + p.t % 32) * 2] = LOWEST
            s.pairs[(p.team * e.tile_m + i * 32 + p.t % 32) * 2 + 1] = T.float32(0)
        T.cuda.warp_sync()


def kept_vector(e: Extents, i: Any) -> Any:
    """Which vector of its row the i-th one in shared memory is: for each warp, the vectors of its last steps."""
    if not e.register_steps:
        return i
    return (i // (e.kept_steps * 8) * e.steps + e.register_steps) * 8 + i % (e.kept_steps * 8)


@phase
def of_warp(e, /, io, s, p):
    """Load the hidden states in the warp's columns to registers."""
    for step in T.unroll(e.register_steps):
        for f in T.unroll(e.row_groups):
            for h in T.unroll(2):
                i = (step * e.row_groups + f) * 8 + h * 4
                vector = T.meta_var(vector_of(e, p, step, h))
                if vector < e.vectors:
                    load_vector(
                        s.states[i], s.states[i + 1], s.states[i + 2], s.states[i + 3],
                        io.hidden.ptr_to(at_row(io, s.index, state_row(io, s, p, f), vector * (e.hidden // e.vectors))))
                else:
                    for v in T.unroll(4):
                        s.states[i + v] = T.uint32(0)


@phase
def of_block(e, /, io, s, p):
    """Load hidden states to shared memory, zeros beyond the last column."""
    for i in T.serial(ceildiv(e.kept_rows * e.kept_vectors, e.product_threads)):
        at = T.meta_var(i * e.product_threads + p.t)
        if at < e.kept_rows * e.kept_vectors:
            for v in T.unroll(4):
                s.states[v] = T.uint32(0)
            if kept_vector(e, at % e.kept_vectors) < e.vectors:
                load_vector(
                    s.states[0], s.states[1], s.states[2], s.states[3],
                    io.hidden.ptr_to(at_row(
                        io, s.index, T.min(s.top + at // e.kept_vectors, io.beam - 1),
                        kept_vector(e, at % e.kept_vectors) * (e.hidden // e.vectors))))
            store_shared(
                s.kept.ptr_to([(at // e.kept_vectors * e.kept_pitch + at % e.kept_vectors) * 4]),
                s.states[0], s.states[1], s.states[2], s.states[3])
    T.cuda.cta_sync()


@phase
def load_states(e, /, io, s, p):
    """Load the hidden states: into registers those in the warp's columns, or into shared memory all of the tile's, or
    a part of each.

    Reads: `hidden`, rows beyond the beam as its last one.
    Writes: `states`, zeros beyond the last column; `kept`.
    Barriers: none; with `kept` of the thread block, when that is written.
    """
    if e.kept_steps > 0:
        of_block(e)(io, s, p)
    if e.register_steps > 0:
        of_warp(e)(io, s, p)


def states_at(e: Extents, step: Any) -> Any:
    """Where the hidden states of a step are in `states`, in groups of eight rows: first those that stay, then those
    loaded for a step."""
    if not e.kept_steps:
        return step * e.row_groups
    return (T.min(step, e.register_steps) if e.register_steps else 0) * e.row_groups


def bring_states(e: Extents) -> Phase:
    """Load the hidden states of a step from shared memory. Reads: `kept`. Writes: `states`, unless those of the step
    stay there. Barriers: none. The phase is (s, p, step).
    """

    if not e.kept_steps:

        @T.inline
        def nothing(s, p, step):
            pass

        return nothing

    def kept_row(p: Place, f: Any) -> Any:
        row = f * 8 + p.group
        return row if e.kept_rows == e.tile_m else T.min(row, e.kept_rows - 1)

    @T.inline
    def phase(s, p, step):
        if step >= e.register_steps:
            for f in T.unroll(e.row_groups):
                for h in T.unroll(2):
                    i = (e.register_steps * e.row_groups + f) * 8 + h * 4
                    vector = T.meta_var((p.warp * e.kept_steps + (step - e.register_steps)) * 8 + in_step(e, p, h))
                    load_shared(
                        s.states[i], s.states[i + 1], s.states[i + 2], s.states[i + 3],
                        s.kept.ptr_to([(kept_row(p, f) * e.kept_pitch + vector) * 4]))

    return phase


def multiply_step(e: Extents) -> Phase:
    """Multiply a step; the phase is (s, step).

    Reads: `hand` and `states` of the step.
    Writes: adds their products to `sums`.
    Barriers: none, but all lanes of a warp take part.
    """
    kind = {"float16": "f16", "bfloat16": "bf16"}.get(e.dtype)
    mma = getattr(getattr(T.ptx.mma.sync.aligned.m16n8k16.row.col.f32, kind), kind).f32 if kind else None

    def words_at(e: Extents, step: Any) -> Any:
        return step % e.in_hand * e.word_groups

    a_at, b_at = (states_at, words_at) if e.words_second else (words_at, states_at)

    @T.inline
    def of_halves(s, step):
        first = T.meta_var(s.states if e.words_second else s.hand)
        second = T.meta_var(s.hand if e.words_second else s.states)
        for half in T.unroll(4):
            for f in T.unroll(e.a_groups // 2):
                for g in T.unroll(e.b_groups):
                    at = (f * e.b_groups + g) * 4
                    # A fragment of operand A is two of 8 rows: its registers are of row `group`, of row `group + 8`,
                    # and so again for the other columns.
                    a = (a_at(e, step) + f * 2) * 8 + half * 2
                    b = (b_at(e, step) + g) * 8 + half * 2
                    mma(s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3],
                        first[a], first[a + 8], first[a + 1], first[a + 9],
                        second[b], second[b + 1],
                        s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3])

    return of_halves if kind else multiply_floats(e)


@T.inline
def split(word, high, low, finite, i):
    """A float32 word as two of tf32, whose sum it is but for its last three bits: the `i`-th of `high` and of `low`.
    `finite` is the higher one, or 0 of an infinity or NaN."""
    high[i] = word & T.uint32(0xFFFFE000)
    low[i] = T.reinterpret("uint32", T.reinterpret("float32", word) - T.reinterpret("float32", high[i]))
    finite[i] = high[i]
    if (word & T.uint32(0x7F800000)) == T.uint32(0x7F800000):
        high[i] = word
        low[i] = T.uint32(0)
        finite[i] = T.uint32(0)


@phase
def multiply_floats(e, /, s, step):
    """`multiply_step` for float32: three products of tf32.

    An infinity or NaN has no lower part, and must not meet the lower part of its partner, which may be 0.
    """
    mma = T.meta_var(T.ptx.mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32)
    a_high = T.alloc_local([4], "uint32")
    a_low = T.alloc_local([4], "uint32")
    a_finite = T.alloc_local([4], "uint32")
    b_high = T.alloc_local([e.row_groups * 2], "uint32")
    b_low = T.alloc_local([e.row_groups * 2], "uint32")
    b_finite = T.alloc_local([e.row_groups * 2], "uint32")
    for half in T.unroll(4):
        for g in T.unroll(e.row_groups):
            for i in T.unroll(2):
                split(in_place(s.states[(states_at(e, step) + g) * 8 + half * 2 + i]),
                      b_high, b_low, b_finite, g * 2 + i)
        for f in T.unroll(e.word_groups // 2):
            # In the order of the instruction: rows `group` and `group + 8` of one column, then those rows of the
            # other column.
            for i in T.unroll(4):
                split(s.hand[(step % e.in_hand * e.word_groups + f * 2) * 8 + half * 2 + i // 2 + i % 2 * 8],
                      a_high, a_low, a_finite, i)
            for g in T.unroll(e.row_groups):
                at = (f * e.row_groups + g) * 4
                b = g * 2
                mma(s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3],
                    a_low[0], a_low[1], a_low[2], a_low[3], b_finite[b], b_finite[b + 1],
                    s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3])
                mma(s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3],
                    a_finite[0], a_finite[1], a_finite[2], a_finite[3], b_low[b], b_low[b + 1],
                    s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3])
                mma(s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3],
                    a_high[0], a_high[1], a_high[2], a_high[3], b_high[b], b_high[b + 1],
                    s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3])


def row_of_group(e: Extents, group: Any) -> Any:
    """Which of eight tokens a group of four lanes has: its own number. With a ring the tokens of neighbouring groups
    are `rows_apart` rows of a stage apart, so that their loads meet no common bank."""
    if not e.stages or e.rows_apart == 1:
        return group
    return group % 2 * e.rows_apart + group // (2 * e.rows_apart) * (2 * e.rows_apart) + group // 2 % e.rows_apart


def of_row(e: Extents, p: Place, f: Any, g: Any, i: Any) -> Any:
    return f * 16 + i // 2 * 8 + p.group if e.words_second else g * 8 + p.member * 2 + i % 2


def of_word(e: Extents, p: Place, f: Any, g: Any, i: Any) -> Any:
    if e.words_second:
        return g * 8 + row_of_group(e, p.member * 2 + i % 2)
    return f * 16 + i // 2 * 8 + row_of_group(e, p.group)


@phase
def write_parts(e, /, s, p, half):
    """Put a warp's sums into shared memory.

    Reads: `sums`.
    Writes: `parts`, in the half that is this tile's.
    Barriers: of the thread block, at the end. With two halves a thread that is a tile ahead overwrites nothing that is
        still read.
    """
    for f in T.unroll(e.a_groups // 2):
        for g in T.unroll(e.b_groups):
            for i in T.unroll(4):
                s.parts[((half * e.reduce_warps + p.warp) * e.tile_m + of_row(e, p, f, g, i)) * e.pitch
                        + of_word(e, p, f, g, i)] = s.sums[(f * e.b_groups + g) * 4 + i]
    T.cuda.cta_sync()


@phase
def add_parts(e, /, io, s, p, half, scores, row, position):
    """Add up the warps' sums of one score of a tile.

    Reads: `parts`; the bias. Writes: `score` and `scores`, -inf beyond the list's tokens. Barriers: none.
    """
    s.score[0] = T.float32(0)
    for w in T.unroll(e.reduce_warps):
        s.score[0] = s.score[0] + s.parts[
            ((half * e.reduce_warps + w) * e.tile_m + row) * e.pitch + p.t % e.tile_n]
    if position < s.words[0]:
        if e.stored != "" and not e.scale_groups:
            s.score[0] = s.score[0] * s.factor[0]
        if has_cap(io):
            s.score[0] = head_capped(io, s.score[0])
        if io.bias is not None:
            word = T.alloc_local([1], "int32")
            find_word(e)(io, s.index, position, word)
            s.score[0] = s.score[0] + load_element("float32", io.bias.ptr_to([word[0]]))
    else:
        s.score[0] = MINUS_INFINITY
    if not e.draws:
        if s.top + row < io.beam and (e.k > 0 or position < e.m):
            T.buffer_store(scores, s.score[0], at_row(io, s.index, s.top + row, position))


@phase
def bring_scales(e, /, io, s, p):
    """Load the scale of the token whose scores a thread finishes, which is the same for all its rows. Nothing waits for
    it before the sums of the tile. Where groups of columns have scales, load those of the first groups.

    Reads: `tile`; the scales. Writes: `factor` or `factors`, where tokens are in eight bits. Barriers: none.
    """
    if e.scale_groups > 0:
        for group in T.unroll(min(GROUPS_IN_HAND, e.steps // e.group_steps)):
            bring_group(e)(io, s, p, group)
    elif e.stored != "":
        s.factor[0] = load_element(
            "float32", io.scales.ptr_to([T.min(s.tile[0] * e.tile_n + p.t % e.tile_n, io.vocab - 1)]))


def scale_of(e: Extents, f: Any, g: Any, i: Any) -> Any:
    """Which of a lane's scales is that of the token of a sum."""
    return g * 2 + i % 2 if e.words_second else f * 2 + i // 2


@phase
def bring_group(e, /, io, s, p, group):
    """Load the scales of a warp's group of columns, of the tokens of a lane's sums.

    Reads: `tile`; the scales. Writes: `factors`. Barriers: none.
    """
    for n in T.unroll(e.scales_each):
        token = T.meta_var(of_word(e, p, n // 2, n // 2, n % 2 if e.words_second else n % 2 * 2))
        word = T.meta_var(T.min(s.tile[0] * e.tile_n + token, io.vocab - 1))
        first = T.meta_var((p.warp * e.steps + group * e.group_steps) * STEP_COLUMNS)
        s.factors[group % GROUPS_IN_HAND * e.scales_each + n] = load_element(
            "float32", io.group_scales.ptr_to([word, T.min(first // e.group_columns, e.scale_groups - 1)]))


@phase
def end_step(e, /, io, s, p, step):
    """Behind the last step of a group of columns with scales of its own: add its sums, times these.

    Reads: `sums`, `factors`. Writes: `totals`, and empty `sums`, after the last group all in `sums`; `factors` of the
    group after the next one. Barriers: none.
    """
    if e.scale_groups > 0:
        if (step + 1) % e.group_steps == 0:
            group = T.meta_var(step // e.group_steps)
            for f in T.unroll(e.a_groups // 2):
                for g in T.unroll(e.b_groups):
                    for i in T.unroll(4):
                        at = (f * e.b_groups + g) * 4 + i
                        s.sums[at] = s.sums[at] * s.factors[
                            group % GROUPS_IN_HAND * e.scales_each + scale_of(e, f, g, i)]
                        if group > 0:
                            s.sums[at] = s.sums[at] + s.totals[at]
                        if step + 1 < e.steps:
                            s.totals[at] = s.sums[at]
                            s.sums[at] = T.float32(0)
            if (group + GROUPS_IN_HAND) * e.group_steps < e.steps:
                bring_group(e)(io, s, p, group + GROUPS_IN_HAND)


@T.inline
def store_slice(slices, row, tile, bits, mass):
    """Store ordered bits of the largest score of a tile of a row, and its sum of exponentials, for a draw."""
    store_two(slices.ptr_to([row, tile, 0]), bits, T.reinterpret("uint32", mass))


@phase
def write_top(e, /, io, s, p, tops, row, tile, factor):
    """The largest score of a row in a tile, and for a draw the sum of exponentials relative to it.

    Reads: `score`. Writes: `tops`; `bits`, and for a draw `other`. Barriers: none, but all lanes of a warp take part.
    """
    s.bits[0] = order_bits(s.score[0])
    for b in T.unroll(e.tile_n.bit_length() - 1):
        s.bits[0] = T.max(
            s.bits[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.bits[0], 1 << b, 32, 32))
    if e.draws:
        # At least the lowest finite number: the difference of two infinities would be NaN.
        s.other[0] = T.max(bits_value(s.bits[0]), LOWEST)
        s.other[1] = T.exp2((s.score[0] - s.other[0]) * factor)
        for b in T.unroll(e.tile_n.bit_length() - 1):
            s.other[1] = s.other[1] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.other[1], 1 << b, 32, 32)
        if p.t % e.tile_n == 0 and s.top + row < io.beam:
            store_slice(tops, s.top + row, tile, s.bits[0], s.other[1])
    else:
        if p.t % e.tile_n == 0 and s.top + row < io.beam:
            T.buffer_store(tops, s.bits[0], at_row(io, s.index, s.top + row, tile))


@phase
def finish_scores(e, /, io, s, p, half, scores, tops, factor):
    """Add up the warps' sums of a tile, and do with a score what is to be done with it. A thread has the same row and
    place in every tile.

    Reads: `parts`; the bias.
    Writes: scores, -inf beyond the list's tokens; each row's largest in `tops`; `m` and `d`.
    Barriers: none, but all lanes of a warp take part.
    """
    pairs = T.meta_var(e.tile_m * e.tile_n)
    for i in T.unroll(e.pairs_each):
        if pairs % e.product_threads == 0 or i * e.product_threads + p.t < pairs:
            row: T.int32 = (i * e.product_threads + p.t) // e.tile_n
            position: T.int32 = s.tile[0] * e.tile_n + p.t % e.tile_n
            add_parts(e)(io, s, p, half, scores, row, position)
            if e.summed:
                write_top(e)(io, s, p, tops, row, s.tile[0], factor_at(factor, i))
                if not e.draws:
                    if position < s.words[0]:
                        add_pair(s.m, i, s.d, i, s.score[0], T.float32(1), s.other, factor_at(factor, i))


@phase
def join_rounded(e, /, s, i, factor):
    """Join the lanes' pairs of row i, in the order of lanes."""
    for b in T.unroll(e.tile_n.bit_length() - 1):
        s.other[0] = T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.m[i], 1 << b, 32, 32)
        s.other[1] = T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.d[i], 1 << b, 32, 32)
        add_pair(s.m, i, s.d, i, s.other[0], s.other[1], s.score, factor)


@phase
def join_whole(e, /, s, i, factor):
    """Join the lanes' pairs of row i; sums in units of whole powers of two are the same in any order."""
    steps = T.meta_var(e.tile_n.bit_length() - 1)
    s.score[0] = s.m[i]
    for b in T.unroll(steps):
        s.score[0] = T.max(s.score[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.score[0], 1 << b, 32, 32))
    s.d[i] = change_base(s.d[i], s.m[i], s.score[0])
    s.m[i] = s.score[0]
    for b in T.unroll(steps):
        s.d[i] = s.d[i] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.d[i], 1 << b, 32, 32)


@phase
def join_sums(e, /, io, s, p, block, sums, factor):
    """Join what the lanes of a row know.

    Reads: `m` and `d`.
    Writes: the block's pair of each row to `sums`.
    Barriers: none, but all lanes of a warp take part.
    """
    pairs = T.meta_var(e.tile_m * e.tile_n)
    join = T.meta_var(join_whole(e) if e.whole_sums else join_rounded(e))
    for i in T.unroll(e.pairs_each):
        if pairs % e.product_threads == 0 or i * e.product_threads + p.t < pairs:
            row: T.int32 = (i * e.product_threads + p.t) // e.tile_n
            join(s, i, factor_at(factor, i))
            if p.t % e.tile_n == 0 and s.top + row < io.beam:
                T.buffer_store(sums, T.Cast(e.sum_dtype, s.m[i]), at_row(io, s.index, s.top + row, block, 0))
                T.buffer_store(sums, s.d[i], at_row(io, s.index, s.top + row, block, 1))


@phase
def store_score(e, /, io, s, p, scores, row, n):
    """Add the bias to the score of the lane's n-th token in this row, and store it; -inf beyond the list."""
    if s.tile[0] * e.tile_n + n * 8 + p.group < s.words[0]:
        if has_cap(io):
            s.score[n] = head_capped(io, s.score[n])
        if io.bias is not None:
            s.score[n] = s.score[n] + s.added[n]
    else:
        s.score[n] = MINUS_INFINITY
    if not e.draws:
        if s.top + row < io.beam and (e.k > 0 or s.tile[0] * e.tile_n + n * 8 + p.group < e.m):
            T.buffer_store(
                scores, s.score[n], at_row(io, s.index, s.top + row, s.tile[0] * e.tile_n + n * 8 + p.group))


@phase
def sum_up(e, /, io, s, p, tops, row, factor):
    """Add a row's scores in this tile to its pair."""
    s.bits[0] = order_bits(s.score[0])
    for n in T.unroll(e.word_groups - 1):
        s.bits[0] = T.max(s.bits[0], order_bits(s.score[n + 1]))
    for b in T.unroll(3):
        s.bits[0] = T.max(s.bits[0], T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.bits[0], 4 << b, 32, 32))
    # At least the lowest finite number: the difference of two infinities would be NaN.
    s.other[0] = T.max(bits_value(s.bits[0]), LOWEST)
    s.other[1] = T.float32(0)
    for n in T.unroll(e.word_groups):
        s.other[1] = s.other[1] + T.exp2((s.score[n] - s.other[0]) * factor)
    for b in T.unroll(3):
        s.other[1] = s.other[1] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.other[1], 4 << b, 32, 32)
    if p.group == 0 and s.top + row < io.beam:
        if e.draws:
            store_slice(tops, s.top + row, s.tile[0], s.bits[0], s.other[1])
        else:
            T.buffer_store(tops, s.bits[0], at_row(io, s.index, s.top + row, s.tile[0]))
            at = T.meta_var((p.team * e.tile_m + row) * 2)
            add_pair(s.pairs, at, s.pairs, at + 1, s.other[0], s.other[1], s.score, factor)


@phase
def finish_alone(e, /, io, s, p, scores, tops, factor):
    """`finish_scores` for a warp that has whole sums in its registers: rows are two of each fragment's, by `member`,
    and their tokens lie with eight lanes.

    Reads: `sums`; the bias.
    Writes: scores, -inf beyond the list's tokens; each row's largest in `tops`; `pairs`.
    Barriers: none, but all lanes of a warp take part.
    """
    if io.bias is not None:
        for n in T.unroll(e.word_groups):
            word = T.alloc_local([1], "int32")
            find_word(e)(io, s.index, T.max(T.min(s.tile[0] * e.tile_n + n * 8 + p.group, s.words[0] - 1), 0), word)
            s.added[n] = load_element("float32", io.bias.ptr_to([word[0]]))
    for g in T.unroll(e.row_groups):
        for i in T.unroll(2):
            row = T.meta_var(g * 8 + p.member * 2 + i)
            for n in T.unroll(e.word_groups):
                s.score[n] = s.sums[(n // 2 * e.row_groups + g) * 4 + n % 2 * 2 + i]
                store_score(e)(io, s, p, scores, row, n)
            if e.summed:
                sum_up(e)(io, s, p, tops, row, factor_at(factor, g * 2 + i))


@phase
def join_warps(e, /, io, s, p, block, sums, factor):
    """Join what the warps of a block know.

    Reads: `pairs`. Writes: the block's pair of each row to `sums`. Barriers: of the thread block, at the begin.
    """
    T.cuda.cta_sync()
    for i in T.serial((e.tile_m - p.t + (e.product_threads - 1)) // e.product_threads):
        row = T.meta_var(i * e.product_threads + p.t)
        own = T.meta_var(factor_at(factors_of(io, [s.top + row], factor), 0))
        s.other[0] = LOWEST
        for w in T.unroll(e.tiles):
            s.other[0] = T.max(s.other[0], s.pairs[(w * e.tile_m + row) * 2])
        s.other[1] = T.float32(0)
        for w in T.unroll(e.tiles):
            s.other[1] = s.other[1] + s.pairs[(w * e.tile_m + row) * 2 + 1] * T.exp2(
                (s.pairs[(w * e.tile_m + row) * 2] - s.other[0]) * own)
        if s.top + row < io.beam:
            T.buffer_store(sums, s.other[0], at_row(io, s.index, s.top + row, block, 0))
            T.buffer_store(sums, s.other[1], at_row(io, s.index, s.top + row, block, 1))


def own_factors(e: Extents, io: Any, s: State, p: Place, factor: Any) -> Any:
    """The factors of the scores, or with `finish_alone` of the rows, that a thread finishes in every tile
    (`scales.factors_of`).
    """
    if e.reduce_warps == 1:
        rows = [g * 8 + p.member * 2 + i for g in range(e.row_groups) for i in range(2)]
    else:
        rows = [(i * e.product_threads + p.t) // e.tile_n for i in range(e.pairs_each)]
    return factors_of(io, [s.top + row for row in rows], factor)


def finish_tile(e: Extents) -> Phase:
    """Finish a tile that is multiplied; the phase is (io, s, p, scores, tops, factor).

    Reads: `sums`; the bias.
    Writes: scores, -inf beyond the list's tokens; each row's largest in `tops`; what is summed of exponentials.
    Barriers: where warps share the tile one of the thread block, after which all have read its tokens.
    """
    if e.reduce_warps == 1:
        return finish_alone(e)
    write, finish = write_parts(e), finish_scores(e)

    @T.inline
    def phase(io, s, p, scores, tops, factor):
        half: T.int32 = s.tile[0] // e.stride % 2
        write(s, p, half)
        finish(io, s, p, half, scores, tops, factor)

    return phase


@phase
def join_tiles(e, /, io, s, p, block, sums, factor):
    """Join what a thread block has summed of exponentials, if anything.

    Writes: the block's pair of each row to `sums`. Barriers: where each warp has tiles of its own, of the thread block.
    """
    join = T.meta_var(join_sums(e) if e.reduce_warps > 1 else join_warps(e))
    if e.summed and not e.draws:
        join(io, s, p, block, sums, factor)
# fmt: on
