"""The arguments of every softmax_sample kernel: a template gives the body, this the function around it."""

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
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ..device.overlap import overlapping


@dataclass(frozen=True)
class Arguments:
    """What a kernel is called with, by the names under which the operator declares it, and what softmax_topk has too.

    Attributes
    ----------
    problem
        The problem that the kernel is for. A body must not use arguments that the problem lacks.
    batch
        The number of rows, known only at run time: one kernel serves every batch.
    logits, ..., indices
        See `SoftmaxSample.inputs` and `SoftmaxSample.outputs`.
    scale
        The inverse temperature of the row in hand (`softmax_topk.ending.Ending.own`); any number before one is known.
    log
        Values are log-probabilities.
    """

    problem: SoftmaxSample
    batch: Any
    logits: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    temperatures: Any
    top_ks: Any
    top_ps: Any
    min_ps: Any
    bias: Any
    allowed: Any
    uniforms: Any
    seeds: Any
    seed: Any
    offset: Any
    offsets: Any
    tokens: Any
    logprobs: Any
    values: Any
    indices: Any
    scale: Any = 1.0
    log: int = 1

    @property
    def per_row(self) -> bool:
        """Whether each row has temperature and filters of its own."""
        return bool(self.problem.per_row)

    @property
    def seeded(self) -> int:
        """What uniform numbers are made of, see `SoftmaxSample.seeded`; 0 where they are given."""
        return self.problem.seeded

    @classmethod
    def match(
        cls, problem: SoftmaxSample, batch: tirx.Var, parameters: tuple[tirx.Var, ...], packed: bool = False
    ) -> Arguments:
        """Buffers of the declared shapes and dtypes, for the parameters in calling order.

        `packed`: arrays are known to be aligned to their elements and no more, and indices are of `batch`'s type.
        """
        found: dict[str, Any] = {}
        for argument, parameter in zip((*problem.inputs, *problem.outputs), parameters, strict=True):
            if not argument.shape:
                found[argument.name] = parameter
                continue
            dtype = problem.dtype if argument.dtype == "dtype" else argument.dtype
            extents = [axis if axis == "batch" else problem.extent(axis) for axis in argument.shape]
            matched = T.match_buffer(
                parameter,
                tuple(batch if e == "batch" else tirx.const(e, batch.ty.dtype) if packed else e for e in extents),
                dtype,
                align=numpy_dtype(dtype).itemsize if packed else -1,
            )
            IRBuilder.name(argument.name, matched)
            found[argument.name] = matched
        return cls(problem, batch, **found)


def gpu_program(problem: SoftmaxSample, body: Callable[..., Any], overlapped: bool = False) -> Program:
    """The program of a CUDA kernel with explicit threads; `overlapped`: started by programmatic dependent launch."""

    # fmt: off
    @T.prim_func
    def main(
        logits: T.handle, temperature: T.float32, top_k: T.int32, top_p: T.float32, min_p: T.float32,
        temperatures: T.handle, top_ks: T.handle, top_ps: T.handle, min_ps: T.handle, bias: T.handle,
        allowed: T.handle, uniforms: T.handle, seeds: T.handle, seed: T.int64, offset: T.int64, offsets: T.handle,
        tokens: T.handle, logprobs: T.handle, values: T.handle, indices: T.handle
    ):
        batch = T.int32()
        body(Arguments.match(problem, batch, (
            logits, temperature, top_k, top_p, min_p, temperatures, top_ks, top_ps, min_ps, bias, allowed, uniforms,
            seeds, seed, offset, offsets, tokens, logprobs, values, indices)))
    # fmt: on
    return _program(problem, overlapping(main) if overlapped else main, "tirx")


def cpu_program(problem: SoftmaxSample, body: Callable[..., Any]) -> Program:
    """The program of a CPU kernel, whose body is made of blocks (`T.sblock`) that TVM lowers and vectorises."""

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(
        logits: T.handle, temperature: T.float32, top_k: T.int32, top_p: T.float32, min_p: T.float32,
        temperatures: T.handle, top_ks: T.handle, top_ps: T.handle, min_ps: T.handle, bias: T.handle,
        allowed: T.handle, uniforms: T.handle, seeds: T.handle, seed: T.int64, offset: T.int64, offsets: T.handle,
        tokens: T.handle, logprobs: T.handle, values: T.handle, indices: T.handle
    ):
        T.func_attr({"tirx.noalias": True})
        batch = T.int64()
        body(Arguments.match(problem, batch, (
            logits, temperature, top_k, top_p, min_p, temperatures, top_ks, top_ps, min_ps, bias, allowed, uniforms,
            seeds, seed, offset, offsets, tokens, logprobs, values, indices), packed=True))
    # fmt: on
    return _program(problem, main, None)


def _program(problem: SoftmaxSample, main: tirx.PrimFunc, pipeline: str | None) -> Program:
    """`main` without the arguments that the problem lacks."""
    main = problem.trimmed(main).with_attr("global_symbol", "main")
    return Program(tvm.IRModule({"main": main}), (), pipeline)
