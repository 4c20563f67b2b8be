"""Softmax + top-k on a GPU: one read of the row, a threshold in front of a buffer that is compacted late.

Each thread streams 16-byte vectors of the row, keeps its own running maximum and sum of exponentials (Algorithm 3 of
Milakov & Gimelshein, merged across threads once, at the end), and compares the largest of the elements in hand with
the block's threshold. Only what reaches it goes into a buffer in shared memory, by an atomic; a warp that finds the
buffer nearly full calls all others to a compaction, in which radix selection cuts it to k and raises the threshold.
So the insertion of Algorithm 4, whose cost grows with k, is paid for a few elements a row instead of all, and warps
stream without waiting for each other.

The first threshold comes from the first tile: the k-th largest of the maxima of disjoint groups of elements is no
larger than the k-th largest element. A threshold is a key, value and index together, so that rows of equal elements
pass it no more often than others; the value alone decides in all but a few comparisons.

`threshold_gate` gives a row to a block. `cluster_gate` gives it to a cluster of blocks, for batches too small to fill
the card with one block a row: each scans a part, and the first gathers the others' (m, d) and best keys over
distributed shared memory, so that there is one launch and no workspace.
"""

from __future__ import annotations

from tvm_sparse.machine import Machine
from tvm_sparse.operators.problem import Problem, numpy_dtype

from .template import Decisions, NotApplicable, Program, Table, Template, ceildiv, powers

THREADS = powers(128, 1024)
# Vectors a thread loads before it looks at the first: the memory's latency times its rate needs about 40 KB in flight
# on each multiprocessor, 20 bytes a thread at full occupancy.
VECTORS = (1, 2, 4, 8)
# The least room in the buffer beyond k and a tile: survivors of a row in random order come to rest in it.
SLACK = 256
# Whether the next tile is loaded before this one is worked on: more bytes in flight a thread, for fewer threads.
PREFETCH = (0, 1)
# Up to here the survivors are ranked by counting, every one against every other; beyond, they are sorted.
COUNTED = 64
MAX_K = 2048
# Blocks a row; above 8 a cluster is not portable, which every Hopper allows.
SPLITS = powers(2, 16)


def vector(problem: Problem) -> int:
    """Elements a load: 16 bytes, or what divides the row, so that every row starts on a whole vector."""
    widest = 16 // numpy_dtype(problem.dtype).itemsize
    return next(v for v in (8, 4, 2, 1) if v <= widest and problem.vocab % v == 0)


def space(problem: Problem, machine: Machine) -> Table:
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: the buffer would not fit into shared memory")
    return {"threads": THREADS, "vectors": VECTORS, "prefetch": PREFETCH}


def cluster_space(problem: Problem, machine: Machine) -> Table:
    if not machine.arch.startswith(("sm_9", "sm_10", "sm_11", "sm_12")):
        raise NotApplicable(f"{machine.arch} has no thread block clusters")
    if problem.batch_extent > 2 * machine.cores:
        raise NotApplicable(f"a block a row fills {machine.cores} multiprocessors at batch {problem.batch_extent}")
    table = {"split": SPLITS, **space(problem, machine)}
    if not any(
        cluster_allowed(problem, machine, {"split": 2, "threads": t, "vectors": 1, "prefetch": 0}) is None
        for t in THREADS
    ):
        raise NotApplicable(f"vocab={problem.vocab} is too short to share")
    return table


def sizes(problem: Problem, decisions: Decisions) -> tuple[int, int, int]:
    """Elements a tile, keys in the buffer, and k rounded up to a power of two."""
    tile = decisions["threads"] * decisions["vectors"] * vector(problem)
    rounded = 1 << (problem.k - 1).bit_length()
    # Beyond k there is room for what comes to rest between two compactions, and for each warp's tile in hand.
    return tile, tile + rounded + max(SLACK, 2 * rounded), rounded


def allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    tile, capacity, rounded = sizes(problem, decisions)
    if (capacity + rounded) * 8 > 160 * 1024:
        return f"a buffer of {(capacity + rounded) * 8} bytes leaves no room for a second block"
    if decisions["vectors"] > 1 and tile >= 2 * problem.vocab:
        return f"half of a tile of {tile} lies beyond vocab={problem.vocab}"
    if decisions["vectors"] * vector(problem) > 32 // (1 + decisions["prefetch"]):
        return "more than 32 elements in registers"
    if decisions["prefetch"] and tile >= problem.vocab // decisions.get("split", 1):
        return "there is no next tile to load"
    return None


