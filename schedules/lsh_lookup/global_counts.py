"""Look-up on a GPU as Figure 4 (a) has it, for comparison: one thread per bucket, counts in global memory.

A warp takes as long as the longest of its 32 buckets, and neighbouring lanes read words that are far apart. A second
kernel compares the counts with the threshold, and leaves them zero for the next launch. The template fits any shape,
and runs where `shared_counts` does not fit.
"""

from __future__ import annotations

from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.lsh_lookup.problem import LshLookup

from ..lsh.plain import plain


def build(problem: LshLookup, decisions: Decisions) -> Program:
    from tvm.script import tirx as T

    from tvm_sparse.core.arguments import beside
    from tvm_sparse.core.template import Workspace

    from ..device.region import device_region
    from ..interface import gpu_program
    from ..lsh.naive import choose_words, count_in_global_memory

    threads, vocab = decisions["threads"], problem.vocab
    count = count_in_global_memory(problem.table == "cuckoo", threads)
    choose = choose_words(vocab, threads)

    # fmt: off
    @T.inline
    def body(io):
        with device_region():
            codes = T.decl_buffer((io.rows, io.bands), "int32", data=io.codes.data)
            count(beside(io, {"codes": codes}))
        with device_region():
            choose(io)
    # fmt: on
    return gpu_program(problem, body, (Workspace("hits", ("rows", vocab), "int32"),))


global_counts = plain(
    name="global_counts",
    version=1,
    operator="lsh_lookup",
    summary="a thread a bucket, counts in global memory (Figure 4, naive)",
    program=build,
    comparison=True,
)
