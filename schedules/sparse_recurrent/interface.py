"""The arguments of every kernel of the sparse recurrent layer, written once: a template gives the body.

A body is a `T.inline` of one argument, an object whose attributes are the arguments by the names under which the
operator declares them, the extents `steps` and `entries`, and the workspaces by their names:

    @T.inline
    def body(io):
        with device_region():
            ...
            io.output[t, b, unit] = ...

    return gpu_program(problem, body)

This module loads the compiler: templates import it when they build.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.arguments import beside, matched
from tvm_sparse.core.template import Program, Resident, Workspace
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

Body = Callable[[SimpleNamespace], None]
# Workspaces that a program may have.
MOST_WORKSPACES = 3


def gpu_program(
    problem: SparseRecurrent, body: Body, workspaces: Sequence[Workspace] = (), resident: Resident | None = None
) -> Program:
    """The program of CUDA kernels with explicit threads, each in a region of its own (`device_region`).

    `resident`: what of the kernel has to run at the same time; it is launched cooperatively then.
    """

    # fmt: off
    @T.prim_func
    def main(
        units: T.handle, row_start: T.handle, entries_h: T.handle, x_projected: T.handle, h0: T.handle, c0: T.handle,
        hidden_bias: T.handle, lengths: T.handle, resets: T.handle, output: T.handle, h_n: T.handle, c_n: T.handle,
        own0: T.handle, own1: T.handle, own2: T.handle
    ):
        steps = T.int32()
        entries = T.int32()
        body(_arguments(
            problem, (units, row_start, entries_h, x_projected, h0, c0, hidden_bias, lengths, resets, output, h_n, c_n),
            steps, entries, workspaces, (own0, own1, own2), packed=False))
    # fmt: on
    kernel = _finished(problem, main, workspaces)
    if resident is not None:
        kernel = kernel.with_attr("tirx.kernel_launch_params", ["tirx.use_cooperative_launch"])
    return Program(tvm.IRModule({"main": kernel}), tuple(workspaces), pipeline="tirx", resident=resident)


def cpu_program(problem: SparseRecurrent, body: Body) -> Program:
    """The program of a CPU kernel, whose body is made of blocks (`T.sblock`) that TVM lowers and vectorises."""

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(
        units: T.handle, row_start: T.handle, entries_h: T.handle, x_projected: T.handle, h0: T.handle, c0: T.handle,
        hidden_bias: T.handle, lengths: T.handle, resets: T.handle, output: T.handle, h_n: T.handle, c_n: T.handle,
        own0: T.handle, own1: T.handle, own2: T.handle
    ):
        T.func_attr({"tirx.noalias": True})
        steps = T.int32()
        entries = T.int32()
        # Arrays of other libraries are aligned to their elements, no more; unaligned vector loads cost nothing.
        body(_arguments(
            problem, (units, row_start, entries_h, x_projected, h0, c0, hidden_bias, lengths, resets, output, h_n, c_n),
            steps, entries, (), (own0, own1, own2), packed=True))
    # fmt: on
    return Program(tvm.IRModule({"main": _finished(problem, main, ())}))


def _arguments(
    problem: SparseRecurrent,
    parameters: Sequence[tirx.Var],
    steps: tirx.Var,
    entries: tirx.Var,
    workspaces: Sequence[Workspace],
    own: Sequence[tirx.Var],
    packed: bool,
) -> SimpleNamespace:
    symbols = {"steps": steps, "entries": entries}
    io = matched(problem, parameters, symbols, packed)
    held: dict[str, Any] = {}
    for workspace, parameter in zip(workspaces, own, strict=False):
        shape = [symbols[str(e)] if e in symbols else T.int32(problem.extent(e)) for e in workspace.shape]
        held[workspace.name] = T.match_buffer(parameter, shape, workspace.dtype)
    return beside(io, held)


def _finished(problem: SparseRecurrent, main: tirx.PrimFunc, workspaces: Sequence[Workspace]) -> tirx.PrimFunc:
    """`main` without the parameters that the problem's kernels do not have."""
    params = list(main.params)[: len(main.params) - MOST_WORKSPACES + len(workspaces)]
    kernel = problem.trimmed(tirx.PrimFunc(params, main.body, main.ret_type, main.attrs))
    return kernel.with_attr("global_symbol", "main")
