"""The arguments of every CUDA kernel of `lsh_lookup`, written once: a template gives the body. Loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import tvm
from tvm.script import tirx as T

from tvm_sparse.core.arguments import beside, matched
from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from ..device.overlap import overlapping


def gpu_program(
    problem: LshLookup, body: Callable[[SimpleNamespace], None], workspace: Workspace, overlapped: bool = False
) -> Program:
    """The program of a kernel whose body is a `T.inline` of the arguments, by the names that the operator declares.

    Beside them there are the extents `lists`, `beam`, `bands` and `slots`, `rows` = lists * beam, and the workspace by
    its name, whose first extent is "lists" or "rows". `overlapped`: the kernel is started by programmatic dependent
    launch.
    """
    first, *rest = workspace.shape

    # fmt: off
    @T.prim_func
    def main(
        codes: T.handle, words: T.handle, starts: T.handle, entries: T.handle, multipliers: T.handle,
        always: T.handle, threshold: T.int32, chosen: T.handle, own: T.handle
    ):
        lists = T.int32()
        beam = T.int32()
        bands = T.int32()
        slots = T.int32()
        io = T.meta_var(matched(
            problem, (codes, words, starts, entries, multipliers, always, threshold, chosen),
            {"lists": lists, "beam": beam, "bands": bands, "slots": slots}))
        held = T.match_buffer(own, [lists if first == "lists" else lists * beam, *rest], workspace.dtype)
        body(beside(io, {workspace.name: held, "rows": lists * beam}))
    # fmt: on
    kernel = problem.trimmed(main).with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": overlapping(kernel) if overlapped else kernel})
    return Program(module, (workspace,), "tirx")
