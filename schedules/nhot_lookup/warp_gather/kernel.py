"""The kernel of `warp_gather`, in phases. What they do together, and why, is told in the package's docstring.

A batch is what a warp has in flight at once: `loads` table rows in each of its `groups` groups of lanes. A window is
the up to 32 entries whose ids a warp holds, one per lane; batches are taken from it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program, ceildiv
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

from ...device.overlap import CACHE_LINE, start_consumer, wait_for_producer, wait_then_start_consumer
from ...device.selection import FULL_WARP
from ...device.state import Buffers, named, register, scalar
from ...device.words import FILLERS, PTX_INDEX, load_element, load_words, stored_at, value_at
from ...interface import gpu_program
from .space import MOST_TABLES, WARP, Extents


@dataclass(frozen=True)
class Place:
    """Which part of the output a thread works for: registers."""

    lane: Any  # of the warp
    tile: Any  # which tile of the row
    line: Any  # the row of the output by the grid's count; beyond the last one for spare warps of a last thread block
    row: Any  # the row of the sparse matrix that is read: that of `line`, or of the last one
    table: Any  # that it is looked up in

    @classmethod
    def alloc(cls, table: Any = 0) -> Place:
        return named(
            cls(
                lane=register("int32"),
                tile=register("int32"),
                line=register("int32"),
                row=register("int64"),
                table=table,
            )
        )


@dataclass
class Window(Buffers):
    """What a lane holds of up to 32 entries, one a lane: registers."""

    column: Any = scalar()  # the entry's id
    value: Any = scalar("float32")
    # The scale of the table's row, if it is stored in eight bits.
    scale: Any = scalar("float32", when=lambda e: e.scaled)


@dataclass(frozen=True)
class State:
    """What the phases share: registers of a thread."""

    # Where the row's entries lie in `indices`: as `indptr` says, and as they are guessed to (start and stop).
    start: Any
    stop: Any
    guessed: tirx.Buffer
    # The warp's own entries are those from `first` to before `last`; `first` moves on as they are added.
    first: Any
    last: Any
    window: Window  # the window at `first`
    next_window: Window  # the window after it
    count: Any  # entries of the window
    guessed_column: Any  # the id that was read before the wait for the producer kernel
    done: Any  # batches of the window that are added already
    # A batch, an element for each load: entry within the window, table row, value, and the elements as 32-bit words.
    entry: tirx.Buffer
    table_row: tirx.Buffer
    weight: tirx.Buffer
    id: Any  # an id as it is stored
    small: tirx.Buffer  # a load of 2 bytes
    raw: tirx.Buffer
    result: tirx.Buffer  # what is stored, in the output's dtype
    term: Any
    acc: tirx.Buffer  # the lane's sums, or maxima
    # Where entries of one id count as absent: this id, and how many others the lane has had, if that is of interest.
    padding: Any = None
    real: Any = None
    # With several tables: the first row of the one that the row is looked up in.
    base: Any = None
    # With a table in eight bits: scales of the loads' rows, and the entry of `words.FILLERS` for its dtype.
    scale: Any = None
    filler: Any = None

    @classmethod
    def alloc(cls, e: Extents) -> State:
        return named(
            cls(
                start=register(e.index),
                stop=register(e.index),
                guessed=T.alloc_local([2], e.index),
                first=register(e.index),
                last=register(e.index),
                window=Window.alloc(e),
                next_window=Window.alloc(e),
                count=register("int32"),
                guessed_column=register("int32"),
                done=register("int32"),
                entry=T.alloc_local([e.loads], "int32"),
                table_row=T.alloc_local([e.loads], "int32"),
                weight=T.alloc_local([e.loads], "float32"),
                id=register(e.index),
                small=T.alloc_local([1], "uint16"),
                raw=T.alloc_local([e.loads * e.words], "uint32"),
                result=T.alloc_local([e.vec], e.dtype),
                term=register("float32"),
                acc=T.alloc_local([e.vec], "float32"),
                padding=register("int32") if e.padded else None,
                real=register("int32") if e.counts else None,
                base=register("int32") if e.tables > 1 else None,
                scale=T.alloc_local([e.loads], "float32") if e.scaled else None,
                filler=register("uint32") if e.scaled else None,
            )
        )


@phase
def kernel_body(e, /, io):
    """The kernel, as the body of `interface.gpu_program`."""
    guess_own_entries, load_row_ends = T.meta_var(guess_entries(e)), T.meta_var(read_row_ends(e))
    # Entries of a row if all have as many; counted on the host.
    each: T.let = io.nnz // (io.rows if e.tables == 1 else io.rows * e.tables)
    T.device_entry()
    if e.reads_ahead:
        start_consumer()  # a consumer kernel waits for this one whenever it starts
    block = T.meta_var(thread_blocks(e, io))
    t = T.thread_id([e.threads])
    s = T.meta_var(State.alloc(e))
    at = T.meta_var(Place.alloc(block[1]))
    place_warps(e)(at, io, block[0], t)
    for v in T.unroll(e.vec):
        s.acc[v] = nothing(e)
    if e.padded:
        s.padding = T.Cast("int32", io.padding)
    if e.counts:
        s.real = 0
    if e.scaled:
        # No constant to the compiler, which would hold what it is combined with in registers instead.
        s.filler = T.uint32(FILLERS.get((e.stored, "float16"), 0)) | T.Cast("uint32", io.rows >> T.int64(62))

    if e.reads_ahead:
        guess_own_entries(s, at, each)
        read_ids_ahead(e)(s, io, at)
        if e.prefetch:
            prefetch_guessed_rows(e)(s, io, at)
        wait_for_producer()
        load_rows_ahead(e)(s, io, at)
        load_row_ends(s, io, at)
        check_what_was_read_ahead(e)(s, io, at)
    else:
        if e.overlap == 1:
            wait_then_start_consumer()
        if e.tables > 1:
            find_own_table(e)(s, io, at)
        load_row_ends(s, io, at)
        guess_own_entries(s, at, each)
        check_guessed_ids(e)(s, io, at)

    gather_entries(e)(s, io, at)
    reduce_groups(e)(s)
    store_tile(e)(s, io, at)


def thread_blocks(e: Extents, io: Any) -> tuple[Any, Any]:
    """Which thread block of those for a table this is, and the table, for which the grid has a second axis: a division
    would take as long as a tenth of a short row.
    """
    blocks = T.Cast("int32", (io.rows * e.row_tiles + (e.tiles - 1)) // e.tiles)
    if 1 < e.tables <= MOST_TABLES:
        return T.cta_id([blocks, e.tables])
    both = T.cta_id([blocks * e.tables])
    return (both, 0) if e.tables == 1 else (both % blocks, both // blocks)


# ---- parts of phases -------------------------------------------------------------------------------


# fmt: off
@phase
def load_window(e, /, s, io, begin, lane, window):
    """A window: ids and values of the 32 entries from `begin` on, one a lane.

    Lanes beyond the warp's last entry get id 0 and value 0.
    """
    # What was read ahead of the wait is read again by a load that bypasses the multiprocessor's own cache: there it
    # may still be as it was before the producer kernel wrote it.
    read = T.meta_var(getattr(T.ptx.ld.relaxed.gpu.global_ if e.reads_ahead else T.ptx.ld.global_, PTX_INDEX[e.index]))
    window.column = 0
    window.value = T.float32(0)
    if begin + T.Cast(e.index, lane) < s.last:
        read(s.id, io.indices.ptr_to([begin + T.Cast(e.index, lane)]))
        window.column = T.Cast("int32", s.id) + s.base if e.tables > 1 else T.Cast("int32", s.id)
        if e.counts:
            s.real = s.real + T.Cast("int32", window.column != s.padding)
        if e.weighted:
            window.value = load_element(e.value, io.values.ptr_to([begin + T.Cast(e.index, lane)]))
        if e.scaled:  # entries that were guessed may be another table's, whose ids are larger
            row: T.let = T.min(window.column, T.Cast("int32", io.vocab - 1)) if e.tables > 1 else window.column
            T.ptx.ld.global_.f32(window.scale, io.scales.ptr_to([T.Cast("int64", row)]))


@phase
def take_next_window(e, /, s):
    """The next window in the place of this one."""
    s.window.column = s.next_window.column
    s.window.value = s.next_window.value
    if e.scaled:
        s.window.scale = s.next_window.scale


def held_by(s: State, u: Any, whole: bool) -> Any:
    """The lane that holds the entry of load `u`.

    Where the window has fewer entries than the batch (not `whole`), its last one takes the place of those that are
    missing: a branch would delay the loads. Sums leave it out.
    """
    return s.entry[u] if whole else T.min(s.entry[u], s.count - 1)


@phase
def choose_row(e, /, s, u, b, lane, column, whole):
    """`entry` and `table_row` of load `u` of the window's batch `b`: the lane that holds the id hands it over."""
    s.entry[u] = b * e.batch + u * e.groups + lane // e.lanes
    s.table_row[u] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), column, held_by(s, u, whole), 32, 32)


