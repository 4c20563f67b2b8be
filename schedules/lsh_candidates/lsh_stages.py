"""Candidate words on a CPU: hash, look-up and compaction one after the other, threads sharing each of them.

Threads take bands of rows to hash, and then slices of the lists' vocabularies to count and to compact.
"""

from __future__ import annotations

from tvm_sparse.core.phase import Phase
from tvm_sparse.core.template import Decisions, Program, ceildiv
from tvm_sparse.formats.bitmap import bitmap_words
from tvm_sparse.operators.lsh_candidates.problem import LshCandidates

from ..lsh.slices import sliced


def stages(problem: LshCandidates, chunk: int) -> Phase:
    """The stages, called with the arguments by name, and `codes` and `chosen` among them."""
    from tvm.script import tirx as T

    from tvm_sparse.operators.compaction.definition import compact
    from tvm_sparse.operators.lsh_lookup.definition import alloc_scratch, look_up_list
    from tvm_sparse.operators.wta_hash.definition import hash_code

    hidden_size, vocab = problem.hidden, problem.vocab
    slices, words = ceildiv(vocab, chunk), bitmap_words(vocab)

    @T.inline
    def set_code(io, row, i, band, s):
        s.code[0] = io.codes[row, i, band]

    make_code = hash_code(problem.k, problem.units, lambda io, row, column: io.hidden[row[0], row[1], column])
    look_up, write = look_up_list(vocab, chunk, problem.table == "cuckoo", set_code), compact(vocab, chunk)

    # fmt: off
    @T.inline
    def body(io):
        for n in T.parallel(io.lists * io.beam):
            with T.sblock("hash"):
                row = T.axis.spatial(io.lists * io.beam, n)
                T.reads(io.hidden[row // io.beam, row % io.beam, 0:hidden_size])
                T.writes(io.codes[row // io.beam, row % io.beam, 0:io.bands])
                s = T.meta_var(alloc_scratch(1))
                for band in range(io.bands):
                    make_code(io, (row // io.beam, row % io.beam), band, s)
                    io.codes[row // io.beam, row % io.beam, band] = s.code[0]
        for n in T.parallel(io.lists * slices):
            with T.sblock("look_up"):
                part = T.axis.spatial(io.lists * slices, n)
                T.reads(io.codes[part // slices, 0:io.beam, 0:io.bands], io.words[0:io.bands, 0:vocab])
                T.writes(io.chosen[part // slices, 0:words])
                s = T.meta_var(alloc_scratch(chunk))
                look_up(io, part // slices, part % slices * chunk, io.chosen, part // slices, s)
        for n in T.parallel(io.lists * slices):
            with T.sblock("compact"):
                part = T.axis.spatial(io.lists * slices, n)
                T.reads(io.chosen[part // slices, 0:words])
                T.writes(io.candidates[part // slices, 0:io.capacity], io.counts[part // slices])
                s = T.meta_var(alloc_scratch(1))
                write(io, io.chosen, part // slices, part // slices, part % slices * chunk, s)
    # fmt: on
    return body


def build(problem: LshCandidates, decisions: Decisions) -> Program:
    from tvm_sparse.core.template import Workspace

    from ..interface import cpu_program

    own = (
        Workspace("codes", ("lists", "beam", "bands"), "int32"),
        Workspace("chosen", ("lists", bitmap_words(problem.vocab)), "int32"),
    )
    return cpu_program(problem, stages(problem, decisions["chunk"]), own, index="int32")


lsh_stages = sliced(
    name="lsh_stages",
    version=2,
    operator="lsh_candidates",
    summary="hash, look-up and compaction one after the other, threads sharing each",
    program=build,
)
