"""The kernel of the output layer on a CPU, in two phases: the product, and a scan of each row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.machine import AVX512_BF16
from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program, Workspace
from tvm_sparse.formats.quantized import word_number
from tvm_sparse.operators.candidate_logits.problem import CandidateLogits
from tvm_sparse.operators.head_topk.problem import HeadTopk, word_size

from ...device import llvm_ir
from ...device.arithmetic import tanh_relative
from ...device.vectors import add_upper_half, halves
from ...interface import cpu_program
from ...softmax_topk.elements import write_given
from ...softmax_topk.ending import own_of, own_on_cpu
from ...softmax_topk.row_scan import kernel as scan
from ...softmax_topk.row_scan.keys import index_of, value_of
from ...softmax_topk.row_scan.space import Extents
from ..scales import has_cap, head_capped
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

# Elements of the scan's chunks and vectors: the defaults of `row_scan`.
CHUNK, LANES = 256, 16


def program(problem: OutputLayer, decisions: Decisions) -> Program:
    alone = isinstance(problem, CandidateLogits)
    words = most_words(problem)
    own = () if alone or writes_scores(problem) else (Workspace("scores", rows_shape(problem, words), "float32"),)
    return cpu_program(problem, body(problem, decisions), own, instructions=(AVX512_BF16,) if decisions["dots"] else ())


@phase
def body(problem, decisions, /, given):
    """Both phases, called with the arguments by name."""
    # fmt: off
    alone = T.meta_var(isinstance(problem, CandidateLogits))
    best = T.meta_var(None if alone else select(problem, most_words(problem)))
    io = T.meta_var(with_scores(given))
    target = T.meta_var(io.logits if alone else io.scores)
    multiply(problem, decisions)(io, target)
    if not alone:
        best(io)


def words_of(io: Any, index: Any) -> tirx.PrimExpr:
    """How many words a list has."""
    if not candidates_of(io.problem):
        return io.vocab
    most, block = candidates_of(io.problem), block_of(io.problem)
    return T.Cast("int64", T.max(T.min(io.counts[index], most), 0)) * T.int64(block)


def word_at(io: Any, index: Any, position: Any) -> tirx.PrimExpr:
    """The word at a position of a list, which must be below `words_of`."""
    if not candidates_of(io.problem):
        return position
    block = block_of(io.problem)
    if block == 1:
        return T.Cast("int64", io.candidates[index, position])
    return T.Cast("int64", io.candidates[index, position // T.int64(block)]) * T.int64(block) + position % T.int64(
        block
    )


class Strip:
    """Neighbouring rows of hidden states of a list; rows beyond the beam repeat the last one."""

    def __init__(self, io: Any, states: Any, index: Any, first: Any) -> None:
        self._io, self._states, self._index, self._first = io, states, index, first

    def __getitem__(self, at: tuple[Any, Any]) -> tirx.PrimExpr:
        row = T.min(self._first + at[0], self._io.beam - 1)
        return tirx.BufferLoad(self._states, at_row(self._io, self._index, row, at[1]))


def bits_of(buffer: Any) -> Any:
    """The same memory as integers of 16 bits."""
    return T.decl_buffer(buffer.shape, "uint16", data=buffer.data, align=2)


def multiply(problem: OutputLayer, decisions: Decisions) -> Phase:
    """Reads: hidden states and words. Writes: `target`, the scores of all positions, -inf beyond a list's words."""
    tile_m, tile_n, simd = decisions["tile_m"], decisions["tile_n"], decisions["simd"]
    ahead, dots = decisions["prefetch"], bool(decisions["dots"])
    # Columns of a step, and those of a cache line.
    step, line = llvm_ir.PAIRED if dots else simd, llvm_ir.LINE // word_size(problem)
    hidden, row_scales = problem.hidden, stored_of(problem) != "" and not groups_of(problem)
    exact_head = isinstance(problem, HeadTopk)
    static = None if exact_head else most_words(problem)

    # fmt: off
    @T.inline
    def find_words(io, at, tiles, words):
        """The words at a tile's positions. Beyond the list's words it takes word 0, whose score is overwritten."""
        for n in range(tile_n):
            if at % tiles * T.int64(tile_n) + T.int64(n) < words_of(io, at // tiles):
                words[n] = word_at(io, at // tiles, at % tiles * T.int64(tile_n) + T.int64(n))
            else:
                words[n] = T.int64(0)

    @T.inline
    def fetch(n, part, word, io, c):
        """Prefetch the cache lines of a step."""
        for of_step in range(max(1, step // line)):
            T.evaluate(llvm_ir.fetch(T.address_of(io.embedding[word, c * step + of_step * line]), into=1))

    @T.inline
    def clear(n, part, word):
        for m in T.unroll(tile_m):
            for lane in T.vectorized(simd):
                part[m, lane] = T.float32(0)

    @T.inline
    def add_products(part, m, embedding, word, rows, column, size):
        """Add the products of `size` columns to the first `size` elements of a vector of sums."""
        for lane in T.vectorized(size):
            part[m, lane] = part[m, lane] + embedding[word, column + lane] * T.Cast("float32", rows[m, column + lane])

    @T.inline
    def add_dots(part, m, embedding, word, rows, column):
        """Add the products of two columns to each element of a vector of sums."""
        part[m, T.ramp(0, 1, simd)] = llvm_ir.bfloat16_dots(
            part[m, T.ramp(0, 1, simd)], embedding[word, T.ramp(column, 1, step)], rows[m, T.ramp(column, 1, step)])

    @T.inline
    def add_step(n, part, word, embedding, rows, c):
        for m in T.unroll(tile_m):
            if dots:
                add_dots(part, m, embedding, word, rows, c * step)
            else:
                add_products(part, m, embedding, word, rows, c * step, simd)

    def join(part, m, embedding, word, rows):
        """Add up a vector's elements, by halves; the products of columns beyond the last whole step join where the
        halves have their size.
        """
        if hidden % step >= simd:
            add_products(part, m, embedding, word, rows, hidden // step * step, simd)
        for size in halves(simd):
            add_upper_half(part, m, size)
            if hidden & size:
                add_products(part, m, embedding, word, rows, hidden // (2 * size) * 2 * size, size)

    @T.inline
    def store(n, part, word, io, target, rows, index, first, positions, row):
        for m in range(tile_m):
            join(part, m, Words(io), word, rows)
            if row_scales:
                part[m, 0] = part[m, 0] * io.scales[word]
            if has_cap(io):
                part[m, 0] = head_capped(io, part[m, 0], tanh_relative)
            if io.bias is not None:
                part[m, 0] = part[m, 0] + io.bias[word]
            if first + T.int64(n) >= words_of(io, index):
                part[m, 0] = T.float32("-inf")
            # Rows that repeat the last one are not stored.
            if row + m < io.beam and first + T.int64(n) < positions:
                T.buffer_store(target, part[m, 0], at_row(io, index, row + m, first + T.int64(n)))

    def of_each(do, parts, words, *given):
        """Call `do` with the sums of each word of a tile, and with the word."""
        for n, part in enumerate(parts):
            do(n, part, words[n], *given)

    @T.inline
    def phase(io, target):
        positions = T.meta_var(io.vocab if exact_head else T.int64(static))
        tiles = T.meta_var((positions + T.int64(tile_n - 1)) // T.int64(tile_n))
        embedding = T.meta_var(bits_of(io.embedding) if dots else Words(io))
        states = T.meta_var(bits_of(io.hidden) if dots else io.hidden)
        for tile in T.parallel(io.lists * tiles):
            with T.sblock("words"):
                at = T.axis.spatial(io.lists * tiles, tile)
                T.reads([])
                T.writes([])
                if dots:
                    T.attr(0, "pragma_import_llvm", llvm_ir.BFLOAT16_DOTS)
                # A buffer for each word: TVM allocates larger buffers, above a kilobyte, so that LLVM does not keep
                # them in registers.
                parts = T.meta_var([T.sblock_alloc_buffer((tile_m, simd), "float32") for _ in range(tile_n)])
                words = T.sblock_alloc_buffer((tile_n,), "int64")
                later = T.sblock_alloc_buffer((tile_n,), "int64")
                index = T.meta_var(at // tiles)
                first = T.meta_var(at % tiles * T.int64(tile_n))
                find_words(io, at, tiles, words)
                if ahead > 0:
                    find_words(io, T.min(at + ahead, io.lists * tiles - 1), tiles, later)
                for strip in range((io.beam + (tile_m - 1)) // tile_m):
                    rows = T.meta_var(Strip(io, states, index, strip * tile_m))
                    numbers = T.meta_var(Strip(io, io.hidden, index, strip * tile_m))
                    of_each(clear, parts, words)
                    for c in range(hidden // step):
                        if ahead > 0:
                            if strip == 0:
                                of_each(fetch, parts, later, io, c)
                        of_each(add_step, parts, words, embedding, rows, c)
                    of_each(store, parts, words, io, target, numbers, index, first, positions, strip * tile_m)
    # fmt: on
    return phase


class Words:
    """Numbers of the embedding in float32, times the scales of their groups of columns, if they have any."""

    def __init__(self, io: Any) -> None:
        self._io, self._stored, self._groups = io, stored_of(io.problem), groups_of(io.problem)

    def __getitem__(self, at: tuple[Any, Any]) -> tirx.PrimExpr:
        word, column = at
        number = word_number(self._stored, self._io.embedding[word, column])
        if not self._groups:
            return number
        return number * self._io.group_scales[word, column // (self._io.problem.hidden // self._groups)]


class Row:
    """A row of scores in the form that `row_scan`'s phases expect: they read element `[row, column]` of `logits`."""

    def __init__(self, io: Any, index: Any, row: Any) -> None:
        self._io, self._index, self._row = io, index, row

    def __getitem__(self, at: tuple[Any, Any]) -> tirx.PrimExpr:
        return tirx.BufferLoad(self._io.scores, at_row(self._io, self._index, self._row, at[1]))


def select(problem: OutputLayer, static: int) -> Phase:
    """Find the best words of each row. Reads: `scores`. Writes: all outputs."""
    exact_head, k, ids = isinstance(problem, HeadTopk), best_of(problem), getattr(problem, "ids", 0)
    own = own_of(problem, of_row=own_on_cpu) or (lambda io, row: io)

    def phases(io: Any, index: Any, row: Any) -> SimpleNamespace:
        """The phases of `row_scan` for a row, and their arguments."""
        columns = T.Cast("int32", io.vocab) if exact_head else static
        extents = Extents(columns, k, ids, CHUNK, LANES)
        shown = SimpleNamespace(
            problem=SimpleNamespace(bias=0, allowed=0, capped=0), logits=Row(io, index, row), scale=io.scale, log=io.log
        )
        return SimpleNamespace(
            io=shown,
            extents=extents,
            begin=scan.begin_row(extents),
            take_maxima=scan.chunk_maximum(extents),
            rescale=scan.rescale_sums(extents),
            offer=scan.offer_from_chunk(extents),
            add=scan.add_exponentials(extents),
            finish=scan.finish_row(extents),
            start_over=scan.refill_heap(extents),
            sort=scan.sort_heap(extents),
        )

    # fmt: off
    @T.inline
    def phase(io):
        for b in T.parallel(io.rows):
            with T.sblock("row"):
                flat = T.axis.spatial(io.rows, b)
                T.reads([])
                T.writes([])
                index = T.meta_var(flat // io.beam)
                row = T.meta_var(flat % io.beam)
                of_row = T.meta_var(own(io, row))
                do = T.meta_var(phases(of_row, index, row))
                s = T.meta_var(scan.State.alloc(do.extents))
                do.begin(do.io, row, s)
                for c in range(do.extents.chunks):
                    do.take_maxima(do.io, row, s, c)
                    if s.fold[0] > s.m[0]:
                        do.rescale(do.io, row, s)
                    if s.fold[0] > s.tau[0]:
                        do.offer(do.io, row, s, c)
                    do.add(do.io, row, s, c)
                do.finish(do.io, row, s)
                # A NaN makes the sum NaN. So does an infinity; its row is then put in order twice, with the same
                # result.
                if scan.is_nan(s.d[0]):
                    do.start_over(do.io, row, s)
                do.sort(do.io, row, s)
                for i in range(k):
                    write_best(of_row, index, row, i, s)
                T.buffer_store(io.normaliser, s.m[0] * of_row.scale + T.log(s.d[0]), at_row(io, index, row))
                if ids > 0:
                    for i in range(ids):
                        write_given(
                            io.given, row, i, io.ids[row, i], io.vocab,
                            (do.io.logits[row, io.ids[row, i]] - s.m[0]) * of_row.scale,
                            T.float32(1) / s.d[0], T.log(s.d[0]), io.log)
    # fmt: on
    return phase


# fmt: off
@T.inline
def write_best(io, index, row, i, s):
    """Write the i-th best word of a row, -1 beyond the list's words, and its value."""
    if index_of(s.heap[i]) < words_of(io, index):
        T.buffer_store(io.indices, word_at(io, index, index_of(s.heap[i])), at_row(io, index, row, i))
        T.buffer_store(io.values, T.Select(
            io.log != 0,
            (value_of(s.heap[i]) - s.m[0]) * io.scale - T.log(s.d[0]),
            T.exp((value_of(s.heap[i]) - s.m[0]) * io.scale) * (T.float32(1) / s.d[0])), at_row(io, index, row, i))
    else:
        T.buffer_store(io.indices, T.int64(-1), at_row(io, index, row, i))
        T.buffer_store(
            io.values, T.Select(io.log != 0, T.float32("-inf"), T.float32(0)), at_row(io, index, row, i))
# fmt: on