@phase
def choose_weight(e, /, s, u, whole):
    """`weight` of load `u`, if entries have values, and `scale`, if rows have."""
    if e.weighted:
        s.weight[u] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.window.value, held_by(s, u, whole), 32, 32)
    if e.scaled:
        s.scale[u] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.window.scale, held_by(s, u, whole), 32, 32)


def row_address(e: Extents, s: State, u: Any, io: Any, at: Place) -> Any:
    """Where the table has this lane's columns in the row of load `u`."""
    column = (at.tile * e.lanes + at.lane % e.lanes) * e.vec
    # Lanes beyond the last column read it again, and store nothing.
    return io.table.ptr_to([T.Cast("int64", s.table_row[u]), T.min(column, e.width - e.vec) if e.ragged else column])


@phase
def load_row(e, /, s, u, io, at):
    """Begin load `u`: this lane's columns of `table_row[u]`, into `raw`."""
    load_words(e.load_bytes, s.raw, u * e.words, s.small, row_address(e, s, u, io, at))


def nothing(e: Extents) -> Any:
    """What adds nothing to a sum, or to a maximum."""
    return T.float32(-math.inf if e.mode == "max" else 0)


@phase
def add_to_sum(e, /, s, v, other):
    """Add a number to the lane's sum of column `v`; or make it the larger one of both, NaN if one is."""
    if e.mode == "max":
        T.ptx.max.NaN.f32(s.acc[v], s.acc[v], other)
    else:
        s.acc[v] = s.acc[v] + other


