"""The kernel of both templates, as the package's docstring tells it; phases are in the files they are imported from."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase
from tvm_sparse.core.template import Decisions, Program
from tvm_sparse.operators.softmax_topk.problem import SoftmaxTopk

from ...device.arithmetic import LN_2, LOG2_E, is_nan
from ...device.cluster import place_in_grid
from ...device.loops import loop_of
from ...device.references import exact_factor, is_far, unit_of
from ...device.selection import FULL_WARP, bits_value
from ..ending import Ending, Own, end_of_block, own_of
from ..finishing import complete, write_given_columns
from ..interface import gpu_program
from .cluster import agree, await_others, call_others, share_parts
from .deferred import finish_by_one_warp, search_marked
from .layout import Layout
from .rank import exponent, rank_survivors
from .state import ALL_AGAIN, LOWER_AGAIN, LOWEST, READINGS, SETTLED, SUM_AGAIN, WRITTEN, State, no_good
from .stream import add_up, await_producer, begin_pass, stream_row
from .tiles import locate_row


# fmt: off
@phase
def gather_survivors(layout, /, s):
    """Let every thread know the block's number of survivors and its largest element, once the share has been read.

    Reads: `count`, `warp_largest`. Writes: `size`, `largest`. Barriers: none.
    """
    s.size[0] = s.count[0]
    s.ordered[0] = T.call_extern(
        "uint32", "__reduce_max_sync", T.uint32(FULL_WARP), s.warp_largest[s.t % layout.tiling.warps])
    s.largest[0] = bits_value(s.ordered[0])


@phase
def settle(layout, /, s, attempt):
    """Find out whether there are enough survivors, and whether the sum is finite.

    If only the sum is of no use, k elements and more reach the threshold, and so they do again. If fewer do, a lower
    threshold is likely to do, once. Neither holds if the sum is NaN: the row may have NaN, which rank first and are
    found only by a reading without a threshold. Parts that are infinite make the sum of a cluster NaN as well, so that
    there each part is looked at.

    Reads: `size`, `threshold`, `sum`, `united_sum`.
    Writes: `settled`; a row is read for its sum only once more, and `READINGS` times in all.
    Barriers: of a cluster those of `agree`.
    """
    lowered = T.meta_var(LOWER_AGAIN if layout.lowers else ALL_AGAIN)
    s.settled[0] = SETTLED
    if s.size[0] < layout.k and s.threshold[0] > LOWEST:
        s.settled[0] = T.Select(attempt == 0, lowered, ALL_AGAIN)
    elif no_good(s.sum[0]) and attempt == 0:
        s.settled[0] = SUM_AGAIN
    if s.settled[0] != SETTLED:
        if layout.tiling.cluster == 1:
            if is_nan(s.sum[0]):
                s.settled[0] = ALL_AGAIN
        elif s.part == 0:
            for b in T.serial(layout.tiling.cluster):
                if is_nan(s.united_sum[b]):
                    s.settled[0] = ALL_AGAIN
    if attempt == READINGS - 1:
        s.settled[0] = SETTLED
    if layout.tiling.cluster > 1:
        agree(layout)(s)


@T.inline
def refer_to_largest(s):
    """Take the row's largest element for the reference of the exponentials.

    Reads: `largest`, `factor`.
    Writes: `reference`; `factor`, if the reference is far (see `device.references`).
    Barriers: none.
    """
    s.reference[0] = s.largest[0] * s.factor[0]
    if is_far(s.reference[0]):
        s.factor[0] = exact_factor(s.largest[0])
        s.reference[0] = s.largest[0] * s.factor[0]


@T.inline
def invert_sum(s):
    """What outputs need of the sum: its inverse for probabilities, or its logarithm.

    Reads: `sum`. Writes: `inverse`, `logarithm`. Barriers: none.
    """
    s.inverse[0] = T.float32(1) / s.sum[0]
    s.logarithm[0] = T.float32(0)
    if s.io.log != 0:
        s.logarithm[0] = T.log(s.sum[0])


def few_marked(layout: Layout, s: Any) -> tirx.PrimExpr:
    """Whether one warp may finish the row: at least k tiles are marked, all of them copied, and the sum is usable."""
    enough = T.And(s.marks[0] >= layout.k, s.marks[0] <= layout.pool.copies)
    return T.And(enough, T.Not(no_good(s.sum[0])))


@phase
def try_one_warp(layout, /, s):
    """Let one warp finish the row if it can. See `few_marked`.

    Reads: `sum`, and what `finish_by_one_warp` reads. Writes: `written`, and the outputs if that is 1. Barriers: one.
    """
    if s.t < 32:
        invert_sum(s)
        finish_by_one_warp(layout)(s)
    T.cuda.cta_sync()
    s.written[0] = s.found[WRITTEN]


def build(problem: SoftmaxTopk, decisions: Decisions) -> Program:
    """The program of a point of either template's space."""
    layout = Layout.of(problem, decisions)
    return gpu_program(problem, kernel(layout, own_of(problem)), overlapped=layout.overlap)


