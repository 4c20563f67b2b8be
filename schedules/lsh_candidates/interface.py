"""The arguments of CUDA kernels of `lsh_candidates`, written once: a template gives the body. Loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import tvm
from tvm.script import tirx as T
from tvm.script.ir_builder import IRBuilder

from tvm_sparse.core.arguments import matched
from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from ..device.overlap import overlapping


def gpu_program(problem: LshCandidates, body: Callable[[SimpleNamespace], None], overlapped: bool) -> Program:
    """The program of a kernel whose body is a `T.inline` of the arguments, by the names that the operator declares.

    Beside them there are the extents `lists`, `beam`, `bands`, `slots` and `capacity`, and `workspace`: each list's
    bitmap with its ticket behind it, zero between launches. `overlapped`: the kernel is started by programmatic
    dependent launch.
    """
    words = bitmap_words(problem.vocab)

    # fmt: off
    @T.prim_func
    def main(
        hidden: T.handle, permutations: T.handle, words_h: T.handle, starts: T.handle, entries: T.handle,
        multipliers: T.handle, always: T.handle, threshold: T.int32, candidates: T.handle, counts: T.handle,
        own: T.handle
    ):
        lists = T.int32()
        beam = T.int32()
        bands = T.int32()
        slots = T.int32()
        capacity = T.int32()
        io = T.meta_var(matched(
            problem,
            (hidden, permutations, words_h, starts, entries, multipliers, always, threshold, candidates, counts),
            {"lists": lists, "beam": beam, "bands": bands, "slots": slots, "capacity": capacity}))
        workspace = T.match_buffer(own, (lists, words + 1), "int32")
        body(with_workspace(io, workspace))
    # fmt: on
    kernel = problem.trimmed(main).with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": overlapping(kernel) if overlapped else kernel})
    return Program(module, (Workspace("workspace", ("lists", words + 1), "int32"),), "tirx")


def with_workspace(io: SimpleNamespace, workspace: tvm.tirx.Buffer) -> SimpleNamespace:
    IRBuilder.name("workspace", workspace)
    return SimpleNamespace(**vars(io), workspace=workspace)
