"""Sparse linear layer on a GPU: a warp a row of the weight, rows of x beside each other in shared memory.

A thread block holds `tile_m` rows of x, transposed: the elements of one column lie one after another, so that a lane
which has an entry reads its column with loads of up to 16 bytes. Each entry is loaded once for all of these rows,
neighbouring entries by neighbouring lanes. A lane has a sum for each row of x; the sums of a warp's lanes are added in
the end.

Every thread block copies its rows of x whole, which takes as long as some 12 rows of 400 entries: few thread blocks
with many rows of the weight each are the fastest, one on each multiprocessor.

`staged` = 0: x is read from global memory, for rows of x that do not fit into shared memory.
"""

from __future__ import annotations

from typing import Any

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Features, Launch, Program, Table, Template, ceildiv, powers
from tvm_sparse.operators.csr_linear.problem import CsrLinear

THREADS = powers(128, 1024)
# Rows of the weight of a thread block, of x, and entries that a lane loads before it uses them.
ROWS, TILE_M, LOADS = powers(4, 128), powers(1, 16), (1, 2, 4)
# Bytes of one load from shared memory, and of a lane's registers for a column of x, at most.
VECTOR, WARP = 16, 32
# Elements of x that a thread loads before it stores the first of them, at most.
MOST_LOADED = 16
# Static shared memory: sums of a thread block's rows.
MOST_SUMS = 2048


def space(problem: CsrLinear, machine: Machine) -> Table:
    return {
        "threads": THREADS,
        "rows": tuple(rows for rows in ROWS if rows < 2 * max(problem.n, ROWS[0])),
        "tile_m": tuple(tile for tile in TILE_M if tile < 2 * problem.m),
        "loads": LOADS,
        "staged": (0, 1),
    }


