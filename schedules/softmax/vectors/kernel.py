"""The vector kernels: how threads are placed, and the phases that each row goes through."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import Decisions, Program

from ...device.cluster import cluster_arrive
from ...rows import hold, join
from ...rows import sum as sums
from ...rows.cut import Extents, Keep
from ...rows.state import BlockState, RowState, Views
from ..interface import gpu_program
from ..problems import RowProblem, extents
from . import write as results


def build(problem: RowProblem, decisions: Decisions, keep: Keep) -> Program:
    return gpu_program(problem, main(extents(problem, decisions, keep)))


# fmt: off
def main(ext: Extents) -> Callable[..., Any]:
    """The body of a kernel: its threads, and the row that each of them has."""
    one_row = row_of_threads(ext)
    threads, rows = ext.threads, ext.rows

    @T.inline
    def body(io):
        T.device_entry()
        if ext.keep == "registers":
            # Otherwise the compiler takes as many registers as one block may have, to overlap more of the arithmetic.
            T.attr({"tirx.launch_bounds_min_blocks_per_sm": ext.resident})
        if ext.cluster > 1:
            group = T.cluster_id([io.batch])
            part = T.cta_id_in_cluster([ext.cluster])
        else:
            group = T.cta_id([(io.batch + (rows - 1)) // rows])
            part = 0
        thread = T.thread_id([threads * rows])
        block = BlockState(ext)
        if ext.cluster > 1:
            # Every block has to have begun before another one writes to it (`join_cluster` waits).
            cluster_arrive()
        if rows > 1:
            if group * rows + thread // threads < io.batch:
                row = T.meta_var(T.Cast("int64", group) * rows + T.Cast("int64", thread // threads))
                one_row(io, block, row, part, thread % threads)
        else:
            one_row(io, block, T.Cast("int64", group), part, thread)

    return body


def row_of_threads(ext: Extents) -> Callable[..., Any]:
    """What the threads of one row do, phase by phase."""
    locate = hold.locate(ext)
    begin_pair, accumulate, add_edge = sums.begin_pair(ext), sums.accumulate(ext), sums.add_edge(ext)
    join_warp, join_block, join_cluster = join.join_warp(), join.join_block(ext), join.join_cluster(ext)
    normalise, write, write_edge = results.normalise(ext), results.write(ext), results.write_edge(ext)
    write_value = results.write_value()

    @T.inline
    def one_row(io, block, row, part, t):
        views = Views(ext, io)
        log = T.meta_var(io.log if ext.writes else None)
        s = RowState(ext, row, part, t)
        locate(s, io.logits)

        begin_pair(s)
        accumulate(s, views.words, block, log)
        add_edge(s)

        join_warp(s)
        if ext.cluster > 1:
            join_cluster(s, block)
        elif ext.warps > 1:
            join_block(s, block)

        if ext.writes:
            normalise(s, log)
            write(s, views, block, log)
            write_edge(s, io.probabilities, log)
        else:
            write_value(s, io.values)

    return one_row
# fmt: on
