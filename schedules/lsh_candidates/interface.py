"""The arguments of CUDA kernels of `lsh_candidates`, written once: a template gives the body. Loads the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.arguments import beside, matched
from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from ..device.overlap import overlapping

MOST_WORKSPACES = 4


def gpu_program(
    problem: LshCandidates,
    body: Callable[[SimpleNamespace], None],
    workspaces: Sequence[Workspace],
    overlapped: bool = False,
) -> Program:
    """The program of kernels whose body is a `T.inline` of the arguments, by the names that the operator declares.

    Beside them there are the extents `lists`, `beam`, `bands`, `slots` and `capacity`, and the workspaces by their
    names, two-dimensional, whose extents are numbers, "lists", "rows" (lists * beam) or "bands". `overlapped`: the
    kernel is started by programmatic dependent launch.
    """

    def with_workspaces(io: SimpleNamespace, handles: Sequence[tirx.Var]) -> SimpleNamespace:
        known = {"lists": io.lists, "rows": io.lists * io.beam, "bands": io.bands}
        held = {
            own.name: T.match_buffer(handle, [known[e] if isinstance(e, str) else e for e in own.shape], own.dtype)
            for own, handle in zip(workspaces, handles, strict=False)
        }
        return beside(io, held)

    # fmt: off
    @T.prim_func
    def main(
        hidden: T.handle, permutations: T.handle, words: T.handle, starts: T.handle, entries: T.handle,
        multipliers: T.handle, always: T.handle, threshold: T.int32, candidates: T.handle, counts: T.handle,
        own0: T.handle, own1: T.handle, own2: T.handle, own3: T.handle
    ):
        lists = T.int32()
        beam = T.int32()
        bands = T.int32()
        slots = T.int32()
        capacity = T.int32()
        io = T.meta_var(matched(
            problem, (hidden, permutations, words, starts, entries, multipliers, always, threshold, candidates, counts),
            {"lists": lists, "beam": beam, "bands": bands, "slots": slots, "capacity": capacity}))
        body(with_workspaces(io, (own0, own1, own2, own3)))
    # fmt: on
    params = list(main.params)[: len(main.params) - MOST_WORKSPACES + len(workspaces)]
    main = problem.trimmed(tirx.PrimFunc(params, main.body, main.ret_type, main.attrs))
    kernel = main.with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": overlapping(kernel) if overlapped else kernel})
    return Program(module, tuple(workspaces), "tirx")
