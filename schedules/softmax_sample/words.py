"""Draw a word of each row from its k best, if these are enough: the `Ending` of `softmax_topk`'s kernels here.

The k best are read back from the outputs, in order, which is why this stands behind any of those templates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.softmax_sample.definition import (
    Columns,
    Draw,
    clamped,
    counter_of,
    cut,
    draw,
    limit_of,
    philox,
    take,
    take_by_column,
    uniform_of,
)
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ..device.loops import rolled
from ..device.selection import FULL_WARP, lanes_max, lanes_min, lanes_sum, scan_lanes
from ..device.state import Buffers, local, named
from ..device.words import load_element
from ..softmax_topk.ending import Ending, argument_on_cpu, argument_on_gpu, own_on_cpu, own_on_gpu
from .search import Blocks, search_by_blocks, search_by_thread


@dataclass
class Drawing(Buffers):
    """What a lane of the warp that draws has in registers: `each` of the best words, neighbours in the order."""

    chance: Any = local("float32", lambda each: each)  # the words' probabilities; 0 for a word that does not count
    sums: Any = local("float32", lambda each: each)  # the sum of the lane's probabilities up to each word
    before: Any = local("float32")  # the sum of all lanes' probabilities before
    other: Any = local("float32")  # scratch
    scale: Any = local("float32")  # inverse temperature
    temperature: Any = local("float32")
    top_p: Any = local("float32")
    min_p: Any = local("float32")
    uniform: Any = local("float32")
    top_k: Any = local("int32")
    left: Any = local("int32")  # how many words are left
    place: Any = local("int32")  # which word, by its rank, is drawn
    numbers: Any = local("int64", 2)  # seed and offset; then the word
    words: Any = local("uint32", 4)  # words of the random generator's counter
    high: Any = local("uint32", 2)
    key: Any = local("uint32", 2)


# fmt: off
@T.inline
def read_filters(io, row, s):
    """Load the row's temperature and its filters. Writes: `temperature`, `top_k`, `top_p`, `min_p`.

    By loads that see what a producer kernel has written, as `read_uniform`.
    """
    s.temperature[0] = argument_on_gpu(io, "temperature", row)
    s.top_p[0] = argument_on_gpu(io, "top_p", row)
    s.min_p[0] = argument_on_gpu(io, "min_p", row)
    if io.per_row:
        T.ptx.ld.global_.s32(s.top_k[0], io.top_ks.ptr_to([row]))
    else:
        s.top_k[0] = io.top_k


@T.inline
def read_uniform(io, row, s):
    """Load the row's uniform number, or make it. Writes: `uniform`."""
    if io.seeded > 0:
        if io.seeded == 1:
            T.ptx.ld.global_.s64(s.numbers[0], io.seeds.ptr_to([row, 0]))
            T.ptx.ld.global_.s64(s.numbers[1], io.seeds.ptr_to([row, 1]))
        else:
            s.numbers[0] = io.seed
            if io.seeded == 2:
                s.numbers[1] = io.offset
            else:
                T.ptx.ld.global_.s64(s.numbers[1], io.offsets.ptr_to([row]))
        philox(s.words, s.high, s.key, s.numbers[0], s.numbers[1],
               T.uint32(0) if io.seeded == 1 else T.Cast("uint32", row))
        s.uniform[0] = uniform_of(s.words)
    else:
        s.uniform[0] = load_element("float32", io.uniforms.ptr_to([row]))


