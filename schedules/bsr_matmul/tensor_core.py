"""Block-sparse matmul on tensor cores, for 16-bit inputs: `mma.m16n8k16` fed from registers.

Every tile of the output is a sum over the octets of its block row: eight neighbouring columns of a stored block, 16
bytes of each row. A product over 32 columns takes four octets, whichever blocks they are from, one for each of the
four lanes that share a row of a fragment: the lane reads its octet of the weight and of x with one load each, and uses
it as what the instruction calls columns 2t, 2t + 1, 2t + 8 and 2t + 9, of two instructions. Which columns these are
does not matter as long as both operands agree, so neither shared memory nor `ldmatrix` stands between the loads and
the tensor cores, and blocks of 8 columns fill an instruction like any others.

The operand of 16 rows is the weight where a tile has 8 rows of x, so that m = 8 wastes nothing, else x, whose
accumulators lie as the output does, and which blocks of 8 rows need.

`split` warps share the octets of a tile, step by step in turn, and add up through shared memory: that is what keeps
enough loads in flight when m is small. Column numbers are read one step ahead, because x is found through them, and
the weight is asked for before x, because it does not wait for them.

One multiprocessor takes long to read a row of many blocks among short ones. Of a skewed pattern the host knows which
rows these are. They come first, and with `spread` a cluster of blocks of threads shares each (`balance`): what its
first block does not read in one go is dealt out to the others, which put their sums into the first one's shared memory,
where they are added in a fixed order.

`early` lets a launch overlap the end of the kernel before (programmatic dependent launch). Of the three trips to memory
that follow each other, for the row's ends, its columns and x, two are made before that one is done: ends and columns
are known if the host has looked at them (`long` is not below 0), because nobody writes them any more. Else they are
guesses, which are read again, from the L2 cache and beside x, and in most calls found to be right. With 2 the kernel
behind may start as soon as this one has, and a weight that is known to be `constant` takes a way of its own, with
nothing to guess or to choose: its first blocks are loaded before the wait too, while the kernel before computes, and
what is left then is x, the products and the sum.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, ceildiv, powers

# Weight rows and rows of x of a warp's tile.
TILE_N = powers(8, 64)
TILE_M = powers(8, 128)
# Warps that share a tile, and warps on neighbouring tiles along m: these read the same blocks at the same time.
SPLIT = powers(1, 16)
WARPS_M = powers(1, 4)
# Steps of four octets whose loads are in flight together.
DEPTH = powers(1, 8)
# Blocks of threads that share a tile whose row is long, in skewed patterns.
SPREAD = powers(1, 8)
MAX_WARPS = 16
# Rows of x of a warp's tile up to which the weight may be loaded ahead.
AHEAD = 8
# Accumulators and operands that a thread holds; beyond it the compiler spills.
MAX_HELD = 176
# Registers of a multiprocessor, and what a thread needs besides (addresses, counts).
REGISTERS, BESIDES = 65536, 24
MAX_SHARED = 48 * 1024
MAX_BLOCKS_Y = 65535  # of a grid
# Floats between the rows of a tile in shared memory beyond its width: keeps lanes off each other's banks.
PAD = 4


def space(problem: Problem, machine: Machine) -> Table:
    if problem.dtype == "float32":
        raise NotApplicable("tensor cores would round float32 inputs to 10 bits")
    rows, cols = problem.block_shape
    if machine.capability < 80:
        raise NotApplicable(f"{machine.arch} has no tensor cores for m16n8k16")
    if rows % 8 or cols % 8:
        raise NotApplicable(f"blocks of {rows}x{cols} are no multiples of 8x8")
    return {
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * max(problem.m, 16)),
        "tile_n": tuple(tile for tile in TILE_N if rows % tile == 0),
        "reduce_warps": SPLIT,
        "warps_m": WARPS_M,
        "depth": DEPTH,
        "cluster": SPREAD if machine.has_clusters and problem.pattern == "skewed" else (1,),
        "overlap": (0, 1, 2) if machine.has_clusters else (0,),
    }


def allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    tile_m, tile_n, split, warps_m = (decisions[name] for name in ("tile_m", "tile_n", "reduce_warps", "warps_m"))
    if tile_m == 8 and tile_n % 16:
        return f"neither {tile_n} rows of the weight nor 8 of x fill the 16 of an instruction"
    warps = split * warps_m
    if warps > MAX_WARPS:
        return f"{warps} warps a block exceed {MAX_WARPS}"
    if warps_m > 1 and tile_m * warps_m >= 2 * problem.m:
        return f"half of the {warps_m} tiles of {tile_m} rows lie beyond m={problem.m}"
    held = tile_m * tile_n // 32 + decisions["depth"] * ((tile_m + tile_n) // 2 + 2)
    if held > MAX_HELD:
        return f"{held} accumulators and operands exceed {MAX_HELD} registers"
    if split > 1 and shared_bytes(decisions) > MAX_SHARED:
        return f"partial sums of {shared_bytes(decisions)} bytes exceed shared memory of {MAX_SHARED}"
    if decisions["overlap"] == 2 and problem.n // tile_n > MAX_BLOCKS_Y:
        return f"{problem.n // tile_n} tiles of n={problem.n} exceed an axis of the grid"
    if decisions["overlap"] == 2 and tile_m > AHEAD:
        return f"with tiles of {tile_m} rows of x the launch matters too little to load the weight ahead"
    steps = ceildiv(problem.k, 32)
    if (held + BESIDES) * 32 * warps > REGISTERS:
        return f"{held} accumulators and operands in each of {32 * warps} threads exceed the registers"
    if split * decisions["depth"] > max(steps, 1):
        return f"a row has at most {steps} steps of 32 columns to share"
    spread = decisions["cluster"]
    if spread > 1 and split == 1:
        return "a row is shared by the warps of a block before it is by blocks"
    if spread > 1 and split * decisions["depth"] * spread >= 2 * steps:
        return f"half of {spread} blocks of threads have no part of a row of {problem.k} elements"
    return None


def shared_bytes(decisions: Decisions) -> int:
    tile_m, tile_n, warps_m = decisions["tile_m"], decisions["tile_n"], decisions["warps_m"]
    parts = decisions["reduce_warps"] * warps_m * tile_m * (tile_n + PAD)
    return (parts + (decisions["cluster"] - 1) * warps_m * tile_m * tile_n) * 4


def default(problem: Problem, machine: Machine) -> Decisions:
    """Tiles of up to 64 rows of x and 32 of the weight, split until each multiprocessor has some warps to work on.

    With one strip of x a long row is shared by four blocks; with several there is enough to do beside it.
    """
    table = space(problem, machine)
    tile_n = max(tile for tile in table["tile_n"] if tile <= 32)
    tile_m = max(tile for tile in table["tile_m"] if tile <= 64 and (tile > 8 or tile_n % 16 == 0))
    if problem.m <= 8 and tile_n % 16 == 0:
        tile_m, tile_n = 8, 16
    tiles = ceildiv(problem.m, tile_m) * (problem.n // tile_n)
    spreads = (4, 1) if 4 in table["cluster"] and problem.m <= tile_m else (1,)
    choices = [
        {
            "tile_m": tile_m,
            "tile_n": tile_n,
            "reduce_warps": split,
            "warps_m": 1,
            "depth": depth,
            "cluster": s,
            "overlap": early,
        }
        for split in (8, 4, 2, 1)
        for depth in (2, 1)
        for s in spreads
        for early in ((2, 1) if machine.has_clusters else (0,))
        if split == 1 or tiles * split <= 16 * machine.cores
    ]
    return next(point for point in choices if allowed(problem, machine, point) is None)


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from tvm_sparse.operators.bsr_matmul.epilogue import finish

    from ..device.balance import Deal
    from ..device.cluster import cluster_arrive, cluster_barrier, cluster_wait, peer_write
    from ..device.overlap import await_previous, overlapping
    from ..device.words import read_element

    rows, cols = problem.block_shape
    block_rows, _ = problem.grid
    n, k, dtype = problem.n, problem.k, problem.dtype
    tile_m, tile_n, warps_m, depth = (decisions[name] for name in ("tile_m", "tile_n", "warps_m", "depth"))
    split = decisions["reduce_warps"]
    spread, early = decisions["cluster"], decisions["overlap"] > 0
    ahead = decisions["overlap"] == 2
    slices = rows // tile_n
    deal = Deal(n // tile_n, slices, spread)
    octets = cols // 8  # of a row of a block
    weight_first = tile_m == 8
    tall, wide = (tile_n // 16, tile_m // 8) if weight_first else (tile_m // 16, tile_n // 8)  # fragments
    threads = 32 * split * warps_m
    share = 32 * split  # threads that share a tile
    chunk = 4 * split * depth  # octets that a block of threads reads in one go
    pitch = tile_n + PAD
    pairs = tile_m * tile_n // 2
    kind = {"float16": "f16", "bfloat16": "bf16"}[dtype]
    mma = getattr(getattr(T.ptx.mma.sync.aligned.m16n8k16.row.col.f32, kind), kind).f32
    # Barriers of a warp part the loads of the weight, those of x, and the products, and loads that are not declared
    # read-only stay on their side: the assembler would move each next to its use, so that one waits for another.
    load, fetch = T.ptx.ld.global_.v4.u32, T.ptx.ld.global_.s32
    fetch_anew = T.ptx.ld.relaxed.gpu.global_.s32  # passes by what this multiprocessor has cached
    # What one warp alone reads, once, need not push x out of L1.
    stream = T.ptx.ld.global_.L1__no_allocate.v4.u32 if warps_m == 1 else load
    biased, activation = bool(problem.bias), problem.activation
    put = peer_write("put_sum", "float")

    def strips(m):
        """Strips of x that blocks of threads share out."""
        return (m + (tile_m * warps_m - 1)) // (tile_m * warps_m)

    def weight_row(unit, group):
        """The row of a block that a lane begins at."""
        return unit % slices * tile_n + group

    # fmt: off
    @T.inline
    def load_ends(how, P, unit, ends):
        """First block of the unit's row, and the row's octets."""
        how(ends[0], P.ptr_to([unit // slices]))
        how(ends[1], P.ptr_to([unit // slices + 1]))
        ends[1] = (ends[1] - ends[0]) * octets

    @T.inline
    def load_order(R, unit, row, ends):
        """The unit's row and the same of it, of a pattern that the host has looked at."""
        fetch(row[0], R.ptr_to([unit // slices, 0]))
        fetch(ends[0], R.ptr_to([unit // slices, 1]))
        fetch(ends[1], R.ptr_to([unit // slices, 2]))
        ends[1] = (ends[1] - ends[0]) * octets

    @T.inline
    def load_columns(how, D, octet, count, first, columns):
        """The block columns of the octets of all steps in hand."""
        for d in T.unroll(depth):
            if octet + d * (4 * split) < count:
                how(columns[d], D.ptr_to([first + (octet + d * (4 * split)) // octets]))

    @T.inline
    def compare(D, P, unit, octet, ends, columns, again, columns_again, guessed):
        """Whether ends and columns are what they were guessed to be; else `guessed` is 0 and they are read again."""
        load_ends(fetch_anew, P, unit, again)
        load_columns(fetch_anew, D, octet, ends[1], ends[0], columns_again)
        if again[0] != ends[0] or again[1] != ends[1]:
            guessed[0] = 0
        for d in T.unroll(depth):
            if octet + d * (4 * split) < ends[1] and columns_again[d] != columns[d]:
                guessed[0] = 0
        ends[0] = again[0]
        ends[1] = again[1]
        if T.cuda.any_sync(T.uint32(0xFFFFFFFF), guessed[0] == 0) != 0:
            guessed[0] = 0
            load_columns(fetch_anew, D, octet, ends[1], ends[0], columns)

    @T.inline
    def load_weight(W, octet, count, first, row, part):
        """The weight's operand of all steps in hand, zeros beyond the row's last octet; before whatever follows."""
        for d in T.unroll(depth):
            if octet + d * (4 * split) < count:
                for f in T.unroll(tile_n // 8):
                    at = (d * (tile_n // 8) + f) * 4
                    stream(part[at], part[at + 1], part[at + 2], part[at + 3],
                           W.ptr_to([first + (octet + d * (4 * split)) // octets, row + f * 8,
                                     (octet + d * (4 * split)) % octets * 8]))
            else:
                for e in T.unroll(tile_n // 2):
                    part[d * (tile_n // 2) + e] = T.uint32(0)
        T.cuda.warp_sync()

    @T.inline
    def load_x(X, octet, count, lane_rows, columns, part):
        """x's operand of all steps in hand, zeros beyond the row's last octet: x there might hold NaN."""
        for d in T.unroll(depth):
            if octet + d * (4 * split) < count:
                for f in T.unroll(tile_m // 8):
                    at = (d * (tile_m // 8) + f) * 4
                    load(part[at], part[at + 1], part[at + 2], part[at + 3],
                         X.ptr_to([lane_rows[f], columns[d] * cols + (octet + d * (4 * split)) % octets * 8]))
            else:
                for e in T.unroll(tile_m // 2):
                    part[d * (tile_m // 2) + e] = T.uint32(0)

    @T.inline
    def load_operands(W, X, octet, count, first, row, lane_rows, columns, weight_part, x_part):
        """Both operands of all steps in hand, the weight's first."""
        load_weight(W, octet, count, first, row, weight_part)
        load_x(X, octet, count, lane_rows, columns, x_part)

    @T.inline
    def join(rank, ranks, count):
        """The blocks of a cluster that have a part of the row: the others are done."""
        if spread > 1:
            if rank > 0 and rank * chunk >= count:
                T.thread_return()
            if ranks > 1 and count > chunk:
                cluster_arrive()

    @T.inline
    def multiply(sums, tall_part, wide_part):
        """Two instructions a step for each pair of fragments, the halves of the octets; behind all loads before."""
        T.cuda.warp_sync()
        for d in T.unroll(depth):
            for half in T.unroll(2):
                for f in T.unroll(tall):
                    for g in T.unroll(wide):
                        c = (f * wide + g) * 4
                        a = (d * tall + f) * 8 + half * 2
                        b = (d * wide + g) * 4 + half * 2
                        mma(sums[c], sums[c + 1], sums[c + 2], sums[c + 3],
                            tall_part[a], tall_part[a + 4], tall_part[a + 1], tall_part[a + 5],
                            wide_part[b], wide_part[b + 1],
                            sums[c], sums[c + 1], sums[c + 2], sums[c + 3])

    @T.inline
    def store(Y, B, row, column, value):
        if biased:
            Y[row, column] = finish(value, read_element(dtype, B.ptr_to([column])), activation, dtype)
        else:
            Y[row, column] = finish(value, None, activation, dtype)

    @T.prim_func
    def main(
        x_h: T.handle, data_h: T.handle, indices_h: T.handle, indptr_h: T.handle, order_h: T.handle, long: T.int32,
        constant: T.int32, bias_h: T.handle, y_h: T.handle
    ):
        m = T.int32()
        nnzb = T.int32()
        X = T.match_buffer(x_h, (m, k), dtype)
        W = T.match_buffer(data_h, (nnzb, rows, cols), dtype)
        D = T.match_buffer(indices_h, (nnzb,), "int32")
        P = T.match_buffer(indptr_h, (block_rows + 1,), "int32")
        R = T.match_buffer(order_h, (block_rows, 3), "int32")
        B = T.match_buffer(bias_h, (n,), dtype)
        Y = T.match_buffer(y_h, (m, n), dtype)
        T.device_entry()
        if ahead:
            T.ptx.griddepcontrol.launch_dependents()  # they await this one whenever they start
        # The long rows of all strips come before the others.
        if ahead and spread == 1:
            strip, cluster = T.cta_id([strips(m), n // tile_n])
            place = 0
        else:
            # One axis: TVM launches clusters along x alone, and the others end at 65535.
            if spread > 1:
                block = T.cluster_id([strips(m) * deal.clusters(long)])
                place = T.cta_id_in_cluster([spread])
            else:
                block = T.cta_id([strips(m) * (n // tile_n)])
                place = 0
            many: T.int32 = strips(m)
            strip: T.int32 = block % many
            cluster: T.int32 = block // many
        t = T.thread_id([threads])
        unit: T.int32 = deal.unit(cluster, place, long)
        rank: T.int32 = deal.rank(cluster, place, long)
        ranks: T.int32 = deal.ranks(cluster, long)
        if spread > 1:
            if unit >= n // tile_n:
                T.thread_return()
        sums = T.alloc_local([tall * wide * 4], "float32")
        tall_part = T.alloc_local([depth * tall * 8], "uint32")
        wide_part = T.alloc_local([depth * wide * 4], "uint32")
        weight_part, x_part = (tall_part, wide_part) if weight_first else (wide_part, tall_part)
        columns = T.alloc_local([depth], "int32")
        lane_rows = T.alloc_local([tile_m // 8], "int32")
        ends = T.alloc_local([2], "int32")
        row = T.alloc_local([1], "int32")
        guessed = T.alloc_local([1], "int32")
        again = T.alloc_local([2], "int32")
        columns_again = T.alloc_local([depth], "int32")
        # The rows of a fragment that this lane holds begin at `group`; `lane` is which of the four octets it takes.
        group = t % 32 // 4
        lane = t % 4
        top: T.int32 = (strip * warps_m + t // share) * tile_m  # of x, of this warp's tile
        octet: T.int32 = rank * chunk + t // 32 % split * 4 + lane
        for f in T.unroll(tile_m // 8):
            # Rows beyond m repeat the last one and are not stored.
            lane_rows[f] = T.min(top + f * 8 + group, m - 1)
        for e in T.unroll(tall * wide * 4):
            sums[e] = T.float32(0)
        if ahead and (constant != 0 and long >= 0):
            load_order(R, unit, row, ends)
            load_columns(fetch, D, octet, ends[1], ends[0], columns)
            load_weight(W, octet, ends[1], ends[0], weight_row(unit, group), weight_part)
            T.ptx.griddepcontrol.wait()
            load_x(X, octet, ends[1], lane_rows, columns, x_part)
            join(rank, ranks, ends[1])
            multiply(sums, tall_part, wide_part)
            octet = octet + chunk * ranks
            # Most rows end here. To read the columns of further steps ahead would delay the first.
            while octet - lane < ends[1]:
                load_columns(fetch, D, octet, ends[1], ends[0], columns)
                load_operands(
                    W, X, octet, ends[1], ends[0], weight_row(unit, group), lane_rows, columns, weight_part, x_part)
                multiply(sums, tall_part, wide_part)
                octet = octet + chunk * ranks
        else:
            guessed[0] = int(early)
            if long >= 0:
                load_order(R, unit, row, ends)
            else:
                row[0] = unit // slices
                load_ends(fetch, P, unit, ends)
            if early:
                # What is read here may be anything still, but it must not lead out of the arrays.
                ends[0] = T.max(T.min(ends[0], nnzb), 0)
                ends[1] = T.max(T.min(ends[1], (nnzb - ends[0]) * octets), 0)
            load_columns(fetch, D, octet, ends[1], ends[0], columns)
            if early:
                for d in T.unroll(depth):
                    columns[d] = T.max(T.min(columns[d], k // cols - 1), 0)
                if ahead:
                    T.ptx.griddepcontrol.wait()
                else:
                    await_previous()
                # By all lanes, also where the row is taken to end before: they may have read different ends.
                load_operands(
                    W, X, octet, ends[1], ends[0], weight_row(unit, group), lane_rows, columns, weight_part, x_part)
                if long < 0:
                    compare(D, P, unit, octet, ends, columns, again, columns_again, guessed)
            first: T.int32 = ends[0]
            count: T.int32 = ends[1]
            join(rank, ranks, count)

            # The first lane's octet decides for the warp: all of it is needed for an instruction.
            while octet - lane < count:
                if guessed[0] == 0:
                    load_operands(
                        W, X, octet, count, first, weight_row(unit, group), lane_rows, columns, weight_part, x_part)
                guessed[0] = 0
                octet = octet + chunk * ranks
                load_columns(fetch_anew if early else fetch, D, octet, count, first, columns)
                multiply(sums, tall_part, wide_part)

        left: T.int32 = row[0] * rows + unit % slices * tile_n  # of y, of this block's tiles
        if split == 1:
            for f in T.unroll(tall):
                for g in T.unroll(wide):
                    if weight_first:
                        for e in T.unroll(4):
                            if top + g * 8 + lane * 2 + e % 2 < m:
                                store(Y, B, top + g * 8 + lane * 2 + e % 2,
                                      left + f * 16 + e // 2 * 8 + group, sums[(f * wide + g) * 4 + e])
                    else:
                        for e in T.unroll(2):
                            if top + f * 16 + e * 8 + group < m:
                                for v in T.vectorized(2):
                                    store(Y, B, top + f * 16 + e * 8 + group, left + g * 8 + lane * 2 + v,
                                          sums[(f * wide + g) * 4 + e * 2 + v])
        else:
            parts = T.alloc_shared([warps_m * split, tile_m, pitch], "float32")
            if spread > 1:
                others = T.alloc_shared([spread - 1, warps_m, pairs, 2], "float32")
            for f in T.unroll(tall):
                for g in T.unroll(wide):
                    for e in T.unroll(4):
                        if weight_first:
                            parts[t // 32, g * 8 + lane * 2 + e % 2, f * 16 + e // 2 * 8 + group] = (
                                sums[(f * wide + g) * 4 + e])
                        else:
                            parts[t // 32, f * 16 + e // 2 * 8 + group, g * 8 + lane * 2 + e % 2] = (
                                sums[(f * wide + g) * 4 + e])
            T.cuda.cta_sync()
            if spread > 1:
                # Blocks write into the first one's memory when that has started, and it reads when they have written.
                if ranks > 1 and ends[1] > chunk:
                    cluster_wait()
                    if rank == 0:
                        cluster_barrier()
            # Launches that read ahead have few pairs; the compiler would make much of a loop that mostly runs once.
            for i in T.unroll(ceildiv(pairs, share)) if ahead else T.serial((pairs - t % share + (share - 1)) // share):
                pair = i * share + t % share
                if (not ahead or pair < pairs) and top + pair // (tile_n // 2) < m:
                    for e in T.unroll(2):
                        sums[e] = T.float32(0)
                        for s in T.unroll(split):
                            sums[e] = sums[e] + parts[
                                t // share * split + s, pair // (tile_n // 2), pair % (tile_n // 2) * 2 + e]
                    if spread > 1:
                        if rank > 0:
                            for e in T.unroll(2):
                                T.evaluate(put(others.ptr_to([rank - 1, t // share, pair, e]), 0, sums[e]))
                        else:
                            for r in T.unroll(spread - 1):
                                if r + 1 < ranks and (r + 1) * chunk < ends[1]:
                                    for e in T.unroll(2):
                                        sums[e] = sums[e] + others[r, t // share, pair, e]
                    if rank == 0:
                        for e in T.vectorized(2):
                            store(Y, B, top + pair // (tile_n // 2),
                                  left + pair % (tile_n // 2) * 2 + e, sums[e])
            if spread > 1:
                if rank > 0:
                    cluster_barrier()
    # fmt: on
    main = main.with_attr("global_symbol", "main")
    if early:
        main = overlapping(main)
    return Program(tvm.IRModule({"main": problem.trimmed(main)}), pipeline="tirx")


tensor_core = Template(
    name="tensor_core",
    version=4,
    operator="bsr_matmul",
    kind="cuda",
    summary="16-bit blocks on tensor cores, operands straight from global memory, warps and clusters share rows",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
