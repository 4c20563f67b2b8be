"""The kernel of `staged_x`, in phases; the package's docstring says what it does, and why.

    deal_out        the strip of x and the block row that this thread block multiplies (`device.balance`)
    listed_row, unlisted_row
                    where the block row begins and ends (`block_row`)
    load_columns    the columns of x of a chunk's blocks
    load_weight     the chunk of the weight, to registers
    stage_x         the chunk of x, to shared memory
    multiply        their products
    fold_lanes      the sums of a warp's lanes
    write_parts     those of each warp to shared memory
    add_parts       their sum, also over the cluster, to y

The phases from `load_columns` to `multiply` are repeated for every chunk; the chunk *in hand* begins at block `begin`.
The ranks of a cluster that share a long row come together in `join`, `meet` and `hand_in` (`device.balance`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.bsr_matmul.problem import BsrMatmul

from ...device.balance import Deal, Work, add_ranks, deal_out, hand_in, join, meet
from ...device.overlap import wait_then_start_consumer
from ...device.state import Buffers, local, named, scalar
from ...device.words import load_words, value_in
from ..block_row import listed_row, load_int, unlisted_row
from ..interface import gpu_program, output
from .space import Extents

ALL_LANES = 0xFFFFFFFF


@dataclass
class RowState(Buffers):
    """What a thread has of its block row.

    The compiler's choice of registers depends on this order, in which measured kernels declare them.
    """

    # For each of the thread's rows of the block and each row of x, in this order.
    sums: Any = local("float32", lambda e: e.passes * e.tile_m)
    # The thread's vectors of a chunk, in words.
    weight: Any = local("uint32", lambda e: e.depth * e.passes * e.words)
    # One vector of x.
    x: Any = local(lambda e: e.dtype, lambda e: e.vec)
    # The column of x at which the block of each copy begins.
    columns: Any = local("int32", lambda e: e.copies)
    # The first block of the block row, and the one after its last.
    ends: Any = local("int32", 2)
    # The block row.
    row: Any = scalar()
    # The sum of one element of y.
    total: Any = local("float32")
    # The first block of the chunk in hand, counted from the block row's begin.
    begin: Any = scalar()
    # The first block of the block row, and how many it has.
    first: Any = scalar()
    count: Any = scalar()


@dataclass
class SharedState:
    """What a thread block has in shared memory.

    `staged`: for each block of a chunk its columns of the rows of x, and one row that nobody uses, which keeps blocks
    off each other's banks. `parts`: the sums of each set. `others`: what rank 0 of a cluster gets from the other ranks.
    """

    staged: Any
    parts: Any
    others: Any

    @classmethod
    def alloc(cls, e: Extents) -> SharedState:
        staged = T.alloc_shared([e.chunk, e.tile_m + 1, e.cols], e.dtype)
        parts = T.alloc_shared([e.sets, e.tile_m, e.rows], "float32")
        others = T.alloc_shared([e.cluster - 1, e.outputs, 1], "float32") if e.cluster > 1 else None
        return named(cls(staged, parts, others))


# fmt: off
@phase
def load_columns(e, /, s, io, t, begin):
    """Load the column ids of the chunk that begins at block `begin`.

    Reads: `indices` for the chunk that begins at block `begin`. Writes: `columns`. Barriers: none.
    """
    for j in T.unroll(e.copies):
        s.columns[j] = 0
        if begin + (j * e.threads + t) // (e.tile_m * e.across) < s.count:
            load_int(
                s.columns[j],
                io.indices.ptr_to([s.first + begin + (j * e.threads + t) // (e.tile_m * e.across)]))
            s.columns[j] = s.columns[j] * e.cols


@phase
def load_weight(e, /, s, io, t):
    """Load the weight's chunk in hand into registers.

    Reads: the weight's chunk in hand.
    Writes: `weight`, but for blocks beyond the row.
    Barriers: of the warp, at the end.
    After: these loads are issued before the copies of x. Without the barrier the assembler would move them behind
    those, which wait for the column ids.
    """
    for d in T.unroll(e.depth):
        if s.begin + d * e.groups + t // e.block_vectors < s.count:
            for p in T.unroll(e.passes):
                load_words(
                    e.words * 4, s.weight, (d * e.passes + p) * e.words, None,
                    io.data.ptr_to([
                        s.first + s.begin + d * e.groups + t // e.block_vectors,
                        t // e.across % e.rows + p * e.row_step,
                        t % e.across * e.vec]))
    T.cuda.warp_sync()


@phase
def stage_x(e, /, s, shared, io, w, t):
    """Start to copy x's chunk in hand into shared memory.

    Reads: x in `columns`.
    Writes: `staged`, asynchronously, but for blocks beyond the row.
    Barriers: none, one group of copies.
    After: the copies are on their way; rows beyond m repeat the last one.
    """
    size = T.meta_var(e.words * 4)
    copy = T.meta_var(T.ptx.cp.async_.cg.shared.global_ if size == 16 else T.ptx.cp.async_.ca.shared.global_)
    for j in T.unroll(e.copies):
        if j * e.threads + t < e.chunk * e.tile_m * e.across:
            if s.begin + (j * e.threads + t) // (e.tile_m * e.across) < s.count:
                copy(
                    shared.staged.ptr_to([
                        (j * e.threads + t) // (e.tile_m * e.across),
                        (j * e.threads + t) // e.across % e.tile_m,
                        t % e.across * e.vec]),
                    io.x.ptr_to([
                        T.min(w.strip * e.tile_m + (j * e.threads + t) // e.across % e.tile_m, io.m - 1),
                        s.columns[j] + t % e.across * e.vec]),
                    size)
    T.ptx.cp.async_.commit_group()


@phase
def multiply(e, /, s, shared, t):
    """Multiply the chunk in hand, once its copies are there.

    Reads: `weight` and `staged`.
    Writes: adds their products to `sums`.
    Barriers: of the thread block, at the begin, with a wait for the copies, and at the end.
    After: `staged` is free.
    """
    per_word = T.meta_var(e.vec // e.words)
    T.ptx.cp.async_.wait_group(0)
    T.cuda.cta_sync()
    for d in T.unroll(e.depth):
        if s.begin + d * e.groups + t // e.block_vectors < s.count:
            for i in T.unroll(e.tile_m):
                for v in T.vectorized(e.vec):
                    s.x[v] = shared.staged[d * e.groups + t // e.block_vectors, i, t % e.across * e.vec + v]
                for p in T.unroll(e.passes):
                    for v in T.unroll(e.vec):
                        s.sums[p * e.tile_m + i] = s.sums[p * e.tile_m + i] + value_in(
                            e.dtype, s.weight[(d * e.passes + p) * e.words + v // per_word], v % per_word
                        ) * T.Cast("float32", s.x[v])
    T.cuda.cta_sync()


@phase
def fold_lanes(e, /, s):
    """Add up the sums of lanes that share a row.

    Reads and writes: `sums`. Barriers: the lanes of a warp shuffle. After: each sum covers all lanes that share a row:
    neighbours, which have other columns of a block, and lanes that are `block_vectors` apart, which have other blocks.
    """
    for i in T.unroll(e.passes * e.tile_m):
        for j in T.unroll(e.across.bit_length() - 1):
            s.sums[i] = s.sums[i] + T.tvm_warp_shuffle_xor(T.uint32(ALL_LANES), s.sums[i], 1 << j, 32, 32)
        for j in T.unroll(e.warp_blocks.bit_length() - 1):
            s.sums[i] = s.sums[i] + T.tvm_warp_shuffle_xor(
                T.uint32(ALL_LANES), s.sums[i], e.block_vectors << j, 32, 32)


@phase
def write_parts(e, /, s, shared, t):
    """Put the sums of each set into shared memory.

    Reads: `sums`.
    Writes: `parts`, by one lane of those that share a row of a block.
    Barriers: of the thread block, at the end.
    After: `parts` holds the sums of all sets.
    """
    if t % e.across == 0 and t % 32 // e.block_vectors == 0:
        for p in T.unroll(e.passes):
            for i in T.unroll(e.tile_m):
                shared.parts[
                    t // e.block_vectors * e.sets // e.groups, i, t // e.across % e.rows + p * e.row_step
                ] = s.sums[p * e.tile_m + i]
    T.cuda.cta_sync()


@phase
def add_parts(e, /, s, shared, io, w, t):
    """Add up what the sets have, and the ranks of a cluster, and store the tile.

    Reads: `parts`, and `others` of rank 0.
    Writes: y, but for rows beyond m, by rank 0; `others` by other ranks.
    Barriers: none; `write_parts` and `balance.meet` come before.
    After: sums were added up in the order of the sets, then of the ranks, so that equal inputs give equal bits.
    """
    for o in T.serial((e.outputs - t + (e.threads - 1)) // e.threads):
        if w.strip * e.tile_m + (o * e.threads + t) // e.rows < io.m:
            s.total[0] = T.float32(0)
            for part in T.unroll(e.sets):
                s.total[0] = s.total[0] + shared.parts[
                    part, (o * e.threads + t) // e.rows, (o * e.threads + t) % e.rows]
            add_ranks(e.cluster, e.chunk, 1)(w, s.count, s.total, shared.others, o * e.threads + t)
            if w.rank == 0:
                column: T.int32 = s.row * e.rows + (o * e.threads + t) % e.rows
                io.y[w.strip * e.tile_m + (o * e.threads + t) // e.rows, column] = output(io, column, s.total[0])


def program(problem: BsrMatmul, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)

    @T.inline
    def body(io):
        T.device_entry()
        w = T.meta_var(Work.alloc())
        deal_out(Deal(e.block_rows, 1, e.cluster), e.tile_m, False)(w, io.m, io.long)
        t = T.thread_id([e.threads])
        shared = T.meta_var(SharedState.alloc(e))
        s = T.meta_var(RowState.alloc(e))

        # The structure is read before the wait if nobody writes it any more.
        s.begin = w.rank * e.chunk
        if io.long >= 0:
            listed_row(1)(s, io, w, s.ends[0], s.ends[1])
        else:
            if e.overlap > 0:
                wait_then_start_consumer()
            unlisted_row(1)(s, io, w, s.ends[0], s.ends[1])
        s.first = s.ends[0]
        s.count = s.ends[1] - s.ends[0]
        load_columns(e)(s, io, t, s.begin)
        if e.overlap > 0:
            if io.long >= 0:
                wait_then_start_consumer()
        join(e.cluster, e.chunk)(w, s.count)

        for i in T.unroll(e.passes * e.tile_m):
            s.sums[i] = T.float32(0)
        while s.begin < s.count:
            load_weight(e)(s, io, t)
            stage_x(e)(s, shared, io, w, t)
            load_columns(e)(s, io, t, s.begin + e.chunk * w.ranks)
            multiply(e)(s, shared, t)
            s.begin = s.begin + e.chunk * w.ranks

        fold_lanes(e)(s)
        write_parts(e)(s, shared, t)
        meet(e.cluster, e.chunk)(w, s.count)
        add_parts(e)(s, shared, io, w, t)
        hand_in(e.cluster)(w)
    return gpu_program(problem, body, overlapped=e.overlap > 0)
# fmt: on
