"""A bound that at least k elements reach, and in most rows few others: the k-th best of the tops of groups.

Elements are divided into groups, and the largest of a group is its top. k groups have a top that is no less than the
k-th best of all tops, so that k elements are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from tvm_sparse.core.template import ceildiv

from ...device.loops import rolled
from ...device.selection import FULL_WARP, order
from ...device.tops import find_kth, offer
from ...device.words import value_in
from .row import load_vector
from .space import Layout
from .state import column_of
from .words import LEAST, largest


# fmt: off
@T.inline
def find_top(layout, s):
    """`top` = the thread's largest element, of `pair`."""
    s.top[0] = value_in(layout.dtype, s.pair[0], 0)
    if layout.per_word == 2:
        T.ptx.max.NaN.f32(s.top[0], s.top[0], value_in(layout.dtype, s.pair[0], 1))


def find_tops(layout: Layout) -> Callable[..., Any]:
    """The largest element of each thread, and of each group of threads. The phase is (s).

    Reads: `raw`, or, of a staged row, `pair`, the thread's largest elements; `tops`, which come as 0.
    Writes: `top`, `tops`; scratch is `pair`, `plain`, `bits`.
    Barriers: one, at the end.
    """
    dtype, words = layout.dtype, layout.words

    @T.inline
    def find_pair(s):
        s.pair[0] = largest(dtype, [s.raw[w] for w in range(words)])

    @T.inline
    def phase(s):
        if not layout.staged:
            find_pair(s)
        # With an early bound it is known.
        if not layout.early:
            find_top(layout, s)
        order(s.top[0], s.plain, s.bits)
        offer(s, s.tops, s.t % layout.groups, s.bits[0])
        T.cuda.cta_sync()

    return phase


def find_bound(layout: Layout) -> Callable[..., Any]:
    """The k-th best of the tops. The phase is (s, tops).

    Reads: `tops`.
    Writes: `own`, `kth`, `equals`, `bound`; scratch is `need`, `slot`.
    Barriers: one, before the end.
    After: `bound` is the same in all threads, and above minus infinity.
    """

    @T.inline
    def tell(s, top):
        s.kth[0] = top
        s.equals[0] = s.slot[0] - s.need[0]

    find = find_kth(layout.groups, layout.warps, layout.k, tell)

    @T.inline
    def phase(s, tops):
        find(s, tops)
        T.cuda.cta_sync()
        s.bound[0] = T.max(s.kth[0], T.uint32(LEAST[layout.dtype]))

    return phase


def find_firsts(layout: Layout) -> Callable[..., Any]:
    """The first column of each group's top. The phase is (s).

    Reads: `raw` or `staged`; `top`, `tops`; `firsts`, which come as the number of columns.
    Writes: `firsts`; scratch is `plain`, `bits`, `column`, `vector`.
    Barriers: one, at the end.
    After: a group whose top is NaN has the number of columns still.
    """
    dtype, per_word, width, groups = layout.dtype, layout.per_word, layout.width, layout.groups
    load = load_vector(layout)

    @T.inline
    def phase(s):
        order(s.top[0], s.plain, s.bits)
        if s.bits[0] == s.tops[s.t % groups] and s.t < layout.threads:
            s.column[0] = layout.vocab
            for u in (rolled if layout.early else T.unroll)(layout.vectors):
                load(s, u)
                for e in T.unroll(width):
                    if value_in(dtype, s.vector[e // per_word], e % per_word) == s.top[0]:
                        s.column[0] = T.min(s.column[0], column_of(layout, s, u * width + e))
            offer_first(s, s.firsts, s.t % groups, s.column[0])
        T.cuda.cta_sync()

    return phase


@T.inline
def offer_first(s, firsts, group, column):
    """Lower the first column of a group's top to this one."""
    T.evaluate(T.call_extern("int32", "atomicMin", firsts.ptr_to([group]), column))


def bound_equals(layout: Layout) -> Callable[..., Any]:
    """Up to which column equals of the bound are wanted: where that of the k-th best top is, of equals the first ones
    being better. The phase is (s, tops, firsts).

    Reads: `tops`, `firsts`, `own`, which are the tops by lanes, `bound`; `last`, which comes as the number of columns.
    Writes: `last`, `until`; scratch is `need`, `column`.
    Barriers: one, before the end.
    After: `until` is the number of columns if there is no such top, as of fewer than k above minus infinity, or of NaN.
    """
    groups, warps, k = layout.groups, layout.warps, layout.k

    @T.inline
    def phase(s, tops, firsts):
        first = T.alloc_local([1], "int32")
        # Warps look at some groups each, as for the bound.
        for i in T.unroll(ceildiv(groups, warps)):
            s.column[0] = firsts[(i * warps + s.t // 32) % groups]
            s.need[0] = 0
            for j in T.unroll(groups // 32):
                first[0] = firsts[j * 32 + s.t % 32]
                s.need[0] = s.need[0] + T.Cast("int32", T.popcount(T.cuda.ballot_sync(
                    T.uint32(FULL_WARP),
                    s.own[j] > s.bound[0] or (s.own[j] == s.bound[0] and first[0] < s.column[0]))))
            if s.t % 32 == 0 and s.need[0] == k - 1 and tops[(i * warps + s.t // 32) % groups] == s.bound[0]:
                s.last[0] = s.column[0]
        T.cuda.cta_sync()
        s.until[0] = s.last[0]

    return phase
# fmt: on
