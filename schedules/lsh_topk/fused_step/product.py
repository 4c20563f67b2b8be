"""The product of `fused_step`: words from memory times hidden states in shared memory.

    stage_states    the group's hidden states
    first_jobs      of a tile of words: names, and then the words themselves, asked for by some of the warps
    multiply_tile   the tile, part by part
    multiply_rest   words beyond the first tile, and those that the thread block won, by all warps
    finish_tile     the parts' sums: keys, and the largest of a row
    clear_slots     places that no word has

A lane's 16 bytes of a row are eight columns (of float32 four), which it takes in the order in which they lie: both
operands of a product have them in the same order, whatever that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.arithmetic import LOG2_E
from ...device.selection import FULL_WARP, join_key, order_bits
from ...device.words import held_address
from ...output_layer.tiles.product import split
from .powers import add_power, two_to, unit_of_bits
from .space import CHUNK, FRAGMENT, LISTED, PER_JOB, REST, TILE, VECTOR, WARP, Extents

Phase = Callable[..., Any]
load_once = T.ptx.ld.global_.L1__no_allocate.v4.u32
load_vector = T.ptx.ld.global_.v4.u32
load_shared = T.ptx.ld.shared.v4.u32
store_shared = T.ptx.st.shared.v4.u32
PER_CHUNK = CHUNK // VECTOR


@dataclass(frozen=True)
class Words:
    """What is multiplied together.

    Attributes
    ----------
    most
        How many words there is room for.
    warps
        Of the thread block, the first ones, that multiply them,
    depth
        and how many jobs each of them has in hand.
    named
        Whether their names stay in the thread block's `names`.
    sums
        (s) is where their parts go, `[row][word][part]`.
    name
        (s, io, i, word) writes the i-th of them to `word`.
    keep
        (s, io, row, i) puts `key`, that of the i-th one and a row of the group, where it belongs, if it does.
    counted
        (s, i, row) is whether the i-th one is a candidate of a row of the group, and at one of the block's own places.
    """

    most: int
    warps: int
    depth: int
    named: bool
    sums: Callable[..., Any]
    name: Callable[..., Any]
    keep: Callable[..., Any]
    counted: Callable[..., Any]


# Barrier 0 is that of the whole thread block.
MEET = """
__device__ __forceinline__ void meet_some(int threads) {
  asm volatile("bar.sync 1, %0;" :: "r"(threads) : "memory");
}
"""


def meet_some(threads: int) -> None:
    """A barrier of the first threads of the thread block."""
    T.evaluate(T.cuda.func_call("meet_some", threads, source_code=MEET, return_type="void"))


# fmt: off
def frequent_words(e: Extents) -> Words:
    """The first of the thread block's frequent words."""

    @T.inline
    def name(s, io, i, word):
        T.ptx.ld.global_.s32(word[0], io.ids.ptr_to([s.begin + i]))

    @T.inline
    def keep(s, io, row, i):
        io.keys[s.first_row + row, s.begin + i] = s.key[0]

    return Words(e.tile, e.product_warps, e.depth, True, lambda s: s.sums, name, keep, lambda s, i, row: True)


def rest_of_words(e: Extents) -> Words:
    """Those that had no room, from the `round`-th `REST` of them on, and then the words that the thread block won."""

    def behind(s: Any, i: Any) -> Any:
        """Its number among the words that were won, if that is not negative."""
        return s.round * REST + i - s.spare

    @T.inline
    def name(s, io, i, word):
        if behind(s, i) >= 0:
            word[0] = s.won[T.max(behind(s, i), 0)]
        else:
            T.ptx.ld.global_.s32(word[0], io.ids.ptr_to([s.begin + e.tile + s.round * REST + i]))

    def owned(s: Any, i: Any, row: Any) -> Any:
        return e.group_lists == 1 or s.owners[T.max(behind(s, i), 0)] == row // e.beam

    @T.inline
    def keep(s, io, row, i):
        if behind(s, i) >= 0:
            if owned(s, i, row):
                io.others[s.first_row + row, s.places[T.max(behind(s, i), 0)]] = s.key[0]
        else:
            io.keys[s.first_row + row, s.begin + e.tile + s.round * REST + i] = s.key[0]

    def counted(s: Any, i: Any, row: Any) -> Any:
        mine = tirx.all(s.places[T.max(behind(s, i), 0)] < e.slots, owned(s, i, row))
        return tirx.any(behind(s, i) < 0, mine)

    depth = e.depth if e.row_blocks else 1
    return Words(REST, e.warps, depth, False, lambda s: s.rest, name, keep, counted)