def cluster_allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    tile, capacity, _ = sizes(problem, decisions)
    split = decisions["split"]
    if split * problem.k > capacity:
        return f"the best {problem.k} of {split} parts exceed the buffer of {capacity}"
    if tile > problem.vocab // split:
        return f"a part of {problem.vocab // split} is less than a tile of {tile}"
    return allowed(problem, machine, decisions)


def cluster_default(problem: Problem, machine: Machine) -> Decisions:
    choices = [
        {"split": split, "threads": threads, "vectors": 1, "prefetch": 0}
        for split in (8, 4, 2)
        for threads in (512, 256, 128)
        if cluster_allowed(problem, machine, {"split": split, "threads": threads, "vectors": 1, "prefetch": 0}) is None
    ]
    return choices[0]


def default(problem: Problem, machine: Machine) -> Decisions:
    choices = [
        {"threads": threads, "vectors": vectors, "prefetch": 0}
        for threads in (512, 256, 128)
        for vectors in (2, 1)
        if allowed(problem, machine, {"threads": threads, "vectors": vectors, "prefetch": 0}) is None
    ]
    return choices[0]


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from .arithmetic import LOG2_E, is_nan
    from .cluster import cluster_barrier, peer_read
    from .selection import (
        FULL_WARP,
        MINUS_INFINITY,
        RANKERS,
        bits_value,
        device_functions,
        join_key,
        key_bits,
        key_index,
        make_key,
        order_bits,
    )

    vocab, k, dtype = problem.vocab, problem.k, problem.dtype
    threads, vectors, width = decisions["threads"], decisions["vectors"], vector(problem)
    prefetch = bool(decisions["prefetch"])
    tile, capacity, rounded = sizes(problem, decisions)
    held = vectors * width
    split = decisions.get("split", 1)
    share = ceildiv(ceildiv(vocab, split), width) * width  # elements a block
    tiles = ceildiv(share, tile)
    ragged = share % tile != 0 or vocab % share != 0
    # A warp that fills this slot calls for compaction; the others may each be in the middle of one more tile.
    limit = capacity - tile
    seeded = k <= threads
    ranked = k <= COUNTED
    # Survivors that are ranked by counting may be more than k; sorted ones fill a power of two.
    fits = max(4 * COUNTED, rounded) if ranked else (rounded if split == 1 else k)
    lowest = T.min_value("float32")
    peer_float, peer_int = peer_read("peer_float", "float", "float32"), peer_read("peer_int", "int", "int32")
    peer_key = peer_read("peer_key", "unsigned long long", "uint64")
    device = device_functions(threads, k)
    block_merge, select_pivot, keep_selected = device.block_merge, device.select_pivot, device.keep_selected
    kth_of_maxima, rank_key, sort_descending = device.kth_of_maxima, device.rank_key, device.sort_descending

    # fmt: off
    @T.inline
    def load_tile(i, X, row, first, t, raw):
        """The tile's elements of this thread; beyond the row its last ones, because a branch would delay the loads."""
        for u in T.unroll(vectors):
            for v in T.vectorized(width):
                raw[u * width + v] = X[row, T.min(first + i * tile + (u * threads + t) * width, vocab - width) + v]

    @T.inline
    def convert_tile(i, first, t, raw, x):
        """float32 of the elements, -inf for what lies beyond the block's share."""
        for e in T.unroll(held):
            if ragged:
                x[e] = T.Select(
                    i * tile + (e // width * threads + t) * width < T.min(share, vocab - first),
                    T.Cast("float32", raw[e]), -T.infinity("float32"))
            else:
                x[e] = T.Cast("float32", raw[e])

    @T.inline
    def compact(t, keys, kept, size, count, full, histogram, found, pivot, mask, need, gate):
        """Cut the buffer to the best k and raise the threshold to the k-th. All threads come here, after a barrier."""
        size[0] = count[0]
        if size[0] > k:
            select_pivot(t, keys, size[0], histogram, found, pivot, mask, need)
            keep_selected(t, keys, size[0], kept, count, pivot)
            gate[0] = bits_value(key_bits(pivot[0]))
            if is_nan(gate[0]):
                # k NaN already: what is no NaN has no chance, and only plus infinity still passes for a candidate.
                gate[0] = T.infinity("float32")
        T.cuda.cta_sync()
        if t == 0:
            T.evaluate(T.call_extern("uint32", "atomicExch", full.ptr_to([0]), T.uint32(0)))
        T.cuda.cta_sync()

    @T.inline
    def fill_up(X, row, first, t, keys, size, wanted, slot):
        """One warp appends the first elements at minus infinity until there are `wanted` keys."""
        lanes = T.alloc_local([1], "uint32")
        has = T.alloc_local([1], "int32")
        i: T.int32 = 0
        while i * 32 < share and size[0] < wanted[0]:
            has[0] = 0
            if i * 32 + t < share and first + i * 32 + t < vocab:
                if T.Cast("float32", X[row, first + i * 32 + t]) == -T.infinity("float32"):
                    has[0] = 1
            lanes[0] = T.cuda.ballot_sync(T.uint32(FULL_WARP), has[0] != 0)
            slot[0] = size[0] + T.Cast(
                "int32", T.popcount(lanes[0] & ((T.uint32(1) << T.Cast("uint32", t)) - T.uint32(1))))
            if has[0] != 0 and slot[0] < wanted[0]:
                keys[slot[0]] = join_key(T.uint32(MINUS_INFINITY), first + i * 32 + t)
            size[0] = size[0] + T.Cast("int32", T.popcount(lanes[0]))
            i = i + 1

    @T.inline
    def write(V, Z, row, place, key, top, d, log):
        """One value and its index."""
        Z[row, place] = T.Cast("int64", key_index(key))
        if log != 0:
            V[row, place] = bits_value(key_bits(key)) - top[0] - T.log(d[0])
        else:
            V[row, place] = T.exp(bits_value(key_bits(key)) - top[0]) / d[0]

    @T.inline
    def publish(t, keys, kept, size, slot, need, pivot, exported, group, group_sum, top, d):
        """The block's (m, d) and its best k keys, for the first block of the cluster to read.

        Keys that can be ranked cheaply are published in order, in `kept`; others as they are, in `keys`.
        """
        T.cuda.cta_sync()
        if ranked:
            for i in T.serial((size[0] * RANKERS + (threads - 1)) // threads):
                rank_key(t, i, keys, size[0], need, pivot, slot)
                if t % RANKERS == 0 and need[0] < size[0] and slot[0] < k:
                    kept[slot[0]] = pivot[0]
        if t == 0:
            exported[0] = T.min(size[0], k)
            group[0] = top[0]
            group_sum[0] = d[0]

    @T.inline
    def gather(t, keys, kept, size, slot, need, pivot, count, exported, group, group_sum, top, d):
        """Join what the blocks of the cluster have published: top and d of the row, its candidates in `keys`."""
        parts_max = T.alloc_local([split], "float32")
        for r in T.unroll(split):
            parts_max[r] = peer_float(group.ptr_to([0]), r)
        top[0] = parts_max[0]
        for r in T.unroll(split - 1):
            top[0] = T.max(top[0], parts_max[r + 1])
        d[0] = T.float32(0)
        for r in T.unroll(split):
            d[0] = d[0] + peer_float(group_sum.ptr_to([0]), r) * T.exp2((parts_max[r] - top[0]) * T.float32(LOG2_E))
        if ranked:
            # Every part has ceil(k / split) keys that are at least the least of the parts' keys of that rank, and
            # together these are k or more: nothing below it can be wanted.
            pivot[0] = ~T.uint64(0)
            for r in T.unroll(split):
                if peer_int(exported.ptr_to([0]), r) < ceildiv(k, split):
                    pivot[0] = T.uint64(0)
                else:
                    pivot[0] = T.min(pivot[0], peer_key(kept.ptr_to([ceildiv(k, split) - 1]), r))
            if t == 0:
                count[0] = 0
            T.cuda.cta_sync()
            for r in T.serial(split):
                need[0] = peer_int(exported.ptr_to([0]), r)
                for i in T.serial((need[0] - t + (threads - 1)) // threads):
                    if peer_key(kept.ptr_to([i * threads + t]), r) >= pivot[0]:
                        slot[0] = T.cuda.atomic_add(count.ptr_to([0]), T.int32(1))
                        keys[slot[0]] = peer_key(kept.ptr_to([i * threads + t]), r)
            T.cuda.cta_sync()
            size[0] = count[0]
        else:
            size[0] = exported[0]
            for r in T.serial(split - 1):
                need[0] = peer_int(exported.ptr_to([0]), r + 1)
                for i in T.serial((need[0] - t + (threads - 1)) // threads):
                    keys[size[0] + i * threads + t] = peer_key(keys.ptr_to([i * threads + t]), r + 1)
                size[0] = size[0] + need[0]
            T.cuda.cta_sync()

    @T.prim_func
    def main(logits_h: T.handle, log: T.int32, values_h: T.handle, indices_h: T.handle):
        batch = T.int32()
        X = T.match_buffer(logits_h, (batch, vocab), dtype)
        V = T.match_buffer(values_h, (batch, k), "float32")
        Z = T.match_buffer(indices_h, (batch, k), "int64")
        T.device_entry()
        if split > 1:
            block = T.cluster_id([batch])
            part = T.cta_id_in_cluster([split])
        else:
            block = T.cta_id([batch])
            part = 0
        t = T.thread_id([threads])
        pool = T.alloc_buffer([capacity + rounded], "uint64", scope="shared.dyn")
        keys = T.decl_buffer([capacity], "uint64", data=pool.data, scope="shared.dyn")
        kept = T.decl_buffer([rounded], "uint64", data=pool.data, elem_offset=capacity, scope="shared.dyn")
        histogram = T.alloc_shared([256], "int32")
        found = T.alloc_shared([4], "int32")
        count = T.alloc_shared([1], "int32")
        group = T.alloc_shared([32], "float32")
        group_sum = T.alloc_shared([32], "float32")
        group_bits = T.alloc_shared([32], "uint32")
        full = T.alloc_shared([1], "uint32")
        exported = T.alloc_shared([1], "int32")
        raw = T.alloc_local([held], dtype)
        x = T.alloc_local([held], "float32")
        top = T.alloc_local([1], "float32")
        m = T.alloc_local([1], "float32")
        d = T.alloc_local([1], "float32")
        power = T.alloc_local([1], "float32")
        gate = T.alloc_local([1], "float32")
        slot = T.alloc_local([1], "int32")
        size = T.alloc_local([1], "int32")
        pivot = T.alloc_local([1], "uint64")
        mask = T.alloc_local([1], "uint64")
        need = T.alloc_local([1], "int32")
        key = T.alloc_local([1], "uint64")
        bits = T.alloc_local([1], "uint32")
        at = T.alloc_local([1], "int32")
        reached = T.alloc_local([1], "uint32")
        called = T.alloc_local([1], "uint32")
        wanted = T.alloc_local([1], "int32")
        # Offsets into the logits pass 2^31.
        row: T.int64 = T.Cast("int64", block)
        if t == 0:
            count[0] = 0
            full[0] = T.uint32(0)
        m[0] = lowest
        d[0] = T.float32(0)
        # Everything above minus infinity passes: rows that have fewer than k such elements are filled up at the end.
        gate[0] = lowest
        pivot[0] = T.Cast("uint64", T.uint32(MINUS_INFINITY + 1)) << T.uint64(32)
        T.cuda.cta_sync()

        if prefetch:
            load_tile(0, X, row, part * share, t, raw)
        for i in T.serial(tiles):
            if not prefetch:
                load_tile(i, X, row, part * share, t, raw)
            convert_tile(i, part * share, t, raw, x)
            if prefetch:
                load_tile(i + 1, X, row, part * share, t, raw)
            # (m, d) of equation 4, rescaled once for all elements in hand
            top[0] = x[0]
            for e in T.unroll(held - 1):
                top[0] = T.max(top[0], x[e + 1])
            if top[0] > m[0]:
                d[0] = d[0] * T.exp2((m[0] - top[0]) * T.float32(LOG2_E))
                m[0] = top[0]
            for e in T.unroll(held):
                # Without the steps that exp2 takes for subnormal results, which add nothing to a sum of at least 1.
                T.ptx.ex2.approx.ftz.f32(power[0], (x[e] - m[0]) * T.float32(LOG2_E))
                d[0] = d[0] + power[0]
            if i == 0 and seeded:
                bits[0] = order_bits(top[0])
                kth_of_maxima(t, bits, group_bits, reached)
                if reached[0] > T.uint32(MINUS_INFINITY):
                    gate[0] = bits_value(reached[0])
                    pivot[0] = T.Cast("uint64", reached[0]) << T.uint64(32)
            # A NaN passes no comparison of floats, but it stays in the sum; keys know its place.
            slot[0] = 0
            if top[0] >= gate[0] or is_nan(d[0]):
                # One bit an element, then one round for each bit that any lane of the warp has. The element is read
                # again, from L1: registers cannot be indexed.
                bits[0] = T.uint32(0)
                for e in T.unroll(held):
                    if x[e] >= gate[0] or is_nan(x[e]):
                        bits[0] = bits[0] | (T.uint32(1) << T.Cast("uint32", e))
                while bits[0] != T.uint32(0):
                    at[0] = T.Cast("int32", T.cuda.ffs_u32(bits[0])) - 1
                    bits[0] = bits[0] & (bits[0] - T.uint32(1))
                    at[0] = part * share + i * tile + (at[0] // width * threads + t) * width + at[0] % width
                    key[0] = make_key(T.Cast("float32", X[row, at[0]]), at[0])
                    if key[0] >= pivot[0]:
                        slot[0] = T.cuda.atomic_add(count.ptr_to([0]), T.int32(1))
                        keys[slot[0]] = key[0]
            if slot[0] >= limit:
                T.evaluate(T.call_extern("uint32", "atomicExch", full.ptr_to([0]), T.uint32(1)))
            T.ptx.ld.volatile.shared.u32(called[0], full.ptr_to([0]))
            if T.cuda.any_sync(T.uint32(FULL_WARP), called[0] != T.uint32(0)) != 0:
                T.cuda.cta_sync()
                compact(t, keys, kept, size, count, full, histogram, found, pivot, mask, need, gate)
        # Warps that are through with the row answer calls until all are.
        waiting: T.int32 = 1
        while waiting != 0:
            T.cuda.cta_sync()
            T.ptx.ld.volatile.shared.u32(called[0], full.ptr_to([0]))
            if called[0] != T.uint32(0):
                compact(t, keys, kept, size, count, full, histogram, found, pivot, mask, need, gate)
            else:
                waiting = 0

        # top is free to hold the block's maximum, d its sum
        block_merge(t, m, d, top, group, group_sum)

        # Fewer than k above minus infinity: the first ones at minus infinity complete them.
        size[0] = count[0]
        wanted[0] = T.min(k, T.max(T.min(share, vocab - part * share), 0))
        if size[0] < wanted[0]:
            T.cuda.cta_sync()
            if t < 32:
                fill_up(X, row, part * share, t, keys, size, wanted, slot)
            T.cuda.cta_sync()
            size[0] = wanted[0]
        if size[0] > fits:
            select_pivot(t, keys, size[0], histogram, found, pivot, mask, need)
            keep_selected(t, keys, size[0], kept, count, pivot)
            size[0] = k

        if split > 1:
            publish(t, keys, kept, size, slot, need, pivot, exported, group, group_sum, top, d)
            cluster_barrier()
            if part == 0:
                gather(t, keys, kept, size, slot, need, pivot, count, exported, group, group_sum, top, d)
            cluster_barrier()
            if part != 0:
                size[0] = 0
            if size[0] > fits:
                select_pivot(t, keys, size[0], histogram, found, pivot, mask, need)
                keep_selected(t, keys, size[0], kept, count, pivot)
                size[0] = k

        if ranked:
            T.cuda.cta_sync()
            for i in T.serial((size[0] * RANKERS + (threads - 1)) // threads):
                rank_key(t, i, keys, size[0], need, pivot, slot)
                if t % RANKERS == 0 and need[0] < size[0] and slot[0] < k:
                    write(V, Z, row, slot[0], pivot[0], top, d, log)
        else:
            if size[0] > 0:
                for i in T.serial((rounded - size[0] - t + (threads - 1)) // threads):
                    keys[size[0] + i * threads + t] = T.uint64(0)
                sort_descending(t, keys)
                for i in T.serial((k - 1 - t + threads) // threads):
                    write(V, Z, row, i * threads + t, keys[i * threads + t], top, d, log)
    # fmt: on
    main = main.with_attr("global_symbol", "main")
    return Program(tvm.IRModule({"main": main}), pipeline="tirx")


threshold_gate = Template(
    name="threshold_gate",
    version=1,
    operator="softmax_topk",
    kind="cuda",
    summary="a block a row, one read, survivors of a threshold compacted late",
    space=space,
    default=default,
    build=build,
    allowed=allowed,
    explicit_threads=True,
)

cluster_gate = Template(
    name="cluster_gate",
    version=1,
    operator="softmax_topk",
    kind="cuda",
    summary="a cluster of blocks a row, joined over distributed shared memory",
    space=cluster_space,
    default=cluster_default,
    build=build,
    allowed=cluster_allowed,
    explicit_threads=True,
)
