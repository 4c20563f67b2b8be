"""The vector kernels: how threads are placed, and the phases that each row goes through."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import phase
from tvm_sparse.core.template import Decisions, Program

from ...device.cluster import cluster_arrive, place_in_grid
from ...rows import hold, join
from ...rows import sum as sums
from ...rows.cut import Keep
from ...rows.state import BlockState, RowState, Views
from ..interface import gpu_program
from ..problems import RowProblem, extents
from . import write as results


def build(problem: RowProblem, decisions: Decisions, keep: Keep) -> Program:
    return gpu_program(problem, main(extents(problem, decisions, keep)))


# fmt: off
@phase
def main(ext, /, io):
    """The body of a kernel: its threads, and the row that each of them has."""
    one_row, threads = T.meta_var(row_of_threads(ext)), T.meta_var(ext.threads)
    rows = T.meta_var(ext.rows)
    T.device_entry()
    if ext.keep == "registers":
        # Otherwise the compiler takes as many registers as one block may have, to overlap more of the arithmetic.
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": ext.resident})
    group, part = T.meta_var(place_in_grid(io.batch if rows == 1 else (io.batch + (rows - 1)) // rows, ext.cluster))
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


@phase
def row_of_threads(ext, /, io, block, row, part, t):
    """What the threads of one row do, phase by phase."""
    views = Views(ext, io)
    log = T.meta_var(io.log if ext.writes else None)
    s = RowState(ext, row, part, t)
    hold.locate(ext)(s, io.logits)

    sums.begin_pair(ext)(s)
    sums.accumulate(ext)(s, views.words, block, log)
    sums.add_edge(ext)(s)

    join.join_warp(s)
    if ext.cluster > 1:
        join.join_cluster(ext)(s, block)
    elif ext.warps > 1:
        join.join_block(ext)(s, block)

    if ext.writes:
        results.normalise(ext)(s, log)
        results.write(ext)(s, views, block, log)
        results.write_edge(ext)(s, io.probabilities, log)
    else:
        results.write_value(s, io.values)
# fmt: on
