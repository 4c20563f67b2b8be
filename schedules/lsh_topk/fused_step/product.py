"""The product of `fused_step`: words from memory times hidden states in shared memory.

    stage_states    the group's hidden states
    find_share      which of the words that reach the threshold are the thread block's
    multiply_all    all of some words, a tile at a time:
    ask_first       words asked for,
    multiply_tile   multiplied part by part, while further ones come,
    finish_tile     and the parts' sums: keys, and the largest of a row

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
from .space import CHUNK, FRAGMENT, HALF, TILE, VECTOR, WARP, Extents

Phase = Callable[..., Any]
load_once = T.ptx.ld.global_.L1__no_allocate.v4.u32
load_anew = T.ptx.ld.relaxed.gpu.global_.v4.u32
IN_FLIGHT = 8  # vectors of hidden states that a thread asks for together, where it splits them
load_shared = T.ptx.ld.shared.v4.u32
store_shared = T.ptx.st.shared.v4.u32
PER_CHUNK = CHUNK // VECTOR


@dataclass(frozen=True)
class Words:
    """What is multiplied together, `tile` words at a time.

    Attributes
    ----------
    name
        (s, io, i, word) writes the i-th of all to `word`.
    keep
        (s, io, row, i) puts `key`, that of the i-th one and a row of the group, where it belongs, if it does.
    counted
        (s, i, row) is whether the i-th one is a candidate of a row of the group.
    """

    name: Callable[..., Any]
    keep: Callable[..., Any]
    counted: Callable[..., Any]


# fmt: off
def frequent_words(e: Extents) -> Words:
    """The thread block's frequent words."""

    @T.inline
    def name(s, io, i, word):
        T.ptx.ld.global_.s32(word[0], io.ids.ptr_to([s.begin + i]))

    @T.inline
    def keep(s, io, row, i):
        io.keys[s.first_row + row, s.begin + i] = s.key[0]

    return Words(name, keep, lambda s, i, row: True)


def each_block(e: Extents, words: Any) -> Any:
    """How many of a list's `words` a thread block has."""
    return (words + (e.group_blocks - 1)) // e.group_blocks