def counted(e: Extents, s: State, u: Any, every: bool) -> Any:
    """The condition on which load `u` counts, beside those of an `every` that is False; None if there is none."""
    terms = ([] if every else [s.entry[u] < s.count]) + ([s.table_row[u] != s.padding] if e.padded else [])
    return functools.reduce(T.And, terms) if terms else None


def element(e: Extents, s: State, u: Any, v: Any) -> Any:
    """Element `v` of load `u` in float32, with its row's scale."""
    if e.scaled:
        return s.scale[u] * stored_at(e.stored, s.raw, u * e.words, v, s.filler)
    return value_at(e.dtype, s.raw, u * e.words, v)


@phase
def add_batch(e, /, s, whole):
    """Add the loads of a batch, weighted, to `acc`; of one that is not `whole` those that the window has entries for.

    In a batch that is not whole, loads without an entry are left out by predicates or branches where ids are read
    ahead, since such a launch rarely adds another batch; otherwise zeros are added. So are loads of padding, which may
    hold NaN.
    """
    for u in T.unroll(e.loads):
        if whole or not e.reads_ahead or s.entry[u] < s.count:
            for v in T.unroll(e.vec):
                s.term = element(e, s, u, v)
                if e.weighted:
                    s.term = s.weight[u] * s.term
                counts = T.meta_var(counted(e, s, u, whole or e.reads_ahead))
                add_to_sum(e)(s, v, s.term if counts is None else T.Select(counts, s.term, nothing(e)))


