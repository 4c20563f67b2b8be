"""N-hot lookup on a GPU: warps gather rows of the table in wide vectors, several at a time.

A row of the output, cut into tiles of `lanes` x `vec` columns, is the work of `split` warps. Each takes a contiguous
share of the row's entries: one coalesced load brings 32 column ids (and values), which shuffles hand to the lanes, so
that `loads` loads of 16 bytes are in flight in each lane before the first sum. Narrow tables leave lanes over: then
32 / `lanes` groups of a warp take different entries, and are summed by shuffles. What the warps of a tile have is
summed through shared memory, in a fixed order. One-hot rows take the same way, with neither split nor groups.

With few entries a row the time is that of three dependent trips to memory: row start, ids, rows. Two things make it
shorter. `guess`: minibatches mostly have as many entries in every row, so the ids are loaded from where they would then
be, beside the row starts that tell whether they are there. `early`: the launch is allowed to overlap the end of the
kernel before (programmatic dependent launch). With 1 it waits for the results of that before it reads anything.

With 2 and 3 it reads the ids before it waits. They may be about to be written, so they are guesses, which are only kept
from leading out of the table; when the kernel before is done, the rows that they stand for are loaded at once, and row
starts, ids and values beside them. What was loaded counts if starts and ids are what they were taken to be, for a whole
warp, as they are in most calls: then one trip is left. With 3 the rows are brought into the L2 cache before the wait,
no more than a hint, so that they may be written until then. The kernel behind may start as soon as this one has.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.core.template import Decisions, Program, Table, Template, ceildiv, powers

LANES = powers(4, 32)
# Loads in flight a lane; 16 of 16 bytes are 64 registers. As many that a warp's share of a row, 13 or
# 25 of 100 entries, leaves little for a last batch.
LOADS = (1, 2, 3, 4, 5, 7, 8, 10, 13, 16)
# Warps that share a tile, and tiles that share a block of threads.
SPLIT = powers(1, 16)
TILES = powers(1, 8)
MAX_THREADS = 512


def widths(problem: Problem) -> tuple[int, ...]:
    """Elements a load, of 16 bytes and of 8, or what divides a row of the table."""
    widest = 16 // numpy_dtype(problem.dtype).itemsize
    return tuple(v for v in (8, 4, 2, 1) if v <= widest and problem.width % v == 0)[:2]


def space(problem: Problem, machine: Machine) -> Table:
    return {
        "column_lanes": LANES,
        "vec": widths(problem),
        "loads": LOADS,
        "reduce_warps": SPLIT,
        "tiles": TILES,
        "guess": (0, 1),
        "overlap": (0, 1, 2) if machine.has_clusters else (0,),
        "prefetch": (0, 1) if machine.has_clusters else (0,),
    }


def widest(problem: Problem, vec: int) -> int:
    """The most lanes of which more than half have a column."""
    return max(n for n in LANES if n == LANES[0] or n * vec < 2 * problem.width)


def allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    lanes, loads, split = decisions["column_lanes"], decisions["loads"], decisions["reduce_warps"]
    most = widest(problem, decisions["vec"])
    if decisions["prefetch"] and decisions["overlap"] < 2:
        return "rows are prefetched by the ids that are read ahead"
    if decisions["overlap"] == 2 and not decisions["guess"]:
        return "ids are read ahead only where they are guessed to be"
    if lanes > most:
        return f"half of {lanes} lanes have no column of width={problem.width}"
    if 32 * split * decisions["tiles"] > MAX_THREADS:
        return f"{32 * split * decisions['tiles']} threads a block exceed {MAX_THREADS}"
    if 32 // lanes * loads > 32:
        return f"{32 // lanes} groups of {loads} loads exceed the 32 ids that a warp holds"
    at_once = 32 // lanes * loads * split
    if at_once > max(2 * problem.nonzeros, 32 // most):
        return f"{at_once} entries at once are more than twice nonzeros={problem.nonzeros}"
    if at_once * 32 < min(problem.nonzeros, 512):
        return f"{at_once} entries at once leave a row of nonzeros={problem.nonzeros} waiting for memory"
    return None


def default(problem: Problem, machine: Machine) -> Decisions:
    """As many loads at once as a row has entries, up to 8 in a lane and 8 warps."""
    vec = widths(problem)[0]
    lanes = widest(problem, vec)
    each = ceildiv(problem.nonzeros, 32 // lanes)
    loads = max(n for n in LOADS if n <= min(each, 8, lanes))
    split = max(n for n in SPLIT if n <= min(ceildiv(each, loads), 8))
    return {
        "column_lanes": lanes,
        "vec": vec,
        "loads": loads,
        "reduce_warps": split,
        "tiles": 1,
        "guess": 0,
        "overlap": 0,
        "prefetch": 0,
    }


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from ..device.overlap import LINE, await_previous, overlapping
    from ..device.selection import FULL_WARP
    from ..device.words import INDEX_KINDS, load_words, read_element, value_at

    width, dtype, index, weighted = problem.width, problem.dtype, problem.index, bool(problem.weighted)
    lanes, vec, loads, split = (decisions[name] for name in ("column_lanes", "vec", "loads", "reduce_warps"))
    size = numpy_dtype(dtype).itemsize
    tiles, guess = decisions["tiles"], bool(decisions["guess"])
    early, ahead = decisions["overlap"] > 0, decisions["overlap"] == 2
    prefetches, per_line = bool(decisions["prefetch"]), ceildiv(min(lanes * vec * size, LINE), vec * size)
    groups = 32 // lanes
    step = groups * loads  # entries that a warp has in flight
    columns = ceildiv(width, lanes * vec)  # tiles a row
    ragged = width % (lanes * vec) != 0
    # Whether warps may be without a row, and lanes without a column. A check that always holds delays the store by some
    # 50 cycles; launches that begin by waiting keep it all the same, because they take fewer registers with it.
    spare_warps, spare_lanes = not ahead or columns % tiles != 0, not ahead or ragged
    halvings, split_bits = groups.bit_length() - 1, split.bit_length() - 1
    wide = min(vec, 4)  # floats of one access to shared memory
    words = ceildiv(vec * size, 4)  # of a load
    kind = INDEX_KINDS[index]
    read_ahead = getattr(T.ptx.ld.global_, kind)
    # What was read ahead is read again past what this multiprocessor has cached.
    read_index = getattr(T.ptx.ld.relaxed.gpu.global_ if ahead else T.ptx.ld.global_, kind)

    # fmt: off
    @T.inline
    def share_out(start, stop, part, first, last):
        """The entries of this warp: a contiguous share, without a division."""
        last[0] = (stop - start + T.Cast(index, split - 1)) >> T.Cast(index, split_bits)
        first[0] = start + T.Cast(index, part) * last[0]
        last[0] = T.min(stop, first[0] + last[0])

    @T.inline
    def guess_share(row, each, part, guessed, first, last):
        guessed[0] = T.Cast(index, row * each)
        guessed[1] = guessed[0] + T.Cast(index, each)
        share_out(guessed[0], guessed[1], part, first, last)

    @T.inline
    def fetch(indices, values, at, last, lane, id, column, value):
        """32 ids and values, one a lane; beyond the last entry a value of 0."""
        column[0] = 0
        value[0] = T.float32(0)
        if at + T.Cast(index, lane) < last[0]:
            read_index(id[0], indices.ptr_to([at + T.Cast(index, lane)]))
            column[0] = T.Cast("int32", id[0])
            if weighted:
                value[0] = read_element(dtype, values.ptr_to([at + T.Cast(index, lane)]))

    @T.inline
    def fetch_ahead(indices, at, last, lane, vocab, id, column):
        """32 ids, one a lane. They may be anything still, but must not lead out of the table."""
        column[0] = 0
        if at + T.Cast(index, lane) < last[0]:
            read_ahead(id[0], indices.ptr_to([at + T.Cast(index, lane)]))
            column[0] = T.Cast("int32", T.max(T.min(id[0], T.Cast(index, vocab - 1)), T.Cast(index, 0)))

    @T.inline
    def choose(u, b, lane, count, column, slot, z, whole):
        """The entry of a lane's `u`-th load.

        Where not all of them are there, the last one is loaded in the place of the others, because a branch would
        delay the loads; a sum takes no part of it.
        """
        slot[u] = b * step + u * groups + lane // lanes
        z[u] = T.tvm_warp_shuffle(
            T.uint32(FULL_WARP), column[0], slot[u] if whole else T.min(slot[u], count[0] - 1), 32, 32)

    @T.inline
    def weigh(u, count, value, slot, weight, whole):
        if weighted:
            weight[u] = T.tvm_warp_shuffle(
                T.uint32(FULL_WARP), value[0], slot[u] if whole else T.min(slot[u], count[0] - 1), 32, 32)

    def place(u, table, lane, tile, z):
        """Where the table has the columns of this lane in the `u`-th row."""
        column = (tile * lanes + lane % lanes) * vec
        # Lanes beyond the last column read it again, and store nothing.
        return table.ptr_to([T.Cast("int64", z[u]), T.min(column, width - vec) if ragged else column])

    @T.inline
    def load(u, table, lane, tile, z, raw, small):
        load_words(vec * size, raw, u * words, small, place(u, table, lane, tile, z))

    @T.inline
    def add(count, slot, weight, raw, term, acc, whole):
        """Where not all entries are there: by predicates or branches in launches that read ahead, which mostly do no
        more than one such batch, else by selecting zeros."""
        for u in T.unroll(loads):
            if whole or not ahead or slot[u] < count[0]:
                for v in T.unroll(vec):
                    term[0] = value_at(dtype, raw, u * words, v)
                    if weighted:
                        term[0] = weight[u] * term[0]
                    acc[v] = acc[v] + (
                        term[0] if whole or ahead else T.Select(slot[u] < count[0], term[0], T.float32(0)))

    @T.inline
    def gather(table, b, lane, tile, count, column, value, slot, z, weight, raw, small, term, acc, whole):
        """Add `step` entries, all loads first, then the sums."""
        for u in T.unroll(loads):
            choose(u, b, lane, count, column, slot, z, whole)
            weigh(u, count, value, slot, weight, whole)
            load(u, table, lane, tile, z, raw, small)
        add(count, slot, weight, raw, term, acc, whole)

    @T.prim_func
    def main(indptr_h: T.handle, indices_h: T.handle, values_h: T.handle, table_h: T.handle, out_h: T.handle):
        rows = T.int64()
        nnz = T.int64()
        vocab = T.int64()
        indptr = T.match_buffer(indptr_h, (rows + 1,), index)
        indices = T.match_buffer(indices_h, (nnz,), index)
        values = T.match_buffer(values_h, (nnz,), dtype)
        table = T.match_buffer(table_h, (vocab, width), dtype)
        out = T.match_buffer(out_h, (rows, width), dtype)
        each: T.let = nnz // rows  # on the host
        T.device_entry()
        if ahead:
            T.ptx.griddepcontrol.launch_dependents()  # they await this one whenever they start
        block = T.cta_id([T.Cast("int32", (rows * columns + (tiles - 1)) // tiles)])
        t = T.thread_id([32 * split * tiles])
        parts = T.alloc_shared([max(tiles * (split - 1) * lanes * vec, 1)], "float32")
        start = T.alloc_local([1], index)
        stop = T.alloc_local([1], index)
        guessed = T.alloc_local([2], index)
        first = T.alloc_local([1], index)
        last = T.alloc_local([1], index)
        column = T.alloc_local([1], "int32")
        value = T.alloc_local([1], "float32")
        next_column = T.alloc_local([1], "int32")
        next_value = T.alloc_local([1], "float32")
        count = T.alloc_local([1], "int32")
        taken = T.alloc_local([1], "int32")
        done = T.alloc_local([1], "int32")  # batches of these 32 entries that were added ahead
        slot = T.alloc_local([loads], "int32")
        z = T.alloc_local([loads], "int32")
        weight = T.alloc_local([loads], "float32")
        id = T.alloc_local([1], index)
        small = T.alloc_local([1], "uint16")
        raw = T.alloc_local([loads * words], "uint32")
        result = T.alloc_local([vec], dtype)
        term = T.alloc_local([1], "float32")
        acc = T.alloc_local([vec], "float32")
        lane = t % 32
        part = t // 32 % split
        line: T.int32 = (block * tiles + t // (32 * split)) // columns
        tile: T.int32 = (block * tiles + t // (32 * split)) % columns
        # Warps of the last block that have no row of their own repeat the last one, and store nothing.
        row: T.int64 = T.min(T.Cast("int64", line), rows - 1)
        for v in T.unroll(vec):
            acc[v] = T.float32(0)
        if ahead:
            guess_share(row, each, part, guessed, first, last)
            fetch_ahead(indices, first[0], last, lane, vocab, id, taken)
            count[0] = T.Cast("int32", T.min(last[0] - first[0], T.Cast(index, 32)))
            for u in T.unroll(loads):
                choose(u, 0, lane, count, taken, slot, z, step == 1)
            if prefetches and lane % per_line == 0:
                for u in T.unroll(loads):
                    T.ptx.prefetch.global_.L2(place(u, table, lane, tile, z))
            # From here on memory is as the kernel before leaves it.
            T.ptx.griddepcontrol.wait()
            for u in T.unroll(loads):
                load(u, table, lane, tile, z, raw, small)
            # The assembler would move the loads below, which depend on less, before those.
            T.cuda.warp_sync()
        elif early:
            await_previous()
        read_index(start[0], indptr.ptr_to([row]))
        read_index(stop[0], indptr.ptr_to([row + 1]))
        if ahead:
            fetch(indices, values, first[0], last, lane, id, column, value)
            # By warp: also where only some lanes were wrong all of them have to take part in what follows.
            if T.cuda.any_sync(T.uint32(FULL_WARP), (count[0] <= 0) | (column[0] != taken[0]) | (
                    (start[0] ^ guessed[0]) | (stop[0] ^ guessed[1]) != T.Cast(index, 0))) != 0:
                share_out(start[0], stop[0], part, first, last)
                fetch(indices, values, first[0], last, lane, id, column, value)
                done[0] = 0
            else:
                for u in T.unroll(loads):
                    weigh(u, count, value, slot, weight, step == 1)
                add(count, slot, weight, raw, term, acc, step == 1)
                done[0] = 1
        elif guess:
            guess_share(row, each, part, guessed, first, last)
            fetch(indices, values, first[0], last, lane, id, column, value)
            if (start[0] ^ guessed[0]) | (stop[0] ^ guessed[1]) != T.Cast(index, 0):
                share_out(start[0], stop[0], part, first, last)
                fetch(indices, values, first[0], last, lane, id, column, value)
        else:
            share_out(start[0], stop[0], part, first, last)
            fetch(indices, values, first[0], last, lane, id, column, value)
        while first[0] + T.Cast(index, done[0] * step if ahead else 0) < last[0]:
            fetch(indices, values, first[0] + T.Cast(index, 32), last, lane, id, next_column, next_value)
            count[0] = T.Cast("int32", T.min(last[0] - first[0], T.Cast(index, 32)))
            batches = count[0] // step
            for b in T.serial(done[0] if ahead else 0, batches, unroll=False if ahead else None):
                gather(table, b, lane, tile, count, column, value, slot, z, weight, raw, small, term, acc, True)
            if count[0] % step != 0:
                gather(table, batches, lane, tile, count, column, value, slot, z, weight, raw, small, term, acc, False)
            if ahead:
                done[0] = 0
            first[0] = first[0] + T.Cast(index, 32)
            column[0] = next_column[0]
            value[0] = next_value[0]

        # the groups of a warp
        for h in T.unroll(halvings):
            for v in T.unroll(vec):
                acc[v] = acc[v] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), acc[v], lanes << h, 32, 32)
        # the warps of a tile
        if split > 1:
            if part > 0 and lane < lanes:
                for q in T.unroll(vec // wide):
                    for v in T.vectorized(wide):
                        parts[(((t // (32 * split)) * (split - 1) + part - 1) * lanes + lane) * vec + q * wide + v] = (
                            acc[q * wide + v])
            T.cuda.cta_sync()
            if part == 0 and lane < lanes:
                for s in T.unroll(split - 1):
                    for v in T.unroll(vec):
                        acc[v] = acc[v] + parts[(((t // (32 * split)) * (split - 1) + s) * lanes + lane) * vec + v]
        if part == 0 and lane < lanes and (not spare_warps or T.Cast("int64", line) < rows):
            if not spare_lanes or (tile * lanes + lane) * vec < width:
                for v in T.unroll(vec):
                    result[v] = T.Cast(dtype, acc[v])
                for v in T.vectorized(vec):
                    out[row, (tile * lanes + lane) * vec + v] = result[v]
    # fmt: on
    main = problem.trimmed(main).with_attr("global_symbol", "main")
    if early:
        main = overlapping(main)
    return Program(tvm.IRModule({"main": main}), pipeline="tirx")


warp_gather = Template(
    name="warp_gather",
    version=3,
    operator="nhot_lookup",
    kind="cuda",
    summary="warps share a row's entries, several wide loads in flight a lane",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
