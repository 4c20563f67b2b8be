"""The program of `fused_step`: its workspaces, and its kernels, each a list of phases.

first     the frequent words' tile (`product`) beside find_hits, or `rows` in thread blocks of their own; multiply_rest,
          of the words that were won as many at a time as the list has room for; the thread block's best keys
second    `merge`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.template import Program, Workspace
from tvm_sparse.operators.lsh_topk.problem import LshTopk

from ...device.overlap import start_consumer, wait_then_start_consumer
from ...device.region import device_region
from ..interface import gpu_program
from .hits import find_hits, take_waiting
from .merge import merge
from .product import (
    ask_words,
    clear_slots,
    first_jobs,
    frequent_words,
    multiply_rest,
    multiply_tile,
    name_words,
    stage_states,
)
from .rows import alloc_row_state, begin_row, count_hits, take_reached, vote
from .space import LISTED, WARP, Extents
from .state import alloc_state, wait_late


# fmt: off
def by_blocks(e: Extents, multiply_frequent: Callable[..., Any], stage: Callable[..., Any]) -> Callable[..., Any]:
    """Some thread blocks find hits, others multiply frequent words; called with (s, io)."""
    prepare, count, vote_all, take = begin_row(e), count_hits(e), vote(e), take_reached(e)

    @T.inline
    def find(b, io):
        s = T.meta_var(alloc_row_state(e, b))
        prepare(s, io)
        wait_late(e.overlap)
        stage(b, io)
        count(s, io)
        vote_all(s, io)
        T.cuda.cta_sync()
        take(s, io)

    @T.inline
    def phase(s, io):
        if s.block >= e.counters:
            multiply_frequent(s, io)
        elif s.block // e.row_blocks < s.rows:
            find(s, io)

    return phase


def step(e: Extents) -> Callable[..., Any]:
    """The first kernel, called with (io)."""
    frequent = frequent_words(e)
    stage, find, multiply_others = stage_states(e), find_hits(e), multiply_rest(e, frequent)
    clear, take = clear_slots(e), take_waiting(e)
    name, ask = first_jobs(e, frequent, name_words(e, frequent)), first_jobs(e, frequent, ask_words(e))
    multiply = multiply_tile(e, frequent)

    def number_of_block(io: Any) -> Any:
        groups = (io.lists + (e.group_lists - 1)) // e.group_lists
        if e.row_blocks <= 1:
            return T.cta_id([groups * e.blocks])
        cluster = T.cluster_id([groups * (e.blocks // e.row_blocks)])
        return cluster * e.row_blocks + T.cta_id_in_cluster([e.row_blocks])

    @T.inline
    def begin(s, io, flat):
        s.block = flat % e.blocks
        s.first_list = flat // e.blocks * e.group_lists
        s.first_row = s.first_list * e.beam
        s.rows = T.min(io.lists - s.first_list, e.group_lists) * e.beam
        each: T.int32 = (io.frequent + (e.multipliers - 1)) // e.multipliers
        s.begin = T.min((s.block - e.counters) * each, io.frequent)
        s.mine = T.min(each, io.frequent - s.begin)
        if e.row_blocks > 0:
            if s.block < e.counters:
                s.mine = 0
        if s.t < e.rows:
            s.best[s.t] = T.uint32(0)
        s.spare = T.max(s.mine - e.tile, 0)
        if s.t == 0:
            s.listed[0] = 0
            s.odd[0] = 0

    @T.inline
    def multiply_frequent(s, io):
        count: T.int32 = T.min(s.mine, e.tile)
        name(s, io, count)
        wait_late(e.overlap)
        ask(s, io, count)
        stage(s, io)
        multiply(s, io, count)

    @T.inline
    def by_warps(s, io):
        if s.t < e.product_warps * WARP:
            multiply_frequent(s, io)
        else:
            find(s, io)

    find_and_multiply = by_blocks(e, multiply_frequent, stage) if e.row_blocks else by_warps

    def wants_clear(s: Any, n: Any) -> Any:
        """Once, where there are places to clear."""
        return tirx.all(n == 0, s.block < e.counters) if e.row_blocks else n == 0

    @T.inline
    def finish_block(s, io):
        if s.t < s.rows:
            io.heads[s.first_row + s.t, s.block] = s.best[s.t]
            io.sums[s.first_row + s.t, s.block] = T.Select(
                s.best[s.t] == T.uint32(0), T.float64(0), s.exponentials[s.t])

    @T.inline
    def kernel(io):
        with device_region():
            flat = number_of_block(io)
            t = T.thread_id([e.threads])
            s = T.meta_var(alloc_state(e, flat, t))
            begin(s, io, flat)
            T.cuda.cta_sync()
            if e.overlap == 1:
                wait_then_start_consumer()
            if e.overlap == 2:
                start_consumer()
            find_and_multiply(s, io)
            T.cuda.cta_sync()
            turns: T.int32 = (T.max(s.listed[0], 1) + (LISTED - 1)) // LISTED
            for n in T.serial(turns):
                if n > 0:
                    take(s, io)
                multiply_others(s, io, n)
                if wants_clear(s, n):
                    clear(s, io)
                s.spare = 0
            finish_block(s, io)

    return kernel
# fmt: on


def program(problem: LshTopk, e: Extents) -> Program:
    """The program of one point of the space."""
    first, second = step(e), merge(e)
    hits = () if e.row_blocks else (Workspace("hits", ("rows", e.cells), "uint32"),)
    own = (
        *hits,
        Workspace("bitmap", ("lists", e.bitmap), "uint32"),
        Workspace("found", ("lists", 3), "int32"),
        Workspace("keys", ("rows", "frequent"), "uint64"),
        Workspace("others", ("rows", e.slots + e.vocab), "uint64"),
        Workspace("heads", ("rows", e.blocks), "uint32"),
        Workspace("sums", ("rows", e.blocks), "float64"),
    )

    # fmt: off
    @T.inline
    def body(io):
        first(io)
        second(io)
    # fmt: on
    return gpu_program(problem, body, own, overlapped=e.overlap > 0)
