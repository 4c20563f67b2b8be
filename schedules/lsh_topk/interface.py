"""The arguments of kernels of `lsh_topk`, written once: a template gives the body. Loads the compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.arguments import beside, matched
from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.operators.lsh_topk.problem import LshTopk

from ..device.overlap import overlapping

MOST_WORKSPACES = 7


def _arguments(
    problem: LshTopk, given: Sequence[tirx.Var], own: Sequence[tirx.Var], workspaces: Sequence[Workspace], packed: bool
) -> SimpleNamespace:
    """Arguments and workspaces by name, and the extents `lists`, `beam`, `bands`, `slots` and `most` (of `ids`)."""
    lists, frequent, bands, slots = T.int32(), T.int32(), T.int32(), T.int32()
    io = matched(
        problem, given, {"lists": lists, "frequent": frequent, "bands": bands, "slots": slots}, packed=packed
    )  # fmt: skip
    io = beside(io, {"beam": problem.beam, "vocab": problem.vocab})
    known = {"lists": lists, "bands": bands, "rows": lists * problem.beam, "frequent": frequent}
    held = {}
    for one, handle in zip(workspaces, own, strict=False):
        shape = [known[e] if isinstance(e, str) else e for e in one.shape]
        held[one.name] = T.match_buffer(handle, shape, one.dtype, align=4 if packed else -1)
    return beside(io, held)


def gpu_program(
    problem: LshTopk, body: Callable[[Any], None], workspaces: Sequence[Workspace], overlapped: bool = False
) -> Program:
    """The program of kernels whose body is a `T.inline` of the arguments, by the names that the operator declares.

    Beside them there are the extents `lists`, `beam`, `vocab`, `frequent`, `bands` and `slots`, and the workspaces by
    their names, whose extents are numbers, "lists", "bands", "frequent" or "rows" (lists * beam).
    `overlapped`: kernels are started by programmatic dependent launch.
    """

    # fmt: off
    @T.prim_func
    def main(
        hidden: T.handle, embedding: T.handle, permutations: T.handle, words: T.handle, starts: T.handle,
        entries: T.handle, multipliers: T.handle, always: T.handle, threshold: T.int32, ids: T.handle,
        scale: T.float32, log: T.int32, bias: T.handle, values: T.handle, indices: T.handle, normaliser: T.handle,
        counts: T.handle, own0: T.handle, own1: T.handle, own2: T.handle, own3: T.handle, own4: T.handle,
        own5: T.handle, own6: T.handle
    ):
        body(_arguments(
            problem,
            (hidden, embedding, permutations, words, starts, entries, multipliers, always, threshold, ids, scale, log,
             bias, values, indices, normaliser, counts),
            (own0, own1, own2, own3, own4, own5, own6), workspaces, packed=False))
    # fmt: on
    kernel = _trimmed(problem, main, workspaces)
    module = tvm.IRModule({"main": overlapping(kernel) if overlapped else kernel})
    return Program(module, tuple(workspaces), "tirx")


def cpu_program(problem: LshTopk, body: Callable[[Any], None], workspaces: Sequence[Workspace]) -> Program:
    """The same of a CPU function, whose body is made of blocks (`T.sblock`)."""

    # fmt: off
    @T.prim_func(s_tir=True)
    def main(
        hidden: T.handle, embedding: T.handle, permutations: T.handle, words: T.handle, starts: T.handle,
        entries: T.handle, multipliers: T.handle, always: T.handle, threshold: T.int32, ids: T.handle,
        scale: T.float32, log: T.int32, bias: T.handle, values: T.handle, indices: T.handle, normaliser: T.handle,
        counts: T.handle, own0: T.handle, own1: T.handle, own2: T.handle, own3: T.handle, own4: T.handle,
        own5: T.handle, own6: T.handle
    ):
        T.func_attr({"tirx.noalias": True})
        body(_arguments(
            problem,
            (hidden, embedding, permutations, words, starts, entries, multipliers, always, threshold, ids, scale, log,
             bias, values, indices, normaliser, counts),
            (own0, own1, own2, own3, own4, own5, own6), workspaces, packed=True))
    # fmt: on
    return Program(tvm.IRModule({"main": _trimmed(problem, main, workspaces)}), tuple(workspaces))


def _trimmed(problem: LshTopk, main: tirx.PrimFunc, workspaces: Sequence[Workspace]) -> tirx.PrimFunc:
    params = list(main.params)[: len(main.params) - MOST_WORKSPACES + len(workspaces)]
    main = problem.trimmed(tirx.PrimFunc(params, main.body, main.ret_type, main.attrs))
    return main.with_attr("global_symbol", "main")
