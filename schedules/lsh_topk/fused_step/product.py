"""The product of `fused_step`: words from memory times hidden states in shared memory or registers.

    stage_states    the group's hidden states; or keep_states, where each warp has its part of them in registers
    find_share      which of the words that reach the threshold are the thread block's
    multiply_all    the frequent words, and then the others, a tile at a time:
    ask_first       first words requested,
    multiply_tile   multiplied part by part, while further ones come,
    finish_tile     and the parts' sums: keys, and the largest of a row

A lane's 16 bytes of a row are eight columns (of float32 four), which it takes in the order in which they lie: both
operands of a product have them in the same order, whatever that is.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import ceildiv

from ...device.arithmetic import LOG2_E, is_nan
from ...device.powers import add_power, change_unit, unit_of_bits
from ...device.selection import FULL_WARP, join_key, order
from ...device.words import held_address
from ...output_layer.tiles.product import split
from .space import CHUNK, FINISHED, OCTET, TILE, VECTOR, Extents

load_once = T.ptx.ld.global_.L1__no_allocate.v4.u32
load_anew = T.ptx.ld.relaxed.gpu.global_.v4.u32
IN_FLIGHT = 8  # vectors of hidden states that a thread loads together, where it splits them
load_shared = T.ptx.ld.shared.v4.u32
store_shared = T.ptx.st.shared.v4.u32
store_key = T.ptx.st.global_.u64
PER_CHUNK = CHUNK // VECTOR
KEY = 8  # bytes per key


# fmt: off
def each_block(e: Extents, words: Any) -> Any:
    """How many of a list's `words` a thread block has."""
    return (words + (e.group_blocks - 1)) // e.group_blocks


def frequent_each(e: Extents, io: Any) -> Any:
    """How many of the frequent words a thread block has in the first part: whole tiles, if no more than `late_words`
    are beyond them."""
    each = each_block(e, io.frequent)
    if not e.late_words:
        return each
    beyond = each % TILE
    return T.Select(tirx.all(each > TILE, beyond <= e.late_words), each - beyond, each)


def frequent_first(e: Extents, io: Any) -> Any:
    """How many frequent words all thread blocks have in the first part. The others come before the words that reach the
    threshold.
    """
    return T.min(frequent_each(e, io) * e.group_blocks, io.frequent) if e.late_words else io.frequent


