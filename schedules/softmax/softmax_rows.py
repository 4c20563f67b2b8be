"""Softmax and logsumexp on a CPU: a thread a row, vector loops over chunks that stay in L1.

Algorithm 3 of Milakov & Gimelshein with one rescaling a chunk instead of one an element: the chunk's maximum, then,
from L1, its exponentials. The second pass over the row finds it in L2 unless it is longer than that. Algorithms 1 and 2
are here too, in whole passes, as the paper compares them.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, Program, Table, Template
from tvm_sparse.operators.softmax.problem import Softmax

# Elements between two looks at the maximum: a float32 chunk of 4096 is 16 KB of the 32 KB or more of L1.
CHUNK = (64, 256, 1024, 4096)
# Elements a vector loop steps by; beyond the register width they are independent accumulators.
LANES = (8, 16, 32, 64)


def algorithm(problem: Problem) -> str:
    return problem.algorithm if isinstance(problem, Softmax) else "online"


def space(problem: Problem, machine: Machine) -> Table:
    return {"chunk": CHUNK, "simd": LANES} if algorithm(problem) == "online" else {"simd": LANES}


def default(problem: Problem, machine: Machine) -> Decisions:
    return {"chunk": 1024, "simd": 32} if algorithm(problem) == "online" else {"simd": 32}


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    from ..device.arithmetic import exp_any, exp_nonpositive

    vocab, dtype, how = problem.vocab, problem.dtype, algorithm(problem)
    lanes = decisions["simd"]
    chunk = decisions.get("chunk", vocab)
    whole = vocab // lanes  # vectors
    step = max(chunk // lanes, 1)  # vectors a chunk
    chunks = -(-whole // step)
    scalars = whole * lanes  # the first element that no vector covers
    halvings = lanes.bit_length() - 1
    lowest, highest = T.min_value("float32"), T.max_value("float32")
    softmax = isinstance(problem, Softmax)
    # Of logsumexp plus infinity exceeds the maximum, which is finite.
    exp = exp_nonpositive if softmax and how != "naive" else exp_any

    # fmt: off
    @T.inline
    def vector_max(X, row, first, count, top, fold):
        """`fold[0]`: the maximum of vectors first to first + count."""
        for lane in T.vectorized(lanes):
            top[lane] = lowest
        for u in range(count):
            for lane in T.vectorized(lanes):
                top[lane] = T.max(top[lane], T.Cast("float32", X[row, (first + u) * lanes + lane]))
        # By halving, in vectors; lanes past the half only repeat a comparison.
        for lane in T.vectorized(lanes):
            fold[lane] = top[lane]
        for h in T.unroll(halvings):
            for lane in T.vectorized(lanes // 2):
                fold[lane] = T.max(fold[lane], fold[lane + (lanes >> (h + 1))])

    @T.inline
    def add_exponentials(X, row, first, count, m, part):
        for u in range(count):
            for lane in T.vectorized(lanes):
                part[lane] = part[lane] + exp(T.Cast("float32", X[row, (first + u) * lanes + lane]) - m[0])

    @T.inline
    def normaliser(X, row, m, d, top, part, fold):
        """(m, d) of the row; m is 0 for the naive algorithm."""
        for lane in T.vectorized(lanes):
            part[lane] = T.float32(0)
        if how == "naive":
            m[0] = T.float32(0)
            add_exponentials(X, row, 0, whole, m, part)
        elif how == "safe":
            vector_max(X, row, 0, whole, top, fold)
            m[0] = fold[0]
            for i in range(vocab - scalars):
                m[0] = T.max(m[0], T.Cast("float32", X[row, scalars + i]))
            add_exponentials(X, row, 0, whole, m, part)
        else:
            # What no vector covers comes first: its maximum needs no rescaling.
            m[0] = lowest
            for i in range(vocab - scalars):
                m[0] = T.max(m[0], T.Cast("float32", X[row, scalars + i]))
            if not softmax:
                m[0] = T.min(m[0], highest)
            for c in range(chunks):
                vector_max(X, row, c * step, T.min(step, whole - c * step), top, fold)
                if not softmax:
                    # Finite, so that plus infinity makes the sum infinite and not NaN.
                    fold[0] = T.min(fold[0], highest)
                if fold[0] > m[0]:
                    for lane in T.vectorized(lanes):
                        part[lane] = part[lane] * T.exp(m[0] - fold[0])
                    m[0] = fold[0]
                add_exponentials(X, row, c * step, T.min(step, whole - c * step), m, part)
        d[0] = T.float32(0)
        for i in range(vocab - scalars):
            d[0] = d[0] + T.exp(T.Cast("float32", X[row, scalars + i]) - m[0])
        for lane in range(lanes):
            d[0] = d[0] + part[lane]

    if softmax:

        @T.prim_func(s_tir=True)
        def main(logits_h: T.handle, log: T.int32, out_h: T.handle):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            batch = T.int64()
            # Arrays of other libraries are aligned to their elements, no more; unaligned vector accesses cost nothing.
            X = T.match_buffer(logits_h, (batch, T.int64(vocab)), dtype, align=2)
            Y = T.match_buffer(out_h, (batch, T.int64(vocab)), dtype, align=2)
            for b in T.parallel(batch):
                with T.sblock("row"):
                    row = T.axis.spatial(batch, b)
                    T.reads(X[row, 0:vocab])
                    T.writes(Y[row, 0:vocab])
                    m = T.sblock_alloc_buffer((1,), "float32")
                    d = T.sblock_alloc_buffer((1,), "float32")
                    top = T.sblock_alloc_buffer((lanes,), "float32")
                    part = T.sblock_alloc_buffer((lanes,), "float32")
                    fold = T.sblock_alloc_buffer((lanes,), "float32")
                    normaliser(X, row, m, d, top, part, fold)
                    if log != 0:
                        d[0] = T.log(d[0])
                        for u in range(whole):
                            for lane in T.vectorized(lanes):
                                Y[row, u * lanes + lane] = T.Cast(
                                    dtype, T.Cast("float32", X[row, u * lanes + lane]) - m[0] - d[0])
                        for i in range(vocab - scalars):
                            Y[row, scalars + i] = T.Cast(dtype, T.Cast("float32", X[row, scalars + i]) - m[0] - d[0])
                    else:
                        d[0] = T.float32(1) / d[0]
                        for u in range(whole):
                            for lane in T.vectorized(lanes):
                                Y[row, u * lanes + lane] = T.Cast(
                                    dtype, exp(T.Cast("float32", X[row, u * lanes + lane]) - m[0]) * d[0])
                        for i in range(vocab - scalars):
                            Y[row, scalars + i] = T.Cast(
                                dtype, T.exp(T.Cast("float32", X[row, scalars + i]) - m[0]) * d[0])

    else:

        @T.prim_func(s_tir=True)
        def main(logits_h: T.handle, out_h: T.handle):
            T.func_attr({"global_symbol": "main", "tirx.noalias": True})
            batch = T.int64()
            X = T.match_buffer(logits_h, (batch, T.int64(vocab)), dtype, align=2)
            Y = T.match_buffer(out_h, (batch,), "float32", align=4)
            for b in T.parallel(batch):
                with T.sblock("row"):
                    row = T.axis.spatial(batch, b)
                    T.reads(X[row, 0:vocab])
                    T.writes(Y[row])
                    m = T.sblock_alloc_buffer((1,), "float32")
                    d = T.sblock_alloc_buffer((1,), "float32")
                    top = T.sblock_alloc_buffer((lanes,), "float32")
                    part = T.sblock_alloc_buffer((lanes,), "float32")
                    fold = T.sblock_alloc_buffer((lanes,), "float32")
                    normaliser(X, row, m, d, top, part, fold)
                    Y[row] = m[0] + T.log(d[0])
    # fmt: on
    return Program(tvm.IRModule({"main": main}))


softmax_rows, logsumexp_rows = (
    Template(
        name=f"{operator}_rows",
        version=1,
        operator=operator,
        kind="llvm",
        summary=f"a thread a row, vector loops, {passes}",
        space=space,
        default=default,
        program=build,
    )
    for operator, passes in (("softmax", "the paper's passes"), ("logsumexp", "one pass in chunks"))
)
