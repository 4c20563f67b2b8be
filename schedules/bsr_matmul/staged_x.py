"""Block-sparse matmul through shared memory: x where the block row asks for it (Gu 2020, section 4.3).

The paper gave this approach up, because TVM then cached what it knew at compile time, whole rows of x. Here a block of
threads takes a block row and reads, chunk by chunk, which columns its blocks stand in, copies those parts of `tile_m`
rows of x into shared memory (`cp.async`), and multiplies. The weight is read once, as one stream: thread t takes the
vectors t, t + threads, ... of the block row's elements, always of the same column of a block and the same rows, so that
its sums stay in registers; every vector meets all `tile_m` rows of x, and every staged part of x all rows of the block.

Loads of the weight are issued before those of x are waited for: a row of one chunk costs three trips to memory (row
starts, columns, x), whatever its length. Of a skewed pattern the long rows come first, and the chunks of each can be
dealt out to a cluster of `spread` blocks of threads, as `tensor_core` does it. `early` lets a launch overlap the end of
the kernel before; a structure that the host has looked at, which nobody writes any more, is read in that time.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, ceildiv, powers

THREADS = powers(32, 512)
TILE_M = powers(1, 16)
# Blocks that a thread has a vector of in a chunk; what is in flight at once.
DEPTH = powers(1, 8)
# Blocks of threads that share a long block row of several chunks, in skewed patterns.
SPREAD = powers(1, 8)
# Sums, and elements of the weight in flight, that a thread holds; copies of x that it issues for a chunk.
MAX_HELD, MAX_COPIES = 96, 16
MAX_SHARED = 48 * 1024


def space(problem: Problem, machine: Machine) -> Table:
    rows, cols = problem.block_shape
    itemsize = numpy_dtype(problem.dtype).itemsize
    if machine.capability < 80:
        raise NotApplicable(f"{machine.arch} has no asynchronous copies")
    if rows & (rows - 1) or cols & (cols - 1):
        raise NotApplicable(f"blocks of {rows}x{cols} do not divide evenly among threads")
    # An asynchronous copy moves 4, 8 or 16 bytes.
    vecs = tuple(v for v in powers(1, 8) if cols % v == 0 and 4 <= v * itemsize <= 16 and cols // v <= 32)
    if not vecs:
        raise NotApplicable(f"rows of {cols} elements are no copies of 4 to 16 bytes for up to 32 threads")
    table = {
        "threads": THREADS,
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * problem.m),
        "vec": vecs[-2:],
        "depth": DEPTH,
        "cluster": SPREAD if machine.has_clusters and problem.pattern == "skewed" else (1,),
        "overlap": (0, 1) if machine.has_clusters else (0,),
    }
    if not fitting(problem, machine, table):
        raise NotApplicable(f"blocks of {rows}x{cols} exceed the registers of {THREADS[-1]} threads")
    return table


def fitting(problem: Problem, machine: Machine, table: Table) -> list[Decisions]:
    """Points to begin with, the best guess first: all of a small m at once, widest loads, many threads, deep."""
    vec, early = table["vec"][-1], int(machine.has_clusters)
    # With one strip of x a long row is shared; with several there is enough to do beside it.
    spreads = (4, 1) if 4 in table["cluster"] and problem.m <= 8 else (1,)
    choices = [
        {"threads": threads, "tile_m": tile_m, "vec": vec, "depth": depth, "cluster": spread, "overlap": early}
        for tile_m in (8, 4, 2, 1)
        if tile_m in table["tile_m"]
        for threads in (128, 256, 64, 512, 32)
        for depth in (4, 2, 1)
        for spread in spreads
    ]
    return [point for point in choices if allowed(problem, machine, point) is None]


def sizes(problem: Problem, decisions: Decisions) -> tuple[int, int, int, int]:
    """Vectors a row of a block, blocks that threads work on at once, rows of a block a thread has, copies of x."""
    rows, cols = problem.block_shape
    threads, tile_m, depth = decisions["threads"], decisions["tile_m"], decisions["depth"]
    across = cols // decisions["vec"]
    groups = max(1, threads // (rows * across))
    passes = max(1, rows * across // threads)
    return across, groups, passes, ceildiv(depth * groups * tile_m * across, threads)


def shared_bytes(problem: Problem, decisions: Decisions) -> int:
    rows, cols = problem.block_shape
    _, groups, _, _ = sizes(problem, decisions)
    staged = decisions["depth"] * groups * (decisions["tile_m"] + 1) * cols * numpy_dtype(problem.dtype).itemsize
    return staged + (groups + decisions["cluster"] - 1) * decisions["tile_m"] * rows * 4


def allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    rows, _ = problem.block_shape
    across, groups, passes, copies = sizes(problem, decisions)
    held = passes * (decisions["tile_m"] + decisions["depth"] * decisions["vec"])
    if held > MAX_HELD:
        return f"{held} sums and elements in registers exceed {MAX_HELD}"
    if copies > MAX_COPIES:
        return f"{copies} copies a thread and chunk exceed {MAX_COPIES}"
    if shared_bytes(problem, decisions) > MAX_SHARED:
        return f"{shared_bytes(problem, decisions)} bytes exceed shared memory of {MAX_SHARED}"
    if groups * decisions["depth"] >= 2 * problem.grid[1] and (decisions["threads"], decisions["depth"]) != (32, 1):
        return f"half of a chunk of {groups * decisions['depth']} blocks lies beyond the {problem.grid[1]} of a row"
    spread = decisions["cluster"]
    if spread > 1 and groups * decisions["depth"] * spread >= 2 * problem.grid[1]:
        return f"half of {spread} blocks of threads have no part of a row of {problem.grid[1]} blocks"
    return None


def default(problem: Problem, machine: Machine) -> Decisions:
    return fitting(problem, machine, space(problem, machine))[0]


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from tvm_sparse.operators.bsr_matmul.epilogue import finish

    from ..device.balance import Deal
    from ..device.cluster import cluster_arrive, cluster_barrier, cluster_wait, peer_write
    from ..device.overlap import await_previous, overlapping
    from ..device.words import load_words, read_element, value_in

    rows, cols = problem.block_shape
    block_rows, _ = problem.grid
    n, k, dtype = problem.n, problem.k, problem.dtype
    threads, tile_m, vec, depth = (decisions[name] for name in ("threads", "tile_m", "vec", "depth"))
    spread, early = decisions["cluster"], bool(decisions["overlap"])
    deal = Deal(block_rows, 1, spread)
    across, groups, passes, copies = sizes(problem, decisions)
    chunk = depth * groups
    step = threads // across  # rows between two of a thread's
    size = vec * numpy_dtype(dtype).itemsize
    words = size // 4
    # The weight's loads have a barrier behind them: else the assembler moves them behind the copies of x, which wait
    # for the columns.
    fetch = T.ptx.ld.global_.s32
    copy = T.ptx.cp.async_.cg.shared.global_ if size == 16 else T.ptx.cp.async_.ca.shared.global_
    # Lanes of a warp that share a row: neighbours with other columns of a block, and others with other blocks.
    near, far = across.bit_length() - 1, max(0, (32 // (rows * across)).bit_length() - 1)
    sets = groups // max(1, min(groups, 32 // (rows * across)))  # of sums that no shuffle joins
    outputs = rows * tile_m
    biased, activation = bool(problem.bias), problem.activation
    put = peer_write("put_sum", "float")

    # fmt: off
    @T.inline
    def load_columns(D, t, first, begin, count, columns):
        """The columns of x that this thread's copies of the chunk begin at."""
        for j in T.unroll(copies):
            columns[j] = 0
            if begin + (j * threads + t) // (tile_m * across) < count:
                fetch(columns[j], D.ptr_to([first + begin + (j * threads + t) // (tile_m * across)]))
                columns[j] = columns[j] * cols

    @T.inline
    def load_weight(W, t, first, begin, count, w):
        """This thread's vectors of the chunk's blocks."""
        for d in T.unroll(depth):
            if begin + d * groups + t // (rows * across) < count:
                for p in T.unroll(passes):
                    load_words(
                        size, w, (d * passes + p) * words, None,
                        W.ptr_to([first + begin + d * groups + t // (rows * across),
                                  t // across % rows + p * step, t % across * vec]))

    @T.inline
    def stage(X, m, t, top, begin, count, columns, staged):
        """Start the copies of x; rows beyond m repeat the last one and are not stored."""
        for j in T.unroll(copies):
            if j * threads + t < chunk * tile_m * across:
                if begin + (j * threads + t) // (tile_m * across) < count:
                    copy(staged.ptr_to([(j * threads + t) // (tile_m * across), (j * threads + t) // across % tile_m,
                                        t % across * vec]),
                         X.ptr_to([T.min(top + (j * threads + t) // across % tile_m, m - 1),
                                   columns[j] + t % across * vec]), size)
        T.ptx.cp.async_.commit_group()

    @T.inline
    def multiply(t, begin, count, w, staged, x, sums):
        for d in T.unroll(depth):
            if begin + d * groups + t // (rows * across) < count:
                for i in T.unroll(tile_m):
                    for v in T.vectorized(vec):
                        x[v] = staged[d * groups + t // (rows * across), i, t % across * vec + v]
                    for p in T.unroll(passes):
                        for v in T.unroll(vec):
                            sums[p * tile_m + i] = sums[p * tile_m + i] + value_in(
                                dtype, w[(d * passes + p) * words + v // (vec // words)], v % (vec // words)
                            ) * T.Cast("float32", x[v])

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
        # One axis: TVM launches clusters along x alone, and the others end at 65535.
        if spread > 1:
            block = T.cluster_id([(m + (tile_m - 1)) // tile_m * deal.clusters(long)])
            place = T.cta_id_in_cluster([spread])
        else:
            block = T.cta_id([(m + (tile_m - 1)) // tile_m * block_rows])
            place = 0
        t = T.thread_id([threads])
        # The long rows of all strips of x come before the others.
        strips: T.int32 = (m + (tile_m - 1)) // tile_m
        strip: T.int32 = block % strips
        cluster: T.int32 = block // strips
        unit: T.int32 = deal.unit(cluster, place, long)
        rank: T.int32 = deal.rank(cluster, place, long)
        ranks: T.int32 = deal.ranks(cluster, long)
        if spread > 1:
            if unit >= block_rows:
                T.thread_return()
        # One row more than is used keeps blocks off each other's banks.
        staged = T.alloc_shared([chunk, tile_m + 1, cols], dtype)
        parts = T.alloc_shared([sets, tile_m, rows], "float32")
        sums = T.alloc_local([passes * tile_m], "float32")
        w = T.alloc_local([depth * passes * words], "uint32")
        x = T.alloc_local([vec], dtype)
        columns = T.alloc_local([copies], "int32")
        ends = T.alloc_local([2], "int32")
        row = T.alloc_local([1], "int32")
        total = T.alloc_local([1], "float32")
        if spread > 1:
            others = T.alloc_shared([spread - 1, outputs], "float32")
        begin: T.int32 = rank * chunk
        if long >= 0:
            fetch(row[0], R.ptr_to([unit, 0]))
            fetch(ends[0], R.ptr_to([unit, 1]))
            fetch(ends[1], R.ptr_to([unit, 2]))
        else:
            if early:
                await_previous()
            row[0] = unit
            fetch(ends[0], P.ptr_to([unit]))
            fetch(ends[1], P.ptr_to([unit + 1]))
        first: T.int32 = ends[0]
        count: T.int32 = ends[1] - ends[0]
        load_columns(D, t, first, begin, count, columns)
        if early:
            if long >= 0:
                await_previous()
        if spread > 1:
            if rank > 0 and begin >= count:
                T.thread_return()
            if ranks > 1 and count > chunk:
                cluster_arrive()
        for e in T.unroll(passes * tile_m):
            sums[e] = T.float32(0)
        while begin < count:
            load_weight(W, t, first, begin, count, w)
            T.cuda.warp_sync()
            stage(X, m, t, strip * tile_m, begin, count, columns, staged)
            load_columns(D, t, first, begin + chunk * ranks, count, columns)
            T.ptx.cp.async_.wait_group(0)
            T.cuda.cta_sync()
            multiply(t, begin, count, w, staged, x, sums)
            T.cuda.cta_sync()
            begin = begin + chunk * ranks

        for e in T.unroll(passes * tile_m):
            for j in T.unroll(near):
                sums[e] = sums[e] + T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), sums[e], 1 << j, 32, 32)
            for j in T.unroll(far):
                sums[e] = sums[e] + T.tvm_warp_shuffle_xor(
                    T.uint32(0xFFFFFFFF), sums[e], (rows * across) << j, 32, 32)
        if t % across == 0 and t % 32 // (rows * across) == 0:
            for p in T.unroll(passes):
                for i in T.unroll(tile_m):
                    parts[t // (rows * across) * sets // groups, i, t // across % rows + p * step] = (
                        sums[p * tile_m + i])
        T.cuda.cta_sync()
        if spread > 1:
            # Blocks write into the first one's memory when that has started, and it reads when they have written.
            if ranks > 1 and count > chunk:
                cluster_wait()
                if rank == 0:
                    cluster_barrier()
        for o in T.serial((outputs - t + (threads - 1)) // threads):
            if strip * tile_m + (o * threads + t) // rows < m:
                total[0] = T.float32(0)
                for s in T.unroll(sets):
                    total[0] = total[0] + parts[s, (o * threads + t) // rows, (o * threads + t) % rows]
                if spread > 1:
                    if rank > 0:
                        T.evaluate(put(others.ptr_to([rank - 1, o * threads + t]), 0, total[0]))
                    else:
                        for r in T.unroll(spread - 1):
                            if r + 1 < ranks and (r + 1) * chunk < count:
                                total[0] = total[0] + others[r, o * threads + t]
                if rank == 0:
                    column: T.int32 = row[0] * rows + (o * threads + t) % rows
                    if biased:
                        Y[strip * tile_m + (o * threads + t) // rows, column] = finish(
                            total[0], read_element(dtype, B.ptr_to([column])), activation, dtype)
                    else:
                        Y[strip * tile_m + (o * threads + t) // rows, column] = finish(
                            total[0], None, activation, dtype)
        if spread > 1:
            if rank > 0:
                cluster_barrier()
    # fmt: on
    main = main.with_attr("global_symbol", "main")
    if early:
        main = overlapping(main)
    return Program(tvm.IRModule({"main": problem.trimmed(main)}), pipeline="tirx")


staged_x = Template(
    name="staged_x",
    version=3,
    operator="bsr_matmul",
    kind="cuda",
    summary="a block row a block of threads, its parts of x in shared memory (Gu 2020, 4.3)",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    explicit_threads=True,
)