@phase
def draw_by_warp(problem, /, io, row, t, barrier, needed):
    """A word of the k best, by one warp, see `Ending.finish`.

    Each lane has some neighbours in the order, and the lanes' sums are scanned. What is left is a prefix of the order:
    the sum before a word decides for top-p, and its chance for min-p; a word of chance 0 is none of it. The word drawn
    has as many words before it as have cumulative chances up to the uniform number's share of all that is left, but at
    most all but one: whatever is rounded, it is one that is left.

    Where a word may be drawn from the whole row, the k best decide if the filters end among them. Else the row has to
    be searched (`search`). A row without a top_k is drawn from in the order of columns.

    Reads: the row's values and indices, which the block's threads have written.
    Writes: the row's token and its log-probability; `needed`, if the whole row counts: whether it has to be searched.
    Barriers: one.
    """
    k = T.meta_var(problem.k)
    whole, each = T.meta_var(bool(problem.whole)), T.meta_var(ceildiv(k, 32))
    s = T.meta_var(Drawing.alloc(each))
    if t < 32:
        # Loaded before the barrier: these loads overlap those of the other values.
        read_filters(io, row, s)
        read_uniform(io, row, s)
    barrier()
    if t < 32:
        s.top_k[0] = limit_of(s.temperature[0], s.top_k[0], problem.words)
        for j in T.unroll(each):
            s.chance[j] = T.float32(0)
            if t * each + j < T.min(s.top_k[0], k):
                s.chance[j] = T.exp(load_element("float32", io.values.ptr_to([row, t * each + j])))
            s.sums[j] = s.chance[j]
            if j > 0:
                s.sums[j] = s.sums[T.max(j - 1, 0)] + s.chance[j]
        s.before[0] = s.sums[each - 1]
        scan_lanes(t, s.before, s.other)
        # The sum of all that counts; top-p leaves the share `top_p` of it.
        s.other[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.before[0], 31, 32, 32)
        if whole:
            if s.top_k[0] > k:
                s.other[0] = T.float32(1)
        s.scale[0] = s.top_p[0] * s.other[0]
        s.other[0] = T.tvm_warp_shuffle_up(T.uint32(FULL_WARP), s.before[0], 1, 32, 32)
        s.before[0] = T.Select(t == 0, T.float32(0), s.other[0])
        s.other[0] = s.min_p[0] * T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.chance[0], 0, 32, 32)
        s.left[0] = 0
        for j in T.unroll(each):
            if t * each + j < T.min(s.top_k[0], k) and (
                s.chance[j] > T.float32(0) and s.chance[j] >= s.other[0]
            ) and (
                s.before[0] + (s.sums[T.max(j - 1, 0)] if j > 0 else T.float32(0)) < s.scale[0]
                or s.top_p[0] >= T.float32(1)
            ):
                s.left[0] = s.left[0] + 1
        # For a row of NaN, or if `top_p` is 0, nothing is left: then the best word is drawn.
        s.left[0] = lanes_sum(s.left[0])
        s.other[0] = T.float32(0)
        for j in T.unroll(each):
            if t * each + j < T.max(s.left[0], 1):
                s.other[0] = s.before[0] + s.sums[j]
        # Sums are not negative, so their bits order as they do.
        s.other[0] = T.reinterpret("float32", T.call_extern(
            "uint32", "__reduce_max_sync", T.uint32(FULL_WARP), T.reinterpret("uint32", s.other[0])))
        s.other[0] = clamped(s.uniform[0]) * s.other[0]
        if (problem.words == problem.vocab) and s.top_k[0] == problem.words:
            place_by_column(k)(io, row, t, s)
        else:
            s.place[0] = 0
            for j in T.unroll(each):
                if t * each + j < T.max(s.left[0], 1) and s.before[0] + s.sums[j] <= s.other[0]:
                    s.place[0] = s.place[0] + 1
            s.place[0] = lanes_sum(s.place[0])
        if whole:
            if t == 0:
                needed[0] = T.Select(is_open(k, problem.words, s), 1, 0)
        s.place[0] = T.min(s.place[0], T.max(s.left[0], 1) - 1)
        if t == 0:
            T.ptx.ld.global_.s64(s.numbers[0], io.indices.ptr_to([row, s.place[0]]))
            io.tokens[row] = T.Cast("int32", s.numbers[0])
            io.logprobs[row] = load_element("float32", io.values.ptr_to([row, s.place[0]]))


@phase
def place_by_column(k, /, io, row, t, s):
    """Which of the best words that are left is drawn in the order of columns.

    Reads: `chance`, `left`, the row's indices, and `other`, how much is to be passed.
    Writes: `place`, in all lanes.
    Barriers: shuffles.
    """
    # Registers that a loop which is not unrolled indexes are in memory; unrolled, many would be long code.
    each = T.meta_var(ceildiv(k, 32))
    loop = T.meta_var(T.unroll if each <= 4 else rolled)
    columns = T.alloc_local([each], "int32")
    before = T.alloc_local([each], "float32")
    found = T.alloc_local([1], "int32")
    last = T.alloc_local([1], "int32")
    for j in loop(each):
        before[j] = s.chance[j]
        T.ptx.ld.global_.s64(s.numbers[0], io.indices.ptr_to([row, T.min(t * each + j, k - 1)]))
        columns[j] = T.Cast("int32", s.numbers[0])
    for lane in rolled(32):
        for i in loop(each):
            if lane * each + i < s.left[0]:
                found[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), columns[i], lane, 32, 32)
                s.min_p[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.chance[i], lane, 32, 32)
                for j in loop(each):
                    if found[0] < columns[j]:
                        before[j] = before[j] + s.min_p[0]
    found[0] = 2**31 - 1
    last[0] = -1
    for j in loop(each):
        if t * each + j < s.left[0]:
            last[0] = T.max(last[0], columns[j])
            if before[j] > s.other[0]:
                found[0] = T.min(found[0], columns[j])
    found[0] = lanes_min(found[0])
    last[0] = lanes_max(last[0])
    # By rounding the sum of all may be too little.
    found[0] = T.Select(last[0] < found[0], last[0], found[0])
    s.place[0] = 0
    for j in loop(each):
        if t * each + j < s.left[0] and columns[j] == found[0]:
            s.place[0] = t * each + j
    s.place[0] = lanes_max(s.place[0])


