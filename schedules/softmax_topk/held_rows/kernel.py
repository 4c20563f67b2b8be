"""The kernel of `held_rows`, as the package's docstring tells it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ...device.cluster import cluster_arrive_relaxed, cluster_wait
from ...device.overlap import wait_then_start_consumer
from .bound import find_tops
from .cluster import prepare_exchange, share_parts
from .keys import find_keys
from .rank import finish_row
from .row import clear, load_row, locate_row
from .space import Layout
from .staged import stage_row, take_row
from .state import State
from .sums import add_up, sum_of_warp


# fmt: off
def kernel(layout: Layout) -> Callable[..., Any]:
    """The kernel's body, over the operator's arguments (see `interface.gpu_program`)."""
    threads, cluster = layout.threads, layout.cluster
    locate, prepare, exchange = locate_row(layout), clear(layout), prepare_exchange(layout)
    load, take = (stage_row if layout.staged else load_row)(layout), take_row(layout)
    tops, share, finish, add = find_tops(layout), share_parts(layout), finish_row(layout), add_up(1, layout.warps)
    # In a cluster sums are made while keys are on their way, in a block alone while other warps find theirs.
    find = find_keys(layout, sum_of_warp(layout) if cluster == 1 else None)

    @T.inline
    def body(io):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": layout.resident})
        if cluster > 1:
            block = T.cluster_id([io.batch])
            part = T.cta_id_in_cluster([cluster])
        else:
            block = T.cta_id([io.batch])
            part = 0
        t = T.thread_id([threads])
        s = T.meta_var(State.alloc(layout, layout.bytes, io=io, t=t, part=part))
        # What needs nothing of the producer kernel.
        locate(s, block)
        prepare(s)
        if cluster > 1:
            exchange(s)
            cluster_arrive_relaxed()
        if layout.overlap:
            wait_then_start_consumer()
        # 1. Load the row, and look at what is staged as it comes. Meanwhile all blocks come to be ready to receive.
        load(s)
        if cluster > 1:
            cluster_wait()
        T.cuda.cta_sync()
        if layout.staged:
            take(s)
        # 2. and 3. The bound, and what reaches it.
        tops(s)
        find(s)
        # 4. to 6. Share the parts of a cluster; sums.
        if cluster > 1:
            share(s)
        else:
            add(s)
        # 7. Rank the keys.
        finish(s)

    return body
# fmt: on
