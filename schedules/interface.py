"""Programs of kernels: a template gives the body, and the function around it derives from the operator's declaration.

A body is a `T.inline` of one argument, an object with the kernel's arguments, extents and workspaces by name
(`core.arguments.function`):

    @T.inline
    def body(io):
        T.device_entry()
        row = T.cta_id([io.batch])
        ...
        io.values[row, 0] = ...

    return gpu_program(problem, body)

This module loads the compiler: templates import it when they build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm.script import tirx as T

from tvm_sparse.core.arguments import Body, beside, function
from tvm_sparse.core.problem import Problem
from tvm_sparse.core.template import Program, Resident, Workspace

from .device.overlap import overlapping


def gpu_program(
    problem: Problem,
    body: Body,
    workspaces: Sequence[Workspace] = (),
    *,
    overlapped: bool = False,
    resident: Resident | None = None,
    index: str = "int32",
    names: Mapping[str, str] | None = None,
) -> Program:
    """The program of CUDA kernels with explicit threads: one, or several in regions of their own (`device_region`).

    Parameters
    ----------
    overlapped
        They are started by programmatic dependent launch, and wait for their producer kernels before they touch what
        those may write.
    resident
        What of a cooperative kernel must run at the same time.
    index, names
        As for `core.arguments.function`.
    """
    main = function(problem, scaled(problem, body), workspaces, index=index, names=names)
    if overlapped:
        main = overlapping(main)
    if resident is not None:
        main = main.with_attr("tirx.kernel_launch_params", ["tirx.use_cooperative_launch"])
    return Program(tvm.IRModule({"main": main}), tuple(workspaces), pipeline="tirx", resident=resident)


def cpu_program(
    problem: Problem,
    body: Body,
    workspaces: Sequence[Workspace] = (),
    *,
    instructions: tuple[str, ...] = (),
    index: str = "int64",
    names: Mapping[str, str] | None = None,
) -> Program:
    """The program of a CPU function, whose body consists of SBlocks (`T.sblock`) that TVM lowers and vectorises.

    Arrays of other libraries are aligned to their elements and no more; unaligned vector loads cost nothing.

    Parameters
    ----------
    instructions
        That it uses beyond those of a CPU's level (`Program`).
    index, names
        As for `core.arguments.function`.
    """
    main = function(problem, scaled(problem, body), workspaces, blocks=True, packed=True, index=index, names=names)
    return Program(tvm.IRModule({"main": main}), tuple(workspaces), instructions=instructions)


def scaled(problem: Problem, body: Body) -> Body:
    """The body of a problem with an argument `scale`. Where rows have temperatures instead, that is any number before a
    row's own is known (`softmax_topk.ending.own_of`).
    """
    if not problem.axes.get("per_row") or all(argument.name != "scale" for argument in problem.inputs):
        return body

    @T.inline
    def whole(io):
        body(beside(io, {"scale": 1.0}))

    return whole
