"""The program of `fused_step`: its workspaces, and its kernels, each a list of phases.

`look_up` words that reach the threshold `product` in this module: scores of the thread block's share of the frequent
words, and of those found by `look_up` `merge` the best words of each row
"""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program, Workspace
from tvm_sparse.operators.lsh_topk.problem import LshTopk

from ...device.overlap import start_consumer, wait_for_producer
from ...device.region import device_region
from ...device.words import held_address
from ...interface import gpu_program
from .look_up import look_up
from .merge import merge
from .product import fetch_names, find_share, frequent_each, frequent_first, keep_states, multiply_all, stage_states
from .space import OCTET, Extents
from .state import ProductState


# fmt: off
@phase
def begin(e, /, s, io, flat):
    """Which rows and which tokens the thread block `flat` multiplies. Barriers: none."""
    s.block = flat % e.group_blocks
    group: T.int32 = flat // e.group_blocks
    s.first_list = group // e.row_groups * e.group_lists
    s.first_row = s.first_list * e.beam + group % e.row_groups * e.rows
    if e.row_groups == 1:
        s.rows = T.min(io.lists - s.first_list, e.group_lists) * e.beam
    else:
        s.rows = T.min(e.beam - group % e.row_groups * e.rows, e.rows)
    s.begin = T.min(s.block * frequent_each(e, io), frequent_first(e, io))
    s.part = 0
    s.many = T.min(frequent_each(e, io), frequent_first(e, io) - s.begin)
    for n in T.serial((e.octets * OCTET - s.t + (e.threads - 1)) // e.threads):
        row: T.int32 = n * e.threads + s.t
        s.best[row] = T.uint32(0)
        if row < s.rows:
            io.heads[s.first_row + row, s.block] = T.uint32(0)
            io.sums[s.first_row + row, s.block] = T.float64(0)
    s.base = held_address("u64", io.embedding.ptr_to([0, 0]))


@phase
def product(e, /, io):
    """The second kernel."""
    begin_states = T.meta_var(stage_states(e) if e.staged > 0 else keep_states(e))
    fetch = T.meta_var(fetch_names(e))
    with device_region():
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": e.resident})
        groups = T.meta_var((io.lists + (e.group_lists - 1)) // e.group_lists * e.row_groups)
        flat = T.cta_id([groups * e.group_blocks])
        t = T.thread_id([e.threads])
        s = T.meta_var(ProductState.of_thread(e, t))
        begin(e)(s, io, flat)
        if e.overlap == 1:
            start_consumer()
        T.cuda.cta_sync()
        fetch(s, io, 0, T.min(s.many, e.tile))
        begin_states(s, io)
        for part in T.serial(2):
            s.part = part
            if part == 1:
                if e.overlap == 1:
                    wait_for_producer()
                find_share(e)(s, io)
                s.many = s.upto[e.group_lists - 1]
                if e.group_lists > 1:
                    fetch(s, io, 0, T.min(s.many, e.tile))
            multiply_all(e)(s, io)
# fmt: on


def program(problem: LshTopk, decisions: Decisions) -> Program:
    """The program of a point."""
    e = Extents.of(problem, decisions)
    first, second, third = look_up(e), product(e), merge(e)
    own = (
        Workspace("bitmap", ("lists", e.bitmap), "uint32"),
        Workspace("found", ("lists", 2), "int32"),  # how many words reached the threshold, and how many rows are done
        Workspace("queue", ("lists", e.vocab), "int32", fill=None),  # these words
        Workspace("keys", ("rows", "frequent"), "uint64", fill=None),
        Workspace("others", ("rows", e.reached_most), "uint64", fill=None),
        Workspace("heads", ("rows", e.group_blocks), "uint32", fill=None),
        Workspace("sums", ("rows", e.group_blocks), "float64", fill=None),
    )

    # fmt: off
    @T.inline
    def body(io):
        first(io)
        second(io)
        third(io)
    # fmt: on
    return gpu_program(problem, body, own, overlapped=e.overlap > 0)
