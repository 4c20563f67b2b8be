"""The kernel of `held_rows`, as the package's docstring tells it."""

from __future__ import annotations

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.arithmetic import LOG2_E
from ...device.cluster import cluster_arrive_relaxed, cluster_wait, place_in_grid
from ...device.mbarriers import await_arrivals
from ...device.overlap import wait_for_producer, wait_then_start_consumer
from ..ending import Own, own_of
from ..interface import gpu_program
from .agreement import begin_agreement
from .bound import find_tops
from .cluster import count_parts, filter_parts, prepare_exchange, share_parts, unite_parts
from .find import find_keys
from .held import take_held
from .paced import take_steps
from .rank import finish_agreed, finish_row
from .row import clear, load_row, locate_row
from .space import Layout
from .staged import stage_row, take_row
from .state import SUMS, State
from .sums import add_up, sum_of_warp


# fmt: off
@phase
def prepare_block(layout, /, s):
    """Do what depends neither on the producer kernel nor on the row.

    Writes: as `row.clear`, `agreement.begin_agreement` and `cluster.prepare_exchange`. Barriers: none.
    """
    clear(layout)(s)
    if layout.agreed:
        begin_agreement(layout)(s)
    if layout.cluster > 1:
        prepare_exchange(layout)(s)


@phase
def take_own_factor(own, /, s):
    """The factor of a row with a scale of its own (`ending.own_of`), else the one that there is.

    Reads: the row's temperature. Writes: `factor`. Barriers: none; the producer kernel has ended.
    """
    if own is not None:
        of_row = T.meta_var(own(s.io, s.row[0]))
        s.factor[0] = of_row.scale * T.float32(LOG2_E)


@phase
def load_and_bound(layout, own, /, s):
    """Steps 1 and 2: load the row, while all blocks come to be ready to receive; and find the bound.

    Reads: as the phases of `row` or `staged`.
    Writes: as these, and as `find_tops`.
    Barriers: the cluster's, and the block's.
    """
    prepare_block(layout)(s)
    if layout.cluster > 1:
        cluster_arrive_relaxed()
    wait_then_start_consumer()
    take_own_factor(own)(s)
    (stage_row if layout.staged else load_row)(layout)(s)
    if layout.cluster > 1:
        cluster_wait()
    T.cuda.cta_sync()
    if layout.staged:
        take_row(layout)(s)
    find_tops(layout)(s)


def load_and_agree(layout: Layout, own: Own | None) -> Phase:
    """The same where blocks agree on a bound: a warp more prepares the block, and later finds the bound. The phase is
    (s).

    Reads, writes: as the phases of `row` and `held`, or `staged` and `paced`. Barriers: the cluster's, and the block's.
    """
    prepare = prepare_block(layout)
    load, take = (stage_row(layout), take_steps(layout)) if layout.staged else (load_row(layout), take_held(layout))
    take_factor = take_own_factor(own)

    @T.inline
    def phase(s):
        if s.t < layout.threads:
            wait_then_start_consumer()
            take_factor(s)
            load(s)
        else:
            prepare(s)
            if own is not None:
                wait_for_producer()
                take_factor(s)
        if layout.cluster > 1:
            cluster_arrive_relaxed()
        T.cuda.cta_sync()
        if layout.cluster > 1:
            cluster_wait()
        take(s)

    return phase


@phase
def end_row(layout, /, s):
    """Steps 6 and 7: from the keys and sums of all blocks to the outputs, in the first block.

    Reads, writes, barriers: as the phases of `cluster` and `rank`.
    """
    if layout.cluster > 1:
        unite_parts(layout)(s)
    else:
        add_up(1, layout.block_warps)(s)
    finish_row(layout)(s)


@phase
def end_filtered(layout, /, s):
    """Finish a row whose bound is the same in all blocks."""
    if T.Cast("int32", s.united_sizes[0]) >= layout.k:
        filter_parts(layout)(s)
        await_arrivals(s.barriers.ptr_to([SUMS]))
        add_up(0, layout.entries)(s)
        finish_row(layout)(s)
    else:
        end_row(layout)(s)


@phase
def end_agreed(layout, /, s):
    """The same where blocks have agreed on a bound, which mostly leaves no more keys than are ranked at once.

    Reads, writes, barriers: as the phases of `cluster` and `rank`.
    """
    end = T.meta_var(end_row(layout))
    end_many = T.meta_var(end_filtered(layout) if layout.late else end)
    if layout.cluster > 1:
        count_parts(layout)(s)
    if s.size[0] >= layout.k and s.size[0] <= layout.at_once:
        finish_agreed(layout)(s)
    else:
        end_many(s)


@phase
def kernel(layout, own, /, io):
    """The kernel's body, over the operator's arguments (see `interface.gpu_program`)."""
    # In a cluster, sums are computed while keys are being sent; in a single block, while other warps find theirs.
    cluster = T.meta_var(layout.cluster)
    T.device_entry()
    T.attr({"tirx.launch_bounds_min_blocks_per_sm": layout.resident})
    block, part = T.meta_var(place_in_grid(io.batch, cluster))
    t = T.thread_id([layout.block_threads])
    s = T.meta_var(State.alloc(layout, layout.bytes, io=io, t=t, part=part))
    # The steps of the package's docstring.
    locate_row(layout)(s, block)
    (load_and_agree if layout.agreed else load_and_bound)(layout, own)(s)
    find_keys(layout, sum_of_warp(layout) if cluster == 1 else None)(s)
    if cluster > 1:
        share_parts(layout)(s)
    (end_agreed if layout.agreed else end_row)(layout)(s)
# fmt: on


def program(problem: SoftmaxTopk, decisions: Decisions) -> Program:
    """The program of a point."""
    return gpu_program(problem, kernel(Layout.of(problem, decisions), own_of(problem)), overlapped=True)
