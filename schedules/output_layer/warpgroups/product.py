"""The first kernel of `warpgroups`: scores of tiles of words, and what each block knows of a row's sum of exponentials.

    begin           mbarriers, and where the first part is

The producer warp, the last of a thread block but for that of `gated`,

    produce         brings the hidden states, a part after the other, for all rounds of tiles

with `gated` one more warp,

    find_bounds     bounds that scores have to reach to be written  (`gate`)

and the other warps, each with a tile of words of its own,

    begin_tiles     which tile that is
    fill_ring       requests its first parts; of a constant embedding while the producer kernel runs
    ask_part        requests a part of a tile's words
    bring_words     loads a step of them to registers
    multiply_step   its products
    finish_tile     scores, the tile's largest ones, sums of exponentials

All together in the end,

    tell_sums       what each warp knows of its rows
    join_warps      a block's sums of exponentials  (`tiles.product`)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device import operands
from ...device.arithmetic import LOG2_E
from ...device.mbarriers import arrive_expecting, await_phase, bulk_copy
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.selection import FULL_WARP, order_bits
from ...device.state import Buffers, local, pooled, shared
from ...device.words import held_address, load_element
from ..best.sizes import VECTOR
from ..scales import factor_at, factors_of, head_capped
from ..tiles.product import LOWEST, MINUS_INFINITY, Place, join_warps, store_slice
from ..tiles.sizes import STEP
from .gate import FIRST_TOLD, OVER, find_bounds, look_up, say
from .space import HELD_PARTS, Extents

copy_vector = T.ptx.cp.async_.cg.shared.global_
load_matrices = T.ptx.ldmatrix.sync.aligned.m8n8.x4.shared.b16
load_floats = T.ptx.ld.shared.v4.f32
store_floats = T.ptx.st.global_.v4.f32
largest = T.ptx.max.NaN.f32
raise_two = T.ptx.ex2.approx.ftz.f32


@dataclass
class State(Buffers):
    """What the phases share."""

    # The list, of which there is one, and the first row of this block's strip.
    index: Any
    top: Any
    # Number of rows of the strip.
    rows: Any = local("int32")
    # The warp's tile in hand, the number of tiles, and the tile of the thread block's first warp, which decides whether
    # there is one more round.
    tile: Any = local("int32")
    end: Any = local("int32")
    first: Any = local("int32")
    # Sums of the tile in hand, in the order of `wgmma`.
    sums: Any = local("float32", lambda e: e.sums_each)
    # Words of the steps in hand: operand A.
    hand: Any = local("uint32", lambda e: e.in_hand * e.tile_n)
    # The address of the embedding; of the L2 cache, for words that leave it first.
    base: Any = local("uint64")
    policy: Any = local("uint64")
    # The tile that is requested next, which part of its rows, and the stage that receives it; and the stage in use.
    asked: Any = local("int32")
    part: Any = local("int32")
    asked_slot: Any = local("int32")
    slot: Any = local("int32")
    # Addresses: of the warp's ring, of what a lane copies first, and to where.
    ring_start: Any = local("uint32")
    from_: Any = local("uint64")
    to: Any = local("uint32")
    # Which of the parts of hidden states in shared memory is in hand; the parity of its mbarriers' phase.
    place: Any = local("int32")
    turn: Any = local("uint32")
    # The matrix descriptor of the first of these parts.
    descriptor: Any = local("uint64")
    # Whether a phase is over.
    done: Any = local("uint32")
    # For each of the lane's rows: the largest score so far, and the sum of exponentials relative to it.
    m: Any = local("float32", lambda e: e.turns)
    d: Any = local("float32", lambda e: e.turns)
    # A row's scores in a tile, biases of the lane's words, ordered bits, and values of another lane.
    own: Any = local("float32", lambda e: e.tile_n)
    added: Any = local("float32", lambda e: e.word_groups)
    bits: Any = local("uint32")
    other: Any = local("float32", 2)
    # Rows of a turn whose scores are written: a bit each.
    wanted: Any = local("uint32")
    # With `gated`, of the lane's rows: ordered bits that a tile's largest score has to reach, once they are found.
    bound: Any = local("uint32", lambda e: e.turns, when=lambda e: e.gated)
    # In the warp that finds bounds: ordered bits of the first tiles, and the largest of groups of them; how many reach
    # a bound; and the thread block's state (`said`).
    seen: Any = local("uint32", lambda e: ceildiv(e.first_tiles, 32), when=lambda e: e.gated)
    largest: Any = local("uint32", lambda e: e.groups_each, when=lambda e: e.gated)
    reached: Any = local("uint32", when=lambda e: e.gated)
    heard: Any = local("uint32", when=lambda e: e.gated)
    # Shared: mbarriers of parts of hidden states that have come, and that all warps have multiplied.
    full: Any = shared("uint64", HELD_PARTS)
    empty: Any = shared("uint64", HELD_PARTS)
    # Shared: the parts of hidden states; the stages of all warps.
    kept: Any = pooled("uint32", lambda e: e.ring_at // 4, 0)
    ring: Any = pooled("uint32", lambda e: (e.passed_at - e.ring_at) // 4, lambda e: e.ring_at // 4)
    # Shared: each warp's scores of 32 rows; in their place in the end what it knows of each row.
    passed: Any = pooled("float32", lambda e: e.passed_bytes // 4, lambda e: e.passed_at // 4)
    pairs: Any = pooled("float32", lambda e: e.tiles * e.tile_m * 2, lambda e: e.passed_at // 4)
    # Shared: with `gated`, the thread block's state (`gate`). It lies in the pool so that the pool begins at a multiple
    # of 128 bytes: 64 bytes further on, a call of 60 us took 10 us more.
    said: Any = pooled("uint32", 1, lambda e: e.said_at // 4, when=lambda e: e.gated)


def place_of(e: Extents, row: Any, vector: Any) -> Any:
    """Bytes from a stage's begin to a vector of a row's part. The same vectors of eight rows, which `ldmatrix` reads
    together, lie in different banks of shared memory."""
    return (row * e.part_vectors + (vector ^ (row % 8))) * VECTOR


def hand_at(e: Extents, step: Any, half: Any, f: Any) -> Any:
    """Where operand A of 16 columns of a step is in `hand`, of the f-th 16 words."""
    return ((step % e.in_hand * 4 + half) * (e.word_groups // 2) + f) * 4


# fmt: off
@phase
def begin(e, /, io, s, p):
    """Reads: the beam. Writes: `rows`, `full`, `empty`, `said`, `descriptor`, `policy`, `place`, `turn`. Barriers: of
    the thread block, at the end.
    """
    if p.t == 0:
        for i in T.unroll(HELD_PARTS):
            T.ptx.mbarrier.init.shared__cta.b64(s.full.ptr_to([i]), T.uint32(1))
            T.ptx.mbarrier.init.shared__cta.b64(s.empty.ptr_to([i]), T.uint32(e.tiles))
        if e.gated > 0:
            s.said[0] = T.uint32(0)
        T.ptx.fence.mbarrier_init.release.cluster()
    start = T.meta_var(held_address("u32", T.cuda.cvta_generic_to_shared(s.kept.ptr_to([0]))))
    s.rows[0] = T.min(io.beam - s.top, e.tile_m)
    s.descriptor[0] = operands.matrices(start, s.rows[0])
    if e.evict_first > 0:
        T.ptx.createpolicy.fractional.L2__evict_first.b64(s.policy[0])
    s.place[0] = 0
    s.turn[0] = T.uint32(0)
    T.cuda.cta_sync()


@T.inline
def next_place(s):
    """Reads and writes: `place`, `turn`. Barriers: none."""
    s.place[0] = s.place[0] + 1
    if s.place[0] == HELD_PARTS:
        s.place[0] = 0
        s.turn[0] = s.turn[0] ^ T.uint32(1)


@phase
def produce(e, /, io, s, block, matrices):
    """The producer warp's work, for one thread.

    Reads: `matrices`.
    Writes: `kept`, part after part, for each round of tiles; scratch is `place`, `turn`, `first`.
    Barriers: none; awaits `empty`, and has copies arrive at `full`.
    """
    words: T.int32 = s.rows[0] * (e.part_vectors * (VECTOR // 4))  # of a part
    s.first[0] = block
    while s.first[0] * e.tile_n < io.vocab:
        for part in T.serial(e.parts):
            # At first no phase has begun, and the one before it counts as over: the first parts find room.
            await_phase(s.done, s.empty.ptr_to([s.place[0]]), s.turn[0] ^ T.uint32(1))
            full = T.meta_var(s.full.ptr_to([s.place[0]]))
            arrive_expecting(full, T.Cast("uint32", words * 4))
            bulk_copy(
                s.kept.ptr_to([s.place[0] * (e.held_part_bytes // 4)]),
                matrices.ptr_to([s.top, part * words]), T.Cast("uint32", words * 4), full)
            next_place(s)
        s.first[0] = s.first[0] + e.stride


def ask_part(e: Extents) -> Phase:
    """Ask for the next part of a tile's words, or for nothing, as a group of copies; the phase is (io, s, p).

    Reads: `asked`, `part`, `asked_slot`.
    Writes: those, moved on; `ring`, by and by: zeros beyond the last column and the last word.
    Barriers: none. One of the warp has to come before: nothing may still be read of the stage that is overwritten.
    """
    vectors, row_bytes = e.part_vectors, e.vectors * VECTOR
    rows = 32 // vectors  # of a copy

    def size(io: Any, s: Any, p: Place, i: Any) -> tirx.PrimExpr:
        """Bytes that there are: all, or none."""
        inside = s.asked[0] * e.tile_n + (i * rows + p.lane // vectors) < io.vocab
        if e.uneven:
            inside = T.And(inside, s.part[0] * vectors + p.lane % vectors < e.vectors)
        return T.Select(inside, T.uint32(VECTOR), T.uint32(0))

    def copy(s: Any, to: Any, from_: Any, size: Any) -> tirx.PrimExpr:
        if e.evict_first:
            return copy_vector.L2__cache_hint(to, from_, VECTOR, size, s.policy[0])
        return copy_vector(to, from_, VECTOR, size)

    @T.inline
    def copy_rows(io, s, p, whole):
        for i in T.unroll(e.tile_n // rows):
            copy(
                s, s.to[0] + T.Cast("uint32", place_of(e, i * rows + p.lane // vectors, p.lane % vectors)),
                T.ptx.addr(s.from_[0], i * (rows * row_bytes)), T.uint32(VECTOR) if whole else size(io, s, p, i))

    @T.inline
    def phase(io, s, p):
        if s.asked[0] < s.end[0]:
            s.from_[0] = (
                s.base[0] + T.Cast("uint64", s.asked[0]) * T.uint64(e.tile_n * row_bytes) + T.Cast(
                    "uint64",
                    p.lane // vectors * row_bytes + p.lane % vectors * VECTOR + s.part[0] * (vectors * VECTOR)))
            s.to[0] = s.ring_start[0] + T.Cast("uint32", s.asked_slot[0] * e.stage_bytes)
            if e.uneven:
                copy_rows(io, s, p, False)
            else:
                if (s.asked[0] + 1) * e.tile_n <= io.vocab:
                    copy_rows(io, s, p, True)
                else:
                    copy_rows(io, s, p, False)
            s.part[0] = s.part[0] + 1
            if s.part[0] == e.parts:
                s.part[0] = 0
                s.asked[0] = s.asked[0] + e.stride
        s.asked_slot[0] = T.Select(s.asked_slot[0] == e.stages - 1, 0, s.asked_slot[0] + 1)
        T.ptx.cp.async_.commit_group()

    return phase


@phase
def bring_words(e, /, s, p, step):
    """A step of a stage.

    Reads: `ring`. Writes: `hand`, in the half that is this step's. Barriers: none, but all lanes of a warp take part.
    """
    for half in T.unroll(4):
        for f in T.unroll(e.word_groups // 2):
            i = T.meta_var(hand_at(e, step, half, f))
            # Eight lanes have a matrix: of the first eight words or the others, and of the first eight columns or
            # the others.
            row = T.meta_var(f * 16 + p.lane % 16)
            load_matrices(
                s.hand[i], s.hand[i + 1], s.hand[i + 2], s.hand[i + 3],
                s.ring_start[0] + T.Cast("uint32", s.slot[0] * e.stage_bytes + step * STEP)
                + T.Cast("uint32", place_of(e, row, half * 2 + p.lane // 16)))


def of_sixteen(e: Extents, s: Any, step: Any, half: Any, f: Any) -> tirx.PrimExpr:
    """16 columns of 16 words each of four warps."""
    first, a = f * (4 * e.row_groups), hand_at(e, step, half, f)
    matrix = s.place[0] * (e.part_vectors * e.tile_m) + (step * 8 + half * 2) * s.rows[0]
    return operands.product(e.dtype, e.tile_m)(
        *(s.sums[first + i] for i in range(4 * e.row_groups)),
        s.hand[a], s.hand[a + 1], s.hand[a + 2], s.hand[a + 3],
        s.descriptor[0] + T.Cast("uint64", matrix), T.bool(True), 1, 1, 0)


@phase
def multiply_step(e, /, s, step):
    """Multiply a step of a part.

    Reads: `hand`, until the products are awaited; `kept`, of the part in hand.
    Writes: adds the products to `sums`, by and by.
    Barriers: none, but all warps of a warpgroup take part.
    """
    operands.fence()
    for half in T.unroll(4):
        for f in T.unroll(e.word_groups // 2):
            of_sixteen(e, s, step, half, f)
    operands.commit()


def score(e: Extents, io: Any, s: Any, p: Place, g: Any, i: Any, n: Any, whole: bool) -> tirx.PrimExpr:
    """The score of the lane's n-th word, `n * 8 + group`: a fragment of 16 words has two of them."""
    found = head_capped(io, s.sums[(n // 2 * e.row_groups + g) * 4 + n % 2 * 2 + i])
    if io.bias is not None:
        found = found + s.added[n]
    if whole:
        return found
    return T.Select(s.tile[0] * e.tile_n + n * 8 + p.group < io.vocab, found, MINUS_INFINITY)


@phase
def pass_on(e, /, io, s, p, turn, whole):
    """Those of the turn's rows to `passed`."""
    for g in T.unroll(4):
        for i in T.unroll(2):
            for n in T.unroll(e.word_groups):
                if turn * 4 + g < e.row_groups:
                    row = T.meta_var(p.team * 32 + g * 8 + p.member * 2 + i)
                    s.passed[row * e.pitch + n * 8 + p.group] = score(e, io, s, p, turn * 4 + g, i, n, whole)


@phase
def weigh(e, /, io, s, p, turn, factor):
    """What they add to the lane's row, and the tile's largest score to `bits`."""
    for v in T.unroll(e.tile_n // 4):
        load_floats(
            s.own[v * 4], s.own[v * 4 + 1], s.own[v * 4 + 2], s.own[v * 4 + 3],
            s.passed.ptr_to([(p.team * 32 + p.lane) * e.pitch + v * 4]))
    s.other[0] = s.own[0]
    s.other[1] = s.own[1]
    for n in T.unroll(e.tile_n - 2):
        largest(s.other[n % 2], s.other[n % 2], s.own[n + 2])
    largest(s.other[0], s.other[0], s.other[1])
    s.bits[0] = order_bits(s.other[0])
    if e.draws:
        s.m[turn] = LOWEST
        s.d[turn] = T.float32(0)
    # Not below the lowest number: the difference of two infinities would be NaN.
    s.other[0] = T.max(s.other[0], s.m[turn])
    s.d[turn] = s.d[turn] * T.exp2((s.m[turn] - s.other[0]) * factor_at(factor, turn))
    for n in T.unroll(e.tile_n):
        raise_two(s.other[1], (s.own[n] - s.other[0]) * factor_at(factor, turn))
        s.d[turn] = s.d[turn] + s.other[1]
    s.m[turn] = s.other[0]


@phase
def tell(e, /, io, s, p, turn):
    """Find the rows whose scores are to be written, and write the largest score that each has in this tile.

    Reads: `rows`, `bits`, `bound`. Writes: `tops`, `wanted` (bit l: the row of lane l). Barriers: none, but all lanes
    take part.
    """
    reaches: T.bool = turn * 32 + p.lane < s.rows[0]
    if e.gated > 0:
        reaches = T.And(reaches, s.bits[0] >= s.bound[turn])
    if reaches:
        T.buffer_store(io.tops, s.bits[0], [s.top + turn * 32 + p.lane, s.tile[0]])
    s.wanted[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), reaches)


@phase
def store(e, /, io, s, p, turn):
    """Store a warp's scores of 32 rows to global memory, 16 bytes a lane, so that sectors are written whole.

    Reads: `passed`, `wanted`. Writes: `scores` of the rows whose bit in `wanted` is set; scratch is `own`. Barriers:
    none.
    """
    quads = T.meta_var(e.tile_n // 4)
    for j in T.unroll(quads):
        row = T.meta_var(j * (32 // quads) + p.lane // quads)
        load_floats(
            s.own[j * 4], s.own[j * 4 + 1], s.own[j * 4 + 2], s.own[j * 4 + 3],
            s.passed.ptr_to([(p.team * 32 + row) * e.pitch + p.lane % quads * 4]))
    for j in T.unroll(quads):
        row = T.meta_var(j * (32 // quads) + p.lane // quads)
        if (s.wanted[0] >> T.Cast("uint32", row)) & T.uint32(1) != T.uint32(0):
            store_floats(
                io.scores.ptr_to(
                    [s.top + turn * 32 + row, s.tile[0] * e.tile_n + p.lane % quads * 4]),
                s.own[j * 4], s.own[j * 4 + 1], s.own[j * 4 + 2], s.own[j * 4 + 3])


@phase
def finish_tile(e, /, io, s, p, factor):
    """Write and sum up a warp's scores of a tile, 32 rows after another.

    Reads: `sums`; the bias; with `gated` bounds.
    Writes: `scores`, -inf beyond the last word; each row's largest in `tops`; `m` and `d` of the lane's rows. With
        `gated`, rows whose largest score is below their bound get neither scores nor a largest one. For a draw
        `slices` alone, of the tile's own `m` and `d`.
    Barriers: of the warp.
    """
    if io.bias is not None:
        for n in T.unroll(e.word_groups):
            s.added[n] = load_element("float32", io.bias.ptr_to([T.min(
                s.tile[0] * e.tile_n + n * 8 + p.group, io.vocab - 1)]))
    if e.gated > 0:
        look_up(e)(io, s, p)
    for turn in T.unroll(e.turns):
        if (s.tile[0] + 1) * e.tile_n <= io.vocab:
            pass_on(e)(io, s, p, turn, True)
        else:
            pass_on(e)(io, s, p, turn, False)
        T.cuda.warp_sync()
        if turn * 32 + p.lane < s.rows[0]:
            weigh(e)(io, s, p, turn, factor)
            if e.draws:
                store_slice(io.slices, s.top + turn * 32 + p.lane, s.tile[0], s.bits[0], s.d[turn])
        if not e.draws:
            tell(e)(io, s, p, turn)
            if s.wanted[0] != T.uint32(0):
                store(e)(io, s, p, turn)
        T.cuda.warp_sync()


@phase
def begin_tiles(e, /, io, s, p, block):
    """Reads: the embedding's address. Writes: registers of a warp that multiplies. Barriers: none."""
    s.base[0] = held_address("u64", io.embedding.ptr_to([0, 0]))
    s.tile[0] = p.team * e.blocks + block
    s.end[0] = (io.vocab + (e.tile_n - 1)) // e.tile_n
    for i in T.unroll(e.turns):
        s.m[i] = LOWEST
        s.d[i] = T.float32(0)
        if e.gated > 0:
            s.bound[i] = T.uint32(0)
    s.asked[0] = s.tile[0]
    s.part[0] = 0
    s.slot[0] = 0
    s.asked_slot[0] = 0
    s.ring_start[0] = held_address("u32", T.cuda.cvta_generic_to_shared(
        s.ring.ptr_to([p.team * (e.stages * e.stage_bytes // 4)])))


@phase
def fill_ring(e, /, io, s, p):
    """Ask for the parts that the warp's ring has room for; as `ask_part`."""
    for _ in T.serial(e.stages):
        ask_part(e)(io, s, p)


@phase
def multiply_part(e, /, io, s, p):
    """Multiply one step while the next one's words are loaded to registers."""
    for step in T.unroll(e.depth):
        if step > 1:
            # Words come in the place of those before the last ones.
            operands.wait(1)
        bring_words(e)(s, p, step)
        if step == e.depth - 1:
            # All lanes have the stage's words.
            T.cuda.warp_sync()
            ask_part(e)(io, s, p)
        if step == 0:
            await_phase(s.done, s.full.ptr_to([s.place[0]]), s.turn[0])
        multiply_step(e)(s, step)
    operands.wait(0)
    # What `wgmma` has read of a part, all warps have read when they all say so.
    T.cuda.warp_sync()
    if p.lane == 0:
        arrive_expecting(s.empty.ptr_to([s.place[0]]), T.uint32(0))


@phase
def consume(e, /, io, s, p, block, factor):
    """The multiplying warps' work.

    Reads: `ring`, all of whose stages are requested; words; `kept`; the bias.
    Writes: what `finish_tile` does.
    Barriers: of the warp; awaits `full`, and arrives at `empty`.
    """
    s.first[0] = block
    while s.first[0] < s.end[0]:
        for i in T.unroll(e.sums_each):
            s.sums[i] = T.float32(0)
        # A warp without a tile multiplies whatever its ring holds: the warps of a warpgroup multiply together.
        for _ in T.serial(e.parts):
            T.ptx.cp.async_.wait_group(e.stages - 1)
            T.cuda.warp_sync()
            multiply_part(e)(io, s, p)
            next_place(s)
            s.slot[0] = T.Select(s.slot[0] == e.stages - 1, 0, s.slot[0] + 1)
        if s.tile[0] < s.end[0]:
            finish_tile(e)(io, s, p, factor)
        if e.gated > 0:
            if p.t == 0 and s.first[0] == block:
                say(s, FIRST_TOLD)
        s.tile[0] = s.tile[0] + e.stride
        s.first[0] = s.first[0] + e.stride
    if e.gated > 0:
        if p.t == 0:
            say(s, OVER)


@phase
def tell_sums(e, /, s, p):
    """Reads: `m`, `d`. Writes: `pairs`, the warp's. Barriers: of the thread block, at the begin: all scores have been
    passed on.
    """
    T.cuda.cta_sync()
    for turn in T.unroll(e.turns):
        if p.team < e.tiles and turn * 32 + p.lane < e.tile_m:
            at = T.meta_var((p.team * e.tile_m + turn * 32 + p.lane) * 2)
            s.pairs[at] = s.m[turn]
            s.pairs[at + 1] = s.d[turn]


@phase
def product(e, /, io):
    """The kernel."""
    with device_region():
        block, y = T.cta_id([e.blocks, (io.beam + (e.tile_m - 1)) // e.tile_m])
        t = T.thread_id([e.block_threads])
        p = T.meta_var(Place(t, 1))
        s = T.meta_var(State.alloc(e, e.pool_of_product, index=0, top=y * e.tile_m))
        factor: T.float32 = io.scale * T.float32(LOG2_E)
        begin(e)(io, s, p)
        if p.team < e.tiles:
            begin_tiles(e)(io, s, p, block)
            # What the producer kernel cannot have written comes while it runs.
            if io.constant != 0:
                fill_ring(e)(io, s, p)
        wait_then_start_consumer()
        if p.team < e.tiles:
            if io.constant == 0:
                fill_ring(e)(io, s, p)
            factors = T.meta_var(factors_of(io, [s.top + i * 32 + p.lane for i in range(e.turns)], factor))
            consume(e)(io, s, p, block, factors)
        elif p.team == e.tiles:
            if p.lane == 0:
                produce(e)(io, s, block, io.matrices)
        elif e.gated > 0:
            find_bounds(e)(io, s, p, block)
        if not e.draws:
            tell_sums(e)(s, p)
            join_warps(e)(io, s, p, block, io.sums, factor)
# fmt: on
