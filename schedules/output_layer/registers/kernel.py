"""The first kernel of `registers`: tokens come from global memory to registers.

    find_words      which tokens of a tile this lane loads, and with
    find_rows       where they lie
    load_step       a step of a tile's tokens
    part_rows       which rows are whose: to load whole cache lines, lanes have loaded for each other

The other phases are those of `tiles.product`.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program

from ...device.arithmetic import LOG2_E
from ...device.overlap import wait_then_start_consumer
from ...device.region import device_region
from ...device.selection import FULL_WARP
from ...device.words import held_address
from ..best.sizes import VECTOR
from ..lists import find_word
from ..tiles import program as tiles
from ..tiles.product import (
    Place,
    State,
    bring_states,
    finish_tile,
    join_tiles,
    load_states,
    multiply_step,
    own_factors,
    prefetch_tiles,
    take_tiles,
)
from ..tiles.sizes import STEP
from ..words import OutputLayer
from .space import extents

# What one warp alone reads, once, need not push hidden states out of the L1 cache.
load_once = T.ptx.ld.global_.L1__no_allocate.v4.u32

# A load whose line leaves the L2 cache before others. With a policy of its own for each load the compiler keeps fewer
# registers than with one that is held, and a second thread block finds room.
LOAD_EVICT_FIRST = """
__device__ __forceinline__ void load_evict_first(unsigned int* words, unsigned long long at) {
  unsigned long long policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3]) : "l"(at), "l"(policy));
}
"""


def load_evict_first(words: Any, address: Any) -> tirx.PrimExpr:
    """Load 16 bytes."""
    return T.cuda.func_call("load_evict_first", words, address, source_code=LOAD_EVICT_FIRST, return_type="void")


# fmt: off
@phase
def find_words(e, /, io, s, p, tile):
    """The ids of a tile's tokens that this lane loads.

    Reads: the list.
    Writes: `word`. Positions beyond the list's tokens, and tiles beyond the block's last, give a token that there is.
    Barriers: none.
    """
    for i in T.unroll(e.word_groups * 2):
        word = T.alloc_local([1], "int32")
        find_word(e)(io, s.index, T.max(T.min(
            tile * e.tile_n + i // 2 * 8 + p.group - p.odd + i % 2, s.words[0] - 1), 0), word)
        s.word[i] = word[0]


@phase
def find_rows(e, /, io, s, p, at):
    """Reads: `word`. Writes: `at` or `ahead`, where the rows are. Barriers: none."""
    for i in T.unroll(e.word_groups * 2):
        at[i] = s.base[0] + (
            T.Cast("uint64", s.word[i]) * T.uint64(e.vectors * VECTOR)
            + T.Cast("uint64", (p.warp * (e.steps * 8) + p.odd * 4 + p.member) * VECTOR))


@phase
def load_step(e, /, s, p, at, step):
    """Load a step of the tokens at `at`.

    A step is a cache line of each row, which eight lanes load: those of a row and of its neighbour, first of the one,
    then of the other. Four lanes a row, as operands have it, would ask for half a line at a time, which memory answers
    at three quarters of its speed.

    Reads: tokens. Writes: `hand` for the step, zeros beyond the last column. Barriers: none.
    """
    for n in T.unroll(e.word_groups * 2):
        i = (step % e.depth * (e.word_groups * 2) + n) * 4
        if (p.warp * e.steps + step) * 8 + p.odd * 4 + p.member < e.vectors:
            if e.evict_first > 0:
                load_evict_first(s.hand.ptr_to([i]), at[n] + T.Cast("uint64", step * STEP))
            else:
                load_once(
                    s.hand[i], s.hand[i + 1], s.hand[i + 2], s.hand[i + 3],
                    at[n] + T.Cast("uint64", step * STEP))
        else:
            for v in T.unroll(4):
                s.hand[i + v] = T.uint32(0)


@phase
def part_rows(e, /, s, p, step):
    """Give each lane both halves of its own row's line.

    Reads and writes: `hand`. Before: a half of the even row's line and of the odd row's. After: the line's first half,
    and its second.
    Barriers: none, but all lanes of a warp take part.
    """
    for n in T.unroll(e.word_groups):
        for v in T.unroll(4):
            i = (step % e.depth * e.word_groups + n) * 8 + v
            s.passed[0] = T.tvm_warp_shuffle_xor(
                T.uint32(FULL_WARP), T.Select(p.odd == 1, s.hand[i], s.hand[i + 4]), 4, 32, 32)
            if p.odd == 1:
                s.hand[i] = s.passed[0]
            else:
                s.hand[i + 4] = s.passed[0]


@phase
def begin(e, /, io, s, p, block):
    """The address of the tokens, and the warp's tiles."""
    s.base[0] = held_address("u64", io.embedding.ptr_to([0, 0]))
    take_tiles(e)(io, s, p, block)


