"""The arguments of every softmax_topk kernel, written once: a template gives the body, this the function around it.

A body is a `T.inline` of one argument, the kernel's `Arguments`:

    @T.inline
    def body(io):
        T.device_entry()
        row = T.cta_id([io.batch])
        ...
        io.values[row, 0] = ...

    return gpu_program(problem, body)
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
from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ..device.overlap import overlapping

# What buffers are called in emitted code. The code generator puts a kernel's parameters in the order of these names, so
# that other names mean other machine code.
EMITTED = {
    "logits": "X",
    "bias": "B",
    "ids": "ids",
    "values": "V",
    "indices": "Z",
    "given": "G",
    "probabilities": "P",
}


@dataclass(frozen=True)
class Arguments:
    """What a kernel is called with: buffers and scalars, by the names under which the operator declares them.

    Attributes
    ----------
    problem
        The problem that the kernel is for. What it lacks (`bias`, or `ids` and `given`) must not be touched.
    batch
        The number of rows, known only at run time: one kernel serves every batch.
    logits, scale, log, bias, ids, values, indices, given
        See `SoftmaxTopk.inputs` and `SoftmaxTopk.outputs`.
    workspace
        The template's own buffer, or None.
    """

    problem: SoftmaxTopk
    batch: Any
    logits: Any
    scale: Any
    log: Any
    bias: Any
    ids: Any
    values: Any
    indices: Any
    given: Any
    workspace: Any = None

    @classmethod
    def match(
        cls,
        problem: SoftmaxTopk,
        batch: tirx.Var,
        parameters: tuple[tirx.Var, ...],
        workspace: Workspace | None = None,
        packed: bool = False,
    ) -> Arguments:
        """Buffers of the declared shapes and dtypes, for the parameters in calling order, the workspace's behind them.

        `packed`: arrays are known to be aligned to their elements and no more, and indices are of `batch`'s type.
        """

        def buffer(name: str, shape: tuple[int | str, ...], dtype: str, parameter: tirx.Var) -> Any:
            extents = [problem.axes[axis] if isinstance(axis, str) and axis != "batch" else axis for axis in shape]
            matched = T.match_buffer(
                parameter,
                tuple(batch if e == "batch" else tirx.const(e, batch.ty.dtype) if packed else e for e in extents),
                dtype,
                align=numpy_dtype(dtype).itemsize if packed else -1,
            )
            IRBuilder.name(EMITTED.get(name, name), matched)
            return matched

        found: dict[str, Any] = {}
        for argument, parameter in zip((*problem.inputs, *problem.outputs), parameters[:-1], strict=True):
            dtype = problem.dtype if argument.dtype == "dtype" else argument.dtype
            shaped = bool(argument.shape)
            found[argument.name] = buffer(argument.name, argument.shape, dtype, parameter) if shaped else parameter
        if workspace is not None:
            found["workspace"] = buffer(workspace.name, workspace.shape, workspace.dtype, parameters[-1])
        return cls(problem, batch, **found)


def gpu_program(
    problem: SoftmaxTopk, body: Callable[..., Any], overlapped: bool = False, workspace: Workspace | None = None
) -> Program:
    """The program of a CUDA kernel with explicit threads.

    `overlapped`: it is started by programmatic dependent launch, and `body` waits for its producer kernel
    (`overlap.wait_then_start_consumer`) before it touches an argument. `workspace`: a buffer of the template's own.
    """

    # fmt: off
    @T.prim_func
    def main(
        logits: T.handle, scale: T.float32, log: T.int32, bias: T.handle, ids: T.handle,
        values: T.handle, indices: T.handle, given: T.handle, own: T.handle
    ):
        batch = T.int32()
        body(Arguments.match(
            problem, batch, (logits, scale, log, bias, ids, values, indices, given, own), workspace))
    # fmt: on
    return _program(problem, main, overlapped, workspace, pipeline="tirx")


def cpu_program(problem: SoftmaxTopk, body: Callable[..., Any]) -> Program:
    """The program of a CPU kernel, whose body is made of blocks (`T.sblock`) that TVM lowers and vectorises."""

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(
        logits: T.handle, scale: T.float32, log: T.int32, bias: T.handle, ids: T.handle,
        values: T.handle, indices: T.handle, given: T.handle, own: T.handle
    ):
        T.func_attr({"tirx.noalias": True})
        batch = T.int64()
        # Arrays of other libraries are aligned to their elements, no more; unaligned vector loads cost nothing.
        body(Arguments.match(
            problem, batch, (logits, scale, log, bias, ids, values, indices, given, own), packed=True))
    # fmt: on
    return _program(problem, main)


def _program(
    problem: SoftmaxTopk,
    main: tirx.PrimFunc,
    overlapped: bool = False,
    workspace: Workspace | None = None,
    pipeline: str | None = None,
) -> Program:
    """`main` without the arguments that the problem lacks, and without its last one if there is no workspace."""
    if workspace is None:
        main = tirx.PrimFunc(list(main.params)[:-1], main.body, main.ret_type, main.attrs)
    main = problem.trimmed(main).with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": overlapping(main) if overlapped else main})
    return Program(module, (workspace,) if workspace else (), pipeline)
