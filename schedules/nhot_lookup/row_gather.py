"""N-hot lookup on a CPU: a thread takes rows of the output, SIMD vectors run along the columns of the table.

A row is computed `chunk` columns at a time. The sums of a chunk stay in registers while the row's entries are gone
through, so each table row that is looked up is read once, and the output is written once.

Long rows are summed `LONG` entries at a time in float32, and these sums are added in float64: the error of any number
of entries is at most (LONG + 1) 2^-24 of the sum of absolute products. One running sum of n entries has n 2^-24. A
maximum is not rounded, so its rows are never long.

With `prefetch` a thread asks for the table row of an entry some entries ahead, also of its next rows: rows of a large
table come from memory, and the processor by itself does not look that far. Few rows are computed by the calling thread:
to wake the others takes longer than the work.
"""

from __future__ import annotations

import math

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Decisions, Program, Table, Template, ceildiv, powers
from tvm_sparse.formats.quantized import word_number
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

# Columns whose sums are held together: 256 float32 fill half of the 32 registers of AVX-512.
CHUNK = powers(16, 256)
# How many entries ahead a thread asks for table rows.
AHEAD = 12
# Entries of one running sum in float32.
LONG = 64
# Bytes of a table up to which its rows come from a processor's last cache soon enough without prefetch.
CACHED = 32 << 20
# Bytes of table rows that one thread goes through in the time in which others would wake up.
FEW_BYTES = 128 * 1024


def space(problem: NhotLookup, machine: Machine) -> Table:
    return {"chunk": tuple(c for c in CHUNK if c == CHUNK[0] or c <= problem.width), "prefetch": (0, 1)}


def default(problem: NhotLookup, machine: Machine) -> Decisions:
    table = problem.vocab * problem.width * numpy_dtype(problem.table_dtype).itemsize
    return {"chunk": max(c for c in space(problem, machine)["chunk"] if c <= 64), "prefetch": int(table > CACHED)}


