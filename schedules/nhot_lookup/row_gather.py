"""N-hot lookup on a CPU: a thread takes rows of the output, vectors run along the columns of the table.

A row is computed `chunk` columns at a time: their sums stay in registers while the entries of the row are gone
through, so that each row of the table that is looked up is read once, and the output is written once.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Decisions, Program, Table, Template, powers

# Columns whose sums are held at once: 256 fill half of the 32 registers of AVX-512.
CHUNK = powers(16, 256)


def space(problem: Problem, machine: Machine) -> Table:
    return {"chunk": tuple(c for c in CHUNK if c == CHUNK[0] or c <= problem.width)}


def default(problem: Problem, machine: Machine) -> Decisions:
    return {"chunk": max(c for c in space(problem, machine)["chunk"] if c <= 128)}


def build(problem: Problem, decisions: Decisions) -> Program:
    import tvm
    from tvm.script import tirx as T

    width, dtype, index, weighted = problem.width, problem.dtype, problem.index, bool(problem.weighted)
    chunk = decisions["chunk"]
    whole = width // chunk
    rest = width % chunk
    alignment = 4 if index == "int32" else 8

    # fmt: off
    @T.inline
    def sum_columns(indptr, indices, values, table, out, acc, row, base, columns):
        """`columns` sums from column `base` on."""
        for v in T.vectorized(columns):
            acc[v] = T.float32(0)
        for e in range(T.Cast("int64", indptr[row + 1]) - T.Cast("int64", indptr[row])):
            for v in T.vectorized(columns):
                if weighted:
                    acc[v] = acc[v] + T.Cast("float32", values[T.Cast("int64", indptr[row]) + e]) * T.Cast(
                        "float32", table[T.Cast("int64", indices[T.Cast("int64", indptr[row]) + e]), base + v])
                else:
                    acc[v] = acc[v] + T.Cast(
                        "float32", table[T.Cast("int64", indices[T.Cast("int64", indptr[row]) + e]), base + v])
        for v in T.vectorized(columns):
            out[row, base + v] = T.Cast(dtype, acc[v])

    @T.prim_func(s_tir=True)
    def main(indptr_h: T.handle, indices_h: T.handle, values_h: T.handle, table_h: T.handle, out_h: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        rows = T.int64()
        nnz = T.int64()
        vocab = T.int64()
        # Arrays of other libraries are aligned to their elements, no more; unaligned vector loads cost nothing.
        indptr = T.match_buffer(indptr_h, (rows + T.int64(1),), index, align=alignment)
        indices = T.match_buffer(indices_h, (nnz,), index, align=alignment)
        values = T.match_buffer(values_h, (nnz,), dtype, align=2)
        table = T.match_buffer(table_h, (vocab, T.int64(width)), dtype, align=2)
        out = T.match_buffer(out_h, (rows, T.int64(width)), dtype, align=2)
        for r in T.parallel(rows):
            with T.sblock("row"):
                row = T.axis.spatial(rows, r)
                T.reads(indptr[row : row + 2], indices[0:nnz], table[0:vocab, 0:width])
                T.writes(out[row, 0:width])
                acc = T.sblock_alloc_buffer((chunk,), "float32")
                for c in range(whole):
                    sum_columns(indptr, indices, values, table, out, acc, row, c * chunk, chunk)
                if rest > 0:
                    sum_columns(indptr, indices, values, table, out, acc, row, whole * chunk, rest)
    # fmt: on
    return Program(tvm.IRModule({"main": problem.trimmed(main)}))


row_gather = Template(
    name="row_gather",
    version=1,
    operator="nhot_lookup",
    kind="llvm",
    summary="a thread a row, sums of neighbouring columns in vectors",
    space=space,
    default=default,
    program=build,
)
