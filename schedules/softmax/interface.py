"""The arguments of every kernel of softmax and logsumexp that is written in TIR: declared once, mapped by a body.

A body is a `T.inline` of one argument, the kernel's `Arguments`:

    @T.inline
    def body(io):
        T.device_entry()
        row = T.cta_id([io.batch])
        ...

    return gpu_program(problem, body)

Templates import this module when they build a program: it loads the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import Program
from tvm_sparse.operators.softmax.problem import Softmax

from .problems import RowProblem


@dataclass(frozen=True)
class Arguments:
    """What a kernel is called with.

    Attributes
    ----------
    logits
        `(batch, vocab)`, of the problem's dtype.
    log
        Softmax: int32, nonzero for log-probabilities. A body of logsumexp must not use it.
    out
        Softmax: probabilities, as the logits. Logsumexp: values, `(batch,)` of float32.
    batch
        The number of rows, known when the kernel runs: one kernel serves every batch.
    """

    logits: Any
    log: Any
    out: Any
    batch: Any

    @classmethod
    def match(cls, problem: RowProblem, parameters: tuple[Any, Any, Any], batch: Any, aligned: bool) -> Arguments:
        """Match the parameters of the function that is being built.

        `aligned`: arrays begin at multiples of TVM's 64 bytes; else they are aligned to their elements and no more.
        """
        logits, log, out = parameters
        vocab = tirx.const(problem.vocab, batch.ty.dtype)

        def buffer(name: str, parameter: Any, shape: tuple[Any, ...], dtype: str) -> Any:
            matched = T.match_buffer(parameter, shape, dtype, align=-1 if aligned else numpy_dtype(dtype).itemsize)
            IRBuilder.name(name, matched)
            return matched

        # Parameters of the emitted kernel are sorted by these names.
        X = buffer("X", logits, (batch, vocab), problem.dtype)
        if isinstance(problem, Softmax):
            return cls(X, log, buffer("Y", out, (batch, vocab), problem.dtype), batch)
        return cls(X, log, buffer("Y", out, (batch,), "float32"), batch)


def gpu_program(problem: RowProblem, body: Callable[[Arguments], None]) -> Program:
    """The program of a CUDA kernel with explicit threads."""

    @T.prim_func
    def main(logits: T.handle, log: T.int32, out: T.handle):
        batch = T.int32()
        body(Arguments.match(problem, (logits, log, out), batch, True))

    return _program(problem, main, "tirx")


def cpu_program(problem: RowProblem, body: Callable[[Arguments], None]) -> Program:
    """The program of a CPU kernel, whose body is made of blocks (`T.sblock`) that TVM lowers."""

    @T.prim_func(s_tir=True)
    def main(logits: T.handle, log: T.int32, out: T.handle):
        T.func_attr({"tirx.noalias": True})
        batch = T.int64()
        # Arrays of other libraries are aligned to their elements; unaligned vector accesses cost nothing.
        body(Arguments.match(problem, (logits, log, out), batch, False))

    return _program(problem, main, None)


def _program(problem: RowProblem, main: tirx.PrimFunc, pipeline: str | None) -> Program:
    """`main`, without `log` if the problem has no such argument."""
    if not isinstance(problem, Softmax):
        logits, _, out = main.params
        main = tirx.PrimFunc([logits, out], main.body, main.ret_type, main.attrs)
    return Program(tvm.IRModule({"main": main.with_attr("global_symbol", "main")}), pipeline=pipeline)