def gather_batch(e: Extents) -> Phase:
    """Add batch `b` of the window: all loads first, then the sums."""
    choose, weigh, load, add = choose_row(e), choose_weight(e), load_row(e), add_batch(e)

    @T.inline
    def phase(s, io, at, b, whole):
        for u in T.unroll(e.loads):
            choose(s, u, b, at.lane, s.window.column, whole)
            if not e.scaled:
                weigh(s, u, whole)
            load(s, u, io, at)
        if e.scaled:  # scales come no sooner than the rows
            for u in T.unroll(e.loads):
                weigh(s, u, whole)
        add(s, whole)
    return phase


# ---- phases ----------------------------------------------------------------------------------------


@phase
def place_warps(e, /, at, io, block, t):
    """The tile of this thread's warp. Tiles are counted along the rows of the output.

    Reads: nothing. Writes: all of `Place`. Barriers: none.
    After: `row` is one of the output's. Spare warps repeat the last one, so that they can take part in barriers.
    """
    at.lane = t % WARP
    at.line = (block * e.tiles + t // WARP) // e.row_tiles
    at.tile = (block * e.tiles + t // WARP) % e.row_tiles
    at.row = T.min(T.Cast("int64", at.line), io.rows - 1)
    if e.tables > 1:
        at.row = at.row + at.table * io.rows


@phase
def find_own_table(e, /, s, io, at):
    """Where the table begins that the row is looked up in, and which of its rows is padding.

    Reads: `first_rows`. Writes: `base`, `padding`. Barriers: none.
    """
    T.ptx.ld.global_.s32(s.base, io.first_rows.ptr_to([at.table]))
    if e.padded:
        s.padding = s.padding + s.base


@phase
def guess_entries(e, /, s, at, each):
    """The entries that the warp has if all rows have as many (`each`).

    Reads: nothing. Writes: `guessed`, `first`, `last`. Barriers: none.
    After: `first` and `last` are within `indices`, whatever the rows are like.
    """
    s.guessed[0] = T.Cast(e.index, at.row * each)
    s.guessed[1] = s.guessed[0] + T.Cast(e.index, each)
    s.first = s.guessed[0]
    s.last = s.guessed[1]


@phase
def read_ids_ahead(e, /, s, io, at):
    """Read the ids of the guessed entries, before the wait: the producer kernel may be writing them.

    Reads: `indices` from `first` on, `last`. Writes: `guessed_column`, `count`, `entry`, `table_row`.
    Barriers: shuffles of the whole warp.
    After: `table_row` has ids of the first batch, which may be wrong but are rows of the table.
    """
    s.guessed_column = 0
    if s.first + T.Cast(e.index, at.lane) < s.last:
        getattr(T.ptx.ld.global_, PTX_INDEX[e.index])(s.id, io.indices.ptr_to([s.first + T.Cast(e.index, at.lane)]))
        s.guessed_column = T.Cast(
            "int32", T.max(T.min(s.id, T.Cast(e.index, io.vocab - 1)), T.Cast(e.index, 0)))
    s.count = T.Cast("int32", T.min(s.last - s.first, T.Cast(e.index, WARP)))
    for u in T.unroll(e.loads):
        choose_row(e)(s, u, 0, at.lane, s.guessed_column, e.batch == 1)


@phase
def prefetch_guessed_rows(e, /, s, io, at):
    """Bring what the first batch will load into the L2 cache.

    Reads: `table_row`. Writes: nothing. Barriers: none.
    After: no value of the table has been read, so the producer kernel may still write it.
    """
    if at.lane % ceildiv(min(e.lanes * e.load_bytes, CACHE_LINE), e.load_bytes) == 0:
        for u in T.unroll(e.loads):
            T.ptx.prefetch.global_.L2(row_address(e, s, u, io, at))


@phase
def load_rows_ahead(e, /, s, io, at):
    """Load the table rows of the guessed ids, right after the wait.

    Reads: `table_row`, the table. Writes: `raw`. Barriers: one of the warp.
    After: the loads are in flight, ahead of those of the phases to come.
    """
    for u in T.unroll(e.loads):
        load_row(e)(s, u, io, at)
    # Without the barrier the assembler moves later loads, which depend on less, before these.
    T.cuda.warp_sync()


@phase
def read_row_ends(e, /, s, io, at):
    """Where the row's entries begin and end.

    Reads: `indptr`. Writes: `start`, `stop`. Barriers: none.
    """
    read = T.meta_var(getattr(T.ptx.ld.relaxed.gpu.global_ if e.reads_ahead else T.ptx.ld.global_, PTX_INDEX[e.index]))
    starts = T.meta_var(io.offsets if e.tables > 1 else io.indptr)
    read(s.start, starts.ptr_to([at.row]))
    read(s.stop, starts.ptr_to([at.row + 1]))


@phase
def load_own_ids(e, /, s, io, at):
    """The warp's entries, and the first window of them.

    Reads: `start`, `stop`, `indices`, `values`. Writes: `first`, `last`, `window`. Barriers: none.
    After: the window at `first` is in the lanes.
    """
    s.first = s.start
    s.last = s.stop
    if e.counts:
        s.real = 0
    load_window(e)(s, io, s.first, at.lane, s.window)


@phase
def check_guessed_ids(e, /, s, io, at):
    """The first window, from where it is guessed to be; if the row's ends tell otherwise, from where it is.

    Reads: `guessed`, `first`, `last`, `start`, `stop`, `indices`, `values`.
    Writes: `window`; and `first` and `last` if they were wrong. Barriers: none.
    After: as after `load_own_ids`.
    """
    load_window(e)(s, io, s.first, at.lane, s.window)
    # One branch for both ends: it waits for the row's ends, after the ids were requested.
    if (s.start ^ s.guessed[0]) | (s.stop ^ s.guessed[1]) != T.Cast(e.index, 0):
        load_own_ids(e)(s, io, at)


@phase
def check_what_was_read_ahead(e, /, s, io, at):
    """Add the batch that was loaded ahead if ends and ids are what they were taken to be; else begin anew.

    Reads: `guessed`, `guessed_column`, `raw`, `start`, `stop`, `indices`, `values`.
    Writes: `window`, `done`, `acc`; and `first` and `last` if they were wrong.
    Barriers: a vote of the warp, and shuffles.
    After: the window at `first` is in the lanes, and the first `done` (0 or 1) of its batches in `acc`.
    """
    load_window(e)(s, io, s.first, at.lane, s.window)
    # A vote, because all lanes take part in the shuffles that follow, also if only some of them were wrong. A warp
    # that was to have no entry has loaded no row of its own.
    if T.cuda.any_sync(T.uint32(FULL_WARP), (s.count <= 0) | (s.window.column != s.guessed_column) | (
            (s.start ^ s.guessed[0]) | (s.stop ^ s.guessed[1]) != T.Cast(e.index, 0))) != 0:
        load_own_ids(e)(s, io, at)
        s.done = 0
    else:
        for u in T.unroll(e.loads):
            choose_weight(e)(s, u, e.batch == 1)
        add_batch(e)(s, e.batch == 1)
        s.done = 1


@phase
def gather_entries(e, /, s, io, at):
    """Add all entries of the warp that are not added yet, window by window.

    Reads: `first`, `last`, `window`, `done` (if ids are read ahead), and through them `indices`, `values` and
    the table. Writes: `acc`. Barriers: shuffles of the whole warp, which has one `first` and one `last`.
    After: `acc` of a lane has the sums of its columns over the entries of its group.
    """
    gather, ahead = T.meta_var(gather_batch(e)), T.meta_var(e.reads_ahead)
    while s.first + T.Cast(e.index, s.done * e.batch if ahead else 0) < s.last:
        load_window(e)(s, io, s.first + T.Cast(e.index, WARP), at.lane, s.next_window)
        s.count = T.Cast("int32", T.min(s.last - s.first, T.Cast(e.index, WARP)))
        batches = s.count // e.batch
        for b in T.serial(s.done if ahead else 0, batches, unroll=False if ahead else None):
            gather(s, io, at, b, True)
        if s.count % e.batch != 0:
            gather(s, io, at, batches, False)
        if ahead:
            s.done = 0
        s.first = s.first + T.Cast(e.index, WARP)
        take_next_window(e)(s)


@phase
def reduce_groups(e, /, s):
    """Add what the groups of a warp have, by halves; and where lanes have counted entries, what they have.

    Reads and writes: `acc`, `real`. Barriers: shuffles of the whole warp.
    After: `acc` of every lane has the sums of its columns over the row's entries, and `real` the number of these.
    """
    for h in T.unroll(e.groups.bit_length() - 1):
        for v in T.unroll(e.vec):
            add_to_sum(e)(s, v, T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.acc[v], e.lanes << h, 32, 32))
    if e.counts:
        for h in T.unroll(WARP.bit_length() - 1):
            s.real = s.real + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.real, 1 << h, 32, 32)


