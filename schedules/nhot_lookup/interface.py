"""The arguments of every N-hot lookup kernel, written once: a template gives the body, this the function around it.

A body is a `T.inline` of one argument, the kernel's `Arguments`:

    @T.inline
    def body(io):
        T.device_entry()
        ...
        io.out[row, column] = ...

    return gpu_program(problem, body)

This module loads the compiler: templates import it when they build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Program
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

from ..device.overlap import overlapping
from ..device.state import named


@dataclass(frozen=True)
class Arguments:
    """What a kernel is called with: buffers by the names under which the operator declares them, and their extents.

    `rows`, `nnz` and `vocab` are known only at run time: one kernel serves all. Without values `values` must not be
    touched: the finished function does not have it.
    """

    indptr: tirx.Buffer  # (rows + 1,)
    indices: tirx.Buffer  # (nnz,)
    values: tirx.Buffer  # (nnz,)
    table: tirx.Buffer  # (vocab, width)
    out: tirx.Buffer  # (rows, width)
    rows: tirx.Var
    nnz: tirx.Var
    vocab: tirx.Var

    @classmethod
    def match(cls, problem: NhotLookup, handles: Sequence[tirx.Var], packed: bool = False) -> Arguments:
        """Buffers of the declared shapes and dtypes, for the parameters of the function that is being built.

        `packed`: arrays are known to be aligned to their elements and no more; else as TVM aligns them.
        """
        index, dtype, width = problem.index, problem.dtype, T.int64(problem.width)
        rows, nnz, vocab = (T.int64() for _ in range(3))
        sizes = (numpy_dtype(one).itemsize if packed else -1 for one in (index, dtype, problem.value_dtype))
        of_index, of_element, of_value = sizes
        for name, extent in (("rows", rows), ("nnz", nnz), ("vocab", vocab)):
            IRBuilder.name(name, extent)
        indptr, indices, values, table, out = handles
        io = cls(
            indptr=T.match_buffer(indptr, (rows + T.int64(1),), index, align=of_index),
            indices=T.match_buffer(indices, (nnz,), index, align=of_index),
            values=T.match_buffer(values, (nnz,), problem.value_dtype, align=of_value),
            table=T.match_buffer(table, (vocab, width), dtype, align=of_element),
            out=T.match_buffer(out, (rows, width), dtype, align=of_element),
            rows=rows,
            nnz=nnz,
            vocab=vocab,
        )
        return named(io)


def gpu_program(problem: NhotLookup, body: Callable[[Arguments], None], overlapped: bool = False) -> Program:
    """The program of a CUDA kernel with explicit threads.

    `overlapped`: it is started by programmatic dependent launch, and `body` waits for its producer kernel
    (`overlap.wait_for_producer`) before it relies on what an argument holds.
    """

    @T.prim_func
    def main(indptr_h: T.handle, indices_h: T.handle, values_h: T.handle, table_h: T.handle, out_h: T.handle):
        body(Arguments.match(problem, (indptr_h, indices_h, values_h, table_h, out_h)))

    kernel = problem.trimmed(main).with_attr("global_symbol", "main")
    return Program(tvm.IRModule({"main": overlapping(kernel) if overlapped else kernel}), pipeline="tirx")


def cpu_program(problem: NhotLookup, body: Callable[[Arguments], None]) -> Program:
    """The program of a CPU kernel, whose body is made of blocks (`T.sblock`) that TVM lowers and vectorises."""

    @T.prim_func(s_tir=True)
    def main(indptr_h: T.handle, indices_h: T.handle, values_h: T.handle, table_h: T.handle, out_h: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        # Arrays of other libraries are aligned to their elements, no more; unaligned vector loads cost nothing.
        body(Arguments.match(problem, (indptr_h, indices_h, values_h, table_h, out_h), packed=True))

    return Program(tvm.IRModule({"main": problem.trimmed(main)}))
