"""The kernel of `warp_rows`: its phases in their order. The package's docstring tells what they do together."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.arithmetic import LOG2_E
from ...device.overlap import wait_then_start_consumer
from ...device.words import held_address
from ..ending import Ending, Own, own_of
from ..interface import gpu_program
from . import bins, bisection, counting, levels, results, row
from .space import Layout
from .state import Place, State


def kernel(layout: Layout, own: Own | None, ending: Ending | None) -> Phase:
    """The kernel's body, over the operator's arguments (see `interface.gpu_program`)."""
    find_topk = small_k(layout) if layout.counted else larger_k(layout)
    clear_bins = bins.clear_bins(layout)
    load_row = row.load_row(layout)
    find_maxima = row.find_maxima(layout)
    bound = (row.bound_by_lanes if layout.counted else row.bound_by_groups)(layout)
    sum_exponentials = row.sum_exponentials(layout)
    write_asked = results.write_asked(layout)

    # fmt: off
    @T.inline
    def body(io):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": layout.resident})
        block = T.cta_id([(io.batch + (layout.rows - 1)) // layout.rows])
        t = T.thread_id([layout.threads])
        s = T.meta_var(State.alloc(layout, layout.rows * layout.bytes))

        # Which row the warp has, and where it lies.
        lane: T.int32 = t % 32
        warp: T.int32 = t // 32
        row: T.int64 = T.Cast("int64", block) * T.int64(layout.rows) + T.Cast("int64", warp)
        lead: T.int32 = 0 if layout.aligned else T.Cast("int32", (row * layout.vocab) % layout.width)
        left: T.int32 = T.Cast(
            "int32", T.min(T.Cast("int64", io.batch) - row, T.int64(layout.width + 1))) * layout.vocab
        key_base: T.int32 = warp * layout.keys
        at = T.meta_var(Place(lane, warp, row, lead, key_base, left))

        # What does not depend on a producer kernel.
        s.factor[0] = io.scale * T.float32(LOG2_E)
        if layout.bins > 0:
            clear_bins(io, at, s)
        if layout.overlapped:
            wait_then_start_consumer()

        if row >= T.Cast("int64", io.batch):
            T.thread_return()
        if own is not None:
            of_row = T.meta_var(own(io, row))
            s.factor[0] = of_row.scale * T.float32(LOG2_E)
        load_row(io, at, s)
        find_maxima(io, at, s)
        bound(io, at, s)
        sum_exponentials(io, at, s)
        s.outputs_at[0] = held_address("u64", io.values.ptr_to([row, 0]))
        s.outputs_at[1] = held_address("u64", io.indices.ptr_to([row, 0]))
        find_topk(io, at, s)
        if layout.ids > 0:
            write_asked(io, at, s)
        if ending is not None:
            ending.finish(of_row, row, lane, T.cuda.warp_sync, None)
    # fmt: on

    return body


@phase
def small_k(layout, /, io, at, s):
    """Find the k largest, for small k: the lanes' maxima give the threshold."""
    counting.collect_reached(layout)(io, at, s)
    if s.settled[0] == 0:
        bisection.enclose_by_lanes(layout)(io, at, s)
        bisection.bisect(layout)(io, at, s)
        bisection.collect_selected(layout)(io, at, s)
    counting.rank_by_counting(layout)(io, at, s)


@phase
def larger_k(layout, /, io, at, s):
    """Find the k largest, for larger k: elements are counted in bins."""
    bins.count_bins(layout)(io, at, s)
    bins.scan_bins(layout)(io, at, s)
    if s.settled[0] != 0:
        bins.fill_bins(layout)(io, at, s)
        bins.rank_in_bins(layout)(io, at, s)
    else:
        levels.order_row(layout)(io, at, s)
        levels.place_levels(layout)(io, at, s)
        if s.settled[0] == 0:
            # Load the row again: other things needed its registers.
            row.load_row(layout)(io, at, s)
            bisection.enclose_by_bin(layout)(io, at, s)
            bisection.bisect(layout)(io, at, s)
            bisection.collect_selected(layout)(io, at, s)
            bisection.sort_keys(layout)(io, at, s)
        bisection.write_sorted(layout)(io, at, s)


def program(problem: SoftmaxTopk, decisions: Decisions) -> Program:
    """The program of a point."""
    layout = Layout.of(problem, decisions)
    return gpu_program(problem, kernel(layout, own_of(problem), None), overlapped=layout.overlapped)
