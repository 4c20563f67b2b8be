"""What interfaces of recurrent layers share: a layer's own one has the signature of its kernels' function.

A body is a `T.inline` of one argument, an object whose attributes are the arguments by the names under which the
operator declares them, the extents that are known only when it runs, and the workspaces by their names.

This module loads the compiler: templates import it when they build.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.arguments import beside, matched
from tvm_sparse.core.template import Program, Resident, Workspace
from tvm_sparse.operators.sparse_recurrent.problem import RecurrentLayer

Body = Callable[[SimpleNamespace], None]
# Workspaces that a program may have.
MOST_WORKSPACES = 3


def arguments(
    problem: RecurrentLayer,
    parameters: Sequence[tirx.Var],
    symbols: Mapping[str, tirx.Var],
    workspaces: Sequence[Workspace] = (),
    own: Sequence[tirx.Var] = (),
    packed: bool = False,
) -> SimpleNamespace:
    """The object that a body takes, from parameters of a function; `own`: those of workspaces."""
    io = matched(problem, parameters, symbols, packed)
    held: dict[str, Any] = {}
    for workspace, parameter in zip(workspaces, own, strict=False):
        shape = [symbols[str(e)] if e in symbols else T.int32(problem.extent(e)) for e in workspace.shape]
        held[workspace.name] = T.match_buffer(parameter, shape, workspace.dtype)
    return beside(io, held)


def gpu_finished(
    problem: RecurrentLayer, main: tirx.PrimFunc, workspaces: Sequence[Workspace], resident: Resident | None
) -> Program:
    """The program of `main`, kernels with explicit threads, each in a region of its own (`device_region`).

    `resident`: what of the kernel has to run at the same time; it is launched cooperatively then.
    """
    kernel = _finished(problem, main, workspaces)
    if resident is not None:
        kernel = kernel.with_attr("tirx.kernel_launch_params", ["tirx.use_cooperative_launch"])
    return Program(tvm.IRModule({"main": kernel}), tuple(workspaces), pipeline="tirx", resident=resident)


def cpu_finished(problem: RecurrentLayer, main: tirx.PrimFunc) -> Program:
    """The program of `main`, a CPU kernel whose body is made of blocks (`T.sblock`) that TVM lowers and vectorises."""
    return Program(tvm.IRModule({"main": _finished(problem, main, ())}))


def _finished(problem: RecurrentLayer, main: tirx.PrimFunc, workspaces: Sequence[Workspace]) -> tirx.PrimFunc:
    """`main` without the parameters that the problem's kernels do not have."""
    params = list(main.params)[: len(main.params) - MOST_WORKSPACES + len(workspaces)]
    kernel = problem.trimmed(tirx.PrimFunc(params, main.body, main.ret_type, main.attrs))
    return kernel.with_attr("global_symbol", "main")
