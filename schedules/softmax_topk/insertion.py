"""Softmax + top-k on a GPU as Milakov & Gimelshein's benchmark has it, in its three forms, for comparison.

A block has a row, each thread keeps the best of its own elements in registers and inserts every element that belongs
among them, and the lists are joined at the end. What this costs grows with k, and most elements cost it as long as
some lane of a warp has one to insert; `threshold_gate` is the way out. The forms differ in how often they touch a row:

`safe_then_topk`: Algorithm 2, whose probabilities go to memory, and a top-k kernel that reads them: five times an
element. `safe_fused`: a pass for the maximum, one for sum and insertion: twice. `online_insertion`: Algorithm 4, once.

Equal probabilities need not be those of equal elements: exponentials round, and vanish. The unfused form therefore
looks for one more than k; if all of these differ by more than rounding explains, they are the right ones in the right
order, else the elements are gone through in the place of their probabilities.
"""

from __future__ import annotations

from functools import partial

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, NotApplicable, Program, Table, Template, Workspace, ceildiv, powers

THREADS = powers(128, 512)
# Elements that a thread loads before it looks at the first.
LOADS = (1, 4)
# Two registers a key.
MAX_K = 32

# Probabilities (a, b) keep the order of their elements if a - b exceeds APART * |a| + VANISHING: exponentials and
# products keep the order of their arguments to 2^-21, and what is below the least normal number may be 0.
APART, VANISHING = 2.0**-18, 2e-38


def space(problem: Problem, machine: Machine) -> Table:
    if problem.k > MAX_K:
        raise NotApplicable(f"k={problem.k} exceeds {MAX_K}: every thread keeps k keys in registers")
    return {"threads": THREADS, "loads": LOADS}


def default(problem: Problem, machine: Machine) -> Decisions:
    return {"threads": 256, "loads": 4}