@phase
def draw_by_blocks(problem, blocks, /, io, row, t, part, pool):
    """A word of the whole row, by all threads of its blocks, see `Ending.search`.

    Reads: the row, and its best word, which `draw_by_warp` has seen.
    Writes: the row's token and its log-probability.
    Barriers: those of a search.
    """
    s = T.meta_var(Drawing.alloc(1))
    read_filters(io, row, s)
    read_uniform(io, row, s)
    s.top_k[0] = limit_of(s.temperature[0], s.top_k[0], problem.words)
    T.ptx.ld.global_.s64(s.numbers[0], io.indices.ptr_to([row, 0]))
    search_by_blocks(blocks)(io, row, t, part, pool, s.numbers[0], load_element("float32", io.values.ptr_to([row, 0])),
           s.top_k[0], s.top_p[0], s.min_p[0], clamped(s.uniform[0]))


def is_open(k: int, words: int, s: Any) -> tirx.PrimExpr:
    """Whether the k best do not decide which word of the whole row is drawn.

    They do if fewer are left. The mass of a top_k above k, of which top_p is a share, is not known; it is at most that
    of all words, for which `left` is. Rows without a distribution, of which nothing is left, are decided.
    """
    share = T.And(s.top_k[0] < words, s.top_p[0] < T.float32(1))
    return T.And(T.And(s.top_k[0] > k, s.left[0] > 0), T.Or(s.left[0] == k, share))


@phase
def draw_by_thread(problem, /, io, row, t, barrier, needed):
    """As `draw_by_warp`, one word after another."""
    k, words = T.meta_var(problem.k), T.meta_var(problem.words)
    whole, drawn = T.meta_var(bool(problem.whole)), T.meta_var(draw(k, problem.vocab))
    search = T.meta_var(search_by_thread(problem) if whole else None)
    s = T.meta_var(named(Draw.alloc(k)))
    uniform = T.meta_var(uniform_of(s.words) if io.seeded > 0 else io.uniforms[row])
    top_p = T.meta_var(argument_on_cpu(io, "top_p", row))
    min_p = T.meta_var(argument_on_cpu(io, "min_p", row))
    columns = T.meta_var(Columns(io.indices, row))
    s.limit[0] = limit_of(argument_on_cpu(io, "temperature", row), argument_on_cpu(io, "top_k", row), words)
    for i in range(k):
        s.chance[i] = T.exp(io.values[row, i])
    if io.seeded > 0:
        at = T.meta_var(counter_of(io.seeded, row, io.seeds, io.seed, io.offset, io.offsets))
        philox(s.words, s.high, s.key, at[0], at[1], at[2])
    if whole:
        if s.limit[0] > k:
            s.total[0] = T.float32(1)
            cut(k)(s, top_p, min_p)
            if s.chance[0] > T.float32(0) and (s.left[0] == k or (s.limit[0] < words and top_p < T.float32(1))):
                s.place[0] = k
            elif s.limit[0] == words:
                take_by_column(k)(s, uniform, columns)
            else:
                take(k)(s, uniform)
                s.place[0] = T.min(s.place[0], s.left[0] - 1)
        else:
            drawn(s, top_p, min_p, uniform, columns)
    else:
        drawn(s, top_p, min_p, uniform, columns)
    if s.place[0] < k:
        io.tokens[row] = T.Cast("int32", io.indices[row, s.place[0]])
        io.logprobs[row] = io.values[row, s.place[0]]
    if whole:
        if s.place[0] >= k:
            search(io, row, io.indices[row, 0], io.values[row, 0], s.limit[0], top_p, min_p, clamped(uniform))
# fmt: on


def on_gpu(problem: SoftmaxSample, threads: int, cluster: int = 1) -> Ending:
    """The ending of a CUDA kernel of softmax_topk: one warp draws the row's word, or, where no top-k limits the choice,
    all `cluster` thread blocks of `threads` threads that have the row.
    """
    if not problem.whole:
        return Ending(own_on_gpu, draw_by_warp(problem))
    blocks = Blocks(problem, threads, cluster)
    return Ending(own_on_gpu, draw_by_warp(problem), draw_by_blocks(problem, blocks), blocks.bytes)


def on_cpu(problem: SoftmaxSample) -> Ending:
    """The ending of a CPU function of softmax_topk: the calling thread draws the row's word."""
    return Ending(own_on_cpu, draw_by_thread(problem))
