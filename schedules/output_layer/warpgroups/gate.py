"""A bound for the tiles of `warpgroups` that write their scores: the k-th best of groups of the first tiles.

The thread blocks write the scores of their first tiles, and of later ones those of the rows in which a tile's largest
score reaches the row's bound. Tiles that do not are none of the row's k best, and stay tiles without words. So of a
large vocabulary a sixth of the scores is written, or less. Writing takes up to three times as long as reading as much.

clear_tops     in the kernel ahead
find_bounds    one warp of each thread block, for some of the rows
look_up        the warps that multiply, until they have it

No thread block waits for another one. Who comes before a bound is found writes all it has; and the warp that looks for
one stops when its own thread block has no tiles left. Which scores are written differs from run to run; the tokens that
are found do not.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import ceildiv

from ...device.selection import FULL_WARP
from ...rows.best import kth_by_bits
from .space import Extents

# What others write while the kernel runs, past the L1 cache.
load_bits = T.ptx.ld.relaxed.gpu.global_.u32
store_bits = T.ptx.st.relaxed.gpu.global_.u32
store_vector = T.ptx.st.global_.v4.u32
load_flag = T.ptx.ld.relaxed.cta.shared__cta.u32
store_flag = T.ptx.st.relaxed.cta.shared__cta.u32
# What a thread block says of itself, if anything: its first tiles are told, or it has no tiles left.
FIRST_TOLD, OVER = 1, 2
# Between two looks, in nanoseconds.
PAUSE = 200
# The upper bits of a bound, which are found one by one: it is less than the k-th best by 2^-7 of it at the most.
BITS = 16


def bound_of(e: Extents, io: Any, row: Any) -> Any:
    """Where a row's bound is: ordered bits, 0 as long as there is none."""
    return io.tops.ptr_to([row, e.list_tiles])


# fmt: off
@phase
def clear_tops(e, threads, /, io, top, rows, thread):
    """Clear the bounds of a strip's rows, and the largest scores of their tiles. The phase is (io, top, rows, thread),
    for `threads` threads of all thread blocks."""
    vectors: T.int32 = rows * (e.tops_pitch // 4)  # of the strip
    for i in T.serial((vectors - thread + (threads - 1)) // threads):
        store_vector(
            io.tops.ptr_to([top, (i * threads + thread) * 4]),
            T.uint32(0), T.uint32(0), T.uint32(0), T.uint32(0))


@phase
def load(e, /, io, s, p, row):
    """The largest of each group; the number of lanes that miss a tile goes to `reached`."""
    each = T.meta_var(ceildiv(e.first_tiles, 32))
    for j in T.unroll(each):
        s.seen[j] = T.uint32(0)
        if j * 32 + p.lane < e.first_tiles:
            load_bits(s.seen[j], io.tops.ptr_to([row, j * 32 + p.lane]))
    s.bits[0] = T.uint32(0)
    for j in T.unroll(e.groups_each):
        s.largest[j] = T.uint32(0)
    for j in T.unroll(each):
        s.largest[j % e.groups_each] = T.max(s.largest[j % e.groups_each], s.seen[j])
        if s.seen[j] == T.uint32(0) and j * 32 + p.lane < e.first_tiles:
            s.bits[0] = T.uint32(1)
    s.reached[0] = T.call_extern("uint32", "__reduce_add_sync", T.uint32(FULL_WARP), s.bits[0])


@T.inline
def listen(s):
    """Pause, then look whether the bound has been told."""
    T.cuda.nano_sleep(PAUSE)
    load_flag(s.heard[0], s.said.ptr_to([0]))
    # One lane's word for all.
    s.heard[0] = T.tvm_warp_shuffle(T.uint32(FULL_WARP), s.heard[0], 0, 32, 32)


@phase
def find_bounds(e, /, io, s, p, block):
    """Those of the strip's rows `block`, `block + blocks` and so on, for one warp.

    Reads: `tops` of the first tiles, as soon as all are there; `said`.
    Writes: the bounds; scratch is `seen`, `largest`, `bits`, `reached`, `heard`.
    Barriers: none.
    """
    s.heard[0] = T.uint32(0)
    # While its own thread block has its first tiles in hand, so have others: a look would come too early.
    while s.heard[0] == T.uint32(0):
        listen(s)
    for i in T.serial((s.rows[0] - block + (e.blocks - 1)) // e.blocks):
        row: T.int32 = s.top + i * e.blocks + block
        s.reached[0] = T.uint32(32)
        while s.reached[0] > T.uint32(0) and s.heard[0] != T.uint32(OVER):
            load(e)(io, s, p, row)
            if s.reached[0] > T.uint32(0):
                listen(s)
        if s.reached[0] == T.uint32(0):
            kth_by_bits(e.groups_each, e.k, BITS)(s.largest, s.reached, s.bits)
            if p.lane == 0:
                store_bits(bound_of(e, io, row), s.bits[0])


@phase
def look_up(e, /, io, s, p):
    """The bounds of the lane's rows, as far as they are found.

    Reads: bounds. Writes: `bound`. Barriers: none.
    """
    for turn in T.unroll(e.turns):
        if s.bound[turn] == T.uint32(0) and s.tile[0] >= e.stride and turn * 32 + p.lane < s.rows[0]:
            load_bits(s.bound[turn], bound_of(e, io, s.top + turn * 32 + p.lane))


@T.inline
def say(s, what):
    """For one thread."""
    store_flag(s.said.ptr_to([0]), T.uint32(what))
# fmt: on
