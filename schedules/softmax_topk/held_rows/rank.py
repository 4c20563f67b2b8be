"""The row's keys in order, and the outputs."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.phase import Phase, phase

from ...device.arithmetic import LN_2
from ...device.loops import rolled
from ...device.mbarriers import await_arrivals
from ...device.ranking import rank_at_once, rank_key
from ...device.selection import keep_selected, key_index, key_value, radix_selection
from ..finishing import complete, write_given_columns
from .cluster import gather_parts
from .space import RANKED, RANKERS, Layout
from .state import SUMS
from .sums import add_up, parts_of, sum_word, take_power


def exponent(s: Any, value: Any) -> Any:
    """The exponent of a value: (value - reference) * scale."""
    return (value - s.reference[0]) * s.factor[0] * T.float32(LN_2)


# fmt: off
@phase
def write_ranked(k, rankers, /, s):
    """The value and the index of a key that has its rank, if that is one of the k best.

    Reads: `need`, `slot`, `pivot`, `size`, `factor`, `reference`, `inverse`, `logarithm`.
    Writes: the outputs; scratch is `power`.
    Barriers: none.
    """
    if s.t % rankers == 0 and s.need[0] < s.size[0] and s.slot[0] < k:
        s.io.indices[s.row[0], s.slot[0]] = T.Cast("int64", key_index(s.pivot[0]))
        take_power(s, s.power, key_value(s.pivot[0]))
        s.io.values[s.row[0], s.slot[0]] = T.Select(
            s.io.log != 0, exponent(s, key_value(s.pivot[0])) - s.logarithm[0], s.power[0] * s.inverse[0])


def rank_all(layout: Layout) -> Phase:
    """Any number of keys, fewer than k included. The phase is (s).

    Reads, writes: as `finish_row`. Barriers: several.
    """
    threads, k = layout.block_threads, layout.k
    completed, rank, write = complete(layout.vocab, k), rank_key(threads, RANKERS), write_ranked(k, RANKERS)
    select, keep = radix_selection(threads, k, lambda keys, i: keys[i], rolled), keep_selected(threads, k, rolled)

    @T.inline
    def phase(s):
        completed(s)
        if s.size[0] > RANKED:
            select(s, s.t, s.keys, s.size[0])
            keep(s, s.t, s.size[0])
            s.size[0] = k
        for i in rolled((s.size[0] * RANKERS + (threads - 1)) // threads):
            rank(s, s.t, i)
            write(s)

    return phase


@T.inline
def invert(s):
    """What the outputs need of the sum: its inverse, or its logarithm.

    Reads: `sum`, the arguments. Writes: `inverse`, `logarithm`.
    """
    T.ptx.rcp.approx.ftz.f32(s.inverse[0], s.sum[0])
    s.logarithm[0] = T.float32(0)
    if s.io.log != 0:
        s.logarithm[0] = T.log(s.sum[0])


@phase
def finish_row(layout, /, s):
    """From a row's keys and its sum to the outputs.

    Reads: `keys`, `size`, `sum`, `reference`, `factor`, the arguments.
    Writes: the outputs, and scratch.
    Barriers: none if the keys are ranked at once, else several.
    """
    invert(s)
    if s.size[0] >= layout.k and s.size[0] <= layout.at_once:
        rank_at_once(layout.at_once, layout.rankers)(s, s.t, s.keys)
        write_ranked(layout.k, layout.rankers)(s)
    else:
        rank_all(layout)(s)
    if layout.ids > 0:
        write_given_columns(layout.block_threads, layout.vocab, layout.ids, exponent, rolled)(s)


@phase
def finish_agreed(layout, /, s):
    """As `finish_row`, where blocks have agreed on a bound, of keys that are few enough: they are ranked while the warp
    that has no vectors adds up the sum.

    Reads: `united`, or in a block alone `keys`; `size`, `sums`, `factor`, the arguments.
    Writes: the outputs, and scratch.
    Barriers: one, and one of the threads that have vectors; awaits the sums.
    """
    add = T.meta_var(add_up(0, layout.entries) if layout.cluster > 1 else add_up(1, layout.block_warps))
    # Threads that ranked nothing have nothing to write.
    s.slot[0] = layout.k
    if s.t >= layout.threads:
        if layout.cluster > 1:
            await_arrivals(s.barriers.ptr_to([SUMS]))
        add(s)
        if s.t == layout.threads:
            s.total[0] = sum_word(s.sum[0], s.reference[0])
    else:
        if layout.cluster > 1:
            gather_parts(layout)(s)
        if s.t // 32 * 32 // layout.rankers < s.size[0]:
            rank_at_once(layout.at_once, layout.rankers)(s, s.t, s.keys)
    T.cuda.cta_sync()
    s.key[0] = s.total[0]
    parts = T.meta_var(parts_of(s.key[0]))
    s.sum[0] = parts[0]
    s.reference[0] = parts[1]
    invert(s)
    write_ranked(layout.k, layout.rankers)(s)
    if layout.ids > 0:
        write_given_columns(layout.block_threads, layout.vocab, layout.ids, exponent, rolled)(s)
# fmt: on
