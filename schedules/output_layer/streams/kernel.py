"""The program of `streams`: its workspace, and its kernels, each a list of phases.

product     the scores of some words of a list
    find_words      where the words in hand lie
    load_vector     a vector of a word comes to registers
    stage_state     the hidden state comes to shared memory
    multiply        vectors in hand; the next ones are loaded in their place
    add_lanes       a word's score
best_of_all the best words of a list (`best`)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program, Workspace, ceildiv

from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.selection import FULL_WARP
from ...device.state import Buffers, local, shared
from ...device.words import held_address, load_element, load_words, per_word, value_at
from ...interface import gpu_program
from ..best.kernel import best_of_all
from ..best.sizes import VECTOR
from ..lists import count_words, find_word
from ..words import OutputLayer, at_row, rows_shape
from .space import Extents

Phase = Callable[..., Any]
WORD = 4  # bytes of a float32
PER_VECTOR = VECTOR // WORD
load_shared = T.ptx.ld.shared.v4.u32
store_shared = T.ptx.st.shared.v4.u32
MINUS_INFINITY = T.float32("-inf")


@dataclass
class State(Buffers):
    """What the phases share."""

    # The list, the thread, and which of the lanes that share words it is.
    index: Any
    t: Any
    member: Any
    # Position in the list of the first word in hand.
    position: Any
    # Number of words of the list.
    words: Any = local("int32")
    # A word.
    name: Any = local("int32", lambda e: e.tile_n)
    # Addresses of the words in hand.
    at: Any = local("uint64", lambda e: e.tile_n)
    # Their vectors.
    hand: Any = local("uint32", lambda e: e.held * PER_VECTOR)
    # A vector of the hidden state, from or to shared memory.
    part: Any = local("uint32", PER_VECTOR)
    # The partial sum of each word in hand.
    sums: Any = local("float32", lambda e: e.tile_n)
    # Shared: the hidden state.
    state: Any = shared("uint32", lambda e: e.state_vectors * PER_VECTOR)


# fmt: off
@phase
def find_words(e, /, io, s):
    """Where the words in hand lie. Beyond the list's last word it is the last word.

    Reads: the list; `position`, `words`. Writes: `name`, `at`. Barriers: none.
    """
    base: T.uint64 = held_address("u64", io.embedding.ptr_to([0, 0]))
    for n in T.unroll(e.tile_n):
        found = T.alloc_local([1], "int32")
        find_word(e)(io, s.index, T.min(s.position + n, s.words[0] - 1), found)
        s.name[n] = found[0]
    for n in T.unroll(e.tile_n):
        s.at[n] = base + T.Cast("uint64", s.name[n]) * T.uint64(e.row_vectors * VECTOR)


@phase
def load_vector(e, /, s, step, n, v):
    """Load vector `v` of step `step` of word `n` in hand; 0 beyond the row's end.

    Reads: `at`. Writes: `hand`. Barriers: none.
    """
    place: T.int32 = (step * e.vectors + v) * e.reduce_threads + s.member
    slot = T.meta_var((n * e.vectors + v) * PER_VECTOR)
    if e.uneven:
        for i in T.unroll(PER_VECTOR):
            s.hand[slot + i] = T.uint32(0)
    if not e.uneven or place < e.row_vectors:
        load_words(VECTOR, s.hand, slot, None, s.at[n] + T.Cast("uint64", place * VECTOR))


@phase
def stage_state(e, /, io, s):
    """Copy the hidden state to shared memory. Writes: `state`. Barriers: none; one has to follow.
    """
    for i in T.serial(ceildiv(e.state_vectors, e.product_threads)):
        place: T.int32 = i * e.product_threads + s.t
        if place < e.state_vectors:
            for v in T.unroll(PER_VECTOR):
                s.part[v] = T.uint32(0)
            if place < e.row_vectors:
                load_words(
                    VECTOR, s.part, 0, None,
                    io.hidden.ptr_to(at_row(io, s.index, 0, place * (PER_VECTOR * per_word(e.dtype)))))
            store_shared(s.state.ptr_to([place * PER_VECTOR]), s.part[0], s.part[1], s.part[2], s.part[3])


@phase
def multiply(e, /, s, step):
    """The products of a step.

    Reads: `hand`, `state`. Writes: `sums`; `hand`, of the step that follows. Barriers: none.
    """
    for v in T.unroll(e.vectors):
        load_shared(
            s.part[0], s.part[1], s.part[2], s.part[3],
            T.cuda.cvta_generic_to_shared(
                s.state.ptr_to([((step * e.vectors + v) * e.reduce_threads + s.member) * PER_VECTOR])))
        for n in T.unroll(e.tile_n):
            for i in T.unroll(PER_VECTOR * per_word(e.dtype)):
                s.sums[n] = s.sums[n] + value_at(e.dtype, s.hand, (n * e.vectors + v) * PER_VECTOR, i) * value_at(
                    e.dtype, s.part, 0, i)
            if step + 1 < e.steps:
                load_vector(e)(s, step + 1, n, v)


@phase
def add_lanes(e, /, io, s, scores):
    """Add the sums of the lanes of a word, and store its score. Reads: `sums`; the bias. Writes: scores; -inf beyond
    the list's words, for the operator that finds no best words. Barriers: of the warp.
    """
    for n in T.unroll(e.tile_n):
        for b in T.unroll(e.reduce_threads.bit_length() - 1):
            s.sums[n] = s.sums[n] + T.tvm_warp_shuffle_xor(T.uint32(FULL_WARP), s.sums[n], 1 << b, 32, 32)
    if s.member == 0:
        for n in T.unroll(e.tile_n):
            if s.position + n < s.words[0]:
                if io.bias is not None:
                    s.sums[n] = s.sums[n] + load_element("float32", io.bias.ptr_to([s.name[n]]))
                T.buffer_store(scores, s.sums[n], at_row(io, s.index, 0, s.position + n))
            elif e.k == 0 and s.position + n < e.words:
                T.buffer_store(scores, MINUS_INFINITY, at_row(io, s.index, 0, s.position + n))


@phase
def product(e, /, io, scores):
    """The first kernel."""
    with device_region():
        flat = T.cta_id([io.lists * e.parts])
        t = T.thread_id([e.product_threads])
        s = T.meta_var(State.alloc(
            e, index=flat // e.parts, t=t, member=t % e.reduce_threads,
            position=(flat % e.parts * (e.product_threads // e.reduce_threads) + t // e.reduce_threads) * e.tile_n))
        if e.overlap > 0:
            wait_then_start_consumer()
        count_words(e)(io, s.index, s.words)
        # All threads of the block go through the loop equally often, because they meet at a barrier.
        some: T.bool = flat % e.parts * e.words_each < s.words[0]
        for n in T.unroll(e.tile_n):
            s.sums[n] = T.float32(0)
        if some:
            find_words(e)(io, s)
            for v in T.unroll(e.vectors):
                for n in T.unroll(e.tile_n):
                    load_vector(e)(s, 0, n, v)
            stage_state(e)(io, s)
        T.cuda.cta_sync()
        if some:
            for step in T.serial(e.steps):
                multiply(e)(s, step)
        add_lanes(e)(io, s, scores)
# fmt: on


def program(problem: OutputLayer, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)
    multiply_words = product(e)
    if not e.k:
        # fmt: off
        @T.inline
        def alone(io):
            multiply_words(io, io.logits)
        # fmt: on

        return gpu_program(problem, alone, overlapped=e.overlap > 0)

    search = best_of_all(e)

    # fmt: off
    @T.inline
    def both(io):
        multiply_words(io, io.scores)
        search(io)

    # fmt: on

    scores = (Workspace("scores", rows_shape(problem, e.words), "float32"),)
    return gpu_program(problem, both, scores, overlapped=e.overlap > 0)