def build(problem: NhotLookup, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device import llvm_ir
    from ..device.loops import in_parallel
    from ..interface import cpu_program

    width, dtype, weighted = problem.width, problem.dtype, bool(problem.weighted)
    tables = problem.tables
    mean, largest, padded = problem.mode == "mean", problem.mode == "max", bool(problem.padded)
    nothing, stored = -math.inf if largest else 0.0, problem.stored
    chunk, prefetch = decisions["chunk"], decisions["prefetch"] == 1
    whole = width // chunk
    rest = width % chunk
    size = numpy_dtype(problem.table_dtype).itemsize
    few = max(1, FEW_BYTES // (problem.nonzeros * width * size))

    def starts(io):
        """Where rows of entries, or bags of several tables, begin."""
        return io.offsets if tables > 1 else io.indptr

    def lines(io):
        """How many there are."""
        return io.rows * tables if tables > 1 else io.rows

    def table_row(io, row, entry):
        """The row of the table that an entry of a row selects."""
        column = T.Cast("int64", io.indices[entry])
        return column + T.Cast("int64", io.first_rows[row // io.rows]) if tables > 1 else column

    def out_row(io, row):
        """The row of the output that has a row's result."""
        return row % io.rows if tables > 1 else row

    def out_column(io, row, column):
        """And the place of one of its columns there."""
        return row // io.rows * width + column if tables > 1 else column

    def number(io, row, column):
        """A number of the table in float32."""
        found = word_number(stored, io.table[row, column])
        return io.scales[row] * found if stored else found

    def finished(total, real):
        """The result of a sum or maximum of `real[0]` entries."""
        if mean:
            return total / T.Cast("float32", T.max(real[0], T.int64(1)))
        return T.Select(real[0] > T.int64(0), total, T.float32(0)) if largest else total

    def larger(x, y):
        """The larger one, or NaN if one is."""
        return T.Select(T.Or(y > x, T.isnan(y)), y, x)

    # fmt: off
    @T.inline
    def ask_for(io, row, entry, base, columns):
        """Prefetch `columns` columns of the table row of an entry; beyond the last entry, of that one."""
        for line in range(ceildiv(columns * size, llvm_ir.LINE)):
            T.evaluate(llvm_ir.fetch(T.address_of(io.table[
                table_row(io, row, T.min(entry, io.nnz - 1)), base + line * (llvm_ir.LINE // size)]), into=3))

    @T.inline
    def add_entry(io, acc, row, entry, base, columns):
        for v in T.vectorized(columns):
            if weighted:
                acc[v] = acc[v] + T.Cast("float32", io.values[entry]) * number(
                    io, table_row(io, row, entry), base + v)
            elif largest:
                acc[v] = larger(acc[v], number(io, table_row(io, row, entry), base + v))
            else:
                acc[v] = acc[v] + number(io, table_row(io, row, entry), base + v)

    @T.inline
    def add_entries(io, acc, row, first, count, base, columns):
        """Add `count` entries from `first` on to the sums of `columns` columns from column `base` on."""
        for e in range(count):
            if prefetch:
                ask_for(io, row, first + e + AHEAD, base, columns)
            if padded:
                if T.Cast("int64", io.indices[first + e]) != io.padding:
                    add_entry(io, acc, row, first + e, base, columns)
            else:
                add_entry(io, acc, row, first + e, base, columns)

    @T.inline
    def count_entries(io, real, row):
        """How many entries of a row count."""
        if padded:
            real[0] = T.int64(0)
            for e in range(T.Cast("int64", starts(io)[row + 1]) - T.Cast("int64", starts(io)[row])):
                real[0] = real[0] + T.Cast(
                    "int64", T.Cast("int64", io.indices[T.Cast("int64", starts(io)[row]) + e]) != io.padding)
        else:
            real[0] = T.Cast("int64", starts(io)[row + 1]) - T.Cast("int64", starts(io)[row])

    @T.inline
    def sum_columns(io, acc, real, row, base, columns):
        """`columns` sums from column `base` on: one running sum each."""
        for v in T.vectorized(columns):
            acc[v] = T.float32(nothing)
        add_entries(io, acc, row, T.Cast("int64", starts(io)[row]),
                    T.Cast("int64", starts(io)[row + 1]) - T.Cast("int64", starts(io)[row]), base, columns)
        for v in T.vectorized(columns):
            io.out[out_row(io, row), out_column(io, row, base + v)] = T.Cast(dtype, finished(acc[v], real))

    @T.inline
    def sum_columns_of_many(io, acc, total, real, row, base, columns):
        """The sums of a row of more than `LONG` entries: those of `LONG` entries at a time are added in float64."""
        for v in T.vectorized(columns):
            total[v] = T.float64(0)
        for part in range(ceildiv(T.Cast("int64", starts(io)[row + 1]) - T.Cast("int64", starts(io)[row]), LONG)):
            for v in T.vectorized(columns):
                acc[v] = T.float32(0)
            add_entries(io, acc, row, T.Cast("int64", starts(io)[row]) + part * LONG, T.min(
                T.int64(LONG), T.Cast("int64", starts(io)[row + 1]) - T.Cast("int64", starts(io)[row]) - part * LONG),
                base, columns)
            for v in T.vectorized(columns):
                total[v] = total[v] + T.Cast("float64", acc[v])
        for v in T.vectorized(columns):
            if mean:
                total[v] = total[v] / T.Cast("float64", T.max(real[0], T.int64(1)))
            io.out[out_row(io, row), out_column(io, row, base + v)] = T.Cast(dtype, T.Cast("float32", total[v]))

    @T.inline
    def sum_row(io, r):
        with T.sblock("row"):
            row = T.axis.spatial(lines(io), r)
            T.reads(starts(io)[row : row + 2], io.indices[0:io.nnz], io.table[0:io.vocab, 0:width])
            T.writes(io.out[out_row(io, row), 0 : tables * width])
            acc = T.sblock_alloc_buffer((chunk,), "float32")
            real = T.meta_var(T.sblock_alloc_buffer((1,), "int64") if mean or largest else None)
            if mean or largest:
                count_entries(io, real, row)
            if largest or starts(io)[row + 1] - starts(io)[row] <= LONG:
                for c in range(whole):
                    sum_columns(io, acc, real, row, c * chunk, chunk)
                if rest > 0:
                    sum_columns(io, acc, real, row, whole * chunk, rest)
            else:
                with T.sblock("long_row"):
                    T.reads(starts(io)[row : row + 2], io.indices[0:io.nnz], io.table[0:io.vocab, 0:width])
                    T.writes(io.out[out_row(io, row), 0 : tables * width])
                    part = T.sblock_alloc_buffer((chunk,), "float32")
                    total = T.sblock_alloc_buffer((chunk,), "float64")
                    for c in range(whole):
                        sum_columns_of_many(io, part, total, real, row, c * chunk, chunk)
                    if rest > 0:
                        sum_columns_of_many(io, part, total, real, row, whole * chunk, rest)

    # fmt: on
    return cpu_program(problem, in_parallel(sum_row, lines, few), index="int64")


row_gather = Template(
    name="row_gather",
    version=3,
    operator="nhot_lookup",
    kind="llvm",
    summary="a thread a row, sums of neighbouring columns in vectors",
    space=space,
    default=default,
    program=build,
)
