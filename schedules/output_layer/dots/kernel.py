"""The kernels of `dots`: scores into a workspace, then the selection of `softmax_topk.radix_select` over each row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.formats.quantized import word_number
from tvm_sparse.operators.candidate_logits.problem import CandidateLogits
from tvm_sparse.operators.head_topk.problem import HeadTopk

from ...device.region import device_region
from ...device.selection import FULL_WARP
from ...device.words import load_element
from ...interface import gpu_program
from ...softmax_topk.elements import write_wanted
from ...softmax_topk.radix_select import kernel as radix
from ..scales import has_cap, head_capped, own_arguments
from ..words import (
    OutputLayer,
    at_row,
    best_of,
    block_of,
    candidates_of,
    groups_of,
    most_words,
    rows_shape,
    stored_of,
    with_scores,
    writes_scores,
)
from . import WARPS

WARP = 32


def program(problem: OutputLayer, threads: int) -> Program:
    """The program of one point of the space."""
    alone = isinstance(problem, CandidateLogits)
    own = (
        ()
        if alone or writes_scores(problem)
        else (Workspace("scores", rows_shape(problem, most_words(problem)), "float32"),)
    )
    return gpu_program(problem, body(problem, threads), own)


@phase
def body(problem, threads, /, given):
    """The kernels, called with the arguments by name."""
    # fmt: off
    alone = T.meta_var(isinstance(problem, CandidateLogits))
    find = T.meta_var(None if alone else select_words(problem, threads))
    io = T.meta_var(with_scores(given))
    score_words(problem)(io, io.logits if alone else io.scores)
    if not alone:
        find(io)


def count_words(io: Any, index: Any) -> Any:
    """How many words a list has."""
    if not candidates_of(io.problem):
        return io.vocab
    return T.max(T.min(io.counts[index], candidates_of(io.problem)), 0) * block_of(io.problem)


def word_at(io: Any, index: Any, position: Any) -> Any:
    """The word at a position of a list; a candidate outside of the vocabulary gives the nearest word."""
    if not candidates_of(io.problem):
        return position
    block = block_of(io.problem)
    unit = T.max(T.min(io.candidates[index, position // block], io.vocab // block - 1), 0)
    return unit * block + position % block


# fmt: off
def number(problem: OutputLayer, io: Any, word: Any, column: Any) -> Any:
    """A number of the embedding, as float32."""
    stored = stored_of(problem)
    if stored:
        found = word_number(stored, io.embedding[word, column])
        groups = groups_of(problem)
        return found * io.group_scales[word, column // (problem.hidden // groups)] if groups else found
    return load_element(problem.dtype, io.embedding.ptr_to([word, column]))


@phase
def score_words(problem, /, io, scores):
    """The first kernel. Reads: hidden states and words. Writes: scores, -inf beyond a list's words."""
    static = T.meta_var(None if isinstance(problem, HeadTopk) else most_words(problem))
    with device_region():
        positions = T.meta_var(io.vocab if static is None else static)
        parts = T.meta_var((positions + (WARPS - 1)) // WARPS)
        block = T.cta_id([io.rows * parts])
        t = T.thread_id([WARPS * WARP])
        index = T.meta_var(block // parts // io.beam)
        row = T.meta_var(block // parts % io.beam)
        position = T.meta_var(block % parts * WARPS + t // WARP)
        if position < positions:
            total: T.float32 = T.float32("-inf")
            if position < count_words(io, index):
                # Offsets into the embedding can exceed 2^31.
                word: T.int64 = T.Cast("int64", word_at(io, index, position))
                total = T.float32(0)
                for i in T.serial((problem.hidden - t % WARP + (WARP - 1)) // WARP):
                    total = total + load_element(
                        problem.dtype, io.hidden.ptr_to(at_row(io, index, row, i * WARP + t % WARP))
                    ) * number(problem, io, word, i * WARP + t % WARP)
                # Not `T.cuda.warp_sum`: with the block's sum of the second kernel it would be defined twice.
                for b in T.unroll(5):
                    total = total + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), total, 1 << b, 32, 32)
                if stored_of(problem) != "" and not groups_of(problem):
                    total = total * io.scales[word]
                if has_cap(io):
                    total = head_capped(io, total)
                if io.bias is not None:
                    total = total + io.bias[word]
            if t % WARP == 0:
                T.buffer_store(scores, total, at_row(io, index, row, position))


def select_words(problem: OutputLayer, threads: int) -> Phase:
    """The second kernel. Reads: scores. Writes: all outputs."""
    k, ids = best_of(problem), getattr(problem, "ids", 0)
    static = None if isinstance(problem, HeadTopk) else most_words(problem)

    def phases(io: Any) -> SimpleNamespace:
        """Those of `radix_select`, and its view of the scores: rows of all lists, and columns."""
        columns = io.vocab if static is None else static
        pitch = most_words(problem)

        def flat(buffer: Any, width: int, dtype: str) -> Any:
            return T.decl_buffer((io.rows, width), dtype, data=buffer.data)

        shown = SimpleNamespace(
            problem=SimpleNamespace(bias=0, allowed=0, capped=0), logits=flat(io.scores, pitch, "float32"),
            values=flat(io.values, k, "float32"), indices=flat(io.indices, k, "int64"),
            normaliser=T.decl_buffer((io.rows,), "float32", data=io.normaliser.data),
            scale=io.scale, log=io.log, ids=io.ids if ids else None, given=io.given if ids else None)
        return SimpleNamespace(
            io=shown, sum_up=radix.sum_row(columns, threads), select=radix.select_pivot(columns, k, threads),
            collect=radix.collect_keys(columns, threads), sort=radix.merge_exchange(k, threads),
            write=radix.write_keys(k, threads), write_given=write_wanted(columns, ids, threads))

    @T.inline
    def name_words(io, shown, row, t):
        """Replace the positions in `indices` by the words there, and by -1 beyond the list's words."""
        for i in T.serial((k - t + (threads - 1)) // threads):
            position: T.int32 = T.Cast("int32", shown.indices[row, i * threads + t])
            index: T.int32 = T.Cast("int32", row) // io.beam
            if position < count_words(io, index):
                shown.indices[row, i * threads + t] = T.Cast("int64", word_at(io, index, position))
            else:
                shown.indices[row, i * threads + t] = T.int64(-1)
                shown.values[row, i * threads + t] = T.Select(io.log != 0, T.float32("-inf"), T.float32(0))

    @T.inline
    def kernel(io):
        with device_region():
            block = T.cta_id([io.rows])
            t = T.thread_id([threads])
            of_row = T.meta_var(own_arguments(io, block))
            do = T.meta_var(phases(of_row))
            s = T.meta_var(radix.State.alloc())
            row: T.int64 = T.Cast("int64", block)
            do.sum_up(do.io, row, t, s)
            do.select(do.io, row, t, s)
            do.collect(do.io, row, t, s)
            do.sort(do.io, row, t, s)
            do.write(do.io, row, t, s)
            if t == 0:
                do.io.normaliser[row] = s.top[0] * of_row.scale + T.log(s.d[0])
            if ids > 0:
                do.write_given(do.io, row, t, s)
            if static is not None:
                name_words(io, do.io, row, t)

    return kernel
# fmt: on
