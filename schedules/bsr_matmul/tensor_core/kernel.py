"""The kernel of `tensor_core`, in phases; the package's docstring says what it does, and why.

    deal_out        the strip of x and the slice of a block row that this thread block multiplies (`device.balance`)
    take_places     the rows and octets of each lane
    count_octets, within_arrays
                    where the block row begins and how many octets it holds (`block_row`)
    load_columns    the column ids of the steps in hand
    start_ahead     the wait for the producer kernel, the first operands, and whether the guesses were right
    load_weight, load_x
                    the operands of the steps in hand
    multiply        their products
    store_tile      y, where one warp has the whole sum; else
    write_parts     each warp's sums to shared memory
    add_parts       their sum, also over the cluster, to y

*In hand* are the `depth` steps of a warp whose operands are loaded together. The ranks of a cluster that share a long
row come together in `join`, `meet` and `hand_in` (`device.balance`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program, ceildiv
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from ...device.balance import Deal, Work, add_ranks, deal_out, hand_in, join, meet
from ...device.overlap import start_consumer, wait_for_producer, wait_then_start_consumer
from ..block_row import listed_row, load_int, unlisted_row
from ..interface import gpu_program, output
from .space import Extents
from .state import SharedSums, TileState, first_column, weight_row, x_row

# Barriers of a warp part the loads of the weight, those of x, and the products. The assembler would move each load next
# to its use, so that one waits for another; loads that are not declared read-only stay on their side of a barrier.
load_vector = T.ptx.ld.global_.v4.u32
# Words that only one warp reads, once, do not have to displace x in the L1 cache.
load_once = T.ptx.ld.global_.L1__no_allocate.v4.u32
# Bypasses this multiprocessor's own cache, which may hold data from before the producer kernel has ended.
load_int_anew = T.ptx.ld.relaxed.gpu.global_.s32
ALL_LANES = 0xFFFFFFFF


# fmt: off
@phase
def take_places(e, /, s, w, t, m):
    """Give each lane its rows and octets of its warp's tile.

    Reads: the work. Writes: `group`, `member`, `top`, `octet`, `x_rows` and zeros to `sums`. Barriers: none.
    """
    s.group = t % 32 // 4
    s.member = t % 4
    s.top = (w.strip * e.warps_m + t // e.tile_threads) * e.tile_m
    s.octet = w.rank * e.chunk + t // 32 % e.reduce_warps * 4 + s.member
    for f in T.unroll(e.tile_m // 8):
        # Rows beyond m repeat the last one and are not stored.
        s.x_rows[f] = T.min(s.top + f * 8 + s.group, m - 1)
    for i in T.unroll(e.a_fragments * e.b_fragments * 4):
        s.sums[i] = T.float32(0)


@phase
def count_octets(e, find_row, /, s, io, w):
    """Find the block row by `find_row`, and count its octets.

    Reads: as `find_row`. Writes: `row`, `first` and `count`. Barriers: none.
    """
    find_row(s, io, w, s.first, s.count)
    s.count = (s.count - s.first) * e.octets


@phase
def within_arrays(e, /, s, nnzb):
    """Clamp what may have been read while the producer kernel wrote it.

    Reads and writes: `first` and `count`.
    Barriers: none.
    After: they lead to no place outside of the arrays, even if they were read while the producer kernel wrote them.
    """
    s.first = T.max(T.min(s.first, nnzb), 0)
    s.count = T.max(T.min(s.count, (nnzb - s.first) * e.octets), 0)


def load_columns(e: Extents, load: Callable[..., Any] = load_int) -> Phase:
    """Load the column ids of the steps in hand.

    Reads: `indices` for the steps in hand. Writes: `columns`, but for octets beyond the row. Barriers: none.
    """

    @T.inline
    def phase(s, io, columns):
        for d in T.unroll(e.depth):
            if s.octet + d * e.stride < s.count:
                load(columns[d], io.indices.ptr_to([s.first + (s.octet + d * e.stride) // e.octets]))
    return phase


@phase
def load_weight(e, /, s, io, w):
    """Load the weight's operand of the steps in hand.

    Reads: the weight's octets in hand.
    Writes: `weight`, zeros beyond the row's last octet.
    Barriers: of the warp, at the end.
    After: these loads are issued before any that follow.
    """
    load = T.meta_var(load_once if e.warps_m == 1 else load_vector)
    fragments = T.meta_var(e.tile_n // 8)
    for d in T.unroll(e.depth):
        if s.octet + d * e.stride < s.count:
            for f in T.unroll(fragments):
                at = (d * fragments + f) * 4
                load(
                    s.weight[at], s.weight[at + 1], s.weight[at + 2], s.weight[at + 3],
                    io.data.ptr_to([
                        s.first + (s.octet + d * e.stride) // e.octets,
                        w.unit % e.slices * e.tile_n + s.group + f * 8,
                        (s.octet + d * e.stride) % e.octets * 8]))
        else:
            for i in T.unroll(fragments * 4):
                s.weight[d * (fragments * 4) + i] = T.uint32(0)
    T.cuda.warp_sync()


@phase
def load_x(e, /, s, io):
    """Load x's operand of the steps in hand.

    Reads: x in the columns in hand.
    Writes: `x`, zeros beyond the row's last octet: the weight is zero there too, but x might hold NaN.
    Barriers: none.
    """
    fragments = T.meta_var(e.tile_m // 8)
    for d in T.unroll(e.depth):
        if s.octet + d * e.stride < s.count:
            for f in T.unroll(fragments):
                at = (d * fragments + f) * 4
                load_vector(
                    s.x[at], s.x[at + 1], s.x[at + 2], s.x[at + 3],
                    io.x.ptr_to([
                        s.x_rows[f], s.columns[d] * e.cols + (s.octet + d * e.stride) % e.octets * 8]))
        else:
            for i in T.unroll(fragments * 4):
                s.x[d * (fragments * 4) + i] = T.uint32(0)


@phase
def multiply(e, /, s):
    """Multiply the operands in hand: two instructions for each step and pair of fragments.

    Reads: `a` and `b`.
    Writes: adds their products to `sums`.
    Barriers: of the warp, at the begin. All of its lanes take part.
    """
    kind = T.meta_var({"float16": "f16", "bfloat16": "bf16"}[e.dtype])
    mma = T.meta_var(getattr(getattr(T.ptx.mma.sync.aligned.m16n8k16.row.col.f32, kind), kind).f32)
    T.cuda.warp_sync()
    for d in T.unroll(e.depth):
        for half in T.unroll(2):
            for f in T.unroll(e.a_fragments):
                for g in T.unroll(e.b_fragments):
                    at = (f * e.b_fragments + g) * 4
                    # A fragment of A is two groups of 8 rows: its words are of row `group`, of row `group + 8`, and
                    # the same for the other columns.
                    a = (d * e.a_fragments + f) * 8 + half * 2
                    b = (d * e.b_fragments + g) * 4 + half * 2
                    mma(s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3],
                        s.a[a], s.a[a + 4], s.a[a + 1], s.a[a + 5],
                        s.b[b], s.b[b + 1],
                        s.sums[at], s.sums[at + 1], s.sums[at + 2], s.sums[at + 3])


@phase
def verify_guesses(e, /, s, io, w):
    """Read once more what was read before the wait, and compare.

    Reads: the row's ends and the column ids once more, now that the producer kernel is done.
    Writes: `first`, `count` and `columns` as they are; `loaded` is 0 in all lanes of a warp if they were guessed wrong
    in any.
    Barriers: the lanes of a warp vote.
    """
    load_columns_anew = T.meta_var(load_columns(e, load_int_anew))
    ends = T.alloc_local([2], "int32")
    columns = T.alloc_local([e.depth], "int32")
    load_int_anew(ends[0], io.indptr.ptr_to([w.unit // e.slices]))
    load_int_anew(ends[1], io.indptr.ptr_to([w.unit // e.slices + 1]))
    ends[1] = (ends[1] - ends[0]) * e.octets
    load_columns_anew(s, io, columns)
    if ends[0] != s.first or ends[1] != s.count:
        s.loaded = 0
    for d in T.unroll(e.depth):
        if s.octet + d * e.stride < s.count and columns[d] != s.columns[d]:
            s.loaded = 0
    s.first = ends[0]
    s.count = ends[1]
    if T.cuda.any_sync(T.uint32(ALL_LANES), s.loaded == 0) != 0:
        s.loaded = 0
        load_columns_anew(s, io, s.columns)


@phase
def start_ahead(e, /, s, io, w):
    """Wait for the producer kernel and load the first operands at once, by column ids that may be guesses.

    Reads: `columns`, which may be guesses; then x and the weight in hand.
    Writes: `columns`, `weight`, `x` and `loaded`; `first` and `count` if they were guesses.
    Barriers: waits for the producer kernel; those of `load_weight` and `verify_guesses`.
    After: `loaded` says whether the operands are those of the steps in hand; `first`, `count` and `columns` are right.
    """
    for d in T.unroll(e.depth):
        s.columns[d] = T.max(T.min(s.columns[d], e.block_cols - 1), 0)
    if e.overlap == 2:
        wait_for_producer()  # the consumer kernel may have started already
    else:
        wait_then_start_consumer()
    # By all lanes, including those that take the row to have ended before: lanes may have read different ends.
    load_weight(e)(s, io, w)
    load_x(e)(s, io)
    if io.long < 0:
        verify_guesses(e)(s, io, w)


@phase
def store_tile(e, /, s, io, left):
    """Store a tile of which one warp has the whole sum.

    Reads: `sums`, whole in one warp. Writes: the tile of y, but for rows beyond m. Barriers: none.
    """
    for f in T.unroll(e.a_fragments):
        for g in T.unroll(e.b_fragments):
            if e.weight_is_a:
                for i in T.unroll(4):
                    if s.top + x_row(e, s, f, g, i) < io.m:
                        io.y[s.top + x_row(e, s, f, g, i), left + weight_row(e, s, f, g, i)] = output(
                            io, left + weight_row(e, s, f, g, i), s.sums[(f * e.b_fragments + g) * 4 + i])
            else:
                # Two neighbouring columns are stored at once.
                for i in T.unroll(2):
                    if s.top + x_row(e, s, f, g, i * 2) < io.m:
                        for v in T.vectorized(2):
                            io.y[
                                s.top + x_row(e, s, f, g, i * 2), left + weight_row(e, s, f, g, i * 2 + v)
                            ] = output(
                                io, left + weight_row(e, s, f, g, i * 2 + v),
                                s.sums[(f * e.b_fragments + g) * 4 + i * 2 + v])


@phase
def write_parts(e, /, s, shared, t):
    """Put each warp's sums into shared memory.

    Reads: `sums`. Writes: `parts`. Barriers: of the thread block, at the end. After: all warps' tiles are there.
    """
    for f in T.unroll(e.a_fragments):
        for g in T.unroll(e.b_fragments):
            for i in T.unroll(4):
                shared.parts[t // 32, x_row(e, s, f, g, i), weight_row(e, s, f, g, i)] = (
                    s.sums[(f * e.b_fragments + g) * 4 + i])
    T.cuda.cta_sync()


@phase
def add_parts(e, /, s, shared, io, w, t, left):
    """Add up what the warps have, and the ranks of a cluster, and store the tile.

    Reads: `parts`, and `others` of rank 0.
    Writes: y, but for rows beyond m, by rank 0; `others` by other ranks.
    Barriers: none; `write_parts` and `balance.meet` come before.
    After: sums were added up in the order of the warps, then of the ranks, so that equal inputs give equal bits.
    """
    half = T.meta_var(e.tile_n // 2)
    # Launches that read ahead have few pairs; the compiler would unroll a loop that usually runs once.
    for i in (
        T.unroll(ceildiv(e.pairs, e.tile_threads)) if e.overlap == 2
        else T.serial((e.pairs - t % e.tile_threads + (e.tile_threads - 1)) // e.tile_threads)
    ):
        pair = i * e.tile_threads + t % e.tile_threads
        if (e.overlap < 2 or pair < e.pairs) and s.top + pair // half < io.m:
            for v in T.unroll(2):
                s.sums[v] = T.float32(0)
                for warp in T.unroll(e.reduce_warps):
                    s.sums[v] = s.sums[v] + shared.parts[
                        t // e.tile_threads * e.reduce_warps + warp, pair // half, pair % half * 2 + v]
            add_ranks(e.cluster, e.chunk, 2)(w, s.count, s.sums, shared.others, t // e.tile_threads * e.pairs + pair)
            if w.rank == 0:
                for v in T.vectorized(2):
                    io.y[s.top + pair // half, left + pair % half * 2 + v] = output(
                        io, left + pair % half * 2 + v, s.sums[v])


def program(problem: BsrMatmul, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)

    @T.inline
    def body(io):
        T.device_entry()
        if e.overlap == 2:
            # The consumer kernel may start whenever there is room: it waits until this kernel has ended.
            start_consumer()
        w = T.meta_var(Work.alloc())
        deal_out(Deal(e.units, e.slices, e.cluster), e.tile_m * e.warps_m, e.overlap == 2)(w, io.m, io.long)
        t = T.thread_id([e.threads])
        s = T.meta_var(TileState.alloc(e))
        take_places(e)(s, w, t, io.m)

        if e.overlap == 2 and (io.constant != 0 and io.long >= 0):
            # The weight is constant: only x has to be waited for.
            count_octets(e, listed_row(e.slices))(s, io, w)
            load_columns(e)(s, io, s.columns)
            load_weight(e)(s, io, w)
            wait_for_producer()
            load_x(e)(s, io)
            join(e.cluster, e.chunk)(w, s.count)
            multiply(e)(s)
            s.octet = s.octet + e.chunk * w.ranks
            # Most rows end here: reading the column ids of the next round ahead would delay the first round.
            while s.octet - s.member < s.count:
                load_columns(e)(s, io, s.columns)
                load_weight(e)(s, io, w)
                load_x(e)(s, io)
                multiply(e)(s)
                s.octet = s.octet + e.chunk * w.ranks
        else:
            s.loaded = int(e.overlap > 0)
            if io.long >= 0:
                count_octets(e, listed_row(e.slices))(s, io, w)
            else:
                count_octets(e, unlisted_row(e.slices))(s, io, w)
            if e.overlap > 0:
                within_arrays(e)(s, io.nnzb)
            load_columns(e)(s, io, s.columns)
            if e.overlap > 0:
                start_ahead(e)(s, io, w)
            join(e.cluster, e.chunk)(w, s.count)
            # The first lane's octet decides for the whole warp, since an instruction needs all lanes.
            while s.octet - s.member < s.count:
                if s.loaded == 0:
                    load_weight(e)(s, io, w)
                    load_x(e)(s, io)
                s.loaded = 0
                s.octet = s.octet + e.chunk * w.ranks
                load_columns(e, load_int_anew if e.overlap > 0 else load_int)(s, io, s.columns)
                multiply(e)(s)

        left: T.int32 = first_column(e, s, w)
        if e.reduce_warps == 1:
            store_tile(e)(s, io, left)
        else:
            shared = T.meta_var(SharedSums.alloc(e))
            write_parts(e)(s, shared, t)
            meet(e.cluster, e.chunk)(w, s.count)
            add_parts(e)(s, shared, io, w, t, left)
            hand_in(e.cluster)(w)
    return gpu_program(problem, body, overlapped=e.overlap > 0)
# fmt: on