def finished(e: Extents, s: State, v: Any) -> Any:
    """The lane's result of column `v`: its sum, over the number of entries for a mean; 0 for a maximum of none."""
    real = s.real if e.counts else T.Cast("int32", s.stop - s.start)
    if e.mode == "mean":
        return s.acc[v] / T.Cast("float32", T.max(real, 1))
    return T.Select(real > 0, s.acc[v], T.float32(0)) if e.mode == "max" else s.acc[v]


def out_row(e: Extents, io: Any, at: Place) -> Any:
    """The row of the output that has the row's result."""
    return at.row if e.tables == 1 else at.line


def out_column(e: Extents, io: Any, at: Place, column: Any) -> Any:
    """The place of a column of it there, beside those of other tables."""
    return column if e.tables == 1 else T.Cast("int64", at.table) * e.width + column


@phase
def store_tile(e, /, s, io, at):
    """Store the tile, by the first group of its warp.

    Reads: `acc`; `real`, or `start` and `stop`, for means and maxima. Writes: the output, and `result`. Barriers: none.
    """
    # A check that always holds delays the store by some 50 cycles. It stays in launches that begin by waiting, because
    # their kernels take fewer registers with it.
    spare_warps = T.meta_var(not e.reads_ahead or e.row_tiles % e.tiles != 0)
    together = T.meta_var(e.stored_together)
    column = T.meta_var((at.tile * e.lanes + at.lane) * e.vec)
    if at.lane < e.lanes and (not spare_warps or T.Cast("int64", at.line) < io.rows):
        if not (not e.reads_ahead or e.ragged) or column < e.width:
            for v in T.unroll(e.vec):
                s.result[v] = T.Cast(e.dtype, finished(e, s, v))
            for part in T.unroll(e.vec // together):
                for v in T.vectorized(together):
                    io.out[
                        out_row(e, io, at), out_column(e, io, at, column + part * together + v)
                    ] = s.result[part * together + v]
# fmt: on


def program(problem: NhotLookup, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)
    return gpu_program(problem, kernel_body(e), overlapped=e.overlap > 0, index="int64")
