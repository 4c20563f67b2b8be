"""Softmax and logsumexp on a GPU, close to the memory's speed: a row to a warp, a block, or a cluster of blocks.

Every access to memory is a vector of 16 bytes. Rows whose length is no multiple of that start anywhere between two
vectors; the aligned vectors that lie wholly inside of a row are dealt out to its threads, and the few elements before
and behind them are one more element for as many threads. Each thread keeps the maximum and the sum of its own elements
(Algorithm 3 of Milakov & Gimelshein, rescaled once for all elements in hand); they are joined across the row's threads
by equation 4 once, first the maxima, then the sums: by shuffles in a warp, through shared memory in a block, and in a
cluster each warp writes its pair to every block of the row, so that one barrier is all they wait for.

Where the elements stay until the normaliser is known makes the templates: `softmax_held` keeps them in registers (in
float32 it is the exponentials that stay, so each is computed once), `softmax_staged` in shared memory, where
asynchronous copies put them, and `softmax_streamed`, for rows of any length, reads them again, from L2 as a rule; it
also maps the paper's other two algorithms. `logsumexp_streamed` is done after the first pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem, numpy_dtype
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, ceildiv, powers
from tvm_sparse.operators.softmax.problem import Softmax

# Threads of a block that share a row, or its part. Not only powers of two: how many blocks fit onto a multiprocessor,
# with the row in their registers, is what counts.
THREADS = (32, 64, 96, 128, 192, 256, 320, 384, 512, 640, 768, 1024)
# Blocks a row; above 8 a cluster is not portable, which every Hopper allows.
SPLITS = powers(1, 16)
# Rows a block, where a row has a warp.
ROWS = powers(1, 16)
# Vectors a thread loads before it looks at the first.
VECTORS = (1, 2, 4, 8)
STAGED_VECTORS = 4
# Of one of the four parts of a multiprocessor, among which the warps are dealt out.
REGISTERS = 16384
# What a thread needs besides the elements that it keeps, found by compiling the space.
OVERHEAD = {"float32": 28, "float16": 40, "bfloat16": 40}
# Kilobytes of shared memory that a block may have, less a reserve for the pairs of (m, d).
SHARED = {"sm_80": 160, "sm_90": 222, "sm_90a": 222, "sm_100a": 222}
SHARED_ELSEWHERE = 94


def width(problem: Problem) -> int:
    """Elements in 16 bytes."""
    return 16 // numpy_dtype(problem.dtype).itemsize


def windows(problem: Problem) -> tuple[int, int]:
    """The fewest and the most aligned vectors that lie wholly inside of a row."""
    wide = width(problem)
    before = wide - 1 if problem.vocab % wide else 0
    return max(0, problem.vocab - before) // wide, problem.vocab // wide


def share(problem: Problem, decisions: Decisions) -> int:
    """The most vectors that a block has of a row."""
    return ceildiv(windows(problem)[1], decisions["cluster"])


def kept(problem: Problem, decisions: Decisions) -> int:
    """The vectors of a thread that keeps its share."""
    return ceildiv(share(problem, decisions), decisions["threads"])


def registers(problem: Problem, decisions: Decisions) -> int:
    """What a thread needs that keeps its share."""
    return 4 * kept(problem, decisions) + OVERHEAD[problem.dtype]


def available(decisions: Decisions, blocks: int) -> int:
    """The registers that a thread may have if so many blocks are to share a multiprocessor."""
    warps = ceildiv(blocks * decisions["threads"] * decisions["rows"], 4 * 32)
    return min(255, REGISTERS // (warps * 32) // 8 * 8)


def resident(problem: Problem, decisions: Decisions) -> int:
    """The blocks that a multiprocessor has registers for."""
    most = min(32, 2048 // (decisions["threads"] * decisions["rows"]))
    needed = registers(problem, decisions)
    return max((blocks for blocks in range(2, most + 1) if available(decisions, blocks) >= needed), default=1)


def algorithm(problem: Problem) -> str:
    return problem.algorithm if isinstance(problem, Softmax) else "online"


def require_online(problem: Problem) -> None:
    if algorithm(problem) != "online":
        raise NotApplicable(f"the {algorithm(problem)} algorithm reads a row more than once, by definition")


def base_space(problem: Problem, machine: Machine) -> Table:
    return {"threads": THREADS, "cluster": SPLITS if machine.has_clusters else (1,)}


def held_space(problem: Problem, machine: Machine) -> Table:
    require_online(problem)
    table = {**base_space(problem, machine), "rows": ROWS}
    return _with_points(problem, machine, table, held_allowed)


def staged_space(problem: Problem, machine: Machine) -> Table:
    require_online(problem)
    return _with_points(problem, machine, base_space(problem, machine), staged_allowed)


def streamed_space(problem: Problem, machine: Machine) -> Table:
    return {**base_space(problem, machine), "rows": ROWS, "vectors": VECTORS}


def _with_points(problem: Problem, machine: Machine, table: Table, allowed: Any) -> Table:
    for values in itertools.product(*table.values()):
        if allowed(problem, machine, dict(zip(table, values, strict=True))) is None:
            return table
    raise NotApplicable(f"a cluster does not hold a row of vocab={problem.vocab}, or it is too short to share")


def base_allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    split, threads, rows = decisions["cluster"], decisions["threads"], decisions.get("rows", 1)
    if rows > 1 and (threads > 32 or split > 1):
        return "a block has several rows only where each has one warp"
    if split > 1 and windows(problem)[0] <= (split - 1) * share(problem, decisions):
        return f"the last of {split} parts of vocab={problem.vocab} has no vector"
    if threads > 32 and threads >= 2 * share(problem, decisions):
        return f"half of {threads} threads have no vector of a part"
    return None


def held_allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    if reason := base_allowed(problem, machine, decisions):
        return reason
    needed, limit = registers(problem, decisions), available(decisions, 1)
    return f"{needed} registers a thread exceed {limit}" if needed > limit else None


def staged_allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    if reason := base_allowed(problem, machine, decisions):
        return reason
    if decisions["threads"] < 64 or not windows(problem)[0]:
        return "one warp holds its rows in registers"
    size, limit = share(problem, decisions) * 16, SHARED.get(machine.arch, SHARED_ELSEWHERE) * 1024
    return f"{size} bytes of shared memory exceed {limit}" if size > limit else None


def streamed_allowed(problem: Problem, machine: Machine, decisions: Decisions) -> str | None:
    if reason := base_allowed(problem, machine, decisions):
        return reason
    if decisions["vectors"] > 1 and decisions["vectors"] * decisions["threads"] >= 2 * share(problem, decisions):
        return f"half of a tile of {decisions['vectors']} vectors a thread lies beyond a part"
    if decisions["vectors"] * width(problem) > 32 and decisions["threads"] * decisions.get("rows", 1) > 512:
        return "more than 32 elements in registers of more than 512 threads"
    return None


def _first(problem: Problem, machine: Machine, allowed: Any, wanted: Sequence[Mapping[str, int]]) -> Decisions:
    return next(d for d in wanted if allowed(problem, machine, d) is None)


def held_default(problem: Problem, machine: Machine) -> Decisions:
    """A warp a row if it is short, else a block of few threads; clusters for what one block does not hold."""
    wanted = [{"threads": 32, "cluster": 1, "rows": rows} for rows in (4, 1) if windows(problem)[1] <= 512]
    wanted += [
        {"threads": threads, "cluster": split, "rows": 1}
        for split in splits_to_fill(problem, machine)
        for threads in (256, 128, 512, 64, 384, 32, 1024)
    ]
    table = held_space(problem, machine)
    wanted += [dict(zip(table, values, strict=True)) for values in itertools.product(*table.values())]
    return _first(problem, machine, held_allowed, wanted)


def staged_default(problem: Problem, machine: Machine) -> Decisions:
    table = staged_space(problem, machine)
    wanted = [
        {"threads": threads, "cluster": split}
        for split in splits_to_fill(problem, machine)
        for threads in (512, 256, 128, 64)
    ]
    wanted += [dict(zip(table, values, strict=True)) for values in itertools.product(*table.values())]
    return _first(problem, machine, staged_allowed, wanted)


def streamed_default(problem: Problem, machine: Machine) -> Decisions:
    wanted = [
        {"threads": 32, "cluster": 1, "rows": 4, "vectors": vectors} for vectors in (4, 1) if windows(problem)[1] <= 512
    ]
    wanted += [
        {"threads": threads, "cluster": split, "rows": 1, "vectors": vectors}
        for split in splits_to_fill(problem, machine)
        for threads in (512, 256, 128, 64, 32)
        for vectors in (4, 2, 1)
    ]
    return _first(problem, machine, streamed_allowed, wanted)


def splits_to_fill(problem: Problem, machine: Machine) -> list[int]:
    """Parts of a row that give every multiprocessor about a block, then fewer, then more."""
    splits = base_space(problem, machine)["cluster"]
    enough = next((s for s in splits if s * problem.batch_extent >= machine.cores), splits[-1])
    return sorted((s for s in splits if s <= enough), reverse=True) + [s for s in splits if s > enough]


def build(problem: Problem, decisions: Decisions, keep: str) -> Program:
    """`keep`: where elements stay, "registers", "shared" or "nowhere"."""
    import tvm
    from tvm.script import tirx as T

    from ..device.arithmetic import LOG2_E
    from ..device.cluster import cluster_arrive, cluster_barrier, cluster_wait, peer_write

    vocab, dtype, wide = problem.vocab, problem.dtype, width(problem)
    softmax, how = isinstance(problem, Softmax), algorithm(problem)
    split, threads, rows = decisions["cluster"], decisions["threads"], decisions.get("rows", 1)
    part_windows = share(problem, decisions)
    fewest = max(0, windows(problem)[0] - (split - 1) * part_windows)  # vectors that the last part has at least
    ragged = vocab % wide != 0
    warps = threads // 32
    pairs = split * warps
    each = {"registers": kept(problem, decisions), "shared": STAGED_VECTORS}.get(keep) or decisions.get("vectors", 1)
    tile = each * threads
    # Tiles of which every vector is inside of every part, and those that may reach beyond it.
    whole = fewest // tile
    rest = ceildiv(part_windows, tile) - whole
    # Vectors of a tile that may reach beyond the part which do not.
    sure = fewest // threads if keep == "registers" else 0
    copies = ceildiv(part_windows, threads)
    # In float32 the exponentials take the place of the logits. In half precision there is no room for them: the logits
    # stay, two in a register, and a fence keeps the compiler from holding on to their float32 from one use to the next.
    in_place = keep == "registers" and dtype == "float32" and softmax
    fenced = keep == "registers" and dtype != "float32"
    lowest, highest = T.min_value("float32"), T.max_value("float32")
    # Vectors are of four words: a float32, or two elements of half precision.
    word = "float32" if dtype == "float32" else "uint32"
    put = peer_write("put_float", "float")

    def minus_infinity():
        return -T.infinity(word) if dtype == "float32" else T.uint32({"float16": 0xFC00FC00}.get(dtype, 0xFF80FF80))

    def value(raw, e):
        """The e-th element of a thread's words, in float32."""
        if dtype == "float32":
            return raw[e]
        half = raw[e // 2] >> T.Cast("uint32", e % 2 * 16)
        if dtype == "bfloat16":
            return T.reinterpret("float32", half << T.uint32(16))
        return T.Cast("float32", T.reinterpret("float16", T.Cast("uint16", half)))

    def words(X):
        return T.Cast("int64", X.shape[0]) * T.int64(vocab) * T.int64(4) // T.int64(wide)

    def fence(word):
        source = '__device__ __forceinline__ unsigned fenced_word(unsigned x) { asm volatile("" : "+r"(x)); return x; }'
        return T.cuda.func_call("fenced_word", word, source_code=source, return_type="uint32")

    # fmt: off
    @T.inline
    def load_tile(source, first, base, inside, count, t, raw):
        """The tile's vectors of this thread, of which the first `inside` are so without a question."""
        for u in T.unroll(inside):
            for v in T.vectorized(4):
                raw[u * 4 + v] = source[(first + T.Cast("int64", base + u * threads + t)) * 4 + v]
        for u in T.unroll(each - inside):
            if base + (inside + u) * threads + t < count[0]:
                for v in T.vectorized(4):
                    raw[(inside + u) * 4 + v] = source[
                        (first + T.Cast("int64", base + (inside + u) * threads + t)) * 4 + v]
        for w in T.unroll((each - inside) * 4):
            raw[inside * 4 + w] = T.Select(
                base + (inside + w // 4) * threads + t < count[0], raw[inside * 4 + w], minus_infinity())

    @T.inline
    def take_tile(stage, base, t, count, raw):
        """As `load_tile`, from shared memory; each thread reads what itself has copied there."""
        for u in T.unroll(each):
            if base + u * threads + t < count[0]:
                for v in T.vectorized(4):
                    raw[u * 4 + v] = stage[(base + u * threads + t) * 4 + v]
        for w in T.unroll(each * 4):
            raw[w] = T.Select(base + w // 4 * threads + t < count[0], raw[w], minus_infinity())

    @T.inline
    def fence_words(raw):
        if fenced:
            for w in T.unroll(each * 4):
                raw[w] = fence(raw[w])

    @T.inline
    def absorb_max(raw, m, d, top):
        """The tile's maximum into this thread's, and the sum rescaled."""
        top[0] = m[0]
        for e in T.unroll(each * wide):
            top[0] = T.max(top[0], value(raw, e))
        if not softmax:
            # Finite, so that plus infinity makes the sum infinite and not NaN.
            top[0] = T.min(top[0], highest)
        if top[0] > m[0]:
            d[0] = d[0] * T.exp2((m[0] - top[0]) * T.float32(LOG2_E))
            m[0] = top[0]

    @T.inline
    def absorb(raw, m, d, top, power, log):
        """The tile's elements into this thread's (m, d)."""
        if how == "online":
            absorb_max(raw, m, d, top)
            fence_words(raw)
        for e in T.unroll(each * wide):
            # Without the steps that exp2 takes for subnormal results, which add nothing to a sum of at least 1.
            T.ptx.ex2.approx.ftz.f32(power[0], (value(raw, e) - m[0]) * T.float32(LOG2_E))
            d[0] = d[0] + power[0]
            if in_place:
                raw[e] = T.Select(log != 0, raw[e], power[0])

    @T.inline
    def join_warp(m, d, top):
        """Equation 4 over a warp: the maximum first, then every sum rescaled to it."""
        top[0] = T.cuda.warp_max(m[0])
        d[0] = T.cuda.warp_sum(d[0] * T.exp2((m[0] - top[0]) * T.float32(LOG2_E)))

    @T.inline
    def join_pairs(t, pair_m, pair_d, m, d, top):
        """Equation 4 over the pairs of the row's warps, by every warp for itself."""
        m[0] = lowest
        for i in T.unroll(ceildiv(pairs, 32)):
            if i * 32 + t % 32 < pairs:
                m[0] = T.max(m[0], pair_m[i * 32 + t % 32])
        top[0] = T.cuda.warp_max(m[0])
        d[0] = T.float32(0)
        for i in T.unroll(ceildiv(pairs, 32)):
            if i * 32 + t % 32 < pairs:
                d[0] = d[0] + pair_d[i * 32 + t % 32] * T.exp2((pair_m[i * 32 + t % 32] - top[0]) * T.float32(LOG2_E))
        d[0] = T.cuda.warp_sum(d[0])

    @T.inline
    def finish(x, top, d, power, log):
        """`power[0]`: the result for the logit x, with d the reciprocal of the sum, or its logarithm."""
        if log:
            power[0] = x - top[0] - d[0]
        else:
            T.ptx.ex2.approx.ftz.f32(power[0], (x - top[0]) * T.float32(LOG2_E))
            power[0] = power[0] * d[0]

    @T.inline
    def store_vectors(target, first, base, inside, count, t, raw, y, top, d, power, log, a, b, s):
        for u in T.unroll(each):
            for v in T.unroll(wide):
                if in_place:
                    y[v] = (value(raw, u * wide + v) - s[0]) * a[0] + b[0]
                else:
                    finish(value(raw, u * wide + v), top, d, power, log)
                    y[v] = T.Cast(dtype, power[0])
            if u < inside or base + u * threads + t < count[0]:
                for v in T.vectorized(wide):
                    target[(first + T.Cast("int64", base + u * threads + t)) * wide + v] = y[v]

    @T.inline
    def store_tile(target, first, base, inside, count, t, raw, y, top, d, power, log, a, b, s):
        # Two loops, and not a branch in one: the compiler would first work out, for all elements, what both share.
        if in_place:
            store_vectors(target, first, base, inside, count, t, raw, y, top, d, power, False, a, b, s)
        elif log != 0:
            store_vectors(target, first, base, inside, count, t, raw, y, top, d, power, True, a, b, s)
        else:
            store_vectors(target, first, base, inside, count, t, raw, y, top, d, power, False, a, b, s)

    @T.inline
    def row_of_threads(row, X, Y, log, part, t, stage, pair_m, pair_d):
        """All that the threads of one row do."""
        F = T.decl_buffer([words(X)], word, data=X.data)
        raw = T.alloc_local([each * 4], word)
        edge = T.alloc_local([1], "float32")
        at = T.alloc_local([1], "int32")
        count = T.alloc_local([1], "int32")
        m = T.alloc_local([1], "float32")
        d = T.alloc_local([1], "float32")
        top = T.alloc_local([1], "float32")
        power = T.alloc_local([1], "float32")
        # The row's first whole vector, counted from the first row's start, and this part's share of them.
        before: T.int32 = 0
        first: T.int64 = row * T.int64(vocab // wide) + part * part_windows
        at[0] = -1
        if ragged:
            before = T.Cast("int32", T.int64(wide - 1) - (row * T.int64(vocab) + T.int64(wide - 1)) % T.int64(wide))
            before = T.min(before, vocab)
            first = (row * T.int64(vocab) + T.int64(wide - 1)) // T.int64(wide) + part * part_windows
            count[0] = T.min(T.max((vocab - before) // wide - part * part_windows, 0), part_windows)
            # Elements of no whole vector: before the first, and behind the last.
            if part == 0:
                if t < before:
                    at[0] = t
                if wide <= t and t < wide + (vocab - before) % wide:
                    at[0] = vocab - (vocab - before) % wide + t - wide
        else:
            count[0] = T.min(vocab // wide - part * part_windows, part_windows)
        edge[0] = -T.infinity("float32")
        if ragged:
            if at[0] >= 0:
                edge[0] = T.Cast("float32", X[row, at[0]])

        m[0] = T.max(lowest, edge[0])
        if how == "naive":
            m[0] = T.float32(0)
        if not softmax:
            m[0] = T.min(m[0], highest)
        d[0] = T.float32(0)
        if keep == "registers":
            load_tile(F, first, 0, sure, count, t, raw)
            absorb(raw, m, d, top, power, log)
        elif keep == "shared":
            for u in T.unroll(copies):
                if u * threads + t < count[0]:
                    T.ptx.cp.async_.cg.shared.global_(
                        stage.ptr_to([(u * threads + t) * 4]),
                        F.ptr_to([(first + T.Cast("int64", u * threads + t)) * 4]), 16)
            T.ptx.cp.async_.commit_group()
            T.ptx.cp.async_.wait_group(0)
            for i in T.serial(whole + rest):
                take_tile(stage, i * tile, t, count, raw)
                absorb(raw, m, d, top, power, log)
        else:
            if how == "safe":
                # A thread subtracts the maximum of its own elements; those of the row's threads are joined afterwards.
                for i in T.serial(whole):
                    load_tile(F, first, i * tile, each, count, t, raw)
                    absorb_max(raw, m, d, top)
                for i in T.serial(rest):
                    load_tile(F, first, (whole + i) * tile, 0, count, t, raw)
                    absorb_max(raw, m, d, top)
            for i in T.serial(whole):
                load_tile(F, first, i * tile, each, count, t, raw)
                absorb(raw, m, d, top, power, log)
            for i in T.serial(rest):
                load_tile(F, first, (whole + i) * tile, 0, count, t, raw)
                absorb(raw, m, d, top, power, log)
        if ragged:
            T.ptx.ex2.approx.ftz.f32(power[0], (edge[0] - m[0]) * T.float32(LOG2_E))
            d[0] = d[0] + power[0]

        # own_m: what the exponentials in registers are relative to.
        own_m = T.alloc_local([1], "float32")
        own_m[0] = m[0]
        join_warp(m, d, top)
        if split > 1:
            cluster_wait()
            if t % 32 < split:
                put(pair_m.ptr_to([part * warps + t // 32]), t % 32, top[0])
                put(pair_d.ptr_to([part * warps + t // 32]), t % 32, d[0])
            cluster_barrier()
            join_pairs(t, pair_m, pair_d, m, d, top)
        elif warps > 1:
            if t % 32 == 0:
                pair_m[t // 32] = top[0]
                pair_d[t // 32] = d[0]
            T.cuda.cta_sync()
            join_pairs(t, pair_m, pair_d, m, d, top)

        if softmax:
            Z = T.decl_buffer([T.int64(vocab) * T.Cast("int64", X.shape[0])], dtype, data=Y.data)
            y = T.alloc_local([wide], dtype)
            a = T.alloc_local([1], "float32")
            b = T.alloc_local([1], "float32")
            s = T.alloc_local([1], "float32")
            if log != 0:
                d[0] = T.log(d[0])
                s[0] = top[0]
                a[0] = T.float32(1)
                b[0] = -d[0]
            else:
                d[0] = T.float32(1) / d[0]
                s[0] = T.float32(0)
                a[0] = T.exp2((own_m[0] - top[0]) * T.float32(LOG2_E)) * d[0]
                b[0] = T.float32(0)
            if keep == "registers":
                fence_words(raw)
                store_tile(Z, first, 0, sure, count, t, raw, y, top, d, power, log, a, b, s)
            elif keep == "shared":
                for i in T.serial(whole + rest):
                    take_tile(stage, i * tile, t, count, raw)
                    store_tile(Z, first, i * tile, 0, count, t, raw, y, top, d, power, log, a, b, s)
            else:
                # Backwards: what was read last is likeliest to be in a cache.
                for i in T.serial(rest):
                    load_tile(F, first, (whole + i) * tile, 0, count, t, raw)
                    store_tile(Z, first, (whole + i) * tile, 0, count, t, raw, y, top, d, power, log, a, b, s)
                for i in T.serial(whole):
                    load_tile(F, first, (whole - 1 - i) * tile, each, count, t, raw)
                    store_tile(Z, first, (whole - 1 - i) * tile, each, count, t, raw, y, top, d, power, log, a, b, s)
            if ragged:
                if at[0] >= 0:
                    if log != 0:
                        finish(edge[0], top, d, power, True)
                    else:
                        finish(edge[0], top, d, power, False)
                    Y[row, at[0]] = T.Cast(dtype, power[0])
        else:
            if part == 0 and t == 0:
                Y[row] = top[0] + T.log(d[0])

    @T.inline
    def body(X, Y, log, batch):
        T.device_entry()
        if keep == "registers":
            # Else the compiler takes what one block may have, to have more of the arithmetic in hand at once.
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": resident(problem, decisions)})
        if split > 1:
            block = T.cluster_id([batch])
            part = T.cta_id_in_cluster([split])
        else:
            block = T.cta_id([(batch + (rows - 1)) // rows])
            part = 0
        thread = T.thread_id([threads * rows])
        stage = T.alloc_buffer([part_windows * 4 if keep == "shared" else 4], word, scope="shared.dyn")
        pair_m = T.alloc_shared([pairs], "float32")
        pair_d = T.alloc_shared([pairs], "float32")
        if split > 1:
            # Every block has to have begun before another one writes to it.
            cluster_arrive()
        if rows > 1:
            if block * rows + thread // threads < batch:
                row_of_threads(
                    T.Cast("int64", block) * rows + T.Cast("int64", thread // threads),
                    X, Y, log, part, thread % threads, stage, pair_m, pair_d)
        else:
            row_of_threads(T.Cast("int64", block), X, Y, log, part, thread, stage, pair_m, pair_d)

    if softmax:

        @T.prim_func
        def main(logits_h: T.handle, log: T.int32, out_h: T.handle):
            batch = T.int32()
            X = T.match_buffer(logits_h, (batch, vocab), dtype)
            Y = T.match_buffer(out_h, (batch, vocab), dtype)
            body(X, Y, log, batch)

    else:

        @T.prim_func
        def main(logits_h: T.handle, out_h: T.handle):
            batch = T.int32()
            X = T.match_buffer(logits_h, (batch, vocab), dtype)
            Y = T.match_buffer(out_h, (batch,), "float32")
            body(X, Y, 0, batch)
    # fmt: on
    main = main.with_attr("global_symbol", "main")
    return Program(tvm.IRModule({"main": main}), pipeline="tirx")


softmax_held = Template(
    name="softmax_held",
    version=1,
    operator="softmax",
    kind="cuda",
    summary="a row in the registers of a warp, a block or a cluster: one read, vectors of 16 bytes",
    space=held_space,
    default=held_default,
    program=partial(build, keep="registers"),
    allowed=held_allowed,
    explicit_threads=True,
)

softmax_staged = Template(
    name="softmax_staged",
    version=1,
    operator="softmax",
    kind="cuda",
    summary="a row in the shared memory of a block or a cluster: one read, by asynchronous copies",
    space=staged_space,
    default=staged_default,
    program=partial(build, keep="shared"),
    allowed=staged_allowed,
    explicit_threads=True,
)

softmax_streamed = Template(
    name="softmax_streamed",
    version=1,
    operator="softmax",
    kind="cuda",
    summary="a row of any length to a warp, a block or a cluster: as many reads as the algorithm has",
    space=streamed_space,
    default=streamed_default,
    program=partial(build, keep="nowhere"),
    allowed=streamed_allowed,
    explicit_threads=True,
)

logsumexp_streamed = Template(
    name="logsumexp_streamed",
    version=1,
    operator="logsumexp",
    kind="cuda",
    summary="a row to a warp, a block or a cluster: one read, vectors of 16 bytes",
    space=streamed_space,
    default=streamed_default,
    program=partial(build, keep="nowhere"),
    allowed=streamed_allowed,
    explicit_threads=True,
)
