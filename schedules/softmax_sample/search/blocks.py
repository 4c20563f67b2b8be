"""A GPU's block or cluster as the crew of a search."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.problem import numpy_dtype
from tvm_sparse.core.template import ceildiv
from tvm_sparse.operators.softmax_sample.problem import SoftmaxSample

from ...device.cluster import cluster_barrier, peer_load
from ...device.pool import asked
from ...device.selection import FULL_WARP, RADIX_BINS, scan_lanes
from ...device.words import load_element, load_words, value_at
from ...softmax_topk.elements import written_element
from .crew import (
    BEFORE,
    BIN,
    BINS,
    COUNT,
    COUNT_BEFORE,
    FOUND,
    LOADS,
    MASS,
    SLICES,
    Crew,
    State,
    agrees,
    draw_by_search,
    is_heavy,
    reaches,
    write_word,
)

# Bytes of what a GPU's thread loads at once, and how many of these are on their way.
VECTOR, RING = 16, 4
# A block has so many copies of each bin, so that atomics of a warp's lanes seldom meet in one.
COPIES = 4

mass_of = peer_load("mass_of", "unsigned long long", "uint64")
count_of = peer_load("count_of", "int", "int32")


@dataclass(frozen=True)
class Blocks:
    """The blocks that have a row, and how it lies over their threads: in vectors of 16 bytes, in turn.

    The elements before the row's first whole vector and behind its last are loaded one by one, in a step of their own.
    """

    problem: SoftmaxSample
    threads: int  # of a block
    cluster: int  # blocks

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return VECTOR // numpy_dtype(self.problem.dtype).itemsize

    @property
    def per_word(self) -> int:
        """Elements of a word."""
        return self.width // 4

    @property
    def aligned(self) -> bool:
        """Whether every row begins and ends with a whole vector."""
        return self.problem.vocab % self.width == 0

    @property
    def vector_steps(self) -> int:
        """Steps in which vectors are loaded."""
        return ceildiv(self.problem.vocab // self.width, self.threads * self.cluster)

    @property
    def bytes(self) -> int:
        """Of shared memory, see `search_state`."""
        histograms = 8 * (2 * BINS + len(FOUND) + 2 * BINS) + 4 * ((3 + 3 * COPIES) * BINS)
        return asked(VECTOR * RING * self.threads + ceildiv(histograms, VECTOR) * VECTOR)


# fmt: off
def search_state(blocks: Blocks, pool: Any) -> State:
    """The state of a search, whose shared buffers are in `pool`, which nothing else needs any more."""
    taken = [0]

    def shared(shape: tuple[int, ...], dtype: str) -> tirx.Buffer:
        size = int(dtype[-2:]) // 8
        buffer = T.decl_buffer(shape, dtype, data=pool, elem_offset=taken[0] // size, scope="shared.dyn")
        taken[0] += ceildiv(shape[0] * size, 8) * 8
        return buffer

    more: dict[str, Any] = {
        "ring": shared((RING * blocks.threads * 4,), "uint32"),
        "lows": shared((COPIES * BINS,), "uint32"),
        "highs": shared((COPIES * BINS,), "uint32"),
        "tallies": shared((COPIES * BINS,), "uint32"),
    }
    if blocks.cluster > 1:
        more |= {"shown": shared((2 * BINS,), "uint64"), "shown_counts": shared((2 * BINS,), "int32")}
    registers = {"small": "uint16", "added": "uint32"}
    registers |= dict.fromkeys(("column", "ahead", "own", "head", "turn", "number"), "int32")
    more |= {name: T.alloc_local((1,), dtype) for name, dtype in registers.items()}
    more |= {"raw": T.alloc_local((4,), "uint32")}
    return State.alloc(shared, T.alloc_local, **more)


def begin_search(blocks: Blocks) -> Callable[..., Any]:
    """Before the first pass; the phase is (row, t, s, part), `part` being the number of the block in its cluster.

    Writes: `own`, `head`, `turn`; empty bins.
    Barriers: one, at the end.
    """
    threads, width, vocab, words = blocks.threads, blocks.width, blocks.problem.vocab, COPIES * BINS

    @T.inline
    def phase(row, t, s, part):
        s.own[0] = part * threads + t
        s.head[0] = 0
        if not blocks.aligned:
            s.head[0] = T.min(T.Cast("int32", T.truncmod(
                width - T.truncmod(row * T.int64(vocab), T.int64(width)), T.int64(width))), vocab)
        s.turn[0] = 0
        for i in T.serial((words - 1 - t + threads) // threads):
            s.lows[i * threads + t] = T.uint32(0)
            s.highs[i * threads + t] = T.uint32(0)
            s.tallies[i * threads + t] = T.uint32(0)
        T.cuda.cta_sync()

    return phase


def start_vector(blocks: Blocks) -> Callable[..., Any]:
    """Have a thread's j-th vector copied to its ring; the phase is (io, row, t, s, j).

    Writes: `ring`, asynchronously; `ahead`.
    After: one more group of copies is on its way, an empty one if there is no such vector.
    """
    own, threads, width, vocab = blocks.threads, blocks.threads * blocks.cluster, blocks.width, blocks.problem.vocab

    @T.inline
    def phase(io, row, t, s, j):
        s.ahead[0] = s.head[0] + (j * threads + s.own[0]) * width
        if s.ahead[0] + width <= vocab:
            T.ptx.cp.async_.cg.shared.global_(
                s.ring.ptr_to([(j % RING * own + t) * 4]), io.logits.ptr_to([row, s.ahead[0]]), VECTOR)
        T.ptx.cp.async_.commit_group()

    return phase


def start_vectors(blocks: Blocks) -> Callable[..., Any]:
    """Have the first vectors of a thread copied; the phase is (io, row, t, s)."""
    start = start_vector(blocks)

    @T.inline
    def phase(io, row, t, s):
        for j in T.unroll(RING):
            start(io, row, t, s, j)

    return phase


def load_vector(blocks: Blocks) -> Callable[..., Any]:
    """The vector of a thread's j-th step, once it has arrived; the phase is (io, row, t, s, j).

    Reads: `ring`.
    Writes: `column`, `raw`; `ring`, asynchronously; scratch is `small`.
    """
    own, threads, width, vocab = blocks.threads, blocks.threads * blocks.cluster, blocks.width, blocks.problem.vocab
    dtype, per_word, start = blocks.problem.dtype, blocks.per_word, start_vector(blocks)
    nothing = {"float32": 0xFF800000, "float16": 0xFC00FC00, "bfloat16": 0xFF80FF80}[dtype]  # -inf

    @T.inline
    def phase(io, row, t, s, j):
        s.column[0] = s.head[0] + (j * threads + s.own[0]) * width
        T.ptx.cp.async_.wait_group(RING - 1)
        for w in T.unroll(4):
            s.raw[w] = T.uint32(nothing)
        if s.column[0] + width <= vocab:
            for w in T.vectorized(4):
                s.raw[w] = s.ring[(j % RING * own + t) * 4 + w]
        if not blocks.aligned:
            if j == blocks.vector_steps and s.own[0] < 2 * width:
                # One element before the first vector, or one behind the last.
                s.column[0] = s.own[0]
                if s.own[0] >= s.head[0]:
                    s.column[0] = s.own[0] + (vocab - s.head[0]) // width * width
                if s.column[0] < vocab:
                    load_words(4 // per_word, s.raw, 0, s.small, io.logits.ptr_to([row, s.column[0]]))
                    if per_word > 1:
                        s.raw[0] = s.raw[0] | T.uint32(nothing & 0xFFFF0000)
        start(io, row, t, s, j + RING)

    return phase


def take_of_vector(blocks: Blocks) -> Callable[..., Any]:
    """The e-th element of a step; the phase is (io, s, e). Reads: `raw`, `column`, the bias. Writes: `x`."""
    dtype, last = blocks.problem.dtype, blocks.problem.vocab - 1
    biased = bool(blocks.problem.bias)

    @T.inline
    def phase(io, s, e):
        s.x[0] = value_at(dtype, s.raw, 0, e)
        if biased:
            s.x[0] = s.x[0] + load_element(
                "float32", io.bias.ptr_to([T.min(s.column[0] + e, last)]))

    return phase


@T.inline
def add_atomically(s, t, start, at, mass):
    """In two words, as shared memory has no atomic sum of 64 bits: that is a loop."""
    s.added[0] = T.cuda.atomic_add(s.lows.ptr_to([at * COPIES + t % COPIES]), T.Cast("uint32", mass[0]))
    # The high word, and what is carried.
    s.added[0] = T.Cast("uint32", (mass[0] >> T.uint64(32)) + (
        (T.Cast("uint64", s.added[0]) + (mass[0] & T.uint64(0xFFFFFFFF))) >> T.uint64(32)))
    if s.added[0] != T.uint32(0):
        T.evaluate(T.cuda.atomic_add(s.highs.ptr_to([at * COPIES + t % COPIES]), s.added[0]))


@T.inline
def count_atomically(s, t, at):
    T.evaluate(T.cuda.atomic_add(s.tallies.ptr_to([at * COPIES + t % COPIES]), T.uint32(1)))


@T.inline
def add_part_of_warp(s, t, i):
    s.mass[0] = s.part[i]
    for h in T.unroll(5):
        s.mass[0] = s.mass[0] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.mass[0], 1 << h, 32, 32)
    if t % 32 == 0:
        add_atomically(s, t, SLICES, RADIX_BINS + i, s.mass)


def unite_blocks(blocks: Blocks) -> Callable[..., Any]:
    """What the threads of all blocks have added; the phase is (s, t, start).

    Reads: `lows`, `highs`, `tallies`, which are empty afterwards; `turn`.
    Writes: `masses` from `start` on, `counts`; `turn`; `shown` and `shown_counts`, which the others read until they
        come to the next barrier of the cluster: so there are two of each.
    Barriers: two, and one of the cluster.
    """
    threads, cluster = blocks.threads, blocks.cluster

    @T.inline
    def phase(s, t, start):
        T.cuda.cta_sync()
        for i in T.serial((BINS - 1 - t + threads) // threads):
            s.mass[0] = T.uint64(0)
            s.number[0] = 0
            for c in T.unroll(COPIES):
                s.mass[0] = s.mass[0] + T.Cast("uint64", s.lows[(i * threads + t) * COPIES + c]) + (
                    T.Cast("uint64", s.highs[(i * threads + t) * COPIES + c]) << T.uint64(32))
                s.number[0] = s.number[0] + T.Cast("int32", s.tallies[(i * threads + t) * COPIES + c])
            for c in T.unroll(COPIES):
                s.lows[(i * threads + t) * COPIES + c] = T.uint32(0)
                s.highs[(i * threads + t) * COPIES + c] = T.uint32(0)
                s.tallies[(i * threads + t) * COPIES + c] = T.uint32(0)
            if cluster > 1:
                s.shown[s.turn[0] * BINS + i * threads + t] = s.mass[0]
                s.shown_counts[s.turn[0] * BINS + i * threads + t] = s.number[0]
            else:
                s.masses[start + i * threads + t] = s.mass[0]
                s.counts[i * threads + t] = s.number[0]
        if cluster > 1:
            cluster_barrier()
            for i in T.serial((BINS - 1 - t + threads) // threads):
                s.mass[0] = T.uint64(0)
                s.number[0] = 0
                for r in T.unroll(cluster):
                    s.mass[0] = s.mass[0] + mass_of(s.shown.ptr_to([s.turn[0] * BINS + i * threads + t]), r)
                    s.number[0] = s.number[0] + count_of(
                        s.shown_counts.ptr_to([s.turn[0] * BINS + i * threads + t]), r)
                s.masses[start + i * threads + t] = s.mass[0]
                s.counts[i * threads + t] = s.number[0]
            s.turn[0] = 1 - s.turn[0]
        T.cuda.cta_sync()

    return phase


@T.inline
def find_by_warp(s, t, start):
    if t < 32:
        s.part[0] = T.uint64(0)
        s.part[1] = T.uint64(0)
        for b in T.unroll(RADIX_BINS // 32):
            s.part[0] = s.part[0] + s.masses[start + RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
            s.part[1] = s.part[1] + T.Cast("uint64", s.counts[RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)])
        # Inclusive scans over the lanes, the last bins on lane 0.
        s.mass[0] = s.part[0]
        scan_lanes(t, s.mass, s.other)
        s.part[0] = s.above[0] + s.mass[0] - s.part[0]
        s.mass[0] = s.part[1]
        scan_lanes(t, s.mass, s.other)
        s.part[1] = T.Cast("uint64", s.passed[0]) + s.mass[0] - s.part[1]
        for b in T.unroll(RADIX_BINS // 32):
            s.mass[0] = s.masses[start + RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)]
            s.other[0] = T.Cast("uint64", s.counts[RADIX_BINS - 1 - (t * (RADIX_BINS // 32) + b)])
            if reaches(s, s.part[0], s.part[1], s.mass[0], s.other[0]):
                s.found[BIN] = T.Cast("uint64", t * (RADIX_BINS // 32) + b)
                s.found[BEFORE] = s.part[0]
                s.found[MASS] = s.mass[0]
                s.found[COUNT] = s.other[0]
                s.found[COUNT_BEFORE] = s.part[1]
            s.part[0] = s.part[0] + s.mass[0]
            s.part[1] = s.part[1] + s.other[0]


def pick_by_warp(blocks: Blocks) -> Callable[..., Any]:
    """By the first warp of the first block: a lane has neighbours, counts them, and the right one finds it in them."""
    vocab = blocks.problem.vocab
    piece = ceildiv(ceildiv(vocab, RADIX_BINS), 32)

    @T.inline
    def phase(io, row, t, s, first, last):
        if s.own[0] < 32:
            wanted = T.alloc_local([1], "int32")
            before = T.alloc_local([1], "int32")
            wanted[0] = -1
            for turn in T.serial(2, unroll=False):
                s.number[0] = 0
                for i in T.serial(ceildiv(piece, LOADS)):
                    for u in T.unroll(LOADS):
                        s.x[1 + u] = -T.infinity("float32")
                        if i * LOADS + u < piece and first + t * piece + i * LOADS + u < last:
                            s.x[1 + u] = written_element(io, row, first + t * piece + i * LOADS + u)
                    for u in T.unroll(LOADS):
                        if agrees(s, s.x[1 + u]):
                            if is_heavy(exponential_on_gpu(s, s.x[1 + u]), vocab):
                                if s.number[0] == wanted[0]:
                                    write_word(io, row, s, first + t * piece + i * LOADS + u, s.x[1 + u])
                                s.number[0] = s.number[0] + 1
                if turn == 0:
                    before[0] = s.number[0]
                    scan_lanes(t, before, wanted)
                    # Of another lane's it is none: below 0, or more than there are.
                    wanted[0] = T.Cast("int32", s.rank[0]) - (before[0] - s.number[0])

    return phase


def exponential_on_gpu(s: State, x: Any) -> tirx.PrimExpr:
    return T.exp2((x - s.top[0]) * s.factor[0])


def crew_of(blocks: Blocks) -> Crew:
    """The threads of a block or a cluster of a CUDA kernel."""
    return Crew(
        elements=blocks.width,
        steps=blocks.vector_steps + (0 if blocks.aligned else 1),
        element=written_element,
        begin=start_vectors(blocks),
        load=load_vector(blocks),
        take=take_of_vector(blocks),
        column=lambda s, t, j, e: s.column[0] + e,
        exponential=exponential_on_gpu,
        meet=T.cuda.cta_sync,
        clear=lambda s, t: None,
        add=add_atomically,
        count=count_atomically,
        add_part=add_part_of_warp,
        unite=unite_blocks(blocks),
        find=find_by_warp,
        pick=pick_by_warp(blocks),
    )


def search_by_blocks(blocks: Blocks) -> Callable[..., Any]:
    """The search of all threads of a row.

    The phase is (io, row, t, part, pool, first, best, top_k, top_p, min_p, uniform).

    Barriers: several; the last one is the cluster's, as no block may end while others read what it has found.
    """
    begin, search = begin_search(blocks), draw_by_search(crew_of(blocks), blocks.problem)

    @T.inline
    def phase(io, row, t, part, pool, first, best, top_k, top_p, min_p, uniform):
        s = T.meta_var(search_state(blocks, pool))
        begin(row, t, s, part)
        search(io, row, t, s, first, best, top_k, top_p, min_p, uniform)
        if blocks.cluster > 1:
            cluster_barrier()

    return phase
# fmt: on