def build(problem: Problem, decisions: Decisions, form: str) -> Program:
    """`form`: "unfused", "safe" or "online"."""
    from tvm.script import tirx as T

    from ..device.arithmetic import LOG2_E, is_nan
    from ..device.selection import FULL_WARP, MINUS_INFINITY, key_bits, key_index, key_value, make_key
    from .elements import element, write_given, write_value
    from .interface import gpu_program

    vocab, k, n = problem.vocab, problem.k, problem.ids
    threads, loads = decisions["threads"], decisions["loads"]
    warps, tile = threads // 32, threads * loads
    tiles = ceildiv(vocab, tile)
    lowest = T.min_value("float32")
    # Keys of a list: one more than k shows whether the k-th is above all that are left out.
    kept = min(k + 1, vocab) if form == "unfused" else k

    def probability(io, row, column):
        return io.workspace[row, column]

    # fmt: off
    @T.inline
    def load_tile(i, source, io, row, t, x):
        """Beyond the row there is minus infinity, whose keys are below all of the row's."""
        for u in T.unroll(loads):
            x[u] = T.if_then_else(
                i * tile + u * threads + t < vocab,
                source(io, row, i * tile + u * threads + t), -T.infinity("float32"))

    @T.inline
    def row_max(io, row, t, x, m, group):
        """`m`: the row's maximum, NaN left out, in all threads."""
        m[0] = lowest
        for i in T.serial(tiles):
            load_tile(i, element, io, row, t, x)
            for u in T.unroll(loads):
                if x[u] > m[0]:
                    m[0] = x[u]
        m[0] = T.cuda.cta_max(m[0], warps, group.data)

    @T.inline
    def insert(key, keys):
        """Insertion into a descending list, whose last key drops out. All are looked at: registers have no index."""
        for i in T.unroll(kept - 1):
            if key[0] > keys[kept - 2 - i]:
                keys[kept - 1 - i] = keys[kept - 2 - i]
            else:
                if key[0] > keys[kept - 1 - i]:
                    keys[kept - 1 - i] = key[0]
        if key[0] > keys[0]:
            keys[0] = key[0]

    @T.inline
    def scan(source, io, row, t, x, m, d, factor, keys, key, gate, normalise):
        """A pass over the row: the keys of the thread's best elements and, if asked for, the sum of exponentials."""
        for i in T.unroll(kept):
            keys[i] = T.Cast("uint64", T.uint32(MINUS_INFINITY)) << T.uint64(32)
        gate[0] = -T.infinity("float32")
        for i in T.serial(tiles):
            load_tile(i, source, io, row, t, x)
            for u in T.unroll(loads):
                if normalise:
                    if form == "online":
                        if x[u] > m[0]:
                            d[0] = d[0] * T.exp2((m[0] - x[u]) * factor[0])
                            m[0] = x[u]
                    d[0] = d[0] + T.exp2((x[u] - m[0]) * factor[0])
                if x[u] >= gate[0] or is_nan(x[u]):
                    key[0] = make_key(x[u], i * tile + u * threads + t)
                    if key[0] > keys[kept - 1]:
                        insert(key, keys)
                        gate[0] = key_value(keys[kept - 1])

    @T.inline
    def warp_best(key, best):
        """`best`: the largest of the lanes' keys."""
        high = T.alloc_local([1], "uint32")
        low = T.alloc_local([1], "uint32")
        high[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), key_bits(key[0]))
        low[0] = T.Select(
            key_bits(key[0]) == high[0], T.Cast("uint32", key[0] & T.uint64(0xFFFFFFFF)), T.uint32(0))
        low[0] = T.call_extern("uint32", "__reduce_max_sync", T.uint32(FULL_WARP), low[0])
        best[0] = (T.Cast("uint64", high[0]) << T.uint64(32)) | T.Cast("uint64", low[0])

    @T.inline
    def join_lists(t, keys, key, best, lists, joined):
        """`joined`: the best of all threads' keys, which are lost.

        Each warp joins its lanes' lists, the first warp those of the warps. Two barriers.
        """
        for r in T.serial(kept):
            key[0] = keys[0]
            warp_best(key, best)
            if key[0] == best[0]:
                for i in T.unroll(kept - 1):
                    keys[i] = keys[i + 1]
                keys[kept - 1] = T.uint64(0)
            if t % 32 == 0:
                lists[t // 32 * kept + r] = best[0]
        T.cuda.cta_sync()
        if t < 32:
            place = T.alloc_local([1], "int32")
            place[0] = 0
            for r in T.serial(kept):
                key[0] = T.uint64(0)
                if t < warps and place[0] < kept:
                    key[0] = lists[t * kept + place[0]]
                warp_best(key, best)
                if key[0] == best[0]:
                    place[0] = place[0] + 1
                if t == 0:
                    joined[r] = best[0]
        T.cuda.cta_sync()

    @T.inline
    def in_order(joined, sure):
        """`sure`: whether the probabilities of `joined` differ by more than rounding explains."""
        sure[0] = 1
        for i in T.serial(kept - 1):
            # No `not`: the simplifier would turn the comparison round, and NaN passes neither.
            sure[0] = T.Select(
                key_value(joined[i]) - key_value(joined[i + 1])
                > T.abs(key_value(joined[i])) * T.float32(APART) + T.float32(VANISHING),
                sure[0], 0)

    @T.inline
    def write_softmax(io, row, t):
        """Algorithm 2: three passes."""
        group = T.alloc_shared([32], "float32")
        group_sum = T.alloc_shared([32], "float32")
        x = T.alloc_local([loads], "float32")
        m = T.alloc_local([1], "float32")
        d = T.alloc_local([1], "float32")
        inverse = T.alloc_local([1], "float32")
        logarithm = T.alloc_local([1], "float32")
        factor = T.alloc_local([1], "float32")
        factor[0] = io.scale * T.float32(LOG2_E)
        row_max(io, row, t, x, m, group)
        d[0] = T.float32(0)
        for i in T.serial(tiles):
            load_tile(i, element, io, row, t, x)
            for u in T.unroll(loads):
                d[0] = d[0] + T.exp2((x[u] - m[0]) * factor[0])
        d[0] = T.cuda.cta_sum(d[0], warps, group_sum.data)
        inverse[0] = T.float32(1) / d[0]
        logarithm[0] = T.log(d[0])
        for i in T.serial(tiles):
            load_tile(i, element, io, row, t, x)
            for u in T.unroll(loads):
                if i * tile + u * threads + t < vocab:
                    write_value(
                        io.workspace, row, i * tile + u * threads + t, (x[u] - m[0]) * io.scale, inverse[0],
                        logarithm[0], io.log)

    @T.inline
    def select(io, row, t):
        """All of a fused form, or what the unfused one does with the probabilities."""
        group = T.alloc_shared([32], "float32")
        group_sum = T.alloc_shared([32], "float32")
        lists = T.alloc_shared([warps * kept], "uint64")
        joined = T.alloc_shared([kept], "uint64")
        x = T.alloc_local([loads], "float32")
        m = T.alloc_local([1], "float32")
        top = T.alloc_local([1], "float32")
        d = T.alloc_local([1], "float32")
        factor = T.alloc_local([1], "float32")
        gate = T.alloc_local([1], "float32")
        keys = T.alloc_local([kept], "uint64")
        key = T.alloc_local([1], "uint64")
        best = T.alloc_local([1], "uint64")
        sure = T.alloc_local([1], "int32")
        factor[0] = io.scale * T.float32(LOG2_E)
        d[0] = T.float32(0)
        m[0] = lowest
        if form == "unfused":
            scan(probability, io, row, t, x, m, d, factor, keys, key, gate, False)
            join_lists(t, keys, key, best, lists, joined)
            in_order(joined, sure)
            if sure[0] == 0:
                T.cuda.cta_sync()
                scan(element, io, row, t, x, m, d, factor, keys, key, gate, False)
                join_lists(t, keys, key, best, lists, joined)
        else:
            if form == "safe":
                row_max(io, row, t, x, m, group)
            scan(element, io, row, t, x, m, d, factor, keys, key, gate, True)
            top[0] = m[0]
            if form == "online":
                top[0] = T.cuda.cta_max(m[0], warps, group.data)
                d[0] = d[0] * T.exp2((m[0] - top[0]) * factor[0])
            d[0] = T.cuda.cta_sum(d[0], warps, group_sum.data)
            join_lists(t, keys, key, best, lists, joined)
        if t < k:
            io.indices[row, t] = T.Cast("int64", key_index(joined[t]))
            if form == "unfused":
                io.values[row, t] = io.workspace[row, T.Cast("int32", key_index(joined[t]))]
            else:
                write_value(
                    io.values, row, t, (key_value(joined[t]) - top[0]) * io.scale, T.float32(1) / d[0], T.log(d[0]),
                    io.log)
        if n > 0:
            for i in T.serial((n - t + (threads - 1)) // threads):
                if form == "unfused":
                    io.given[row, i * threads + t] = T.if_then_else(
                        io.ids[row, i * threads + t] >= T.int64(0) and io.ids[row, i * threads + t] < T.int64(vocab),
                        io.workspace[row, io.ids[row, i * threads + t]], T.float32("nan"))
                else:
                    write_given(
                        io.given, row, i * threads + t, io.ids[row, i * threads + t], vocab,
                        (element(io, row, io.ids[row, i * threads + t]) - top[0]) * io.scale,
                        T.float32(1) / d[0], T.log(d[0]), io.log)

    @T.inline
    def body(io):
        # Offsets into rows pass 2^31.
        if form == "unfused":
            with T.launch_thread("blockIdx.x", io.batch) as block:
                thread = T.launch_thread("threadIdx.x", threads)
                write_softmax(io, T.Cast("int64", block), thread)
            with T.launch_thread("blockIdx.x", io.batch) as block:
                thread = T.launch_thread("threadIdx.x", threads)
                select(io, T.Cast("int64", block), thread)
        else:
            T.device_entry()
            # Else the compiler parks a few of the longest lists' keys in memory to have more blocks at once.
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": 1})
            block = T.cta_id([io.batch])
            thread = T.thread_id([threads])
            select(io, T.Cast("int64", block), thread)
    # fmt: on
    workspace = Workspace("probabilities", ("batch", vocab), "float32") if form == "unfused" else None
    return gpu_program(problem, body, workspace=workspace)


def _template(name: str, form: str, summary: str) -> Template:
    return Template(
        name=name,
        version=1,
        operator="softmax_topk",
        kind="cuda",
        summary=summary,
        space=space,
        default=default,
        program=partial(build, form=form),
        explicit_threads=True,
        comparison=True,
    )


safe_then_topk = _template(
    "safe_then_topk", "unfused", "for comparison: safe softmax to memory, then top-k by insertion"
)
safe_fused = _template("safe_fused", "safe", "for comparison: safe softmax fused with insertion, two reads")
online_insertion = _template("online_insertion", "online", "for comparison: Algorithm 4 with its insertion, one read")