def turn_of(e: Extents, block: Any, index: Any) -> Any:
    """When the thread block takes its words that reach the threshold of the group's `index`-th list: lists begin with
    different thread blocks, as they mostly have fewer such words than there are thread blocks."""
    return (block + (e.group_blocks - index * (e.group_blocks // e.group_lists))) % e.group_blocks


def find_share(e: Extents) -> Phase:
    """Which words that reach the threshold are the thread block's; the phase is (s, io).

    Reads: the lengths of the group's lists. Writes: `firsts`, `upto`. Barriers: none.
    """

    @T.inline
    def phase(s, io):
        for n in T.unroll(e.group_lists):
            s.upto[n] = 0
            if s.first_list + n < io.lists:
                T.ptx.ld.global_.s32(s.upto[n], io.found.ptr_to([s.first_list + n, 0]))
        for n in T.unroll(e.group_lists):
            each: T.int32 = each_block(e, s.upto[n])
            s.firsts[n] = T.min(turn_of(e, s.block, n) * each, s.upto[n])
            s.upto[n] = T.min(each, s.upto[n] - s.firsts[n])
        for n in T.unroll(e.group_lists - 1):
            s.upto[n + 1] = s.upto[n + 1] + s.upto[n]

    return phase


def reached_words(e: Extents) -> Words:
    """The words of `find_share`, those of one list after those of another."""

    def owner(s: Any, i: Any) -> Any:
        """The list, of the group's."""
        found: Any = 0
        for n in range(e.group_lists - 1):
            found = found + T.Cast("int32", i >= s.upto[n])
        return found

    def place(s: Any, i: Any) -> Any:
        """Where it stands there."""
        found = s.firsts[0] + i
        for n in range(1, e.group_lists):
            found = T.Select(i >= s.upto[n - 1], s.firsts[n] + i - s.upto[n - 1], found)
        return found

    def owned(s: Any, i: Any, row: Any) -> Any:
        return e.group_lists == 1 or owner(s, i) == row // e.beam

    @T.inline
    def name(s, io, i, word):
        T.ptx.ld.global_.s32(word[0], io.queue.ptr_to([s.first_list + owner(s, i), place(s, i)]))

    @T.inline
    def keep(s, io, row, i):
        if owned(s, i, row):
            io.others[s.first_row + row, place(s, i)] = s.key[0]

    return Words(name, keep, owned)


def stage_states(e: Extents) -> Phase:
    """Begin to bring hidden states to shared memory; the phase is (s, io). `await_states` has to follow.

    They are read past the L1 cache: this kernel does not wait for the one that wrote them, as the one before it has.

    Reads: `hidden`. Writes: `states`, with zeros behind columns and rows that there are not; `odd`. Barriers: none.
    """
    each = e.chunks * PER_CHUNK
    elements = VECTOR // e.itemsize
    rounds = ceildiv(e.rows * each, e.threads)
    at_once = min(IN_FLIGHT, rounds)

    def place(i: Any) -> Any:
        return (i // each * e.pitch + i % each) * 4

    def there(s: Any, i: Any) -> Any:
        return tirx.all(i // each < s.rows, i % each < e.vectors)

    def source(s: Any, i: Any) -> Any:
        return (s.first_row + i // each) * e.hidden + i % each * elements

    @T.inline
    def copy(s, io):
        rows = T.decl_buffer((io.lists * e.beam * e.hidden,), e.dtype, data=io.hidden.data)
        for n in T.serial(rounds):
            i: T.int32 = n * e.threads + s.t
            if i < e.rows * each:
                if there(s, i):
                    T.ptx.cp.async_.cg.shared.global_(
                        s.states.ptr_to([place(i)]), rows.ptr_to([source(s, i)]), VECTOR)
                else:
                    store_shared(s.states.ptr_to([place(i)]), *[T.uint32(0) for _ in range(4)])
        T.ptx.cp.async_.commit_group()

    @T.inline
    def split_all(s, io):
        rows = T.decl_buffer((io.lists * e.beam * e.hidden,), e.dtype, data=io.hidden.data)
        held = T.alloc_local([at_once * 4], "uint32")
        high = T.alloc_local([4], "uint32")
        low = T.alloc_local([4], "uint32")
        finite = T.alloc_local([4], "uint32")
        for n in T.serial(ceildiv(rounds, at_once)):
            for u in T.unroll(at_once):
                i = T.meta_var((n * at_once + u) * e.threads + s.t)
                for v in T.unroll(4):
                    held[u * 4 + v] = T.uint32(0)
                if there(s, i):
                    load_anew(*[held[u * 4 + v] for v in range(4)], rows.ptr_to([source(s, i)]))
            for u in T.unroll(at_once):
                i = T.meta_var((n * at_once + u) * e.threads + s.t)
                if i < e.rows * each:
                    for v in T.unroll(4):
                        split(held[u * 4 + v], high, low, finite, v)
                        if finite[v] != high[v]:
                            s.odd[0] = 1
                    store_shared(s.states.ptr_to([place(i)]), *[high[v] for v in range(4)])
                    store_shared(s.states.ptr_to([e.half_bytes // 4 + place(i)]), *[low[v] for v in range(4)])

    return split_all if e.halves == 2 else copy


def await_states(e: Extents) -> Phase:
    """Reads: `odd`. Writes: `is_odd`. Barriers: one, at the end. The phase is (s)."""

    @T.inline
    def phase(s):
        if e.halves == 1:
            T.ptx.cp.async_.wait_group(0)
        T.cuda.cta_sync()
        s.is_odd = s.odd[0]

    return phase


def name_at(e: Extents, round: Any, i: Any) -> Any:
    """Where the `i`-th name of a tile is: those of two tiles are there at a time."""
    return round % 2 * e.tile + i


def fetch_names(e: Extents, words: Words) -> Phase:
    """Begin to load the names of a tile of `count` words, a thread a word; the phase is (s, io, round, count).

    Reads: names. Writes: `name`. Barriers: none.
    """

    @T.inline
    def phase(s, io, round, count):
        s.name[0] = -1
        if s.t < count:
            words.name(s, io, round * e.tile + s.t, s.name)

    return phase


@T.inline
def put_names(e, s, round, count):
    """Reads: `name`. Writes: `names`. Barriers: none; one has to follow."""
    if s.t < count:
        s.names[name_at(e, round, s.t)] = s.name[0]


def in_hand(e: Extents, slot: Any, w: Any, c: Any) -> Any:
    """Where chunk `c` of a lane's word of the `w`-th tile of a job is."""
    return ((slot * e.job_tiles + w) * e.per_job + c) * 4


def ask_chunk(e: Extents) -> Phase:
    """Begin the load of a job's `c`-th chunk; the phase is (s, io, slot, job, c).

    Reads: `word`, `embedding`. Writes: `hand`, zeros behind columns and words that there are not. Barriers: none.
    """
    elements = VECTOR // e.itemsize

    @T.inline
    def phase(s, io, slot, job, c):
        vector = T.meta_var((job % e.parts * e.per_job + c) * PER_CHUNK + s.member)
        for w in T.unroll(e.job_tiles):
            at = in_hand(e, slot, w, c)
            for v in T.unroll(4):
                s.hand[at + v] = T.uint32(0)
            if vector < e.vectors and s.word[slot * e.job_tiles + w] >= 0:
                load_once(s.hand[at], s.hand[at + 1], s.hand[at + 2], s.hand[at + 3],
                          io.embedding.ptr_to([s.word[slot * e.job_tiles + w], vector * elements]))

    return phase


@T.inline
def take_words(e, s, slot, job, round, count):
    """The words that a lane loads for a job, -1 for none. Reads: `names`. Writes: `word`. Barriers: none."""
    for w in T.unroll(e.job_tiles):
        s.word[slot * e.job_tiles + w] = -1
        if job // e.parts * e.tile_n + w * TILE + s.group < count:
            s.word[slot * e.job_tiles + w] = s.names[name_at(e, round, job // e.parts * e.tile_n + w * TILE + s.group)]


def multiply_job(e: Extents) -> Phase:
    """Multiply a job with all hidden states; the phase is (s, io, slot, job, following).

    As soon as a chunk has been multiplied, its place goes to that of the job that follows: `following`, -1 for none,
    whose words are in `word`.

    Hidden states are asked for a step ahead, and serve all tiles of the job. Sums are made in chains that do not wait
    for each other: of float32 one for each of three products of tf32, as `output_layer.tiles` makes them, else one for
    each half of a chunk.

    Reads: `hand`, `states`. Writes: `chains`, `hand`. Barriers: none, but all lanes take part.
    """
    kind = {"float16": "f16", "bfloat16": "bf16"}.get(e.dtype)
    halves = getattr(getattr(T.ptx.mma.sync.aligned.m16n8k16.row.col.f32, kind), kind).f32 if kind else None
    floats = T.ptx.mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32
    vectors = 2 * e.halves
    steps = e.per_job * e.fragments
    ask = ask_chunk(e)

    @T.inline
    def of_halves(s, slot, c, f, at):
        for i in T.unroll(2):
            for w in T.unroll(e.job_tiles):
                sums = T.meta_var([s.chains[i * e.chain + (w * e.fragments + f) * 4 + v] for v in range(4)])
                halves(*sums, s.state[at + i * 2], s.state[at + 4 + i * 2], s.state[at + i * 2 + 1],
                       s.state[at + 4 + i * 2 + 1], s.hand[in_hand(e, slot, w, c) + i * 2],
                       s.hand[in_hand(e, slot, w, c) + i * 2 + 1], *sums)

    @T.inline
    def of_floats(s, slot, c, f, at):
        """Hidden states are in halves already."""
        finite = T.alloc_local([4], "uint32")
        for i in T.unroll(2):
            high = T.meta_var([s.state[at + v % 2 * 4 + i * 2 + v // 2] for v in range(4)])
            low = T.meta_var([s.state[at + 8 + v % 2 * 4 + i * 2 + v // 2] for v in range(4)])
            for v in T.unroll(4):
                finite[v] = s.state[at + v % 2 * 4 + i * 2 + v // 2]
            if s.is_odd != 0:
                for v in T.unroll(4):
                    if (finite[v] & T.uint32(0x7F800000)) == T.uint32(0x7F800000):
                        finite[v] = T.uint32(0)
            for w in T.unroll(e.job_tiles):
                first, second, third = T.meta_var([
                    [s.chains[n * e.chain + (w * e.fragments + f) * 4 + v] for v in range(4)] for n in range(3)])
                of = T.meta_var(w * 4 + i * 2)
                floats(*second, *low, s.b_finite[of], s.b_finite[of + 1], *second)
                floats(*first, *high, s.b_high[of], s.b_high[of + 1], *first)
                floats(*third, *[finite[v] for v in range(4)], s.b_low[of], s.b_low[of + 1], *third)

    multiply = of_halves if kind else of_floats

    @T.inline
    def bring(s, from_part, from_last, step):
        for y in T.unroll(vectors):
            at = step % 2 * (vectors * 4) + y * 4
            first = step % e.fragments * FRAGMENT + y % 2 * HALF
            beside = y // 2 * e.half_bytes + step // e.fragments * CHUNK
            if first + HALF <= e.rows:
                load_shared(
                    s.state[at], s.state[at + 1], s.state[at + 2], s.state[at + 3],
                    from_part + T.uint32(beside + first * e.pitch * VECTOR))
            elif first < e.rows:
                load_shared(
                    s.state[at], s.state[at + 1], s.state[at + 2], s.state[at + 3], from_last + T.uint32(beside))
            else:
                for v in T.unroll(4):
                    s.state[at + v] = T.uint32(0)

    @T.inline
    def phase(s, io, slot, job, following):
        # Held, so that what all chunks share is not computed for each of them.
        states: T.uint32 = held_address(
            "u32", T.cuda.cvta_generic_to_shared(s.states.ptr_to([(s.group * e.pitch + s.member) * 4])))
        from_part: T.uint32 = states + T.Cast("uint32", job % e.parts * (e.per_job * CHUNK))
        # Of the last half of a fragment, if that has fewer than eight rows: lanes without one read the last.
        of_last = T.meta_var(T.min(e.rows // HALF * HALF + s.group, e.rows - 1))
        from_last: T.uint32 = T.uint32(0)
        if e.rows % HALF != 0:
            from_last = held_address(
                "u32", T.cuda.cvta_generic_to_shared(s.states.ptr_to([(of_last * e.pitch + s.member) * 4]))
            ) + T.Cast("uint32", job % e.parts * (e.per_job * CHUNK))
        for i in T.unroll(e.chains * e.chain):
            s.chains[i] = T.float32(0)
        bring(s, from_part, from_last, 0)
        for step in T.unroll(steps):
            c = step // e.fragments
            # Chunks beyond a row's last one are those of the next row's.
            if e.chunks % e.per_job == 0 or job % e.parts * e.per_job + c < e.chunks:
                if step + 1 < steps:
                    if e.chunks % e.per_job == 0 or job % e.parts * e.per_job + (step + 1) // e.fragments < e.chunks:
                        bring(s, from_part, from_last, step + 1)
                if e.halves == 2 and step % e.fragments == 0:
                    for w in T.unroll(e.job_tiles):
                        for v in T.unroll(4):
                            split(s.hand[in_hand(e, slot, w, c) + v], s.b_high, s.b_low, s.b_finite, w * 4 + v)
                multiply(s, slot, c, step % e.fragments, step % 2 * (vectors * 4))
            if step % e.fragments == e.fragments - 1:
                if following >= 0:
                    ask(s, io, slot, following, c)

    return phase


def ask_first(e: Extents) -> Phase:
    """Begin the loads of the first jobs of a tile of `count` words, as many as a warp has in hand; the phase is (s, io,
    round, count).

    Reads: `names`. Writes: `word`, `hand`. Barriers: none.
    """
    ask = ask_chunk(e)

    @T.inline
    def phase(s, io, round, count):
        for d in T.unroll(e.depth):
            if s.warp + d * e.warps < (count + (e.tile_n - 1)) // e.tile_n * e.parts:
                take_words(e, s, d, s.warp + d * e.warps, round, count)
                for c in T.unroll(e.per_job):
                    ask(s, io, d, s.warp + d * e.warps, c)

    return phase


def multiply_tile(e: Extents) -> Phase:
    """The parts of the scores of `count` words, whose first jobs are in hand; the phase is (s, io, round, count).

    Reads: `hand`, `names`, words, `states`. Writes: `sums`. Barriers: none; one has to follow.
    """
    multiply = multiply_job(e)

    @T.inline
    def put(s, job):
        for n in T.unroll(e.chain):
            f, i = T.meta_var(n // 4 % e.fragments), T.meta_var(n % 4)
            for c in T.unroll(e.chains - 1):
                s.chains[n] = s.chains[n] + s.chains[(c + 1) * e.chain + n]
            row = T.meta_var(f * FRAGMENT + i // 2 * HALF + s.group)
            of_row = T.meta_var((job % e.parts * e.rows + row) * e.sum_pitch)
            word = T.meta_var(job // e.parts * e.tile_n + n // 4 // e.fragments * TILE + s.member * 2 + i % 2)
            if row < e.rows:
                s.sums[of_row + word] = s.chains[n]

    @T.inline
    def phase(s, io, round, count):
        jobs: T.int32 = (count + (e.tile_n - 1)) // e.tile_n * e.parts
        for n in T.serial((jobs + (e.warps * e.depth - 1)) // (e.warps * e.depth)):
            for d in T.unroll(e.depth):
                s.job = (n * e.depth + d) * e.warps + s.warp
                if s.job < jobs:
                    s.following = s.job + e.depth * e.warps
                    if s.following < jobs:
                        take_words(e, s, d, s.following, round, count)
                    else:
                        s.following = -1
                    multiply(s, io, d, s.job, s.following)
                    put(s, s.job)

    return phase


def finish_tile(e: Extents, words: Words) -> Phase:
    """Scores to keys, `row_lanes` lanes a row; the phase is (s, io, round, count).

    Reads: `sums`, `names`, `bias`. Writes: keys; `best` and `exponentials`. Barriers: of the warp; one of the thread
    block has to come before.
    """
    lanes = e.row_lanes
    per_warp, rounds, steps = WARP // lanes, ceildiv(e.tile, lanes), (lanes - 1).bit_length()

    @T.inline
    def add(s, row, i):
        s.score[0] = T.float32(0)
        for p in T.unroll(e.parts):
            s.score[0] = s.score[0] + s.sums[(p * e.rows + row) * e.sum_pitch + i]

    @T.inline
    def join(s, row, count, factor):
        """The powers of this tile's scores and those before, which `best` is the largest of."""
        unit: T.float32 = unit_of_bits(T.max(s.best[row], s.largest[0]), factor)
        s.d[0] = T.float64(0)
        for n in T.unroll(rounds):
            if n * lanes < count:
                add_power(s.d, s.rest_power, s.held[n], factor, unit)
        for b in T.unroll(steps):
            s.d[0] = s.d[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.d[0], 1 << b, 32, 32)
        if s.lane % lanes == 0 and s.largest[0] != T.uint32(0):
            if s.best[row] != T.uint32(0):
                s.d[0] = s.d[0] + s.exponentials[row] * T.Cast(
                    "float64", two_to(unit_of_bits(s.best[row], factor) - unit))
            s.exponentials[row] = s.d[0]
            s.best[row] = T.max(s.best[row], s.largest[0])

    @T.inline
    def phase(s, io, round, count):
        factor: T.float32 = io.scale * T.float32(LOG2_E)
        for r in T.serial((s.rows - s.warp * per_warp + (per_warp * e.warps - 1)) // (per_warp * e.warps)):
            row: T.int32 = (r * e.warps + s.warp) * per_warp + s.lane // lanes
            s.largest[0] = T.uint32(0)
            for n in T.unroll(rounds):
                s.held[n] = T.float32("-inf")
                i = T.meta_var(n * lanes + s.lane % lanes)
                at = T.meta_var(round * e.tile + i)
                if i < count and row < s.rows:
                    add(s, row, i)
                    if e.bias:
                        s.score[0] = s.score[0] + io.bias[s.names[name_at(e, round, i)]]
                    s.bits[0] = order_bits(s.score[0])
                    s.key[0] = join_key(s.bits[0], s.names[name_at(e, round, i)])
                    words.keep(s, io, row, at)
                    if words.counted(s, at, row):
                        s.held[n] = s.score[0]
                        s.largest[0] = T.max(s.largest[0], s.bits[0])
            for b in T.unroll(steps):
                s.other_bits[0] = T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.largest[0], 1 << b, 32, 32)
                s.largest[0] = T.max(s.largest[0], s.other_bits[0])
            join(s, T.min(row, e.rows - 1), count, factor)

    return phase


def multiply_all(e: Extents, words: Words, stage: bool) -> Phase:
    """The scores of `many` words; the phase is (s, io, many).

    `stage`: hidden states are brought to shared memory first, while memory sends the first words. The first words of a
    tile are asked for before the one before is finished.

    Reads: words. Writes: keys; `best` and `exponentials`. Barriers: some of the thread block, one at the end.
    """
    fetch, begin_states, ready = fetch_names(e, words), stage_states(e), await_states(e)
    ask, multiply, finish = ask_first(e), multiply_tile(e), finish_tile(e, words)

    @T.inline
    def phase(s, io, many):
        count: T.int32 = T.min(many, e.tile)
        fetch(s, io, 0, count)
        if stage:
            begin_states(s, io)
        put_names(e, s, 0, count)
        T.cuda.cta_sync()
        ask(s, io, 0, count)
        if stage:
            ready(s)
        for n in T.serial((many + (e.tile - 1)) // e.tile):
            now: T.int32 = T.min(many - n * e.tile, e.tile)
            coming: T.int32 = T.max(T.min(many - (n + 1) * e.tile, e.tile), 0)
            fetch(s, io, n + 1, coming)
            multiply(s, io, n, now)
            put_names(e, s, n + 1, coming)
            T.cuda.cta_sync()
            ask(s, io, n + 1, coming)
            finish(s, io, n, now)
            T.cuda.cta_sync()

    return phase
# fmt: on
