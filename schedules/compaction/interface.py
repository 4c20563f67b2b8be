"""The arguments of every CUDA kernel of `compaction`, written once: a template gives the body. Loads the compiler."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import tvm
from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.arguments import beside, matched
from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.compaction.problem import Compaction

from ..device.overlap import overlapping


def gpu_program(
    problem: Compaction, body: Callable[[SimpleNamespace], None], overlapped: bool = False, with_places: bool = False
) -> Program:
    """The program of a kernel whose body is a `T.inline` of the arguments, by the names that the operator declares.

    Beside them there are the extents `lists` and `capacity`, and with `with_places` a workspace `places`: an int32 for
    each of the bitmaps'. `overlapped`: the kernel is started by programmatic dependent launch.
    """
    words = bitmap_words(problem.vocab)

    # fmt: off
    @T.prim_func
    def main(chosen: T.handle, candidates: T.handle, counts: T.handle, own: T.handle):
        lists = T.int32()
        capacity = T.int32()
        io = T.meta_var(matched(problem, (chosen, candidates, counts), {"lists": lists, "capacity": capacity}))
        if with_places:
            places = T.match_buffer(own, (lists, words), "int32")
            body(beside(io, {"places": places}))
        else:
            body(io)
    # fmt: on
    if not with_places:
        main = tirx.PrimFunc(list(main.params)[:-1], main.body, main.ret_type, main.attrs)
    kernel = main.with_attr("global_symbol", "main")
    module = tvm.IRModule({"main": overlapping(kernel) if overlapped else kernel})
    return Program(module, (Workspace("places", ("lists", words), "int32"),) if with_places else (), "tirx")
