"""Winner-take-all hashing on a CPU: rows side by side in a SIMD vector, each column of theirs one load.

A task takes as many rows as a vector has elements, and some bands. It lays its rows out column by column, in float32;
a comparison of the operator's definition is then one of vectors, without a gather. Where there are fewer rows than
that, the last one fills the vector.
"""

from __future__ import annotations

from tvm_sparse.core.machine import Machine
from tvm_sparse.core.template import Decisions, Program, Table, Template, ceildiv, powers
from tvm_sparse.formats.wta import index_bits
from tvm_sparse.operators.wta_hash.problem import WtaHash

# Bands per task: with fewer, more time goes into the layout of a task's rows.
CHUNK = powers(64, 1024)
# Rows per task.
SIMD = (8, 16, 32)
# Tasks that one thread can handle in the time in which others wake up.
FEW = 2


def space(problem: WtaHash, machine: Machine) -> Table:
    return {"chunk": tuple(c for c in CHUNK if c == CHUNK[0] or c < 2 * problem.bands), "simd": SIMD}


def default(problem: WtaHash, machine: Machine) -> Decisions:
    return {"chunk": max(c for c in space(problem, machine)["chunk"] if c <= 512), "simd": 8}


def build(problem: WtaHash, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device.loops import in_parallel
    from ..interface import cpu_program

    k, units, hidden, bits = problem.k, problem.units, problem.hidden, index_bits(problem.k)
    chunk, simd = decisions["chunk"], decisions["simd"]

    # fmt: off
    @T.inline
    def work(io, number):
        with T.sblock("task"):
            task = T.axis.spatial(ceildiv(io.batch, simd) * ceildiv(io.bands, chunk), number)
            g = T.meta_var(task // ceildiv(io.bands, chunk))
            p = T.meta_var(task % ceildiv(io.bands, chunk))
            T.reads(io.hidden[0:io.batch, 0:hidden], io.permutations[0:io.bands, 0:units, 0:k])
            T.writes(io.codes[0:io.batch, 0:io.bands])
            columns = T.sblock_alloc_buffer((hidden * simd,), "float32")
            value = T.sblock_alloc_buffer((simd,), "float32")
            best = T.sblock_alloc_buffer((simd,), "float32")
            place = T.sblock_alloc_buffer((simd,), "int32")
            code = T.sblock_alloc_buffer((simd,), "int32")
            for lane in range(simd):
                for column in range(hidden):
                    columns[column * simd + lane] = T.Cast(
                        "float32", io.hidden[T.min(g * simd + lane, io.batch - 1), column])
            for w in range(T.min(chunk, io.bands - p * chunk)):
                for lane in T.vectorized(simd):
                    code[lane] = 0
                for u in range(units):
                    # A comparison with NaN is false, and the first value is -inf: NaN counts as -inf.
                    for lane in T.vectorized(simd):
                        best[lane] = T.float32("-inf")
                    for lane in T.vectorized(simd):
                        place[lane] = 0
                    for j in range(k):
                        for lane in T.vectorized(simd):
                            value[lane] = columns[
                                T.Cast("int32", io.permutations[p * chunk + w, u, j]) * simd + lane]
                        for lane in T.vectorized(simd):
                            place[lane] = T.Select(value[lane] > best[lane], j, place[lane])
                        for lane in T.vectorized(simd):
                            best[lane] = T.Select(value[lane] > best[lane], value[lane], best[lane])
                    for lane in T.vectorized(simd):
                        code[lane] = (code[lane] << bits) | place[lane]
                for lane in range(T.min(simd, io.batch - g * simd)):
                    io.codes[g * simd + lane, p * chunk + w] = code[lane]

    # fmt: on
    parts = in_parallel(work, lambda io: ceildiv(io.batch, simd) * ceildiv(io.bands, chunk), FEW)
    return cpu_program(problem, parts, index="int32")


hash_rows = Template(
    name="hash_rows",
    version=2,
    operator="wta_hash",
    kind="llvm",
    summary="rows side by side in vectors, threads take rows and bands",
    space=space,
    default=default,
    program=build,
)