@phase
def load_first(e, /, io, s, p):
    """The first steps of the first tile, and the names of the next one's tokens."""
    if s.tile[0] < s.end[0]:
        find_words(e)(io, s, p, s.tile[0])
        find_rows(e)(io, s, p, s.at)
        for step in T.unroll(e.depth):
            load_step(e)(s, p, s.at, step)
        find_words(e)(io, s, p, s.tile[0] + e.stride)


@phase
def multiply(e, /, s, p):
    """The products of a tile, in whose place the next one's tokens are loaded."""
    for i in T.unroll(e.sums_each):
        s.sums[i] = T.float32(0)
    for step in T.unroll(e.steps):
        bring_states(e)(s, p, step)
        part_rows(e)(s, p, step)
        multiply_step(e)(s, step)
        if step + e.depth < e.steps:
            load_step(e)(s, p, s.at, step + e.depth)
        else:
            if s.tile[0] + e.stride < s.end[0]:
                load_step(e)(s, p, s.ahead, step + e.depth - e.steps)
    for i in T.unroll(e.word_groups * 2):
        s.at[i] = s.ahead[i]


@phase
def product(e, /, io, scores, tops, sums):
    """The kernel; the last two are None where they are not wanted."""
    with device_region():
        strips = T.meta_var((io.beam + (e.tile_m - 1)) // e.tile_m)
        block, y = T.cta_id([e.blocks, io.lists * strips])
        t = T.thread_id([e.product_threads])
        p = T.meta_var(Place(t, e.reduce_warps))
        s = T.meta_var(State.alloc(e, e.kept_bytes, index=y // strips, top=y % strips * e.tile_m))
        factor: T.float32 = io.scale * T.float32(LOG2_E) if e.k > 0 else T.float32(0)
        if e.prefetch > 0:
            prefetch_tiles(e)(io, s, p, block)
        # A vocabulary that the caller says is constant is read before the producer kernel has ended.
        if e.early:
            begin(e)(io, s, p, block)
            if io.constant != 0:
                load_first(e)(io, s, p)
        if e.overlap > 0:
            wait_then_start_consumer()
        factors = T.meta_var(own_factors(e, io, s, p, factor))
        if not e.early:
            begin(e)(io, s, p, block)
        load_states(e)(io, s, p)
        if not e.early or io.constant == 0:
            load_first(e)(io, s, p)
        while s.tile[0] < s.end[0]:
            find_rows(e)(io, s, p, s.ahead)
            find_words(e)(io, s, p, s.tile[0] + 2 * e.stride)
            multiply(e)(s, p)
            finish_tile(e)(io, s, p, scores, tops, factors)
            s.tile[0] = s.tile[0] + e.stride
        join_tiles(e)(io, s, p, block, sums, factors)
# fmt: on


def program(problem: OutputLayer, decisions: Decisions) -> Program:
    """The program of a point."""
    return tiles.program(problem, extents(problem, decisions), product)