def turn_of(e: Extents, block: Any, index: Any) -> Any:
    """After how many others the thread block takes its turn at the words of the group's `index`-th list: lists begin
    with different thread blocks, because most have fewer such words than there are thread blocks.
    """
    return (block + (e.group_blocks - index * (e.group_blocks // e.group_lists))) % e.group_blocks


@phase
def find_share(e, /, s, io):
    """Which words of the second part this thread block multiplies.

    Words are dealt out to the thread blocks in turn. So the places of a thread block's first words are known before the
    list's length is, and the words are loaded together with the length.

    Reads: the lengths of the group's lists; the first of them. Writes: `firsts`, `upto`; with a single list also
    `name`, which may lie beyond the list's end. Barriers: none.
    """
    for n in T.unroll(e.group_lists):
        s.firsts[n] = turn_of(e, s.block, n)
        s.upto[n] = 0
        if s.first_list + n < io.lists:
            T.ptx.ld.global_.s32(s.upto[n], io.found.ptr_to([s.first_list + n, 0]))
    if e.group_lists == 1:
        if s.t < e.tile and s.firsts[0] + s.t * e.group_blocks < e.vocab:
            load_other(e, s, io, s.first_list, s.firsts[0] + s.t * e.group_blocks)
    if e.late_words > 0:
        s.upto[0] = s.upto[0] + (io.frequent - frequent_first(e, io))
    for n in T.unroll(e.group_lists):
        s.upto[n] = T.max(s.upto[n] - s.firsts[n] + (e.group_blocks - 1), 0) // e.group_blocks
    for n in T.unroll(e.group_lists - 1):
        s.upto[n + 1] = s.upto[n + 1] + s.upto[n]


def list_of(e: Extents, s: Any, i: Any) -> Any:
    """The number, within the group, of the list that contains the thread block's `i`-th word (see `find_share`). Its
    words are ordered by list."""
    found: Any = 0
    for n in range(e.group_lists - 1):
        found = found + T.Cast("int32", i >= s.upto[n])
    return found


def place_in_list(e: Extents, s: Any, i: Any) -> Any:
    """The place of the thread block's `i`-th word in its list, `list_of(e, s, i)`."""
    found = s.firsts[0] + i * e.group_blocks
    for n in range(1, e.group_lists):
        found = T.Select(i >= s.upto[n - 1], s.firsts[n] + (i - s.upto[n - 1]) * e.group_blocks, found)
    return found


@T.inline
def load_other(e, s, io, index, place):
    """Begin to load the id of a word of the second part: from the list, or from the frequent words that come
    before it.
    """
    if e.late_words > 0:
        late: T.int32 = io.frequent - frequent_first(e, io)
        if place < late:
            T.ptx.ld.global_.s32(s.name[0], io.ids.ptr_to([frequent_first(e, io) + place]))
        else:
            T.ptx.ld.global_.s32(s.name[0], io.queue.ptr_to([index, place - late]))
    else:
        T.ptx.ld.global_.s32(s.name[0], io.queue.ptr_to([index, place]))


@T.inline
def name_word(e, s, io, i):
    """Begin to load the id of the thread block's `i`-th word to `name`."""
    if s.part == 0:
        T.ptx.ld.global_.s32(s.name[0], io.ids.ptr_to([s.begin + i]))
    else:
        load_other(e, s, io, s.first_list + list_of(e, s, i), place_in_list(e, s, i))


@phase
def find_keys(e, /, s, io, row):
    """Where the keys of the thread block's words are stored for a row of the group.

    Each thread block has a place of its own for those that reach the threshold, so that lanes write side by side. Of
    several lists a row has the words from `own_from` up to `own_to`.

    Reads: `upto`. Writes: `keys`, where the first word's is; `own_from`, `own_to`. Barriers: none.
    """
    if s.part == 0:
        s.keys = held_address("u64", io.keys.ptr_to([s.first_row + row, s.begin]))
    else:
        s.keys = held_address("u64", io.others.ptr_to([s.first_row + row, s.block * e.reached_each]))
    if e.group_lists > 1:
        s.own_from = 0
        s.own_to = s.many
        if s.part == 1:
            s.own_to = s.upto[0]
            for n in T.unroll(e.group_lists - 1):
                if row // e.beam > n:
                    s.own_from = s.upto[n]
                    s.own_to = s.upto[n + 1]
        s.keys = s.keys - T.Cast("uint64", s.own_from * KEY)


def stage_states(e: Extents) -> Phase:
    """Begin to bring hidden states to shared memory; the phase is (s, io). `await_states` has to follow.

    They are read past the L1 cache: this kernel does not wait for the one that wrote them, as the one before it has.

    Reads: `hidden`. Writes: `states`, with zeros beyond the last column and row. Barriers: none.
    """
    each = e.padded
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
                    store_shared(s.states.ptr_to([place(i)]), *[high[v] for v in range(4)])
                    store_shared(s.states.ptr_to([e.half_bytes // 4 + place(i)]), *[low[v] for v in range(4)])

    return split_all if e.halves == 2 else copy


@phase
def await_states(e, /, s):
    """Wait until the hidden states are in `states`. Barriers: one, at the end."""
    if e.halves == 1:
        T.ptx.cp.async_.wait_group(0)
    T.cuda.cta_sync()


def in_state(e: Extents, c: Any, octet: Any) -> Any:
    """Where in `state` the lane has chunk `c` of its hidden state of an octet, if the warp keeps them."""
    return (c * e.octets + octet) * 4


@phase
def keep_states(e, /, s, io):
    """Load the warp's part of all hidden states to registers, where it stays.

    They are read past the L1 cache, as by `stage_states`.

    Reads: `hidden`. Writes: `state`, with zeros beyond the last column and row. Barriers: none.
    """
    rows = T.decl_buffer((io.lists * e.beam * e.hidden,), e.dtype, data=io.hidden.data)
    for c in T.unroll(e.depth):
        for octet in T.unroll(e.octets):
            row = T.meta_var(octet * OCTET + s.group)
            vector = T.meta_var((s.warp % e.parts * e.depth + c) * PER_CHUNK + s.member)
            for v in T.unroll(4):
                s.state[in_state(e, c, octet) + v] = T.uint32(0)
            if tirx.all(row < s.rows, vector < e.vectors):
                load_anew(*[s.state[in_state(e, c, octet) + v] for v in range(4)],
                          rows.ptr_to([(s.first_row + row) * e.hidden + vector * (VECTOR // e.itemsize)]))


def name_at(e: Extents, round: Any, i: Any) -> Any:
    """Where in `names` the `i`-th id of a tile is: there is room for two tiles."""
    return round % 2 * e.tile + i


@phase
def fetch_names(e, /, s, io, round, count):
    """Begin to load the names of a tile of `count` words, a thread a word.

    Reads: names. Writes: `name`. Barriers: none.
    """
    s.name[0] = -1
    if s.t < count:
        name_word(e, s, io, round * e.tile + s.t)


@T.inline
def put_names(e, s, round, count):
    """Store the loaded ids. Reads: `name`. Writes: `names`. Barriers: none; one has to follow."""
    if s.t < count:
        s.names[name_at(e, round, s.t)] = s.name[0]


def in_hand(i: Any, c: Any) -> Any:
    """Where in `hand` chunk `c` of the `i`-th of a lane's two words is."""
    return ((c // 2 * 2 + i) * 2 + c % 2) * 4


@phase
def find_words(e, /, s, job, round, count):
    """Where the words are that this lane loads for a job, its own two and its neighbours'. Lanes beyond the last word
    take the last word again.

    Reads: `names`, `base`. Writes: `at`. Barriers: none.
    """
    for n in T.unroll(4):
        word = T.meta_var(s.names[name_at(e, round, T.min(
            job // e.parts * TILE + n // 2 * (TILE // 2) + s.group - s.group % 2 + n % 2, count - 1))])
        s.at[n] = s.base + (
            T.Cast("uint64", word) * T.uint64(e.hidden * e.itemsize)
            + T.Cast("uint64", ((job % e.parts * e.depth + s.group % 2) * PER_CHUNK + s.member) * VECTOR))


@phase
def ask_chunks(e, /, s, job, p):
    """Begin to load the `p`-th pair of chunks of a job.

    The two are 128 bytes of each word, which eight lanes load: first those of one word, then those of its neighbour.
    With four lanes per word, as in operands, a load would bring half as much of each.

    Reads: `at`, words. Writes: `hand`, zeros beyond the columns. Barriers: none.
    """
    # Pairs of chunks that lie wholly within a row, in every part of it.
    vector = T.meta_var(((job % e.parts * (e.depth // 2) + p) * 2 + s.group % 2) * PER_CHUNK + s.member)
    for n in T.unroll(4):
        at = (p * 4 + n) * 4
        if tirx.any(p < (e.vectors // (2 * PER_CHUNK) - (e.parts - 1) * (e.depth // 2)), vector < e.vectors):
            load_once(s.hand[at], s.hand[at + 1], s.hand[at + 2], s.hand[at + 3],
                      s.at[n] + T.Cast("uint64", p * (2 * CHUNK)))
        else:
            for v in T.unroll(4):
                s.hand[at + v] = T.uint32(0)


@phase
def part_words(e, /, s, p):
    """Give each lane both chunks of its own words.

    Reads and writes: `hand`. Before: of the even word and of the odd one the chunk that this lane loads. After: of its
    own word the first chunk, and the second. Barriers: none, but all lanes of a warp take part.
    """
    for i in T.unroll(2):
        for v in T.unroll(4):
            at = (p * 4 + i * 2) * 4 + v
            s.passed = T.tvm_warp_shuffle_xor(
                T.uint32(FULL_WARP), T.Select(s.group % 2 == 1, s.hand[at], s.hand[at + 4]), 4, 32, 32)
            if s.group % 2 == 1:
                s.hand[at] = s.passed
            else:
                s.hand[at + 4] = s.passed


@phase
def bring_states(e, /, s, whole, last, c, octet, at):
    """An octet of hidden states, a chunk of each, to registers: the first two are the addresses of this lane's first
    vector of the part, in the first octet and in the last.

    Reads: `states`. Writes: `state` from `at` on. Barriers: none.
    """
    for y in T.unroll(e.halves):
        to = T.meta_var([s.state[at + y * 4 + v] for v in range(4)])
        if octet < e.octets - 1:
            load_shared(*to, whole + T.Cast(
                "uint32", y * e.half_bytes + c * CHUNK + octet * (OCTET * e.pitch * VECTOR)))
        else:
            load_shared(*to, last + T.Cast("uint32", y * e.half_bytes + c * CHUNK))


def part_of_row(e: Extents, s: Any, row: Any, job: Any) -> Any:
    """The address of this lane's first vector of a job's part of a hidden state. It is kept in a register, so that it
    is not computed anew for each chunk.
    """
    place = s.states.ptr_to([(row * e.pitch + job % e.parts * (e.depth * PER_CHUNK) + s.member) * 4])
    return held_address("u32", T.cuda.cvta_generic_to_shared(place))


def last_row(e: Extents, s: Any) -> Any:
    """The row of this lane in the last octet: the group's last row, where the octet has fewer."""
    return T.min((e.octets - 1) * OCTET + s.group, e.rows - 1)


@phase
def multiply_halves(e, /, s, c, octet, at):
    """The products of chunk `c` of two words and of an octet of hidden states, of 16 bits. Words are the operand with
    16 rows, hidden states the one with eight columns.

    Reads: `hand`; `state` from `at` on. Writes: `chains`; of two chains, each has one half of the chunk. Barriers:
    none, but all lanes take part.
    """
    kind = T.meta_var({"float16": "f16", "bfloat16": "bf16"}[e.dtype])
    mma = T.meta_var(getattr(getattr(T.ptx.mma.sync.aligned.m16n8k16.row.col.f32, kind), kind).f32)
    for i in T.unroll(2):
        sums = T.meta_var([s.chains[i % e.chains * e.chain + octet * 4 + v] for v in range(4)])
        words = T.meta_var([s.hand[in_hand(v % 2, c) + i * 2 + v // 2] for v in range(4)])
        mma(*sums, *words, s.state[at + i * 2], s.state[at + i * 2 + 1], *sums)


@phase
def multiply_floats(e, /, s, c, octet, at):
    """`multiply_halves` for float32, with `high` and `low` being the two parts of the chunk, by three products of tf32,
    as `output_layer.tiles` makes them. The first of two `chains` has the products of the higher parts.
    """
    mma = T.meta_var(T.ptx.mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32)
    for i in T.unroll(2):
        first, second, third = T.meta_var([
            [s.chains[min(n, e.chains - 1) * e.chain + octet * 4 + v] for v in range(4)] for n in range(3)])
        high, low = T.meta_var([[part[i * 4 + v] for v in range(4)] for part in (s.high, s.low)])
        mma(*second, *high, s.state[at + 4 + i * 2], s.state[at + 4 + i * 2 + 1], *second)
        mma(*first, *high, s.state[at + i * 2], s.state[at + i * 2 + 1], *first)
        mma(*third, *low, s.state[at + i * 2], s.state[at + i * 2 + 1], *third)


@T.inline
def split_words(s, c):
    """Split the words in hand into two parts of tf32 each. Writes: `high`, `low`."""
    for n in T.unroll(8):
        word = T.meta_var(s.hand[in_hand(n % 2, c) + n // 2])
        s.high[n] = word & T.uint32(0xFFFFE000)
        s.low[n] = T.reinterpret(
            "uint32", T.reinterpret("float32", word) - T.reinterpret("float32", s.high[n]))


@phase
def multiply(e, /, s, following, step, at):
    """The products of a step, then the loads that take the place of what it has used."""
    products = T.meta_var(multiply_floats(e) if e.halves == 2 else multiply_halves(e))
    if step % (2 * e.octets) == 0:
        part_words(e)(s, step // (2 * e.octets))
    if e.halves == 2:
        if step % e.octets == 0:
            split_words(s, step // e.octets)
    products(s, step // e.octets, step % e.octets, at)
    if step % (2 * e.octets) == 2 * e.octets - 1:
        if s.asked != 0:
            ask_chunks(e)(s, following, step // (2 * e.octets))


@phase
def from_shared(e, /, s, job, following):
    """Multiply all steps of a job by hidden states that are in shared memory: those of the next step are loaded before
    this step is multiplied. Barriers: none.
    """
    steps, turn = T.meta_var(e.depth * e.octets), T.meta_var(4 * e.halves)
    bring = T.meta_var(bring_states(e))
    whole: T.uint32 = part_of_row(e, s, s.group, job)
    last: T.uint32 = part_of_row(e, s, last_row(e, s), job)
    bring(s, whole, last, 0, 0, 0)
    for step in T.unroll(steps):
        if step + 1 < steps:
            bring(s, whole, last, (step + 1) // e.octets, (step + 1) % e.octets, (step + 1) % 2 * turn)
        multiply(e)(s, following, step, step % 2 * turn)


@phase
def from_registers(e, /, s, job, following):
    """Multiply all steps of a job by hidden states that registers hold. Barriers: none."""
    for step in T.unroll(e.depth * e.octets):
        multiply(e)(s, following, step, in_state(e, step // e.octets, step % e.octets))


@phase
def multiply_job(e, /, s, job, following):
    """Multiply a job with all hidden states.

    As soon as two chunks have been multiplied, two chunks of the next job are loaded in their place, if `asked` is set;
    its words are at the addresses `at`. Hidden states in shared memory are loaded a step ahead.

    A float32 is split as if it were finite, by two instructions instead of seven: the lower part of an infinity or NaN
    is NaN then, and with it the score (see `sum_again`).

    Reads: `hand`, `at`, `asked`, `states` or `state`. Writes: sums to the first of `chains`; `hand`. Barriers: none,
    but all lanes take part.
    """
    all_steps = T.meta_var(from_shared(e) if e.staged > 0 else from_registers(e))
    for i in T.unroll(e.chains * e.chain):
        s.chains[i] = T.float32(0)
    all_steps(s, job, following)
    for n in T.unroll(e.chain):
        for c in T.unroll(e.chains - 1):
            s.chains[n] = s.chains[n] + s.chains[(c + 1) * e.chain + n]


@phase
def ask_first(e, /, s, round, count):
    """Begin the loads of a warp's first job of a tile of `count` words.

    Reads: `names`. Writes: `at`, `hand`. Barriers: none.
    """
    if s.warp < (count + (TILE - 1)) // TILE * e.parts:
        find_words(e)(s, s.warp, round, count)
        for p in T.unroll(e.depth // 2):
            ask_chunks(e)(s, s.warp, p)
    else:
        # What was in these registers is not kept: until here the compiler may use them for something else.
        for v in T.unroll(e.hand):
            s.hand[v] = T.uint32(0)


@phase
def put(e, /, s, job):
    """Store a lane's sums of a job. Reads: `chains`. Writes: `sums`."""
    for n in T.unroll(e.chain):
        row = T.meta_var(n // 4 * OCTET + s.member * 2 + n % 2)
        word = T.meta_var(job // e.parts * TILE + n // 2 % 2 * (TILE // 2) + s.group)
        if row < e.rows:
            s.sums[(job % e.parts * e.rows + row) * e.sum_pitch + word] = s.chains[n]


@phase
def multiply_tile(e, /, s, round, count):
    """The parts of the scores of `count` words, whose first jobs are in hand.

    Reads: `hand`, `names`, words, `states`. Writes: `sums`. Barriers: none; one has to follow.
    """
    jobs: T.int32 = (count + (TILE - 1)) // TILE * e.parts
    for n in T.serial((jobs - s.warp + (e.warps - 1)) // e.warps):
        s.job = n * e.warps + s.warp
        s.asked = T.Cast("int32", s.job + e.warps < jobs)
        if s.asked != 0:
            find_words(e)(s, s.job + e.warps, round, count)
        multiply_job(e)(s, s.job, s.job + e.warps)
        put(e)(s, s.job)


@phase
def sum_again(e, /, s, io, row, word):
    """Compute a float32 score that is NaN again, column by column: the product in parts makes NaN of an infinity, whose
    lower part is NaN.

    Reads: `states`, words. Writes: `score`; as scratch `high`, `state`. Barriers: none.
    """
    s.score[0] = T.float32(0)
    for n in T.serial(e.vectors):
        load_once(s.high[0], s.high[1], s.high[2], s.high[3], io.embedding.ptr_to([word, n * 4]))
        for y in T.unroll(2):
            load_shared(
                s.state[y * 4], s.state[y * 4 + 1], s.state[y * 4 + 2], s.state[y * 4 + 3],
                T.cuda.cvta_generic_to_shared(s.states.ptr_to([y * (e.half_bytes // 4) + (row * e.pitch + n) * 4])))
        for v in T.unroll(4):
            s.score[0] = s.score[0] + T.reinterpret("float32", s.high[v]) * (
                T.reinterpret("float32", s.state[v]) + T.reinterpret("float32", s.state[4 + v]))


@phase
def add(e, /, s, round, row, n):
    """The id of the lane's `n`-th word, and its score, added up over all parts."""
    lanes = T.meta_var(e.row_lanes)
    rounds = T.meta_var(ceildiv(e.tile, lanes))
    at_once = T.meta_var(min(FINISHED, rounds))
    s.some_names[n % at_once] = s.names[name_at(e, round, n * lanes + s.lane % lanes)]
    s.score[0] = T.float32(0)
    for p in T.unroll(e.parts):
        s.score[0] = s.score[0] + s.sums[(p * e.rows + row) * e.sum_pitch + n * lanes + s.lane % lanes]
    s.held[n] = s.score[0]


@phase
def take(e, /, s, io, round, row, n):
    """Make a key of that score, and store it."""
    rounds = T.meta_var(ceildiv(e.tile, e.row_lanes))
    at_once = T.meta_var(min(FINISHED, rounds))
    again = T.meta_var(sum_again(e) if e.halves == 2 else None)
    at = T.meta_var(round * e.tile + n * e.row_lanes + s.lane % e.row_lanes)
    s.score[0] = s.held[n]
    if e.halves == 2:
        if is_nan(s.score[0]):
            again(s, io, row, s.some_names[n % at_once])
    if e.bias:
        s.score[0] = s.score[0] + io.bias[s.some_names[n % at_once]]
    order(s.score[0], s.score, s.bits)
    s.key[0] = join_key(s.bits[0], s.some_names[n % at_once])
    if e.group_lists == 1 or tirx.all(s.own_from <= at, at < s.own_to):
        store_key(s.keys + T.Cast("uint64", at * KEY), s.key[0])
        s.held[n] = s.score[0]
        s.largest[0] = T.max(s.largest[0], s.bits[0])
    else:
        s.held[n] = T.float32("-inf")


@phase
def take_some(e, /, s, io, round, row, count, first):
    """Finish some words from the lane's `first` on; at least one lane has one."""
    rounds = T.meta_var(ceildiv(e.tile, e.row_lanes))
    at_once = T.meta_var(min(FINISHED, rounds))
    for u in T.unroll(at_once):
        if first + u < rounds:
            add(e)(s, round, T.min(row, e.rows - 1), first + u)
    for u in T.unroll(at_once):
        if first + u < rounds:
            if tirx.all((first + u) * e.row_lanes + s.lane % e.row_lanes < count, row < s.rows):
                take(e)(s, io, round, row, first + u)
            else:
                s.held[first + u] = T.float32("-inf")


@phase
def join(e, /, s, io, row, count, factor):
    """Add the powers of this tile's scores to those of the tiles before, in the unit given by `best`, the largest
    score; write both to memory.
    """
    lanes = T.meta_var(e.row_lanes)
    rounds, steps = T.meta_var(ceildiv(e.tile, lanes)), T.meta_var((lanes - 1).bit_length())
    at_once = T.meta_var(min(FINISHED, rounds))
    unit: T.float32 = unit_of_bits(T.max(s.best[row], s.largest[0]), factor)
    s.d[0] = T.float64(0)
    for n in T.unroll(ceildiv(rounds, at_once)):
        if n * at_once * lanes < count:
            for u in T.unroll(at_once):
                if n * at_once + u < rounds:
                    add_power(s.d, s.rest_power, s.held[n * at_once + u], factor, unit)
    for b in T.unroll(steps):
        s.d[0] = s.d[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.d[0], 1 << b, 32, 32)
    T.cuda.warp_sync()  # all lanes have read `best`; shuffles order no memory
    if s.lane % lanes == 0 and s.largest[0] != T.uint32(0):
        if s.best[row] != T.uint32(0):
            s.d[0] = s.d[0] + change_unit(s.exponentials[row], unit_of_bits(s.best[row], factor), unit)
        s.largest[0] = T.max(s.best[row], s.largest[0])
        s.exponentials[row] = s.d[0]
        s.best[row] = s.largest[0]
        io.heads[s.first_row + row, s.block] = s.largest[0]
        io.sums[s.first_row + row, s.block] = s.d[0]


@phase
def finish_tile(e, /, s, io, round, count):
    """Scores to keys, `row_lanes` lanes a row.

    A warp has every `rows_apart`-th of eight rows, so that its lanes read sums from banks of their own. A lane adds up
    some words at a time without a branch, so that what they wait for overlaps; what it computes beyond the last word it
    drops.

    Reads: `sums`, `names`, `bias`. Writes: keys; `best` and `exponentials`, and both in memory. Barriers: of the warp;
    one of the thread block has to come before.
    """
    lanes, apart = T.meta_var(e.row_lanes), T.meta_var(e.rows_apart)
    rounds, steps = T.meta_var(ceildiv(e.tile, lanes)), T.meta_var((lanes - 1).bit_length())
    at_once = T.meta_var(min(FINISHED, rounds))
    factor: T.float32 = io.scale * T.float32(LOG2_E)
    for r in T.serial((e.octets * apart - s.warp + (e.warps - 1)) // e.warps):
        turn: T.int32 = r * e.warps + s.warp
        row: T.int32 = turn // apart * OCTET + turn % apart + s.lane // lanes * apart
        find_keys(e)(s, io, row)
        s.largest[0] = T.uint32(0)
        # All lanes do this: otherwise the compiler keeps the sums of the tile before in registers, of which there
        # are too few.
        for n in T.unroll(rounds):
            s.held[n] = T.float32("-inf")
        for n in T.unroll(ceildiv(rounds, at_once)):
            if n * at_once * lanes < count:
                take_some(e)(s, io, round, row, count, n * at_once)
        for b in T.unroll(steps):
            s.other_bits[0] = T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.largest[0], 1 << b, 32, 32)
            s.largest[0] = T.max(s.largest[0], s.other_bits[0])
        join(e)(s, io, row, count, factor)


@phase
def multiply_all(e, /, s, io):
    """The scores of the part's words, whose first names are in `name`.

    In the first part hidden states are brought to shared memory meanwhile. The first words of a tile are loaded before
    the tile before it is finished. Where one tile has all frequent words, those of the second part are loaded after it
    is finished: most often there are none, and the sums need the registers.

    Reads: words. Writes: keys; `best` and `exponentials`. Barriers: some of the thread block, one at the end.
    """
    ask = T.meta_var(ask_first(e))
    count: T.int32 = T.min(s.many, e.tile)
    put_names(e, s, 0, count)
    T.cuda.cta_sync()
    ask(s, 0, count)
    if e.staged == 1:
        if s.part == 0:
            await_states(e)(s)
    for n in T.serial((s.many + (e.tile - 1)) // e.tile):
        now: T.int32 = T.min(s.many - n * e.tile, e.tile)
        coming: T.int32 = T.max(T.min(s.many - (n + 1) * e.tile, e.tile), 0)
        fetch_names(e)(s, io, n + 1, coming)
        multiply_tile(e)(s, n, now)
        put_names(e, s, n + 1, coming)
        T.cuda.cta_sync()
        if e.tiles > 1:
            ask(s, n + 1, coming)
        finish_tile(e)(s, io, n, now)
        if e.tiles == 1:
            ask(s, n + 1, coming)
        T.cuda.cta_sync()
# fmt: on
