"""The program of `fused_step`: its workspaces, and its kernels, each a list of phases.

first     of some thread blocks find_hits, and then the product of words that were won, as many at a time as the list
          has room for; of the others the product of frequent words; each block's best keys
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
from .product import clear_slots, first_tile, frequent_words, multiply_words, stage_states, won_words
from .space import LISTED, Extents
from .state import alloc_state, wait_late


# fmt: off
def step(e: Extents) -> Callable[..., Any]:
    """The first kernel, called with (io)."""
    stage = stage_states(e)
    find, take, clear = find_hits(e, stage), take_waiting(e), clear_slots(e)
    multiply_won = multiply_words(e, won_words(e))
    frequent = frequent_words(e)
    name, ask, multiply_frequent = *first_tile(e, frequent), multiply_words(e, frequent)

    @T.inline
    def begin(s, io, flat):
        s.block = flat % e.blocks
        s.first_list = flat // e.blocks * e.group_lists
        s.first_row = s.first_list * e.beam
        s.rows = T.min(io.lists - s.first_list, e.group_lists) * e.beam
        if s.t < e.rows:
            s.best[s.t] = T.uint32(0)
        if s.t == 0:
            s.listed[0] = 0
            s.odd[0] = 0

    @T.inline
    def look_up(s, io):
        """A thread block with a row."""
        find(s, io)
        T.cuda.cta_sync()
        s.is_odd = s.odd[0]
        turns: T.int32 = (s.listed[0] + (LISTED - 1)) // LISTED
        for n in T.serial(turns):
            if n > 0:
                take(s, io)
            multiply_won(s, io, T.min(s.listed[0], LISTED), False)
            if n == 0:
                clear(s, io)
        if turns == 0:
            clear(s, io)

    @T.inline
    def multiply(s, io):
        """A thread block with frequent words."""
        each: T.int32 = (io.frequent + (e.product_blocks - 1)) // e.product_blocks
        s.begin = T.min((s.block - e.group_rows) * each, io.frequent)
        s.mine = T.min(each, io.frequent - s.begin)
        s.round = 0
        name(s, io, T.min(s.mine, e.tile))
        wait_late(e.overlap)
        ask(s, io, T.min(s.mine, e.tile))
        stage(s, io)
        s.is_odd = s.odd[0]
        multiply_frequent(s, io, s.mine, True)

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
            if s.block < e.group_rows:
                look_up(s, io)
            else:
                multiply(s, io)
            finish_block(s, io)

    return kernel
# fmt: on


def program(problem: LshTopk, e: Extents) -> Program:
    """The program of one point of the space."""
    first, second = step(e), merge(e)
    own = (
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
