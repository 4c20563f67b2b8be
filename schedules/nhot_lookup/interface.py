"""The signature of an N-hot lookup's programs and their buffers, written once; a body maps them to a machine.

A body is a `T.inline` that takes an `Io`. This module loads the compiler: templates import it when they build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.operators.nhot_lookup.problem import NhotLookup

from ..device.overlap import overlapping
from ..device.state import named


@dataclass(frozen=True)
class Io:
    """The arguments of an N-hot lookup; see the operator's `problem.py` for what they hold.

    `rows`, `nnz` and `vocab` are known when the program runs. `values` must not be read where entries have none: the
    parameter is taken away from the finished function.
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
    def match(cls, problem: NhotLookup, handles: Sequence[tirx.Var], aligned: bool) -> Io:
        """Match the parameters of the function that is being built. `aligned`: to TVM's 64 bytes, else to elements."""
        index, dtype, width = problem.index, problem.dtype, T.int64(problem.width)
        rows, nnz, vocab = (T.int64() for _ in range(3))
        of_index, of_element = (-1, -1) if aligned else (numpy_dtype(index).itemsize, 2)
        for name, extent in (("rows", rows), ("nnz", nnz), ("vocab", vocab)):
            IRBuilder.name(name, extent)
        indptr, indices, values, table, out = handles
        io = cls(
            indptr=T.match_buffer(indptr, (rows + T.int64(1),), index, align=of_index),
            indices=T.match_buffer(indices, (nnz,), index, align=of_index),
            values=T.match_buffer(values, (nnz,), dtype, align=of_element),
            table=T.match_buffer(table, (vocab, width), dtype, align=of_element),
            out=T.match_buffer(out, (rows, width), dtype, align=of_element),
            rows=rows,
            nnz=nnz,
            vocab=vocab,
        )
        return named(io)


def gpu_kernel(problem: NhotLookup, body: Callable[[Io], None], overlap: bool) -> tirx.PrimFunc:
    """The kernel of a body with explicit threads. `overlap`: launched by programmatic dependent launch."""

    @T.prim_func
    def main(indptr_h: T.handle, indices_h: T.handle, values_h: T.handle, table_h: T.handle, out_h: T.handle):
        body(Io.match(problem, (indptr_h, indices_h, values_h, table_h, out_h), True))

    kernel = problem.trimmed(main).with_attr("global_symbol", "main")
    return overlapping(kernel) if overlap else kernel


def cpu_function(problem: NhotLookup, body: Callable[[Io], None]) -> tirx.PrimFunc:
    """The function of a body of blocks and loops. Arrays need no more alignment than their elements have."""

    @T.prim_func(s_tir=True)
    def main(indptr_h: T.handle, indices_h: T.handle, values_h: T.handle, table_h: T.handle, out_h: T.handle):
        T.func_attr({"global_symbol": "main", "tirx.noalias": True})
        body(Io.match(problem, (indptr_h, indices_h, values_h, table_h, out_h), False))

    return problem.trimmed(main)