def stage_states(e: Extents) -> Phase:
    """Hidden states to shared memory, by the first `product_warps` alone; the phase is (s, io).

    Reads: `hidden`. Writes: `states`, with zeros behind columns and rows that there are not; `odd`, `is_odd`.
    Barriers: one of these warps, at the end.
    """
    each = e.chunks * PER_CHUNK
    elements = VECTOR // e.itemsize
    threads = e.product_warps * WARP
    rounds, at_once = ceildiv(e.rows * each, threads), 4

    @T.inline
    def phase(s, io):
        rows = T.decl_buffer((io.lists * e.beam * e.hidden,), e.dtype, data=io.hidden.data)
        held = T.alloc_local([at_once * 4], "uint32")
        high = T.alloc_local([4], "uint32")
        low = T.alloc_local([4], "uint32")
        finite = T.alloc_local([4], "uint32")
        for n in T.serial(ceildiv(rounds, at_once)):
            for u in T.unroll(at_once):
                i = T.meta_var((n * at_once + u) * threads + s.t)
                for v in T.unroll(4):
                    held[u * 4 + v] = T.uint32(0)
                if i // each < s.rows and i % each < e.vectors:
                    load_vector(*[held[u * 4 + v] for v in range(4)],
                                rows.ptr_to([(s.first_row + i // each) * e.hidden + i % each * elements]))
            for u in T.unroll(at_once):
                i = T.meta_var((n * at_once + u) * threads + s.t)
                if i < e.rows * each:
                    if e.halves == 2:
                        for v in T.unroll(4):
                            split(held[u * 4 + v], high, low, finite, v)
                            if finite[v] != high[v]:
                                s.odd[0] = 1
                        store_shared(s.states.ptr_to([(i // each * e.pitch + i % each) * 4]),
                                     *[high[v] for v in range(4)])
                        store_shared(s.states.ptr_to([e.half_bytes // 4 + (i // each * e.pitch + i % each) * 4]),
                                     *[low[v] for v in range(4)])
                    else:
                        store_shared(s.states.ptr_to([(i // each * e.pitch + i % each) * 4]),
                                     *[held[u * 4 + v] for v in range(4)])
        meet_some(threads)
        s.is_odd = s.odd[0]

    return phase


def name_words(e: Extents, words: Words) -> Phase:
    """The word that a lane loads for a job; the phase is (s, io, slot, job, count).

    Reads: names. Writes: `word`; of frequent words `names`. Barriers: none.
    """

    @T.inline
    def phase(s, io, slot, job, count):
        s.word[slot] = 0
        if job // e.parts * TILE + s.group < count:
            name = T.alloc_local([1], "int32")
            words.name(s, io, job // e.parts * TILE + s.group, name)
            s.word[slot] = name[0]
            if words.named:
                if job % e.parts == 0 and s.member == 0:
                    s.names[job // e.parts * TILE + s.group] = name[0]

    return phase


def ask_words(e: Extents) -> Phase:
    """Begin the loads of a job; the phase is (s, io, slot, job, count).

    Reads: `word`, `embedding`. Writes: `hand`, zeros behind columns and words that there are not. Barriers: none.
    """
    elements = VECTOR // e.itemsize

    @T.inline
    def phase(s, io, slot, job, count):
        for c in T.unroll(PER_JOB):
            vector = T.meta_var((job % e.parts * PER_JOB + c) * PER_CHUNK + s.member)
            at = (slot * PER_JOB + c) * 4
            for v in T.unroll(4):
                s.hand[at + v] = T.uint32(0)
            if vector < e.vectors and job // e.parts * TILE + s.group < count:
                load_once(s.hand[at], s.hand[at + 1], s.hand[at + 2], s.hand[at + 3],
                          io.embedding.ptr_to([s.word[slot], vector * elements]))

    return phase


def multiply_job(e: Extents) -> Phase:
    """Multiply a job with all hidden states; the phase is (s, slot, job).

    Sums are made in chains that do not wait for each other: of float32 one for each of three products of tf32, as
    `output_layer.tiles` makes them, else one for each half of a chunk. Hidden states are asked for a step ahead.

    Reads: `hand`, `states`. Writes: `chains`. Barriers: none, but all lanes take part.
    """
    kind = {"float16": "f16", "bfloat16": "bf16"}.get(e.dtype)
    halves = getattr(getattr(T.ptx.mma.sync.aligned.m16n8k16.row.col.f32, kind), kind).f32 if kind else None
    floats = T.ptx.mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
    each, vectors = e.fragments * 4, 2 * e.halves
    steps = PER_JOB * e.fragments

    @T.inline
    def of_halves(s, f, w, at):
        for i in T.unroll(2):
            sums = T.meta_var([s.chains[i * each + f * 4 + v] for v in range(4)])
            halves(*sums, s.state[at + i * 2], s.state[at + 4 + i * 2], s.state[at + i * 2 + 1],
                   s.state[at + 4 + i * 2 + 1], s.hand[w + i * 2], s.hand[w + i * 2 + 1], *sums)

    @T.inline
    def of_floats(s, f, w, at):
        """Hidden states are in halves already."""
        finite = T.alloc_local([4], "uint32")
        for i in T.unroll(2):
            high = T.meta_var([s.state[at + v % 2 * 4 + i * 2 + v // 2] for v in range(4)])
            low = T.meta_var([s.state[at + 8 + v % 2 * 4 + i * 2 + v // 2] for v in range(4)])
            first, second, third = T.meta_var([[s.chains[c * each + f * 4 + v] for v in range(4)] for c in range(3)])
            for v in T.unroll(4):
                finite[v] = s.state[at + v % 2 * 4 + i * 2 + v // 2]
            if s.is_odd != 0:
                for v in T.unroll(4):
                    if (finite[v] & T.uint32(0x7F800000)) == T.uint32(0x7F800000):
                        finite[v] = T.uint32(0)
            floats(*second, *low, s.b_finite[i * 2], s.b_finite[i * 2 + 1], *second)
            floats(*first, *high, s.b_high[i * 2], s.b_high[i * 2 + 1], *first)
            floats(*third, *[finite[v] for v in range(4)], s.b_low[i * 2], s.b_low[i * 2 + 1], *third)

    multiply = of_halves if kind else of_floats

    @T.inline
    def bring(s, from_part, step):
        for y in T.unroll(vectors):
            at = step % 2 * (vectors * 4) + y * 4
            load_shared(
                s.state[at], s.state[at + 1], s.state[at + 2], s.state[at + 3],
                from_part + T.uint32(y // 2 * e.half_bytes
                                     + (step % e.fragments * FRAGMENT + y % 2 * 8) * e.pitch * VECTOR
                                     + step // e.fragments * CHUNK))

    @T.inline
    def phase(s, slot, job):
        # Held, so that what all chunks share is not computed for each of them.
        states: T.uint32 = held_address(
            "u32", T.cuda.cvta_generic_to_shared(s.states.ptr_to([(s.group * e.pitch + s.member) * 4])))
        from_part: T.uint32 = states + T.Cast("uint32", job % e.parts * (PER_JOB * CHUNK))
        for i in T.unroll(e.chains * each):
            s.chains[i] = T.float32(0)
        bring(s, from_part, 0)
        for step in T.unroll(steps):
            c = step // e.fragments
            # Chunks beyond a row's last one are those of the next row's.
            if e.chunks % PER_JOB == 0 or job % e.parts * PER_JOB + c < e.chunks:
                if step + 1 < steps:
                    if e.chunks % PER_JOB == 0 or job % e.parts * PER_JOB + (step + 1) // e.fragments < e.chunks:
                        bring(s, from_part, step + 1)
                if e.halves == 2 and step % e.fragments == 0:
                    for v in T.unroll(4):
                        split(s.hand[(slot * PER_JOB + c) * 4 + v], s.b_high, s.b_low, s.b_finite, v)
                multiply(s, step % e.fragments, (slot * PER_JOB + c) * 4, step % 2 * (vectors * 4))

    return phase


def first_jobs(e: Extents, words: Words, do: Phase) -> Phase:
    """`do(s, io, slot, job, count)` for the first jobs of a tile of `count` words, as many as a warp has in hand; the
    phase is (s, io, count), for the words' warps."""

    @T.inline
    def phase(s, io, count):
        for d in T.unroll(words.depth):
            if s.warp + d * words.warps < (count + (TILE - 1)) // TILE * e.parts:
                do(s, io, d, s.warp + d * words.warps, count)

    return phase


def multiply_tile(e: Extents, words: Words) -> Phase:
    """The parts of the scores of `count` words; the phase is (s, io, count), for the words' warps.

    Reads: `hand`, which the first jobs' loads fill; words, `states`. Writes: their sums; of frequent words `names`.
    Barriers: none; one has to follow.
    """
    name, ask, multiply = name_words(e, words), ask_words(e), multiply_job(e)
    each = e.fragments * 4

    @T.inline
    def put(s, job):
        sums = T.meta_var(words.sums(s))
        for f in T.unroll(e.fragments):
            for i in T.unroll(4):
                for c in T.unroll(e.chains - 1):
                    s.chains[f * 4 + i] = s.chains[f * 4 + i] + s.chains[(c + 1) * each + f * 4 + i]
                sums[((f * FRAGMENT + i // 2 * 8 + s.group) * words.most + job // e.parts * TILE + s.member * 2 + i % 2)
                     * e.parts + job % e.parts] = s.chains[f * 4 + i]

    @T.inline
    def phase(s, io, count):
        jobs: T.int32 = (count + (TILE - 1)) // TILE * e.parts
        for n in T.serial((jobs + (words.warps * words.depth - 1)) // (words.warps * words.depth)):
            for d in T.unroll(words.depth):
                s.job = (n * words.depth + d) * words.warps + s.warp
                if s.job < jobs:
                    multiply(s, d, s.job)
                    put(s, s.job)
                    if s.job + words.depth * words.warps < jobs:
                        name(s, io, d, s.job + words.depth * words.warps, count)
                        ask(s, io, d, s.job + words.depth * words.warps, count)

    return phase


def finish_tile(e: Extents, words: Words) -> Phase:
    """Scores to keys, a warp a row, by all warps; the phase is (s, io, count).

    Reads: sums, `bias`. Writes: keys; `best` and `exponentials`, of words that count. Barriers: of the warp; one of
    the thread block has to come before.
    """

    @T.inline
    def add_parts(s, sums, at):
        four = T.alloc_local([4], "uint32")
        s.score[0] = T.float32(0)
        for p in T.unroll(e.parts // 4):
            load_shared(four[0], four[1], four[2], four[3], sums.ptr_to([at + p * 4]))
            for v in T.unroll(4):
                s.score[0] = s.score[0] + T.reinterpret("float32", four[v])

    @T.inline
    def add_each(s, sums, at):
        s.score[0] = T.float32(0)
        for p in T.unroll(e.parts):
            s.score[0] = s.score[0] + sums[at + p]

    add = add_parts if e.parts % 4 == 0 else add_each
    rounds = ceildiv(words.most, WARP)

    @T.inline
    def join(s, row, factor):
        """The powers of this tile's scores and those before, which `best` is the largest of."""
        unit: T.float32 = unit_of_bits(T.max(s.best[row], s.largest[0]), factor)
        s.d[0] = T.float64(0)
        for n in T.unroll(rounds):
            add_power(s.d, s.rest_power, s.held[n], factor, unit)
        for b in T.unroll(5):
            s.d[0] = s.d[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.d[0], 1 << b, 32, 32)
        if s.lane == 0:
            if s.best[row] != T.uint32(0):
                s.d[0] = s.d[0] + s.exponentials[row] * T.Cast(
                    "float64", two_to(unit_of_bits(s.best[row], factor) - unit))
            s.exponentials[row] = s.d[0]
            s.best[row] = T.max(s.best[row], s.largest[0])

    @T.inline
    def phase(s, io, count):
        sums = T.meta_var(words.sums(s))
        factor: T.float32 = io.scale * T.float32(LOG2_E)
        for r in T.serial((s.rows - s.warp + (e.warps - 1)) // e.warps):
            row: T.int32 = r * e.warps + s.warp
            s.largest[0] = T.uint32(0)
            for n in T.unroll(rounds):
                s.held[n] = T.float32("-inf")
                i = T.meta_var(n * WARP + s.lane)
                if i < count:
                    add(s, sums, (row * words.most + i) * e.parts)
                    if words.named:
                        s.word[0] = s.names[i]
                    else:
                        words.name(s, io, i, s.word)
                    if e.bias:
                        s.score[0] = s.score[0] + io.bias[s.word[0]]
                    s.bits[0] = order_bits(s.score[0])
                    s.key[0] = join_key(s.bits[0], s.word[0])
                    words.keep(s, io, row, i)
                    if words.counted(s, i, row):
                        s.held[n] = s.score[0]
                        s.largest[0] = T.max(s.largest[0], s.bits[0])
            s.largest[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.largest[0])
            if s.largest[0] != T.uint32(0):
                join(s, row, factor)

    return phase


def clear_slots(e: Extents) -> Phase:
    """0 at the thread block's own places that no word has; the phase is (s, io).

    Reads: `listed`, `owners`. Writes: keys. Barriers: none; one has to come before.
    """

    @T.inline
    def phase(s, io):
        for n in T.serial((s.rows * e.own_slots - s.t + (e.threads - 1)) // e.threads):
            row = T.meta_var((n * e.threads + s.t) // e.own_slots)
            i = T.meta_var((n * e.threads + s.t) % e.own_slots)
            if i >= s.listed[0] or s.owners[i] != row // e.beam:
                io.others[s.first_row + row, s.block * e.own_slots + i] = T.uint64(0)

    return phase


def multiply_rest(e: Extents, frequent: Words) -> Phase:
    """All other words of the thread block, a list of those that it won at a `turn`; the phase is (s, io, turn).

    While memory sends the first of them, the tile of frequent words is finished.

    Barriers: some of the thread block; one has to come before.
    """
    words = rest_of_words(e)
    name, ask = first_jobs(e, words, name_words(e, words)), first_jobs(e, words, ask_words(e))
    multiply, finish, finish_frequent = multiply_tile(e, words), finish_tile(e, words), finish_tile(e, frequent)

    @T.inline
    def phase(s, io, turn):
        many: T.int32 = s.spare + T.min(s.listed[0], LISTED)
        s.is_odd = s.odd[0]
        for n in T.serial((T.max(many, 1) + (REST - 1)) // REST):
            s.round = n
            name(s, io, T.min(many - n * REST, REST))
            ask(s, io, T.min(many - n * REST, REST))
            if turn == 0 and n == 0:
                finish_frequent(s, io, T.min(s.mine, e.tile))
            multiply(s, io, T.min(many - n * REST, REST))
            T.cuda.cta_sync()
            finish(s, io, T.min(many - n * REST, REST))
            T.cuda.cta_sync()

    return phase
# fmt: on
