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

from collections.abc import Sequence

from tvm.script import tirx as T

from tvm_sparse.core.template import Program, Resident, Workspace
from tvm_sparse.operators.sparse_recurrent.problem import SparseRecurrent

from ..recurrent.interface import Body, arguments, cpu_finished, gpu_finished


def gpu_program(
    problem: SparseRecurrent, body: Body, workspaces: Sequence[Workspace] = (), resident: Resident | None = None
) -> Program:
    """The program of CUDA kernels with explicit threads, see `recurrent.interface.gpu_finished`."""

    # fmt: off
    @T.prim_func
    def main(
        units: T.handle, row_start: T.handle, entries_h: T.handle, x_projected: T.handle, h0: T.handle, c0: T.handle,
        hidden_bias: T.handle, lengths: T.handle, resets: T.handle, output: T.handle, h_n: T.handle, c_n: T.handle,
        own0: T.handle, own1: T.handle, own2: T.handle
    ):
        steps = T.int32()
        entries = T.int32()
        body(arguments(
            problem, (units, row_start, entries_h, x_projected, h0, c0, hidden_bias, lengths, resets, output, h_n, c_n),
            {"steps": steps, "entries": entries}, workspaces, (own0, own1, own2)))
    # fmt: on
    return gpu_finished(problem, main, workspaces, resident)


def cpu_program(problem: SparseRecurrent, body: Body) -> Program:
    """The program of a CPU kernel, see `recurrent.interface.cpu_finished`."""

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
        body(arguments(
            problem, (units, row_start, entries_h, x_projected, h0, c0, hidden_bias, lengths, resets, output, h_n, c_n),
            {"steps": steps, "entries": entries}, packed=True))
    # fmt: on
    return cpu_finished(problem, main)