def columns_at_once(problem: CsrLinear, decisions: Decisions) -> int:
    """Columns of x that a thread loads before it stores the first of them."""
    return max(min(ceildiv(problem.k, decisions["threads"]), MOST_LOADED // decisions["tile_m"]), 1)


def staged_bytes(problem: CsrLinear, decisions: Decisions) -> int:
    """Dynamic shared memory: the rows of x."""
    size = problem.k * decisions["tile_m"] * numpy_dtype(problem.dtype).itemsize
    return ceildiv(size, VECTOR) * VECTOR * decisions["staged"]


def allowed(problem: CsrLinear, machine: Machine, decisions: Decisions) -> str | None:
    warps, rows = decisions["threads"] // WARP, decisions["rows"]
    if rows % warps:
        return f"{rows} rows are not shared evenly by {warps} warps"
    if rows * decisions["tile_m"] > MOST_SUMS:
        return f"{rows * decisions['tile_m']} sums exceed {MOST_SUMS}"
    needed = staged_bytes(problem, decisions)
    if needed + 4 * MOST_SUMS > machine.block_shared_bytes:
        return f"{decisions['tile_m']} rows of x, {needed} bytes, exceed a multiprocessor's shared memory"
    return None


# With more rows of x than this, a column of a thread block's rows is one load by default.
MANY_ROWS = 128


def default(problem: CsrLinear, machine: Machine) -> Decisions:
    """The rows of x and of the weight that `cycles` says, of which a warp has one or two. With many rows of x as many
    as one load brings, beside as many rows of the weight as there may be: 393 rows of float32 took 0.54 times as long
    so on an H200, 5126 of bfloat16 0.82 times as long as with half as many (`scripts/regret.py`, seeds 11 and 16).
    """
    table = space(problem, machine)
    if problem.m > MANY_ROWS:
        return _of_many(problem, machine, table)
    point = {"threads": THREADS[0], "rows": ROWS[0], "tile_m": 1, "loads": LOADS[-1], "staged": 1}
    fitting = [
        point | {"threads": min(max(rows // each * WARP, THREADS[0]), THREADS[-1]), "rows": rows, "tile_m": tile}
        for rows in table["rows"]
        for tile in table["tile_m"]
        for each in (1, 2)
    ]
    fitting = [one for one in fitting if allowed(problem, machine, one) is None]
    return min(fitting, key=lambda one: cycles(problem, machine, one), default=point | {"staged": 0})


# For `cycles`, as fitted to 90 points of three drawn problems and 44 defaults on an H200. Cycles to load 32 entries,
# and to read the words of their columns of x; until a thread has loaded some columns of x; and until a lane has used a
# batch of entries.
LOADED, READ, COPY, BATCH = 2.6, 4.2, 280, 130


def cycles(problem: CsrLinear, machine: Machine, decisions: Decisions) -> float:
    """Cycles for which the busiest multiprocessor's memory pipes are in use, and those that a warp waits for memory.

    A warp copies 32 columns of x by a load for each row of x and a store of as many cycles as a column has words. It
    gets 32 entries from the L2 cache, and reads their columns of x, of which some lie in the same banks.
    """
    rows, tile, warps = decisions["rows"], decisions["tile_m"], decisions["threads"] // WARP
    words = max(tile * numpy_dtype(problem.dtype).itemsize // 4, 1)
    copied, read = problem.k / WARP * (tile + words), ceildiv(round(problem.k * (1 - problem.sparsity)), WARP)
    blocks = ceildiv(problem.n, rows) * ceildiv(problem.m, tile)
    used = ceildiv(blocks, machine.cores) * (copied + rows * read * (LOADED + READ * words))
    copies = ceildiv(problem.k, warps * WARP * columns_at_once(problem, decisions))
    waits = COPY * copies + BATCH * rows / warps * ceildiv(read, decisions["loads"])
    at_once = machine.blocks_at_once(decisions["threads"], 1, staged_bytes(problem, decisions) + 4 * MOST_SUMS)
    return used + waits * ceildiv(blocks, max(at_once, 1))


def _of_many(problem: CsrLinear, machine: Machine, table: Table) -> Decisions:
    most = VECTOR // numpy_dtype(problem.dtype).itemsize
    places = problem.n * (problem.m // most) // (2 * machine.cores)
    rows = max(rows for rows in table["rows"] if rows <= max(places, ROWS[0]))
    threads = min(max(rows * WARP, THREADS[0]), 512)
    point = {"threads": threads, "rows": max(rows, threads // WARP), "tile_m": 1, "loads": 2, "staged": 1}
    fitting = [
        point | {"tile_m": tile}
        for tile in table["tile_m"]
        if tile <= most
        and allowed(problem, machine, point | {"tile_m": tile}) is None
        and 2 * staged_bytes(problem, point | {"tile_m": tile}) <= machine.block_shared_bytes
    ]
    return max(fitting, key=lambda one: one["tile_m"], default=point | {"staged": 0})


def launch(problem: CsrLinear, decisions: Decisions) -> Launch:
    return Launch(decisions["threads"], staged_bytes(problem, decisions))


def features(problem: CsrLinear, machine: Machine, decisions: Decisions) -> Features:
    row = (1 - problem.sparsity) * problem.k
    return {
        "blocks_each": ceildiv(problem.n, decisions["rows"]) * ceildiv(problem.m, decisions["tile_m"]) / machine.cores,
        "rows_used": problem.m / (ceildiv(problem.m, decisions["tile_m"]) * decisions["tile_m"]),
        "steps": max(row / WARP, 1) * decisions["rows"] / (decisions["threads"] // WARP),
        "staged_bytes": staged_bytes(problem, decisions),
    }


def build(problem: CsrLinear, decisions: Decisions) -> Program:
    from types import SimpleNamespace

    from tvm.script import tirx as T

    from ..device.state import named
    from ..device.words import load_element, value_in
    from ..interface import gpu_program

    dtype, k, n = problem.dtype, problem.k, problem.n
    threads, rows, tile_m, loads = (decisions[name] for name in ("threads", "rows", "tile_m", "loads"))
    warps, size, beside = threads // WARP, numpy_dtype(dtype).itemsize, columns_at_once(problem, decisions)
    column_bytes = tile_m * size
    words, per_word = max(column_bytes // 4, 1), 4 // size
    each, vector = rows // warps, min(words, VECTOR // 4)
    load_index = {"int32": T.ptx.ld.global_.s32, "int64": T.ptx.ld.global_.s64}[problem.index]
    shared_load = {1: T.ptx.ld.shared.u32, 2: T.ptx.ld.shared.v2.u32, 4: T.ptx.ld.shared.v4.u32}[vector]
    shared_store = {1: T.ptx.st.shared.u32, 2: T.ptx.st.shared.v2.u32, 4: T.ptx.st.shared.v4.u32}[vector]

    def bits(value):
        return T.Cast("uint32", T.reinterpret("uint16", value)) if size == 2 else T.reinterpret("uint32", value)

    def state() -> SimpleNamespace:
        pool = staged_bytes(problem, decisions) // 4
        x: Any = T.alloc_buffer([pool], "uint32", scope="shared.dyn") if pool else None
        halves = T.decl_buffer([pool * 2], "uint16", data=x.data, scope="shared.dyn") if pool else None
        return named(SimpleNamespace(
            x=x, halves=halves, results=T.alloc_shared([rows * tile_m], "float32"),
            own=T.alloc_local([beside * tile_m], dtype),
            sums=T.alloc_local([tile_m], "float32"), word=T.alloc_local([words], "uint32"),
            bound=T.alloc_local([2], problem.index), column=T.alloc_local([loads], problem.index),
            value=T.alloc_local([loads], "float32"),
        ))  # fmt: skip

    # fmt: off
    @T.inline
    def stage(io, s, t, top):
        """A thread has `beside` columns of x at a time, from every row. The last row stands for those beyond it, whose
        sums nobody reads.
        """
        for step in T.serial((k + (threads * beside - 1)) // (threads * beside)):
            for u in T.unroll(beside):
                for i in T.unroll(tile_m):
                    s.own[u * tile_m + i] = io.x[
                        T.min(top + i, io.m - 1), T.min((step * beside + u) * threads + t, k - 1)]
            for u in T.unroll(beside):
                c: T.int32 = (step * beside + u) * threads + t
                if c < k:
                    if column_bytes == 2:
                        s.halves[c] = T.reinterpret("uint16", s.own[u])
                    else:
                        for w in T.unroll(words):
                            s.word[w] = T.uint32(0)
                            for v in T.unroll(per_word):
                                s.word[w] = s.word[w] | (
                                    bits(s.own[u * tile_m + w * per_word + v]) << T.uint32(16 * v))
                        for w in T.unroll(words // vector):
                            shared_store(
                                s.x.ptr_to([c * words + w * vector]), *[s.word[w * vector + v] for v in range(vector)])

    @T.inline
    def multiply(io, s, column, value, top):
        """Add the products of one entry."""
        if decisions["staged"] == 0:
            for i in T.unroll(tile_m):
                if top + i < io.m:
                    s.sums[i] = s.sums[i] + value * load_element(dtype, io.x.ptr_to([top + i, column]))
        elif column_bytes == 2:
            s.word[0] = T.Cast("uint32", s.halves[column])
            s.sums[0] = s.sums[0] + value * value_in(dtype, s.word[0], 0)
        else:
            for w in T.unroll(words // vector):
                shared_load(
                    *[s.word[w * vector + v] for v in range(vector)], s.x.ptr_to([column * words + w * vector]))
            for i in T.unroll(tile_m):
                s.sums[i] = s.sums[i] + value * value_in(dtype, s.word[i // per_word], i % per_word)

    @T.inline
    def body(io):
        T.device_entry()
        group, strip = T.cta_id([(n + rows - 1) // rows, (io.m + (tile_m - 1)) // tile_m])
        t = T.thread_id([threads])
        s = T.meta_var(state())
        top: T.int32 = strip * tile_m
        if decisions["staged"] > 0:
            stage(io, s, t, top)
            T.cuda.cta_sync()
        for r in T.serial(each):
            row: T.int32 = group * rows + r * warps + t // WARP
            for i in T.unroll(tile_m):
                s.sums[i] = T.float32(0)
            if row < n:
                load_index(s.bound[0], io.indptr.ptr_to([row]))
                load_index(s.bound[1], io.indptr.ptr_to([row + 1]))
                start: T.int32 = T.Cast("int32", s.bound[0])
                count: T.int32 = T.Cast("int32", s.bound[1]) - start
                for step in T.serial((count + (WARP * loads - 1)) // (WARP * loads)):
                    for u in T.unroll(loads):
                        place: T.int32 = (step * loads + u) * WARP + t % WARP
                        s.column[u] = T.Cast(problem.index, -1)
                        s.value[u] = T.float32(0)
                        if place < count:
                            load_index(s.column[u], io.indices.ptr_to([start + place]))
                            s.value[u] = load_element(dtype, io.values.ptr_to([start + place]))
                    for u in T.unroll(loads):
                        if s.column[u] >= T.Cast(problem.index, 0):
                            multiply(io, s, T.Cast("int32", s.column[u]), s.value[u], top)
            for i in T.unroll(tile_m):
                s.sums[i] = T.cuda.warp_sum(s.sums[i])
            if t % WARP == 0:
                for i in T.unroll(tile_m):
                    s.results[i * rows + r * warps + t // WARP] = s.sums[i]
        T.cuda.cta_sync()
        for step in T.serial((rows * tile_m + (threads - 1)) // threads):
            o: T.int32 = step * threads + t
            if o < rows * tile_m:
                if group * rows + o % rows < n and top + o // rows < io.m:
                    io.y[top + o // rows, group * rows + o % rows] = T.Cast(dtype, s.results[o])
    # fmt: on

    return gpu_program(problem, body)


warp_entries = Template(
    name="warp_entries",
    version=3,
    operator="csr_linear",
    kind="cuda",
    summary="a warp a row of the weight, rows of x side by side in shared memory",
    space=space,
    default=default,
    program=build,
    allowed=allowed,
    features=features,
    launch=launch,
    explicit_threads=True,
)
