"""Stream compaction on a GPU as a library's copy-if does it, for comparison: a scan to global memory, then a copy.

The template fits any shape, and runs where `bitmap_scan` does not fit.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program, Workspace
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.compaction.problem import Compaction

from ..lsh.plain import plain


def build(problem: Compaction, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from ..device.region import device_region
    from ..interface import gpu_program
    from ..lsh import naive

    scan = naive.scan_bitmap(problem.vocab, decisions["threads"])
    copy = naive.copy_if(problem.vocab, decisions["threads"])

    # fmt: off
    @T.inline
    def body(io):
        with device_region():
            scan(io)
        with device_region():
            copy(io)
    # fmt: on
    return gpu_program(problem, body, (Workspace("places", ("lists", bitmap_words(problem.vocab)), "int32"),))


copy_if = plain(
    name="copy_if",
    version=1,
    operator="compaction",
    summary="a scan to global memory, then a thread a word",
    program=build,
    comparison=True,
)
