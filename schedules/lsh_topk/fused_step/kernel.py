"""The program of `fused_step`: its workspaces, and its kernels, each a list of phases.

first     the frequent words' tile (`product`) beside find_hits; multiply_rest, of the words that were won as many at a
          time as the list has room for; the thread block's best keys
second    `merge`
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
from .space import LISTED, WARP, Extents
from .state import alloc_state, wait_late


# fmt: off
def step(e: Extents) -> Callable[..., Any]:
    """The first kernel, called with (io)."""
    frequent = frequent_words(e)
    stage, find, multiply_others = stage_states(e), find_hits(e), multiply_rest(e, frequent)
    clear, take = clear_slots(e), take_waiting(e)
    name, ask = first_jobs(e, frequent, name_words(e, frequent)), first_jobs(e, frequent, ask_words(e))
    multiply = multiply_tile(e, frequent)

    @T.inline
    def begin(s, io, flat):
        s.block = flat % e.blocks
        s.first_list = flat // e.blocks * e.group_lists
        s.first_row = s.first_list * e.beam
        s.rows = T.min(io.lists - s.first_list, e.group_lists) * e.beam
        each: T.int32 = (io.frequent + (e.blocks - 1)) // e.blocks
        s.begin = T.min(s.block * each, io.frequent)
        s.mine = T.min(each, io.frequent - s.begin)
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
    def finish_block(s, io):
        if s.t < s.rows:
            io.heads[s.first_row + s.t, s.block] = s.best[s.t]
            io.sums[s.first_row + s.t, s.block] = T.Select(
                s.best[s.t] == T.uint32(0), T.float64(0), s.exponentials[s.t])

    @T.inline
    def kernel(io):
        with device_region():
            flat = T.cta_id([(io.lists + (e.group_lists - 1)) // e.group_lists * e.blocks])
            t = T.thread_id([e.threads])
            s = T.meta_var(alloc_state(e, flat, t))
            begin(s, io, flat)
            T.cuda.cta_sync()
            if e.overlap == 1:
                wait_then_start_consumer()
            if e.overlap == 2:
                start_consumer()
            if t < e.product_warps * WARP:
                multiply_frequent(s, io)
            else:
                find(s, io)
            T.cuda.cta_sync()
            turns: T.int32 = (T.max(s.listed[0], 1) + (LISTED - 1)) // LISTED
            for n in T.serial(turns):
                if n > 0:
                    take(s, io)
                multiply_others(s, io, n)
                if n == 0:
                    clear(s, io)
                s.spare = 0
            finish_block(s, io)

    return kernel
# fmt: on


def program(problem: LshTopk, e: Extents) -> Program:
    """The program of one point of the space."""
    first, second = step(e), merge(e)
    own = (
        Workspace("hits", ("rows", e.cells), "uint32"),
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
