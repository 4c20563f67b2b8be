"""N-hot lookup on a GPU: warps gather rows of the table in wide vectors, several at a time.

A row of the output, cut into tiles of `lanes` x `vec` columns, is the work of `split` warps. Each takes a contiguous
share of the row's entries: one coalesced load brings 32 column ids (and values), which shuffles hand to the lanes, so
that `loads` loads of 16 bytes are in flight in each lane before the first sum. Narrow tables leave lanes over: then
32 / `lanes` groups of a warp take different entries, and are summed by shuffles. What the warps of a tile have is
summed through shared memory, in a fixed order. One-hot rows take the same way, with neither split nor groups.

With few entries a row the time is that of three dependent trips to memory: row start, ids, rows. Two things make it
shorter. `guess`: minibatches mostly have as many entries in every row, so the ids are loaded from where they would then
be, beside the row starts that tell whether they are there. `early`: the launch is allowed to overlap the end of the
kernel before (programmatic dependent launch); this one waits for the results of that before it reads anything.
"""

from __future__ import annotations

from tvm_sparse.machine import Machine
from tvm_sparse.operators.problem import Problem, numpy_dtype

from .template import Decisions, Program, Table, Template, ceildiv, powers

LANES = powers(4, 32)
# Loads in flight a lane; 16 of 16 bytes are 64 registers.
LOADS = powers(1, 16)
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
        "lanes": LANES,
        "vec": widths(problem),
        "loads": LOADS,
        "split": SPLIT,
        "tiles": TILES,
        "guess": (0, 1),
        "early": (0, 1) if machine.has_clusters else (0,),
    }


def widest(problem: Problem, vec: int) -> int:
    """The most lanes of which more than half have a column."""
    return max(n for n in LANES if n == LANES[0] or n * vec < 2 * problem.width)


def allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    lanes, loads, split = decisions["lanes"], decisions["loads"], decisions["split"]
    most = widest(problem, decisions["vec"])
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
    return {"lanes": lanes, "vec": vec, "loads": loads, "split": split, "tiles": 1, "guess": 0, "early": 0}


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from .overlap import await_previous, overlapping
    from .selection import FULL_WARP
    from .words import load_words, per_word, read_element, value_in

    width, dtype, index, weighted = problem.width, problem.dtype, problem.index, bool(problem.weighted)
    lanes, vec, loads, split = (decisions[name] for name in ("lanes", "vec", "loads", "split"))
    tiles, guess, early = decisions["tiles"], bool(decisions["guess"]), bool(decisions["early"])
    groups = 32 // lanes
    step = groups * loads  # entries that a warp has in flight
    columns = ceildiv(width, lanes * vec)  # tiles a row
    ragged = width % (lanes * vec) != 0
    halvings, split_bits = groups.bit_length() - 1, split.bit_length() - 1
    wide = min(vec, 4)  # floats of one access to shared memory
    size = numpy_dtype(dtype).itemsize
    words = ceildiv(vec * size, 4)  # of a load
    read_index = getattr(T.ptx.ld.global_, {"int32": "s32", "int64": "s64"}[index])

    # fmt: off
    @T.inline
    def share_out(start, stop, part, first, last):
        """The entries of this warp: a contiguous share, without a division."""
        last[0] = (stop - start + T.Cast(index, split - 1)) >> T.Cast(index, split_bits)
        first[0] = start + T.Cast(index, part) * last[0]
        last[0] = T.min(stop, first[0] + last[0])

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
    def gather(table, b, lane, tile, count, column, value, slot, z, weight, raw, small, term, acc, whole):
        """Add `step` entries, all loads first, then the sums.

        Where not all of them are there, the last one is loaded in the place of the others, because a branch would
        delay the loads; a sum takes no part of it.
        """
        for u in T.unroll(loads):
            slot[u] = b * step + u * groups + lane // lanes
            z[u] = T.tvm_warp_shuffle(
                T.uint32(FULL_WARP), column[0], slot[u] if whole else T.min(slot[u], count[0] - 1), 32, 32)
            if weighted:
                weight[u] = T.tvm_warp_shuffle(
                    T.uint32(FULL_WARP), value[0], slot[u] if whole else T.min(slot[u], count[0] - 1), 32, 32)
            if ragged:
                # Lanes beyond the last column read it again, and store nothing.
                load_words(vec * size, raw, u * words, small, table.ptr_to(
                    [T.Cast("int64", z[u]), T.min((tile * lanes + lane % lanes) * vec, width - vec)]))
            else:
                load_words(vec * size, raw, u * words, small, table.ptr_to(
                    [T.Cast("int64", z[u]), (tile * lanes + lane % lanes) * vec]))
        for u in T.unroll(loads):
            for v in T.unroll(vec):
                term[0] = value_in(dtype, raw[u * words + v // per_word(dtype)], v % per_word(dtype))
                if weighted:
                    term[0] = weight[u] * term[0]
                if whole:
                    acc[v] = acc[v] + term[0]
                else:
                    acc[v] = acc[v] + T.Select(slot[u] < count[0], term[0], T.float32(0))

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
        if early:
            await_previous()
        read_index(start[0], indptr.ptr_to([row]))
        read_index(stop[0], indptr.ptr_to([row + 1]))
        if guess:
            guessed[0] = T.Cast(index, row * each)
            guessed[1] = guessed[0] + T.Cast(index, each)
            share_out(guessed[0], guessed[1], part, first, last)
            fetch(indices, values, first[0], last, lane, id, column, value)
            if (start[0] ^ guessed[0]) | (stop[0] ^ guessed[1]) != T.Cast(index, 0):
                share_out(start[0], stop[0], part, first, last)
                fetch(indices, values, first[0], last, lane, id, column, value)
        else:
            share_out(start[0], stop[0], part, first, last)
            fetch(indices, values, first[0], last, lane, id, column, value)
        while first[0] < last[0]:
            fetch(indices, values, first[0] + T.Cast(index, 32), last, lane, id, next_column, next_value)
            count[0] = T.Cast("int32", T.min(last[0] - first[0], T.Cast(index, 32)))
            batches = count[0] // step
            for b in T.serial(batches):
                gather(table, b, lane, tile, count, column, value, slot, z, weight, raw, small, term, acc, True)
            if count[0] % step != 0:
                gather(table, batches, lane, tile, count, column, value, slot, z, weight, raw, small, term, acc, False)
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
        if part == 0 and lane < lanes and T.Cast("int64", line) < rows:
            if (tile * lanes + lane) * vec < width:
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
    version=2,
    operator="nhot_lookup",
    kind="cuda",
    summary="warps share a row's entries, several wide loads in flight a lane",
    space=space,
    default=default,
    build=build,
    allowed=allowed,
    explicit_threads=True,
)
