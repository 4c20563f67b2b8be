"""Candidate words on a GPU by one plain kernel per step, through global memory: for comparison.

One thread per code; one per bucket, with counts in global memory; one for 32 words to compare with the threshold; a
scan; and one thread per word. Shi, Xu & Knight compare their optimised steps with these. The template fits any shape,
and runs where `row_clusters` does not fit.
"""

from __future__ import annotations

from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from ..lsh.plain import plain


def steps(problem: LshCandidates, threads: int) -> Phase:
    """The kernels, called with the arguments by name, and the workspaces `codes`, `hits`, `chosen` and `places`."""
    from tvm.script import tirx as T

    from tvm_sparse.core.arguments import beside

    from ..device.region import device_region
    from ..lsh import naive

    vocab = problem.vocab
    hashed = naive.hash_elements(
        problem.k, problem.units, threads, lambda io, row, column: io.hidden[row // io.beam, row % io.beam, column]
    )
    count = naive.count_in_global_memory(problem.table == "cuckoo", threads)
    choose, scan = naive.choose_words(vocab, threads), naive.scan_bitmap(vocab, threads)
    copy = naive.copy_if(vocab, threads)

    # fmt: off
    @T.inline
    def body(given):
        io = T.meta_var(beside(given, {"rows": given.lists * given.beam}))
        with device_region():
            hashed(io)
        with device_region():
            count(io)
        with device_region():
            choose(io)
        with device_region():
            scan(io)
        with device_region():
            copy(io)
    # fmt: on
    return body


def build(problem: LshCandidates, decisions: Decisions) -> Program:
    from tvm_sparse.core.template import Workspace

    from ..interface import gpu_program

    vocab, words = problem.vocab, bitmap_words(problem.vocab)
    return gpu_program(
        problem,
        steps(problem, decisions["threads"]),
        (
            Workspace("codes", ("rows", "bands"), "int32"),
            Workspace("hits", ("rows", vocab), "int32"),
            Workspace("chosen", ("lists", words), "int32"),
            Workspace("places", ("lists", words), "int32"),
        ),
    )


plain_steps = plain(
    name="plain_steps",
    version=1,
    operator="lsh_candidates",
    summary="a plain kernel a step, through global memory",
    program=build,
    comparison=True,
)