def finish_row(layout: Layout) -> Phase:
    """Compute the outputs from a row's survivors and its sum, by the row's first block. The phase is (s).

    Reads: `keys`, `size`, `sum`, `written`, and what its parts read. Writes: the outputs. Barriers: several.
    """
    completed, rank = complete(layout.vocab, layout.k), rank_survivors(layout)
    write_given = write_given_columns(
        layout.tiling.threads, layout.vocab, layout.ids, exponent, loop_of(layout.unroll))

    @T.inline
    def phase(s):
        # 6. and 7. Complete the survivors, and rank them.
        invert_sum(s)
        if s.written[0] == 0:
            completed(s)
            rank(s)
        # 8. Write the given columns.
        if layout.ids > 0:
            write_given(s)

    return phase


@phase
def end_of_cluster(layout, ending, /, s, io, needed):
    """The end of a row that all blocks of the cluster may have to search. `needed` is an integer in shared memory, 0 in
    each block.

    Reads, writes: as `finish_row`, `Ending.finish` and `Ending.search`.
    Barriers: those of these phases; of the cluster that of `agree`, and one that tells the others whether to search.
    """
    if s.part == 0:
        finish_row(layout)(s)
        ending.finish(io, s.row[0], s.t, T.cuda.cta_sync, needed)
        T.cuda.cta_sync()
        await_others(s)
    call_others(layout)(s, needed)
    if needed[0] != 0:
        ending.search(io, s.row[0], s.t, s.part, s.ring.data)


def kernel(layout: Layout, own: Own | None = None, ending: Ending | None = None) -> Phase:
    """The kernel's body, over the operator's arguments (see `interface.gpu_program`)."""
    threads, cluster = layout.tiling.threads, layout.tiling.cluster
    locate, await_inputs, begin = locate_row(layout), await_producer(layout), begin_pass(layout)
    stream, add, search, gather = stream_row(layout), add_up(layout), search_marked(layout), gather_survivors(layout)
    one_warp, share, settled = try_one_warp(layout), share_parts(layout), settle(layout)
    finish = finish_row(layout)
    # Blocks that may have to search the row stay until the end.
    stay = cluster > 1 and ending is not None and ending.search is not None
    end = None if ending is None else end_of_cluster(layout, ending) if stay else end_of_block(ending)
    pool_bytes = max(layout.pool.bytes, ending.pool_bytes if ending else 0)

    @T.inline
    def body(io):
        T.device_entry()
        T.attr({"tirx.launch_bounds_min_blocks_per_sm": layout.resident})
        block, part = T.meta_var(place_in_grid(io.batch, cluster))
        t = T.thread_id([threads])
        s = T.meta_var(State.alloc(layout, pool_bytes, io=io, t=t, block=block, part=part))
        # 1. Locate the row, and wait for the producer kernel.
        locate(s)
        await_inputs(s)
        if own is not None:
            of_row = T.meta_var(own(io, s.row[0]))
            s.factor[0] = of_row.scale * T.float32(LOG2_E)
        if stay:
            needed = T.alloc_shared([1], "int32")
            if t == 0:
                needed[0] = 0
        s.written[0] = 0
        s.settled[0] = ALL_AGAIN
        s.unit[0] = T.float32(LN_2)
        for attempt in T.serial(READINGS):
            # 2. Stream the row.
            begin(s, attempt)
            stream(s, attempt)
            # 3. Add up, and search the marked tiles.
            add(s)
            if layout.one_warp:
                if few_marked(layout, s):
                    one_warp(s)
                    if s.written[0] != 0:
                        break
            if layout.deferred:
                search(s)
            gather(s)
            # 4. Share the parts of a cluster.
            if cluster > 1:
                share(s)
            # 5. Settle, or read the row once more, with the row's true maximum.
            settled(s, attempt)
            if s.settled[0] == SETTLED:
                break
            T.cuda.cta_sync()
            refer_to_largest(s)
        if is_far(s.reference[0]):
            s.unit[0] = unit_of(s.reference[0], s.factor[0], of_row.scale if own is not None else io.scale)
        if stay:
            end(s, of_row, needed)
        else:
            if cluster > 1 and part != 0:
                T.thread_return()
            finish(s)
            if ending is not None:
                end(of_row, s.row[0], t, s.ring.data)
            if cluster > 1:
                await_others(s)

    return body
# fmt: on
