"""The kernel of `warp_rows`: its phases in their order. The package's docstring tells what they do together."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.arithmetic import LOG2_E
from ...device.overlap import wait_then_start_consumer
from ..ending import Ending, Own, own_of
from ..interface import gpu_program
from . import bins, bisection, counting, levels, pairs, results, row
from .space import WARP, Layout
from .state import Place, State


# fmt: off
@phase
def locate_row(layout, work, /, io, s, row, lane, warp):
    """Do `work`, a phase (io, at, s), at the place of these lanes' row, the `warp`-th of its thread block.

    Reads: the arguments. Writes, barriers: those of `work`.
    """
    lead: T.int32 = 0 if layout.aligned else T.Cast("int32", (row * layout.vocab) % layout.width)
    left: T.int32 = T.Cast(
        "int32", T.min(T.Cast("int64", io.batch) - row, T.int64(layout.width + 1))) * layout.vocab
    key_base: T.int32 = layout.first_key + warp * layout.keys
    at = T.meta_var(Place(lane, warp, row, lead, key_base, left))
    work(io, at, s)


@phase
def take_own_factor(own, /, io, row, s):
    """The factor of a row's exponents: with a scale of its own (`ending.own_of`), if there are any.

    Reads: the arguments, the row's temperature. Writes: `factor`. Barriers: none; the producer kernel has ended.
    """
    if own is not None:
        of_row = T.meta_var(own(io, row))
        s.factor[0] = of_row.scale * T.float32(LOG2_E)
    else:
        s.factor[0] = io.scale * T.float32(LOG2_E)


@phase
def one_row(layout, own, ending, /, io, at, s):
    """A row that a warp has alone, from its logits to its outputs.

    Reads: the row, `factor`. Writes: the outputs. Barriers: of the warp.
    """
    if own is not None:
        of_row = T.meta_var(own(io, at.row))
        s.factor[0] = of_row.scale * T.float32(LOG2_E)
    row.load_row(layout)(io, at, s)
    row.find_maxima(layout)(io, at, s)
    (row.bound_by_lanes if layout.counted else row.bound_by_groups)(layout)(io, at, s)
    row.sum_exponentials(layout)(io, at, s)
    results.locate_outputs(io, at, s)
    (small_k if layout.counted else larger_k)(layout)(io, at, s)
    if layout.ids > 0:
        results.write_asked(layout)(io, at, s, layout.ids)
    if ending is not None:
        ending.finish(of_row, at.row, at.lane, T.cuda.warp_sync, None)


@phase
def one_of_two(layout, own, /, io, at, s):
    """One of the rows that a warp has at the same time, if `settled` says afterwards that none needs a bisection.

    Reads: the row, `present`. Writes: `settled`; the outputs, if that is not 0. Barriers: of the warp.
    """
    take_own_factor(own)(io, at.row, s)
    row.load_row(layout)(io, at, s)
    row.find_maxima(layout)(io, at, s)
    row.bound_by_lanes(layout)(io, at, s)
    row.sum_exponentials(layout)(io, at, s)
    pairs.collect_reached(layout)(at, s)
    if s.settled[0] != 0:
        results.locate_outputs(io, at, s)
        pairs.rank_by_counting(layout)(io, at, s)
        if layout.ids > 0:
            results.write_asked(layout)(io, at, s, T.Select(s.present[0] != 0, layout.ids, 0))


@phase
def alone(layout, own, /, io, at, s):
    """A row again, which the whole warp has alone.

    Reads: the row. Writes: the outputs. Barriers: of the warp.
    """
    take_own_factor(own)(io, at.row, s)
    one_row(layout, own, None)(io, at, s)


def kernel(layout: Layout, own: Own | None, ending: Ending | None) -> Phase:
    """The kernel's body, over the operator's arguments (see `interface.gpu_program`)."""
    return whole_warps(layout, own, ending) if layout.lanes == WARP else half_warps(layout, own)


@phase
def first_row(layout, own, ending, /, io, at, s):
    """What a warp does that has one row at a time: its row, if there is one, after the producer kernel.

    Writes: the outputs. Barriers: of the warp.
    """
    # What does not depend on a producer kernel.
    s.factor[0] = io.scale * T.float32(LOG2_E)
    if layout.bins > 0:
        bins.clear_bins(layout)(io, at, s)
    if layout.overlapped:
        wait_then_start_consumer()
    if at.row >= T.Cast("int64", io.batch):
        T.thread_return()
    one_row(layout, own, ending)(io, at, s)


@phase
def whole_warps(layout, own, ending, /, io):
    """The body where each warp has one row at a time."""
    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": layout.resident})
    block = T.cta_id([(io.batch + (layout.rows - 1)) // layout.rows])
    t = T.thread_id([layout.threads])
    s = T.meta_var(State.alloc(layout, layout.bytes))
    lane: T.int32 = t % 32
    warp: T.int32 = t // 32
    own_row: T.int64 = T.Cast("int64", block) * T.int64(layout.rows) + T.Cast("int64", warp)
    locate_row(layout, first_row(layout, own, ending))(io, s, own_row, lane, warp)


@phase
def half_warps(layout, own, /, io):
    """The body where each warp has two rows at a time (`pairs`)."""
    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": layout.resident})
    block = T.cta_id([(io.batch + (layout.rows - 1)) // layout.rows])
    t = T.thread_id([layout.threads])
    s = T.meta_var(State.alloc(layout, layout.bytes))
    number: T.int32 = t // layout.lanes
    at_row: T.int64 = T.Cast("int64", block) * T.int64(layout.rows) + T.Cast("int64", number)
    first: T.int64 = at_row - T.Cast("int64", t % 32 // layout.lanes)
    if layout.overlapped:
        wait_then_start_consumer()
    if first >= T.Cast("int64", io.batch):
        T.thread_return()
    s.present[0] = T.if_then_else(at_row < T.Cast("int64", io.batch), 1, 0)
    # Lanes of an absent row work on the last one.
    locate_row(layout, one_of_two(layout, own))(
        io, s, T.min(at_row, T.Cast("int64", io.batch) - T.int64(1)), t % layout.lanes, number)
    if s.settled[0] == 0:
        for i in T.serial(layout.warp_rows):
            if first + i < T.Cast("int64", io.batch):
                locate_row(layout.alone, alone(layout.alone, own))(
                    io, s, first + i, t % 32, t // 32)
            # The next row's keys take the places of this one's.
            T.cuda.warp_sync()
# fmt: on


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
